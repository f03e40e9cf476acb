"""The linear layers that adapters stand beside: by the names of models and frameworks, and by words for several."""

from __future__ import annotations

from typing import Generic

from shardwise.ledger.number import X
from shardwise.ledger.op import Op
from shardwise.plans import Tuning
from shardwise.records import dataclass

GROUPS: dict[str, tuple[str, ...]] = {"attention": ("q", "k", "v", "qkv", "o"), "mlp": ("gate", "up", "down")}
"""Words for several linear layers; "all-linear" are those of the layers, "experts" the routed experts'."""
KNOWN_TARGETS = ("all-linear", "linear", "attention", "mlp", "experts", "embedding", "head")
"""Words for parts of a model: all linear layers of the blocks, those without experts and routers, and so on."""
SPELLINGS = {
    "query": "q", "key": "k", "value": "v", "projection": "o", "out": "o", "wq": "q", "wk": "k", "wv": "v", "wo": "o",
    "c_attn": "qkv", "query_key_value": "qkv", "w_pack": "qkv", "wqkv": "qkv", "linear_qkv": "qkv", "dense": "o",
    "attn.c": "o", "mlp.c": "down", "linear_proj": "o", "linear_fc1": "up", "linear_fc2": "down",
    "c_fc": "up", "fc1": "up", "fc_1": "gate", "fc2": "down", "fc_2": "up", "w1": "gate", "w2": "down", "w3": "up",
    "dense_h_to_4h": "up", "dense_4h_to_h": "down", "output": "head", "lm_head": "head", "embed_tokens": "embedding",
    "wte": "embedding", "embeddings": "embedding",
}  # fmt: skip
"""The names that models and frameworks give linear layers, without a trailing "_proj"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Module(Generic[X]):
    """A linear layer: its name in the ledger, the short one of models, its features out, and the tensor it makes."""

    name: str
    short: str
    columns: X
    makes: tuple[str, ...]


def modules_of(t: Tuning | None, op: Op[X]) -> list[Module[X]]:
    """Return the linear layers that a product stands for; one where the framework has a joint one with one adapter."""
    short = op.modules or (op.role,)
    makes = op.makes or (op.name, f"{op.name}.output")
    if len(short) != len(op.parts) or (t is not None and t.joint) or op.kind == "grouped":
        return [Module(name=op.name, short=_short(op, short), columns=op.columns, makes=makes)]
    each = [makes[i : i + 1] for i in range(len(short))] if op.makes else [makes] * len(short)
    return [
        Module(name=f"{op.name}.{name}" if len(short) > 1 else op.name, short=name, columns=n, makes=made)
        for name, n, made in zip(short, op.parts, each, strict=True)
    ]


def _short(op: Op[X], short: tuple[str, ...]) -> str:
    if op.kind == "grouped":
        return "experts"
    return short[0] if len(short) == 1 else op.role


def matches(t: Tuning, op: Op[X], short: str) -> bool:
    """Return whether a linear layer of an operator is among the targets."""
    words = {
        SPELLINGS.get(word.removesuffix("_proj").lower(), word.removesuffix("_proj").lower()) for word in t.targets
    }
    if op.role in ("embedding", "head"):
        return op.role in words
    if op.kind == "grouped":
        return not words.isdisjoint(("experts", "all-linear"))
    if "all-linear" in words or ("linear" in words and op.role != "router"):
        return True
    for group in words & GROUPS.keys():
        words |= set(GROUPS[group])
        if op.region.partition(".")[0] == group and op.role not in ("router", "indexer"):
            return True
    joint = {"qkv": {"q", "k", "v", "qkv"}, "up": {"up"} if op.modules else {"gate", "up"}}
    return not words.isdisjoint({short, op.name, *joint.get(short, ())})
