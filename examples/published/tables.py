"""What the examples print: figures as reported beside figures as predicted, what was assumed, and why we are off."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

FAR = 0.10


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One figure as reported and as predicted, in one unit, and the interval of the prediction where it has one."""

    reported: float
    predicted: float
    interval: tuple[float, float] | None = None

    @property
    def off(self) -> float:
        """The prediction over the report, less one."""
        return self.predicted / self.reported - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run: its name, its figures in the order of the table's, and the letter of why it is off."""

    case: str
    pairs: tuple[Pair, ...]
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of one kind: what is compared, who reported it, and how many digits are shown."""

    title: str
    figures: tuple[str, ...]
    digits: tuple[int, ...]
    rows: tuple[Row, ...]
    reporter: str = "reported"
    intervals: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """An example: its sources, what they leave open, its tables, and by letter why rows are off by over a tenth."""

    title: str
    sources: tuple[str, ...]
    assumed: tuple[str, ...]
    tables: tuple[Table, ...]
    why: dict[str, str] = field(default_factory=dict)


def far_rows(page: Page) -> Iterator[Row]:
    """Yield the rows with a figure that is off by over a tenth."""
    for table in page.tables:
        yield from (row for row in table.rows if any(abs(pair.off) > FAR for pair in row.pairs))


def _cells(pair: Pair, digits: int, intervals: bool) -> list[str]:
    """Return the cells of a figure."""
    low, high = pair.interval or (pair.predicted, pair.predicted)
    between = [f"{low:,.{digits}f} to {high:,.{digits}f}"] if intervals else []
    return [f"{pair.reported:,.{digits}f}", f"{pair.predicted:,.{digits}f}", *between, f"{100 * pair.off:+.1f} %"]


def markdown(table: Table) -> str:
    """Return a table in Markdown, its columns aligned so that a terminal shows it too."""
    heads = [""]
    for figure in table.figures:
        heads += [f"{figure}, {table.reporter}", "predicted", *(["interval"] if table.intervals else []), "off"]
    body = []
    for row in table.rows:
        cells = [f"{row.case} ({row.why})" if row.why else row.case]
        for pair, digits in zip(row.pairs, table.digits, strict=True):
            cells += _cells(pair, digits, table.intervals)
        body.append(cells)
    widths = [max(len(line[i]) for line in (heads, *body)) for i in range(len(heads))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: list[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        return f"| {' | '.join(padded)} |"

    return "\n".join(line(cells) for cells in (heads, rule, *body))


def text_of(page: Page) -> str:
    """Return a page as Markdown."""
    parts = [f"### {page.title}", "\n".join(f"* source: {source}" for source in page.sources)]
    parts += ["\n".join(f"* assumed: {assumed}" for assumed in page.assumed)] if page.assumed else []
    for table in page.tables:
        parts += [f"**{table.title}**", markdown(table)]
    named = {letter for table in page.tables for row in table.rows for letter in row.why}
    causes = [f"* ({letter}) {text}" for letter, text in page.why.items() if letter in named]
    parts += ["\n".join(causes)] if causes else []
    return "\n\n".join(parts)


def show(page: Page) -> None:
    """Print a page."""
    sys.stdout.write(text_of(page) + "\n")
