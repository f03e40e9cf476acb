"""Fine-tuning with adapters on given devices: which format, savers and length fit, the quickest first.

Every combination is evaluated: none is taken to save, and what a framework cannot run is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, TypeAlias

from shardwise.errors import InputError
from shardwise.plans import find_stack, fine_tuners, usual_recompute
from shardwise.records import dataclass, replace
from shardwise.training import TrainingOptions, TrainReport, flags_of, split_changes, train

STEP = 256
"""Lengths are tried in multiples of so many tokens."""
MOST = 1 << 20
_STATES = ("optimizer", "gradients", "parameters")


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningRecipe:
    """One way to fine-tune: its flags beside those that were asked, its report, and the longest sequence that fits."""

    flags: str
    report: TrainReport
    longest: int


def changed(report: TrainReport, changes: dict[str, Any]) -> TrainReport | None:
    """Return the report with changes of its plan, job and settings; None where a law or the framework refuses them."""
    case, (plan, job, settings) = report.case, split_changes(changes)
    stack = replace(case.stack, settings=replace(case.stack.settings, **settings))
    options = TrainingOptions(stack=stack, efficiencies=case.efficiencies, overlap=case.overlap)
    try:
        changed_report = train(case.model, case.cluster, replace(case.plan, **plan), replace(case.job, **job), options)
    except InputError:
        return None
    refused = {problem.field for problem in report.unlaunched}
    return None if {problem.field for problem in changed_report.unlaunched} - refused else changed_report


def combinations(report: TrainReport) -> Iterator[dict[str, Any]]:
    """Yield what a job with adapters may change: the format of frozen weights, recomputation, loss, offload, sharding.

    What the job states itself stays. Replicas may shard their weights.
    """
    usual = report.case.stack.usual_offload
    kept = [("none", ()), *([] if usual else [("full", ())]), ("full", usual or ("activations",))]
    shards: list[dict[str, Any]] = [{}]
    if report.plan.dp > 1 and not report.plan.sharding_rules.weights:
        shards.append({"sharding": report.case.stack.runs.word("fsdp")})
    yield from _varied(report, kept, shards)


def on_the_host(report: TrainReport) -> Iterator[dict[str, Any]]:
    """Yield what a job with adapters may change with its weights on the host, whose copies come unit by unit.

    It is the slowest of what fits, and asked where nothing else does.
    """
    kept = [("full", _STATES), ("full", (*_STATES, "activations"))]
    sharded = report.plan.sharding_rules.weights
    yield from _varied(report, kept, [{} if sharded else {"sharding": report.case.stack.runs.word("fsdp")}])


def _varied(
    report: TrainReport, kept: Iterable[tuple[str, tuple[str, ...]]], shards: Iterable[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    job, has = report.job, report.case.stack.settings.loss
    bases = [job.base] if job.base else ["", "nf4"]
    widths = [job.adapter_precision] if job.adapter_precision else ["", "bf16"]
    losses = [has] if has else ["", "fused-linear"]
    for base, width, kernel, (recompute, offload), shard in product(bases, widths, losses, kept, shards):
        one = {"base": base, "adapter_precision": width, "recompute": recompute, "loss": kernel, "offload": offload}
        yield one | shard


def tuning_recipes(report: TrainReport) -> tuple[TuningRecipe, ...]:
    """Return every way that fits at the length that was asked, the quickest first; of equal ones the least bytes."""
    ways = _fitting(report, combinations(report), {}) or _fitting(report, on_the_host(report), {})
    return tuple(_recipe(*way) for way in ways)


def elsewhere(report: TrainReport) -> tuple[TuningRecipe, ...]:
    """Return the quickest way that fits under each other framework that people fine-tune with, the quickest first.

    The framework is named among its flags.
    """
    recipes = []
    for name in fine_tuners():
        other = _under(report, name) if name != report.case.stack.name else None
        if other is not None and (way := quickest(other)):
            recipes.append(_recipe(f"--stack {name} {way[0]}".strip(), way[1]))
    return tuple(sorted(recipes, key=lambda one: (one.report.step_seconds, one.report.device_bytes)))


def shorter(report: TrainReport) -> TuningRecipe | None:
    """Return the way that fits the longest sequence where none fits at the length that was asked; None where none does.

    The length is named among its flags.
    """
    short = changed(report, {"seq_len": STEP}) if report.job.seq_len > STEP else None
    known: _Reports = {}
    if short is None or not _hopeful(short, known):
        return None
    recipes = [_recipe(*way) for way in _fitting(short, (*combinations(short), *on_the_host(short)), known)]
    best = max(recipes, key=lambda one: one.longest)
    then = changed(best.report, {"seq_len": best.longest})
    return replace(best, flags=f"--seq-len {best.longest} {best.flags}".strip(), report=then) if then else None


def quickest(report: TrainReport) -> tuple[str, TrainReport] | None:
    """Return the flags and the report of the quickest way, None where not even the leanest few fit."""
    known: _Reports = {}
    if not _hopeful(report, known):
        return None
    ways = _fitting(report, combinations(report), known) or _fitting(report, on_the_host(report), known)
    return ways[0] if ways else None


def _hopeful(report: TrainReport, known: _Reports) -> bool:
    """Return whether a way of 4 bits, a fused loss and full recomputation fits, or any where the job runs no such.

    The leanest, with its weights on the host, are tried first: one that fits is enough.
    """
    ways = (*combinations(report), *on_the_host(report))
    leanest = {name: ways[-1][name] for name in ("base", "loss")}
    lean = [one for one in ways if one["recompute"] == "full" and leanest.items() <= one.items()]
    runs = False
    for changes in reversed(lean):
        one = _reported(report, changes, known)
        if one is not None and one.fits:
            return True
        runs = runs or one is not None
    return not runs and bool(_fitting(report, ways, known))


# Reports of one question by what is changed of it.
_Reports: TypeAlias = dict[tuple[tuple[str, Any], ...], TrainReport | None]


def _reported(report: TrainReport, changes: dict[str, Any], known: _Reports) -> TrainReport | None:
    """Return a report with changes, made once."""
    key = tuple(sorted(changes.items()))
    if key not in known:
        known[key] = changed(report, changes)
    return known[key]


def _under(report: TrainReport, name: str) -> TrainReport | None:
    """Return the report of the same job under another framework; None where that does not run it."""
    case, own = report.case, find_stack(name)
    options = TrainingOptions(
        stack=replace(own, settings=case.stack.settings), efficiencies=case.efficiencies, overlap=case.overlap
    )
    # What the framework that was asked does by itself is none of the question.
    plan = replace(case.plan, recompute="full", offload=())
    try:
        other = train(case.model, case.cluster, plan, case.job, options)
    except InputError:
        return None
    return None if other.unlaunched else other


def _fitting(report: TrainReport, ways: Iterable[dict[str, Any]], known: _Reports) -> list[tuple[str, TrainReport]]:
    """Return the flags and the report of each way that fits, the quickest first; of equal ones the least bytes."""
    fitting, seen = [], set()
    for changes in ways:
        one = _reported(report, changes, known)
        # Two words may ask for what the framework does anyway, or of a model that has no loss over a vocabulary.
        key = one and (one.plan, one.case.tuning, one.step_seconds, one.device_bytes)
        if one is not None and one.fits and key not in seen:
            seen.add(key)
            usual = usual_recompute(one.case.stack, one.job.base)
            silent = ("", (), "none") if usual == "none" else ("", ())
            fitting.append((flags_of({name: value for name, value in changes.items() if value not in silent}), one))
    return sorted(fitting, key=lambda way: (way[1].step_seconds, way[1].device_bytes))


def _recipe(flags: str, report: TrainReport) -> TuningRecipe:
    return TuningRecipe(flags=flags, report=report, longest=longest_sequence(report))


def longest_sequence(report: TrainReport) -> int:
    """Return the most tokens of a sequence with which a plan fits, in multiples of 256; 0 where none does.

    Memory never falls with the length, and is nearly a line: where the line between the longest that fits and the
    shortest that does not meets the device's memory is tried next, or that of two that do not where the first fills the
    memory; half-way where neither is known. Positions that a model learns bound it.
    """
    limit = report.case.model.positions or report.case.model.max_context or MOST
    room = report.case.cluster.device.usable_memory_bytes
    low, high = report.fits * (report.job.seq_len // STEP), max(min(limit, MOST) // STEP, 1) + 1
    known, further = {low: report.device_bytes}, high
    while high - low > 1:
        at = (low + high) // 2
        one, other = (low, high) if known.get(low, room) < room else (high, further)
        if one in known and other in known and known[high] > room and known[other] > known[one]:
            on_line = int(one + (other - one) * (room - known[one]) / (known[other] - known[one]))
            # Where as much as the line says is known to fit, one more is tried, and then half-way.
            at = min(max(on_line, low + 1), high - 1) if on_line >= low else at
        longer = changed(report, {"seq_len": at * STEP})
        if longer is not None:
            known[at] = longer.device_bytes
        if longer is not None and longer.fits:
            low = at
        else:
            high, further = at, high
    return low * STEP
