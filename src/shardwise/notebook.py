"""What a notebook shows of an answer: its verdict, bytes as bars, headlines with their bands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from shardwise._lazy import provided
from shardwise.records import dataclass
from shardwise.units import show_bytes, show_count, show_seconds

# Of what lives in memory: sums, limits and what is on the host are no parts of it.
_NO_PARTS = ("peak", "needed", "cache_budget", "in_flight", "host", "fragmented")
_BAR = '<div style="background:#4c78a8;height:0.8em;width:{:.0f}px"></div>'
_BAR_PIXELS = 160
_CELL = 'style="text-align:left;padding:0 1.2em 0 0"'
# Read on light and on dark pages alike (4.0 and 4.4 to 1 on white, more on black).
_GOOD, _BAD = "#238636", "#d64545"


@dataclass(frozen=True, slots=True)
class CardLine:
    """One line of a card: a name, its value, the band around it, and the share of a bar (0 draws none)."""

    name: str
    value: str
    band: str = ""
    share: float = 0.0


def show(name: str, value: float) -> str:
    """Return a number in the unit that its name ends with.

    >>> show("step_seconds", 0.5), show("device_bytes", 2**30), show("mfu", 0.415), show("tokens", 4350)
    ('500.00 ms', '1.00 GiB', '41.5%', '4,350')
    """
    if name.endswith("_seconds"):
        return show_seconds(value)
    if name.endswith("_bytes"):
        return show_bytes(value)
    if name in ("mfu", "hfu"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if 100 <= value < 1e4 else show_count(value)


def in_words(record: Any, *left_out: str) -> str:
    """Return the fields of a record that are not at their defaults, with their values.

    >>> from shardwise.plans import Plan
    >>> in_words(Plan(tp=4, sharding="fsdp", sequence_parallel=False))
    'tp 4, sequence parallel off, sharding fsdp'
    """
    given = ((one.name, getattr(record, one.name)) for one in fields(record) if one.name not in left_out)
    usual = {one.name: one.default for one in fields(record)}
    words = {True: "on", False: "off"}
    shown = (
        (name, words[value] if isinstance(value, bool) else value) for name, value in given if value != usual[name]
    )
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown) or "one device, nothing split"


def plain_line(answer: object) -> str:
    """Return the line of an answer without the brackets and the class of its repr.

    >>> from shardwise.models import load_model
    >>> plain_line(load_model("gpt2"))
    'gpt2: 12 layers of 768, vocabulary of 50257'
    """
    match = re.fullmatch(r"<\w+ (?:of )?(.*)>", repr(answer), re.DOTALL)
    return match[1] if match else repr(answer)


def card(line: str, facts: Iterable[CardLine]) -> str:
    """Return HTML of a line above a table of facts; a verdict in it is coloured, and text is escaped.

    >>> card("<A>", [CardLine("a & b", "1")])[:44]
    '<p><b>&lt;A&gt;</b></p><table><tbody><tr><td'
    """
    import html

    rows = "".join(
        "<tr>" + "".join(f"<td {_CELL}>{html.escape(text)}</td>" for text in (f.name, f.value, f.band))
        + f"<td>{_BAR.format(min(max(f.share, 0.0), 1.0) * _BAR_PIXELS) if f.share > 0 else ''}</td></tr>"
        for f in facts
    )  # fmt: skip
    bad = re.search(r"does not (fit|meet)|none (feasible|keeps)", line)
    good = not bad and re.search(r"\b(fits|meets)\b", line)
    style = f' style="color:{_BAD if bad else _GOOD}"' if bad or good else ""
    return f"<p><b{style}>{html.escape(line)}</b></p>" + (f"<table><tbody>{rows}</tbody></table>" if rows else "")


class PlainValues:
    """An answer that is given as plain values, too."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return what the command of this answer prints with `--json`: the same keys, values and units (docs/json.md).

        What belongs to a command line is left out: the `command` of each of the best plans, and keys of flags such as
        `--energy` (`energy(report).to_dict()` has its own). An answer that says no has the changes that would do,
        each of which is worked out.

        >>> from shardwise import Cluster, Plan, Training, load_model, train
        >>> job = Training(seq_len=1024, global_batch=8)
        >>> tree = train(load_model("gpt2"), Cluster.parse("1xh100"), Plan(), job).to_dict()
        >>> tree["schema"], tree["fits"], tree["plan"]["tp"]
        (1, True, 1)
        """
        tree: dict[str, Any] = provided("values_of")(self)
        return tree


class Card(PlainValues):
    """An answer that a notebook shows as a card: `repr` is its line, `_facts` yields what stands below."""

    __slots__ = ()

    def _facts(self) -> Iterator[CardLine]:
        """Yield the headlines of a report with their 10 to 90 % intervals, and what fills the fullest device."""
        report: Any = self
        for name, (low, high) in report.interval.items():
            if hasattr(report, name):  # others are of a part of it, which the bars show
                band = f"{show(name, low)} to {show(name, high)}"
                yield CardLine(name.replace("_", " "), show(name, getattr(report, name)), band)
        room = report.case.cluster.device.memory_bytes
        for field in fields(report.memory):
            value = getattr(report.memory, field.name)
            if field.name not in _NO_PARTS and isinstance(value, (int, float)) and value:
                yield CardLine(field.name.replace("_", " "), show_bytes(value), "", value / room)

    def _title(self) -> str:
        """Return the line above the table."""
        return plain_line(self)

    def _repr_html_(self) -> str:
        return card(self._title(), self._facts())
