"""Seconds in which chunks of a recurrence wait for each other."""

from __future__ import annotations

import math

from shardwise.cost import Rates
from shardwise.ledger.number import X
from shardwise.ledger.op import Op
from shardwise.serving._engine import engine_tables


def chain_seconds(family: str) -> float:
    """Return the seconds in which a chunk of a gated delta rule takes the state of the one before, 0 if not measured.

    >>> chain_seconds("hopper"), chain_seconds("ada")
    (1.17e-06, 0.0)
    """
    return float(engine_tables()["chained_chunks"]["seconds"].get(family, 0.0))


def chained_seconds(rates: Rates[X], op: Op[X]) -> X | float:
    """Return the seconds in which a kernel takes the chunks of one sequence in turn, whatever heads it has.

    One block walks the chunks of a head of a sequence, each of which waits for the state that the one before left
    (fla-org/flash-linear-attention, fla/ops/common/chunk_delta_h.py): ranks of tp have fewer heads, not
    fewer chunks.
    """
    each = 0.0 if rates.sharpness == math.inf or op.kind != "scan" else chain_seconds(rates.family)
    return each * (op.inner - 1) if each else 0.0
