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

import jax.numpy as jnp
from safetensors.numpy import save_file

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.model import LoadedTarget, load_target
from peagle_jax.checkpoint.target_store import target_json, target_tensors


def export(target: LoadedTarget, folder: Path) -> None:
    """Writes the folder, over what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        target_tensors(target.config, target.params), folder / "model.safetensors", metadata={"format": "pt"}
    )
    settings = target_json(target.config, target.params)
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
