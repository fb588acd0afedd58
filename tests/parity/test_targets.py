"""Tiny random targets of every family against transformers, through a saved folder, in float32.

Every dimension differs, so that a swapped or transposed axis cannot pass.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from peagle_jax.checkpoint.model import LoadedTarget, load_target
from peagle_jax.models import stack
from peagle_jax.speculative.cache import create_cache, write

pytestmark = pytest.mark.parity
forward = jax.jit(stack.forward, static_argnames=("cfg", "taps"))

VOCAB, LAYERS, LENGTHS, WINDOW = 67, 5, (45, 28), 8
CHUNKS = [pytest.param([45], id="one pass"), pytest.param([15, 15, 15], id="three chunks over the cache")]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 700.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 900.0,
    "factor": 4.0,
    "beta_fast": 16.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}

MOE = {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "decoder_sparse_step": 1}
OSS = {"num_local_experts": 9, "num_experts_per_tok": 3, "sliding_window": WINDOW, "num_hidden_layers": 6}
OSS |= {"rope_parameters": {**YARN, "truncate": False}, "swiglu_limit": 1.5}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, linear rope, tied": ("Llama", {"rope_parameters": LINEAR, "tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 3000.0}}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3, yarn rope": ("Qwen3", {"rope_parameters": YARN}),
    "qwen3, biases": ("Qwen3", {"attention_bias": True}),
    "qwen2, sliding windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3-moe": ("Qwen3Moe", MOE),
    "qwen3-moe, normed weights": ("Qwen3Moe", MOE | {"norm_topk_prob": True}),
    "gpt-oss": ("GptOss", OSS),
}


class Pair(NamedTuple):
    """The same weights on both sides, and a right-padded batch with its outputs there."""

    ours: LoadedTarget
    tokens: np.ndarray  # (B, T)
    logits: np.ndarray  # (B, T, V)
    boundaries: list[np.ndarray]  # L + 1 of (B, T, D), the last one after the final norm


def random_model(family: str, changes: dict[str, Any]) -> Any:
    """A float32 model whose every weight, bias and norm is random."""
    config = getattr(transformers, f"{family}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.2 * noise)
            else:
                weight.copy_(noise * (0.3 if weight.ndim == 1 else weight.shape[-1] ** -0.5))
    return model


def run_reference(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    mask = np.arange(tokens.shape[1]) < np.array(LENGTHS)[:, None]
    with torch.no_grad():
        out = model(torch.tensor(tokens), attention_mask=torch.tensor(mask).long(), output_hidden_states=True)
    return out.logits.numpy(), [state.numpy() for state in out.hidden_states]


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def pair(request, tmp_path_factory) -> Pair:
    family, changes = CASES[request.param]
    model = random_model(family, changes)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    write_tokenizer(folder)
    tokens = np.random.default_rng(3).integers(0, VOCAB, (len(LENGTHS), max(LENGTHS)))
    logits, boundaries = run_reference(model, tokens)
    return Pair(load_target(str(folder)), tokens, logits, boundaries)


def write_tokenizer(folder: Path) -> None:
    """Any tokenizer: a target without one is not a target."""
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0").save_pretrained(folder)


def causal(batch: int, rows: int) -> jnp.ndarray:
    return jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool)), (batch, rows, rows))


def run_ours(target: LoadedTarget, tokens: np.ndarray, chunks: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits (B, T, V) and every boundary (B, T, L+1, D), in steps of ``chunks`` tokens over a cache."""
    cfg, params = target.config, target.params
    batch = tokens.shape[0]
    block = cfg.block
    rings = tuple(w + max(chunks) if w else 0 for w in cfg.layer_windows[: cfg.cycle]) if cfg.windows else ()
    shape = (cfg.num_layers, batch, block.num_kv_heads, 64, block.head_dim)
    cache = create_cache(*shape, jnp.dtype("float32"), params.is_stacked, rings)
    logits, taps, start = [], [], 0
    for rows in chunks:
        step = jnp.array(tokens[:, start : start + rows])
        positions = jnp.broadcast_to(jnp.arange(start, start + rows), (batch, rows))
        lengths = jnp.full((batch,), start)
        every = tuple(range(cfg.num_layers + 1))
        out = forward(
            params, cfg, step, positions, cache.k, cache.v, lengths, causal(batch, rows), taps=every
        )
        cache = write(cache, out.k, out.v, lengths, out.hidden)
        logits.append(stack.logits(params, cfg, out.hidden))
        taps.append(out.features.reshape(batch, rows, cfg.num_layers + 1, -1))
        start += rows
    assert start == tokens.shape[1]
    return np.concatenate(logits, 1), np.concatenate(taps, 1)


def assert_same_where_real(ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> None:
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(ours[row, :length], theirs[row, :length], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_logits_of_a_right_padded_batch_equal_transformers(pair: Pair, chunks: list[int]):
    logits, _ = run_ours(pair.ours, pair.tokens, chunks)
    assert np.abs(pair.logits).max() > 1
    assert_same_where_real(logits, pair.logits, 1e-4)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_taps_equal_hidden_states_at_every_boundary(pair: Pair, chunks: list[int]):
    _, taps = run_ours(pair.ours, pair.tokens, chunks)
    count = pair.ours.config.num_layers
    assert len(pair.boundaries) == count + 1
    for boundary in range(count):
        assert_same_where_real(taps[:, :, boundary], pair.boundaries[boundary], 1e-5)
    last = stack.final_hidden(pair.ours.params, pair.ours.config, jnp.array(taps[:, :, count]))
    assert_same_where_real(np.asarray(last), pair.boundaries[count], 1e-5)


def test_a_stacked_target_gives_the_same_as_an_unrolled_one(pair: Pair):
    cfg = pair.ours.config
    ours = LoadedTarget(cfg, stack.stack_layers(pair.ours.params, cfg.cycle), None, "", {}, "")
    logits, taps = run_ours(ours, pair.tokens, [15, 15, 15])
    assert_same_where_real(logits, pair.logits, 1e-4)
    last = cfg.num_layers - 1
    assert_same_where_real(taps[:, :, last], pair.boundaries[last], 1e-5)


def test_sharded_weights_and_the_older_config_keys_load_alike(tmp_path):
    model = random_model("Llama", {"rope_parameters": LLAMA3})
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    write_tokenizer(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    rope = dict(config.pop("rope_parameters"))
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    file.write_text(json.dumps(config))
    tokens = np.random.default_rng(4).integers(0, VOCAB, (len(LENGTHS), max(LENGTHS)))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected, _ = run_reference(reference, tokens)
    logits, _ = run_ours(load_target(str(tmp_path)), tokens, [45])
    assert_same_where_real(logits, expected, 1e-4)
