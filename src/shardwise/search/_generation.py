"""Plans ranked and held against limits by whole steps: what trains, and what an engine generates for it.

What an engine takes depends on a plan only by the bytes that the trainer leaves it. So every plan is ranked with the
least that is generated on its devices, and the best of them are held against limits with their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from shardwise.records import replace
from shardwise.search._batch import RankedPlan
from shardwise.search._training import SearchTask, TrainingResult
from shardwise.training import Generation, TrainingCase, TrainReport


def count_generation(task: SearchTask, least: Callable[[TrainingCase, int], Generation]) -> None:
    """Count the `least` that an engine generates for a step, by case and devices, in limits and in the ranking.

    Where no limit is asked for, plans of one job on one count of devices rank alike without.
    """
    alike = len(task.tasks) == 1 and len(task.grid.device_counts) == 1
    for one in task.tasks:
        counts = one.grid.device_counts if one.limits.asked or not alike else ()
        one.limits = replace(one.limits, generation={n: least(one.grid.case, n) for n in counts})


def finished(result: TrainingResult, finish: Callable[[TrainReport], TrainReport]) -> TrainingResult:
    """Return an answer whose reports are finished, without plans that break a limit only then."""
    whole, missed, rejected = replace(result, finish=finish), list[RankedPlan](), Counter[str]()
    top, front, limits = result.partial.top.copied(), result.partial.front.copied(), result.task.limits
    entries = (
        [one for alike in top.sets.values() for one in alike] + front.plans()
        if limits.generation and limits.asked
        else []
    )
    for entry in sorted({one.key: one for one in entries}.values()):
        if broken := limits.broken(whole.report(entry)):
            missed.append(entry)
            rejected[broken[0]] += 1
    if not missed:
        return whole
    keys = {one.key for one in missed}
    kept = {degrees: [one for one in alike if one.key not in keys] for degrees, alike in top.sets.items()}
    top = replace(top, sets={degrees: alike for degrees, alike in kept.items() if alike}, bounds=None)
    front.entries = {n: [one for one in mine if one.key not in keys] for n, mine in front.entries.items()}
    counts = replace(result.partial.counts, fitting=result.partial.counts.fitting - len(missed))
    partial = replace(result.partial, top=top, front=front, counts=counts, rejected=result.partial.rejected + rejected)
    if not top.sets:
        partial.closest = missed[0]
    return replace(whole, partial=partial)
