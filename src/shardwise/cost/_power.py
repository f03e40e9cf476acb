"""Power: what devices draw while they work, and how much of a measured rate watts and heat leave."""

from __future__ import annotations

from functools import cache

from shardwise.cost._records import AttentionFit, Gemm
from shardwise.cost._tables import constants, family_of, record
from shardwise.files import own_table
from shardwise.hardware import Device, find_device
from shardwise.records import dataclass, replace


def power_share(row: Gemm, device: Device, dtype: str = "") -> float:
    """Return the share of a lasting rate that a device keeps which has fewer watts for its peak than the measured one.

    The peak is that of 16 bits: of `dtype` where it is one of those. Nothing is lost where neither the device nor its
    relatives state their power, or at the highest clock.

    >>> from shardwise.hardware import find_device
    >>> row = constants().families["hopper"].matmul["bf16"]
    >>> [round(power_share(row, find_device(name).device), 2) for name in ("h100-sxm-80gb", "h100-pcie-80gb", "h20")]
    [1.0, 0.9, 1.0]
    """
    measured, wide_types = row.watts_per_flops, ("fp16", "bf16") if dtype == "fp16" else ("bf16", "fp16")
    wide = next((device.peak_flops(d) for d in wide_types if d in device.matrix_flops), 0.0)
    if not measured or not wide or row.steady_state_share == 1 or not device.knows("power_watts"):
        return 1.0
    share = device.power_watts / wide / measured
    return float(min(1.0, share ** constants().rules.power.exponent))


def steady_state_rate(row: Gemm, device: Device, dtype: str = "") -> float:
    """Return what a device keeps of the lasting rate of its family: as stated for it, or as its power says."""
    stated = row.steady_state_by_device
    if device.chip not in stated and device.chip not in row.by_device:
        return power_share(row, device, dtype)
    share = stated.get(device.chip, 1.0)
    if device.like:  # a variant of the measured device may have other watts for its peak
        share *= power_share(row, device, dtype) / power_share(row, find_device(device.like).device, dtype)
    return share


def derated_gemm(row: Gemm, device: Device, node_busy: bool, library: str = "") -> Gemm:
    """Return rates of GEMMs of a release of the library as devices of a busy node keep them, where the row says so.

    >>> from shardwise.hardware import find_device
    >>> row = replace(constants().families["blackwell"].matmul["bf16"], compute=0.8, node_derate=0.5)
    >>> [derated_gemm(row, find_device(name).device, True).compute for name in ("b200-sxm-180gb", "gb200")]
    [0.4, 0.8]
    """
    own = row.steady_state_share
    kept = row.steady_state_by_library.get(library, own) / own * node_share(row, device, node_busy)
    return replace(row, compute=row.compute * kept)


def derated_attention(row: AttentionFit, device: Device, node_busy: bool) -> AttentionFit:
    """Return rates of attention measured on one device alone as devices of a busy node keep them."""
    share = node_share(row, device, node_busy)
    return replace(row, forward=row.forward * share, backward=row.backward * share)


def node_share(row: Gemm | AttentionFit, device: Device, node_busy: bool) -> float:
    """Return what a device keeps of rates measured alone while all of its node are busy."""
    return row.node_derate_by_device.get(device.chip, row.node_derate) if node_busy else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerModel:
    """Shares of a device's rated watts: while it waits, and what arithmetic and memory at their peaks add.

    `low` and `high` are factors from predicted to measured, 10 % and 90 % of `rows` runs.
    """

    idle: float
    memory: float
    compute: float
    low: float
    high: float
    rows: int
    source: str

    def share(self, compute: float, memory: float) -> float:
        """Return the share of the rated watts at shares of the peaks of arithmetic and of memory, at most 1.

        Energy adds up over FLOPs, bytes and seconds, so mean power is linear in their rates; the board's limit caps it.

        >>> power_model("ampere").share(0.1, 0.3) < power_model("ampere").share(0.5, 0.3) <= 1
        True
        """
        return min(self.idle + self.compute * compute + self.memory * memory, 1.0)


@cache
def power_model(family: str) -> PowerModel:
    """Return the shares of a family of devices, the mean of those measured where it is not one of them.

    >>> power_model("hopper").rows, power_model("tpu").low
    (161, 0.64)
    """
    table = own_table(__file__, "power.toml")
    name = family if family in table else ""
    return record(PowerModel, table[name], f"power.{name}")


def mean_watts(device: Device, compute: float, memory: float, waiting: float = 0.0) -> tuple[float, float, float]:
    """Return the mean watts of a device and its band; raises `InputError` where its rated watts are not known.

    `waiting` is the share of the time without a request: measured loads were steady, so that what is drawn then is
    known to lie between nothing and what a device draws between two kernels, which is taken.

    >>> from shardwise.hardware import find_device
    >>> [round(watts) for watts in mean_watts(find_device("a100-sxm-80gb").device, 0.4, 0.3)]
    [342, 294, 400]
    """
    model = power_model(family_of(device))
    watts = device.power_watts * model.share(compute, memory)
    least = max(watts - device.power_watts * model.idle * waiting, 0.0)
    return watts, least * model.low, min(watts * model.high, device.power_watts)
