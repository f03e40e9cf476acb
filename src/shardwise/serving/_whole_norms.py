"""Norms over whole projections of queries and keys, of which a tensor-parallel rank has its own heads alone."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from shardwise.ledger.number import X
from shardwise.ledger.op import Collective, Op
from shardwise.ops.layout import Layout
from shardwise.records import replace
from shardwise.serving._engine import engine_tables

_QUERIES, _KEYS = "attention.queries", "attention.keys"


@cache
def exchange_of(engine: str, family: str) -> str:
    """Return what ranks exchange for norms over whole projections: "sums" of squares, the "streams", "" for nothing.

    >>> exchange_of("vllm", "minimax_m2"), exchange_of("tensorrt-llm", "minimax_m2"), exchange_of("vllm", "mpt")
    ('sums', 'streams', '')
    """
    rows: list[dict[str, Any]] = engine_tables()["whole_norms"]["rows"]
    for row in rows:
        if family in row["families"] and re.fullmatch(row["engines"], engine):
            return str(row["exchange"])
    return ""


def with_exchange(y: Layout[X], op: Op[X], exchange: str) -> Op[X]:
    """Return an operator of a layer with what ranks exchange for it, where it norms a whole projection.

    Two fp32 sums a token are reduced once for queries and keys; or each projection is gathered and normed whole.
    """
    if not exchange or op.role != "norm" or op.takes not in ((_QUERIES,), (_KEYS,)):
        return op
    if exchange == "sums":
        if op.takes == (_KEYS,):
            return op
        sums: Collective[X] = Collective(
            axis="tp", verb="all_reduce", size_bytes=8 * y.tokens, tensor="sums of squares", shape=(y.tokens, 2)
        )
        return replace(op, forward=(*op.forward, sums))
    width = y.degrees.tp * op.output_bytes / (y.a * y.tokens)
    full = y.a * y.tokens * width
    gather: Collective[X] = Collective(axis="tp", verb="all_gather", size_bytes=full, tensor=op.takes[0],
                                       shape=(y.tokens, width))  # fmt: skip
    return replace(op, forward=(*op.forward, gather), forward_bytes=y.degrees.tp * op.forward_bytes)
