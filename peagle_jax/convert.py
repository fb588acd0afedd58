"""``python -m peagle_jax.convert``: heads to other layouts, targets to Orbax, and what a head is."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle_jax.arguments import CommandError, Parser, named, run_command, utf8

if TYPE_CHECKING:  # imported where they are used, so that --help is quick
    from peagle_jax.checkpoint.conversion import Reading
    from peagle_jax.checkpoint.target_store import TargetFacts

LAYOUTS = ("orbax", "vllm", "speculators", "eagle3")

_EPILOG = """\
layouts:
  vllm         what vLLM and SGLang load, and what training here writes; holds every head
  speculators  the speculators package's, which vLLM loads too
  eagle3       the original EAGLE-3's: one layer, no mask slots
  orbax        arrays for JAX; holds every head, and targets

SRC is a folder or hub id of any of these, or of SpecForge's or NeMo's heads, as safetensors or
pytorch_model.bin; for a target with --to orbax also a .gguf file, or `embedded`. Tensors keep their bits and
dtypes. What a layout cannot hold is refused by name.

examples:
  python -m peagle_jax.convert RedHatAI/Qwen3-8B-speculator.peagle ./head --to vllm
  python -m peagle_jax.convert ./head ./head-orbax --to orbax --verify
  python -m peagle_jax.convert ./head ./head-spec --to speculators --target Qwen/Qwen3-8B --verify
  python -m peagle_jax.convert ./model.gguf ./model-orbax --to orbax
  python -m peagle_jax.convert inspect ./head --target Qwen/Qwen3-8B
"""

_INSPECT_EPILOG = """\
examples:
  python -m peagle_jax.convert inspect ./head
  python -m peagle_jax.convert inspect ./head --target Qwen/Qwen3-8B --json
"""


def _taps(value: str) -> tuple[int, ...]:
    try:
        taps = tuple(int(part) for part in value.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"is {value!r}; expected layer boundaries, such as 2,15,27"
        ) from error
    if min(taps) < 0:
        raise argparse.ArgumentTypeError(f"is {value!r}; expected boundaries of 0 or more")
    return taps


def folder(value: str) -> str:
    """An argument's type: text that is not blank, where there is no default."""
    if not value.strip():
        raise argparse.ArgumentTypeError("is empty; name a folder")
    return utf8(value)


def _add_reading(parser: Parser) -> None:
    """The arguments that say how a head is read."""
    add = parser.add_argument
    add("--revision", type=named, help="of the source's hub id")
    add(
        "--target",
        type=named,
        metavar="REF",
        help="the head's target, where the head lacks what only that knows: a folder, hub id, .gguf file, or "
        "`embedded`",
    )
    add("--taps", type=_taps, metavar="A,B,C", help="the tapped layer boundaries, in place of the head's")
    add(
        "--taps-convention",
        choices=("auto", "boundary", "output"),
        default="auto",
        help="what the head's layer ids are: boundaries, or layers whose output is meant (default: auto, "
        "outputs where the first id is 1)",
    )
    add(
        "--d2t",
        choices=("offsets", "absolute"),
        default="offsets",
        help="what the head's d2t holds: offsets (default), or target ids, which are rewritten",
    )
    add("--json", action="store_true", help="print one JSON object and nothing else")


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m peagle_jax.convert",
        description="Convert a head to another layout, or a target to Orbax. `inspect` tells what a head is.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("source", type=folder, metavar="SRC", help="a head or target; or the word inspect, then a head")
    add("into", type=folder, metavar="DST", help="the folder to write; weights that it holds are replaced")
    add("--to", choices=LAYOUTS, required=True, help="the layout to write")
    add("--verify", action="store_true", help="load the result and compare tensors, and logits with --target")
    _add_reading(parser)
    return parser


def build_inspect_parser() -> Parser:
    parser = Parser(
        prog="python -m peagle_jax.convert inspect",
        description="Say what a head is, how it would be read, and everything that is wrong with it.",
        epilog=_INSPECT_EPILOG,
    )
    parser.add_argument("source", type=folder, metavar="SRC", help="a head's folder or hub id")
    _add_reading(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    for i, value in list(enumerate(argv))[:0:-1]:
        if argv[i - 1] == "--taps" and value[:1] == "-" and value[1:2].isdigit():
            argv[i - 1 : i + 1] = [f"--taps={value}"]  # argparse would take it for a flag
    if argv[:1] == ["inspect"]:
        return _inspect(build_inspect_parser().parse_args(argv[1:]))
    args = build_parser().parse_args(argv)
    with _terminated():
        return _convert(args)


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that nothing half written stays behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _reading(args: argparse.Namespace) -> Reading:
    from peagle_jax.checkpoint.conversion import Reading

    return Reading(args.taps, args.taps_convention, args.d2t)


def _target(args: argparse.Namespace) -> TargetFacts | None:
    from peagle_jax.checkpoint.target_store import read_target_facts

    return None if args.target is None else read_target_facts(args.target)


def _convert(args: argparse.Namespace) -> int:
    from peagle_jax.checkpoint.conversion import is_head
    from peagle_jax.checkpoint.folder import locate_target
    from peagle_jax.checkpoint.target_store import EMBEDDED

    began = time.perf_counter()
    source = None if args.source == EMBEDDED else locate_target(args.source, args.revision)
    of_head = source is not None and source.is_dir() and is_head(source)
    into = _destination(args.into, source, of_head)
    if source is not None and of_head:
        report = _convert_head(args, source, into)
    else:
        report = _convert_target(args, into)
    report |= {"seconds": round(time.perf_counter() - began, 2)}
    if args.json:
        print(json.dumps(report))
    else:
        print("\n".join(_lines(report)))
    return 0


def _destination(text: str, source: Path | None, of_head: bool) -> Path:
    """The folder to write, links followed.

    Raises:
        CommandError: it is the source, one of the two lies in the other, or it holds something else than what
            would be replaced.
    """
    from peagle_jax.checkpoint.conversion import is_head
    from peagle_jax.checkpoint.folder import local_path

    into = local_path(text).resolve()
    mine = None if source is None else source.resolve()
    if into.is_file():
        raise CommandError(f"DST {text} is a file; expected a folder to write to")
    if mine is not None and (into == mine or into in mine.parents or mine in into.parents):
        raise CommandError(f"DST {text} and SRC are one folder, or one lies in the other; choose another DST")
    if into.is_dir() and any(into.iterdir()):
        what = "head" if of_head else "target"
        if not (into / "config.json").exists() or is_head(into) != of_head:
            raise CommandError(
                f"DST {text} holds something else than a {what}, which would be replaced; choose a new folder"
            )
    return into


def _convert_head(args: argparse.Namespace, source: Path, into: Path) -> dict[str, Any]:
    from peagle_jax.checkpoint.conversion import convert_head, verify_head

    target, reading = _target(args), _reading(args)
    head = convert_head(source, into, args.to, target, reading)
    taps = head.outline.taps
    report: dict[str, Any] = {
        "kind": "head",
        "source": args.source,
        "written": str(into),
        "layout": args.to,
        "method": head.outline.method,
        "taps": taps.boundaries and list(taps.boundaries),
        "taps_decided": taps.decided,
        "verifier": head.about.verifier.get("name_or_path"),
        "tensors": len(head.tensors),
        "bytes": sum(value.nbytes for value in head.tensors.values()),
        "verified": None,
    }
    if args.verify:
        report["verified"] = verify_head(head, source, into, target, reading)
    return report


def _convert_target(args: argparse.Namespace, into: Path) -> dict[str, Any]:
    from peagle_jax.checkpoint.conversion import same_bits
    from peagle_jax.checkpoint.target_store import store_target
    from peagle_jax.checkpoint.weights import open_weights

    given = [
        flag
        for flag, is_given in (
            ("--target", args.target),
            ("--taps", args.taps),
            ("--taps-convention", args.taps_convention != "auto"),
            ("--d2t", args.d2t != "offsets"),
        )
        if is_given
    ]
    if args.to != "orbax":
        raise CommandError(
            f"{args.source} is a target, which --to {args.to} cannot hold; expected --to orbax"
        )
    if given:
        raise CommandError(f"{args.source} is a target, and {given[0]} is for heads; leave it out")
    arrays = store_target(args.source, into, args.revision)
    report: dict[str, Any] = {
        "kind": "target",
        "source": args.source,
        "written": str(into),
        "layout": "orbax",
        "tensors": len(arrays),
        "bytes": sum(value.nbytes for value in arrays.values()),
        "verified": None,
    }
    if args.verify:
        again = open_weights(into)
        wrong = [n for n, value in arrays.items() if not same_bits(value, again.read(n))]
        if wrong or set(again.names()) != set(arrays):
            raise CommandError(f"{into} does not hold tensor {(wrong or ['set'])[0]} as {args.source} does")
        report["verified"] = {"tensors": len(arrays), "logits": None}
    return report


def _lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    lines = [
        f"{report['source']} ({report.get('method', 'target')}) -> {report['written']} ({report['layout']}): "
        f"{report['tensors']} tensors, {report['bytes'] / 2**20:.1f} MiB, {report['seconds']:.1f} s"
    ]
    if report["kind"] == "head":
        taps = report["taps"]
        shown = "" if taps is None else f"{', '.join(map(str, taps))}: "
        lines.append(f"taps {shown}{report['taps_decided']}")
        if report["layout"] == "speculators" and not report["verifier"]:
            key = "speculators_config.verifier.name_or_path"
            lines.append(
                f"{key} is null, as no name of the target is known: vLLM needs one to serve by this alone; "
                "a hub id as --target gives it"
            )
    if verified := report["verified"]:
        lines.append(f"verified: {verified['tensors']} tensors are the same, bit for bit")
        if verified["logits"]:
            rows, vocabulary = verified["logits"]
            lines.append(f"verified: the logits of {rows} rows of {vocabulary} tokens are the same")
        elif report["kind"] == "head":
            lines.append("logits not compared: name the --target to have that too")
    return lines


def _inspect(args: argparse.Namespace) -> int:
    from peagle_jax.checkpoint.folder import local_path, resolve
    from peagle_jax.checkpoint.inspection import inspect_head

    if local_path(args.source).is_file():
        raise CommandError(
            f"{args.source} is a file; expected a head's folder, which holds its config.json too"
        )
    rows = inspect_head(resolve(args.source, args.revision), _target(args), _reading(args))
    faults = [row for row in rows if row.fault]
    if args.json:
        shown = [{"name": row.name, "value": row.value, "fault": row.fault} for row in rows]
        print(json.dumps({"source": args.source, "rows": shown, "faults": len(faults)}))
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table("", args.source, show_edge=False)
        for row in rows:
            style = "bold red" if row.fault else ""
            table.add_row(Text(row.name, style), Text(row.value, style))
        Console().print(table)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
