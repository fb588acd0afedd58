"""A tiny random target that speaks bytes, with heads for it; in memory and as checkpoint folders."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from peagle_jax.checkpoint.head import save_head
from peagle_jax.config import DrafterConfig
from tests.checkpoint.files import target_json, target_tensors, write_folder
from tests.serve.doubles import END, TOKENIZER, byte_tokenizer
from tests.tiny import TARGET, head_config, head_params, target_params

CONFIG = dataclasses.replace(
    TARGET,
    vocab_size=len(TOKENIZER),
    num_layers=2,
    max_position=700,
    eos_token_ids=(END,),
)
PARAMS = target_params(CONFIG)


def tiny_head(method: str = "peagle", **changes) -> DrafterConfig:
    """A head of one layer, trained for 3 tokens if it drafts in parallel."""
    depths = {"num_depths": 3} if method == "peagle" else {}
    sizes = {"num_layers": 1, "vocab_size": CONFIG.vocab_size, "draft_vocab_size": 90, "taps": (0, 1, 2)}
    return head_config(method, **(sizes | depths | changes))


def write_model(folder: Path) -> Path:
    """The target as a Hugging Face folder."""
    write_folder(folder, target_json(CONFIG), target_tensors(PARAMS))
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_head(folder: Path, method: str = "peagle") -> Path:
    """A head as vLLM's layout."""
    cfg = tiny_head(method)
    save_head(folder, cfg, head_params(cfg), target=CONFIG, share_embed=False)
    return folder
