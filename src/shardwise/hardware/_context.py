"""What a process takes of a device's memory before it makes a tensor."""

from __future__ import annotations

import re
from functools import cache
from math import ceil, log2

from shardwise.files import own_table
from shardwise.hardware._device import Device, find_link


def context_bytes(device: Device) -> float:
    """Return the bytes of a process's context on a device, with the kernels that it launches as it trains.

    Source: context.toml, which has the out-of-memory messages that it was read from.

    >>> from shardwise.hardware import find_device
    >>> [round(context_bytes(find_device(name).device) / 2**20) for name in ("t4", "rtx-a6000", "a100-sxm-80gb")]
    [125, 323, 531]
    """
    return _context_bytes(device.vendor, device.chip, device.cores)


def peer_bytes(device: Device) -> float:
    """Return the bytes of NCCL's buffers for sends to one other device of the node and receipts from it.

    Source: context.toml, which has the files of NCCL.

    >>> from shardwise.hardware import find_device
    >>> [peer_bytes(find_device(name).device) / 2**20 for name in ("h100-sxm-80gb", "a800-sxm-80gb", "l40s")]
    [384.0, 192.0, 24.0]
    """
    return _peer_bytes(device.fast_link, device.fast_bytes_per_second if device.knows("fast_bytes_per_second") else 0.0)


@cache
def _peer_bytes(link: str, bytes_per_second: float) -> float:
    rule, lane = own_table(__file__, "context.toml")["peers"], find_link(link).lane_bytes_per_second
    fewest, most = rule["channels"]
    channels = fewest * max(round(bytes_per_second / lane), 1) if lane else fewest
    return float(rule["channel_bytes"] * min(2 ** ceil(log2(channels)), most))


@cache
def _context_bytes(vendor: str, name: str, cores: int) -> float:
    table = own_table(__file__, "context.toml")
    if re.fullmatch(table["none"]["devices"], name):
        return 0.0
    if vendor not in ("NVIDIA", "generic"):
        return float(table["other"]["bytes"])
    threads = next(count for pattern, count in table["threads"]["a_core"] if re.fullmatch(pattern, name))
    return float(table["nvidia"]["bytes"] + table["nvidia"]["thread_bytes"] * threads * cores)
