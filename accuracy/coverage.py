"""Print how many runs lie inside bands that were made without their source or device, and where the fewest do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accuracy.page import NAMES, OTHERS, family
from accuracy.score import stored


def fewest(rows: list[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the name of the row with the smallest share inside, the share and the runs.

    >>> fewest([("experts", {"inside": 0.78, "runs": 141}), ("nodes", {"inside": 0.8, "runs": 370})])
    'experts 78% of 141'
    """
    if not rows:
        return ""
    name, row = min(rows, key=lambda one: float(one[1]["inside"]))
    return f"{name} {row['inside']:.0%} of {row['runs']}"


def table(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a Markdown table, one row a headline."""
    head = ("headline", "runs", "sources", "runs inside", "mean over sources", "over strangers")
    yield f"| {' | '.join((*head, 'over devices', 'worst kind of run', 'worst stack'))} |"
    yield "|---|---:|---:|---:|---:|---:|---:|---|---|"
    for name in (name for name in NAMES if name in results["left_out"]):
        row = results["left_out"][name]
        kinds = [(one["kind"], one) for one in results["kinds"] if one["headline"] == name]
        stacks = [
            (f"{one['stack']} on {family(one['family'])}", one)
            for one in results["groups"]
            if one["headline"] == name and one["stack"] != OTHERS
        ]
        words = ("source", "of_sources", "of_strangers", "of_devices")
        shares = (f"{row[word]:.0%}" if word in row else "" for word in words)
        cells = (NAMES[name], str(row["runs"]), str(row["sources"]), *shares, fewest(kinds), fewest(stacks))
        yield f"| {' | '.join(cells)} |"


def verdicts(said: Mapping[str, Mapping[str, int]]) -> str:
    """Return how often `fits` was wrong, as a line."""
    ran, failed = said["ran"], said["failed"]
    large, fitting = (f"{one['wrong'] / max(one['rows'], 1):.1%}" for one in (ran, failed))
    return (
        f"`fits` is judged alike: of {ran['rows']} training runs that ran {large} are called too large, of "
        f"{failed['rows']} that ran out of memory {fitting} are called fitting."
    )


if __name__ == "__main__":
    print(*table(stored()), "", verdicts(stored()["verdicts"]), sep="\n")
