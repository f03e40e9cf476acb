"""What is kept for backward: a fold over the tensors of a block.

With what recompute drops and what it holds while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic

from shardwise.ledger.number import X, total
from shardwise.ledger.op import Op, Tensor, within


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Regions of a block that run again in backward as one unit.

    `discards_output` also drops what the unit hands on (Megatron-LM's output-discarding checkpoint of moe_act,
    layernorm and mla_up_proj, core/tensor_parallel/random.py CheckpointWithoutOutput). `stops_early` ends the second
    run when everything that backward needs is there again.
    """

    regions: tuple[str, ...]
    discards_output: bool = False
    stops_early: bool = False

    def holds(self, path: str) -> bool:
        """Return whether a path lies in the unit."""
        return any(within(path, region) for region in self.regions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept(Generic[X]):
    """Tensors of one block: `kept` through the forward pass.

    `dropped` ones exist again while backward works on the block.
    """

    kept: tuple[Tensor[X], ...]
    dropped: tuple[Tensor[X], ...]


def keep(ops: Iterable[Op[X]], units: tuple[Checkpoint, ...] = ()) -> Kept[X]:
    """Return the distinct tensors that a block keeps, and those that recompute drops.

    An operator outside every unit keeps what it saves. One inside keeps what it saves or reads from outside its unit,
    and drops what is born within (torch.utils.checkpoint). A tensor has one name and is counted once.
    """
    kept: dict[str, Tensor[X]] = {}
    dropped: dict[str, Tensor[X]] = {}
    for op in ops:
        unit = next((u for u in units if u.holds(op.region)), None)
        for tensor in (*op.saves, *(op.reads if unit else ())):
            makers = [u for u in units if tensor.born and u.holds(tensor.born)]
            again = bool(makers) and (unit in makers or makers[0].discards_output)
            (dropped if again else kept)[tensor.name] = tensor
    return Kept(kept=tuple(kept.values()), dropped=tuple(t for n, t in dropped.items() if n not in kept))


def rerun(ops: Iterable[Op[X]], units: tuple[Checkpoint, ...]) -> tuple[Op[X], ...]:
    """Return the operators that backward runs again, in their order.

    torch.utils.checkpoint without reentrance stops at the last tensor that is saved (set_checkpoint_early_stop, since
    PyTorch 2.1; torch.compile drops the same work). A product saves its inputs before it runs, so that the last
    product of a unit and what follows it are not run again; reentrant checkpoints run everything.
    """
    ops = tuple(ops)
    again: set[int] = set()
    for unit in units:
        inside = [op for op in ops if unit.holds(op.region)]
        again.update(id(op) for op in (_until_saved(inside) if unit.stops_early else inside))
    return tuple(op for op in ops if id(op) in again)


def _until_saved(ops: list[Op[X]]) -> list[Op[X]]:
    """Return the operators of a unit up to the one that saves last, without it where it is a product."""
    last = max((i for i, op in enumerate(ops) if op.saves), default=-1)
    return ops[:last] if ops[last : last + 1] and ops[last].kind in ("matmul", "grouped") else ops[: last + 1]


def tensor_bytes(tensors: Iterable[Tensor[X]], zero: X | float = 0) -> X:
    """Return the bytes of distinct tensors."""
    return total((t.size_bytes for t in tensors), zero)
