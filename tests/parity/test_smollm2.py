"""The embedded default model itself: our GGUF reader and stack against transformers' and torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from peagle_jax.checkpoint.model import LoadedTarget, load_target
from peagle_jax.layers.attention import packed_attention
from peagle_jax.models import stack

pytestmark = pytest.mark.parity

TEXTS = {
    "prose": "The quick brown fox jumps over the lazy dog. It wasn't the dog's fault!",
    "code": "def f(x: int) -> str:\n    return f'{x:>08d}'  # 3 spaces ->   <-\n\n\tif a[i]!=b**2: pass\n",
    "digits": "Pi is 3.14159265358979, 2^31 = 2147483648, and 007 comes before 1,000,000.",
    "unicode": "naïve café — Ελληνικά, 日本語のテキスト, العربية, 🦊🚀 e\u0301 \u200b½",
    "spaces": "  leading,   inner and trailing   \n\n\n  ",
    "special": "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
}
CHAT = [
    {"role": "user", "content": "Name three prime numbers above 100."},
    {"role": "assistant", "content": "101, 103 and 107."},
    {"role": "user", "content": "And how do you check one in Python? Ünïcode too: ß."},
]


@pytest.fixture(scope="module")
def ours() -> LoadedTarget:
    return load_target(None)


@pytest.fixture(scope="module")
def place(ours) -> tuple[Path, str]:
    file = Path(ours.source)
    return file.parent, file.name


@pytest.fixture(scope="module")
def their_tokenizer(place) -> Any:
    folder, name = place
    return transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)


def test_logits_equal_transformers_on_a_64_token_prompt(ours, place, their_tokenizer):
    folder, name = place
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    text = their_tokenizer.apply_chat_template(CHAT, tokenize=False) + TEXTS["code"] + TEXTS["digits"]
    ids = np.array([their_tokenizer(text)["input_ids"][:64]])
    assert ids.shape == (1, 64)
    with torch.no_grad():
        out = theirs.eval()(torch.tensor(ids), output_hidden_states=True)

    @jax.jit
    def run(params, tokens):
        def attend(q, k, v):
            return packed_attention(q, k, v, jnp.zeros_like(tokens))

        positions = jnp.arange(64)[None]
        result = stack.forward_packed(params, ours.config, tokens, positions, attend, taps=(2, 15, 27, 30))
        return stack.logits(params, ours.config, result.hidden), result.features

    logits, features = run(ours.params, jnp.array(ids))
    expected = out.logits.numpy()
    scale = np.abs(expected).max()
    assert scale > 5
    np.testing.assert_allclose(logits / scale, expected / scale, atol=1e-4)
    assert (np.argmax(logits, -1) == np.argmax(expected, -1)).mean() > 0.98
    for got, boundary in zip(np.split(np.asarray(features), 4, -1)[:3], (2, 15, 27), strict=True):
        want = out.hidden_states[boundary].numpy()
        # A few channels of the residual stream reach the hundreds: compare against the row's size.
        np.testing.assert_allclose(got / np.abs(want).max(), want / np.abs(want).max(), atol=1e-4)


@pytest.mark.parametrize("text", TEXTS.values(), ids=list(TEXTS))
def test_tokenizers_agree_and_decode_back(ours, their_tokenizer, text):
    mine, theirs = (t(text)["input_ids"] for t in (ours.tokenizer, their_tokenizer))
    assert mine == theirs
    assert ours.tokenizer.decode(mine) == their_tokenizer.decode(theirs) == text


def test_chat_templates_agree(ours, their_tokenizer):
    for more in (False, True):
        mine, theirs = (
            t.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=more)
            for t in (ours.tokenizer, their_tokenizer)
        )
        assert mine == theirs
        assert mine.endswith("<|im_start|>assistant\n") == more
        assert ours.tokenizer(mine)["input_ids"] == their_tokenizer(theirs)["input_ids"]


def test_special_tokens_agree(ours, their_tokenizer):
    for name in ("bos_token_id", "eos_token_id"):
        assert getattr(ours.tokenizer, name) == getattr(their_tokenizer, name)
    assert ours.tokenizer.eos_token_id in ours.config.eos_token_ids
    assert len(ours.tokenizer) == ours.config.vocab_size
