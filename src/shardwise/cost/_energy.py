"""What devices draw while they work: their rated watts by how busy arithmetic and memory are."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

from shardwise.cost._load import record
from shardwise.cost._tables import family_of
from shardwise.hardware import Device
from shardwise.records import dataclass


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
    text = resources.files("shardwise.cost").joinpath("power.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    name = family if family in table else ""
    return record(PowerModel, table[name], f"power.{name}")


def mean_watts(device: Device, compute: float, memory: float) -> tuple[float, float, float]:
    """Return the mean watts of a busy device and its band; raises `InputError` where its rated watts are not known.

    >>> from shardwise.hardware import find_device
    >>> [round(watts) for watts in mean_watts(find_device("a100-sxm-80gb").device, 0.4, 0.3)]
    [342, 294, 400]
    """
    model = power_model(family_of(device))
    watts = device.power_watts * model.share(compute, memory)
    return watts, watts * model.low, min(watts * model.high, device.power_watts)
