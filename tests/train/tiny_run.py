"""A tiny target with a word tokenizer, conversations, and recipes that run in a second."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle_jax.checkpoint.model import LoadedTarget
from peagle_jax.layers.attention import packed_attention
from peagle_jax.models import stack
from peagle_jax.train.recipe import Recipe, parse_recipe
from peagle_jax.train.tokens import ConversationEncoder
from tests.tiny import TARGET, VOCAB, target_params

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
START, SPARE, END = 50, 51, 52


def tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Words w0..w46 and the three roles; ids 50 and 52 open and close a turn, 51 is never written."""
    words = {f"w{i}": i for i in range(47)} | {"system": 47, "user": 48, "assistant": 49}
    words |= {"<|im_start|>": START, "<|spare|>": SPARE, "<|im_end|>": END}
    assert len(words) == VOCAB
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|spare|>"],
    )
    wrapped.chat_template = template
    return wrapped


def target(template: str = CHATML, seed: int = 0) -> LoadedTarget:
    return LoadedTarget(TARGET, target_params(seed=seed), tokenizer(template), "tiny", {}, "memory")


def conversations(count: int, seed: int = 0, turns: int = 1) -> list[dict]:
    rng = np.random.default_rng(seed)

    def words(low: int, high: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(0, 40, rng.integers(low, high)))

    return [
        {
            "id": f"c{i}",
            "finish": "stop",
            "messages": [
                {"role": role, "content": words(*span)}
                for _ in range(turns)
                for role, span in (("user", (1, 4)), ("assistant", (5, 14)))
            ],
        }
        for i in range(count)
    ]


def written_by_target(records: list[dict], loaded: LoadedTarget, seed: int = 0) -> list[dict]:
    """The records (one turn each) with answers of the same lengths, sampled from the target's words."""
    encoder = ConversationEncoder(loaded.tokenizer)
    prompts = [encoder.prompt_ids(r["messages"][:1]) for r in records]
    counts = [len(r["messages"][1]["content"].split()) for r in records]
    rows, width = len(records), max(len(p) + c for p, c in zip(prompts, counts, strict=True))
    tokens = np.zeros((rows, width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    ends = np.array([len(p) for p in prompts])
    positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
    one_document = jnp.zeros((rows, width), jnp.int32)

    @jax.jit
    def sample(tokens, ends, key):
        def attend(q, k, v):
            return packed_attention(q, k, v, one_document)

        out = stack.forward_packed(loaded.params, TARGET, tokens, positions, attend)
        last = jnp.take_along_axis(out.hidden, (ends - 1)[:, None, None], 1)[:, 0]
        return jax.random.categorical(key, stack.logits(loaded.params, TARGET, last)[:, :47])

    for step in range(max(counts)):
        found = np.asarray(sample(tokens, ends, jax.random.key(seed + step)))
        for i in range(rows):
            if step < counts[i]:
                tokens[i, ends[i]] = found[i]
                ends[i] += 1
    return [
        {
            **r,
            "messages": [
                r["messages"][0],
                {"role": "assistant", "content": " ".join(f"w{t}" for t in row[len(p) : len(p) + c])},
            ],
        }
        for r, row, p, c in zip(records, tokens, prompts, counts, strict=True)
    ]


def write_data(path: Path, records: list[dict]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def recipe(folder: Path, **changes) -> Recipe:
    """A recipe over ``folder``; ``changes`` are sections that are merged into it."""
    raw = {
        "output": str(folder / "out"),
        "data": {"files": [str(folder / "data.jsonl")], "heldout": 0.1},
        "features": {
            "folder": str(folder / "features"),
            "taps": [1, 3, 4, 5],
            "row_length": 32,
            "batch_rows": 3,
            "shard_rows": 7,
            "dtype": "float32",
        },
        "head": {"taps": [1, 3, 5], "num_layers": 1, "num_depths": 3, "draft_vocab_size": 47},
        "cod": {"ratio": 0.9},
        "optimizer": {"learning_rate": 3e-3, "steps": 8, "batch_rows": 3, "schedule": "constant"},
        "run": {"validate_every": 4, "validate_rows": 4, "checkpoint_every": 4, "log_every": 1},
    }
    for section, value in changes.items():
        raw[section] = {**raw.get(section, {}), **value} if isinstance(value, dict) else value
    return parse_recipe(raw)
