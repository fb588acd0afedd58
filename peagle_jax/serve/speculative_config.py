"""``--speculative-config``: vLLM's JSON, checked."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from peagle_jax.arguments import CommandError
from peagle_jax.config import Method

METHODS: dict[str, Method] = {"eagle3": "eagle3", "peagle": "peagle", "p_eagle": "peagle"}
_FLAG = "--speculative-config"


@dataclasses.dataclass(frozen=True)
class SpeculativeOptions:
    """What the flag asks for; None means that the head decides.

    ``method`` is resolved: vLLM writes P-EAGLE as eagle3 with ``parallel_drafting``. ``speculate`` tells
    that one of these was named, so that a head must be there.
    """

    model: str | None = None
    method: Method | None = None
    num_speculative_tokens: int | None = None
    speculate: bool = False

    @property
    def off(self) -> bool:
        return self.num_speculative_tokens == 0


OFF = SpeculativeOptions(num_speculative_tokens=0)


def parse_speculative_config(text: str) -> SpeculativeOptions:
    """Reads the JSON object; ``null`` switches speculation off.

    Raises:
        CommandError: not JSON, an unknown key, a value of the wrong type, or keys that contradict.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(
            f'{_FLAG} is not JSON ({error}); quote it as one argument: \'{{"model": "..."}}\''
        ) from error
    if values is None:
        return OFF
    if not isinstance(values, dict):
        raise CommandError(f"{_FLAG} must be a JSON object, found {text[:40]!r}")
    known: dict[str, type] = {
        "method": str,
        "model": str,
        "num_speculative_tokens": int,
        "parallel_drafting": bool,
    }
    for key, value in values.items():
        if key not in known:
            raise CommandError(f"{_FLAG} has the unknown key {key!r}; valid keys are {', '.join(known)}")
        if value is not None and type(value) is not known[key]:
            raise CommandError(
                f"{_FLAG}: {key} must be a {_NAMES[known[key]]}, found {json.dumps(value)[:40]}"
            )
    model, tokens = values.get("model"), values.get("num_speculative_tokens")
    if model is not None and not model.strip():
        raise CommandError(f"{_FLAG}: model is empty; name a folder or a hub id, or leave it out")
    if tokens is not None and tokens < 0:
        raise CommandError(f"{_FLAG}: num_speculative_tokens must be 0 (off) or more, found {tokens}")
    named = any(values.get(key) is not None for key in ("method", "parallel_drafting"))
    return SpeculativeOptions(model, _method(values), tokens, named)


_NAMES = {str: "string", int: "whole number", bool: "boolean (true or false)"}


def _method(values: dict[str, Any]) -> Method | None:
    name, parallel = values.get("method"), values.get("parallel_drafting")
    if name is not None and name not in METHODS:
        raise CommandError(f"{_FLAG}: method {name!r} is not supported; expected one of {', '.join(METHODS)}")
    if name in ("peagle", "p_eagle") and parallel is False:
        raise CommandError(
            f"{_FLAG}: method {name} drafts in parallel, but parallel_drafting is false; "
            f"leave one of them out"
        )
    if parallel is not None:
        return "peagle" if parallel else "eagle3"
    # vLLM's spelling of P-EAGLE names eagle3 too, so alone it does not contradict a parallel head.
    return None if name == "eagle3" else METHODS.get(name or "")
