"""The operators of one engine step as an engine runs them: formats of weights, cache writes, messages of experts.

Adapters (arXiv:2106.09685 section 4.1) hold two thin matrices for every linear layer, laid out as in
github.com/vllm-project/vllm vllm/lora/layers.py, 2024-11: each part of a joint projection has a first matrix of its
own, tensor parallelism splits a second matrix with the outputs of its layer and a first one with the inputs, embedding
tables have adapters too and experts have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Literal

from shardwise.ledger.number import X, above, ceil, is_plain, minimum, total
from shardwise.ledger.op import Collective, Op, Weight, within
from shardwise.ledger.traced import named
from shardwise.models import Block, Model
from shardwise.ops import blocks as ledgers
from shardwise.ops.experts import SHARED
from shardwise.ops.inputs import LayoutOptions, ParallelSizes, TokenBatch
from shardwise.ops.latent import joined_down
from shardwise.ops.layout import Layout, lay_out, memory_op
from shardwise.ops.routed import routed_tokens
from shardwise.plans import Tuning, find_base, find_precision
from shardwise.records import dataclass, replace
from shardwise.serving._cache import CacheRules, block_caches, keeps_tokens
from shardwise.serving._captured import padded_sequences, routed_share
from shardwise.serving._case import ServingCase
from shardwise.serving._engine import EngineOperators, reduces_branches_once
from shardwise.serving._formats import WeightFormat
from shardwise.serving._rates import type_of
from shardwise.serving._routing import popularity_of
from shardwise.serving._sizes import ServingSizes
from shardwise.serving._whole_norms import exchange_of, with_exchange


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStep(Generic[X]):
    """One iteration of an engine: `sequences` of `tokens` new tokens each, after `context` cached ones.

    Each may be a plain number, a column of steps, or traced.
    """

    phase: Literal["prefill", "decode"]
    sequences: X
    tokens: X | float
    context: X | float
    clock: X | float = 1.0
    """That of matrix units, over the clock that lasts."""


@dataclass(frozen=True, kw_only=True)
class LedgerViews(Generic[X]):
    """One step laid out with the bytes and the type of GEMMs of the rest, and with those of each narrow format.

    There are none where the format is that of the rest.
    """

    wide: Layout[X]
    narrow: tuple[tuple[WeightFormat, Layout[X]], ...]
    format: WeightFormat

    def ops(self, make: Callable[[Layout[X]], tuple[Op[X], ...]]) -> tuple[Op[X], ...]:
        """Return operators, each in the format of its own weights."""
        wide = make(self.wide)
        if not self.narrow:
            return wide
        made = {form.name: make(layout) for form, layout in self.narrow}
        formats = [next(filter(None, map(self.format.of, op.weights)), None) for op in wide]
        return tuple(made[form.name][i] if form else wide[i] for i, form in enumerate(formats))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLedger(Generic[X]):
    """The operators of one step on a rank: of every kind of layer, the embedding and the head, each with its name.

    `stream_bytes` are those of the residual stream, `adapters` those of the adapters beside each line.
    """

    lines: tuple[tuple[str, tuple[Op[X], ...]], ...]
    stream_bytes: X
    adapters: tuple[X, ...]
    step: EngineStep[X]


def _cache_write(layout: Layout[X], block: Block, kept: bool) -> tuple[Op[X], ...]:
    """Return the kernel that puts new keys and values in the cache: it reads them once and writes them once."""
    if not kept or not keeps_tokens(block):
        return ()
    new = layout.tokens * total((c.token_bytes for c in block_caches(layout, block, CacheRules())), 0 * layout.tokens)
    read = new * (layout.a / layout.work.cache_bytes)
    return (memory_op(layout, "cache_write", "attention", (read + new, 0 * new), role="cache_write"),)


def _served(layout: Layout[X], op: Op[X], D: int) -> Op[X]:
    """Return an operator of an MoE with the messages of an engine instead of a trainer's.

    Inside a tensor-parallel group every rank has all tokens: nothing is dispatched, and one all-reduce adds the
    outputs of all experts, shared ones too (vLLM fused_moe/layer.py, reduce_results). Where experts span several
    groups, ranks share the tokens of theirs, exchange them all-to-all and gather the outputs
    (arXiv:2412.19437 section 3.4). Where each expert is split over several groups, their tokens are gathered, once
    each, and the outputs reduced and scattered (vLLM distributed/device_communicators/all2all.py, naive).
    """
    if op.role in ("dispatch", "combine"):
        spread = layout.degrees.ep * layout.degrees.etp
        hops = [c for c in op.forward if c.verb == "all_to_all"]
        forward = [
            replace(c, size_bytes=above(spread, layout.degrees.tp, c.size_bytes, 0 * c.size_bytes)) for c in hops
        ]
        tokens = layout.a * routed_tokens(layout) * layout.degrees.etp * D
        split = above(spread, layout.degrees.tp, tokens, 0 * tokens)
        forward += [replace(c, size_bytes=split) for c in op.forward if c.axis == "etp"]
        if op.role == "combine":
            full = layout.a * layout.tokens * D
            nothing = 0 * full
            joined = above(spread, layout.degrees.tp, nothing, full)
            shared = above(spread, layout.degrees.tp, full, nothing)
            forward.append(Collective(axis="tp", verb="all_reduce", size_bytes=joined, tensor="expert outputs"))
            forward.append(Collective(axis="tp", verb="all_gather", size_bytes=shared, tensor="expert outputs"))
        return replace(op, forward=tuple(forward))
    if op.role == "down" and within(op.region, SHARED):
        return replace(op, forward=())
    return op


def layer_ops(
    views: LedgerViews[X], block: Block, D: int, caches: bool = True, summed: bool = False, exchange: str = ""
) -> tuple[Op[X], ...]:
    """Return the operators of one layer, with the write to the cache where there is one.

    Where both branches of a parallel block are `summed` before they are reduced, attention sends nothing. `exchange`
    is what ranks send for norms over whole projections.
    """
    ops = joined_down(views.ops(lambda layout: ledgers.block_ops(layout, block, D)))
    if summed and block.parallel:
        ops = tuple(replace(op, forward=()) if op.role == "out" else op for op in ops)
    ops = tuple(with_exchange(views.wide, op, exchange) for op in ops)
    return (*(_served(views.wide, op, D) for op in ops), *_cache_write(views.wide, block, caches))


def embedding_ops(views: LedgerViews[X], model: Model) -> tuple[Op[X], ...]:
    """Return the operators before the layers; a lookup reads the rows of its tokens, never the table."""
    return views.ops(lambda layout: ledgers.embedding(layout, model)) or ledgers.nothing(views.wide)


def head_ops(
    views: LedgerViews[X], model: Model, operators: EngineOperators, verifies: bool = False
) -> tuple[Op[X], ...]:
    """Return the operators after the layers: norm, head on the last token of each sequence, gather, sampling.

    A head of a model that does not generate (masked words) runs on every token, and nothing is sampled; all tokens of a
    step that verifies guesses are. What sampling moves for each logit is the engine's.
    """
    layout = views.wide
    tokens = layout.work.B if model.generates and not verifies else layout.work.B * layout.work.S
    norm = ledgers.final_norm(layout, model)
    if not model.head:
        return norm or ledgers.nothing(layout)
    heads = views.ops(lambda one: ledgers.head(one, model, tokens))
    logits = layout.a * tokens * model.vocab
    gather: Collective[X] = Collective(axis="tp", verb="all_gather", size_bytes=logits, tensor="logits")
    moved, kernels = operators.sampling_bytes_per_logit * tokens * model.vocab, operators.sampling_kernels
    sampling = memory_op(layout, "sampling", "head", (moved, 0 * moved), kernels=kernels, role="sampling")
    gathered = tuple(replace(op, forward=(gather,)) for op in heads)
    return (*norm, *gathered, sampling) if model.generates else (*norm, *gathered)


def weight_bytes(ops: tuple[Op[X], ...], form: WeightFormat, zero: X) -> X:
    """Return bytes of the weights of some operators on one rank, scales included."""
    return total((w.elements * form.element_bytes(w) * padding(form, w) for o in ops for w in o.weights), zero)


def padding(form: WeightFormat, weight: Weight[X]) -> X | float:
    """Return by what an engine lengthens a weight of experts to give its sides whole tiles, 1 where it does not."""
    if not form.expert_pads or not weight.expert or not form.holds(weight):
        return 1.0
    first, second = form.expert_pads[:2] if weight.role == "up" else form.expert_pads[2:]
    *_, outer, inner = weight.shape
    return ceil(inner / first) * first / inner * (ceil(outer / second) * second / outer)


def table_bytes(ops: tuple[Op[X], ...], form: WeightFormat, zero: X, every: bool = False) -> X:
    """Return bytes of the table of token embeddings among some operators on one rank, or of every one looked up."""
    weights = (w for o in ops for w in o.weights if w.kind == "embedding" and (every or w.role == "embedding"))
    return total((w.elements * form.element_bytes(w) for w in weights), zero)


def live_bytes(op: Op[X]) -> X:
    """Return bytes alive while an operator runs: what it reads of activations and what it writes.

    What training would keep of an operator is what it reads, and for all but GEMMs what it writes too.
    """
    saved = total((t.size_bytes for t in op.saves), 0 * op.forward_bytes)
    return saved + op.output_bytes if op.kind in ("matmul", "grouped") else saved


def views_of(
    case: ServingCase, sizes: ServingSizes[X], step: EngineStep[X], routed_share: X | float = 1.0
) -> LedgerViews[X]:
    """Return one step laid out on the ranks of a plan, of whose tokens a share goes to experts."""
    zero = 0 * sizes.tp

    def lay(weight_bytes: float, dtype: str) -> Layout[X]:
        work = TokenBatch(
            B=zero + step.sequences,
            S=zero + step.tokens,
            context=zero + step.context,
            phase=step.phase,
            activation_bytes=case.activation_bytes,
            weight_bytes=weight_bytes,
            cache_bytes=case.cache_element_bytes,
            state_bytes=case.state_bytes,
            packs_latents=case.packs_latents,
            dtype=dtype,
            imbalance=case.job.expert_imbalance,
            copies=step.sequences if case.job.same_prompts else 1.0,
            routed_share=routed_share,
            popularity=popularity_of(case.model),
            mean_rank=case.mean_rank,
        )
        one = zero + 1
        degrees = ParallelSizes(tp=sizes.tp, tp2=one, cp=one, ep=sizes.ep, etp=sizes.etp, panels=one)
        stack = case.engine.prompt_stack if step.phase == "prefill" else case.engine.stack
        return lay_out(degrees, work, LayoutOptions(stack=stack))

    own, rest = case.format.bytes, case.format.rest_bytes if case.format.bits != 32 else 4.0
    wide = lay(rest, case.dtype)
    same = own == rest and case.compute == case.dtype
    narrow = () if same else tuple((form, lay(form.bytes, type_of(case, form))) for form in case.format.narrow)
    return LedgerViews(wide=wide, narrow=narrow, format=case.format)


def label_of(block: Block, index: int) -> str:
    """Return the name of a kind of layer.

    >>> label_of(Block(mixers=(), feed_forward=None), 0)
    'layer kind 0'
    """
    words = [type(m).__name__ for m in block.mixers]
    if block.feed_forward is not None:
        words.append("experts" if block.experts else "feed-forward")
    return f"layer kind {index}" + (f" ({', '.join(words)})" if words else "")


_OF_SEQUENCES = ("attention", "scores", "softmax", "context", "indexer", "cache_write", "state")
"""Roles of operators that rows beyond the sequences of a step do not lengthen: these have next to no context."""


def step_ledger(case: ServingCase, sizes: ServingSizes[X], step: EngineStep[X]) -> StepLedger[X]:
    """Return the operators of one step as the engine runs them, with rows that fill it up to a captured size."""
    ledger = _ledger(case, sizes, step)
    if step.phase != "decode":
        return ledger
    rows = padded_sequences(case, sizes, step.sequences, step.tokens)
    if rows is step.sequences or (isinstance(rows, (int, float)) and is_plain(step.sequences, rows)):
        return ledger
    share = routed_share(case, sizes, step.sequences / rows)
    padded = _ledger(case, sizes, replace(step, sequences=rows), share)
    *filled, _ = zip(padded.lines, ledger.lines, strict=True)
    lines = (
        (label, tuple(own if own.role in _OF_SEQUENCES else op for op, own in zip(ops, of_step, strict=True)))
        for (label, ops), (_, of_step) in filled
    )
    return replace(ledger, lines=(*lines, ledger.lines[-1]), stream_bytes=padded.stream_bytes)


def _ledger(case: ServingCase, sizes: ServingSizes[X], step: EngineStep[X], share: X | float = 1.0) -> StepLedger[X]:
    """Return the operators of one step of so many rows, of whose tokens a share goes to experts."""
    model, views = case.model, views_of(case, sizes, step, share)
    summed, exchange = reduces_branches_once(model.family), exchange_of(case.engine.name, model.family)
    verifies = bool(case.job.speculative_method) and step.phase == "decode"
    wide = with_adapters(case, views.wide)
    kinds = (
        (
            label_of(block, i),
            (
                *layer_ops(views, block, model.hidden, case.job.use_kv_cache, summed, exchange),
                *adapter_ops(case, wide, block, step.sequences),
            ),
        )
        for i, block in enumerate(model.kinds)
    )
    ends = (
        ("embedding", embedding_ops(views, model)),
        ("head", head_ops(views, model, case.engine.operators, verifies)),
    )
    stream = views.wide.residual("boundary", model.hidden, "").size_bytes
    return StepLedger(lines=(*kinds, *ends), stream_bytes=stream, adapters=adapter_bytes(case, wide), step=step)


def with_adapters(case: ServingCase, y: Layout[X]) -> Layout[X]:
    """Return a layout of layers whose products have adapters beside them, the same where a case has none.

    They lie in the type of activations, and are those of modules: a step of decode that absorbs one into others has it
    no longer.
    """
    if not case.job.adapter_rank:
        return y
    tuning = Tuning(
        adapter="lora", rank=case.job.adapter_rank, targets=("linear",), dropout=0.0, base=find_base("bf16"),
        precision=find_precision("bf16-pure"), trains=("none",), width=int(case.activation_bytes), splits_rank=False,
    )  # fmt: skip
    return lay_out(y.degrees, replace(y.work, phase="prefill"), replace(y.choices, tuning=tuning))


def adapter_bytes(case: ServingCase, layout: Layout[X]) -> tuple[X, ...]:
    """Return bytes of the adapters of every kind of layer, of the embedding table and of the head on a rank.

    Tables and heads are not split.
    """
    rank, zero = case.job.adapter_rank, 0 * layout.tokens
    if not rank:
        return tuple(zero for _ in (*case.model.kinds, "embedding", "head"))
    each = case.job.adapters * case.activation_bytes
    kinds = (
        total((each * w.elements for op in ledgers.block_ops(layout, block, case.model.hidden) for w in op.weights
               if w.adapter), zero)
        for block in case.model.kinds
    )  # fmt: skip
    table = zero + each * rank * (case.model.vocab + case.model.hidden)
    return tuple(named(size, "adapters") for size in (*kinds, table, table))


def adapter_ops(case: ServingCase, layout: Layout[X], block: Block, sequences: X) -> tuple[Op[X], ...]:
    """Return the kernels of a layer's adapters: beside each GEMM one into their rank and one out of it.

    Each takes all parts of a joint GEMM and all adapters of a batch at once, sums in fp32, and reads the matrices of
    every adapter that the batch has (SGMV, arXiv:2310.18547; vLLM lora/ops/triton_ops lora_shrink_op.py,
    lora_expand_op.py).
    """
    if not case.job.adapter_rank:
        return ()
    sums: dict[str, tuple[Op[X], list[Op[X]]]] = {}
    product = ""
    for op in ledgers.block_ops(layout, block, case.model.hidden):
        if any(w.adapter for w in op.weights):
            sums[product][1].append(op)
        elif op.kind == "matmul" and op.weights:
            product = op.name
            sums[product] = op, []
    stacked = minimum(case.job.adapters + 0 * sequences, sequences) * case.activation_bytes
    made: list[Op[X]] = []
    for name, (op, thin) in sums.items():
        if thin:
            firsts, seconds = thin[::2], thin[1::2]
            low = 4 * op.rows * total(one.columns for one in firsts)
            shrunk = layout.a * op.rows * op.inner + low + stacked * _adapter_elements(firsts)
            grown = low + 2 * layout.a * op.rows * op.columns + stacked * _adapter_elements(seconds)
            for part, moved in (("lora_shrink", shrunk), ("lora_expand", grown)):
                made.append(memory_op(layout, f"{name}.{part}", op.region, (moved, 0 * moved)))
    return tuple(made)


def _adapter_elements(ops: list[Op[X]]) -> X:
    return total(w.elements for op in ops for w in op.weights if w.adapter)
