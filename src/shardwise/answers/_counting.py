"""Counts of a model: parameters, FLOPs by published conventions, and its operators, line by line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import field
from functools import cached_property
from typing import Any, cast

from shardwise.answers._answer import whole_bytes
from shardwise.cost import Efficiencies, network_of, op_seconds, rates_of
from shardwise.errors import Problems
from shardwise.field_types import typed
from shardwise.hardware import Cluster
from shardwise.ledger.flow import flow
from shardwise.ledger.op import Op
from shardwise.ledger.saved import keep
from shardwise.models import Model
from shardwise.notebook import PlainValues
from shardwise.ops import (
    CONVENTIONS,
    active_parameters,
    count_flops,
    count_parameters,
    forward_flops,
    parameters_by_component,
    prediction_parameters,
    train_flops,
)
from shardwise.ops.count import PartOps, lines
from shardwise.ops.inputs import LayoutOptions, ParallelSizes, TokenBatch
from shardwise.ops.layout import Layout, lay_out
from shardwise.ops.overlap import CostModel, messages
from shardwise.plans import (
    RECOMPUTES,
    Plan,
    Precision,
    Stack,
    Training,
    Tuning,
    find_precision,
    find_stack,
    group_shapes,
    tuning_of,
)
from shardwise.plans.fields import MOST
from shardwise.plans.laws import plan_problems
from shardwise.records import dataclass, replace
from shardwise.training import TuningSummary, checkpoints, fine_tuning_problems, tuning_summary

# No run is of more tokens, and their FLOPs are still numbers.
MOST_TOKENS = 1e20


@dataclass(frozen=True, kw_only=True, slots=True)
class Counting:
    """What is counted: `batch` sequences of `seq_len` tokens in a pass, and a budget of tokens (0: none).

    >>> Counting(batch=2, seq_len=1024).tokens
    2048
    """

    batch: int = 1
    seq_len: int = 4096
    token_budget: float = 0.0
    recompute: str = "none"
    precision: str = ""
    """A recipe of mixed precision; empty: the framework's own."""
    stack: str = "pytorch"
    job: Training | None = None
    """The fine-tuning whose adapters are counted; None for a model alone."""

    @property
    def tokens(self) -> int:
        """Tokens of one pass."""
        return self.batch * self.seq_len


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """Seconds of one operator, forward and backward: in all, and what the parts would take alone."""

    forward: float
    backward: float
    compute: float
    memory: float
    communication: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CountRow:
    """One operator on one rank: its GEMM (rows, inner, columns), parameters, bytes, FLOPs, seconds if priced."""

    name: str
    kind: str
    shape: tuple[float, ...]
    parameters: float
    parameter_bytes: float
    activation_bytes: float
    forward_flops: float
    forward_bytes: float
    backward_flops: float
    backward_bytes: float
    messages: int
    seconds: Seconds | None = None

    @property
    def intensity(self) -> float:
        """FLOPs a byte moved, forward."""
        return self.forward_flops / self.forward_bytes if self.forward_bytes else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CountPart:
    """Operators that run `times` in a pass, with `copies` of their weights: embedding, a kind of layer, head."""

    name: str
    times: int
    copies: int
    rows: tuple[CountRow, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class CountReport(PlainValues):
    """Counts of one model. Build one with `count`."""

    model: Model
    counting: Counting
    plan: Plan
    cluster: Cluster | None
    efficiencies: Efficiencies = field(default_factory=Efficiencies)

    def __repr__(self) -> str:
        """Return the model and its parameters in one line."""
        active = f", {self.active_parameters:,} active" if self.active_parameters != self.parameters else ""
        return f"<CountReport {self.model.name}: {self.parameters:,} parameters{active}>"

    @cached_property
    def parameters(self) -> int:
        """Parameters, shared tables counted once, prediction layers left out."""
        return count_parameters(self.model)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token meets."""
        return active_parameters(self.model)

    @cached_property
    def components(self) -> dict[str, int]:
        """Parameters by component, which add up to `parameters`."""
        return parameters_by_component(self.model)

    @cached_property
    def predictions(self) -> int:
        """Parameters of the multi-token-prediction layers, beside `parameters`."""
        return prediction_parameters(self.model)

    @cached_property
    def forward(self) -> dict[str, float]:
        """Forward FLOPs of the pass: attention over the full square, half of it, and exactly what masks leave."""
        full = float(sum(count_flops(self.model, self.counting.batch, self.counting.seq_len).values()))
        f = forward_flops(replace(self.model, mtp=()), self.counting.seq_len)
        less = {"full_attention": 0.0, "causal": f.full - f.causal, "masked": f.full - f.masked}
        return {name: full - self.counting.batch * square for name, square in less.items()}

    @cached_property
    def forward_components(self) -> dict[str, float]:
        """Forward FLOPs of the pass by component, attention over the full square."""
        return count_flops(self.model, self.counting.batch, self.counting.seq_len)

    @cached_property
    def per_token(self) -> dict[str, float]:
        """Training FLOPs a token by each published convention."""
        return {name: train_flops(self.model, self.counting.seq_len, name) for name in CONVENTIONS}

    @property
    def hardware_per_token(self) -> float:
        """Training FLOPs a token with the forward passes that recompute adds, attention over the full square."""
        return train_flops(self.model, self.counting.seq_len, "model-full", self.counting.recompute)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was assumed of the model, and which framework's operators are listed."""
        return (*self.model.assumptions, f"operators and what they save: stack {self.stack.name}, {self.stack.title}")

    @property
    def stack(self) -> Stack:
        """The framework whose operators are listed."""
        return find_stack(self.counting.stack)

    @property
    def precision(self) -> Precision:
        """The recipe of mixed precision that widths are of."""
        return find_precision(self.counting.precision or self.stack.precision)

    @property
    def tuning(self) -> Tuning | None:
        """How the model is fine-tuned, None where it is not."""
        return tuning_of(self.counting.job, self.stack, self.model.family) if self.counting.job else None

    @cached_property
    def trained(self) -> TuningSummary | None:
        """What a fine-tuning trains, None where there is none."""
        return tuning_summary(self.model, self.counting.job, self.stack) if self.counting.job else None

    @cached_property
    def layout(self) -> Layout[float]:
        """The layout of the operators on one rank."""
        c, p, precision = self.counting, self.plan, self.precision
        work: TokenBatch[float] = TokenBatch(
            B=c.batch,
            S=c.seq_len,
            context=0,
            activation_bytes=precision.activation_bytes,
            weight_bytes=precision.activation_bytes,
            gradient_bytes=precision.gradient_bytes,
            dtype=precision.compute,
            dropout=self.model.dropout,
        )
        parallel = p.sequence_parallel and p.tp > 1
        degrees: ParallelSizes[float] = ParallelSizes(tp=p.tp, tp2=p.tp2, cp=p.cp, ep=p.ep, etp=p.etp, panels=p.panels)
        options = LayoutOptions(
            stack=self.stack, sequence_parallel=parallel, cp_kind=p.cp_kind, tuning=self.tuning
        )  # fmt: skip
        return lay_out(degrees, work, options)

    @cached_property
    def machine(self) -> CostModel[float] | None:
        """What the operators run on, None where no cluster was given."""
        if self.cluster is None:
            return None
        rates = rates_of(
            self.cluster.device,
            self.precision.compute,
            self.stack.eager_launch_seconds,
            self.efficiencies,
            node_busy=self.cluster.num_devices > 1,
        )
        network = network_of(self.cluster, self.efficiencies)
        return CostModel(
            rates=rates, network=network, group_shapes=group_shapes(self.plan, [t.size for t in self.cluster.tiers])
        )

    @cached_property
    def parts(self) -> tuple[CountPart, ...]:
        """The operators of one rank, in the order of the model."""
        return tuple(self._part(line) for line in lines(self.model, self.layout))

    def _part(self, line: PartOps) -> CountPart:
        units = checkpoints(self.counting.recompute, ()) if line.block else ()
        ops = flow(line.ops, line.part != "embedding").ops if self.tuning else line.ops
        kept = {t.name for t in keep(ops, units).kept}
        width = self.precision.weight_bytes
        rows = tuple(_rows(ops, kept, width, self.machine))
        name = line.part if line.block is None else "mtp layer" if line.part == "mtp" else "layer"
        return CountPart(name=name, times=line.times, copies=line.copies, rows=rows)


def _rows(
    ops: Iterable[Op[float]], kept: set[str], width: float, machine: CostModel[float] | None
) -> Iterator[CountRow]:
    """Yield the operators; a tensor that several keep stands with the first of them."""
    left = set(kept)
    for op in ops:
        saved = [t for t in {t.name: t for t in (*op.saves, *op.reads)}.values() if t.name in left]
        left -= {t.name for t in saved}
        elements = float(sum(w.elements for w in op.weights))
        yield CountRow(
            name=op.name,
            kind=op.kind,
            shape=(op.rows, op.inner, op.columns) if op.kind in ("matmul", "grouped", "attention") else (),
            parameters=elements,
            parameter_bytes=elements * width,
            activation_bytes=float(sum(t.size_bytes for t in saved)),
            forward_flops=op.flops,
            forward_bytes=op.forward_bytes,
            backward_flops=op.backward_flops + op.weight_flops,
            backward_bytes=op.backward_bytes + op.weight_bytes,
            messages=len(op.forward) + len(op.backward),
            seconds=None if machine is None else _seconds(op, machine),
        )


def _seconds(op: Op[float], costs: CostModel[float]) -> Seconds:
    t, r = op_seconds(costs.rates, op), costs.rates
    backward = t.backward_input + t.backward_weight
    sides = (messages(costs, op.forward, t.forward), messages(costs, op.backward, t.backward_input, t.backward_weight))
    waits = [sum(side.exposed.values()) for side in sides]
    hidden = sum(sum(side.hidden.values()) for side in sides)
    rate = {"matmul": r.matmul_flops, "attention": r.attention_forward_flops}.get(op.kind, r.grouped_flops)
    moved = op.forward_bytes + op.backward_bytes + op.weight_bytes
    return Seconds(
        forward=t.forward + waits[0],
        backward=backward + waits[1],
        compute=(op.flops + op.backward_flops + op.weight_flops) / rate,
        memory=moved / r.memory_bytes,
        communication=sum(waits) + hidden,
    )


def _problems_of(counting: Counting) -> Problems:
    """Return what is wrong with what is counted, whatever the model is."""
    problems = Problems()
    for name in ("batch", "seq_len"):
        if not 1 <= (value := getattr(counting, name)) <= MOST:
            problems.add(name, value, f"must be from 1 to {MOST:,}", "write for example 8")
    if not 0 <= counting.token_budget <= MOST_TOKENS:
        rule = f"must be from 0 to {MOST_TOKENS:g}"
        problems.add("token_budget", counting.token_budget, rule, "use 0 for none, or for example 1e12")
    if counting.recompute not in RECOMPUTES:
        problems.add("recompute", counting.recompute, "is not a known choice", "use one of " + ", ".join(RECOMPUTES))
    with problems.collect():
        stack = find_stack(counting.stack)
        find_precision(counting.precision or stack.precision)
    return problems


@typed
def count(
    model: Model,
    counting: Counting = Counting(),  # noqa: B008 (frozen)
    plan: Plan = Plan(),  # noqa: B008 (frozen)
    cluster: Cluster | None = None,
    efficiencies: Efficiencies = Efficiencies(),  # noqa: B008 (frozen)
) -> CountReport:
    """Return parameters, FLOPs and operators of a model; `plan` splits the operators, `cluster` adds seconds.

    Raises `InputError` where the plan is not legal for the model, or what is counted is not known.

    >>> count(Model.load("gpt2")).parameters
    124439808
    """
    plan = replace(plan, sequence_parallel=plan.sequence_parallel and plan.tp > 1)
    problems = _problems_of(counting)
    if not problems.items:
        problems.items.extend(plan_problems(model, plan, counting.seq_len))
        if counting.job is not None:
            problems.items.extend(fine_tuning_problems(model, plan, counting.job, find_stack(counting.stack)).items)
    problems.raise_if_any()
    return CountReport(model=model, counting=counting, plan=plan, cluster=cluster, efficiencies=efficiencies)


def count_tree(report: CountReport) -> dict[str, Any]:
    """Return counts as plain values."""
    budget, components = report.counting.token_budget, report.components
    conventions = {
        name: {
            "per_token": value,
            "total": value * budget if budget else None,
            "counts": CONVENTIONS[name].counts,
            "source": CONVENTIONS[name].source,
        }
        for name, value in report.per_token.items()
    }
    return {
        "model": report.model.name,
        "params": {
            "total": report.parameters,
            "active": report.active_parameters,
            "embedding": components.get("embedding", 0),
            "by_component": components,
            "mtp": report.predictions,
            "towers": report.model.tower_parameters,
            "trainable": report.trained.trainable_parameters if report.trained else None,
            "trainable_by_module": report.trained.trainable_by_module if report.trained else {},
        },
        "flops": {
            "tokens": report.counting.tokens,
            **{f"forward_{name}": value for name, value in report.forward.items()},
            "forward_by_component": report.forward_components,
            "train_per_token": report.per_token["model-full"],
            "train_per_token_with_recompute": report.hardware_per_token,
            "conventions": conventions,
        },
        "batch": report.counting.batch,
        "seq_len": report.counting.seq_len,
        "operators": [_part_tree(part) for part in report.parts],
        "assumptions": list(report.assumptions),
    }


def _part_tree(part: CountPart) -> dict[str, Any]:
    rows = [_row_tree(row) for row in part.rows]
    return {"part": part.name, "times": part.times, "copies": part.copies, "operators": rows}


def _row_tree(row: CountRow) -> dict[str, Any]:
    names = ("name", "kind", "parameters", "parameter_bytes", "activation_bytes", "forward_flops", "forward_bytes")
    more = ("backward_flops", "backward_bytes", "intensity", "messages")
    tree = {name: getattr(row, name) for name in (*names, *more)}
    tree["shape"] = list(row.shape)
    if row.seconds is not None:
        seconds = ("forward", "backward", "compute", "memory", "communication")
        tree["seconds"] = {name: getattr(row.seconds, name) for name in seconds}
    return cast(dict[str, Any], whole_bytes(tree))
