"""From timed GEMMs and copies to a device of the user's catalogue: what it reaches, and the peaks that implies."""

from __future__ import annotations

import csv
import ctypes
import io
import math
import os
import platform
import re
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from functools import partial
from pathlib import Path

from shardwise.cost import Efficiencies, constants, family_of, gemm_rates, gemm_seconds, matmul_row
from shardwise.errors import InputError
from shardwise.hardware import Device, Fact, find_device
from shardwise.measuring._clock import WIDTHS, Clock, TimedCase, Timing, copy_of, product_of
from shardwise.records import dataclass, replace

Shapes = Sequence[tuple[int, int, int]]

# Forward GEMMs (m, k) by (k, n), and bytes of copies, by kind of device.
SHAPES: dict[str, Shapes] = {
    "cpu": [
        (m, n, k) for n, k in ((512, 1408), (1024, 1024), (4096, 1024), (2048, 2048)) for m in (1, 16, 64, 256, 1024)
    ],
    "cuda": [
        (m, n, k) for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192)) for m in (1, 64, 1024, 4096)
    ],
}
COPIES = {"cpu": (2**26, 2**28), "cuda": (2**28, 2**31)}
# Products of fewer rows are bound by the reading of weights and by starts, and tell nothing of arithmetic.
LEAST_ROWS = 64


@dataclass(frozen=True, slots=True)
class Measurement:
    """One kernel that was timed; a copy has its bytes read and written, and no m, n and k."""

    kernel: str
    dtype: str
    m: int
    n: int
    k: int
    bytes_moved: float
    seconds: float
    spread: float
    """Distance of the quartiles of the repeats over their median."""
    others: float
    """Share of the processors that other programs took meanwhile."""


def copies_of(machine: Machine) -> tuple[int, ...]:
    """Return the bytes of the copies that are timed: two of each operand are in memory, half of which they may take."""
    every = COPIES[machine.device]
    return tuple(size for size in every if 8 * size <= machine.memory_bytes) or every[:1]


def timed(clock: Clock, shapes: Shapes, copies: Sequence[int]) -> list[Measurement]:
    """Return the timings of forward GEMMs (m, k) by (k, n) in every type, and of copies of so many bytes."""
    measurements: list[Measurement] = []

    def keep(head: tuple[str, str, int, int, int, float], timing: Timing) -> None:
        measurements.append(Measurement(*head, timing.seconds, timing.spread, timing.others))

    cases = []
    for size in copies:
        row = partial(keep, ("copy", "fp32", 0, 0, 0, 2.0 * size))
        cases.append(TimedCase(f"copy {size}", copy_of(size, clock.device, clock.device), row))
    for dtype, width in WIDTHS.items():
        for m, n, k in shapes:
            row = partial(keep, ("product", dtype, m, n, k, float(width * (m * k + n * k + m * n))))
            cases.append(TimedCase(f"{dtype} {m} {n} {k}", product_of("fwd", (m, n, k), clock.device, dtype), row))
    clock.run(cases)
    return measurements


def measurements_csv(rows: Sequence[Measurement]) -> str:
    """Return the raw table: a line of columns, and one for each kernel."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([f.name for f in fields(Measurement)])
    writer.writerows([f"{v:.6g}" if isinstance(v, float) else v for v in astuple(row)] for row in rows)
    return text.getvalue()


def device_of(machine: Machine, rows: Sequence[Measurement]) -> Device:
    """Return the device that was measured, each rate with its source; a known one keeps its datasheet's peaks.

    Where no datasheet is known, peaks are what the rates imply: over the share of peaks that its family reaches.
    """
    known = _known(machine)
    base = known or _bare(machine)
    source, date = f"shardwise measure on {machine.description}", time.strftime("%Y-%m")
    family = constants().families[family_of(base)]
    largest = max((row for row in rows if row.kernel == "copy"), key=lambda row: row.bytes_moved)
    copied = largest.bytes_moved / largest.seconds
    made = base.with_values(
        {"achieved_bytes_per_second": copied}, f"{source}: copies of {largest.bytes_moved / 2:g} bytes", date
    )
    if known is None:
        share = family.memory.efficiency
        why = f"{source}: implied by copies, which reach {share:.2f} of the peak on {family_of(base)}"
        made = made.with_values({"memory_bytes_per_second": copied / share}, why, date)
    for dtype in WIDTHS:
        chosen = [row for row in rows if (row.kernel, row.dtype) == ("product", dtype) and row.m >= LEAST_ROWS]
        if not chosen or (known and dtype not in known.matrix_flops):
            continue
        rate, residual = _fitted(made, dtype, chosen)
        why = f"{source}: fitted to {len(chosen)} GEMMs of {LEAST_ROWS} rows or more, median error {residual:.1%}"
        values = {f"achieved_flops.{dtype}": rate}
        if known is None:
            share = matmul_row(family_of(base), dtype)[0].compute
            values[f"matrix_flops.{dtype}"] = rate / share
            why += f"; the peak is what it implies at a share of {share:.2f}, that of {family_of(base)}"
        made = made.with_values(values, why, date)
    return made


def _known(machine: Machine) -> Device | None:
    """Return the device of the catalogue that the machine's name means, under the name asked for."""
    if machine.device == "cpu":
        return None
    try:
        known = find_device(machine.full_name).device
    except InputError:
        return None
    return replace(known, name=machine.key, like="" if machine.key == known.chip else known.chip)


def _bare(machine: Machine) -> Device:
    """Return a device with its memory and cores alone, as the system states them."""
    values = {
        "memory_bytes": machine.memory_bytes,
        "usable_memory_bytes": machine.memory_bytes,
        "num_cores": machine.cores,
        "devices_per_node": 1,
        "fast_domain": 1,
    }
    where, date = "stated by the system to shardwise measure; measured as one device", time.strftime("%Y-%m")
    facts = tuple(Fact(field=name, value=value, source=where, date=date) for name, value in values.items())
    return Device(name=machine.key, full_name=machine.full_name, vendor="measured", fast_link="local", sources=facts)


def _fitted(device: Device, dtype: str, rows: Sequence[Measurement]) -> tuple[float, float]:
    """Return the FLOP/s at which half of the GEMMs are predicted too long, and the median error that it leaves."""

    def ratios(rate: float) -> list[float]:
        # At a peak of twice the rate, or the datasheet's, the form meets every rate that is tried.
        peak = max(rate, device.matrix_flops.get(dtype, 0.0))
        tried = device.with_values({f"matrix_flops.{dtype}": peak, f"achieved_flops.{dtype}": rate}, "tried", "now")
        rates = gemm_rates(tried, dtype, matmul_row(family_of(device), dtype)[0], Efficiencies())
        return [math.log(float(gemm_seconds(rates, (r.m, r.n, r.k, 1.0), r.bytes_moved)) / r.seconds) for r in rows]

    best = max(2.0 * r.m * r.n * r.k / r.seconds for r in rows)
    rate = _root(lambda x: statistics.median(ratios(x)), best / 8, best * 8)
    return rate, statistics.median(abs(math.expm1(x)) for x in ratios(rate))


def _root(f: Callable[[float], float], low: float, high: float) -> float:
    """Return where a falling function crosses zero, or the end that is nearer to it."""
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if f(middle) > 0 else (low, middle)
    return math.sqrt(low * high)


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _PAD_BYTES = -1, -2, -4, 2**29


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One machine: the key of its rows, what it says of itself, and what each row is to say of it."""

    key: str
    device: str
    full_name: str
    cores: int
    threads: int
    hertz: float
    memory_bytes: int
    torch_version: str
    keeps_memory: bool

    @property
    def engine(self) -> str:
        """The word for plain PyTorch on this kind of device in the tables."""
        return f"pytorch-{self.device}"

    @property
    def framework(self) -> str:
        """The word for plain PyTorch in training rows."""
        return "plain PyTorch on CPU" if self.device == "cpu" else "plain PyTorch"

    @property
    def description(self) -> str:
        """The processor, its cores and clock, and the version of PyTorch."""
        clock = f", {self.hertz / 1e9:.2f} GHz" if self.hertz else ""
        return f"{self.full_name}, {self.cores} cores{clock}, torch {self.torch_version}"

    @property
    def citation(self) -> str:
        """What was measured where, for the column of that name."""
        return f"measured on {self.description}"


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed, as CUDA's caching allocator does; returns whether it could be told.

    Otherwise every tensor above 32 MiB is mapped and cleared anew by the kernel, at a few GB/s. PyTorch's tuning guide
    advises allocators that keep memory for the same reason.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        # No mappings of single tensors, never give the top of the heap back, and let it grow in large pieces.
        settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _PAD_BYTES))
        return all([libc.mallopt(name, value) for name, value in settings])
    except (OSError, AttributeError):
        return False


def _cpu_name() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _hertz() -> float:
    """Return the clock that the processor states for itself; virtual machines print their nominal one."""
    try:
        clocks = re.findall(r"cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        clocks = []
    return max(map(float, clocks)) * 1e6 if clocks else 0.0


def _memory_bytes() -> int:
    """Return the bytes of this machine's memory."""
    if sys.platform != "win32":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # MEMORYSTATUSEX of sysinfoapi.h: two words of 4 bytes, then seven of 8, the first of which is all of it.
    status = struct.pack("<II7Q", 64, *[0] * 8)
    buffer = ctypes.create_string_buffer(status, 64)
    succeeded = ctypes.windll.kernel32.GlobalMemoryStatusEx(buffer)
    return int(struct.unpack_from("<Q", buffer, 8)[0]) if succeeded else 0


def _key(name: str, cores: int) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"cpu-{words}-{cores}core"


def describe(device: str, name: str = "", key: str = "") -> Machine:
    """Return the machine; `name` and `key` replace what a virtual machine does not tell of its processor."""
    import torch

    version = str(torch.__version__)
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        full = name or properties.name
        return Machine(
            key=key or catalogue_key(full), device=device, full_name=full, cores=properties.multi_processor_count,
            threads=torch.get_num_threads(), hertz=0.0, memory_bytes=properties.total_memory, torch_version=version,
            keeps_memory=True,
        )  # fmt: skip
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    full = name or _cpu_name()
    return Machine(
        key=key or _key(full, cores), device=device, full_name=full, cores=cores, threads=torch.get_num_threads(),
        hertz=_hertz(), memory_bytes=_memory_bytes(), torch_version=version,
        keeps_memory=keep_freed_memory(),
    )  # fmt: skip


def catalogue_key(name: str) -> str:
    """Return the name in shardwise's catalogue of a GPU that its driver calls so, or a key made of that name."""
    try:
        return find_device(name).device.name
    except InputError:
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
