"""Low, typical and high of the headlines of a training plan, from published runs of comparable devices and models."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.cost import Band, Conditions, Efficiencies, band_of
from shardwise.models import Model
from shardwise.training._case import TrainingCase

IDEAL = Efficiencies(ideal=True)
# What tells comparable published runs apart.
_MANY_RANKS, _MANY_NODES, _LONG, _MANY_EXPERTS = 8, 8, 16384, 8
_NARROW = ("fp8", "fp4", "int8")
# Headlines that grow with the seconds of a step, and those that shrink.
GROWING = ("step_seconds", "training_seconds", "device_hours", "usd")
SHRINKING = ("tokens_per_second_per_gpu", "mfu", "hfu", "model_flops_per_second_per_gpu")
BYTES = ("memory.peak_bytes", "device_bytes")


def conditions(case: TrainingCase, family: str, assumed: bool) -> Conditions:
    """Return what decides how far published runs like a case were off; `assumed`: fields that matter were."""
    cluster = case.cluster
    nodes = cluster.num_devices / cluster.devices_per_node
    said = {
        "experts": case.model.has_experts,
        "experts on many ranks": case.plan.ep > _MANY_RANKS,
        "nodes": nodes > 1,
        "many nodes": nodes > _MANY_NODES,
        "narrow types": case.recipe.precision.compute in _NARROW,
        "long sequences": case.job.seq_len > _LONG,
        "many experts a token": most_chosen(case.model) > _MANY_EXPERTS,
        "assumed fields": assumed,
        "fine-tuning": bool(case.tuning),
    }
    words = tuple(word for word, holds in said.items() if holds)
    device = cluster.device.name
    return Conditions(stack=case.stack.name.removesuffix("-scores"), family=family, words=words, device=device)


def most_chosen(model: Model) -> int:
    """Return the most experts that a token goes to in a layer."""
    return max((block.experts.top_k for block in model.kinds if block.experts), default=0)


def intervals(
    headlines: Mapping[str, float | None], known: Conditions, memory: Band, floor_seconds: float
) -> dict[str, tuple[float, float, float]]:
    """Return 10 %, median and 90 % of every headline of a plan; no step is shorter than the floor."""
    seconds, band = headlines["step_seconds"] or 0.0, band_of("step_seconds", known)
    least = min(floor_seconds, seconds)
    low, typical, high = (max(seconds * factor, least) / seconds for factor in (band.low, band.typical, band.high))
    found: dict[str, tuple[float, float, float]] = {}
    for name in GROWING:
        if value := headlines[name]:
            found[name] = value * low, value * typical, value * high
    for name in SHRINKING:
        value = headlines[name] or 0.0
        found[name] = value / high, value / typical, value / low
    for name in BYTES:
        value = headlines[name] or 0.0
        found[name] = value * memory.low, value * memory.typical, value * memory.high
    return found
