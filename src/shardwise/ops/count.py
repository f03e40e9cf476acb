"""Parameters of a model: the ledger with every degree one, folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, TypeAlias

from shardwise.ledger.op import Op, Weight
from shardwise.models import Block, Model, MoE
from shardwise.ops.block import block_ops
from shardwise.ops.head import embedding, final_norm, head, mtp_ops
from shardwise.ops.inputs import LayoutOptions, ParallelSizes, TokenBatch
from shardwise.ops.layout import Layout, lay_out
from shardwise.plans import Tuning, find_stack
from shardwise.records import dataclass

Coverage: TypeAlias = Literal["full", "masked"]
Part: TypeAlias = Literal["embedding", "layers", "head", "mtp"]

WHOLE: ParallelSizes[float] = ParallelSizes(tp=1, tp2=1, cp=1, ep=1, etp=1, panels=1)

COMPONENTS = (
    "embedding", "attention", "recurrence", "mlp", "experts", "shared_experts", "router", "norms", "other", "head",
)  # fmt: skip
"""What parameters are counted by: "recurrence" are state-space and linear-attention mixers, "other" family extras."""


def whole_layout(
    batch: int = 1,
    seq_len: int = 1,
    coverage: Coverage = "full",
    stack: str = "transformers",
    tuning: Tuning | None = None,
) -> Layout[float]:
    """Return the layout of a model on one device, for counting.

    >>> whole_layout(2, 8).tokens
    16
    """
    work: TokenBatch[float] = TokenBatch(B=batch, S=seq_len, context=0, coverage=coverage)
    return lay_out(WHOLE, work, LayoutOptions(stack=find_stack(stack), tuning=tuning))


@dataclass(frozen=True, slots=True)
class Line:
    """Operators of one part of a model: how often they run and how often their weights exist, and their block."""

    part: Part
    ops: tuple[Op[float], ...]
    times: int
    copies: int
    block: Block | None = None


def lines(model: Model, y: Layout[float]) -> Iterator[Line]:
    """Yield everything a model has, prediction layers last.

    A block that shares its weights runs as often as it occurs and owns one copy of them; blocks inside a block stand on
    their own.
    """
    yield Line("embedding", embedding(y, model), 1, 1)
    yield from _blocks(y, model.kinds, model.hidden, "layers")
    yield Line("head", (*final_norm(y, model), *head(y, model)), 1, 1)
    if model.mtp:
        again = tuple(replace(op, weights=()) for op in head(y, model))
        yield Line("mtp", (*mtp_ops(y, model), *again), len(model.mtp), len(model.mtp))
        yield from _blocks(y, Counter(model.mtp), model.hidden, "mtp")


def _blocks(y: Layout[float], kinds: Counter[Block], D: int, part: Part) -> Iterator[Line]:
    flat: Counter[Block] = Counter()
    for block, times in kinds.items():
        for one, each in _opened(block).items():
            flat[one] += times * each
    for block, times in flat.items():
        yield Line(part, block_ops(y, block, D), times, 1 if block.shared_weights else times, block)


def _opened(block: Block) -> Counter[Block]:
    """A block and those inside it, each on its own; what is held and never runs stands in a block of its own."""
    runs = bool(block.mixers or block.feed_forward or not block.idle)
    found = Counter([replace(block, also=(), idle=())] if runs else [])
    found.update(Block(mixers=(), feed_forward=None, norms=0, idle=(one,)) for one in block.idle)
    for other in block.also:
        found.update(_opened(other))
    return found


def component(part: Part, op: Op[float]) -> str:
    """Return which component of the model an operator belongs to, one of `COMPONENTS`.

    >>> line = next(lines(Model.load("gpt2"), whole_layout()))
    >>> component(line.part, line.ops[0])
    'embedding'
    """
    if part in ("embedding", "mtp"):
        return part
    if op.role == "norm":
        return "norms"
    if part == "head":
        return "head"
    first, *rest = op.region.split(".")
    if first == "mlp" and rest:
        return {"experts": "experts", "router": "router", "shared": "shared_experts"}.get(rest[0], "mlp")
    named = {"attention": "attention", "ssm": "recurrence", "mlp": "mlp"}
    return named.get(first, "other")


def _weights(model: Model) -> Iterator[tuple[Line, Op[float], Weight[float]]]:
    for line in lines(model, whole_layout()):
        for op in line.ops:
            for weight in op.weights:
                yield line, op, weight


def parameters_by_component(model: Model) -> dict[str, int]:
    """Return the number of parameters of each component of `COMPONENTS` that the model has.

    They add up to `count_parameters`. Shared tables and shared blocks count once, prediction layers stand apart.

    >>> parameters_by_component(Model.load("gpt2"))["embedding"]
    39383808
    """
    found = _counted(model)
    return {name: found[name] for name in COMPONENTS if found[name]}


def _counted(model: Model) -> Counter[str]:
    """Parameters of each component, and of prediction layers under "mtp"."""
    found: Counter[str] = Counter()
    for line, op, weight in _weights(model):
        found[component(line.part, op)] += int(weight.whole) * line.copies
    return found


def trainable_parameters(model: Model, tuning: Tuning) -> dict[str, int]:
    """Return the parameters that a fine-tuning trains, by the linear layer or the component that they belong to.

    Equal to peft 0.21.2 for every run of tests/data/tuning/counts.json.

    >>> from shardwise.plans import Training, find_stack, tuning_of
    >>> job = Training(seq_len=1, global_batch=1, adapter="lora", rank=16, targets=("q", "v"))
    >>> trainable_parameters(Model.load("llama-3.1-8b"), tuning_of(job, find_stack("transformers")))
    {'q': 4194304, 'v': 2621440}
    """
    found: Counter[str] = Counter()
    for line in lines(model, whole_layout(tuning=tuning)):
        for op in line.ops if line.part != "mtp" else ():
            for weight in op.weights:
                if weight.trainable and weight.elements:
                    name = op.modules[0] if weight.adapter and op.modules else component(line.part, op)
                    found[name] += int(weight.whole) * line.copies
    return dict(found)


def prediction_parameters(model: Model) -> int:
    """Return the parameters of the multi-token-prediction layers, which the count of the model leaves out.

    >>> prediction_parameters(Model.load("deepseek-v3"))
    11610067968
    """
    return _counted(model)["mtp"]


def count_parameters(model: Model) -> int:
    """Return the number of parameters, shared tables and shared blocks counted once, prediction layers left out.

    Equal to transformers 5.23.0 for every configuration of tests/data/models/param_counts.json.

    >>> count_parameters(Model.load("gpt2"))
    124439808
    """
    return sum(parameters_by_component(model).values())


def active_parameters(model: Model) -> int:
    """Return the parameters that one token meets: all of them, but only the chosen ones among routed experts.

    Source: arXiv:2401.04088 section 2.1 (sparse and active parameters); tables and shared experts count as active.

    >>> active_parameters(Model.load("gpt2"))
    124439808
    """
    return sum(
        int(weight.whole) * line.copies * _chosen(line, weight)[0] // _chosen(line, weight)[1]
        for line, _, weight in _weights(model)
        if line.part != "mtp"
    )


def _chosen(line: Line, weight: Weight[float]) -> tuple[int, int]:
    """How many of how many experts a token meets in the weights of a line, none of those that never run."""
    if line.block is not None and line.block.idle:
        return 0, 1
    m = line.block.feed_forward if line.block else None
    return (m.top_k, m.experts) if weight.expert and isinstance(m, MoE) else (1, 1)
