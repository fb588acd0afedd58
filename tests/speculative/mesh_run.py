"""python -m tests.speculative.mesh_run METHOD MESH...

Requests of every kind, decoded with a tiny head (METHOD peagle, eagle3 or none; mixture is peagle, of a
target with experts, sinks and windows) on one device and on each MESH (such as 2x4 for data and tensor) of
8 devices that XLA makes out of the host; 2x4whole keeps the head whole, 2x4tree verifies trees of two
widths. Prints JSON: what each of them said.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.checkpoint.quantization import block_weight
from peagle_jax.config import BlockConfig, MoeConfig, RopeConfig, SpecConfig
from peagle_jax.layers.quantized import QuantizedWeight, quantize
from peagle_jax.models.stack import stack_layers
from peagle_jax.speculative.decoder import Decoder, Request
from peagle_jax.speculative.placement import Placement
from peagle_jax.speculative.sampling import SamplingParams
from tests.tiny import GPT_OSS, TARGET, head_config, head_params, target_params

# 8 divides all that is split, and kv heads are 2 and 4: with 8 devices each lies on several.
VOCAB, DRAFTED, K = 216, 96, 3
CONFIG = dataclasses.replace(
    TARGET,
    block=BlockConfig(24, 40, 8, 2, 6, 1e-5, RopeConfig(theta=1000.0)),
    vocab_size=VOCAB,
    num_layers=3,
    eos_token_ids=(VOCAB - 1,),
)
MIXTURE = dataclasses.replace(
    GPT_OSS,
    block=dataclasses.replace(CONFIG.block, moe=MoeConfig(8, 3), intermediate_size=10, swiglu_limit=1.5),
    vocab_size=VOCAB,
    num_layers=4,
    eos_token_ids=(VOCAB - 1,),
    windows=(8, 0) * 2,
)
"""8 experts lie on 8 devices whole, where no part of one would: 10 does not divide."""

QUANTISED = dataclasses.replace(
    CONFIG, block=BlockConfig(64, 512, 8, 2, 32, 1e-5, RopeConfig(theta=1000.0)), num_layers=2
)
"""Of inputs whose groups 4 devices share evenly."""

HEAD_BLOCK = BlockConfig(10, 48, 16, 4, 4, 1e-5, RopeConfig(theta=500.0))
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=7),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, seed=2**40 + 3),
    SamplingParams(temperature=0.8, seed=3, presence_penalty=0.6, repetition_penalty=1.2, logprobs=3),
    SamplingParams(logit_bias=((5, 4.0), (90, -9.0)), allowed_token_ids=tuple(range(0, VOCAB, 3))),
]
REQUESTS = [
    Request([3, 1, 4, 1, 5, 9, 2, 6, 5, 3 + i], SAMPLINGS[i % len(SAMPLINGS)], 12 + i) for i in range(8)
]


def quantised(kind: str, cfg=QUANTISED):
    """Stacked weights in int8 (of tied tables), int4, or a type of GGUF's."""
    params = target_params(cfg)

    def to(w: jax.Array) -> QuantizedWeight:
        if kind in ("int8", "int4"):
            return quantize(w, kind)
        data = gguf.quants.quantize(np.asarray(w), gguf.GGMLQuantizationType[kind])
        found = block_weight(data, kind, w.shape, jnp.dtype(jnp.float32))
        assert found is not None
        return jax.tree.map(jnp.asarray, found)

    layers = jax.tree.map(lambda w: to(w) if w.ndim == 2 else w, params.layers)
    if kind == "int8":
        return stack_layers(params.replace(layers=layers, embed=to(params.embed), lm_head=None))
    return stack_layers(params.replace(layers=layers, lm_head=to(params.lm_head)))


def config_of(method: str):
    depths = 8 if method == "peagle" else 1
    return head_config(
        method,
        num_layers=2 if method == "peagle" else 1,
        block=HEAD_BLOCK,
        vocab_size=VOCAB,
        draft_vocab=DRAFTED,
        target_hidden_size=24,
        taps=(0, 1, 3),
        num_depths=depths,
        mask_token_id=7 if method == "peagle" else None,
    )


def decoder(
    method: str,
    data: int,
    tensor: int,
    draft_tensor: int | None = None,
    int8_cache: bool = False,
    quantization: str | None = None,
    ffn: int = QUANTISED.block.intermediate_size,
    tree: bool = False,
) -> Decoder:
    """Of 8 slots on all replicas together; with a ``quantization`` of a target of that ``ffn``."""
    target, cfg = MIXTURE if method == "mixture" else CONFIG, None
    method = "peagle" if method == "mixture" else method
    if quantization is None:
        params = stack_layers(target_params(target), target.cycle)
    else:
        block = dataclasses.replace(QUANTISED.block, intermediate_size=ffn)
        target = dataclasses.replace(QUANTISED, block=block)
        params = quantised(quantization, target)
    if method != "none":
        cfg = config_of(method)
        taps = (0, 1, target.num_layers)
        cfg = dataclasses.replace(cfg, target_hidden_size=target.hidden_size, taps=taps)
    spec = SpecConfig(K, method) if cfg else SpecConfig()
    if tree:
        spec = dataclasses.replace(spec, num_speculative_nodes=9, verify_widths=(4,))
    return Decoder(
        target,
        params,
        cfg,
        cfg and head_params(cfg),
        spec,
        max_model_len=64,
        prefill_chunk=16,
        batch=8 // data,
        widths=(8 // data,),
        placement=Placement.on(jax.devices()[: data * tensor], tensor, None, draft_tensor),
        int8_cache=int8_cache,
    )


def said(d: Decoder) -> list[dict]:
    """Tokens and log-probabilities of each request."""
    out = [{"tokens": [], "logprobs": []} for _ in REQUESTS]
    for results in d.run(REQUESTS):
        for mine, result in zip(out, results, strict=True):
            if result is not None:
                mine["tokens"] += result.tokens
                mine["logprobs"] += [[x.logprob, x.rank, x.top] for x in result.logprobs or ()]
    return out


def main(method: str, meshes: list[str]) -> None:
    assert jax.device_count() == 8
    found = {"1": said(decoder(method, 1, 1))}
    for mesh in meshes:
        data, tensor = map(int, mesh.removesuffix("whole").removesuffix("tree").split("x"))
        whole, tree = 1 if mesh.endswith("whole") else None, mesh.endswith("tree")
        found[mesh] = said(decoder(method, data, tensor, whole, tree=tree))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
