"""Low, typical and high of the headlines of a training plan, from published runs of comparable devices and models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.cost import Band, Conditions, Efficiencies, band_of, memory_band
from shardwise.models import Model

if TYPE_CHECKING:
    from shardwise.training._report import TrainReport

IDEAL = Efficiencies(ideal=True)
# What tells comparable published runs apart.
_MANY_RANKS, _MANY_NODES, _LONG, _MANY_EXPERTS = 8, 8, 16384, 8
_NARROW = ("fp8", "fp4", "int8")
# Headlines that grow with the seconds of a step, and those that shrink.
_GROWING = ("step_seconds", "training_seconds", "device_hours", "usd")
_SHRINKING = ("tokens_per_second_per_gpu", "mfu", "hfu", "model_flops_per_second_per_gpu")


def step_band(report: TrainReport, assumed: bool) -> Band:
    """Return how far the seconds of a step may be off; farther where fields of the plan that matter were assumed."""
    return band_of("step_seconds", conditions(report, assumed))


def conditions(report: TrainReport, assumed: bool) -> Conditions:
    """Return what decides how far published runs like a plan were off; `assumed`: fields that matter were."""
    case, cluster = report.case, report.case.cluster
    nodes = cluster.num_devices / cluster.devices_per_node
    said = {
        "experts": case.model.has_experts,
        "experts on many ranks": report.plan.ep > _MANY_RANKS,
        "nodes": nodes > 1,
        "many nodes": nodes > _MANY_NODES,
        "narrow types": case.recipe.precision.compute in _NARROW,
        "long sequences": report.job.seq_len > _LONG,
        "many experts a token": most_chosen(case.model) > _MANY_EXPERTS,
        "assumed fields": assumed,
        "fine-tuning": bool(case.tuning),
    }
    words = tuple(word for word, holds in said.items() if holds)
    family = report.evaluation.rates.family
    device = cluster.device.name
    return Conditions(stack=case.stack.name.removesuffix("-scores"), family=family, words=words, device=device)


def most_chosen(model: Model) -> int:
    """Return the most experts that a token goes to in a layer."""
    return max((block.experts.top_k for block in model.kinds if block.experts), default=0)


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
    memory = memory_band(report.case.stack.name, bool(report.case.tuning))
    for name, value in (("memory.peak_bytes", report.allocated_bytes), ("device_bytes", report.device_bytes)):
        found[name] = value * memory.low, value * memory.typical, value * memory.high
    return found
