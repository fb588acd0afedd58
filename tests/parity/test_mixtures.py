"""Routers and packed experts against transformers, bit for bit where no sum is involved."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from peagle_jax.checkpoint.model import load_target
from peagle_jax.config import MoeConfig
from peagle_jax.layers.moe import route
from peagle_jax.layers.mxfp4 import Mxfp4, dequantize
from tests.parity.test_targets import (
    LENGTHS,
    MOE,
    OSS,
    SIZES,
    VOCAB,
    assert_same_where_real,
    random_model,
    run_ours,
    run_reference,
    write_tokenizer,
)

pytestmark = pytest.mark.parity
TOKENS = np.random.default_rng(3).integers(0, VOCAB, (len(LENGTHS), max(LENGTHS)))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Qwen3Moe", MOE), ("Qwen3Moe", MOE | {"norm_topk_prob": True}), ("GptOss", OSS)],
    ids=["shares of all", "shares of the chosen", "gpt-oss"],
)
def test_every_router_chooses_as_transformers_does(family, changes):
    model = random_model(family, changes)
    seen = []
    for layer in model.model.layers:
        router = layer.mlp.gate if family == "Qwen3Moe" else layer.mlp.router
        router.register_forward_hook(lambda module, inputs, out: seen.append(out))
    run_reference(model, TOKENS)
    cfg = MoeConfig(9, 3, changes.get("norm_topk_prob", family == "GptOss"))
    assert len(seen) == model.config.num_hidden_layers
    for logits, weights, chosen in seen:
        ours, shares = route(jnp.array(logits.numpy()), cfg)
        order = chosen.argsort(-1)
        np.testing.assert_array_equal(ours, chosen.gather(-1, order))
        np.testing.assert_allclose(shares, weights.gather(-1, order), rtol=1e-6)


def packed(rng: np.random.Generator, count: int, out: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    blocks = rng.integers(0, 256, (count, out, width // 32, 16), dtype=np.uint8)
    return blocks, rng.integers(119, 125, (count, out, width // 32), dtype=np.uint8)


def widened(blocks: np.ndarray, scales: np.ndarray, dtype=torch.bfloat16) -> torch.Tensor:
    """transformers' dequantisation, (E, in, out)."""
    return convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=dtype)


def test_packed_weights_widen_bit_for_bit():
    """Every pair of values with every scale that bfloat16 holds."""
    values = np.tile(np.arange(256, dtype=np.uint8), (250, 1)).reshape(1, 250, 16, 16)
    scales = np.broadcast_to(np.arange(3, 253, dtype=np.uint8)[None, :, None], (1, 250, 16)).copy()
    ours = dequantize(Mxfp4(jnp.array(values.reshape(1, 250, 256)), jnp.array(scales), jnp.bfloat16))
    theirs = widened(values, scales).float().numpy().swapaxes(1, 2)
    np.testing.assert_array_equal(np.asarray(ours, np.float32), theirs)


def test_a_packed_checkpoint_gives_transformers_logits(tmp_path):
    changes = OSS | {"intermediate_size": 32, "hidden_size": 64, "num_hidden_layers": 2}
    model = random_model("GptOss", changes)
    rng, experts, d, f = np.random.default_rng(5), OSS["num_local_experts"], 64, 32
    assert SIZES["hidden_size"] != d
    stored = {}
    for i, layer in enumerate(model.model.layers):
        for name, out, width in (("gate_up_proj", 2 * f, d), ("down_proj", d, f)):
            blocks, scales = packed(rng, experts, out, width)
            getattr(layer.mlp.experts, name).data.copy_(widened(blocks, scales))
            prefix = f"model.layers.{i}.mlp.experts.{name}"
            stored |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales, prefix: None}
    logits, _ = run_reference(model, TOKENS)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    plain, _ = run_ours(load_target(str(tmp_path)), TOKENS, [45])
    tensors = load_file(tmp_path / "model.safetensors") | stored
    save_file({k: v for k, v in tensors.items() if v is not None}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = load_target(str(tmp_path))
    assert isinstance(ours.params.layers[0].experts.up, Mxfp4)
    found, _ = run_ours(ours, TOKENS, [45])
    assert_same_where_real(plain, logits, 1e-4)
    assert_same_where_real(found, logits, 1e-4)
