"""How much of a measured rate power and heat leave: on devices of less power, and where all of a node are busy."""

from __future__ import annotations

from dataclasses import replace

from shardwise.cost._records import AttentionFit, Gemm
from shardwise.cost._tables import constants
from shardwise.hardware import Device


def power_share(row: Gemm, device: Device) -> float:
    """Return the share of a lasting rate that a device keeps which has fewer watts for its peak than the measured one.

    Nothing is lost where neither the device nor its relatives state their power, or at the highest clock.

    >>> from shardwise.hardware import find_device
    >>> row = constants().families["hopper"].matmul["bf16"]
    >>> [round(power_share(row, find_device(name).device), 2) for name in ("h100-sxm-80gb", "h100-pcie-80gb", "h20")]
    [1.0, 0.9, 1.0]
    """
    measured = row.watts_per_flops
    wide = next((device.peak_flops(d) for d in ("bf16", "fp16") if d in device.matrix_flops), 0.0)
    if not measured or not wide or row.steady_state_share == 1 or not device.knows("power_watts"):
        return 1.0
    share = device.power_watts / wide / measured
    return float(min(1.0, share ** constants().rules.power.exponent))


def lasting_share(row: Gemm, device: Device) -> float:
    """Return what a device keeps of the lasting rate of its family: as stated for it, or as its power says."""
    stated = row.steady_state_by_device
    if device.name in stated or device.name in row.by_device:
        return stated.get(device.name, 1.0)
    return power_share(row, device)


def derated_gemm(row: Gemm, device: Device, node_busy: bool) -> Gemm:
    """Return rates of GEMMs measured on one device alone as devices of a busy node keep them, where the row says so.

    >>> from shardwise.hardware import find_device
    >>> row = replace(constants().families["blackwell"].matmul["bf16"], compute=0.8, node_derate=0.5)
    >>> [derated_gemm(row, find_device(name).device, True).compute for name in ("b200-sxm-180gb", "gb200")]
    [0.4, 0.8]
    """
    return replace(row, compute=row.compute * node_share(row, device, node_busy))


def derated_attention(row: AttentionFit, device: Device, node_busy: bool) -> AttentionFit:
    """Return rates of attention measured on one device alone as devices of a busy node keep them."""
    share = node_share(row, device, node_busy)
    return replace(row, forward=row.forward * share, backward=row.backward * share)


def node_share(row: Gemm | AttentionFit, device: Device, node_busy: bool) -> float:
    """Return what a device keeps of rates measured alone while all of its node are busy."""
    return row.node_derate_by_device.get(device.name, row.node_derate) if node_busy else 1.0
