"""Cases without what says nothing: so that two that mean the same are equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from shardwise.models import Attention, Block, Mamba2, Mixer, Model
from shardwise.plans import Axis, Plan

T = TypeVar("T")
# What other implementations of a model do differently with the same sizes; Megatron-LM has its own way.
_OWN_WAY: dict[str, Any] = {
    "fused_projection": False, "joined_rotary": False, "float_weights": False, "float_router": False,
    "qk_norm_kind": "rmsnorm", "normalised": False,
}  # fmt: skip


ORDERS: tuple[tuple[Axis, ...], ...] = (("tp", "tp2", "cp", "dp", "pp"), ("tp", "tp2", "cp", "pp", "dp"))


def canonical_plan(p: Plan) -> Plan:
    """Return a plan without what has no effect: an order of axes of one rank, equal stages listed, and the like.

    >>> canonical_plan(Plan(pp=2, stage_layers=(4, 4), cp_kind="all-gather")) == Plan(pp=2, sequence_parallel=False)
    True
    """

    def wide(order: tuple[Axis, ...]) -> list[Axis]:
        return [axis for axis in order if getattr(p, axis) > 1]

    rules = p.sharding_rules
    whole = rules.weights and rules.groups != "all" and p.shard == p.dp
    return replace(
        p,
        sharding="fsdp" if whole and rules.hybrid else p.sharding,
        shard=1 if whole else p.shard,
        sequence_parallel=p.sequence_parallel and p.tp > 1,
        stage_layers=() if len(set(p.stage_layers)) == 1 else p.stage_layers,
        cp_kind=p.cp_kind if p.cp > 1 else "ring",
        order=next((order for order in ORDERS if wide(order) == wide(p.order)), p.order),
    )


def canonical(m: Model) -> Model:
    """Return a model without its name and without what only other implementations do differently."""
    made = {block: _canonical(block) for block in dict.fromkeys((*m.layers, *m.mtp))}
    return replace(
        m, name="", family="", layers=tuple(made[b] for b in m.layers), mtp=tuple(made[b] for b in m.mtp),
        norm=_plain(m.norm), max_context=0, quantization="", dropout=False, assumptions=(), mtp_norms=3,
    )  # fmt: skip


def _canonical(block: Block) -> Block:
    mixers: tuple[Mixer, ...] = tuple(_own_way(mixer) for mixer in block.mixers)
    feed = None if block.feed_forward is None else _own_way(block.feed_forward)
    return replace(
        block, mixers=mixers, feed_forward=feed, norm=_plain(block.norm), also=tuple(map(_canonical, block.also))
    )


def _own_way(part: T) -> T:
    names = {name: value for name, value in _OWN_WAY.items() if hasattr(part, name)}
    if isinstance(part, Attention):
        # Without a norm its kind says nothing; one without weights is a kind of its own.
        names["qk_norm_kind"] = part.qk_norm_kind if "no-weight" in part.qk_norm_kind else "rmsnorm"
    if isinstance(part, Mamba2):
        names["chunk"] = 128
    if getattr(part, "activation", "") == "gelu-new":
        names["activation"] = "gelu-tanh"
    return replace(part, **names)  # type: ignore[type-var]


def _plain(norm: Any) -> Any:
    return {"rmsnorm-float": "rmsnorm", "rmsnorm-offset": "rmsnorm", "layernorm-float": "layernorm"}.get(norm, norm)
