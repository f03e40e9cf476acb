"""The quantity of a prediction that a row of a training file measured."""

from __future__ import annotations

import re
from collections.abc import Callable

from shardwise.measured._record import Record, refuse
from shardwise.measured._training_tuning import sorted_by_length
from shardwise.ops import train_flops
from shardwise.training import TrainReport
from shardwise.training._memory import StageMemory, reserved_bytes

_NAMES = {
    "step_time": "step_seconds",
    "micro_step_time": "step_seconds",
    "gpu_hours": "step_seconds",
    "tokens_per_second_per_gpu": "tokens_per_second_per_gpu",
    "flops_per_second_per_gpu": "tokens_per_second_per_gpu",
    "mfu": "tokens_per_second_per_gpu",
    "hfu": "tokens_per_second_per_gpu",
    "peak_memory": "memory.peak_bytes",
    "memory_after_step": "memory.peak_bytes",
    "memory_avg": "memory.peak_bytes",
    "memory_p99": "memory.peak_bytes",
}


def flops_per_token(record: Record, report: TrainReport) -> float:
    """Return FLOPs a token by the convention that the row's source counts with."""
    word = record.text("flops_convention")
    if word == "hardware_full_attn":
        return report.hardware_flops_per_token
    if word == "model_causal_attn":
        return report.causal_flops_per_token
    if word == "lora_4n":
        return train_flops(report.case.model, report.job.seq_len, "lora")
    if word in ("", "unknown"):
        record.taken("flops_convention")
    elif word != "model_full_attn":
        raise refuse("flops_convention", word, "is not a convention of pre-training")
    return report.model_flops_per_token


def stages_seen(record: Record, report: TrainReport) -> tuple[StageMemory[float], ...]:
    """Return the memory of the stages whose ranks were measured."""
    scope, stages = record.text("rank_scope"), report.evaluation.stages
    if scope in ("", "unknown"):
        record.taken("rank_scope")
    positions = [float(s.position) for s in stages]
    if scope == "last_rank":
        return (report.evaluation.memory[positions.index(max(positions))],)
    if scope == "rank0":
        return (report.evaluation.memory[positions.index(min(positions))],)
    return report.evaluation.memory


def peak_memory(record: Record, report: TrainReport) -> float:
    """Return the peak in the kind of bytes that were measured: tensors, the allocator's reserve or the device's."""
    kind, stack, scratch = record.text("memory_kind"), report.case.stack, report.case.workspace_bytes
    stages = stages_seen(record, report)
    if kind in ("allocated", "active"):
        return max(float(m.peak) for m in stages) + scratch
    held = max(float(reserved_bytes(stack, m)) for m in stages) + scratch * stack.reserved_over_allocated
    if kind == "nvidia_smi":
        return max(report.device_bytes - report.reserved_bytes, stated_floor(record)) + held
    if kind != "reserved":
        record.taken("memory_kind")
    return held


def stated_floor(record: Record) -> float:
    """Return the bytes that a row says a device held beside the trainer: its context and an engine asleep, else 0.

    >>> stated_floor(Record({"notes": "device floor with the engine asleep 919470080; phase=training"}))
    919470080.0
    """
    found = re.search(r"device floor [a-z ]*(\d+)", record.text("notes"))
    return float(found[1]) if found else 0.0


def memory_after_step(record: Record, report: TrainReport) -> float:
    """Return what stays allocated between steps: weights, optimizer state and gradients that are kept."""
    persistent = report.case.stack.gradients == "persistent"
    held = (
        m.weights + m.optimizer + m.beside + m.widened + (m.gradients if persistent else 0.0)
        for m in stages_seen(record, report)
    )
    return float(max(held)) + report.case.workspace_bytes


def memory_avg(record: Record, report: TrainReport) -> float:
    """Return what peft's own loop holds when it reads its counter behind a step, on the mean of its steps.

    State and gradients, and the outputs of the last forward pass, which a variable keeps: logits, keys and values
    (github.com/huggingface/peft method_comparison/MetaMathQA/run.py; transformers' use_cache is on).
    """
    if record.text("memory_kind") not in ("allocated", "active"):
        if not sorted_by_length(record):
            rule = "what an allocator holds on the mean is not predicted"
            raise refuse("memory_kind", record.text("memory_kind"), rule)
        return peak_memory(record, report)
    model, tokens = report.case.model, report.job.seq_len * report.plan.micro_batch
    cached = sum(c.heads * c.elements for b in model.layers for m in b.mixers for c in m.caches())
    width = report.case.recipe.precision.activation_bytes
    state = max(float(m.weights + m.optimizer + m.gradients) for m in stages_seen(record, report))
    return state + width * tokens * (model.vocab + cached) + report.case.workspace_bytes


def gpu_hours(record: Record, report: TrainReport) -> float:
    """Return device-hours for the tokens that the notes state."""
    tokens = record.noted("tokens")
    if not tokens:
        raise refuse("notes", "tokens", "the tokens of the run are not stated")
    return tokens / report.tokens_per_second_per_gpu / 3600


def micro_step(record: Record, report: TrainReport) -> float:
    """Return seconds of one micro-batch: those of a step over its micro-batches."""
    return report.step_seconds * report.plan.micro_batch * report.plan.dp / report.job.global_batch


_OF: dict[str, Callable[[Record, TrainReport], float]] = {
    "step_time": lambda c, r: r.step_seconds,
    "micro_step_time": micro_step,
    "gpu_hours": gpu_hours,
    "tokens_per_second_per_gpu": lambda c, r: r.tokens_per_second_per_gpu,
    "flops_per_second_per_gpu": lambda c, r: flops_per_token(c, r) * r.tokens_per_second_per_gpu,
    "mfu": lambda c, r: r.mfu * flops_per_token(c, r) / r.model_flops_per_token,
    "hfu": lambda c, r: r.mfu * flops_per_token(c, r) / r.model_flops_per_token,
    "peak_memory": peak_memory,
    "memory_after_step": memory_after_step,
    "memory_avg": memory_avg,
    "memory_p99": peak_memory,
    "fits": lambda c, r: float(r.fits),
}


def value_of(record: Record, report: TrainReport) -> float:
    """Return the predicted value of a row's metric; raises `InputError` where the metric is not predicted."""
    metric = record.text("metric")
    if metric not in _OF:
        raise refuse("metric", metric, "is not a quantity that is predicted")
    return _OF[metric](record, report)


# Assumptions that move a prediction by more than a few per cent.
WEIGHTY = ("recompute:", "micro_batch:", "sharding:", "degrees:", "model_parallel_size:")


def interval_of(
    record: Record, report: TrainReport, value: float, assumed: tuple[str, ...]
) -> tuple[float, float] | None:
    """Return the 10 to 90 % interval of a predicted value, None where its metric has none."""
    name = _NAMES.get(record.text("metric"))
    if name is None:
        return None
    low, high = report.interval_for(any(one.startswith(WEIGHTY) for one in assumed))[name]
    centre = {
        "step_seconds": report.step_seconds,
        "tokens_per_second_per_gpu": report.tokens_per_second_per_gpu,
        "memory.peak_bytes": report.allocated_bytes,
    }[name]
    return value * low / centre, value * high / centre
