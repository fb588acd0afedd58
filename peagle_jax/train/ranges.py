"""Where every number of a recipe may lie."""

from __future__ import annotations

import operator
from typing import Any

from peagle_jax.train.errors import TrainError

COUNT = "[1, 2147483647]"
COUNT_OR_NONE = "[0, 2147483647]"
DEPTH = "[1, 1024]"
AT_ONCE = "[1, 65536]"  # rows, parts of a row, or devices
SEED = "[0, 4294967295]"
FACTOR = "[0, 1e+30]"  # what float32 still squares
POSITIVE = "[1e-30, 1e+30]"

RANGES = {
    "seed": SEED,
    "data.heldout": "[0, 1)",
    "data.limit": COUNT_OR_NONE,
    "data.max_skipped": "[0, 1]",
    "features.taps": COUNT_OR_NONE,
    "features.row_length": "[4, 2147483647]",
    "features.batch_rows": AT_ONCE,
    "features.shard_rows": COUNT,
    "head.taps": COUNT_OR_NONE,
    "head.num_layers": DEPTH,
    "head.intermediate_size": COUNT_OR_NONE,
    "head.num_heads": COUNT_OR_NONE,
    "head.num_kv_heads": COUNT_OR_NONE,
    "head.head_dim": COUNT_OR_NONE,
    "head.draft_vocab_size": COUNT_OR_NONE,
    "head.num_depths": DEPTH,
    "head.mask_token_id": COUNT_OR_NONE,
    "init.embedding_noise": FACTOR,
    "cod.ratio": "(0, 1]",
    "cod.floor": "[0, 1]",
    "cod.max_anchors": COUNT_OR_NONE,
    "cod.segments": AT_ONCE,
    "optimizer.learning_rate": POSITIVE,
    "optimizer.final_learning_rate": FACTOR,
    "optimizer.beta1": "[0, 1)",
    "optimizer.beta2": "[0, 1)",
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": FACTOR,
    "optimizer.warmup": "[0, 1]",
    "optimizer.clip": FACTOR,
    "optimizer.steps": COUNT_OR_NONE,
    "optimizer.epochs": "[0, 10000]",
    "optimizer.batch_rows": AT_ONCE,
    "optimizer.micro_rows": COUNT_OR_NONE,
    "mesh.data": "[0, 65536]",
    "mesh.fsdp": AT_ONCE,
    "mesh.sequence": AT_ONCE,
    "loss.depth_weights": FACTOR,
    "loss.ttt_steps": DEPTH,
    "loss.ttt_decay": "(0, 1]",
    "run.checkpoint_every": COUNT_OR_NONE,
    "run.keep_checkpoints": COUNT,
    "run.validate_every": COUNT_OR_NONE,
    "run.validate_rows": COUNT_OR_NONE,
    "run.patience": COUNT_OR_NONE,
    "run.decode_every": COUNT_OR_NONE,
    "run.decode_prompts": COUNT,
    "run.decode_tokens": COUNT,
    "run.log_every": COUNT,
}


def ends(interval: str) -> tuple[float, float]:
    """The two numbers of an interval such as "(0, 1]"."""
    low, high = interval[1:-1].split(",")
    return float(low), float(high)


def check_number(name: str, value: float, interval: str) -> None:
    """Raises TrainError unless ``value`` lies in ``interval``; round brackets leave an end out, and nan
    lies nowhere."""
    low, high = ends(interval)
    above = value > low if interval[0] == "(" else value >= low
    below = value < high if interval[-1] == ")" else value <= high
    if not (above and below):
        raise TrainError(f"{name} must lie in {interval}, found {value}")


def check_ranges(recipe: Any) -> None:
    """Raises TrainError for the first number of a Recipe that is out of its range."""
    for name, interval in RANGES.items():
        value = operator.attrgetter(name)(recipe)
        if isinstance(value, tuple):
            for i, item in enumerate(value):
                check_number(f"{name}[{i}]", item, interval)
        elif value is not None:
            check_number(name, value, interval)
