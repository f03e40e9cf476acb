"""What is wrong with a serving job by itself, whatever serves it."""

from __future__ import annotations

from shardwise.errors import Problems
from shardwise.models import Model
from shardwise.plans import Serving
from shardwise.plans.laws import is_count


def job_problems(job: Serving, model: Model) -> Problems:
    """Return what is wrong with a job by itself."""
    problems = Problems()
    _counts(job, problems)
    if not problems.items and job.adapters > 1 and not job.adapter_rank:
        rule = "are held in room of a rank, and none is given"
        problems.add("adapters", job.adapters, rule, "add --adapter-rank 16, or leave it out")
    if not model.generates or not job.use_kv_cache:
        _without_cache(job, model, problems)
    if not problems.items and job.prefix_tokens >= job.input_tokens:
        rule = f"must be below the {job.input_tokens} input tokens: the last one is always computed"
        problems.add("prefix_tokens", job.prefix_tokens, rule, f"use at most {job.input_tokens - 1}")
    limit = model.most_tokens
    if not problems.items and limit and job.total_tokens > limit:
        what, together = ("input and output exceed", " together") if job.output_tokens else ("exceeds", "")
        ends = "learned positions" if model.positions else "patches"
        of = "tokens of max_context" if model.stated_context else f"{ends} of {model.name}"
        rule = f"{what} the {limit} {of}"
        problems.add("input_tokens", job.input_tokens, rule, f"use at most {limit}{together}")
    _choices(job, problems)
    if not _is_number(job.memory_fraction) or not 0 <= job.memory_fraction <= 1:
        problems.add("memory_fraction", job.memory_fraction, "must be above 0 and at most 1", "use 0.9")
    if not _is_number(job.expert_imbalance) or not 1 <= job.expert_imbalance < float("inf"):
        rule = "is the busiest expert rank's load over the mean, at least 1"
        problems.add("expert_imbalance", job.expert_imbalance, rule, "use 1 for even routing")
    return problems


def _counts(job: Serving, problems: Problems) -> None:
    for name in ("batch", "input_tokens", "adapters"):
        if not is_count(getattr(job, name)):
            problems.add(name, getattr(job, name), "must be a whole number of at least 1", "for example 512")
    for name, left_out in (("gpu_layers", "all layers on the device"), ("captured_sequences", "the engine's own")):
        value = getattr(job, name)
        if value != -1 and not is_count(value + 1):
            problems.add(name, value, "must be a whole number of at least 0", f"leave it out for {left_out}")
    if not all(is_count(one) for one in job.captured_sizes):
        rule = "must be whole numbers of at least 1"
        problems.add("captured_sizes", job.captured_sizes, rule, "leave it out for the engine's own")
    elif job.captured_sizes and job.captured_sequences not in (-1, max(job.captured_sizes)):
        rule = f"is not the largest of the sizes that are captured, {max(job.captured_sizes)}"
        problems.add("captured_sequences", job.captured_sequences, rule, "leave out one of them")
    for name in (
        "output_tokens",
        "prefix_tokens",
        "max_batched_tokens",
        "max_sequences",
        "max_total_tokens",
        "adapter_rank",
        "cpu_experts",
    ):
        value = getattr(job, name)
        if value != 0 and not is_count(value):
            problems.add(name, value, "must be a whole number of at least 0", "use 0 to leave it out")


def _choices(job: Serving, problems: Problems) -> None:
    for name in ("use_kv_cache", "shard_weights", "same_prompts", "language_model_only", "disable_cuda_graph_padding"):
        if not isinstance(getattr(job, name), bool):
            problems.add(name, getattr(job, name), "must be true or false", "use true or false")
    for name, stated in (("misc_memory", job.misc_bytes), ("kv_cache_memory", job.kv_cache_memory)):
        if not _is_number(stated) or not 0 <= stated < float("inf"):
            problems.add(name, stated, "must be a number of bytes of at least 0", "use 0 to leave it out")


def _without_cache(job: Serving, model: Model, problems: Problems) -> None:
    """Record what a model that generates nothing, or an engine without a cache, cannot do."""
    lacks = "attends both ways" if model.head else "has no head"
    why = "there is no cache" if model.generates else f"{model.name} {lacks}"
    if job.prefix_tokens:
        problems.add("prefix_tokens", job.prefix_tokens, f"needs a cache, and {why}", "use 0")
    if job.max_batched_tokens and is_count(job.input_tokens) and job.max_batched_tokens < job.input_tokens:
        rule = f"cannot cut a sequence: {why}"
        problems.add("max_batched_tokens", job.max_batched_tokens, rule, f"use at least {job.input_tokens}")
    if job.kv_cache:
        problems.add("kv_cache", job.kv_cache, f"has no effect: {why}", "leave it out")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
