"""How much of a measured rate power and heat leave: on devices of less power, and where all of a node are busy."""

from __future__ import annotations

from typing import Any

from shardwise.cost._tables import constants
from shardwise.hardware import Device


def power_share(row: dict[str, Any], device: Device) -> float:
    """Return the share of a lasting rate that a device keeps which has fewer watts for its peak than the measured one.

    Nothing is lost where neither the device nor its relatives state their power, or at the highest clock.

    >>> from shardwise.hardware import find_device
    >>> row = constants()["hopper"]["matmul"]["bf16"]
    >>> [round(power_share(row, find_device(name).device), 2) for name in ("h100-sxm-80gb", "h100-pcie-80gb", "h20")]
    [1.0, 0.9, 1.0]
    """
    measured = row.get("watts_per_flops", 0.0)
    wide = next((device.peak_flops(d) for d in ("bf16", "fp16") if d in device.matrix_flops), 0.0)
    if not measured or not wide or row.get("sustained", 1.0) == 1 or not device.knows("power_watts"):
        return 1.0
    share = device.power_watts / wide / measured
    return float(min(1.0, share ** constants()["passes"]["power"]["exponent"]))


def lasting_share(row: dict[str, Any], device: Device) -> float:
    """Return what a device keeps of the lasting rate of its family: as stated for it, or as its power says."""
    stated = row.get("sustained_by_device", {})
    if device.name in stated or device.name in row.get("by_device", {}):
        return float(stated.get(device.name, 1.0))
    return power_share(row, device)


def paced(row: dict[str, Any], device: Device, together: bool) -> dict[str, Any]:
    """Return a row of rates measured on one device alone as devices of a busy node keep them, where it says so.

    >>> from shardwise.hardware import find_device
    >>> row = {"compute": 0.8, "together": 0.5, "together_by_device": {"gb200": 1.0}}
    >>> [paced(row, find_device(name).device, True)["compute"] for name in ("b200-sxm-180gb", "gb200")]
    [0.4, 0.8]
    """
    share = row.get("together_by_device", {}).get(device.name, row.get("together", 1.0)) if together else 1.0
    return row | {name: row[name] * share for name in ("compute", "forward", "backward") if name in row}
