"""Rows of kernels that only move bytes: a start, and bytes over the rate of the memory or of the last cache.

Tables replay one kernel again and again, so that it finds its input in the cache if that is large enough. Kernels that
PyTorch runs step by step move more bytes, and the cores bind them rather than the memory (tables.toml).
"""

from __future__ import annotations

import math

from accuracy.kernels.tables import ENGINES, tables
from shardwise.cost import (
    MEASURED_KERNELS,
    Efficiencies,
    bandwidth_of,
    constants,
    family_of,
    inside_share,
    last_cache_bytes,
    rates_of,
)
from shardwise.hardware import Device
from shardwise.measured import Record, refuse
from shardwise.serving import find_engine


def memory_rate(device: Device) -> float:
    """Return bytes a second of streaming kernels on a device."""
    return float(constants().families[family_of(device)].memory.efficiency * bandwidth_of(device))


def cached_rate(device: Device, walked: float, copies: int = 1) -> float:
    """Return bytes a second where so many bytes are walked through again and again, each held `copies` times."""
    rate, held = memory_rate(device), last_cache_bytes(device)
    each = constants().families[family_of(device)].memory.cached_bytes_per_second_per_core
    if not each or not held or not device.knows("num_cores"):
        return rate
    hit = inside_share(walked * copies / held)
    inside = max(each * device.num_cores, rate)
    return float(1 / (hit / inside + (1 - hit) / rate))


def read_share(device: Device, walked: float, copies: int = 1) -> float:
    """Return seconds of reading so many bytes again and again over those from memory: 1 where no cache holds them.

    >>> from shardwise.hardware import find_device
    >>> read_share(find_device("h100-sxm-80gb").device, 1e9)
    1.0
    """
    return memory_rate(device) / cached_rate(device, walked, copies)


def step_rate(device: Device, walked: float) -> float:
    """Return bytes a second of one of PyTorch's element-wise kernels: its cores bind it before the memory does."""
    rate = cached_rate(device, walked)
    if not device.knows("num_cores"):
        return rate
    return float(min(rate, tables()["unfused"]["bytes_per_second_per_core"] * device.num_cores))


def replayed_start(device: Device, engine: str) -> float:
    """Return seconds to start a small kernel of a captured graph, of the engine where the device's is not measured."""
    known = engine if engine in ENGINES.values() else "vllm"
    row, own = constants().families[family_of(device)].memory, tables()["replayed"].get(known, {})
    usual = row.replayed_start_seconds or find_engine(known).graphs.small_kernel_seconds
    return float(own.get(family_of(device), usual))


def streaming(record: Record, device: Device) -> float:
    """Return seconds of a kernel that only moves bytes, started from a captured graph; on a CPU by what it does."""
    row, moved = constants().families[family_of(device)].memory, record.positive("bytes_total")
    if row.kinds_by_type:
        # Rates by kind and type are measured on CPUs alone.
        return _on_cpu(record, device, moved)
    engine = ENGINES.get(record.text("engine"), record.text("engine"))
    apart = tables()["unfused"]["kernels"].get(f"{engine}-{record.text('op')}")
    if apart:
        start = apart["kernels"] * replayed_start(device, engine)
        return float(start + apart["times"] * moved / step_rate(device, apart["widest"] * moved))
    rate, flat = cached_rate(device, moved), tables()["flat"]
    if engine in flat["engines"]:
        most = flat["bytes_per_second_per_core"].get(family_of(device), math.inf) * float(device.num_cores)
        return float(replayed_start(device, engine) + moved / min(rate, most))
    # One core runs a row: few long ones leave the others idle.
    alone = moved / record.number("rows", moved) / (row.cached_bytes_per_second_per_core or math.inf)
    return float(replayed_start(device, engine) + max(moved / rate, alone))


def _on_cpu(record: Record, device: Device, moved: float) -> float:
    name, _, word = record.text("op").rpartition("_")
    found = MEASURED_KERNELS.get(name if word in ("forward", "backward") else record.text("op"))
    if found is None:
        raise refuse("op", record.text("op"), "is not a kernel that is modelled")
    r = rates_of(device, record.text("dtype"), 0.0, Efficiencies())
    return float(
        moved / r.bandwidth_shares.rate(r.memory_bytes, found[0], word == "backward") + found[1] * r.memory_start
    )
