"""A training report as plain values, which `--json` prints and pages and plots read."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, cast

from shardwise.answers._answer import whole_bytes
from shardwise.answers._evidence import evidence_tree, fits_at, interval_tree
from shardwise.ledger.traced import parts
from shardwise.training import (
    CATEGORIES,
    MEMORY_CATEGORIES,
    Change,
    StageSeconds,
    TrainReport,
    TuningSummary,
    axis_seconds,
    category_of,
    device_bytes,
    outside_bytes,
    reserved_bytes,
    resident_pages,
    slowest_stage,
)
from shardwise.units import SECONDS_A_DAY

# A difference of two sums keeps some 1e-16 of them; a part that counts is far above this.
RESIDUE = 1e-9


CONVENTION = (
    "model FLOPs with attention over the full square (PaLM, arXiv:2204.02311, appendix B) "
    "over the dense peak of the compute type"
)


def train_tree(report: TrainReport, risk: float = 0.0) -> dict[str, Any]:
    """Return a training report as plain values: bytes, seconds, FLOP/s, dollars.

    >>> from shardwise import Cluster, Plan, Training, load_model, train
    >>> report = train(load_model("gpt2"), Cluster.parse("1xh100"), Plan(), Training(seq_len=1024, global_batch=8))
    >>> train_tree(report)["fits"]
    True
    """
    asked = report.job.run_tokens > 0
    tree = {
        "fits": fits_at(report, risk),
        "chance_to_fit": report.chance_to_fit,
        "risk": risk or None,
        "device_bytes": report.device_bytes,
        "memory": _memory(report),
        "tuned": report.job.tuning,
        "step_seconds": report.step_seconds,
        "step": step_tree(report),
        "tokens_per_step": report.job.tokens_per_step,
        "tokens_per_second": report.tokens_per_second_per_gpu * report.plan.num_devices,
        "tokens_per_second_per_gpu": report.tokens_per_second_per_gpu,
        "model_flops_per_second_per_gpu": report.model_flops_per_second_per_gpu,
        "mfu": report.mfu,
        "hfu": report.hfu,
        "mfu_convention": CONVENTION,
        "interval": interval_tree(report),
        "evidence": evidence_tree(report),
        "goodput": report.goodput,
        "days": report.training_seconds / SECONDS_A_DAY if asked else None,
        "device_hours": report.device_hours if asked else None,
        "usd": report.usd if asked else None,
        "model": report.case.model.name,
        "cluster": cluster_tree(report),
        "plan": {
            **asdict(report.plan),
            "precision": report.case.recipe.precision.name,
            "stack": report.case.stack.name,
        },
        "tuning": tuning_tree(report.tuning),
        "surprises": list(report.surprises),
        "phases": [asdict(phase) for phase in report.phases],
        "launchable": not report.unlaunched,
        "unlaunched": [asdict(problem) for problem in report.unlaunched],
        "settings": asdict(report.case.stack.settings),
        "job": asdict(report.job),
        "assumptions": list(report.assumptions),
        "changes": [change_tree(c) for c in report.changes],
    }
    return cast(dict[str, Any], whole_bytes(tree))


def tuning_tree(summary: TuningSummary | None) -> dict[str, Any] | None:
    """Return what a fine-tuning trains as plain values, None where all weights do."""
    if summary is None:
        return None
    more = {name: getattr(summary, name) for name in ("trainable_parameters", "trainable_share")}
    return {**asdict(summary), **more, "targets": list(summary.targets)}


def cluster_tree(report: TrainReport) -> dict[str, Any]:
    """Return the cluster of a report: its devices, nodes and tiers."""
    cluster = report.case.cluster
    return {
        "name": cluster.name,
        "device": cluster.device.name,
        "num_devices": cluster.num_devices,
        "num_nodes": cluster.num_nodes,
        "tiers": [asdict(t) for t in cluster.tiers],
        "usd_per_device_hour": cluster.usd_per_device_hour,
    }


def change_tree(change: Change) -> dict[str, Any]:
    """Return a change of one field and what it would do."""
    return asdict(change)


def _memory(report: TrainReport) -> dict[str, Any]:
    verdict = report.verdict
    return {
        "peak_bytes": report.allocated_bytes,
        "reserved_bytes": report.reserved_bytes,
        "device_bytes": report.device_bytes,
        "required_bytes": verdict.required_bytes,
        "host_bytes": report.host_bytes,
        "paged_bytes": max(report.evaluation.resident, report.evaluation.moved),
        "moved_pages_bytes": report.evaluation.moved,
        "host_limit_bytes": verdict.host_limit_bytes or None,
        "host_needed_bytes": verdict.host_needed_bytes,
        "limit_bytes": verdict.limit_bytes,
        "short_by_bytes": verdict.short_by_bytes,
        "dominant": verdict.dominant,
        "peak_stage": report.peak_stage,
        "peak_moment": report.peak_moment,
        "at_peak": peak_parts(report),
        "stages": [stage_tree(report, i) for i in range(len(report.evaluation.memory))],
    }


def stage_tree(report: TrainReport, index: int) -> dict[str, Any]:
    """Return the memory of a run of stages: bytes by category and at every moment."""
    run, memory = report.evaluation.stages[index], report.evaluation.memory[index]
    return {
        "first": run.position,
        "count": run.count,
        "layers": sum(run.layers),
        "mirrored_layers": sum(run.mirrored),
        "embedding": bool(run.embeds),
        "head": bool(run.ends),
        "in_flight": memory.in_flight,
        "categories": {name: getattr(memory, name) for name in CATEGORIES},
        "moments": dict(memory.moments),
        "peak_bytes": memory.peak,
    }


def peak_parts(report: TrainReport) -> dict[str, float]:
    """Return bytes by category at the moment of the peak, which add up to what the device shows.

    The parts are read from the traced peak itself, so they are its arithmetic and not a second formula.
    """
    return stage_parts(report, report.peak_stage)


def stage_parts(report: TrainReport, stage: int) -> dict[str, float]:
    """Return bytes by category at the peak of one run of equal stages, which add up to what its devices show."""
    bytes_of: dict[str, float] = dict.fromkeys(MEMORY_CATEGORIES, 0.0)
    memory, stack = report.evaluation.memory[stage], report.case.stack
    moment = max(memory.moments, key=lambda name: memory.moments[name])
    traced = report.traced_memory[stage].moments[moment]
    allocated = memory.peak + report.case.workspace_bytes
    reserved = allocated * stack.reserved_over_allocated + memory.late_block
    for part in parts(traced):
        bytes_of[category_of(part)] += part.amount
    bytes_of["temporaries"] += allocated - memory.peak
    pool = (reserved_bytes(stack, memory), memory.peak)
    cluster, sizes = report.case.cluster, report.evaluation.sizes
    shown, _ = device_bytes(stack, cluster, sizes, pool, report.case.workspace_bytes)
    # Where the device is full the allocator has given back what was free.
    bytes_of["allocator"] = min(reserved, shown - outside_bytes(stack, cluster, sizes)) - allocated
    bytes_of["context"] = shown - allocated - bytes_of["allocator"]
    if memory.paged:
        bytes_of["optimizer"] += resident_pages(memory.paged, shown, cluster.device.usable_memory_bytes)
    return bytes_of


def step_tree(report: TrainReport) -> dict[str, Any]:
    """Return the seconds of a step; `compute`, `exposed`, `bubble`, `optimizer` and `overhead` add up to the step.

    `exposed` and `hidden` are by axis on the slowest stage, messages of data parallelism and between stages included.
    """
    step, index = report.evaluation.step, slowest_stage(report.evaluation.step)
    slowest = step.stages[index]
    times = step.pipeline.busy / slowest.busy
    exposed, hidden = axis_seconds(report.evaluation.step)
    bubble = without_residue(step.pipeline.bubble, step.total)
    return {
        "compute_seconds": times * slowest.compute,
        "recompute_seconds": times * slowest.recompute,
        "exposed_seconds": _shown(exposed, step.total),
        "hidden_seconds": _shown(hidden, step.total),
        "bubble_seconds": bubble,
        "optimizer_seconds": step.optimizer,
        "overhead_seconds": step.overhead,
        "micro_batches": report.evaluation.sizes.num_micro,
        "slowest_stage": index,
        "pipeline": {**asdict(step.pipeline), "bubble": bubble},
        "gradients": {"exposed_seconds": step.gradients_exposed, "hidden_seconds": step.gradients_hidden},
        "parameters": {"exposed_seconds": step.parameters_exposed, "hidden_seconds": step.parameters_hidden},
        "stages": [_stage_seconds(s) for s in step.stages],
    }


def without_residue(part: float, whole: float) -> float:
    """Return a part of a whole, or 0 where it is no more than what rounding leaves of a difference.

    >>> without_residue(2e-16, 1.0), without_residue(0.1, 1.0)
    (0.0, 0.1)
    """
    return part if abs(part) > RESIDUE * abs(whole) else 0.0


def _shown(seconds: dict[str, float], whole: float) -> dict[str, float]:
    return {axis: value for axis, value in seconds.items() if without_residue(value, whole)}


def _stage_seconds(stage: StageSeconds[float]) -> dict[str, Any]:
    return {
        "micro_batch": {
            "forward_seconds": stage.forward,
            "backward_input_seconds": stage.backward_input,
            "backward_weight_seconds": stage.backward_weight,
            "recompute_seconds": stage.recompute,
            "compute_seconds": stage.compute,
        },
        "exposed_seconds": _shown(stage.exposed, stage.busy),
        "hidden_seconds": _shown(stage.hidden, stage.busy),
    }
