"""Print how many runs lie inside bands that were made without their source, and without their device."""

from __future__ import annotations

from collections.abc import Iterator

from accuracy.page import NAMES
from accuracy.score import stored


def table() -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| headline | runs | source left out | device left out |"
    yield "|---|---:|---:|---:|"
    for name, row in stored()["left_out"].items():
        if name in NAMES:
            yield f"| {NAMES[name]} | {row['runs']} | {row['source']:.0%} | {row['device']:.0%} |"


if __name__ == "__main__":
    print(*table(), sep="\n")
