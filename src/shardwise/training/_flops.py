"""FLOPs a token of training by convention: of the model, of what recompute runs again, and of fine-tuning."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

from shardwise.ledger.flow import gradient_passes
from shardwise.ops import blocks as ledgers
from shardwise.ops import train_flops
from shardwise.ops.count import whole_layout
from shardwise.plans import Plan
from shardwise.training._case import TrainingCase, stages_of
from shardwise.training._ledger import ledger_of, units_of


def model_flops_per_token(case: TrainingCase, coverage: Literal["full", "masked"] = "full") -> float:
    """Return model FLOPs a token: attention over the full square (PaLM appendix B), or over what masks leave.

    Of fine-tuning they are those of the gradients that there are.
    """
    if case.tuning is not None:
        return tuned_flops_per_token(case, coverage)
    return train_flops(case.model, case.job.seq_len, "model-full" if coverage == "full" else "model-causal")


def recomputed_flops_per_token(case: TrainingCase) -> float:
    """Return the model FLOPs a token of the forward passes that backward runs again, attention over the whole square.

    Regions, modules and the layers of each stage count as they are recomputed; multi-token predictions do not.
    """
    y = whole_layout(1, case.job.seq_len, "full")
    found = 0.0
    for i, kind in enumerate(case.kinds):
        units = units_of(case.plan, kind)
        layers = sum(s.count * s.layers[i] for s in stages_of(case)) if units else 0
        ops = ledgers.block_ops(y, kind.block, case.model.hidden) if layers else ()
        found += layers * sum(op.model_flops for op in ops if any(u.holds(op.region) for u in units))
    return found / case.job.seq_len


def tuned_flops_per_token(case: TrainingCase, coverage: Literal["full", "masked"]) -> float:
    """Return the model FLOPs a token of fine-tuning: forward, and of each product the gradients that it has."""
    y = whole_layout(1, case.job.seq_len, coverage, case.stack.name, case.tuning)
    once = replace(case, plan=Plan())
    written = ledger_of(case.model, once.plan, once.kinds, y)
    counts = Counter(once.order.layers)
    times = [*(counts[i] for i in range(len(once.order.blocks))), 1, 1, 1]
    parts = (*written.kinds, written.embedding, written.head, written.loss)
    found = sum(
        n * sum((1 + gradient_passes(op)) * op.model_flops for op in part.ops)
        for n, part in zip(times, parts, strict=True)
    )
    return found / case.job.seq_len
