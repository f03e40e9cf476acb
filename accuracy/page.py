"""Print errors by stack or engine, devices joined in a row, as docs/accuracy.md shows them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from accuracy.score import stored

NAMES = {
    "step_seconds": "training, seconds of a step",
    "memory.peak_bytes": "training, peak memory",
    "request_seconds": "serving, fixed batches",
    "tpot_seconds": "serving, time per token",
    "ttft_seconds": "serving, first token",
    "beside_cache_bytes": "serving, memory beside the cache",
    "load.tpot_seconds": "under load, time per token",
    "load.ttft_seconds": "under load, first token",
    "load.e2e_seconds": "under load, whole requests",
    "load.requests_per_second": "under load, requests a second",
}
"""Headlines in words."""
DEVICES = {
    "cpu": "CPU",
    "cdna": "CDNA 3",
    "cdna4": "CDNA 4",
    "blackwell-gddr": "Blackwell GDDR",
    "generic": "other devices",
    "any": "any",
}
"""Families of devices in words, where those are not their names."""
OTHERS = "others"
# Targets (results/targets.toml) that sum up the tables.
_SUMMARY = (
    "step time or throughput, all pre-training runs",
    "peak memory, other pre-training runs",
    "static batches and single streams, dense models",
    "collectives within a node",
    "collectives across nodes",
)
# What tells a release or a variant from its stack.
_RELEASE = re.compile(r"-(\d{4}|alltoall)$")
_TABLES = (("training", "stack"), ("serving", "engine"), ("under load", "engine under load"))


def family(name: str) -> str:
    """Return a family of devices in words.

    >>> family("hopper"), family("cdna")
    ('Hopper', 'CDNA 3')
    """
    return DEVICES.get(name, name.capitalize())


def name_of(stack: str) -> str:
    """Return the name of a stack without its release.

    >>> name_of("composer-2022")
    'composer'
    """
    return _RELEASE.sub("", stack)


def cell(groups: Iterable[Mapping[str, Any]]) -> str:
    """Return the errors of one headline by release and family of devices: median / 90 % below (runs).

    >>> cell([{"stack": "megatron", "family": "hopper", "median": 0.0141, "p90": 0.041, "runs": 44}])
    'Hopper 1.4 / 4.1 % (44)'
    """
    shown = []
    for one in groups:
        release = _RELEASE.search(one["stack"])
        name = family(one["family"]) + (f", {release[1]}:" if release else "")
        shown.append(f"{name} {100 * one['median']:.1f} / {100 * one['p90']:.1f} % ({one['runs']})")
    return "; ".join(shown)


def tables(groups: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table for training, for serving and for serving under load."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for one in groups:
        found[one["headline"], name_of(one["stack"])].append(one)
    for area, column in _TABLES:
        shown = [name for name, words in NAMES.items() if words.startswith(area) and any(name == h for h, _ in found)]
        if not shown:
            continue
        yield f"| {' | '.join((column, *(NAMES[name] for name in shown)))} |".replace(f"{area}, ", "")
        yield f"|{'---|' * (len(shown) + 1)}"
        stacks = {stack for headline, stack in found if headline in shown}
        for stack in sorted(stacks, key=lambda name: (name == OTHERS, name)):
            yield f"| {' | '.join((stack, *(cell(found[name, stack]) for name in shown)))} |"
        yield ""


def summary(targets: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield the errors of all runs by what is predicted, as a Markdown list."""
    for name in _SUMMARY:
        one = targets[name]
        yield f"- {name}: {100 * one['median']:.1f} / {100 * one['p90']:.1f} % ({one['rows']:,})"
    yield ""


def main() -> None:
    """Print the summary and the tables of the stored results."""
    results = stored()
    print("\n".join((*summary(results["targets"]), *tables(results["groups"]))).rstrip())


if __name__ == "__main__":
    main()
