"""Fine-tuning with adapters on given devices: which format, savers and length fit, the quickest first.

Every combination is evaluated: none is taken to save, and what a framework cannot run is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from shardwise.errors import InputError
from shardwise.plans import usual_recompute
from shardwise.records import dataclass, replace
from shardwise.training import TrainingOptions, TrainReport, flags_of, split_changes, train

STEP = 256
"""Lengths are tried in multiples of so many tokens."""
MOST = 1 << 20


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
    job, has = report.job, report.case.stack.settings.loss
    bases = [job.base] if job.base else ["", "nf4"]
    widths = [job.adapter_precision] if job.adapter_precision else ["", "bf16"]
    losses = [has] if has else ["", "fused-linear"]
    usual = report.case.stack.usual_offload
    kept = [("none", ()), *([] if usual else [("full", ())]), ("full", usual or ("activations",))]
    shards: list[dict[str, Any]] = [{}]
    if report.plan.dp > 1 and not report.plan.sharding_rules.weights:
        shards.append({"sharding": report.case.stack.runs.word("fsdp")})
    for base, width, kernel, (recompute, offload), shard in product(bases, widths, losses, kept, shards):
        one = {"base": base, "adapter_precision": width, "recompute": recompute, "loss": kernel, "offload": offload}
        yield one | shard


def tuning_recipes(report: TrainReport) -> tuple[TuningRecipe, ...]:
    """Return every way that fits at the length that was asked, the quickest first; of equal ones the least bytes."""
    recipes, seen = [], set()
    for changes in combinations(report):
        one = changed(report, changes)
        # Two words may ask for what the framework does anyway, or of a model that has no loss over a vocabulary.
        key = one and (one.plan, one.case.tuning, one.step_seconds, one.device_bytes)
        if one is not None and one.fits and key not in seen:
            seen.add(key)
            usual = usual_recompute(one.case.stack, one.job.base)
            silent = ("", (), "none") if usual == "none" else ("", ())
            flags = flags_of({name: value for name, value in changes.items() if value not in silent})
            recipes.append(TuningRecipe(flags=flags, report=one, longest=longest_sequence(one)))
    return tuple(sorted(recipes, key=lambda one: (one.report.step_seconds, one.report.device_bytes)))


def longest_sequence(report: TrainReport) -> int:
    """Return the most tokens of a sequence with which a plan fits, in multiples of 256; 0 where none does.

    Memory never falls with the length, and is nearly a line: where the line between the longest that fits and the
    shortest that does not meets the device's memory, or half-way where that is not known, is tried next; positions
    that a model learns bound it.
    """
    limit = report.case.model.positions or report.case.model.max_context or MOST
    room = report.case.cluster.device.usable_memory_bytes
    low, high = report.fits * (report.job.seq_len // STEP), max(min(limit, MOST) // STEP, 1) + 1
    known = {low: report.device_bytes}
    while high - low > 1:
        at = (low + high) // 2
        if low in known and high in known and known[high] > room > known[low]:
            on_line = low + (high - low) * (room - known[low]) / (known[high] - known[low])
            at = min(max(int(on_line), low + 1), high - 1)
        one = changed(report, {"seq_len": at * STEP})
        if one is not None:
            known[at] = one.device_bytes
        low, high = (at, high) if one is not None and one.fits else (low, at)
    return low * STEP
