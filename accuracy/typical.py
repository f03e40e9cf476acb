"""How much longer published runs take than those for a record: a share by family, and of messages that nothing hides.

A run that is not tuned for a record takes a share of a step longer that its family of devices decides, and its ranks
wait for one another wherever a message is exposed. Both are learned on runs that count for them (`Residual.typical`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from shardwise import TrainingOptions, train

# Shares of exposed messages that are tried, and the least of a step that is left beside them.
SHARES = tuple(n / 20 for n in range(21))
LEAST = 0.1


class Run(Protocol):
    """What a run tells of itself: its source and family, measured over predicted of a record, and its messages."""

    @property
    def source(self) -> str:
        """The laboratory."""

    @property
    def family(self) -> str:
        """The family of devices."""

    @property
    def log(self) -> float:
        """The logarithm of measured over predicted seconds, those of a record."""

    @property
    def waits(self) -> float:
        """The share of a record's step in messages that nothing hides."""


def beside_record(case: Any) -> tuple[float, float]:
    """Return the logarithm of a typical step over one for a record, and the share of the record in exposed messages."""
    options = TrainingOptions(stack=case.stack, efficiencies=case.efficiencies, overlap=case.overlap)
    jobs = (replace(case.job, tuning=word) for word in ("typical", "record"))
    typical, record = (train(case.model, case.cluster, case.plan, job, options).evaluation.step for job in jobs)
    slowest = max(record.stages, key=lambda stage: float(stage.busy))
    each = sum(float(seconds) for axis, seconds in slowest.exposed.items() if axis != "host")
    once = record.pipeline.exposed_send + record.gradients_exposed + record.parameters_exposed
    waits = each * record.pipeline.busy / slowest.busy + once
    return math.log(typical.total / record.total), waits / record.total


def beyond(one: Run, slower: Mapping[str, float], waiting: float) -> float:
    """Return what is left of the residual of a record once the run is predicted as a typical one."""
    return one.log - math.log(math.exp(slower.get(one.family, slower.get("", 0.0))) + waiting * one.waits)


def slower_of(runs: Sequence[Run], waiting: float = 0.0) -> dict[str, float]:
    """Return the logarithm of how much longer than predicted runs take, by family of devices, of all under "".

    The median of runs beyond what they wait at messages, a source weighing as the square root of its runs, drawn to
    none as if one more source had no bias: a family that one laboratory alone has run says less than one of ten.
    """
    found: dict[str, float] = {}
    logs = {id(one): math.log(max(math.exp(one.log) - waiting * one.waits, LEAST)) for one in runs}
    for family in ("", *sorted({one.family for one in runs})):
        own = sorted((one for one in runs if family in ("", one.family)), key=lambda one: logs[id(one)])
        counts = Counter(one.source for one in own)
        half, passed = sum(math.sqrt(n) for n in counts.values()) / 2, 0.0
        for one in own:
            passed += 1 / math.sqrt(counts[one.source])
            if passed >= half:
                found[family] = max(logs[id(one)], 0.0) * len(counts) / (len(counts) + 1)
                break
    return found


def waiting_of(runs: Sequence[Run]) -> float:
    """Return the share of exposed messages that leaves the least of the residuals, a source as the root of its runs."""
    counts = Counter(one.source for one in runs)

    def left(waiting: float) -> float:
        slower = slower_of(runs, waiting)
        return sum(abs(beyond(one, slower, waiting)) / math.sqrt(counts[one.source]) for one in runs)

    return min(SHARES, key=left) if any(one.waits for one in runs) else 0.0
