"""Low, typical and high of the headlines of a training plan, from published runs of comparable devices and models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.cost import Band, Efficiencies, band_names, band_of, memory_band

if TYPE_CHECKING:
    from shardwise.training._report import TrainReport

IDEAL = Efficiencies(ideal=True)
# Headlines that grow with the seconds of a step, and those that shrink.
_GROWING = ("step_seconds", "training_seconds", "device_hours", "usd")
_SHRINKING = ("tokens_per_second_per_gpu", "mfu", "hfu", "model_flops_per_second_per_gpu")


def step_band(report: TrainReport, assumed: bool) -> Band:
    """Return how far the seconds of a step may be off; farther where fields of the plan that matter were assumed."""
    family = report.evaluation.rates.family
    return band_of("step_seconds", *band_names(family, report.case.model.has_experts, assumed))


def intervals(report: TrainReport, assumed: bool, floor_seconds: float) -> dict[str, tuple[float, float, float]]:
    """Return 10 %, median and 90 % of every headline; no step is shorter than the floor."""
    seconds, band = report.step_seconds, step_band(report, assumed)
    least = min(floor_seconds, seconds)
    low, typical, high = (max(seconds * factor, least) / seconds for factor in (band.low, band.typical, band.high))
    found: dict[str, tuple[float, float, float]] = {}
    for name in _GROWING:
        if value := getattr(report, name):
            found[name] = value * low, value * typical, value * high
    for name in _SHRINKING:
        value = getattr(report, name)
        found[name] = value / high, value / typical, value / low
    memory = memory_band(report.case.stack.name)
    for name, value in (("memory.peak_bytes", report.allocated_bytes), ("device_bytes", report.device_bytes)):
        found[name] = value * memory.low, value * memory.typical, value * memory.high
    return found
