"""Parameters and FLOPs of a model: the ledger with every degree one, folded, and the published conventions.

Letters: B sequences, S tokens a sequence, L layers, N heads, H head dim, P parameters, P_m those of GEMMs:
all but the input embedding, norms and biases, the head included, chosen experts alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Literal, TypeAlias

from shardwise.errors import InputError, Problem
from shardwise.ledger.number import X
from shardwise.ledger.op import Op, Weight, within
from shardwise.models import Block, Model, MoE
from shardwise.ops.block import block_ops
from shardwise.ops.core import CORE
from shardwise.ops.head import embedding, final_norm, head, mtp_ops
from shardwise.ops.inputs import LayoutOptions, ParallelSizes, TokenBatch
from shardwise.ops.layout import Layout, lay_out
from shardwise.plans import Tuning, find_stack
from shardwise.records import dataclass, replace

Coverage: TypeAlias = Literal["full", "masked"]
ModelPart: TypeAlias = Literal["embedding", "layers", "head", "mtp"]

WHOLE: ParallelSizes[float] = ParallelSizes(tp=1, tp2=1, cp=1, ep=1, etp=1, panels=1)

COMPONENTS = (
    "embedding", "attention", "recurrence", "mlp", "experts", "shared_experts", "router", "norms", "other", "head",
)  # fmt: skip
"""What parameters are counted by: "recurrence" are state-space and linear-attention mixers, "other" family extras."""


def whole_layout(
    batch: int = 1,
    seq_len: int = 1,
    coverage: Coverage = "full",
    stack: str = "",
    tuning: Tuning | None = None,
) -> Layout[float]:
    """Return the layout of a model on one device, for counting: without a stack, transformers' with flash attention.

    >>> whole_layout(2, 8).tokens
    16
    """
    work: TokenBatch[float] = TokenBatch(B=batch, S=seq_len, context=0, coverage=coverage)
    chosen = find_stack(stack) if stack else replace(find_stack("transformers"), calls_sdpa=False)
    return lay_out(WHOLE, work, LayoutOptions(stack=chosen, tuning=tuning))


@dataclass(frozen=True, slots=True)
class PartOps:
    """Operators of one part of a model: how often they run and how often their weights exist, and their block."""

    part: ModelPart
    ops: tuple[Op[float], ...]
    times: int
    copies: int
    block: Block | None = None


def lines(model: Model, y: Layout[float]) -> Iterator[PartOps]:
    """Yield everything a model has, prediction layers last.

    A block that shares its weights runs as often as it occurs and owns one copy of them; blocks inside a block stand on
    their own.
    """
    yield PartOps("embedding", embedding(y, model), 1, 1)
    for own, kinds in _by_tuning(y, model):
        yield from _blocks(own, kinds, model.hidden, "layers")
    yield PartOps("head", (*final_norm(y, model), *head(y, model)), 1, 1)
    if model.mtp:
        again = tuple(replace(op, weights=()) for op in head(y, model))
        copies = 1 if model.mtp[0].shared_weights else len(model.mtp)
        yield PartOps("mtp", (*mtp_ops(y, model), *again), len(model.mtp), copies)
        yield from _blocks(y, Counter(model.mtp), model.hidden, "mtp")


@lru_cache(maxsize=32)
def whole_lines(model: Model, tuning: Tuning | None = None) -> tuple[PartOps, ...]:
    """Return everything a model has on one device, made once: answers on a fine-tuning ask for it often."""
    return tuple(lines(model, whole_layout(tuning=tuning)))


def of_layer(y: Layout[X], at: int, num_layers: int) -> Layout[X]:
    """Return the layout of one layer, which may train whole among frozen ones."""
    t = y.choices.tuning
    if t is None or not t.layer_words:
        return y
    return replace(y, choices=replace(y.choices, tuning=t.of_layer(at, num_layers)))


def _by_tuning(y: Layout[float], model: Model) -> Iterator[tuple[Layout[float], Counter[Block]]]:
    """Yield the blocks of a model by what of them trains."""
    if y.choices.tuning is None or not y.choices.tuning.layer_words:
        yield y, model.kinds
        return
    blocks: dict[Tuning, Counter[Block]] = {}
    for at, block in enumerate(model.layers):
        blocks.setdefault(y.choices.tuning.of_layer(at, model.num_layers), Counter())[block] += 1
    for tuning, kinds in blocks.items():
        yield replace(y, choices=replace(y.choices, tuning=tuning)), kinds


def _blocks(y: Layout[float], kinds: Counter[Block], D: int, part: ModelPart) -> Iterator[PartOps]:
    flat: Counter[Block] = Counter()
    for block, times in kinds.items():
        for one, each in _opened(block).items():
            flat[one] += times * each
    for block, times in flat.items():
        yield PartOps(part, block_ops(y, block, D), times, 1 if block.shared_weights else times, block)


def _opened(block: Block) -> Counter[Block]:
    """A block and those inside it, each on its own; what is held and never runs stands in a block of its own."""
    runs = bool(block.mixers or block.feed_forward or not block.idle)
    opened = Counter([replace(block, also=(), idle=())] if runs else [])
    opened.update(Block(mixers=(), feed_forward=None, norms=0, idle=(one,)) for one in block.idle)
    for other in block.also:
        opened.update(_opened(other))
    return opened


def component(part: ModelPart, op: Op[float]) -> str:
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


def _weights(model: Model) -> Iterator[tuple[PartOps, Op[float], Weight[float]]]:
    return ((line, op, weight) for line in whole_lines(model) for op in line.ops for weight in op.weights)


def parameters_by_component(model: Model) -> dict[str, int]:
    """Return the number of parameters of each component of `COMPONENTS` that the model has.

    They add up to `count_parameters`. Shared tables and shared blocks count once, prediction layers stand apart.

    >>> parameters_by_component(Model.load("gpt2"))["embedding"]
    39383808
    """
    counts = _counted(model)
    return {name: counts[name] for name in COMPONENTS if counts[name]}


@lru_cache(maxsize=64)
def _counted(model: Model) -> Counter[str]:
    """Parameters of each component, and of prediction layers under "mtp"."""
    counts: Counter[str] = Counter()
    for line, op, weight in _weights(model):
        counts[component(line.part, op)] += int(weight.whole) * line.copies
    return counts


def trainable_parameters(model: Model, tuning: Tuning) -> dict[str, int]:
    """Return the parameters that a fine-tuning trains, by the linear layer or the component that they belong to.

    Equal to peft 0.21.2 for every run of tests/data/tuning/counts.json. Blocks that share weights have adapters each:
    their class ties parameters of modules that peft wraps one by one, those that no layer runs among them.

    >>> from shardwise.plans import Training, find_stack, tuning_of
    >>> job = Training(seq_len=1, global_batch=1, adapter="lora", rank=16, targets=("q", "v"))
    >>> trainable_parameters(Model.load("llama-3.1-8b"), tuning_of(job, find_stack("transformers")))
    {'q': 4194304, 'v': 2621440}
    """
    counts: Counter[str] = Counter()
    for line in whole_lines(model, tuning):
        instances = {one.name: one.instances for one in line.block.extras} if line.block is not None else {}
        for op in line.ops if line.part != "mtp" else ():
            for weight in op.weights:
                if weight.trainable and weight.elements:
                    name = op.modules[0] if weight.adapter and op.modules else component(line.part, op)
                    copies = line.times * instances.get(name, 1) if weight.adapter else line.copies
                    counts[name] += int(weight.whole) * copies
    return dict(counts)


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
    Further tables, of each layer (Gemma 3n) or of n-grams (Qwen3.8-Flash-Next, published as 6 billion active beside
    51 billion of n-grams), do not: a token meets a row of them.

    >>> active_parameters(Model.load("gpt2"))
    124439808
    """
    met = sum(
        int(weight.whole) * line.copies * _chosen(line, weight)[0] // _chosen(line, weight)[1]
        for line, _, weight in _weights(model)
        if line.part != "mtp"
    )
    return met - model.extra_embedding


def _chosen(line: PartOps, weight: Weight[float]) -> tuple[int, int]:
    """How many of how many experts a token meets in the weights of a line, none of those that never run."""
    if line.block is not None and line.block.idle:
        return 0, 1
    feed_forward = line.block.feed_forward if line.block else None
    return (feed_forward.top_k, feed_forward.experts) if weight.expert and isinstance(feed_forward, MoE) else (1, 1)


RECOMPUTED: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": (CORE,),
    "attention": ("attention",),
    "norm-attention-norm": ("norm1", "attention", "norm2"),
    "full": ("",),
}
"""Regions of a block that each recompute mode runs again in backward (the modes of `Plan.recompute`)."""


def _runs(model: Model, batch: int, seq_len: int, coverage: Coverage) -> Iterator[tuple[PartOps, Op[float]]]:
    for line in lines(model, whole_layout(batch, seq_len, coverage)):
        for op in line.ops:
            yield line, op


def _component(line: PartOps, op: Op[float]) -> str:
    name = component(line.part, op)
    return "attention_core" if name == "attention" and within(op.region, CORE) else name


def count_flops(model: Model, batch: int, seq_len: int, coverage: Coverage = "full") -> dict[str, float]:
    """Return the forward FLOPs of each component for `batch` sequences of `seq_len` tokens, prediction layers apart.

    GEMMs, attention and recurrences, 2 a multiply-add. Coverage "full" counts attention over the whole
    square, "masked" over what masks leave. Equal to PyTorch's FLOP counter for every run of tests/data/ops/flops.json.

    >>> sum(count_flops(Model.load("gpt2"), 1, 1024).values())
    291648307200
    """
    flops: dict[str, float] = {}
    for line, op in _runs(model, batch, seq_len, coverage):
        if line.part != "mtp" and op.flops:
            name = _component(line, op)
            flops[name] = flops.get(name, 0) + op.flops * line.times
    return flops


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """Forward model FLOPs of one sequence: of GEMMs and recurrences, and of attention by coverage.

    `causal` is half the square where a mask is causal, `masked` exactly what masks leave.
    """

    linear: float
    full: float
    causal: float
    masked: float


@lru_cache(maxsize=256)
def forward_flops(model: Model, seq_len: int, regions: tuple[str, ...] | None = None) -> ForwardFlops:
    """Return the forward model FLOPs of one sequence, prediction layers and their logits included.

    `regions` keeps only what a recompute mode would run again: operators of blocks in those regions.

    >>> forward_flops(Model.load("gpt2"), 1024).full
    38654705664.0
    """
    linear = full = causal = masked = 0.0
    pairs = zip(_runs(model, 1, seq_len, "full"), _runs(model, 1, seq_len, "masked"), strict=True)
    for (line, op), (_, under_mask) in pairs:
        if regions is not None and not (line.block and any(within(op.region, r) for r in regions)):
            continue
        if op.kind != "attention":
            linear += op.model_flops * line.times
            continue
        whole, left = op.model_flops * line.times, under_mask.model_flops * line.times
        full, masked = full + whole, masked + left
        causal += whole if left == whole else whole / 2
    return ForwardFlops(linear, full, causal, masked)


def _six_n(model: Model, f: ForwardFlops) -> float:
    return 6.0 * active_parameters(model)


def _model_full(model: Model, f: ForwardFlops) -> float:
    return 3 * (f.linear + f.full)


def _model_causal(model: Model, f: ForwardFlops) -> float:
    return 3 * (f.linear + f.causal)


def _model_masked(model: Model, f: ForwardFlops) -> float:
    return 3 * (f.linear + f.masked)


def _lora(model: Model, f: ForwardFlops) -> float:
    return 2 * f.linear


@dataclass(frozen=True, slots=True)
class Convention:
    """A published way to count the FLOPs of training: what it counts and who uses it."""

    counts: str
    source: str
    of: Callable[[Model, ForwardFlops], float]
    per_sequence: bool = True


CONVENTIONS: dict[str, Convention] = {
    "6n": Convention("6 a parameter a token meets, no attention", "arXiv:2001.08361 table 1", _six_n, False),
    "model-full": Convention(
        "6 P_m + 12 L N H S: attention over the whole square", "PaLM, arXiv:2204.02311 appendix B", _model_full
    ),
    "model-causal": Convention(
        "6 P_m + 6 L N H S: attention over half the square",
        "Megatron-LM megatron/training/training.py num_floating_point_operations, 2026-08",
        _model_causal,
    ),
    "model-masked": Convention(
        "attention over exactly what causal, window and chunk masks leave",
        "arXiv:2307.08691 section 4.1",
        _model_masked,
    ),
    "lora": Convention(
        "4 P_m: no weight gradients of frozen matrices, no attention",
        "NVIDIA NeMo and Megatron-Bridge performance tables of LoRA, 2026-08",
        _lora,
    ),
}
"""Conventions by name; each is per token, and a recomputed forward pass may be added to any of them."""


def train_flops(model: Model, seq_len: int, convention: str = "model-full", recompute: str = "none") -> float:
    """Return FLOPs a token of training by a published convention, with the forward passes that recompute adds.

    "model-full" with recompute "full" is the hardware FLOPs of Megatron-LM (arXiv:2104.04473 section 3.4).

    >>> round(train_flops(Model.load("llama-3-8b"), 8192) / 1e9, 1)
    57.9
    >>> round(train_flops(Model.load("llama-3-8b"), 8192, "model-causal") / 1e9, 1)
    51.5
    """
    _check(convention, recompute)
    rule = CONVENTIONS[convention]
    if not rule.per_sequence:
        return rule.of(model, forward_flops(model, 1, ()))
    total = rule.of(model, forward_flops(model, seq_len))
    if recompute != "none":
        # A convention takes so many forward passes: one more of what runs again, attention counted its way.
        recomputed = forward_flops(model, seq_len, RECOMPUTED[recompute])
        total += rule.of(model, recomputed) / (2 if convention == "lora" else 3)
    return total / seq_len


def _check(convention: str, recompute: str) -> None:
    problems = []
    for field, value, known in (("convention", convention, CONVENTIONS), ("recompute", recompute, RECOMPUTED)):
        if value not in known:
            problems.append(Problem(field, value, "is unknown", "use one of " + ", ".join(known)))
    if problems:
        raise InputError(problems)
