"""Counts of a model: the ledger with every degree one, folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from shardwise.ledger.op import Op
from shardwise.models import Block, Model, MoE
from shardwise.ops.block import block_ops
from shardwise.ops.head import embedding, final_norm, head, mtp_ops
from shardwise.ops.layout import Choices, Degrees, Layout, Work, lay_out
from shardwise.plans import find_stack

WHOLE: Degrees[float] = Degrees(tp=1, tp2=1, cp=1, ep=1, etp=1, panels=1)


def whole_layout(batch: int = 1, seq_len: int = 1, coverage: Literal["full", "masked"] = "full") -> Layout[float]:
    """Return the layout of a model on one device, for counting."""
    work: Work[float] = Work(B=batch, S=seq_len, context=0, coverage=coverage)
    return lay_out(WHOLE, work, Choices(stack=find_stack("transformers")))


def _parts(model: Model, y: Layout[float]) -> Iterator[tuple[str, tuple[Op[float], ...], int]]:
    """Yield (name, operators, how often) of everything the model has, shared weights once."""
    yield "embedding", embedding(y, model), 1
    for block, times in model.kinds.items():
        yield "layers", block_ops(y, block, model.hidden), times
    yield "head", (*final_norm(y, model), *head(y, model)), 1
    for block in model.mtp:
        yield "mtp", (*mtp_ops(y, model), *block_ops(y, block, model.hidden)), 1


def count_parameters(model: Model) -> int:
    """Return the number of parameters, shared tables and shared blocks counted once.

    Equal to transformers 5.23.0 for every configuration of tests/data/models/param_counts.json.
    """
    y = whole_layout()
    owned = _copies(model)
    count = 0
    for name, ops, times in _parts(model, y):
        if name == "mtp":
            continue
        count += sum(int(w.whole) for o in ops for w in o.weights) * times
    return count - _shared(model, y, owned)


def _copies(model: Model) -> Counter[Block]:
    return Counter(b for b in model.layers if b.shared_weights)


def _shared(model: Model, y: Layout[float], owned: Counter[Block]) -> int:
    return sum(
        (times - 1) * sum(int(w.whole) for o in block_ops(y, block, model.hidden) for w in o.weights)
        for block, times in owned.items()
    )


def is_moe(block: Block) -> bool:
    """Return whether a block's feed-forward has experts."""
    return isinstance(block.feed_forward, MoE)
