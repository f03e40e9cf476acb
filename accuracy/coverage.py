"""Print how many runs lie inside bands that were made without their source (all, by kind) or without their device."""

from __future__ import annotations

from collections.abc import Iterator

from accuracy.page import NAMES
from accuracy.score import stored


def table() -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| headline | runs | sources | source left out | mean over sources | mean over devices left out |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, row in stored()["left_out"].items():
        if name in NAMES:
            shares = (row[word] for word in ("source", "of_sources", "of_devices"))
            yield f"| {NAMES[name]} | {row['runs']} | {row['sources']} | {' | '.join(f'{one:.0%}' for one in shares)} |"
    yield ""
    yield "| headline | runs that are | runs | sources | source left out |"
    yield "|---|---|---:|---:|---:|"
    for row in stored().get("kinds", ()):
        if row["headline"] in NAMES:
            counts = f"{row['runs']} | {row['sources']} | {row['inside']:.0%}"
            yield f"| {NAMES[row['headline']]} | {row['kind']} | {counts} |"


if __name__ == "__main__":
    print(*table(), sep="\n")
