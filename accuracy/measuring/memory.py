"""Peaks of memory: CUDA's own counters, or on a CPU every allocation and release that PyTorch's profiler records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def cpu_peak(run: Callable[[], Any]) -> int:
    """Return the most bytes that PyTorch's CPU allocator held at once while `run` ran.

    The profiler sees every allocation of a tensor, those inside kernels included, to the byte; what was there before
    is not counted, so `run` makes the model itself.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def cuda_peak(run: Callable[[], Any]) -> tuple[int, int]:
    """Return the most bytes (allocated, reserved) of CUDA's caching allocator while `run` ran."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
