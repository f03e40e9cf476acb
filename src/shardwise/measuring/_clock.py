"""Timing that checks its own noise: repeats interleaved over time, the spread beside the median, noisy cases again."""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

SPREAD_LIMIT = 0.05
"""Distance of the quartiles over the median above which a case is measured again, and then marked."""
OTHERS_LIMIT = 0.04
"""Share of the processors that other programs may take while a group of cases is timed; above it comes again."""

_RING_BYTES = 64 * 2**20
_RING_MOST = 64
_NOISE: dict[str, Any] = {}


def busy_seconds() -> tuple[float, float]:
    """Return seconds of all processors and of this program since the start, zeros where Linux does not tell."""
    try:
        with open("/proc/stat", encoding="utf-8") as file:
            ticks = [int(word) for word in file.readline().split()[1:]]
    except (OSError, ValueError):
        return 0.0, 0.0
    own = os.times()
    # user, nice, system, irq, softirq, steal: neither idle nor waiting for a disk.
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK"), own.user + own.system


class BackgroundLoad:
    """How much of the processors other programs took since it was made."""

    def __init__(self) -> None:
        self._all, self._own = busy_seconds()
        self._began = time.perf_counter()

    def share(self) -> float:
        """Return the share of all processors."""
        every, own = busy_seconds()
        passed = (time.perf_counter() - self._began) * (os.cpu_count() or 1)
        return max(0.0, (every - self._all) - (own - self._own)) / max(passed, 1e-9)


@dataclass(slots=True)
class Timing:
    """Seconds of one call in every repeat."""

    samples: list[float] = field(default_factory=list)
    others: float = 0.0

    def keep(self, samples: list[float], share: float) -> None:
        """Add samples beside which other programs took a share; undisturbed ones displace disturbed ones."""
        if self.samples and (share > OTHERS_LIMIT) != (self.others > OTHERS_LIMIT):
            if share > OTHERS_LIMIT:
                return
            self.samples, self.others = [], 0.0
        self.samples += samples
        self.others = max(self.others, share)

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median; 0 for a single sample."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.seconds

    @property
    def noisy(self) -> bool:
        """Whether the repeats differ too much, or other programs ran beside them."""
        return self.spread > SPREAD_LIMIT or self.others > OTHERS_LIMIT


@dataclass(frozen=True, slots=True)
class TimedCase:
    """Something to be timed: `make` returns a function of the number of the call; `row` the record of its timing."""

    name: str
    make: Callable[[], Callable[[int], Any]]
    row: Callable[[Timing], None]
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Clock:
    """How long calls take on a device: interleaved rounds, least length of a sample, when to stop repeating."""

    device: str
    rounds: int = 7
    sample_seconds: float = 0.004
    patience_seconds: float = 120.0

    def sync(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def elapsed(self, call: Callable[[int], Any], count: int) -> float:
        """Return seconds of one of so many calls in a row: by events on a GPU, by the wall clock on a CPU."""
        if self.device == "cuda":
            import torch

            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            for i in range(count):
                call(i)
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e-3 / count
        began = time.perf_counter()
        for i in range(count):
            call(i)
        return (time.perf_counter() - began) / count

    def ready(self, case: TimedCase) -> tuple[Callable[[int], Any], int]:
        """Return the warmed call of a case and how often one sample repeats it."""
        call = case.make()
        self.elapsed(call, 1)
        once = max(self.elapsed(call, 2), 1e-7)  # a clock may tell nothing of a call so short
        self.elapsed(call, max(1, min(_RING_MOST, round(2 * self.sample_seconds / once))))
        return call, max(case.repeats, min(2000, round(self.sample_seconds / once)))

    def warmed(self, call: Callable[[int], Any], least: int) -> int:
        """Run something long until memory and caches are as they stay; return how many samples to take of it."""
        once = min(self.elapsed(call, 1) for _ in range(2))
        for _ in range(min(8, int(0.2 / once))):
            self.elapsed(call, 1)
        return max(least, min(8, round(0.4 / once)))

    def run(self, cases: Sequence[TimedCase], together: int = 8) -> list[tuple[str, Timing]]:
        """Time all cases, `together` of them in turns; noisy ones come up to three times again, the best kept."""
        timings: list[tuple[str, Timing]] = []
        best: dict[str, Timing] = {}
        wanted, began = list(cases), time.perf_counter()
        for _ in range(4):
            if best and time.perf_counter() - began > self.patience_seconds:
                break
            for case, timing in self._timed(wanted, together):
                old = best.setdefault(case.name, timing)
                if (timing.others > OTHERS_LIMIT, timing.spread) < (old.others > OTHERS_LIMIT, old.spread):
                    best[case.name] = timing
            wanted = [case for case in cases if best[case.name].noisy]
        for case in cases:
            case.row(best[case.name])
            timings.append((case.name, best[case.name]))
        return timings

    def _timed(self, cases: Sequence[TimedCase], together: int) -> Iterator[tuple[TimedCase, Timing]]:
        for first in range(0, len(cases), together):
            group = [(case, *self.ready(case), Timing()) for case in cases[first : first + together]]
            others = BackgroundLoad()
            for _ in range(self.rounds):
                for _, call, count, timing in group:
                    timing.samples.append(self.elapsed(call, count))
            share = others.share()
            for case, _, _, timing in group:
                timing.others = share
                yield case, timing
            del group
            gc.collect()


def ring(one: Callable[[], Any], size_bytes: float, device: str = "cpu") -> list[Any]:
    """Return so many copies of an operand that they leave the caches before they come round again."""
    count = max(2, min(_RING_MOST, int(_ring_bytes(device) / max(size_bytes, 1)) + 1))
    return [one() for _ in range(count)]


def _ring_bytes(device: str) -> float:
    """Return bytes that a device's caches do not hold: twice the L2 of a GPU that tells it, and no fewer than here."""
    if device != "cuda":
        return _RING_BYTES
    import torch

    return max(_RING_BYTES, 2.0 * getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0))


def values(*sides: int, dtype: Any = None, device: str = "cpu") -> Any:
    """Return a new tensor of normal values in fp32 or another type, copied from one drawn once."""
    import torch

    count = math.prod(sides)
    if device not in _NOISE or _NOISE[device].numel() < count:
        _NOISE[device] = torch.randn(max(count, 2**22), device=device)
    return _NOISE[device][:count].view(sides).to(dtype or torch.float32, copy=True)


def noise_of(timings: Sequence[tuple[str, Timing]]) -> str:
    """Return a line with the spreads of some timings: their median, the largest, and how many are above the limit."""
    spreads = [timing.spread for _, timing in timings]
    if not spreads:
        return "nothing measured"
    above = sum(spread > SPREAD_LIMIT for spread in spreads)
    return (
        f"{len(spreads)} cases, spread (quartiles over median): median {statistics.median(spreads):.1%}, "
        f"largest {max(spreads):.1%}, {above} above {SPREAD_LIMIT:.0%}; other programs took at most "
        f"{max(timing.others for _, timing in timings):.1%}"
    )


WIDTHS = {"fp32": 4, "bf16": 2}
"""Bytes of an element of the types that GEMMs are timed in."""


def torch_dtype(word: str) -> Any:
    """Return torch's type of a word such as bf16."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[word]


def product_of(stage: str, mnk: tuple[int, int, int], device: str, dtype: str) -> Callable[[], Callable[[int], Any]]:
    """Return what makes the call of one GEMM; every operand that a step has not just made comes from memory."""
    m, n, k = mnk

    def make() -> Callable[[int], Any]:
        def one(rows: int, columns: int) -> Any:
            return values(rows, columns, dtype=torch_dtype(dtype), device=device)

        width = WIDTHS[dtype]
        x, gradient = ring(lambda: one(m, k), width * m * k, device), ring(lambda: one(m, n), width * m * n, device)
        weight = ring(lambda: one(n, k), width * n * k, device)
        results: list[Any] = [None] * max(2, len(gradient))
        if stage == "fwd":

            def call(i: int) -> None:
                results[i % len(results)] = x[i % len(x)] @ weight[i % len(weight)].t()
        elif stage == "bwd_input":

            def call(i: int) -> None:
                results[i % len(results)] = gradient[i % len(gradient)] @ weight[i % len(weight)]
        else:

            def call(i: int) -> None:
                results[i % len(results)] = gradient[i % len(gradient)].t() @ x[i % len(x)]

        return call

    return make


def copy_of(size: int, source: str, target: str) -> Callable[[], Callable[[int], Any]]:
    """Return what makes the call of one copy of so many bytes between the memories of two devices."""

    def make() -> Callable[[int], Any]:
        import torch

        def one(place: str) -> Any:
            pinned = place == "cpu" and "cuda" in (source, target)
            return torch.ones(size // 4, device=place, pin_memory=pinned)

        a, b = ring(lambda: one(source), size), ring(lambda: one(target), size)
        return lambda i: b[i % len(b)].copy_(a[i % len(a)], non_blocking=True)

    return make
