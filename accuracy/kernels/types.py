"""Types of values in tables of kernels: what GEMMs run in, and bytes of inputs and weights (types.toml)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from accuracy.files import read
from shardwise.measured import Record, refuse
from shardwise.serving import cache_names, find_format


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """A type of a table: the type of the peak, that of the constants, bytes of an element of inputs and of weights."""

    peak: str
    row: str
    input_bytes: float
    weight_bytes: float


@cache
def types_of(table: str) -> dict[str, Values]:
    """Return the types of tables of "products" or of "experts" by name.

    Source: types.toml, and the formats of serving/quantization.toml.

    >>> types_of("products")["nvfp4"].input_bytes, types_of("products")["int8_wo"].peak, "fp32" in types_of("experts")
    (0.5625, 'bf16', False)
    """
    return {
        name: _values(name, row) for name, row in read("kernels/types.toml")["types"].items() if table in row["tables"]
    }


def cache_width(record: Record) -> float:
    """Return bytes of an element of a row's key-value cache, those of 16 bits where it does not state its type.

    >>> cache_width(Record({"kv_dtype": "fp8"})), cache_width(Record({}))
    (1.0, 2.0)
    """
    word, known = record.text("kv_dtype") or "bf16", cache_names()
    if word not in known:
        raise refuse("kv_dtype", word, f"is not a type of caches that is known: {', '.join(known)}")
    return known[word]


def _values(name: str, row: dict[str, Any]) -> Values:
    stated = row.get("weight_bytes")
    return Values(
        peak=row["peak"],
        row=name if row.get("own") else row["peak"],
        input_bytes=find_format(row["peak"]).bytes,
        weight_bytes=find_format(row["weights"]).bytes if stated is None else stated,
    )
