"""What a process takes of a device's memory before it makes a tensor."""

from __future__ import annotations

import re
from functools import cache

from shardwise.files import own_table
from shardwise.hardware._device import Device


def context_bytes(device: Device) -> float:
    """Return the bytes of a process's context on a device, with the kernels that it launches as it trains.

    Source: context.toml, which has the out-of-memory messages that it was read from.

    >>> from shardwise.hardware import find_device
    >>> [round(context_bytes(find_device(name).device) / 2**20) for name in ("t4", "rtx-a6000", "a100-sxm-80gb")]
    [125, 323, 531]
    """
    return _context_bytes(device.vendor, device.chip, device.cores)


@cache
def _context_bytes(vendor: str, name: str, cores: int) -> float:
    table = own_table(__file__, "context.toml")
    if re.fullmatch(table["none"]["devices"], name):
        return 0.0
    if vendor not in ("NVIDIA", "generic"):
        return float(table["other"]["bytes"])
    threads = next(count for pattern, count in table["threads"]["a_core"] if re.fullmatch(pattern, name))
    return float(table["nvidia"]["bytes"] + table["nvidia"]["thread_bytes"] * threads * cores)
