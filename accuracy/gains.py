"""What entries of documented settings, frameworks and stacks bring, and what they bring elsewhere.

    python -m accuracy gains [FILE.csv ...]

Every entry is taken out in turn and the rows that it speaks of are predicted again. The gain of a source is by how
much the mean over its configurations of |log(predicted / measured)| grows without it. The source that gains most is
taken to be the one that suggested the entry: what is left is its gain elsewhere.
"""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from accuracy.files import read
from accuracy.published import KINDS, Entry, Published, documented, documenting, joined
from shardwise.measured import Comparison, Context, Table, compared, framework_of, matches, read_table
from shardwise.measured import read as known

# Predictions nearer than this are the same.
SAME = 1e-4
KINDS_JUDGED = ("training", "inference")
# Runs under load, whose simulations take minutes.
LOADED = ("aic_silicon", "mlperf60", "trtllm_online")
Speaks: TypeAlias = Callable[[Mapping[str, str], Comparison], bool]
Rows: TypeAlias = Sequence[tuple[dict[str, str], Comparison]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """An entry that is taken out: its name, what is known without it, and which rows it may speak of."""

    name: str
    context: type[Context]
    speaks_of: Speaks


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """What an entry brings: configurations that it moves, and the gain of each source, of those that it moves."""

    name: str
    runs: int
    sources: Mapping[str, float]

    @property
    def suggested(self) -> str:
        """The source that gains most, empty where nothing moves."""
        return max(self.sources, key=lambda name: self.sources[name], default="")

    @property
    def elsewhere(self) -> float | None:
        """The mean gain of the other sources, None where there are none."""
        others = [gain for name, gain in self.sources.items() if name != self.suggested]
        return sum(others) / len(others) if others else None


def _known(name: str, **fields: Any) -> type[Context]:
    return type(name, (Published,), fields)


def removals() -> Iterator[Removal]:
    """Yield every entry of this folder, and every field of a stack that differs from what the stack extends."""
    for index, one in enumerate(Published.documented):
        others = tuple(other for other in Published.documented if other is not one)
        where = ", ".join(f"{cell} {word}" for cell, word in one.get("where", {}).items())
        yield Removal(
            name=f"documented {index + 1}: {one['citation']} {where} -> {_sets(one['cells'])}",
            context=_known("WithoutSetting", documented=others),
            speaks_of=_documents(one),
        )
    table = read("frameworks.toml")
    for kind in ("framework", "variant", "adjustment"):
        for one in table[kind]:
            rest = {**table, kind: [other for other in table[kind] if other is not one]}
            yield Removal(
                name=f"{kind} {one.get('pattern', one.get('of'))} {_sets(one.get('where', {}))} -> {_does(one)}",
                context=_known("WithoutFramework", frameworks=joined(rest, known("frameworks.toml"))),
                speaks_of=_of_framework(one) if kind == "framework" else _of_cells(one),
            )
    yield from _of_stacks()


def _documents(one: Entry) -> Speaks:
    return lambda row, _: any(told is one for told in documenting(row.get("citation", ""), row))


def _sets(cells: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in cells.items())


def _does(one: Mapping[str, Any]) -> str:
    return str(one.get("stack") or _sets({**one.get("sets", {}), **one.get("settings", {})}))


def _of_framework(one: Mapping[str, Any]) -> Speaks:
    def speaks(row: Mapping[str, str], _: Comparison) -> bool:
        told = documented(row.get("citation", ""), row)[0]
        name = told.get("framework") or row.get("framework", "")
        found = framework_of(Published.frameworks, name, row)
        return bool(found.pattern == one["pattern"] and dict(found.where) == one.get("where", {}))

    return speaks


def _of_cells(one: Mapping[str, Any]) -> Speaks:
    where = {
        cell: word for cell, word in one["where"].items() if cell in ("device", "compute_dtype", "attention_kernel")
    }
    return lambda row, _: matches(where, row)


@cache
def _stacks() -> dict[str, dict[str, Any]]:
    text = resources.files("shardwise.plans").joinpath("stacks.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _of_stacks() -> Iterator[Removal]:
    """Yield the fields of stacks that extend another: without one, they and what extends them do as that other."""
    table = _stacks()
    for name, row in table.items():
        base = row.get("extends", "")
        for field in row if base else ():
            if field not in row["sources"]:
                continue
            heirs = _heirs(name, field)
            other = {"of": "|".join(heirs), "where": {}, "sets": {field: _value(base, field)}}
            yield Removal(
                name=f"stack {name}: {field}",
                context=_known("WithoutField", frameworks=joined({"adjustment": [other]}, Published.frameworks)),
                speaks_of=_ran_on({heir.removesuffix("-scores") for heir in heirs}),
            )


def _value(name: str, field: str) -> Any:
    """Return a field of a stack, its own or that of what it extends, as stacks hold it."""
    row = _stacks()[name]
    return _held(row[field]) if field in row else _value(row["extends"], field)


def _held(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(map(_held, value)) if isinstance(value, list) else value


def _ran_on(stacks: set[str]) -> Speaks:
    return lambda _, found: found.conditions is not None and found.conditions.stack in stacks


def _heirs(name: str, field: str) -> tuple[str, ...]:
    """Return a stack and those that take a field from it."""
    below = (other for other, row in _stacks().items() if row.get("extends") == name and field not in row)
    return (name, *(heir for other in below for heir in _heirs(other, field)))


def gains(files: Iterable[str], entries: Iterable[Removal] | None = None) -> Iterator[Gain]:
    """Yield what entries bring on the rows of files of training and fixed batches."""
    tables = [table for table in (read_table(path, KINDS) for path in files) if table.kind.name in KINDS_JUDGED]
    whole = [(table, [*zip(table.rows, _predicted(table, Published), strict=True)]) for table in tables]
    for one in removals() if entries is None else entries:
        moved: dict[str, list[float]] = defaultdict(list)
        for table, pairs in whole:
            rows = [(raw, found) for raw, found in pairs if _counts(found) and one.speaks_of(raw, found)]
            again = _predicted(replace(table, rows=tuple(raw for raw, _ in rows)), one.context)
            for source, gain in _moved(rows, again):
                moved[source].append(gain)
        yield Gain(
            name=one.name,
            runs=sum(map(len, moved.values())),
            sources={source: sum(of) / len(of) for source, of in moved.items()},
        )


def _predicted(table: Table, context: type[Context]) -> list[Comparison]:
    return list(compared(table, context(Path(table.path).parent))) if table.rows else []


def _counts(found: Comparison) -> bool:
    return found.relative_error is not None and found.quality not in ("C", "low") and found.source not in LOADED


def _moved(rows: Rows, again: Sequence[Comparison]) -> Iterator[tuple[str, float]]:
    """Yield source and gain of each configuration, one a metric, whose prediction moves."""
    seen = set()
    for (_, before), after in zip(rows, again, strict=True):
        key = (before.case_id, before.metric == "peak_memory")
        if not after.predicted or not before.predicted or not before.measured or key in seen:
            continue
        seen.add(key)
        with_it, without = (abs(math.log(one.predicted / before.measured)) for one in (before, after) if one.predicted)
        if abs(after.predicted / before.predicted - 1) > SAME:
            yield before.source, without - with_it


def page(found: Iterable[Gain]) -> Iterator[str]:
    """Yield a Markdown table of what entries bring."""
    yield "| entry | runs | its source | gain | elsewhere |"
    yield "|---|---:|---|---:|---:|"
    for one in found:
        own = f"{one.suggested} | {one.sources[one.suggested]:+.1%}" if one.sources else "none | "
        elsewhere = "none" if one.elsewhere is None else f"{one.elsewhere:+.1%} of {len(one.sources) - 1}"
        yield f"| `{one.name.replace('|', ' or ')}` | {one.runs} | {own} | {elsewhere} |"
