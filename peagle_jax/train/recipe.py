"""The recipe: everything that decides a training run, read from one YAML file."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any, Literal

from peagle_jax.train.errors import TrainError
from peagle_jax.train.places import check_path
from peagle_jax.train.ranges import check_ranges
from peagle_jax.train.yaml_file import read_yaml


@dataclasses.dataclass(frozen=True)
class DataRecipe:
    """Conversations. ``template`` holds extra arguments of the chat template.

    ``files`` are .jsonl or .jsonl.gz files, or data sets of the Hugging Face hub as
    ``hf://owner/name[:config][/split]``. ``heldout`` is the share of documents, chosen by a hash of
    their id, that is never trained on. ``limit`` reads only the first records (0: all).

    ``on_error``: a record that cannot be used stops the command ("stop"), or is counted by reason and
    skipped ("skip"), until more than a share ``max_skipped`` is. ``too_long``, for conversations
    longer than a row: "split" into pieces that are documents of their own, "cut" to the first row,
    "skip", or "stop". ``turns``: all answers of a conversation in one text ("together"), or every answer
    after its own context ("apart"), for templates that write earlier turns differently later on.
    """

    files: tuple[str, ...] = ()
    heldout: float = 0.02
    limit: int = 0
    on_error: Literal["stop", "skip"] = "stop"
    max_skipped: float = 0.05
    too_long: Literal["split", "cut", "skip", "stop"] = "split"
    turns: Literal["together", "apart"] = "together"
    template: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class FeaturesRecipe:
    """The target's states on packed rows. ``mode`` "disk" reads them from ``folder``, where the command
    `features` stored them; "online" has every training step compute them, and stores nothing.

    ``taps``, the boundaries to store, may be a superset of the head's. ``also`` names folders that
    other recipes filled for the same target; their rows are trained on too. ``dtype`` is that of the
    target and of its states.
    """

    mode: Literal["disk", "online"] = "disk"
    folder: str = "features"
    also: tuple[str, ...] = ()
    taps: tuple[int, ...] = ()
    row_length: int = 512
    batch_rows: int = 8
    shard_rows: int = 256
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


@dataclasses.dataclass(frozen=True)
class HeadRecipe:
    """The head's shape. Zero or empty means the target's own value (``taps``: vLLM's default).

    ``mask_token_id`` None picks a free id of the target's vocabulary. ``draft_vocab_size`` 0 keeps
    the whole vocabulary. ``train_embed`` has the head learn an embedding of its own, which starts as
    the target's and is saved with the head (the paper's choice; it adds the whole table to the file);
    ``train_lm_head`` off keeps the target's rows.
    """

    taps: tuple[int, ...] = ()
    num_layers: int = 4
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    draft_vocab_size: int = 0
    num_depths: int = 8
    mask_token_id: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    train_embed: bool = False
    train_lm_head: bool = True


@dataclasses.dataclass(frozen=True)
class InitRecipe:
    """Where weights start: the target's last layers, a saved head, or random.

    A saved head keeps its draft vocabulary and its mask token.
    """

    source: Literal["target", "random", "head"] = "target"
    head: str | None = None
    embedding_noise: float = 0.0


@dataclasses.dataclass(frozen=True)
class CodRecipe:
    """Conditional drop-token sampling: depth d keeps a share max(ratio**d, floor).

    ``max_anchors`` bounds the rollouts that start in one row (0: every supervised position).
    ``segments`` splits the rollouts of a row; it changes memory, never the result.
    """

    ratio: float = 0.8
    floor: float = 0.0
    max_anchors: int = 0
    segments: int = 1


@dataclasses.dataclass(frozen=True)
class OptimizerRecipe:
    """AdamW. ``steps`` 0 derives the number of steps from ``epochs``; ``clip`` 0 clips nothing.

    ``micro_rows`` and ``remat`` trade time for memory and change no result: rows a micro-batch (0: all),
    and what the reverse pass keeps of a segment (P-EAGLE) or a step (EAGLE-3): everything ("off"), the
    results of matrix products ("dots") or nothing ("full"). "auto" is "off" for a segment, "full" for a step.
    """

    learning_rate: float = 1e-4
    final_learning_rate: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: float = 0.0025
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    clip: float = 1.0
    steps: int = 0
    epochs: float = 1.0
    batch_rows: int = 8
    micro_rows: int = 0
    remat: Literal["auto", "off", "dots", "full"] = "auto"


@dataclasses.dataclass(frozen=True)
class MeshRecipe:
    """Devices along each axis of a mesh; it changes no result, and a run may go on with another one.

    The rows of a micro-batch are split over ``data`` x ``fsdp``. ``fsdp`` also splits weights, their
    moments and the target, which are put together only where they are used; ``sequence`` splits rows along
    their length. ``data`` 0 takes the devices that the others leave.
    """

    data: int = 0
    fsdp: int = 1
    sequence: int = 1


@dataclasses.dataclass(frozen=True)
class LossRecipe:
    """``kind``: KL to the target's distribution, or cross-entropy to its best token. ``depth_weights``
    scales the loss of each depth (empty: all 1). ``on_prompts`` trains on every token, not on answers
    alone: more text from the same features. Held-out figures are of answers. ``ttt_steps`` and
    ``ttt_decay`` belong to method eagle3."""

    kind: Literal["kl", "cross_entropy"] = "kl"
    depth_weights: tuple[float, ...] = ()
    on_prompts: bool = False
    ttt_steps: int = 7
    ttt_decay: float = 0.8


@dataclasses.dataclass(frozen=True)
class RunRecipe:
    """Intervals are in steps; 0 switches the action off (a final checkpoint is always kept).

    ``keep_best`` also keeps the checkpoint with the lowest held-out loss, written when it is found,
    and exports that one. ``patience`` ends a run after so many validations in a row without a lower
    loss. Every ``decode_every`` steps the target answers ``decode_prompts`` held-out prompts with the
    head's drafts, up to ``decode_tokens`` tokens each. ``tensorboard`` writes event files besides the
    JSON lines.
    """

    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    keep_best: bool = True
    validate_every: int = 250
    validate_rows: int = 64
    patience: int = 0
    decode_every: int = 0
    decode_prompts: int = 16
    decode_tokens: int = 128
    log_every: int = 10
    tensorboard: bool = True


@dataclasses.dataclass(frozen=True)
class Recipe:
    """``target`` None is the embedded default. Relative paths are relative to the working folder."""

    method: Literal["peagle", "eagle3"] = "peagle"
    target: str | None = None
    tokenizer: str | None = None
    output: str = "runs/head"
    seed: int = 0
    data: DataRecipe = DataRecipe()
    features: FeaturesRecipe = FeaturesRecipe()
    head: HeadRecipe = HeadRecipe()
    init: InitRecipe = InitRecipe()
    cod: CodRecipe = CodRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()
    mesh: MeshRecipe = MeshRecipe()
    loss: LossRecipe = LossRecipe()
    run: RunRecipe = RunRecipe()

    def __post_init__(self) -> None:
        _check(self)


def _paths(recipe: Recipe) -> dict[str, str]:
    """Everything in a recipe that may be a path, by its key."""
    single = {
        "target": recipe.target,
        "tokenizer": recipe.tokenizer,
        "output": recipe.output,
        "features.folder": recipe.features.folder,
        "init.head": recipe.init.head,
    }
    lists = {"data.files": recipe.data.files, "features.also": recipe.features.also}
    many = {f"{key}[{i}]": path for key, paths in lists.items() for i, path in enumerate(paths)}
    return {key: path for key, path in single.items() if path is not None} | many


def _check(recipe: Recipe) -> None:
    check_ranges(recipe)
    features, head, init, optimizer = recipe.features, recipe.head, recipe.init, recipe.optimizer
    micro, rows, weights = optimizer.micro_rows, optimizer.batch_rows, recipe.loss.depth_weights
    depths = head.num_depths if recipe.method == "peagle" else recipe.loss.ttt_steps
    faults = {
        "features.also names stored features, but features.mode is online; use data.files": (
            features.mode == "online" and features.also
        ),
        "optimizer.steps or optimizer.epochs must be positive; found neither": (
            not optimizer.steps and not optimizer.epochs
        ),
        f"optimizer.micro_rows ({micro}) must divide optimizer.batch_rows ({rows})": micro and rows % micro,
        "run.patience counts validations, but run.validate_every is 0": (
            recipe.run.patience and not recipe.run.validate_every
        ),
        f"loss.depth_weights needs {depths} values, one a depth; found {len(weights)}": (
            weights and len(weights) != depths
        ),
        "loss.depth_weights are all 0, so nothing would be learnt; give one depth at least a weight": (
            weights and not any(weights)
        ),
        "init.source is head, but init.head names no folder": init.source == "head" and not init.head,
        f"init.head is given, but init.source is {init.source}; set that to head, or leave this out": (
            init.source != "head" and init.head is not None
        ),
        f"features.taps {list(features.taps)} name a boundary twice; keep one": _repeats(features.taps),
        f"head.taps {list(head.taps)} name a boundary twice; keep one": _repeats(head.taps),
    }
    for message, found in faults.items():
        if found:
            raise TrainError(message)
    for key, path in _paths(recipe).items():
        check_path(key, path)


def _repeats(values: tuple[int, ...]) -> bool:
    return len(set(values)) < len(values)


def _convert(kind: Any, value: Any, where: str) -> Any:
    """A YAML value as a field of type ``kind``."""
    if isinstance(value, int) and value.bit_length() > 64:  # printing it, or a float of it, may fail
        raise TrainError(f"{where}: found a number of {value.bit_length()} bits, expected 64 at most")
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, where)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _convert(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        if value not in args:
            raise TrainError(f"{where}: found {value!r}, expected one of {', '.join(map(str, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise TrainError(f"{where}: found {value!r}, expected a list")
        return tuple(_convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise TrainError(f"{where}: found {value!r}, expected a mapping")
        _check_json(value, where)
        return value
    if kind is float and isinstance(value, str):  # YAML 1.1 reads 1e-4 as text
        try:
            return float(value)
        except ValueError:
            pass
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise TrainError(f"{where}: found {value!r}, expected {kind.__name__}")
    return value


def _check_json(value: dict, where: str) -> None:
    """YAML also knows dates, nan and mappings within themselves; a head's config.json cannot hold them."""
    odd = [key for key in value if not isinstance(key, str)]
    if odd:
        raise TrainError(f"{where}: found the key {odd[0]!r}, expected a name")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TrainError(f"{where}: found what JSON cannot hold ({error}), expected what it can") from error


def _build(cls: type, raw: Any, where: str) -> Any:
    if not isinstance(raw, dict):
        raise TrainError(f"{where}: found {raw!r}, expected a mapping")
    kinds = typing.get_type_hints(cls)
    unknown = [k for k in raw if k not in kinds]
    if unknown:
        raise TrainError(f"{where}: unknown key {unknown[0]!r}; expected one of {', '.join(kinds)}")
    prefix = "" if cls is Recipe else f"{where}."
    return cls(**{k: _convert(kinds[k], v, prefix + k) for k, v in raw.items()})


def parse_recipe(raw: dict[str, Any]) -> Recipe:
    """A recipe from plain YAML data. Raises TrainError with the dotted name of a wrong key."""
    return _build(Recipe, raw, "recipe")


def load_recipe(path: str | Path) -> Recipe:
    """Reads a recipe file. Raises TrainError: unreadable, a key that is unknown or stands twice, wrong type
    or value."""
    raw = read_yaml(path)
    return parse_recipe({} if raw is None else raw)


def recipe_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain JSON data (tuples become lists)."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, tuple) else value

    return plain(dataclasses.asdict(recipe))
