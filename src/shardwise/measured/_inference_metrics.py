"""The quantity of a prediction that a row of an inference file measured."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.measured._at_once import in_waves, queued
from shardwise.measured._record import Record, refuse
from shardwise.serving import InferReport

# Metric -> the headline whose interval it takes.
_NAMES = {
    "batch_latency": "request_seconds",
    "ttft": "ttft_seconds",
    "ttft_p50": "ttft_seconds",
    "prefill_tokens_per_second": "ttft_seconds",
    "tpot": "tpot_seconds",
    "tpot_p50": "tpot_seconds",
    "decode_tokens_per_second": "tpot_seconds",
    "output_tokens_per_second": "output_tokens_per_second",
    "output_tokens_per_second_per_gpu": "output_tokens_per_second",
    "total_tokens_per_second": "output_tokens_per_second",
    "kv_cache_tokens": "kv_cache_tokens",
    "kv_cache_bytes_per_gpu": "kv_cache_tokens",
}
_RATES = ("prefill_tokens_per_second", "decode_tokens_per_second")


def checkpoint(record: Record, report: InferReport) -> float:
    """Return bytes of all weights, a tied table counted once."""
    if report.plan.num_devices != 1:
        raise refuse("num_gpus", report.plan.num_devices, "a checkpoint is counted whole")
    return float(report.weights_bytes_per_gpu + report.memory.tables)


def peak(record: Record, report: InferReport) -> float:
    """Return the bytes that a device shows: weights, cache of the batch, working memory and the context.

    A source that prints GB without saying which is read with those of its engine: FasterTransformer divides by 1024
    three times (src/fastertransformer/utils/cuda_utils.h, print_mem_usage), and the table counts 1e9 for each.
    """
    needed = float(report.memory.needed)
    if record.notes.get("unit_ambiguous") == "GB_or_GiB" and report.case.engine.name == "fastertransformer":
        record.assume("memory in units of 2^30 bytes, as the engine prints it")
        return needed * 1e9 / 2**30
    return needed


def non_tensor_bytes(record: Record, report: InferReport) -> float:
    """Return bytes that are not tensors: the context and the buffers of communicators."""
    return float(report.memory.context + report.memory.communicators)


def rate(record: Record, report: InferReport) -> float:
    """Return generated tokens a second of the whole deployment: of a queue that the row counts, or that has no end.

    A full queue keeps every stage of a pipeline at work: the prompts of a batch pass the stages as a pipeline by
    themselves; decode steps of as many batches as stages do.
    """
    if record.text("serving_mode") != "offline_throughput":
        return report.output_tokens_per_second * report.request_seconds / whole_batch(record, report)
    if count := int(record.noted("num_requests")):
        return queued(record, report, count).output_tokens_per_second
    pp, whole = report.plan.pp, report.request_seconds
    return report.output_tokens_per_second * pp * whole / (whole + (pp - 1) * report.ttft_seconds)


def total_rate(record: Record, report: InferReport) -> float:
    """Return prompt and generated tokens a second of the whole deployment."""
    return rate(record, report) * report.job.total_tokens / report.job.output_tokens


def one_stream(record: Record, report: InferReport) -> float:
    """Return generated tokens a second of one stream."""
    return 1 / report.tpot_seconds


def whole_batch(record: Record, report: InferReport) -> float:
    """Return seconds until a batch is done."""
    return report.request_seconds if report.fits else in_waves(record, report).span_seconds


def first_token(record: Record, report: InferReport) -> float:
    """Return the mean seconds to the first token of a batch; who finds no room waits until others are done."""
    return report.ttft_seconds if report.fits else in_waves(record, report).latencies["ttft"]["mean"]


def per_token(record: Record, report: InferReport) -> float:
    """Return the mean seconds per output token of a batch."""
    return report.tpot_seconds if report.fits else in_waves(record, report).latencies["tpot"]["mean"]


_OF: dict[str, Callable[[Record, InferReport], float]] = {
    "batch_latency": whole_batch,
    "ttft": first_token,
    "ttft_p50": lambda c, r: r.ttft_seconds,
    "tpot": per_token,
    "tpot_p50": per_token,
    "output_tokens_per_second": rate,
    "output_tokens_per_second_per_gpu": lambda c, r: rate(c, r) / r.plan.num_devices,
    "total_tokens_per_second": total_rate,
    "decode_tokens_per_second": one_stream,
    "prefill_tokens_per_second": lambda c, r: r.prefill_tokens_per_second,
    "weights_bytes_per_gpu": lambda c, r: r.weights_bytes_per_gpu,
    "kv_cache_bytes_per_gpu": lambda c, r: r.kv_cache_budget_bytes_per_gpu,
    "kv_cache_tokens": lambda c, r: float(r.kv_cache_tokens),
    "peak_activation_bytes": lambda c, r: float(r.memory.working),
    "non_torch_bytes": non_tensor_bytes,
    "peak_memory_bytes": peak,
    "checkpoint_bytes": checkpoint,
    "fits": lambda c, r: float(r.fits),
}
_WHY = {
    "cuda_graph_bytes": "memory of captured graphs is not modelled",
    "memory_budget_bytes": "is an input of the engine, not a result",
    "ttft_min": "is of one prompt alone, not of the batch",
    "ttft_p99": "tails of queues are not predicted row by row",
    "tpot_p99": "tails of queues are not predicted row by row",
}


def value_of(record: Record, report: InferReport) -> float:
    """Return the predicted value of a row's metric; raises `InputError` where the metric is not predicted."""
    metric = record.text("metric")
    if metric not in _OF:
        raise refuse("metric", metric, _WHY.get(metric, "is not a quantity that is predicted"))
    if _NAMES.get(metric) in ("tpot_seconds", "output_tokens_per_second") and not report.job.output_tokens:
        raise refuse("output_tokens", 0, "nothing is generated, so no token has a time")
    return float(_OF[metric](record, report))


def interval_of(record: Record, report: InferReport, value: float) -> tuple[float, float] | None:
    """Return the 10 to 90 % interval of a predicted value, None where its metric has none."""
    metric = record.text("metric")
    name = _NAMES.get(metric)
    if name is None:
        return None
    if name not in report.interval:
        return None
    low, high = report.interval[name]
    centre = float(getattr(report, name))
    if metric in _RATES:
        return value * centre / high, value * centre / low
    return value * low / centre, value * high / centre
