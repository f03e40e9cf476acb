"""How tables of kernels were taken: what ran around each kernel, what was called from the host, what was cached.

Each figure stands in tables.toml with its source.
"""

from __future__ import annotations

import math
from typing import Any

from accuracy.files import read
from shardwise.ledger.number import ceil, maximum, minimum

ENGINES = {"trtllm": "tensorrt-llm", "vllm": "vllm", "sglang": "sglang"}
"""Engines by the names that tables use."""


def engine_word(name: str) -> str:
    """Return the name that tables use for an engine, however it is written; names of others stay as they are.

    >>> engine_word("TensorRT-LLM"), engine_word("vLLM"), engine_word("vidur")
    ('trtllm', 'vllm', 'vidur')
    """
    words = {written: word for word, full in ENGINES.items() for written in (word, full)}
    return words.get(name.lower().replace("_", "-"), name)


def tables() -> dict[str, Any]:
    """Return what tables.toml holds."""
    return read("kernels/tables.toml")


def measured_on_table(table: str, engine: str, device: str) -> str:
    """Return the device on which a table of an engine was taken that stands under another one; blank for all others.

    >>> measured_on_table("gemm", "sglang", "b300"), measured_on_table("moe", "sglang", "b300")
    ('gb300', '')
    """
    row = tables()["taken_on"].get(f"{engine}-{device}", {"tables": ()})
    return str(row["device"]) if table in row["tables"] else ""


def host_seconds(engine: str, dtype: str, device: str, shape: tuple[float, float, float]) -> float:
    """Return seconds that the host takes to call one GEMM where a table times calls, 0 where it replays a graph.

    The shape (m, n, k) decides which of three kernels is called: one for few rows, DeepGEMM for more of them, and a
    third for the columns and inner sizes that DeepGEMM does not take.

    >>> host_seconds("vllm", "fp8_block", "h100-sxm-80gb", (4096, 4096, 4096))
    8.9e-05
    """
    table = tables()["called"].get(f"{engine}-{dtype}")
    if table is None:
        return 0.0
    seconds = table["seconds"].get(device, table["seconds"]["any"])
    m, n, k = shape
    if n % table["columns"] or k % table["inner"]:
        return float(seconds[2])
    return float(seconds[0] if m < table["few_rows"] else seconds[1])


def maxima_seconds(engine: str, dtype: str, family: str, rows: float) -> float:
    """Return seconds that a dynamic scale of a whole tensor takes its rows in turn, 0 where each row has its own.

    >>> round(1e6 * maxima_seconds("vllm", "fp8", "hopper", 1024), 1)
    7.2
    """
    table = tables()["row_maxima"].get(f"{engine}-{dtype}", {})
    return float(table.get("seconds", {}).get(family, 0.0) * rows)


def copies(engine: str, dtype: str, weight: Any, cache: float) -> Any:
    """Return how many copies of the weights a table of GEMMs runs one after the other, by the bytes of one.

    >>> copies("vllm", "nvfp4", 1e6, 5e7), copies("tensorrt-llm", "bf16", 2e7, 5e7)
    (1, 3)
    """
    row = tables()["copies"][engine]
    if not row.get("fills"):
        return row.get(dtype, row["most"])
    return maximum(minimum(ceil(cache / weight), row["most"]), 1)


def walked_bytes(engine: str, dtype: str, weight: float, beside: float, cache: float) -> float:
    """Return the bytes that a table of GEMMs cycles through: its copies of the weights, inputs and outputs.

    Where a cache holds all of them, the GEMMs of the table never read memory.

    >>> walked_bytes("vllm", "bf16", 1e6, 0.0, 5e7), walked_bytes("tensorrt-llm", "bf16", 2e7, 0.0, 5e7)
    (6000000.0, 60000000.0)
    """
    row = tables()["copies"].get(engine)
    if row is None:
        return math.inf
    return float(copies(engine, dtype, weight, cache) * (weight + (beside if row.get("each") else 0.0)) + beside)
