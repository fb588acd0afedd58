"""Bytes that a compiled program moves to and from the accelerator's main memory, from its HLO text.

XLA's own cost analysis counts a loop's body once and what stays in on-chip memory like what does not. Here a
body counts as often as it runs, arrays in another memory space (``S(1)`` and so on, such as a TPU's VMEM)
count nothing, and a slice counts as what is sliced. Of a conditional the cheapest branch counts: that of
greedy requests without rules.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable
from typing import NamedTuple

WIDTH = re.compile(r"[a-z]+(\d+)")  # bits of a type, which starts with them: f32, s4, f8e4m3fn
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
# What moves nothing by itself.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "iota"}
VIEWS = ("bitcast", "get-tuple-element")
SLICES = ("dynamic-slice", "slice", "gather")

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_CALLED = re.compile(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_NAME = re.compile(r'op_name="([^"]*)"')


class Instruction(NamedTuple):
    name: str
    size: int  # bytes in main memory
    whole: int  # bytes in any memory
    opcode: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    condition: str  # of a loop
    scope: str
    root: bool
    number: int | None  # of a parameter, or a whole constant's value


def bytes_of(text: str, anywhere: bool = False) -> int:
    """Bytes of a type's arrays that lie in main memory, or ``anywhere``."""
    total = 0
    for kind, dims, layout in _ARRAY.findall(text):
        if "S(" in layout and not anywhere:
            continue
        found, count = WIDTH.match(kind), 1
        width = 8 if kind == "pred" else int(found.group(1)) if found else 0
        for dim in filter(None, dims.split(",")):
            count *= int(dim)
        total += count * width // 8
    return total


def _operands(text: str) -> tuple[str, ...]:
    """Names between the opening bracket of an instruction and the one that closes it."""
    depth, end = 1, 0
    while depth and end < len(text):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    return tuple(re.findall(r"%([\w.\-]+)", text[: end - 1]))


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    root, name, rest = found.groups()
    code = _OPCODE.search(" " + rest)
    if not code:
        return None
    start = code.start()
    attributes = rest[code.end() - 1 :]
    called = tuple(_CALLED.findall(attributes))
    branches = _BRANCHES.search(attributes)
    if branches:
        called += tuple(re.findall(r"[\w.\-]+", branches.group(1)))
    condition, scope = _CONDITION.search(attributes), _NAME.search(attributes)
    number = re.match(r"-?\d+\)", attributes) if code.group(1) in ("parameter", "constant") else None
    kind = rest[: max(start - 1, 0)] if start else ""
    return Instruction(
        name,
        bytes_of(kind),
        bytes_of(kind, anywhere=True),
        code.group(1),
        _operands(attributes),
        called,
        condition.group(1) if condition else "",
        scope.group(1) if scope else "",
        bool(root),
        int(number.group()[:-1]) if number else None,
    )


class Program:
    """A compiled module's computations. ``trips(scope)`` says how often a loop of unknown count runs."""

    def __init__(self, text: str, trips: Callable[[str], float]) -> None:
        self._trips = trips
        self._computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] | None = None
        for line in text.splitlines():
            header = _HEADER.match(line)
            if header:
                current = self._computations.setdefault(header.group(2), [])
                self.entry = header.group(2) if header.group(1) else self.entry
            elif current is not None and (found := _instruction(line)):
                current.append(found)
        self._moved = functools.cache(self._bytes_moved)
        self._read = functools.cache(self._bytes_read)
        self._sizes = functools.cache(self._sizes_of)

    @property
    def bytes_moved(self) -> float:
        return self._moved(self.entry)

    def loops(self) -> list[tuple[str, float, float]]:
        """Every loop's scope, its count and the bytes of one turn."""
        return [
            (x.scope, self._count(x), self._moved(x.called[0]))
            for body in self._computations.values()
            for x in body
            if x.opcode == "while"
        ]

    def collectives(self) -> dict[str, int]:
        """How often each kind stands in the program, by kind and where: in the loop over layers, outside of
        it, or in a branch (of requests with rules)."""
        found: collections.Counter[str] = collections.Counter()
        for body in self._computations.values():
            for x in body:
                kind = x.opcode.removesuffix("-start")
                if kind in COLLECTIVES:
                    inside = "in the layers" if "/while/" in x.scope else "outside the layers"
                    found[f"{kind} {'in branches' if '/cond/' in x.scope else inside}"] += 1
        return dict(found)

    def _count(self, x: Instruction) -> float:
        """A counted loop ends when its index, which starts at 0, reaches a constant."""
        condition = {y.name: y for y in self._computations[x.condition]}
        (root,) = (y for y in condition.values() if y.root)
        ends = [condition[name].number for name in root.operands if condition[name].opcode == "constant"]
        return float(ends[0]) if root.opcode == "compare" and ends else self._trips(x.scope)

    def _bytes_moved(self, name: str) -> float:
        return sum(self._bytes(name, x) for x in self._computations.get(name, ()))

    def _bytes(self, where: str, x: Instruction) -> float:
        sizes = self._sizes(where)
        if x.opcode in FREE or x.opcode.endswith("-done"):
            return 0
        if x.opcode == "while":
            return self._count(x) * self._moved(x.called[0])
        if x.opcode == "conditional":
            return min(self._moved(branch) for branch in x.called)
        if x.opcode == "call":
            return sum(self._moved(name) for name in x.called)
        if x.opcode in SLICES:
            return x.size + (x.whole if sizes.get(x.operands[0]) else 0)
        if x.opcode == "dynamic-update-slice":
            return 2 * sizes.get(x.operands[1], 0)
        if x.opcode == "async-start":
            return self._moved(x.called[0])
        if x.opcode == "copy-start":  # its type holds what is read and what is written
            return x.size
        if x.opcode.endswith("-start"):
            return sum(sizes.get(operand, 0) for operand in x.operands)
        if x.opcode == "fusion":
            body = x.called[0]
            read = sum(self._read(body, i) for i in range(len(x.operands)) if sizes.get(x.operands[i]))
            return read + self._written(body, x.size)
        return x.size + sum(sizes.get(operand, 0) for operand in x.operands)

    def _sizes_of(self, name: str) -> dict[str, int]:
        return {x.name: x.size for x in self._computations[name]}

    def _users(self, name: str, value: str) -> list[Instruction]:
        return [x for x in self._computations[name] if value in x.operands]

    def _bytes_read(self, name: str, index: int) -> float:
        """Of a fusion's parameter."""
        parameter = next(x for x in self._computations[name] if x.number == index)
        return min(parameter.size, self._part(name, parameter.name, parameter.size))

    def _part(self, name: str, value: str, size: int) -> float:
        total = 0.0
        for user in self._users(name, value):
            if user.opcode in VIEWS or (user.opcode == "fusion" and self._is_view(user.called[0])):
                total += self._part(name, user.name, size)
            elif user.opcode in SLICES and user.operands[0] == value:
                total += user.whole
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == value:
                continue
            elif user.opcode == "fusion":
                total += sum(self._read(user.called[0], i) for i, o in enumerate(user.operands) if o == value)
            else:
                return size
        return total

    def _is_view(self, name: str) -> bool:
        """Whether a fusion within a fusion only spells its operand in another layout, element by element."""
        return all(x.opcode in ("parameter", "copy", "bitcast") for x in self._computations[name])

    def _written(self, name: str, size: int) -> float:
        """Of a fusion's result: an update in place writes the update alone."""
        body = {x.name: x for x in self._computations[name]}
        root = next((x for x in body.values() if x.root), None)
        while root is not None and root.opcode == "bitcast":
            root = body.get(root.operands[0])
        if root is not None and root.opcode == "dynamic-update-slice":
            return body[root.operands[1]].size
        return size
