"""The ledger of a plan: the operators of every kind of layer and of what stands around the layers, with recompute."""

from __future__ import annotations

from functools import lru_cache
from typing import Generic, TypeAlias

from shardwise.ledger.flow import flow
from shardwise.ledger.number import X, divide, total
from shardwise.ledger.op import Collective, Op, Tensor, within
from shardwise.ledger.saved import POLICIES, Checkpoint, recomputed_ops
from shardwise.models import Block, Model
from shardwise.ops import blocks as ledgers
from shardwise.ops.cast_kernels import with_casts
from shardwise.ops.count import of_layer, whole_layout
from shardwise.ops.feed_forward import in_one_function
from shardwise.ops.layout import Layout, widened
from shardwise.ops.sequence_copies import with_sequence_copies
from shardwise.plans import Plan, Stack, Tuning
from shardwise.records import dataclass, replace
from shardwise.training._blocks import HALVES, checkpoints
from shardwise.training._stages import LayerKind

PREDICTING = ("mtp", "extras", "norm1", "attention", "ssm", "norm2", "mlp")
"""Regions of a layer that predicts further tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartLedger(Generic[X]):
    """The operators of one part of a model, and the units that run again in backward."""

    label: str
    ops: tuple[Op[X], ...]
    units: tuple[Checkpoint, ...] = ()

    def again(self, op: Op[X]) -> bool:
        """Return whether an operator runs again in backward."""
        return any(op is one for one in recomputed_ops(self.ops, self.units))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger(Generic[X]):
    """The operators of a model on one rank: one entry a kind of layer, and what stands before and after them."""

    kinds: tuple[PartLedger[X], ...]
    embedding: PartLedger[X]
    head: PartLedger[X]
    loss: PartLedger[X]


def modules_of(plan: Plan, block: Block) -> tuple[str, ...]:
    """Return the modules of a plan that a block runs again: "mlp" is a dense feed-forward, "moe" one of experts.

    Megatron-LM core/transformer/transformer_config.py, recompute_modules.
    """
    other = "mlp" if block.experts else "moe"
    return tuple(name for name in plan.modules if name != other)


def units_of(stack: Stack, plan: Plan, kind: LayerKind) -> tuple[Checkpoint, ...]:
    """Return the units of a kind of layer that a plan runs again in backward under a framework."""
    if not kind.recomputed:
        return ()
    whole = plan.recompute == "full" and stack.checkpoint_halves
    return HALVES if whole else checkpoints(plan.recompute, modules_of(plan, kind.block))


def prediction_units(stack: Stack, model: Model, plan: Plan, kinds: tuple[LayerKind, ...]) -> tuple[Checkpoint, ...]:
    """Return the units of layers of multi-token prediction, which stand beside the final norm and the head.

    Megatron-LM core/transformer/multi_token_prediction.py: under full recompute a layer runs again with its projection,
    and none does where a count of layers is asked for.
    """
    if not (model.mtp and stack.checkpoint_predictions and all(kind.recomputed for kind in kinds)):
        return ()
    if plan.recompute == "full":
        return (Checkpoint(PREDICTING),)
    return checkpoints(plan.recompute, modules_of(plan, model.mtp[0]))


def layer_ops(y: Layout[X], model: Model, plan: Plan, kind: LayerKind) -> tuple[Op[X], ...]:
    """Return the operators of a kind of layer; its checkpoint is split over tensor-parallel ranks where asked for."""
    own = y.stack.settings
    wide = kind.at < own.bf16_first_layers or kind.at >= model.num_layers - own.bf16_last_layers
    y = widened(y) if wide else y
    ops = ledgers.block_ops(of_layer(y, kind.at, model.num_layers), kind.block, model.hidden)
    if tiles(y, kind):
        ops = tiled(ops, y.stack.settings.tile_mlp)
    ops = with_sequence_copies(y, with_casts(y, ops), compiled=y.stack.activation == "fused")
    if y.choices.tuning is not None:
        ops = flow(ops, kind.entry).ops
    return partitioned(y, ops) if partitions(y, plan, kind) else ops


def partitions(y: Layout[X], plan: Plan, kind: LayerKind) -> bool:
    """Return whether a kind of layer keeps a share of its input; what splits the stream already leaves none to."""
    asked = y.stack.settings.partition_activations and plan.recompute == "full" and kind.recomputed
    return asked and not plan.sequence_parallel and plan.layout == "1d"


def tiles(y: Layout[X], kind: LayerKind) -> bool:
    """Return whether the feed-forward of a kind of layer runs in pieces; experts run whole."""
    return y.stack.settings.tile_mlp > 1 and kind.block.experts is None


def tiled(ops: tuple[Op[X], ...], pieces: int) -> tuple[Op[X], ...]:
    """Return the operators of a layer whose feed-forward holds one of so many pieces of what it makes within."""

    def piece(tensors: tuple[Tensor[X], ...]) -> tuple[Tensor[X], ...]:
        return tuple(replace(t, size_bytes=t.size_bytes / pieces) if within(t.born, "mlp") else t for t in tensors)

    return tuple(
        replace(op, saves=piece(op.saves), reads=piece(op.reads), output_bytes=op.output_bytes / pieces,
                transient_bytes=op.transient_bytes / pieces) if within(op.region, "mlp") else op
        for op in ops
    )  # fmt: skip


def partitioned(y: Layout[X], ops: tuple[Op[X], ...]) -> tuple[Op[X], ...]:
    """Return the operators of a layer that keeps a share of its input and gathers it again before backward.

    ZeRO-R's partitioned activations, arXiv:1910.02054 section 6.1: one all-gather a layer and micro-batch.
    """
    inputs = {t.name: t for op in ops for t in (*op.reads, *op.saves) if not t.born}

    def shared(tensors: tuple[Tensor[X], ...]) -> tuple[Tensor[X], ...]:
        return tuple(t if t.born else replace(t, size_bytes=divide(t.size_bytes, y.degrees.tp)) for t in tensors)

    ops_of_shares = [replace(op, reads=shared(op.reads), saves=shared(op.saves)) for op in ops]
    whole = total((t.size_bytes for t in inputs.values()), 0 * y.tokens)
    gather: Collective[X] = Collective(axis="tp", verb="all_gather", size_bytes=whole, tensor="checkpoint")
    ops_of_shares[0] = replace(
        ops_of_shares[0],
        backward=(gather, *ops_of_shares[0].backward),
        transient_bytes=ops_of_shares[0].transient_bytes + whole,
    )
    return tuple(ops_of_shares)


@lru_cache(maxsize=64)
def idle_layers(model: Model, tuning: Tuning | None) -> int:
    """Return how many layers at the start of a model have an input that needs no gradient.

    None where the embedding table trains.
    """
    if tuning is None:
        return 0
    y = whole_layout(tuning=tuning)
    if flow(ledgers.embedding(y, model), False).output:
        return 0
    reached = (
        at
        for at, block in enumerate(model.layers)
        if flow(ledgers.block_ops(of_layer(y, at, model.num_layers), block, model.hidden), False).output
    )
    return next(reached, model.num_layers - 1) + 1


# Operators of parts of a model by what they are and, of a kind of layer, what of it decides them.
KnownOps: TypeAlias = dict[tuple[object, ...], tuple[Op[X], ...]]


def ledger_of(
    model: Model, plan: Plan, kinds: tuple[LayerKind, ...], y: Layout[X], known: KnownOps[X] | None = None
) -> Ledger[X]:
    """Return the operators of a model under a layout; the head has the final norm and prediction layers.

    What plans of one layout have in common is taken from what is `known` of it, and added to it.
    """
    known = {} if known is None else known
    word = y.stack.settings.checkpoint_policy
    policy = POLICIES[word] if word and plan.recompute == "full" else None
    early, prunes = y.stack.checkpoint_stops_early and y.choices.stops_early, y.stack.checkpoint_prunes
    if ("head",) not in known:
        known |= {(name,): ops for name, ops in _ends(model, y).items()}

    def ops_of(kind: LayerKind) -> tuple[Op[X], ...]:
        key = kind.block, kind.entry, kind.at, partitions(y, plan, kind)
        if key not in known:
            known[key] = layer_ops(y, model, plan, kind)
        return known[key]

    return Ledger(
        kinds=tuple(
            PartLedger(
                label=f"layer kind {i}" if len(kinds) > 1 else "layer",
                ops=ops_of(kind),
                units=(
                    *(
                        replace(u, stops_early=early and not one_function(y, kind.block), policy=policy, prunes=prunes)
                        for u in units_of(y.stack, plan, kind)
                    ),
                    *((Checkpoint(("mlp",), tiles=True),) if tiles(y, kind) else ()),
                ),
            )
            for i, kind in enumerate(kinds)
        ),
        embedding=PartLedger(label="embedding", ops=known["embedding",]),
        head=PartLedger(label="head", ops=known["head",], units=prediction_units(y.stack, model, plan, kinds)),
        loss=PartLedger(label="loss", ops=known["loss",]),
    )


def one_function(y: Layout[X], block: Block) -> bool:
    """Return whether a layer ends in one function of autograd, which saves behind all of its GEMMs, not before each."""
    return block.dense is not None and in_one_function(y, block.dense)


def _ends(model: Model, y: Layout[X]) -> dict[str, tuple[Op[X], ...]]:
    """Return the operators of the embedding, of the head with what predicts further tokens, and of the losses."""
    mtp, extra = ledgers.predictions(y, model)
    head = with_casts(y, (*ledgers.final_norm(y, model), *ledgers.head(y, model), *mtp))
    head, table = (with_sequence_copies(y, ops, compiled=False) for ops in (head, ledgers.embedding(y, model)))
    if y.choices.tuning is not None:
        table, head = flow(table, False).ops, flow(head).ops
    return {"embedding": table, "head": head, "loss": (*ledgers.loss(y, model), *extra)}
