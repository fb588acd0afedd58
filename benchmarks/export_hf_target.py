"""Writes a target as a Hugging Face folder (bfloat16), for peers that cannot read its GGUF file.

    python benchmarks/export_hf_target.py OUT [--model MODEL]

OUT gets config.json, model.safetensors, the tokenizer with its chat template, and
generation_config.json. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.head import rope_section
from peagle_jax.checkpoint.model import LoadedTarget, load_target
from peagle_jax.config import TargetConfig
from peagle_jax.layers.block import BlockParams
from peagle_jax.models.family import LAYER_NAMES, MODEL_NAMES
from peagle_jax.models.registry import by_model_type
from peagle_jax.models.stack import TargetParams, unstack_layers


def layers_of(params: TargetParams) -> tuple[BlockParams, ...]:
    layers = unstack_layers(params).layers
    assert isinstance(layers, tuple)
    return layers


def tensors(params: TargetParams) -> dict[str, np.ndarray]:
    """Every weight under its Hugging Face name."""
    out: dict[str, np.ndarray] = {}
    for field, names in MODEL_NAMES.items():
        array = getattr(params, field)
        if array is not None:
            out[names.hf] = np.asarray(array)
    for index, layer in enumerate(layers_of(params)):
        for field, names in LAYER_NAMES.items():
            array = getattr(layer, field)
            if array is not None:
                out[f"model.layers.{index}.{names.hf}"] = np.asarray(array)
    return {name: np.ascontiguousarray(value) for name, value in out.items()}


def config(cfg: TargetConfig, params: TargetParams) -> dict[str, Any]:
    """config.json of the target."""
    family, block = by_model_type(cfg.family), cfg.block
    first = layers_of(params)[0]
    out: dict[str, Any] = {
        "architectures": [family.architectures[0]],
        "model_type": family.model_types[0],
        "hidden_act": "silu",
        "hidden_size": block.hidden_size,
        "intermediate_size": block.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "head_dim": block.head_dim,
        "rms_norm_eps": block.rms_norm_eps,
        "rope_theta": block.rope.theta,
        "rope_scaling": rope_section(block.rope),
        "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.max_position,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": list(cfg.eos_token_ids),
        "torch_dtype": "bfloat16",
    }
    if cfg.family != "qwen2":
        out["attention_bias"] = first.bq is not None
    if cfg.family == "llama":
        out["mlp_bias"] = first.b_gate is not None
    return out


def export(target: LoadedTarget, folder: Path) -> None:
    """Writes the folder, over what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(target.params), folder / "model.safetensors", metadata={"format": "pt"})
    settings = config(target.config, target.params)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    sampling = target.generation | {"eos_token_id": settings["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(sampling, indent=2) + "\n")
    target.tokenizer.save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--model", help="a folder, GGUF file or hub id (default: the embedded model)")
    args = parser.parse_args()
    try:
        target = load_target(args.model, dtype=jnp.bfloat16)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    export(target, args.out)
    print(f"{target.name}: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
