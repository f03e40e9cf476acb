"""Recorded formulas as lists of array operations, run on meshes of plans.

An evaluator has rows (how work is split), modes (what is computed again in backward) and places (which ranks share the
fastest domain: several to a row); rows that follow each other and agree in what most numbers read are one split: of
blocks all but how experts are split, of pipelines all but the micro-batch. Places of one split whose dense layers lie
alike are one site. Arrays have the modes first where they vary with them, and splits, sites, rows or places last.
Each operation runs on the least of them that its arguments vary with, into memory that is used again.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np

from shardwise.ledger.number import OPERATIONS, RECORDS, evaluate
from shardwise.ledger.symbol import Node, needed
from shardwise.records import dataclass

ROW, MODE, PLACE, SPLIT, BATCH, SITE = 1, 2, 4, 8, 16, 32
CELLS = 98_304
"""About so many numbers of an array are computed at once: more would not stay in the cache."""
_IN_PLACE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "true_divide": np.true_divide,
    "max": np.maximum,
    "min": np.minimum,
    "ceil": np.ceil,
    "sqrt": np.sqrt,
    "log2": np.log2,
    "power": np.power,
    "raised": np.power,
}
_SPREAD = {
    (SPLIT, ROW): "split to row",
    (SPLIT, PLACE): "split to place",
    (ROW, PLACE): "row to place",
    (SPLIT, SITE): "split to site",
    (SITE, PLACE): "site to place",
}


def _widest(level: int) -> int:
    if level & SITE and level & ROW:
        return PLACE
    return next((axis for axis in (PLACE, SITE, ROW, SPLIT) if level & axis), 0)


# What the last axis of an array of each level is: places, sites, rows, splits, or nothing. BATCH says of blocks that
# they vary with the micro-batch.
_WIDEST = tuple(map(_widest, range(64)))
# How to each level an array of another is brought, nothing where it is as wide.
_WIDENED = tuple(tuple(_SPREAD.get((one, other)) for one in _WIDEST) for other in _WIDEST)
# What an array of each level varies with as it is kept: modes, and its last axis.
_KEPT = tuple(level & MODE | axis for level, axis in enumerate(_WIDEST))


def axis_of(level: int) -> int:
    """Return what the last axis of an array of a level is: places, sites, rows, splits, or nothing."""
    return _WIDEST[level]


@dataclass(frozen=True, slots=True)
class ProgramShape:
    """Rows, modes and places of plans; `row` is the row of each place, `split` the split of each row.

    Of sites, `split_of` is the split of each, `site` that of each place.
    """

    rows: int
    modes: int
    row: Any
    splits: int = 0
    split: Any = None
    split_of: Any = None
    site: Any = None

    def of(self, level: int) -> tuple[int, ...]:
        """Return the shape of an array that varies with a level."""
        axis, last = _WIDEST[level], self.rows
        if axis in (PLACE, SPLIT, SITE):
            last = self.splits if axis == SPLIT else len(self.row if axis == PLACE else self.split_of)
        return (self.modes, last) if level & MODE and self.modes > 1 else (last,)

    def spread(self, how: str) -> Any:
        """Return for each row, site or place where its number stands among what is less wide."""
        if how == _SPREAD[SPLIT, PLACE]:
            return self.split[self.row]
        known = {(ROW, PLACE): self.row, (SPLIT, ROW): self.split, (SPLIT, SITE): self.split_of}
        return next((at for one, at in known.items() if _SPREAD[one] == how), self.site)


def _above(args: list[Any], out: Any) -> Any:
    a, threshold, then, other = args
    np.copyto(out, other)
    np.copyto(out, then, where=np.greater(a, threshold))
    return out


# One operation: its name, what does it, where its arguments and its result are kept, and the memory it may write to.
_Instruction = tuple[str, Callable[..., Any] | None, Sequence[int], int, int]


_ARENA: dict[tuple[int, int], Any] = {}
# The shapes that were asked for of each piece of memory: to cut one out takes as long as an operation on few numbers.
_VIEWS: dict[tuple[int, int, tuple[int, ...]], Any] = {}
_MOST_VIEWS = 20_000


def _memory(level: int, slot: int, shape: tuple[int, ...]) -> Any:
    """Return memory for a result; it is kept between runs and grows where it must."""
    view = _VIEWS.get((level, slot, shape))
    if view is None:
        size = shape[0] if len(shape) == 1 else shape[0] * shape[1]
        kept = _ARENA.get((level, slot))
        if kept is None or len(kept) < size:
            # Views of what it was are as good as new ones until then, but would keep it.
            _VIEWS.clear()
            kept = _ARENA[level, slot] = np.empty(max(size, 1))
        elif len(_VIEWS) > _MOST_VIEWS:
            _VIEWS.clear()
        view = _VIEWS[level, slot, shape] = kept[:size].reshape(shape)
    return view


class Program:
    """Outputs by name as operations in order; `inputs` are the names it reads, with their levels."""

    __slots__ = ("_constants", "_count", "_given", "_kept", "_lines", "_results", "_where", "inputs", "plain")

    def __init__(self, outputs: Mapping[str, Any]) -> None:
        self.inputs: dict[str, int] = {}
        self.plain: dict[str, Any] = {}
        self._constants: list[Any] = []
        self._lines: list[_Instruction] = []
        self._kept: list[tuple[int, int]] = []
        self._given: dict[str, int] = {}
        self._where: dict[Any, int] = {}
        self._results: dict[str, int] = {}
        self._count = 0
        self._build(outputs)

    def to_plain(self) -> dict[str, Any]:
        """Return the program as plain values, of which `of_plain` makes it again.

        >>> from shardwise.ledger.symbol import Graph
        >>> x = Graph().given("x", ROW)
        >>> again = Program.of_plain(Program({"y": 2.0 * x + x * x, "z": 3.0}).to_plain())
        >>> shape = ProgramShape(rows=2, modes=1, row=np.zeros(0, int))
        >>> {name: np.asarray(v).tolist() for name, v in again.run({"x": np.array([1.0, 4.0])}, shape).items()}
        {'z': 3.0, 'y': [3.0, 24.0]}
        """
        ops, _, args, into, memory = zip(*self._lines, strict=True) if self._lines else ((),) * 5
        numbers = {op: i for i, op in enumerate(dict.fromkeys(ops))}
        columns = [numbers[op] for op in ops], [*map(len, args)], [*chain.from_iterable(args)], into, memory
        return {
            "inputs": self.inputs,
            "plain": self.plain,
            "constants": [(place, _constant_told(value)) for place, value in self._constants],
            "words": list(numbers),
            "lines": [*map(_packed, columns)],
            "kept": self._kept,
            "given": self._given,
            "results": self._results,
            "count": self._count,
        }

    @classmethod
    def of_plain(cls, tree: Mapping[str, Any]) -> Program:
        """Return the program that plain values tell of; raises `ValueError` where they do not tell of one."""
        program = cls({})
        words = tree["words"]
        ops, sizes, flat, into, memory = map(_unpacked, tree["lines"])
        ends = np.cumsum(sizes).tolist()
        if len(ops) != len(sizes) or min(sizes, default=0) < 0 or (ends[-1] if ends else 0) != len(flat):
            raise ValueError("lines")
        args = [tuple(flat[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
        if not all(word in _IN_PLACE or word in _SPREAD.values() or word in OPERATIONS for word in words):
            raise ValueError("operation")
        program._count, program._kept = int(tree["count"]), [(int(a), int(b)) for a, b in tree["kept"]]
        program._given, program._results = dict(tree["given"]), dict(tree["results"])
        program.inputs, program.plain = dict(tree["inputs"]), dict(tree["plain"])
        program._constants = [(place, _constant_of(value)) for place, value in tree["constants"]]
        _check_order(program, (flat, sizes), into)
        if not (
            _within(memory, len(program._kept))
            and _within(ops, len(words))
            and set(program._given) == set(program.inputs)
        ):
            raise ValueError("place")
        names = [words[op] for op in ops]
        program._lines = [*zip(names, map(_IN_PLACE.get, names), args, into, memory, strict=True)]
        return program

    def _build(self, outputs: Mapping[str, Any]) -> None:
        lines: list[tuple[str, tuple[int, ...], int, int]] = []
        where = self._where
        for symbol in needed(outputs.values()):
            key, level = symbol.key, symbol.level
            widened = _WIDENED[level]
            if key[0] == "given":
                name = str(key[1])
                self.inputs[name], self._given[name] = level, self._new(symbol)
                continue
            # Most arguments are symbols no narrower than the result: this is the inner loop of a recording.
            places = tuple(
                [
                    where[a] if a.__class__ is Node and widened[a.level] is None else self._argument(a, level, lines)
                    for a in key[1:]
                ]
            )
            lines.append((key[0], places, self._new(symbol), _KEPT[level]))
        nodes = {name: value for name, value in outputs.items() if isinstance(value, Node)}
        self.plain = {name: value for name, value in outputs.items() if name not in nodes}
        self._results = {name: self._argument(v, v.level & ~SPLIT | ROW, lines) for name, v in nodes.items()}
        self._allot(lines, set(self._results.values()))
        self._where.clear()

    def _new(self, key: Any) -> int:
        self._where[key] = self._count
        self._count += 1
        return self._count - 1

    def _argument(self, value: Any, level: int, lines: list[Any]) -> int:
        """Return where an argument is kept: spread over what is wider where the result varies with that."""
        if value.__class__ is not Node:
            constant = float(value) if isinstance(value, (int, float)) else value
            key = ("constant", constant)
            if key not in self._where:
                self._constants.append((self._new(key), constant))
            return self._where[key]
        how = _WIDENED[level][value.level]
        if how is None:
            return self._where[value]
        if (how, value) not in self._where:
            source = self._where[value]
            lines.append((how, (source,), self._new((how, value)), value.level & MODE | _WIDEST[level]))
        return self._where[how, value]

    def _allot(self, lines: list[Any], kept: set[int]) -> None:
        """Give each operation memory that no value still needed lies in."""
        # Which operation is the last to read each number; results are read by none of them.
        last = {a: i for i, (_, args, *_) in enumerate(lines) for a in args} | dict.fromkeys(kept)
        free: dict[int, list[int]] = {level: [] for *_, level in lines}
        made, memory, memory_of = dict.fromkeys(free, 0), self._kept, dict[int, int]()
        for i, (op, args, into, level) in enumerate(lines):
            run, pool = _IN_PLACE.get(op), free[level]
            late: list[int] = []
            for a in args:
                # What is an argument twice is freed once.
                if last[a] == i and (one := memory_of.pop(a, None)) is not None:
                    # An operation may write over an argument of its own that nothing reads later, but for a choice.
                    (pool if run is not None and memory[one][0] == level else late).append(one)
            if pool:
                place = pool.pop()
            else:
                place = len(memory)
                memory.append((level, made[level]))
                made[level] += 1
            for one in late:
                free[memory[one][0]].append(one)
            memory_of[into] = place
            self._lines.append((op, run, args, into, place))

    def run(
        self, given: Mapping[str, Any], shape: ProgramShape, columns: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Return the outputs, which stay good until the next run; what varies with nothing is a plain number.

        Those that belong into `columns` are computed there where their arrays have the same shape.
        """
        values: list[Any] = [None] * self._count
        for place, constant in self._constants:
            values[place] = constant
        for name, place in self._given.items():
            values[place] = given[name]
        shapes = {level: shape.of(level) for level in {level for level, _ in self._kept}}
        kept = [_memory(level, slot, shapes[level]) if level else None for level, slot in self._kept]
        # The memory of an output is that of no other number after it.
        memory = {number: place for *_, number, place in self._lines} if columns else {}
        for name, array in columns.items():
            place = memory.get(self._results.get(name, -1), -1)
            own = kept[place] if place >= 0 else None
            if own is not None and own.shape == array.shape:
                kept[place] = array
        spread: dict[str, Any] = dict.fromkeys(_SPREAD.values())
        with np.errstate(all="ignore"):
            for op, run, args, into, place in self._lines:
                out = kept[place]
                if run is not None and out is not None:
                    # Most operations have two arguments: this is the inner loop of a search.
                    if len(args) == 2:
                        values[into] = run(values[args[0]], values[args[1]], out=out)
                    else:
                        values[into] = run(values[args[0]], out=out)
                elif out is None:
                    values[into] = _plainly(op, [values[a] for a in args])
                elif op == "above":
                    values[into] = _above([values[a] for a in args], out)
                elif op in spread:
                    if spread[op] is None:
                        spread[op] = shape.spread(op)
                    values[into] = values[args[0]].take(spread[op], axis=-1, out=out, mode="clip")
                else:
                    values[into] = evaluate(op, *[values[a] for a in args])
        return {**self.plain, **{name: values[place] for name, place in self._results.items()}}


def _packed(numbers: Sequence[int]) -> str:
    """Return whole numbers as text: tens of thousands of them, which take longer one by one."""
    return b64encode(np.array(numbers, "<i4").tobytes()).decode()


def _unpacked(text: str) -> list[int]:
    numbers: list[int] = np.frombuffer(b64decode(text, validate=True), "<i4").tolist()
    return numbers


def _constant_told(value: Any) -> Any:
    """Return a constant as plain values: a number, or the name of a record and its fields."""
    name = type(value).__name__
    return [name, *(getattr(value, f.name) for f in fields(value))] if name in RECORDS else value


def _constant_of(value: Any) -> Any:
    return RECORDS[value[0]](*map(_tuples, value[1:])) if isinstance(value, list) else float(value)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _check_order(program: Program, args: tuple[Sequence[int], Sequence[int]], into: Sequence[int]) -> None:
    """Raise `ValueError` where an operation reads what is not there before it; `args` of all, and how many of each."""
    flat, sizes = args
    made = np.full(program._count, len(into) + 1)
    made[np.array([*program._given.values(), *(place for place, _ in program._constants)], np.int64)] = -1
    made[np.array(into, np.int64)] = np.arange(len(into))
    read = made[np.array(flat, np.int64)] < np.repeat(np.arange(len(into)), sizes)
    results = made[np.array([*program._results.values()], np.int64)] <= len(into)
    if not (read.all() and results.all() and _within(flat, program._count)):
        raise ValueError("order")


def _within(places: Sequence[int], size: int) -> bool:
    return not places or (min(places) >= 0 and max(places) < size)


def _plainly(op: str, args: list[Any]) -> Any:
    simple = {"add": "__add__", "subtract": "__sub__", "multiply": "__mul__", "true_divide": "__truediv__"}
    if op in simple:
        return getattr(float(args[0]), simple[op])(float(args[1]))
    return float(args[0]) ** 0.5 if op == "sqrt" else evaluate(op, *args)


@dataclass(frozen=True, slots=True)
class BlockColumn:
    """One number of the blocks in the tables: its column's name, what it varies with, if it is never below zero."""

    name: str
    level: int
    positive: bool = False


@dataclass(frozen=True, slots=True)
class BlockPrograms:
    """Some leaves, and the programs of their columns for each way to split, one a recompute mode where modes differ."""

    leaves: tuple[BlockColumn, ...]
    programs: Mapping[tuple[int, int, int], Program]

    @property
    def first(self) -> dict[tuple[int, int, int], tuple[int, int, int]]:
        """The first way that has the program of each way."""
        ways: dict[int, tuple[int, int, int]] = {}
        return {way: ways.setdefault(id(program), way) for way, program in self.programs.items()}
