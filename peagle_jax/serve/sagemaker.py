"""How container platforms start the server: the word ``serve``, and settings in the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from peagle_jax.arguments import CommandError, Parser

PREFIX = "SM_VLLM_"
MODEL_FOLDER = "/opt/ml/model"
"""Where SageMaker puts a model's files, read-only."""
PORT = "8080"


def expand(
    argv: Sequence[str], environment: Mapping[str, str], parser: Parser, model_folder: str = MODEL_FOLDER
) -> list[str]:
    """The command line that ``serve`` and the environment stand for; without the word it is left alone.

    ``SM_VLLM_MAX_MODEL_LEN=4096`` is ``--max-model-len 4096``, as in AWS's vLLM images; an empty value or
    ``true`` is the flag alone, ``false`` leaves a switch out. What is written after the word goes before.

    Raises:
        CommandError: a variable whose flag does not exist.
    """
    if not argv or argv[0] != "serve":
        return list(argv)
    flags = {flag: action for action in parser._actions for flag in action.option_strings}
    port = environment.get("SAGEMAKER_BIND_TO_PORT") or PORT
    found = {"--host": ["0.0.0.0"], "--port": [port]}
    folder = Path(model_folder)
    named = len(argv) > 1 and not argv[1].startswith("-")
    if not named and folder.is_dir() and any(folder.iterdir()):
        found["--model"] = [model_folder]
    for name in sorted(environment):
        if not name.startswith(PREFIX):
            continue
        flag, value = "--" + name.removeprefix(PREFIX).lower().replace("_", "-"), environment[name]
        if flag not in flags:
            raise CommandError(f"{name}: there is no flag {flag}; see {parser.prog} --help")
        if flags[flag].nargs == 0:
            found.pop(flag, None)
            if value.lower() in ("", "true", "1"):
                found[flag] = []
            elif value.lower() not in ("false", "0"):
                raise CommandError(f"{name}: expected true or false, found {value[:40]!r}")
        elif value:
            found[flag] = [value]
    if named:
        found.pop("--model", None)
    # The environment's come first: of a flag that is given twice, the last counts.
    words = [f"{flag}={values[0]}" if values else flag for flag, values in found.items()]
    return [*words, *argv[1:]]
