"""Print errors and shares inside bands by stack or engine, family of devices and kind of run, whole."""

from __future__ import annotations

from collections.abc import Iterator

from accuracy.page import NAMES, family
from accuracy.score import stored


def tables() -> Iterator[str]:
    """Yield the lines of two Markdown tables: by stack and family of devices, and by kind of run."""
    yield "| what | stack, or kernels of the engine | devices | runs | sources | bias | median | 90 % below | in band |"
    yield "|---|---|---|---:|---:|---:|---:|---:|---:|"
    for one in (row for row in stored()["groups"] if row["headline"] in NAMES):
        figures = " | ".join(f"{100 * one[name]:.1f} %" for name in ("median", "p90"))
        names = f"{NAMES[one['headline']]} | {one['stack']} | {family(one['family'])}"
        counts = f"{one['runs']} | {one['sources']} | {100 * one['bias']:+.1f} %"
        yield f"| {names} | {counts} | {figures} | {one['inside']:.0%} |"
    yield ""
    yield "| what | runs that are | runs | sources | in band |"
    yield "|---|---|---:|---:|---:|"
    for row in (one for one in stored()["kinds"] if one["headline"] in NAMES):
        counts = f"{row['runs']} | {row['sources']} | {row['inside']:.0%}"
        yield f"| {NAMES[row['headline']]} | {row['kind']} | {counts} |"


if __name__ == "__main__":
    print(*tables(), sep="\n")
