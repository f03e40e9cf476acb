"""The parts of a measurement: each times its cases, adds rows and says how noisy they were."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from accuracy.measuring import attention, products, serving, steps, streams
from accuracy.measuring.tables import Tables
from shardwise.errors import InputError
from shardwise.hardware import find_device
from shardwise.measuring import Clock, Machine, TimedCase, noise_of


def peaks_of(key: str) -> dict[str, float]:
    """Return matrix FLOP/s by data type of a device of the catalogue, nothing for one that is not in it."""
    try:
        return dict(find_device(key).device.matrix_flops)
    except InputError:
        return {}


@dataclass(frozen=True, slots=True)
class Bench:
    """What all parts need: the machine, where rows go, the clock, peaks of the device, and which cases."""

    machine: Machine
    tables: Tables
    clock: Clock
    peaks: dict[str, float]
    quick: bool
    chosen: slice

    def _run(self, cases: Iterable[TimedCase]) -> str:
        return noise_of(self.clock.run(list(cases)[self.chosen]))

    def products(self) -> str:
        """Time matrix products."""
        return self._run(products.products(self.machine, self.tables, self.peaks, self.quick))

    def attention(self) -> str:
        """Time attention of prompts and over caches."""
        prompts = attention.prompts(self.machine, self.tables, self.peaks, self.quick)
        return self._run([*prompts, *attention.caches(self.machine, self.tables, self.quick)])

    def streams(self) -> str:
        """Time kernels that move bytes."""
        return self._run(streams.Streams(self.machine, self.tables, self.quick).cases())

    def experts(self) -> str:
        """Time layers of experts."""
        return self._run(products.experts(self.machine, self.tables, self.quick))

    def steps(self) -> str:
        """Time training steps."""
        wanted = list(steps.runs(self.machine.device, self.quick))[self.chosen]
        found = steps.time_steps(self.clock, wanted, 1 if self.quick else 2, 1 if self.quick else 3)
        for run in wanted:
            steps.record(self.machine, self.tables, run, found[run.case], {})
        return steps.summary(found)

    def memory(self) -> str:
        """Record peaks of memory of the same steps."""
        wanted = list(steps.runs(self.machine.device, self.quick))[self.chosen]
        for run in wanted:
            peaks = steps.peak_of(run, self.machine.device)
            steps.record(self.machine, self.tables, run, None, peaks)
        return f"{len(wanted)} runs"

    def inference(self) -> str:
        """Time static batches."""
        wanted = list(serving.batches(self.machine.device, self.quick))[self.chosen]
        found = serving.time_batches(self.clock, wanted, 1 if self.quick else 3, 1 if self.quick else 2)
        for batch in wanted:
            serving.record(self.machine, self.tables, batch, found[batch.case])
        return noise_of([(case, timing) for case, both in found.items() for timing in both])
