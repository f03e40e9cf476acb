"""Limits of a search of training plans as numbers that columns are held against.

A limit takes part after the laws and memory: a plan that breaks several counts under the first. With limits, every
plan that fits is timed, so that the counts are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, cast

import numpy as np

from shardwise.plans import Plan
from shardwise.records import dataclass, replace
from shardwise.search._batch import PlanBatch, RankedPlan
from shardwise.search._grid import PlanGrid
from shardwise.search._options import TRAIN_LIMITS, SearchOptions
from shardwise.training import Generation, TrainingCase, TrainReport


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLimits:
    """The limits of a search as numbers; `goodput` by number of devices.

    `generation` is the least that an engine takes for a step, by number of devices; empty where nothing is generated.
    """

    options: SearchOptions
    steps: float
    usd_per_device_second: float
    usable_bytes: float
    goodput: dict[int, float]
    generation: Mapping[int, Generation] = field(default_factory=dict)

    @property
    def asked(self) -> tuple[str, ...]:
        """The limits that were asked for."""
        return tuple(name for name in TRAIN_LIMITS if getattr(self.options, name))

    @property
    def lossy(self) -> bool:
        """Whether time is lost to failures or checkpoints."""
        return any(share != 1 for share in self.goodput.values())

    def lasting(self, seconds: Any, devices: Any) -> Any:
        """Return seconds of a step with its share of the time lost to failures and checkpoints."""
        if not self.lossy:
            return seconds
        counts = np.array(sorted(self.goodput))
        shares = np.array([self.goodput[n] for n in counts.tolist()])
        return seconds / shares[np.searchsorted(counts, devices)]

    def ratios(self, seconds: Any, device_bytes: Any, devices: Any) -> dict[str, Any]:
        """Return by how much plans exceed each limit that was given, as ratios; up to 1 they keep it.

        Seconds are those that train; a step and a run are with what is generated for them, as a report has them.
        """
        options, (whole, paid) = self.options, self._whole(seconds, devices)
        run = self.steps * self.lasting(whole, devices)
        value: dict[str, Callable[[], Any]] = {
            "max_step_seconds": lambda: whole / options.max_step_seconds,
            "max_run_seconds": lambda: run / options.max_run_seconds,
            "max_usd": lambda: run * paid * self.usd_per_device_second / options.max_usd,
            "min_free_bytes": lambda: device_bytes / (self.usable_bytes - options.min_free_bytes),
        }
        return {name: value[name]() for name in self.asked}

    def _whole(self, seconds: Any, devices: Any) -> tuple[Any, Any]:
        """Return seconds of steps with what is generated for them, and devices with those of an engine of its own."""
        if not self.generation:
            return seconds, devices
        at = np.searchsorted(np.array(sorted(self.generation)), devices)
        added = [self.generation[n] for n in sorted(self.generation)]
        return seconds + np.array([g.seconds for g in added])[at], devices + np.array([g.devices for g in added])[at]

    def ranked(self, seconds: float, devices: int) -> float:
        """Return seconds that train as plans are ranked by them: with what is generated, and all devices where paid."""
        more = self.generation.get(devices, Generation())
        paid = 1 + more.devices / devices if self.options.objective == "cost" else 1.0
        return (seconds + more.seconds) * paid

    def trained(self, ranked: float, devices: int) -> float:
        """Return the seconds that train of those that a plan is ranked by."""
        more = self.generation.get(devices, Generation())
        paid = 1 + more.devices / devices if self.options.objective == "cost" else 1.0
        return ranked / paid - more.seconds

    def broken(self, report: TrainReport) -> tuple[str, ...]:
        """Return the limits that a report breaks, with all that is generated for its steps."""
        options = self.options
        pairs = {
            "max_step_seconds": (report.whole_step_seconds, options.max_step_seconds),
            "max_run_seconds": (report.training_seconds, options.max_run_seconds),
            "max_usd": (report.usd or 0.0, options.max_usd),
        }
        return tuple(name for name, (value, most) in pairs.items() if most and value > most)

    def kept(self, batch: PlanBatch) -> tuple[PlanBatch, Counter[str], RankedPlan | None]:
        """Return the plans of a batch that keep the limits, how many each rejects, and the one that misses by least.

        Of several limits the one that is missed by the most counts. Its seconds are those of the objective.
        """
        left, rejected, worst = batch.fits, Counter[str](), np.zeros(1)
        for name, ratio in self.ratios(batch.step_seconds, batch.device_bytes, batch.devices).items():
            keeps = left & (ratio <= 1)
            rejected[name] += int(np.count_nonzero(left)) - int(np.count_nonzero(keeps))
            left, worst = keeps, np.maximum(worst, ratio)
        whole, paid = self._whole(batch.step_seconds, batch.devices)
        seconds = whole * paid / batch.devices if self.generation and self.options.objective == "cost" else whole
        lasting = replace(batch, fits=left, step_seconds=self.lasting(seconds, batch.devices))
        return lasting, rejected, self._nearest(batch, left, worst) if sum(rejected.values()) else None

    @staticmethod
    def _nearest(batch: PlanBatch, left: Any, worst: Any) -> RankedPlan:
        missed = np.where(batch.fits & ~left, worst, np.inf)
        at = int(np.argmin(missed))
        one = (v.ravel()[at] for v in np.broadcast_arrays(missed, batch.step_seconds, batch.device_bytes))
        value, seconds, device_bytes = map(float, one)
        return RankedPlan(value, seconds, device_bytes, batch.key(at))


def limits_of(grid: PlanGrid, options: SearchOptions) -> PlanLimits:
    """Return the limits of a search on the plans of a space."""
    case = grid.case
    price = case.cluster.usd_per_device_hour or 0.0
    return PlanLimits(
        options=options,
        steps=case.job.token_budget / case.job.tokens_per_step,
        usd_per_device_second=price / 3600,
        usable_bytes=case.cluster.device.usable_memory_bytes,
        goodput={n: goodput_of(case, n) for n in grid.device_counts},
    )


def goodput_of(case: TrainingCase, num_devices: int) -> float:
    """Return the share of time that trains on so many devices, as the report of a plan has it."""
    one = TrainReport(case=replace(case, plan=Plan(dp=num_devices)), evaluation=cast(Any, None), assumptions=())
    return one.goodput
