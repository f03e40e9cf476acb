"""What is wanted of the accuracy and what is reached: accuracy/results/targets.toml against rows with predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from accuracy.files import read
from accuracy.published import KINDS
from shardwise.measured import Comparison, Validation, errors_of, read_table

Pair: TypeAlias = tuple[dict[str, str], Comparison]
LIMITS = ("median", "p90", "mean", "worst")
FEWEST = 3


def targets() -> list[dict[str, Any]]:
    """Return what is wanted, in the order of the file."""
    found: list[dict[str, Any]] = _file()["target"]
    return found


def _file() -> dict[str, Any]:
    return read("results/targets.toml")


def verdicts(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return how many runs that ran, and that failed, have a verdict, and how many a wrong one."""
    wrong = {what: counts.get(f"{what}, called otherwise", 0) for what in ("ran", "failed")}
    return {what: {"rows": counts.get(what, 0) + n, "wrong": n} for what, n in wrong.items()}


def causes() -> dict[str, dict[str, str]]:
    """Return why sources are off, by target and source."""
    found: dict[str, dict[str, str]] = read("results/causes.toml")
    return found


def pairs(found: Validation) -> Iterator[Pair]:
    """Yield every row of the files beside its prediction."""
    raw = (row for path in found.files for row in read_table(path, KINDS).rows)
    yield from zip(raw, found.rows, strict=True)


def wanted(target: dict[str, Any], every: Iterable[Pair]) -> list[Comparison]:
    """Return the rows that a target speaks of: of one run the first of its metrics."""
    kept: dict[str, Comparison] = {}
    for raw, row in every:
        fits = (
            row.metric in target.get("metrics", (row.metric,))
            and row.kind in target.get("kinds", (row.kind,))
            and all(raw.get(name, "") in values for name, values in target.get("where", {}).items())
            and row.source not in target.get("except", ())
            and (row.status != "predicted" or row.family in target.get("families", (row.family,)))
        )
        once = row.kind == "training" and row.metric != "peak_memory"
        key = row.case_id if once else f"{len(kept)}"
        if fits and (key not in kept or kept[key].status != "predicted"):
            kept[key] = row
    return list(kept.values())


def reached(rows: Sequence[Comparison]) -> dict[str, float]:
    """Return the figures of a target: rows, share predicted, errors."""
    made = [row for row in rows if row.relative_error is not None]
    if not made:
        return {"rows": len(rows), "coverage": 0.0}
    one = errors_of((), made)
    found = {"median": one.median_abs_error, "p90": one.p90_abs_error, "mean": one.mean_abs_error}
    found |= {"worst": one.largest_abs_error, "bias": one.bias, "coverage": len(made) / len(rows)}
    return {"rows": len(rows), **{name: round(value, 4) for name, value in found.items()}}


def results(found: Validation) -> dict[str, dict[str, Any]]:
    """Return what is reached by target, and by source of a target."""
    every = list(pairs(found))
    made: dict[str, dict[str, Any]] = {}
    for target in targets():
        rows = wanted(target, every)
        if rows:
            sources = {row.source for row in rows}
            by = {name: reached([row for row in rows if row.source == name]) for name in sorted(sources)}
            made[target["name"]] = {**reached(rows), "sources": by}
    return made


def is_met(target: dict[str, Any], one: Mapping[str, float]) -> bool:
    """Return whether the figures of a target are within what is wanted, as printed: to a tenth of a point."""
    limits = {name: target[name] for name in LIMITS if name in target}
    kept = all(round(one.get(name, 1.0), 3) <= value for name, value in limits.items())
    return kept and one["coverage"] >= target.get("coverage", 0.0)


def limits_of_verdicts() -> dict[str, float]:
    """Return the share of wrong verdicts that is wanted at most, of runs that ran and that failed."""
    found: dict[str, float] = _file()["verdicts"]
    return found


def page(stored: dict[str, dict[str, Any]], said: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield what is wanted beside what is reached, verdicts on memory last, as Markdown."""
    yield "| what | rows | predicted | wanted | reached | met |"
    yield "|---|---:|---:|---|---|---|"
    for target in targets():
        one = stored.get(target["name"])
        if one is None:
            continue
        limits = [(name, target[name]) for name in LIMITS if name in target]
        aim = ", ".join(f"{name} {100 * value:.3g} %" for name, value in limits)
        got = ", ".join(f"{name} {100 * one[name]:.1f} %" if name in one else "none" for name, _ in limits)
        met = "yes" if is_met(target, one) else "no"
        yield f"| {target['name']} | {one['rows']:,} | {one['coverage']:.0%} | {aim} | {got} | {met} |"
    words = {"ran": "training runs that ran, called too large", "failed": "training runs out of memory, called fitting"}
    for what, limit in limits_of_verdicts().items():
        rows, share = said[what]["rows"], said[what]["wrong"] / max(said[what]["rows"], 1)
        met = "yes" if share <= limit else "no"
        yield f"| {words[what]} | {rows:,} | 100% | at most {limit:.0%} | {share:.1%} | {met} |"


def off(stored: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (target, source, figures) of sources of three rows or more whose median is over twice what is wanted."""
    for target in targets():
        for source, one in stored.get(target["name"], {}).get("sources", {}).items():
            limit = target.get("median", target.get("mean", target.get("worst", 1.0)))
            if one.get("median", 0.0) > 2 * limit and one["rows"] * one["coverage"] >= FEWEST:
                yield target["name"], source, one


def why(stored: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the sources that are off by more than twice what is wanted, with the cause, as Markdown."""
    known = causes()
    yield "| what | source | rows | bias | median | cause |"
    yield "|---|---|---:|---:|---:|---|"
    for name, source, one in off(stored):
        cause = known.get(name, {}).get(source, "not known")
        yield f"| {name} | {source} | {one['rows']} | {one['bias']:+.1%} | {one['median']:.1%} | {cause} |"
