"""Trains a head, or prepares what training needs.

python -m peagle_jax.train --config RECIPE             train, or go on with a stopped run; in several
                                                       processes with --distributed
python -m peagle_jax.train features --config RECIPE    compute the target's features
python -m peagle_jax.train show-mask --config RECIPE   print what the loss will see
python -m peagle_jax.train regenerate --prompts FILE --out FILE.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from typing import Any

from rich.console import Console

from peagle_jax.arguments import (
    CommandError,
    Parser,
    add_model,
    add_processes,
    add_tensor_parallel_size,
    check_processes,
    run_command,
)
from peagle_jax.train.recipe import load_recipe

DESCRIPTIONS = {
    "features": "Run the target once over the recipe's conversations and store its hidden states.",
    "show-mask": "Print conversations with what carries loss in green, or in brackets without colours.",
    "regenerate": "Let the target answer prompts, so that a head learns from what it writes itself.",
}
COMMANDS = ("run", *DESCRIPTIONS)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"is a JSON object, found {text[:40]!r}")
    return value


def parser(command: str) -> Parser:
    """The arguments of one command."""
    name = "" if command == "run" else f" {command}"
    made = Parser(
        prog=f"python -m peagle_jax.train{name}",
        description=__doc__ if command == "run" else DESCRIPTIONS[command],
    )
    if command == "regenerate":
        add = made.add_argument
        add("--prompts", nargs="+", required=True, help=".jsonl or .jsonl.gz with prompt or messages")
        add("--out", required=True, help="the .jsonl to write, or to go on with")
        add_model(made)
        add(
            "--dtype",
            default="bfloat16",
            choices=["bfloat16", "float32"],
            help="of the weights (default: bfloat16)",
        )
        add_tensor_parallel_size(add)
        add("--batch", type=int, default=8, help="conversations at once (default: 8)")
        add("--max-tokens", type=int, default=320, help="of an answer, at most (default: 320)")
        add(
            "--max-model-len",
            type=int,
            help="prompt and answer together (default: 1024, or all that the target has)",
        )
        add(
            "--temperatures", type=float, nargs="+", default=[0.0, 0.7], help="taken in turn (default: 0 0.7)"
        )
        add("--seed", type=int, default=0, help="of sampled answers (default: 0)")
        add("--limit", type=int, default=0, help="only the first records (default: 0, all)")
        add("--template", type=_json_object, default={}, help="JSON: arguments of the chat template")
        return made
    made.add_argument("--config", required=True, help="the recipe, a YAML file")
    if command == "run":
        add_processes(made.add_argument)
    if command == "features":
        made.add_argument("--dry-run", action="store_true", help="say the size and stop")
    if command == "show-mask":
        made.add_argument("--count", type=int, default=3, help="conversations to print (default: 3)")
    return made


def dispatch(command: str, arguments: argparse.Namespace, console: Console) -> int:
    """Runs a command; returns its exit status: that of a signal (128 + its number) for a run that one has
    stopped, so that a scheduler starts it again. What a command needs is imported here, so that --help is
    quick."""
    if command == "regenerate":
        from peagle_jax.train.regenerate import Options, regenerate

        given = dict(vars(arguments))
        given["template"] = tuple(given["template"].items())
        regenerate(Options(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}), console)
        return 0
    recipe = load_recipe(arguments.config)
    if command == "run" and arguments.distributed:
        from peagle_jax.processes import is_main, join

        join(arguments.coordinator_address, arguments.num_processes, arguments.process_id)
        console.quiet = not is_main()
    if command == "features":
        from peagle_jax.train.prepare import compute_features

        compute_features(recipe, console, arguments.dry_run)
    elif command == "show-mask":
        from peagle_jax.train.prepare import show_mask

        show_mask(recipe, console, arguments.count)
    else:
        from peagle_jax.train.loop import train_until_stopped

        _, stopped = train_until_stopped(recipe, console)
        return 128 + stopped if stopped else 0
    return 0


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 2 for input that cannot be used, told in one line."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words and words[0] in COMMANDS else "run"
    if command == "run" and words and not words[0].startswith("-"):
        known = ", ".join(DESCRIPTIONS)
        parser(command).error(f"no command is named {words[0][:40]!r}; expected {known}, or none to train")
    arguments = parser(command).parse_args(words)

    distributed = command == "run" and arguments.distributed

    def run() -> int:
        try:
            if command == "run":
                check_processes(arguments)
            return dispatch(command, arguments, Console(soft_wrap=True, markup=False))
        except ValueError as error:  # configs, vocabularies and data have errors of their own
            raise CommandError(str(error)) from error
        except RuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                reason = " ".join(str(error).split())[:200]
                raise CommandError(
                    f"the memory does not suffice ({reason}); lower optimizer.micro_rows, "
                    "optimizer.batch_rows or features.row_length, raise cod.segments, or take a smaller head"
                ) from error
            if not distributed:
                raise
            raise CommandError(
                f"a device or another process of this run failed: {str(error)[:300]}; the same command goes "
                "on from the last checkpoint"
            ) from error

    if not distributed:
        return run_command(run)
    status = 1
    try:
        status = run_command(run)
    except Exception:
        traceback.print_exc()
    if 0 < status < 128:  # a stop is everybody's, and all come to the farewell
        from peagle_jax.train.processes import leave

        leave(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
