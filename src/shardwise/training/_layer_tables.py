"""The layers of a model as tables, whole and on one rank: weights, saved bytes, messages; and what splitting did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.cost import op_seconds
from shardwise.ledger.op import Op
from shardwise.ledger.saved import keep
from shardwise.plans import Plan
from shardwise.records import dataclass, replace
from shardwise.training._case import TrainingCase
from shardwise.training._evaluate import Evaluation, layout_of
from shardwise.training._ledger import PartLedger, ledger_of
from shardwise.training._sizes import sizes_of
from shardwise.training._stages import Stages, runs_of
from shardwise.training._traffic import Message, Traffic, operator_messages


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """One operator: its weights by name and shape, parameters, bytes of weights and of what it keeps, its messages."""

    name: str
    weights: tuple[tuple[str, tuple[float, ...]], ...]
    parameters: float
    parameter_bytes: float
    activation_bytes: float
    messages: tuple[tuple[Message, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTable:
    """Operators that run `times` for a micro-batch: embedding, a kind of layer, head, loss."""

    name: str
    times: float
    rows: tuple[LayerRow, ...]

    @property
    def parameters(self) -> float:
        """Parameters of one of them."""
        return sum(r.parameters for r in self.rows)

    @property
    def activation_bytes(self) -> float:
        """Bytes that one of them keeps for backward."""
        return sum(r.activation_bytes for r in self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmShape:
    """One GEMM whole and on one rank: (rows, inner, columns), and the share of the peak each reaches."""

    part: str
    name: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    efficiency_before: float
    efficiency_after: float


def whole_case(case: TrainingCase) -> TrainingCase:
    """Return the case without parallelism: the same micro-batch on one device."""
    p = case.plan
    plan = Plan(
        micro_batch=p.micro_batch, sequence_parallel=False, recompute=p.recompute, recompute_layers=p.recompute_layers,
        modules=p.modules,
    )  # fmt: skip
    return replace(case, plan=plan)


def lines_of(case: TrainingCase) -> tuple[PartLedger[float], ...]:
    """Return the ledger of a case's plan, part by part."""
    y = layout_of(case, sizes_of(case.plan, case.job.global_batch, case.domains))
    written = ledger_of(case.model, case.plan, case.kinds, y)
    return (*written.kinds, written.embedding, written.head, written.loss)


def _rows(lines: PartLedger[float], width: float, messages: Sequence[tuple[Message, float]]) -> Iterator[LayerRow]:
    """Yield the operators; a tensor that several keep stands with the first of them."""
    kept = {t.name: t for t in keep(lines.ops, lines.units).kept}
    for op in lines.ops:
        saved = {t.name: t for t in (*op.saves, *op.reads) if kept.get(t.name) is not None}
        elements = float(sum(w.elements for w in op.weights))
        yield LayerRow(
            name=op.name,
            weights=tuple((w.name, w.shape or (w.elements,)) for w in op.weights),
            parameters=elements,
            parameter_bytes=elements * width,
            activation_bytes=float(sum(t.size_bytes for t in saved.values())),
            messages=tuple(m for m in messages if m[0].where == op.name),
        )
        for name in saved:
            del kept[name]


def tables_of_lines(
    case: TrainingCase, lines: Sequence[PartLedger[float]], times: Sequence[float], traffic: Traffic | None
) -> tuple[LayerTable, ...]:
    """Return the tables of the parts that run at all, the embedding first; with traffic, each with its messages."""
    width, tables = case.recipe.precision.weight_bytes, []
    order = [len(lines) - 3, *range(len(lines) - 3), len(lines) - 2, len(lines) - 1]
    for i in order:
        if times[i] and lines[i].ops:
            sent = [] if traffic is None else [(t.message, t.count) for t in operator_messages(traffic, lines[i])]
            rows = tuple(_rows(lines[i], width, sent))
            tables.append(LayerTable(name=lines[i].label, times=times[i], rows=rows))
    return tuple(tables)


def whole_tables(case: TrainingCase) -> tuple[LayerTable, ...]:
    """Return the layers of the model without parallelism."""
    alone = whole_case(case)
    (stage,) = runs_of(case.order.layers, len(case.order.blocks), alone.partition)
    return tables_of_lines(alone, lines_of(alone), (*stage.layers, 1, 1, 1), None)


def rank_tables(traffic: Traffic, stage: Stages[float]) -> tuple[LayerTable, ...]:
    """Return the layers on a device of a stage, those that DualPipe mirrors included."""
    layers = (a + b for a, b in zip(stage.layers, stage.mirrored, strict=True))
    times = (*layers, stage.embeddings, stage.heads, stage.heads)
    return tables_of_lines(traffic.case, traffic.lines, times, traffic)


def _efficiency(evaluation: Evaluation[float], op: Op[float], peak: float) -> float:
    seconds = op_seconds(evaluation.rates, op).forward
    return op.flops / seconds / peak if seconds else 0.0


def gemms_of(
    case: TrainingCase, evaluation: Evaluation[float], lines: Sequence[PartLedger[float]]
) -> tuple[GemmShape, ...]:
    """Return every GEMM of a part before and after splitting, each once."""
    peak = float(case.cluster.device.peak_flops(case.recipe.precision.compute))
    gemms: dict[tuple[str, str], GemmShape] = {}
    for whole, part in zip(lines_of(whole_case(case)), lines, strict=True):
        alone = {op.name: op for op in whole.ops}
        for after in part.ops:
            if after.kind in ("matmul", "grouped"):
                before = alone[after.name]
                gemms[part.label, after.name] = GemmShape(
                    part=part.label,
                    name=after.name,
                    before=(before.rows, before.inner, before.columns),
                    after=(after.rows, after.inner, after.columns),
                    efficiency_before=_efficiency(evaluation, before, peak),
                    efficiency_after=_efficiency(evaluation, after, peak),
                )
    return tuple(gemms.values())
