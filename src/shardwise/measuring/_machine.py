"""What a measurement ran on: processor or GPU, threads, memory, versions; and settings that make it repeatable."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import InputError
from shardwise.hardware import find_device

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
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _hertz() -> float:
    """Return the clock that the processor states for itself; virtual machines print their nominal one."""
    try:
        found = re.findall(r"cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = []
    return max(map(float, found)) * 1e6 if found else 0.0


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
        hertz=_hertz(), memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), torch_version=version,
        keeps_memory=keep_freed_memory(),
    )  # fmt: skip


def catalogue_key(name: str) -> str:
    """Return the name in shardwise's catalogue of a GPU that its driver calls so, or a key made of that name."""
    try:
        return find_device(name).device.name
    except InputError:
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
