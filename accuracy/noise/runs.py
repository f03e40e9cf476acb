"""Print how far published runs of one and the same configuration are apart: below this no prediction can be judged.

    python -m accuracy.noise.runs FILE.csv ...            runs whose every stated field is the same, notes included
    python -m accuracy.noise.runs --notes FILE.csv ...    the same, whatever the notes and the engine's version say

One line for each pair of sources and metric: configurations measured more than once, pairs of them, and the median, the
90 % and the largest ratio between two of a pair, less one. The same figure in two sources is one measurement.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

from shardwise.measured import quantile

IDENTITY = ("case_id", "value", "citation", "source", "quality", "unit")
LOOSE = ("notes", "engine_version")


def pairs(rows: Sequence[dict[str, str]], ignored: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    """Yield (sources, metric, logarithm of the ratio) of every two measurements of one configuration."""
    same: dict[tuple[tuple[str, str], ...], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        same[tuple((name, text) for name, text in row.items() if name not in ignored)].append(row)
    for group in same.values():
        for one, other in combinations(group, 2):
            first, second = float(one["value"]), float(other["value"])
            copied = first == second and one["source"] != other["source"]
            if first > 0 and second > 0 and not copied:
                sources = " and ".join(sorted({one["source"], other["source"]}))
                yield sources, one["metric"], abs(math.log(first / second))


def table(files: Sequence[Path], ignored: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a Markdown table of spreads by source and metric."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for file in files:
        with file.open(newline="", encoding="utf-8") as stream:
            for sources, metric, ratio in pairs(list(csv.DictReader(stream)), ignored):
                found[sources, metric].append(ratio)
    yield "| measured twice by | metric | pairs | median | 90 % below | largest |"
    yield "|---|---|---:|---:|---:|---:|"
    for (sources, metric), ratios in sorted(found.items()):
        spread = (math.expm1(quantile(sorted(ratios), share)) for share in (0.5, 0.9, 1.0))
        yield f"| {sources} | {metric} | {len(ratios)} | {' | '.join(f'{100 * one:.1f} %' for one in spread)} |"


if __name__ == "__main__":
    words = sys.argv[1:]
    ignored = IDENTITY + (LOOSE if "--notes" in words else ())
    print(*table([Path(word) for word in words if word != "--notes"], ignored), sep="\n")
