"""Weights of adapters that an engine holds room for beside a model's own: two thin matrices for every linear layer.

arXiv:2106.09685 section 4.1; how an engine lays them out: github.com/vllm-project/vllm vllm/lora/layers.py, 2024-11,
where each part of a joint projection has a first matrix of its own, tensor parallelism splits a second matrix with the
outputs of its layer and a first one with the inputs, tables of words have adapters too and experts have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwise.ledger.number import X, total
from shardwise.ledger.op import Op
from shardwise.ledger.traced import named
from shardwise.models import MLP, Block
from shardwise.serving._case import Case


def rank_elements(block: Block, ops: Iterable[Op[X]], zero: X) -> X:
    """Return elements of the adapters of one layer on a rank for each unit of their rank."""
    gated = isinstance(block.feed_forward, MLP) and block.feed_forward.gated
    joint = {"qkv": 3, "up": 2 if gated else 1}
    sides = (
        (joint.get(w.role, 1), *w.shape[-2:])
        for op in ops
        for w in op.weights
        if w.kind == "matrix" and not w.expert and len(w.shape) > 1 and w.role != "router"
    )
    return total((zero + outputs + parts * inputs for parts, outputs, inputs in sides), zero)


def adapter_bytes(case: Case, lines: Sequence[tuple[Op[X], ...]], zero: X) -> list[X]:
    """Return bytes of the adapters of every kind of layer, of the table of words and of the head on a rank.

    They lie in the type of activations. Tables and heads are not split.
    """
    each = case.job.adapters * case.job.adapter_rank * case.activation_bytes
    kinds = [each * rank_elements(block, ops, zero) for block, ops in zip(case.model.kinds, lines, strict=False)]
    table = zero + each * (case.model.vocab + case.model.hidden)
    return [named(size, "adapters") for size in (*kinds, table, table)]
