"""Efficiencies and rates that the user imposes in place of those that were fitted."""

from __future__ import annotations

from shardwise.cost._tables import bandwidth_of
from shardwise.errors import Problems
from shardwise.hardware import Device
from shardwise.records import dataclass

OVERLAP_AXES = ("tp", "cp", "ep", "dp", "pp")
"""Axes whose messages may be kept from running beside compute; tp has both of the two-dimensional layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiencies:
    """Efficiencies that the user imposes in place of the fitted ones; 0 leaves the fit.

    `ideal` sets every one to 1 and starts to 0. `matmul_flops_per_second` and `memory_bytes_per_second` impose
    achieved rates instead of fractions. `exposed_axes` are those whose messages never run beside compute.
    """

    compute: float = 0.0
    memory: float = 0.0
    fast_link: float = 0.0
    slow_link: float = 0.0
    matmul_flops_per_second: float = 0.0
    memory_bytes_per_second: float = 0.0
    fast_bytes_per_second: float = 0.0
    slow_bytes_per_second: float = 0.0
    ideal: bool = False
    exposed_axes: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise `InputError` for fractions outside (0, 1] and negative rates."""
        problems = Problems()
        for name in ("compute", "memory", "fast_link", "slow_link"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                problems.add(
                    f"{name}_efficiency",
                    value,
                    "must be a fraction of the peak, above 0 and at most 1",
                    "use for example 0.7",
                )
        for name in (
            "matmul_flops_per_second",
            "memory_bytes_per_second",
            "fast_bytes_per_second",
            "slow_bytes_per_second",
        ):
            if getattr(self, name) < 0:
                problems.add(
                    name, getattr(self, name), "must not be negative", "give an achieved rate, or leave it out"
                )
        for axis in self.exposed_axes:
            if axis not in OVERLAP_AXES:
                problems.add("exposed_axes", axis, "is not an axis of messages", f"use {', '.join(OVERLAP_AXES)}")
        problems.raise_if_any()

    @property
    def imposes_memory(self) -> bool:
        """Whether the rate of the memory is the user's, so that nothing that was fitted of it holds."""
        return bool(self.ideal or self.memory or self.memory_bytes_per_second)


def check_achieved(imposed: Efficiencies, peak: float, bandwidth: float) -> None:
    """Raise `InputError` for achieved rates above what the datasheet gives."""
    problems = Problems()
    for name, limit in (("matmul_flops_per_second", peak), ("memory_bytes_per_second", bandwidth)):
        if getattr(imposed, name) > limit:
            rule = f"is above the device's peak of {limit:g} a second"
            problems.add(name, getattr(imposed, name), rule, f"use at most {limit:g}, or another device")
    problems.raise_if_any()


def effective(imposed: Efficiencies, fitted: float, user: float) -> float:
    """Return the user's efficiency, or one where everything is ideal, or the fitted one."""
    return user or (1.0 if imposed.ideal else fitted)


def achieved_bytes(device: Device, imposed: Efficiencies, fitted: float) -> float:
    """Return the bytes a second that the user states, or his share of the datasheet's, or the fitted one."""
    if imposed.memory_bytes_per_second:
        return imposed.memory_bytes_per_second
    if imposed.memory or imposed.ideal:
        return (imposed.memory or 1.0) * device.memory_bytes_per_second
    return fitted * bandwidth_of(device)
