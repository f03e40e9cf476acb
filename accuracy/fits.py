"""Print how often published runs that ran are called too large, and runs that ran out of memory are called fitting.

    python -m accuracy.fits FILE.csv ...

Files of training runs count, others are passed over. Every configuration with a measured figure of time or memory ran;
rows `fits` with value 0 failed. Configurations whose activations go to the host, by their notes or by the recipe that
is assumed for them, are counted apart: a verdict on the device's memory does not hold for them. One line for each
source, and one for all.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from accuracy.published import Published, PublishedTraining
from shardwise import InputError
from shardwise.measured import Record

_WORDS = ("host", "offload", "remat_policy=custom")


def verdict(row: dict[str, str], failed: bool, context: Published) -> str:
    """Return what became of one configuration: right, wrong, told apart, or refused."""
    record = Record(row)
    try:
        found = PublishedTraining().predict(record, context)
    except InputError:
        return "refused"
    said = " ".join((row.get("notes", ""), row.get("recompute_detail", ""), *found.assumed))
    if any(word in said for word in _WORDS):
        return "to the host"
    what = "failed" if failed else "ran"
    return what if found.fits is not failed else f"{what}, called otherwise"


def configurations(file: Path) -> Iterator[tuple[dict[str, str], bool]]:
    """Yield one row of each configuration that ran or failed, and whether it failed."""
    cases: dict[str, list[dict[str, str]]] = defaultdict(list)
    with file.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        for row in reader if {"case_id", "seq_len"} <= {*(reader.fieldnames or ())} else ():
            cases[row["case_id"]].append(row)
    for rows in cases.values():
        ran = [row for row in rows if row["metric"] not in ("fits", "max_seq_len")]
        failed = [row for row in rows if row["metric"] == "fits" and not float(row["value"])]
        if ran or failed:
            yield (ran or failed)[0], not ran


def counts(files: Sequence[Path]) -> dict[str, Counter[str]]:
    """Return the verdicts by source of the files of training runs, and of all of them."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for file in files:
        context = Published(file.parent)
        for row, failed in configurations(file):
            found[row["source"]][verdict(row, failed, context)] += 1
    for one in list(found.values()):
        found["all"].update(one)
    return found


def table(found: Mapping[str, Counter[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table of verdicts by source."""
    yield "| source | ran | called too large | failed | called fitting | to the host | refused |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for source, n in found.items():
        ran, failed = (n[one] + n[f"{one}, called otherwise"] for one in ("ran", "failed"))
        if ran or failed:
            wrong = (n["ran, called otherwise"], n["failed, called otherwise"])
            apart = f"{n['to the host']} | {n['refused']}"
            yield f"| {source} | {ran} | {wrong[0]} | {failed} | {wrong[1]} | {apart} |"


if __name__ == "__main__":
    print(*table(counts([Path(word) for word in sys.argv[1:]])), sep="\n")
