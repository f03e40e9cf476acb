"""Tables of kernels and of collectives that were timed alone: what a row states, by the forms that price runs."""

from __future__ import annotations

from collections.abc import Callable

from accuracy.kernels import attention, collectives, modules, operators, products, streaming
from shardwise.measured import USUAL, FileKind, Predictor, Record

_USUAL = f"{USUAL} engine engine_version"


def _attention_metric(record: Record) -> str:
    decoding = record.text("query_tokens") == "1" and record.text("prefix_tokens") not in ("", "0")
    return "attention_decode" if decoding else "attention_prefill"


def _across_metric(record: Record) -> str:
    where = "in node" if record.text("num_nodes") == "1" else "across nodes"
    return f"{where} {record.text('collective')}"


def _named(kind: str) -> Callable[[Record], str]:
    """Return what names rows by their kind and operation."""
    return lambda record: f"{kind} {record.text('op')}".strip()


def _seconds(record: Record) -> float:
    return record.positive("time_seconds")


def _timed(seconds: products.Seconds, name: str) -> Callable[[], Predictor]:
    """Return what makes the predictor of a table of one kernel."""
    return lambda: products.kernel_answer(seconds, name)


def _kind(name: str, columns: str, further: str, predictor: Callable[[], Predictor]) -> FileKind:
    return FileKind(
        name=name,
        columns=frozenset(f"{columns} time_seconds".split()),
        further=frozenset(f"{_USUAL} {further}".split()),
        predictor=predictor,
        metric=_METRICS.get(name, lambda record: name),
        measured=_seconds,
    )


_METRICS = {
    "attention": _attention_metric,
    "collectives": _across_metric,
    **{name: _named(name) for name in ("collective", "mla", "op_efficiency")},
}
_EFFICIENCY = FileKind(
    name="op_efficiency",
    columns=frozenset(["op", "device", "dtype", "stage", "achieved_fraction"]),
    further=frozenset(
        f"{USUAL} batch num_groups m n k seq heads kv_heads qk_head_dim v_head_dim layout accumulate out_dtype "
        "main_grad_dtype qkv_contiguous peak_flops".split()
    ),
    predictor=lambda: operators.efficiency,
    metric=_METRICS["op_efficiency"],
    measured=lambda record: record.positive("achieved_fraction"),
)
KERNELS = (
    _EFFICIENCY,
    _kind(
        "attention",
        "device query_tokens prefix_tokens num_kv_heads",
        "batch num_heads head_dim sliding_window attention_dtype kv_dtype",
        _timed(attention.attention, "attention"),
    ),
    _kind(
        "mla",
        "device op query_tokens prefix_tokens",
        "batch num_heads mla_dtype kv_dtype gemm_dtype",
        _timed(modules.latent, "mla"),
    ),
    _kind(
        "moe",
        "device num_tokens num_experts top_k",
        "hidden_size intermediate_size moe_tp moe_ep dtype kernel routing",
        _timed(products.experts, "moe"),
    ),
    _kind("gemm", "device m n k", "dtype", _timed(products.product, "gemm")),
    _kind("memory", "device op bytes_total", "rows width dtype", _timed(streaming.streaming, "memory")),
    _kind(
        "collective",
        "device op num_gpus message_bytes",
        "gpus_per_node dtype variant",
        lambda: collectives.in_node,
    ),
    _kind(
        "collectives",
        "system collective num_nodes message_bytes",
        "gpus_per_node dtype bus_bandwidth",
        lambda: collectives.across,
    ),
)
"""Kinds of tables, in the order in which their columns are looked for."""
