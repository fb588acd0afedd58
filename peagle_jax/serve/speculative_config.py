"""``--speculative-config``: vLLM's JSON, checked."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
from typing import Any

from peagle_jax.arguments import CommandError
from peagle_jax.config import Method
from peagle_jax.speculation import Arrangement
from peagle_jax.speculative.lookup import Lookup

METHODS: dict[str, Method] = {"eagle3": "eagle3", "peagle": "peagle", "p_eagle": "peagle"}
NGRAM = "ngram"
_FLAG = "--speculative-config"

BatchSizes = tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True)
class SpeculativeOptions:
    """What the flag asks for; None means that the head or the server decides.

    ``method`` is resolved: vLLM writes P-EAGLE as eagle3 with ``parallel_drafting``. ``speculate`` tells
    that one of these was named, so that a head must be there. ``num_speculative_tokens_per_batch_size``
    are (from, to, K), the sizes included; ``synthetic_acceptance_rates`` are those of the draft positions,
    each of all rounds, for benchmarks. ``arrangement`` says what the three settings of trees mean; ``lookup``
    is the method ngram's, which has no head.
    """

    model: str | None = None
    method: Method | None = None
    num_speculative_tokens: int | None = None
    speculate: bool = False
    num_speculative_tokens_per_batch_size: BatchSizes | None = None
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    draft_tensor_parallel_size: int | None = None
    num_speculative_nodes: int | None = None
    speculative_token_tree: tuple[tuple[int, ...], ...] = ()
    num_trees: int = 1
    lookup: Lookup | None = None

    @property
    def arrangement(self) -> Arrangement:
        """Rounds adapt, unless lengths or rates are fixed by hand."""
        fixed = self.num_speculative_tokens_per_batch_size or self.synthetic_acceptance_rates
        nodes, paths = self.num_speculative_nodes or 0, self.speculative_token_tree
        return Arrangement(nodes, paths, self.num_trees, adaptive=fixed is None)

    @property
    def off(self) -> bool:
        return self.num_speculative_tokens == 0


OFF = SpeculativeOptions(num_speculative_tokens=0)

_KNOWN: dict[str, tuple[type, ...]] = {
    "method": (str,),
    "model": (str,),
    "num_speculative_tokens": (int,),
    "parallel_drafting": (bool,),
    "parallel_drafting_spec": (bool, dict),
    "num_speculative_tokens_per_batch_size": (list,),
    "synthetic_acceptance_rates": (list,),
    "draft_tensor_parallel_size": (int,),
    "num_speculative_nodes": (int,),
    "speculative_token_tree": (str, list),
    "prompt_lookup_max": (int,),
    "prompt_lookup_min": (int,),
}
_NAMES = {
    str: "a string",
    int: "a whole number",
    bool: "a boolean (true or false)",
    list: "a list",
    dict: "an object",
}


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
    for key, value in values.items():
        if key not in _KNOWN:
            raise CommandError(f"{_FLAG} has the unknown key {key!r}; valid keys are {', '.join(_KNOWN)}")
        if value is not None and type(value) not in _KNOWN[key]:
            names = " or ".join(_NAMES[kind] for kind in _KNOWN[key])
            raise CommandError(f"{_FLAG}: {key} must be {names}, found {json.dumps(value)[:40]}")
    values = _with_spec(values)
    model, tokens = values.get("model"), values.get("num_speculative_tokens")
    if model is not None and not model.strip():
        raise CommandError(f"{_FLAG}: model is empty; name a folder or a hub id, or leave it out")
    if tokens is not None and tokens < 0:
        raise CommandError(f"{_FLAG}: num_speculative_tokens must be 0 (off) or more, found {tokens}")
    means_it = ("method", "parallel_drafting", "num_speculative_nodes", "speculative_token_tree")
    named = any(values.get(key) is not None for key in means_it)
    return SpeculativeOptions(
        model,
        _method(values),
        tokens,
        named,
        _batch_sizes(values.get("num_speculative_tokens_per_batch_size")),
        _rates(values.get("synthetic_acceptance_rates")),
        values.get("draft_tensor_parallel_size"),
        *_tree(values),
        _lookup(values),
    )


def _tree(values: dict[str, Any]) -> tuple[int | None, tuple[tuple[int, ...], ...], int]:
    """Nodes, paths and trees: at most one of them is asked for."""
    nodes, trees = values.get("num_speculative_nodes"), values.get("num_trees", 1)
    paths = _paths(values.get("speculative_token_tree"))
    asked = {
        "num_speculative_nodes": bool(nodes),
        "speculative_token_tree": bool(paths),
        "parallel_drafting_spec's num_trees": trees > 1,
    }
    named = [name for name, is_asked in asked.items() if is_asked]
    if len(named) > 1:
        raise CommandError(f"{_FLAG}: {' and '.join(named)} are different trees; leave all but one out")
    if nodes is not None and nodes < 0:
        raise CommandError(f"{_FLAG}: num_speculative_nodes must be 0 (a chain) or more, found {nodes}")
    return nodes, paths, trees


def _paths(value: str | list[Any] | None) -> tuple[tuple[int, ...], ...]:
    """vLLM's text of a list of tuples, or a list of lists."""
    if value is None:
        return ()
    try:
        found = ast.literal_eval(value) if isinstance(value, str) else value
        paths = [tuple(path) for path in found]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        paths = []
    if not paths or not all(type(rank) is int for path in paths for rank in path):
        raise CommandError(
            f"{_FLAG}: speculative_token_tree must be a list of paths such as [(0,), (1,), (0, 0)], "
            f"found {json.dumps(value)[:60]}"
        )
    return tuple(paths)


def _with_spec(values: dict[str, Any]) -> dict[str, Any]:
    """``parallel_drafting_spec`` in terms of the other keys: true or false, or its depth (K) and number of
    trees, which is that of the candidates for the first position.

    It is the name that the project's users on SageMaker know; vLLM has ``parallel_drafting`` alone.
    """
    spec = values.pop("parallel_drafting_spec", None)
    if spec is None:
        return values
    if isinstance(spec, bool):
        spec, parallel = {}, spec
    else:
        parallel = True
    where = f"{_FLAG}: parallel_drafting_spec"
    for key, value in spec.items():
        if key not in ("depth", "num_trees"):
            raise CommandError(f"{where} has the unknown key {key!r}; valid keys are depth, num_trees")
        if type(value) is not int or value < 1:
            raise CommandError(f"{where}: {key} must be a whole number of at least 1, found {value!r:.40}")
    if values.get("parallel_drafting") not in (None, parallel):
        raise CommandError(f"{where} contradicts parallel_drafting; leave one of them out")
    depth = spec.get("depth")
    if depth is not None and values.get("num_speculative_tokens") not in (None, depth):
        raise CommandError(f"{where}: depth contradicts num_speculative_tokens; leave one of them out")
    found = values | {"parallel_drafting": parallel, "num_trees": spec.get("num_trees", 1)}
    return found if depth is None else found | {"num_speculative_tokens": depth}


def _batch_sizes(value: list[Any] | None) -> BatchSizes | None:
    if value is None:
        return None
    where = f"{_FLAG}: num_speculative_tokens_per_batch_size"
    rows: list[tuple[int, int, int]] = []
    for row in value:
        if not (isinstance(row, list) and len(row) == 3 and all(type(n) is int for n in row)):
            raise CommandError(f"{where} must be a list of [from, to, K], found {json.dumps(row)[:40]}")
        first, last, tokens = row
        expected = rows[-1][1] + 1 if rows else 1
        if first != expected or last < first or tokens < 0:
            raise CommandError(
                f"{where}: expected a range that begins at {expected} and a K of at least 0, "
                f"found {json.dumps(row)[:40]}"
            )
        rows.append((first, last, tokens))
    if not rows:
        raise CommandError(f"{where} is empty; leave it out, or give [[1, 4, 5], [5, 64, 0]]")
    return tuple(rows)


def _rates(value: list[Any] | None) -> tuple[float, ...] | None:
    if value is None:
        return None
    numbers = [float(v) for v in value if isinstance(v, int | float) and not isinstance(v, bool)]
    falling = all(a >= b for a, b in itertools.pairwise(numbers))
    if not value or len(numbers) != len(value) or not all(0 <= v <= 1 for v in numbers) or not falling:
        raise CommandError(
            f"{_FLAG}: synthetic_acceptance_rates must be numbers in 0..1 that do not rise, one a position, "
            f"found {json.dumps(value)[:60]}"
        )
    return tuple(numbers)


def _lookup(values: dict[str, Any]) -> Lookup | None:
    """Of the method ngram; without numbers they are 5, and with one of them both are that, as in vLLM."""
    most, least = values.get("prompt_lookup_max"), values.get("prompt_lookup_min")
    if values.get("method") != NGRAM:
        if most is not None or least is not None:
            raise CommandError(f"{_FLAG}: prompt_lookup_max and prompt_lookup_min are for method {NGRAM}")
        return None
    of_heads = ("model", "parallel_drafting", "synthetic_acceptance_rates", "draft_tensor_parallel_size")
    for key in (*of_heads, "num_speculative_nodes", "speculative_token_tree"):
        if values.get(key) is not None:
            raise CommandError(f"{_FLAG}: method {NGRAM} has no head; leave {key} out")
    rows, k = values.get("num_speculative_tokens_per_batch_size"), values.get("num_speculative_tokens")
    if any(row[2] not in (0, k) for row in rows or ()):
        raise CommandError(
            f"{_FLAG}: method {NGRAM} drafts num_speculative_tokens or none, but "
            f"num_speculative_tokens_per_batch_size is {json.dumps(rows)[:60]}"
        )
    found = Lookup(most or least or 5, least or most or 5)
    if not 1 <= found.least <= found.most or 0 in (most, least):
        raise CommandError(
            f"{_FLAG}: prompt_lookup_min must be in 1..prompt_lookup_max, found {least} and {most}"
        )
    return found


def _method(values: dict[str, Any]) -> Method | None:
    name, parallel = values.get("method"), values.get("parallel_drafting")
    if name is not None and name not in (*METHODS, NGRAM):
        known = ", ".join((*METHODS, NGRAM))
        raise CommandError(f"{_FLAG}: method {name!r} is not supported; expected one of {known}")
    if name in ("peagle", "p_eagle") and parallel is False:
        raise CommandError(
            f"{_FLAG}: method {name} drafts in parallel, but parallel_drafting is false; "
            f"leave one of them out"
        )
    if parallel is not None:
        return "peagle" if parallel else "eagle3"
    # vLLM's spelling of P-EAGLE names eagle3 too, so alone it does not contradict a parallel head.
    return None if name == "eagle3" else METHODS.get(name or "")
