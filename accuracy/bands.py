"""Print the intervals of headlines: published measurements over predictions, how many, and their sources."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardwise.cost import Band
from shardwise.cost._bands import bands as training
from shardwise.serving._bands import bands as serving


def split_source(band: Band) -> tuple[str, str]:
    """Return where the rows of a band come from, and their median as its source states it ("" where it does not)."""
    found = re.fullmatch(r"(.*?); median ([\d.]+)(?:[;,] (.*))?", band.source)
    if found is None:
        return band.source, ""
    where, median, note = found.groups()
    return (f"{where} ({note})" if note else where), median


def table() -> Iterator[str]:
    """Yield the lines of a Markdown table, and below it the sources of its rows."""
    sources: dict[tuple[str, str], list[str]] = {}
    yield "| headline | family and stack or engine | rows | 10 % | median | 90 % |"
    yield "|---|---|---:|---:|---:|---:|"
    for quantity, rows in (*training().items(), *serving().items()):
        for name, band in rows.items():
            where, median = split_source(band)
            sources.setdefault((quantity, where), []).append(name)
            yield f"| `{quantity}` | {name} | {band.rows} | {band.low:.2f} | {median} | {band.high:.2f} |"
    yield ""
    yield "Sources:"
    yield ""
    yield from (f"- `{quantity}` of {', '.join(names)}: {where}" for (quantity, where), names in sources.items())


if __name__ == "__main__":
    print(*table(), sep="\n")
