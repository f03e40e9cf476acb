"""The ledger of a plan: the operators of every kind of layer and of what stands around the layers, with recompute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from shardwise.ledger.number import X
from shardwise.ledger.op import Op
from shardwise.ledger.saved import Checkpoint
from shardwise.models import Block, Model, MoE
from shardwise.ops import blocks as ledgers
from shardwise.ops.layout import Layout
from shardwise.plans import Plan
from shardwise.training._blocks import checkpoints
from shardwise.training._stages import Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines(Generic[X]):
    """The operators of one part of a model, and the units that run again in backward."""

    label: str
    ops: tuple[Op[X], ...]
    units: tuple[Checkpoint, ...] = ()

    def again(self, op: Op[X]) -> bool:
        """Return whether an operator runs again in backward."""
        return any(u.holds(op.region) for u in self.units)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger(Generic[X]):
    """The operators of a model on one rank: one entry a kind of layer, and what stands before and after them."""

    kinds: tuple[Lines[X], ...]
    embedding: Lines[X]
    head: Lines[X]
    loss: Lines[X]


def modules_of(plan: Plan, block: Block) -> tuple[str, ...]:
    """Return the modules of a plan that a block runs again: "mlp" is a dense feed-forward, "moe" one of experts.

    Megatron-LM core/transformer/transformer_config.py, recompute_modules.
    """
    other = "mlp" if isinstance(block.feed_forward, MoE) else "moe"
    return tuple(name for name in plan.modules if name != other)


def units_of(plan: Plan, kind: Kind) -> tuple[Checkpoint, ...]:
    """Return the units of a kind of layer that a plan runs again in backward."""
    return checkpoints(plan.recompute, modules_of(plan, kind.block)) if kind.recomputed else ()


def ledger_of(model: Model, plan: Plan, kinds: tuple[Kind, ...], y: Layout[X]) -> Ledger[X]:
    """Return the operators of a model under a layout; the head has the final norm and prediction layers."""
    mtp, extra = ledgers.predictions(y, model)
    head = (*ledgers.final_norm(y, model), *ledgers.head(y, model), *mtp)
    return Ledger(
        kinds=tuple(
            Lines(
                label=f"layer kind {i}" if len(kinds) > 1 else "layer",
                ops=ledgers.block_ops(y, kind.block, model.hidden),
                units=units_of(plan, kind),
            )
            for i, kind in enumerate(kinds)
        ),
        embedding=Lines(label="embedding", ops=ledgers.embedding(y, model)),
        head=Lines(label="head", ops=head),
        loss=Lines(label="loss", ops=(*ledgers.loss(y, model), *extra)),
    )
