"""``python -m peagle_jax.doctor``: is a head healthy, and if not, what ails it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from peagle_jax import commands, precision
from peagle_jax.arguments import (
    CommandError,
    Parser,
    add_model,
    add_tensor_parallel_size,
    named,
    run_command,
)
from peagle_jax.checkpoint.dialects import MapKind, read_facts
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.folder import local_path, read_json, resolve
from peagle_jax.checkpoint.head import default_head_path
from peagle_jax.checkpoint.head_loader import HeadLoader
from peagle_jax.checkpoint.model import LoadedTarget, load_target
from peagle_jax.checkpoint.tensors import Shape, TensorSource
from peagle_jax.checkpoint.weights import open_weights
from peagle_jax.config import DrafterConfig
from peagle_jax.diagnosis import (
    Trials,
    alternatives,
    clearly_better,
    illness,
    lost_mask,
    same_array,
)
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.generate import prompt_token_ids
from peagle_jax.speculative.placement import Placement
from peagle_jax.speculative.statistics import AcceptanceStatistics

PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "List three tips for sleeping well.",
    "What is the capital of France? Answer in one sentence.",
)

_EPILOG = """\
It decodes the prompts greedily with the head as it is and, if too few drafts are accepted, once more with
each other reading of it (taps shifted by one, the default taps, another RoPE, d2t as target ids, and so on)
until one explains it. Exit status 0: healthy; 1: ill. Figures of so few tokens are rough: a head that loses a
tenth of its acceptance shows with --all and more prompts only.

examples:
  python -m peagle_jax.doctor
  python -m peagle_jax.doctor --model Qwen/Qwen3-8B --head RedHatAI/Qwen3-8B-speculator.peagle
  python -m peagle_jax.doctor --model ./model --head ./head --prompts questions.txt --json
"""

_LOST_MASK = "mask_hidden is all zeros"
_LOST_MASK_FIX = "take mask_hidden from the run that trained the head, or train it again"


@dataclasses.dataclass
class Trial:
    """One reading of the head, and what it gave; None where it cannot be loaded so."""

    name: str
    found: AcceptanceStatistics | None
    fix: str | None = None


@dataclasses.dataclass
class Report:
    """What was tried, and the verdict. ``cause`` and ``fix`` are None for a healthy head and where no
    reading explains the illness."""

    trials: list[Trial]
    illness: str | None
    cause: str | None = None
    fix: str | None = None


class _WithMask:
    """A head's tensors, and zeros for the mask state that they lack. A TensorSource."""

    def __init__(self, source: TensorSource, width: int) -> None:
        self.place, self._source, self._width = source.place, source, width

    def names(self) -> Iterable[str]:
        return [*self._source.names(), "mask_hidden"]

    def shape(self, name: str) -> Shape:
        return (1, 1, self._width) if name == "mask_hidden" else self._source.shape(name)

    def read(self, name: str) -> np.ndarray:
        return np.zeros(self.shape(name), np.float32) if name == "mask_hidden" else self._source.read(name)


def load(
    folder: Path,
    target: LoadedTarget,
    dtype: jnp.dtype,
    *,
    map_kind: MapKind = "offsets",
    put_mask: bool = False,
    placement: Placement | None = None,
) -> tuple[DrafterConfig, DrafterParams]:
    """As ``load_head``; ``put_mask`` gives a P-EAGLE head without mask_hidden one of zeros.

    Raises:
        CheckpointError: as ``load_head``, or there is a mask already.
    """
    place = str(folder / "config.json")
    facts, source = read_facts(read_json(folder / "config.json"), place), open_weights(folder)
    if put_mask:
        names = set(source.names())
        fc = next((name for name in ("fc.weight", "model.fc.weight") if name in names), None)
        if fc is None or names & {"mask_hidden", "model.mask_hidden"}:
            raise CheckpointError(f"{folder} lacks more than mask_hidden, or does not lack it")
        source = _WithMask(source, source.shape(fc)[-1])
    loader = HeadLoader(facts, source, target.config, target.params, np.dtype(dtype), place)
    return loader.load(None, "auto", map_kind, placement and placement.mesh)


def examine(
    folder: Path,
    target: LoadedTarget,
    prompts: Sequence[Sequence[int]],
    *,
    dtype: jnp.dtype,
    max_tokens: int,
    try_all: bool = False,
    placement: Placement | None = None,
    num_speculative_tokens: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Report:
    """Tries the head as its files say, and its other readings until one explains what is wrong.

    Args:
        num_speculative_tokens: K; None is the default's, or less where the head was trained for less.
        tell: is told what is being done.

    Raises:
        CheckpointError: the head cannot be loaded in any way.
        ConfigError: the head does not fit the target.
    """
    report = Report([], None)

    def trial(name: str, cfg: DrafterConfig, params: DrafterParams, fix: str | None = None) -> Trial:
        done = Trial(name, trials.measure(cfg, params), fix)
        report.trials.append(done)
        tell(f"{name}: {_length(done)}")
        return done

    def start(cfg: DrafterConfig) -> Trials:
        depths = cfg.num_depths if cfg.method == "peagle" else commands.DEFAULT_TOKENS
        count = num_speculative_tokens or min(depths, commands.DEFAULT_TOKENS)
        return Trials(target.config, target.params, prompts, count, max_tokens, placement)

    try:
        cfg, params = load(folder, target, dtype, placement=placement)
    except CheckpointError as error:
        name, cause, fix, (cfg, params) = _loads_otherwise(folder, target, dtype, placement, error)
        report.trials.append(Trial("as its files say", None))
        report.illness, report.cause, report.fix = f"it does not load: {error}", cause, fix
        trials = start(cfg)
        trial(name, cfg, params)
        return report

    trials = start(cfg)
    base = trial("as its files say", cfg, params)
    assert base.found is not None
    report.illness = illness(base.found)
    if lost_mask(params):
        report.illness = report.illness or "its mask slots were never trained"
        report.cause, report.fix = _LOST_MASK, _LOST_MASK_FIX
    if not try_all and (report.illness is None or report.cause):
        return report

    def absolute() -> DrafterParams | None:
        try:
            other = load(folder, target, dtype, map_kind="absolute", placement=placement)[1]
        except CheckpointError:
            return None
        return None if same_array(other.draft_to_target, params.draft_to_target) else other

    best, others = base, list(alternatives(cfg, params, target.config, target.params, absolute))
    for number, other in enumerate(others, start=1):
        tell(f"reading {number} of {len(others)}, {other.name}")
        done = trial(other.name, other.config, other.params, other.fix)
        assert done.found is not None
        assert best.found is not None
        if not clearly_better(done.found, base.found):
            continue
        if best is base or done.found.mean_acceptance_length > best.found.mean_acceptance_length:
            best = done
        if not try_all and illness(done.found) is None:
            break
    if best is not base and report.cause is None:
        report.illness = report.illness or "another reading is clearly better"
        report.cause, report.fix = best.name, best.fix
    return report


def _loads_otherwise(
    folder: Path,
    target: LoadedTarget,
    dtype: jnp.dtype,
    placement: Placement | None,
    error: CheckpointError,
) -> tuple[str, str, str, tuple[DrafterConfig, DrafterParams]]:
    """The reading under which a head that is refused loads. Raises the refusal where there is none."""
    ways: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
        ("d2t holds target ids", "d2t holds target ids", "--d2t absolute", {"map_kind": "absolute"}),
        ("zeros for mask_hidden", "mask_hidden is missing", _LOST_MASK_FIX, {"put_mask": True}),
    )
    for name, cause, fix, options in ways:
        try:
            return name, cause, fix, load(folder, target, dtype, placement=placement, **options)
        except CheckpointError:
            continue
    raise error


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m peagle_jax.doctor",
        description="Decode a few prompts with a head, say whether it is healthy, and what ails it if not.",
        epilog=_EPILOG,
    )
    add_model(parser)
    add = parser.add_argument
    add("--head", type=named, help="a head's folder or hub id (default: the embedded model's own head)")
    add("--prompts", type=named, metavar="FILE", help="prompts, one a line (default: four of its own)")
    add("--max-tokens", type=int, default=48, metavar="N", help="new tokens a prompt (default: 48)")
    add(
        "--num-speculative-tokens",
        type=int,
        metavar="K",
        help="tokens drafted a round (default: 5, or what the head was trained for)",
    )
    precision.add_quantization(add)
    add_tensor_parallel_size(add)
    add("--dtype", choices=commands.DTYPES, default="auto", help="of the weights (default: auto)")
    add("--raw", action="store_true", help="the prompts as they are, without the model's chat template")
    add("--all", action="store_true", help="try every reading, also of a healthy head")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.max_tokens < 2:
        raise CommandError(f"--max-tokens must be 2 or more, found {args.max_tokens}")
    if args.num_speculative_tokens is not None and args.num_speculative_tokens < 1:
        raise CommandError(f"--num-speculative-tokens must be 1 or more, found {args.num_speculative_tokens}")
    texts = PROMPTS if args.prompts is None else _read_prompts(local_path(args.prompts))
    folder = _head_folder(args)
    began, dtype = time.perf_counter(), commands.resolve_dtype(args.dtype)

    def say(text: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    placement = commands.placement(1, args.tensor_parallel_size) if args.tensor_parallel_size != 1 else None
    commands.check_quantization(args.quantization)
    commands.check_revision(args.model, args.revision)
    say("loading")
    target = load_target(
        args.model,
        dtype=dtype,
        revision=args.revision,
        tokenizer=args.tokenizer,
        mesh=placement and placement.mesh,
        quantization=args.quantization,
    )
    prompts = [prompt_token_ids(target.tokenizer, text, args.raw) for text in texts]
    for text, ids in zip(texts, prompts, strict=True):
        if not 0 < len(ids) < target.config.max_position - 1:
            raise CommandError(
                f"the prompt {text[:40]!r} has {len(ids)} tokens; expected 1 to "
                f"{target.config.max_position - 2}"
            )
    say(f"decoding {len(prompts)} prompts; each reading of the head compiles first")
    report = examine(
        folder,
        target,
        prompts,
        dtype=dtype,
        max_tokens=args.max_tokens,
        try_all=args.all,
        placement=placement,
        num_speculative_tokens=args.num_speculative_tokens,
        tell=say,
    )
    if args.json:
        print(json.dumps(_as_json(report, str(folder), target.name)))
    else:
        _print(report, str(folder), args.all)
    return 1 if report.illness else 0


def _head_folder(args: argparse.Namespace) -> Path:
    if args.head is not None:
        return resolve(args.head)
    default = default_head_path() if args.model is None else None
    if default is None:
        raise CommandError("there is no head to look at; name one with --head")
    return default


def _read_prompts(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise CommandError(f"{path} is not UTF-8 text; convert it to UTF-8") from error
    texts = tuple(line for line in lines if line.strip())
    if not texts:
        raise CommandError(f"{path} holds no prompt; expected one a line")
    return texts


def _length(trial: Trial) -> str:
    return "cannot be loaded" if trial.found is None else f"{trial.found.mean_acceptance_length:.2f}"


def command_of(fix: str, head: str) -> str:
    """What to do, whole: options are those of the converter."""
    if not fix.startswith("--"):
        return fix
    return f"python -m peagle_jax.convert {head} FIXED --to vllm {fix}"


def _as_json(report: Report, head: str, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "head": head,
        "healthy": report.illness is None,
        "illness": report.illness,
        "cause": report.cause,
        "fix": report.fix and command_of(report.fix, head),
        "trials": [
            {
                "name": trial.name,
                "rounds": trial.found and trial.found.rounds,
                "mean_acceptance_length": trial.found and trial.found.mean_acceptance_length,
                "acceptance_per_position": trial.found and trial.found.acceptance_per_position,
            }
            for trial in report.trials
        ],
    }


def _print(report: Report, head: str, tried_all: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("reading", "acceptance length", "accepted at position 1, 2, ...", show_edge=False)
    for trial in report.trials:
        rates = trial.found.acceptance_per_position if trial.found else []
        style = "bold" if trial.name == report.cause else ""
        cells = (trial.name, _length(trial), " ".join(f"{rate:.2f}" for rate in rates))
        table.add_row(*(Text(cell, style) for cell in cells))
    console = Console()
    console.print(table)
    if report.illness is None:
        print(
            "\nhealthy" + ("" if tried_all else "; --all tries other readings too, and may find a mild fault")
        )
        return
    print(f"\nill: {report.illness}")
    if report.cause is None:
        print("no other reading is clearly better: the head may be for another model, or trained too little;")
        print("`python -m peagle_jax.convert inspect` lists what its files say")
        return
    print(f"cause: {report.cause}")
    print(f"do: {command_of(report.fix or '', head)}")


if __name__ == "__main__":
    sys.exit(run_command(main))
