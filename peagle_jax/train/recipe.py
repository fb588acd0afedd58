"""The recipe: everything that decides a training run, read from one YAML file."""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, Literal

import yaml

MOST_EPOCHS = 10_000


class TrainError(ValueError):
    """A recipe, data set or run that cannot be used; the message is one line."""


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
    """AdamW. ``steps`` 0 derives the number of steps from ``epochs``.

    ``micro_rows`` and ``remat`` trade time for memory and change no result: rows a micro-batch (0: all),
    and what the reverse pass keeps of a segment (P-EAGLE) or a step (EAGLE-3): everything ("off"), the
    results of matrix products ("dots") or nothing ("full"). "auto" is "off" where there is one segment.
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
    loss: LossRecipe = LossRecipe()
    run: RunRecipe = RunRecipe()

    def __post_init__(self) -> None:
        _check(self)


def _positive(recipe: Recipe, *names: str) -> None:
    for name in names:
        section, key = name.split(".")
        value = getattr(getattr(recipe, section), key)
        if value <= 0:
            raise TrainError(f"{name} must be positive, found {value}")


def _check(recipe: Recipe) -> None:
    _positive(recipe, "features.row_length", "features.batch_rows", "features.shard_rows", "head.num_layers")
    _positive(recipe, "head.num_depths", "cod.segments", "optimizer.learning_rate", "optimizer.batch_rows")
    _positive(recipe, "loss.ttt_steps", "run.keep_checkpoints", "run.log_every")
    _positive(recipe, "run.decode_prompts", "run.decode_tokens")
    if recipe.features.row_length < 4:
        raise TrainError(f"features.row_length must be at least 4, found {recipe.features.row_length}")
    if recipe.features.mode == "online" and recipe.features.also:
        raise TrainError("features.also names stored features, but features.mode is online; use data.files")
    if not 0 <= recipe.seed < 2**32:
        raise TrainError(f"seed must lie in [0, 2**32), found {recipe.seed}")
    if not 0 <= recipe.data.max_skipped <= 1:
        raise TrainError(f"data.max_skipped is a share in [0, 1], found {recipe.data.max_skipped}")
    if not 0 <= recipe.data.heldout < 1:
        raise TrainError(f"data.heldout is a share in [0, 1), found {recipe.data.heldout}")
    if not 0 < recipe.cod.ratio <= 1 or not 0 <= recipe.cod.floor <= 1:
        raise TrainError(
            f"cod.ratio must lie in (0, 1] and cod.floor in [0, 1], "
            f"found {recipe.cod.ratio} and {recipe.cod.floor}"
        )
    if recipe.cod.max_anchors < 0:
        raise TrainError(f"cod.max_anchors must not be negative, found {recipe.cod.max_anchors}")
    if not (recipe.optimizer.steps < 2**31 and recipe.optimizer.epochs <= MOST_EPOCHS):
        raise TrainError(
            f"optimizer.steps must be below 2**31 and optimizer.epochs at most {MOST_EPOCHS}, "
            f"found {recipe.optimizer.steps} and {recipe.optimizer.epochs}"
        )
    if recipe.optimizer.steps <= 0 and recipe.optimizer.epochs <= 0:
        raise TrainError("optimizer.steps or optimizer.epochs must be positive; found neither")
    micro = recipe.optimizer.micro_rows
    if micro and (micro < 0 or recipe.optimizer.batch_rows % micro):
        raise TrainError(
            f"optimizer.micro_rows ({micro}) must divide optimizer.batch_rows ({recipe.optimizer.batch_rows})"
        )
    for name in ("checkpoint_every", "validate_every", "validate_rows", "patience", "decode_every"):
        if getattr(recipe.run, name) < 0:
            raise TrainError(f"run.{name} must not be negative, found {getattr(recipe.run, name)}")
    if recipe.run.patience and not recipe.run.validate_every:
        raise TrainError("run.patience counts validations, but run.validate_every is 0")
    depths = recipe.head.num_depths if recipe.method == "peagle" else recipe.loss.ttt_steps
    weights = recipe.loss.depth_weights
    if weights and len(weights) != depths:
        raise TrainError(f"loss.depth_weights needs {depths} values, one a depth; found {len(weights)}")
    if recipe.head.draft_vocab_size < 0:
        raise TrainError(
            f"head.draft_vocab_size must be positive, or 0 for the whole vocabulary; "
            f"found {recipe.head.draft_vocab_size}"
        )
    if recipe.init.source == "head" and not recipe.init.head:
        raise TrainError("init.source is head, but init.head names no folder")


def _convert(kind: Any, value: Any, where: str) -> Any:
    """A YAML value as a field of type ``kind``."""
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
    """Reads a recipe file. Raises TrainError: unreadable, unknown key, wrong type or value."""
    try:
        raw = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise TrainError(f"{path}: {error.strerror or error}; --config names a recipe file") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise TrainError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    return parse_recipe({} if raw is None else raw)


def recipe_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain JSON data (tuples become lists)."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, tuple) else value

    return plain(dataclasses.asdict(recipe))
