"""How every command begins and ends: its arguments, and how errors are told.

Nothing heavy is imported here, so that --help is quick.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.config import ConfigError
from peagle_jax.xla import tune_cpu


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line too, and which takes flags only in full."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())}; see {self.prog} --help\n")


def utf8(value: str) -> str:
    """An argument's type: text. Python keeps other bytes of a command line as halves of surrogate pairs,
    which nothing that shows or tokenises them takes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(
            f"is not UTF-8 text at character {error.start}; give it as UTF-8"
        ) from error
    return value


def named(value: str) -> str:
    """An argument's type: text that is not blank. An empty variable of a script is not the default."""
    if not value.strip():
        raise argparse.ArgumentTypeError("is empty; name one, or leave it out for the default")
    return utf8(value)


def add_model(parser: Parser) -> None:
    """The arguments that name a target."""
    parser.add_argument(
        "--model",
        type=named,
        help="a Hugging Face folder or hub id, or a .gguf file (default: the embedded model)",
    )
    parser.add_argument("--tokenizer", type=named, help="a folder or hub id with another tokenizer")
    parser.add_argument("--revision", type=named, help="of the model's hub id")


def add_tensor_parallel_size(add: Any) -> None:
    """How many devices hold one copy of the model; ``add`` is a parser's or a group's ``add_argument``."""
    add(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        metavar="N",
        help="devices that the model is split over (default: 1)",
    )


class CommandError(ValueError):
    """A command that cannot run as asked; one line: found, expected, what to do."""


_NAMES = "--coordinator-address, --num-processes and --process-id"


def add_processes(add: Any) -> None:
    """The arguments of one of several processes; ``add`` is a parser's or a group's ``add_argument``."""
    add(
        "--distributed",
        action="store_true",
        help="one of several processes, which find each other on Cloud TPU, Slurm and Kubernetes",
    )
    add("--coordinator-address", type=named, help="HOST:PORT of process 0, where nothing tells it")
    add("--num-processes", type=int, help="how many processes there are, where nothing tells it")
    add("--process-id", type=int, help="which of them this is, from 0, where nothing tells it")


def check_processes(arguments: argparse.Namespace) -> None:
    """Raises CommandError unless the arguments name all processes, or none."""
    address, count, index = (
        arguments.coordinator_address,
        arguments.num_processes,
        arguments.process_id,
    )
    given = [value is not None for value in (address, count, index)]
    if any(given) and not arguments.distributed:
        raise CommandError(f"{_NAMES} belong to --distributed")
    if any(given) and not all(given):
        raise CommandError(f"{_NAMES} are given together or not at all")
    if all(given) and not 0 <= index < count:
        raise CommandError(f"--process-id must lie in 0..--num-processes - 1, found {index} of {count}")


READER_GONE = 141
"""Exit status of a command whose output nobody reads any more, as the shell gives it (128 + SIGPIPE)."""


def check_extra(extra: str, *packages: str) -> None:
    """Ends the process in one line unless the packages of an extra are there; before they are imported."""
    missing = next((name for name in packages if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        sys.exit(_refuse(f"the package {missing} is not installed; pip install 'peagle_jax[{extra}]'"))


def run_command(main: Callable[[], int]) -> int:
    """Runs a command; a user's mistake, or the system's no, is one line on stderr and exit status 2.

    What the encoding of stdout lacks is printed as an escape; a stdout or stderr that is closed is
    replaced, as libraries count on there being one.
    """
    tune_cpu()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as it was while the command's imports ran
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout, sys.stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return main()
        finally:
            print(end="", flush=True)  # a reader that has left is noticed here, not at the interpreter's end
    except (CommandError, CheckpointError, ConfigError) as error:
        return _refuse(str(error))
    except BrokenPipeError:
        _drop_unwritable_output()
        return READER_GONE
    except OSError as error:
        _drop_unwritable_output()
        where = f"{str(error.filename)[:80]}: " if error.filename is not None else ""
        reason = error.strerror or str(error) or type(error).__name__
        return _refuse(f"{where}{reason}; run it again when that is mended")
    except KeyboardInterrupt:
        return 130


def _nowhere() -> TextIO:
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _refuse(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _drop_unwritable_output() -> None:
    """What is left in stdout's buffer would fail again at the interpreter's end, so it goes nowhere."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
