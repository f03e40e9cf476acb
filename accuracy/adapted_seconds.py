"""Seconds of runs that train adapters beside frozen weights (LoRA, QLoRA).

The frozen model has no weight gradients, no reduction of them and no update. Each adapted product has two thin ones
beside it, A of rank by inputs and B of outputs by rank, whose result is added to the output; backward makes the
gradients of both and that of the input, which is added too (arXiv:2106.09685 section 4.1; github.com/huggingface/peft
src/peft/tuners/lora/layer.py, Linear.forward).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from accuracy.adapters import rank_of, targets_of
from shardwise import TrainReport
from shardwise.cost import Rates, product_seconds
from shardwise.ledger.op import Op
from shardwise.measured import Record
from shardwise.training._layer_tables import lines_of

# An addition reads two streams and writes one, of 16 bits.
_ADDING = 3
_WIDTH = 2


def tuned(record: Record, report: TrainReport) -> TrainReport:
    """Return the report of a frozen model with the seconds of its adapters in the step.

    Every micro-batch takes longer by what they add on the stage that takes longest.
    """
    targets, rank = targets_of(record), rank_of(record, report.case.model.hidden)
    step = report.evaluation.step
    stages = zip(report.evaluation.stages, step.stages, strict=True)
    each = tuple(_by_kind(report, targets, rank))
    both = ((sum(n * s for n, s in zip(at.layers, each, strict=True)), float(one.busy)) for at, one in stages)
    extra, slowest = max(both, key=sum)
    share = extra / slowest
    piped = step.pipeline
    busy, bubble = piped.busy * (1 + share), piped.bubble * (1 + share)
    pipeline = replace(piped, busy=busy, bubble=bubble, total=busy + bubble + piped.exposed_send)
    longer = replace(step, pipeline=pipeline, total=step.total + pipeline.total - piped.total)
    return replace(report, evaluation=replace(report.evaluation, step=longer))


def _by_kind(report: TrainReport, targets: set[str], rank: int) -> Iterator[float]:
    """Yield the seconds of a micro-batch that adapters add to a layer of each kind."""
    plan = report.plan
    layers = plan.recompute_layers or report.case.model.num_layers / plan.pp
    again = plan.pp * layers / report.case.model.num_layers if plan.recompute == "full" else 0.0
    # An adapter is of one projection where any are products of their own: LitGPT's joint one has three beside it.
    apart = report.case.stack.projections_apart != "none"
    for lines in lines_of(report.case)[: len(report.evaluation.parts.kinds)]:
        found = 0.0
        for op in lines.ops:
            if op.kind == "matmul" and op.weights and op.name.split(".")[0] in targets:
                columns = op.parts if apart and op.parts else (op.columns,)
                passes = [_passes(report.evaluation.rates, op, float(n), rank) for n in columns]
                found += sum(ahead * (1 + again) + back for ahead, back in passes)
        yield found


def _passes(r: Rates[float], op: Op[float], columns: float, rank: int) -> tuple[float, float]:
    """Return the seconds (forward, backward) of one adapter on a product of so many columns."""
    m, k, n = float(op.rows), float(op.inner), columns
    wide = r.wide or r

    def product(rows: float, width: float, inner: float) -> float:
        moved = _WIDTH * (rows * inner + inner * width + rows * width)
        return float(product_seconds(wide, (rows, width, inner, 1), moved))

    def added(width: float) -> float:
        return float(_ADDING * _WIDTH * m * width / r.memory_bytes + r.memory_start)

    ahead = product(m, rank, k) + product(m, n, rank) + added(n)
    back = product(m, rank, n) + product(n, rank, m) + product(m, k, rank) + product(rank, k, m) + added(k)
    return ahead, back
