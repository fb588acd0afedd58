import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import ConfigError, SpecConfig
from peagle_jax.layers.attention import packed_attention
from peagle_jax.models import stack
from peagle_jax.speculative import sizes
from peagle_jax.speculative.decoder import Decoder
from tests.tiny import GPT_OSS, TARGET, head_config, head_params, target_params

CFG = head_config(num_layers=1)


def make(head):
    spec = SpecConfig(3, "peagle") if head is not None else SpecConfig()
    return Decoder(TARGET, target_params(), CFG, head, spec, max_model_len=40, prefill_chunk=8)


def test_a_replaced_head_drafts_at_once_without_another_compilation():
    first, second = head_params(CFG, 1), head_params(CFG, 2)
    decoder = make(first)
    before = list(decoder.generate([5, 6, 7], max_tokens=20))
    compiled = decoder.compilations
    decoder.replace_head(second)
    after = list(decoder.generate([5, 6, 7], max_tokens=20))
    assert decoder.compilations == compiled
    assert after == list(make(second).generate([5, 6, 7], max_tokens=20))
    texts = [[t for r in results for t in r.tokens] for results in (before, after)]
    assert texts[0] == texts[1]  # the text is the target's, whatever the head


@pytest.mark.parametrize("change", ["shape", "dtype", "missing"])
def test_weights_of_another_head_are_refused(change):
    head = head_params(CFG)
    other = {
        "shape": lambda: head.replace(fc=head.fc[:5]),
        "dtype": lambda: jax.tree.map(lambda w: w.astype("bfloat16") if w.ndim > 1 else w, head),
        "missing": lambda: head.replace(draft_to_target=None),
    }[change]()
    with pytest.raises(ValueError, match="not of this decoder's head"):
        make(head).replace_head(other)


def test_a_decoder_without_a_head_takes_none():
    with pytest.raises(ValueError, match="not of this decoder's head"):
        make(None).replace_head(head_params(CFG))


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_as_many_drafts_as_the_context_has_tokens_are_refused(method):
    cfg = head_config(method, num_layers=1)
    with pytest.raises(
        ConfigError, match="num_speculative_tokens is 8; expected less than the context of 8 tokens"
    ):
        Decoder(TARGET, target_params(), cfg, head_params(cfg), SpecConfig(8, method), max_model_len=8)


@pytest.mark.parametrize("form", ["unrolled", "scanned"])
def test_windows_rings_and_experts_decode_what_whole_sequences_say(monkeypatch, form):
    """Longer than the ring, in chunks, plain, with a chain and with a tree: the same tokens, and those of one
    pass."""
    monkeypatch.setattr(sizes, "GOES_PAST", 0)
    head, params = head_config(num_layers=1), target_params(GPT_OSS)
    if form == "scanned":
        params = stack.stack_layers(params, GPT_OSS.cycle)
    prompt, texts = [int(t) for t in np.random.default_rng(1).integers(0, 50, 150)], []
    tree = SpecConfig(3, "peagle", num_speculative_nodes=11)
    for spec in (SpecConfig(), SpecConfig(3, "peagle"), tree):
        options = dict(max_model_len=250, prefill_chunk=32)
        decoder = Decoder(GPT_OSS, params, head, head_params(head), spec, **options)
        assert decoder.sizes.rings == (128, 0)
        texts.append([t for r in decoder.generate(prompt, max_tokens=60) for t in r.tokens])
    whole = jnp.array([prompt + texts[0]])
    ids = jnp.zeros_like(whole)

    def attend(q, k, v, **layer):
        return packed_attention(q, k, v, ids, **layer)

    out = stack.forward_packed(params, GPT_OSS, whole, jnp.arange(whole.shape[1])[None], attend)
    logits = np.asarray(stack.logits(params, GPT_OSS, out.hidden[0, 149:-1]))
    assert texts[0] == texts[1] == texts[2] == logits.argmax(-1).tolist()
