"""What entries of documented settings, frameworks and stacks bring, and what they bring elsewhere.

    python -m accuracy gains [--update] [FILE.csv ...]

Every entry is taken out in turn and the rows that it speaks of are predicted again. The gain of a source is by how
much the mean over its configurations of |log(predicted / measured)| grows without it. The source that suggested an
entry is that which a fitted number names, else the one that gains most: what is left is the gain elsewhere.

An entry that states what a file, a page or a log of its source says is a fact and stays; a number that is fitted or
assumed (`fitted` of frameworks.toml) needs a gain elsewhere. `--update` stores what was found: this module prints it.
"""

from __future__ import annotations

import csv
import math
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from accuracy.files import RESULTS, read
from accuracy.published import KINDS, Entry, Published, completed, documented, documenting, joined
from shardwise.cost import lineage
from shardwise.measured import Comparison, Context, MeasurementFile, Record, compared, framework_of, matches, read_table

# Predictions nearer than this are the same.
SAME = 1e-4
KINDS_JUDGED = ("training", "inference")
# Modes of runs under load, whose simulations take minutes.
LOADED = ("online", "disaggregated")
STORED = RESULTS / "gains.csv"
_COLUMNS = ("entry", "rests_on", "runs", "source", "gain", "elsewhere", "others")
FACT, FITTED = "fact of source", "fitted"
# What names a file, a module, a paper, a release or a commit.
_CITES = re.compile(
    r"github[.]com/|openxla[.]org|arXiv|[A-Za-z_]\w*/\w|\b(torch|transformers|trl|axolotl|llamafactory)[. ]\w|"
    r"\bdocumentation|^(as|the) |\bpull \d+|_\w+_|\w[.](py|md|yaml|toml)\b"
)
NEUTRAL: tuple[Any, ...] = (False, 0, 0.0, "", "none", "uniform", "all-to-all", [], {}, {"other": 0.0}, None)
"""Values that say that a framework does nothing of the kind: nobody cites them."""
Speaks: TypeAlias = Callable[[Mapping[str, str], Comparison], bool]
Pair: TypeAlias = tuple[dict[str, str], Comparison]
Rows: TypeAlias = Sequence[Pair]


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """An entry that is taken out: its name, what is known without it, and which rows it may speak of."""

    name: str
    context: type[Context]
    speaks_of: Speaks
    basis: str = FACT
    suggested: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """What an entry brings: configurations that it moves, and the gain of each source, of those that it moves."""

    name: str
    runs: int
    sources: Mapping[str, float]
    basis: str = FACT
    named: str = ""

    @property
    def suggested(self) -> str:
        """The source that suggested the entry: as it says, else that which gains most; empty where nothing moves."""
        return self.named or max(self.sources, key=lambda name: self.sources[name], default="")

    @property
    def elsewhere(self) -> float | None:
        """The mean gain of the other sources, None where there are none."""
        others = [gain for name, gain in self.sources.items() if name != self.suggested]
        return sum(others) / len(others) if others else None


def _known(name: str, **fields: Any) -> type[Context]:
    return type(name, (Published,), fields)


def cites(source: str) -> bool:
    """Return whether a text names what can be looked up.

    >>> cites("torch/optim/adamw.py: foreach on CUDA unless told"), cites("middle taken")
    (True, False)
    """
    return bool(_CITES.search(source))


def uncited() -> Iterator[str]:
    """Yield every entry that says what a framework does, is not fitted, and names no file, page or log."""
    numbers = {one["field"] for one in read("frameworks.toml")["fitted"]}
    for name, row in _stacks().items():
        for field, source in row["sources"].items():
            value = row.get(field)
            if field not in numbers and value not in NEUTRAL and not cites(source):
                yield f"stack {name}: {field}"
    tables = [one for kind in ("framework", "variant", "adjustment") for one in Published.frameworks[kind]]
    yield from (one["source"] for one in (*Published.documented, *tables) if not cites(one["source"]))


def removals() -> Iterator[Removal]:
    """Yield every entry on sources and frameworks, fields of stacks unlike their bases, and every fitted number."""
    for one in Published.documented:
        others = tuple(other for other in Published.documented if other is not one)
        where = ", ".join(f"{cell} {word}" for cell, word in one.get("where", {}).items())
        yield Removal(
            name=f"documented: {one['citation']} {where} -> {_sets({**one['cells'], **one.get('instead', {})})}",
            context=_known("WithoutSetting", documented=others),
            speaks_of=_documents(one),
        )
    table = Published.frameworks
    for kind in ("framework", "variant", "adjustment"):
        for one in table[kind]:
            # The last of all takes whatever no other does.
            if one.get("pattern") == "":
                continue
            rest = {**table, kind: [other for other in table[kind] if other is not one]}
            yield Removal(
                name=f"{kind} {one.get('pattern', one.get('of'))} {_sets(one.get('where', {}))} -> {_does(one)}",
                context=_known("WithoutFramework", frameworks=rest),
                speaks_of=_of_framework(one) if kind == "framework" else _of_cells(one),
            )
    numbers = {one["field"]: one for one in table["fitted"]}
    yield from (one for one in _of_stacks() if one.name.rpartition(" ")[2] not in numbers)
    yield from map(_of_number, numbers.values())


def _of_number(one: Entry) -> Removal:
    """Return the removal of a fitted number of all stacks: as if nothing of the kind were."""
    without = {"of": ".*", "where": {}, "sets": {one["field"]: one["without"]}}
    return Removal(
        name=f"number {one['field']}",
        context=_known("WithoutNumber", frameworks=joined({"adjustment": [without]}, Published.frameworks)),
        speaks_of=_holds_other(one["field"], one["without"]),
        basis=FITTED,
        suggested=one["suggested"],
    )


def _documents(one: Entry) -> Speaks:
    return lambda row, _: any(told is one for told in _documenting(tuple(row.items())))


@cache
def _documenting(cells: tuple[tuple[str, str], ...]) -> Sequence[Entry]:
    row = dict(cells)
    return documenting(row.get("citation", ""), row)


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


def _stack(found: Comparison) -> Any:
    """Return the framework of a run of training, None of one of serving, which has an engine."""
    return getattr(found.case, "stack", None)


def _of_cells(one: Mapping[str, Any]) -> Speaks:
    """Return which training rows have the cells, or documented ones, that a variant or an adjustment asks for."""

    def speaks(row: Mapping[str, str], found: Comparison) -> bool:
        stack = getattr(_stack(found), "name", "")
        where = {cell: word for cell, word in one["where"].items() if cell in row}
        return bool(
            any(re.fullmatch(name, stack) for name in (one["of"], one.get("stack", one["of"])))
            and any(matches(where, cells) for cells in (row, _told(tuple(row.items()))))
        )

    return speaks


@cache
def _told(cells: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    """Return the cells of a row with what its source documents elsewhere."""
    return completed(Record(dict(cells))).row


def _holds_other(field: str, without: Any) -> Speaks:
    """Return which rows ran on a stack that has another value of a field than the one without an entry."""
    return lambda _, found: _stack(found) is not None and getattr(_stack(found), field) != without


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
            value = _value(base, field)
            other = {"of": "|".join(heirs), "where": {}, "sets": {field: value}}
            yield Removal(
                name=f"stack {name}: {field}",
                context=_known("WithoutField", frameworks=joined({"adjustment": [other]}, Published.frameworks)),
                speaks_of=_ran_on({lineage(heir) for heir in heirs}, _holds_other(field, value)),
            )


def _value(name: str, field: str) -> Any:
    """Return a field of a stack, its own or that of what it extends, as stacks hold it."""
    row = _stacks()[name]
    return _held(row[field]) if field in row else _value(row["extends"], field)


def _held(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(map(_held, value)) if isinstance(value, list) else value


def _ran_on(stacks: set[str], moves: Speaks) -> Speaks:
    return lambda row, found: found.conditions is not None and found.conditions.stack in stacks and moves(row, found)


def _heirs(name: str, field: str) -> tuple[str, ...]:
    """Return a stack and those that take a field from it."""
    below = (other for other, row in _stacks().items() if row.get("extends") == name and field not in row)
    return (name, *(heir for other in below for heir in _heirs(other, field)))


def gains(files: Iterable[str], entries: Iterable[Removal] | None = None) -> Iterator[Gain]:
    """Yield what entries bring on the rows of files of training and fixed batches."""
    read_ones = (read_table(path, KINDS) for path in files)
    tables = [_judged(table) for table in read_ones if table.kind.name in KINDS_JUDGED]
    whole = [(table, [*zip(table.rows, _predicted(table, Published), strict=True)]) for table in tables]
    for one in removals() if entries is None else entries:
        moved: dict[str, list[float]] = defaultdict(list)
        for table, pairs in whole:
            rows = [*_once((raw, found) for raw, found in pairs if _counts(found) and one.speaks_of(raw, found))]
            again = _predicted(replace(table, rows=tuple(raw for raw, _ in rows)), one.context)
            for source, gain in _moved(rows, again):
                moved[source].append(gain)
        yield Gain(
            name=one.name,
            runs=sum(map(len, moved.values())),
            sources={source: sum(of) / len(of) for source, of in moved.items()},
            basis=one.basis,
            named=one.suggested,
        )


def _judged(table: MeasurementFile) -> MeasurementFile:
    return replace(table, rows=tuple(row for row in table.rows if row.get("serving_mode") not in LOADED))


def _predicted(table: MeasurementFile, context: type[Context]) -> list[Comparison]:
    return list(compared(table, context(Path(table.path).parent))) if table.rows else []


def _counts(found: Comparison) -> bool:
    return bool(found.measured and found.predicted) and found.quality not in ("C", "low")


def _once(rows: Iterable[Pair]) -> Iterator[Pair]:
    """Yield one row of the speed of each configuration and one a metric of its memory."""
    seen = set()
    for raw, found in rows:
        key = (found.case_id, found.metric if found.metric.startswith("memory") else found.metric == "peak_memory")
        if key not in seen:
            seen.add(key)
            yield raw, found


def _moved(rows: Rows, again: Sequence[Comparison]) -> Iterator[tuple[str, float]]:
    """Yield source and gain of each row whose prediction moves."""
    for (_, before), after in zip(rows, again, strict=True):
        if before.measured and before.predicted and after.predicted:
            with_it, without = (abs(math.log(one / before.measured)) for one in (before.predicted, after.predicted))
            if abs(after.predicted / before.predicted - 1) > SAME:
                yield before.source, without - with_it


def rows(found: Iterable[Gain]) -> Iterator[dict[str, str]]:
    """Yield what entries bring as rows of results/gains.csv; entries that move no row have no figures."""
    for one in found:
        yield {
            "entry": one.name,
            "rests_on": one.basis,
            "runs": str(one.runs),
            "source": one.suggested,
            "gain": f"{one.sources.get(one.suggested, 0.0):.4f}" if one.sources else "",
            "elsewhere": "" if one.elsewhere is None else f"{one.elsewhere:.4f}",
            "others": str(len(set(one.sources) - {one.suggested})),
        }


def store(found: Iterable[Gain]) -> None:
    """Write what entries bring into results/gains.csv."""
    with STORED.open("w", encoding="ascii", newline="") as file:
        write = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        write.writeheader()
        write.writerows(rows(found))


def stored() -> list[dict[str, str]]:
    """Return the rows of results/gains.csv."""
    return list(csv.DictReader(STORED.read_text(encoding="ascii").splitlines()))


def page(found: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Yield a Markdown table of what entries bring: those that move a row."""
    yield "| entry | rests on | runs | its source | gain | elsewhere |"
    yield "|---|---|---:|---|---:|---:|"
    for row in found:
        if row["runs"] != "0":
            elsewhere = f"{float(row['elsewhere']):+.1%} of {row['others']}" if row["elsewhere"] else "none"
            name = f"`{row['entry'].replace('|', ' or ')}`"
            cells = (name, row["rests_on"], row["runs"], row["source"], f"{float(row['gain']):+.1%}", elsewhere)
            yield f"| {' | '.join(cells)} |"


def main() -> int:
    """Print the stored table."""
    print(*page(stored()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
