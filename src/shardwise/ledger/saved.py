"""What is kept for backward: a fold over the tensors of a block.

With what recompute drops and what it holds while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Generic

from shardwise.ledger.number import X, total
from shardwise.ledger.op import Op, Tensor, within
from shardwise.records import dataclass


@dataclass(frozen=True, slots=True)
class KeptOutputs:
    """Which results of a checkpoint stay: of GEMMs in a region, of every so many of them, of attention, of experts.

    `output` says whether the projection of attention's output is among these GEMMs, `partial` that sums over ranks stay
    beside what each rank adds to them, whichever GEMM they are of; XLA knows the sums alone.
    """

    every: int = 1
    region: str = ""
    output: bool = True
    partial: bool = False
    attention: bool = False
    experts: bool = False

    def chooses(self, op: Op[Any]) -> bool:
        """Return whether the output of an operator is one that may stay.

        Not of routers (torchtitan's per_op_sac_force_recompute_mm_shapes_by_fqns), nor of products of 4 bits, which are
        other operators of PyTorch.
        """
        product = op.kind == "matmul" or (self.experts and op.kind == "grouped")
        left_out = op.role == "router" or op.dtype == "fp4" or (op.role == "out" and not self.output)
        return product and bool(op.weights) and within(op.region, self.region) and not left_out


POLICIES: dict[str, KeptOutputs] = {
    # github.com/pytorch/torchtitan parallelisms/parallelize_llama.py, 2024-12, _apply_ac_to_transformer_block
    "second-matmuls": KeptOutputs(every=2, partial=True, attention=True),
    # github.com/AI-Hypercomputer/maxtext layers/decoders.py, minimal: checkpoint_dots_with_no_batch_dims of
    # github.com/jax-ml/jax jax/_src/ad_checkpoint.py, since 2025 the projections of attention and feed-forward by name
    "matmuls": KeptOutputs(experts=True),
    # the same file: minimal_with_context, save_dot_except_mlp, save_qkv_proj
    "matmuls-and-attention": KeptOutputs(attention=True, experts=True),
    "attention-matmuls": KeptOutputs(region="attention"),
    "qkv-matmuls": KeptOutputs(region="attention", output=False),
}
"""Checkpoint policies by their name (`Settings.checkpoint_policy`)."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Regions of a block that run again in backward as one unit.

    `discards_output` also drops what the unit hands on (Megatron-LM's output-discarding checkpoint of moe_act,
    layernorm and mla_up_proj, core/tensor_parallel/random.py CheckpointWithoutOutput). `stops_early` ends the second
    run when everything that backward needs is there again. A `policy` keeps results of GEMMs, and their scattered sums;
    `prunes` leaves out of these, and of what runs again, what no gradient reads, as a compiler does. `tiles` runs the
    unit piece by piece, each again just before its own backward pass, whatever units around it run again (DeepSpeed
    runtime/sequence_parallel/ulysses_sp.py SequenceTiledCompute).
    """

    regions: tuple[str, ...]
    discards_output: bool = False
    stops_early: bool = False
    policy: KeptOutputs | None = None
    prunes: bool = False
    tiles: bool = False

    def holds(self, path: str) -> bool:
        """Return whether a path lies in the unit."""
        return any(within(path, region) for region in self.regions)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensors(Generic[X]):
    """Tensors of one block: `kept` through the forward pass.

    `dropped` ones exist again while backward works on the block.
    """

    kept: tuple[Tensor[X], ...]
    dropped: tuple[Tensor[X], ...]


def keep(ops: Iterable[Op[X]], units: tuple[Checkpoint, ...] = ()) -> SavedTensors[X]:
    """Return the distinct tensors that a block keeps, and those that recompute drops.

    An operator outside every unit keeps what it saves. One inside keeps what it saves or reads from outside its unit,
    and drops what is born within (torch.utils.checkpoint), but for results that the unit's policy keeps. A tensor has
    one name and is counted once.
    """
    ops = tuple(ops)
    kept: dict[str, Tensor[X]] = {}
    dropped: dict[str, Tensor[X]] = {}
    for op in ops:
        unit = next((u for u in units if u.holds(op.region)), None)
        saved = {tensor.name for tensor in op.saves}
        for tensor in (*op.saves, *(op.reads if unit else ())):
            if tensor.fleeting or tensor.remade:
                if tensor.remade and unit:
                    dropped[tensor.name] = tensor
                continue
            made = [region for region in (tensor.born, tensor.made_in) if region]
            makers = [u for u in units if any(map(u.holds, made))]
            recomputed = bool(makers) and (unit in makers or makers[0].discards_output)
            if recomputed and tensor.name not in saved:
                # Made again on the way, and read by no gradient.
                continue
            stays = unit is not None and unit.policy is not None and unit.policy.attention
            recomputed = recomputed and not (stays and op.kind == "attention" and tensor.born == op.region)
            (dropped if recomputed else kept)[tensor.name] = tensor
    for unit in units:
        if unit.policy:
            results = _results(_inside(ops, unit), unit.policy, unit.prunes)
            kept |= {tensor.name: tensor for tensor in results}
    return SavedTensors(kept=tuple(kept.values()), dropped=tuple(t for n, t in dropped.items() if n not in kept))


def _inside(ops: Iterable[Op[X]], unit: Checkpoint) -> list[Op[X]]:
    return [op for op in ops if unit.holds(op.region)]


def _chosen(inside: list[Op[X]], policy: KeptOutputs) -> list[tuple[Op[X], X | float]]:
    """Return the GEMMs of a unit that a policy chooses from, and which share of the result of each is kept.

    Joint GEMMs count as the separate ones that they stand for.
    """
    chosen: list[tuple[Op[X], X | float]] = []
    place = 0
    for op in filter(policy.chooses, inside):
        parts = op.parts or (op.columns,)
        ours = total((n for i, n in enumerate(parts, start=place) if i % policy.every == 0), 0 * op.columns)
        chosen.append((op, ours / total(parts, 0 * op.columns)))
        place += len(parts)
    return chosen


def _scatters(op: Op[Any]) -> bool:
    return any(one.verb == "reduce_scatter" for one in op.forward)


def _ahead_of_sums(inside: list[Op[X]], policy: KeptOutputs) -> Iterator[Op[X]]:
    """Yield what works in place between a GEMM and the sum over ranks that a policy keeps: no gradient reads it."""
    for op, after in pairwise(inside):
        if after.makes == () and _scatters(op) and (policy.partial or policy.chooses(op)):
            yield after


def _results(inside: list[Op[X]], policy: KeptOutputs, prunes: bool) -> list[Tensor[X]]:
    """Return the results that a policy keeps of a unit; the last one enters a sum, whose gradient reads nothing."""
    chosen = _chosen(inside, policy)
    products = [op for op in inside if op.kind == "matmul" and op.weights]
    last = products[-1] if prunes and products and products[-1].region == inside[-1].region else None
    entry = next((t for op in inside for t in (*op.saves, *op.reads) if not t.born), None)
    made: list[Tensor[X]] = [
        Tensor(name=f"{op.name}.result", size_bytes=0 * op.columns + share * op.output_bytes, born=op.region)
        for op, share in chosen
        if op is not last and (policy.partial or not _scatters(op))
    ]
    if entry is None:
        return made
    summed = (op for op in inside if op is not last and _scatters(op) and (policy.partial or policy.chooses(op)))
    return [*made, *(Tensor(name=f"{op.name}.sum", size_bytes=entry.size_bytes, born=op.region) for op in summed)]


def recomputed_shares(ops: Iterable[Op[X]], units: tuple[Checkpoint, ...]) -> dict[int, X | float]:
    """Return which share of each operator backward runs again, by identity; others are left out."""
    ops = tuple(ops)
    shares: dict[int, X | float] = {id(op): 1.0 for op in recomputed_ops(ops, tuple(u for u in units if not u.tiles))}
    for unit in units:
        if unit.tiles:
            shares |= {id(op): shares.get(id(op), 0.0) + 1.0 for op in _inside(ops, unit)}
        if unit.policy:
            inside = _inside(ops, unit)
            kept: dict[int, X | float] = {id(op): share for op, share in _chosen(inside, unit.policy)}
            kept |= {id(op): 1.0 for op in inside if unit.policy.attention and op.kind == "attention"}
            if unit.prunes:
                kept |= {id(op): 1.0 for op in _ahead_of_sums(inside, unit.policy)}
            shares = {key: 1 - kept.get(key, 0.0) for key in shares}
    return shares


def recomputed_ops(ops: Iterable[Op[X]], units: tuple[Checkpoint, ...]) -> tuple[Op[X], ...]:
    """Return the operators that backward runs again, in their order.

    torch.utils.checkpoint without reentrance stops at the last tensor that is saved (set_checkpoint_early_stop, since
    PyTorch 2.1). A GEMM saves its inputs before it runs, so that the last GEMM of a unit and what follows it are
    not run again; reentrant checkpoints run everything.
    """
    ops = tuple(ops)
    recomputed: set[int] = set()
    for unit in units:
        inside = _inside(ops, unit)
        again = _until_saved(inside) if unit.stops_early else inside
        recomputed.update(id(op) for op in (_read(inside, again) if unit.prunes else again))
    return tuple(op for op in ops if id(op) in recomputed)


def _read(inside: list[Op[X]], again: list[Op[X]]) -> list[Op[X]]:
    """Return those of the operators that run again whose results some gradient reads.

    The last GEMM of a unit enters a sum: where it is frozen and adapters stand beside it, only these are read.
    """
    own = [op for op in inside if op.kind == "matmul" and op.weights and not any(w.adapter for w in op.weights)]
    after = inside[inside.index(own[-1]) :] if own else []
    only_matmuls = after and not own[-1].saves and all(op.kind == "matmul" for op in after if op.saves)
    return [op for op in again if not only_matmuls or op is not own[-1]]


def _until_saved(ops: list[Op[X]]) -> list[Op[X]]:
    """Return the operators of a unit up to the one that saves last, without it where it is a GEMM."""
    last = max((i for i, op in enumerate(ops) if op.saves), default=-1)
    return ops[:last] if ops[last : last + 1] and ops[last].kind in ("matmul", "grouped") else ops[: last + 1]


def tensor_bytes(tensors: Iterable[Tensor[X]], zero: X | float = 0) -> X:
    """Return the bytes of distinct tensors."""
    return total((t.size_bytes for t in tensors), zero)
