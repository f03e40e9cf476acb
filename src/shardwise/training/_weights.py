"""Parameters of a block by class, and what of its weights is frozen, stored in few bits or padded by shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Generic, cast

from shardwise.ledger.number import X, divide, is_plain, largest, maximum, minimum, total
from shardwise.ledger.op import Op
from shardwise.ledger.traced import named
from shardwise.ops.core import CORE
from shardwise.ops.narrow import is_narrow
from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts(Generic[X]):
    """Parameters on one rank by how they are sharded and updated, and of how many tensors they are.

    `matrix` are those that Muon treats apart, `work` the FLOPs of orthogonalising them.
    """

    dense_matrix: X
    dense_other: X
    expert_matrix: X
    expert_other: X
    dense_work: X
    expert_work: X
    largest: X
    tensors: int
    dense_states: X
    """Bytes of optimizer state beyond those that grow with the elements, which single tensors decide."""
    expert_states: X
    dense_pages: X
    """Bytes of optimizer state in paged memory."""
    expert_pages: X
    sides: dict[tuple[bool, bool], tuple[tuple[X, X, X], ...]] = field(default_factory=dict)
    """By (of experts, matrices): elements, rows and columns of its tensors on a rank, where sharding reads them."""

    @property
    def dense(self) -> X:
        """Parameters that follow the dense axes."""
        return self.dense_matrix + self.dense_other

    @property
    def expert(self) -> X:
        """Parameters that follow the expert axes."""
        return self.expert_matrix + self.expert_other


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenWeights(Generic[X]):
    """Weights that do not train, of one rank: parameters and their bytes, dense ones and those of experts.

    Of those bytes `apart_bytes` more lie beside the parameters, whatever shards these.
    """

    dense: X
    dense_bytes: X
    expert: X
    expert_bytes: X
    apart_bytes: X
    largest: X


def frozen_weights(ops: Sequence[Op[X]], zero: X) -> FrozenWeights[X] | None:
    """Return the weights of some operators that do not train; None where all do."""
    weights = [w for o in ops for w in o.weights if not w.trainable]
    if not weights:
        return None

    def own(expert: bool) -> tuple[X, X]:
        chosen = [w for w in weights if w.expert is expert]
        stored = (named(zero + w.stored_bytes - w.apart_bytes, w.name) for w in chosen)
        return total((w.elements for w in chosen), zero), total(stored, zero)

    dense, expert = own(False), own(True)
    return FrozenWeights(
        dense=dense[0],
        dense_bytes=dense[1],
        expert=expert[0],
        expert_bytes=expert[1],
        apart_bytes=total((zero + w.apart_bytes for w in weights), zero),
        largest=largest([zero, *(w.elements for w in weights)]),
    )


def elements(ops: Sequence[Op[X]], zero: X, adapter: bool = False) -> ParameterCounts[X]:
    """Return the parameters of some operators that train on one rank: the model's own, or those of adapters."""
    weights = [w for o in ops for w in o.weights if w.trainable and w.adapter is adapter]
    sums = dict.fromkeys(((expert, matrix) for expert in (False, True) for matrix in (False, True)), zero)
    for w in weights:
        of = w.expert, w.kind == "matrix"
        sums[of] = sums[of] + named(w.elements, w.name)
    return ParameterCounts(
        dense_matrix=sums[False, True],
        dense_other=sums[False, False],
        expert_matrix=sums[True, True],
        expert_other=sums[True, False],
        dense_work=newton_schulz_flops(ops, False, zero, adapter),
        expert_work=newton_schulz_flops(ops, True, zero, adapter),
        largest=largest([zero, *(w.elements for w in weights)]),
        tensors=len(weights),
        dense_states=zero,
        expert_states=zero,
        dense_pages=zero,
        expert_pages=zero,
    )


def narrow_elements(ops: Sequence[Op[X]], zero: X) -> X:
    """Return the elements of the matrices of GEMMs of fewer than 16 bits, on one rank, that are stored in more."""
    wide = (w for o in ops if is_narrow(o) for w in o.weights if w.kind == "matrix" and not (w.adapter or w.packed))
    return total((w.elements for w in wide), zero)


def tensor_sides(ops: Sequence[Op[X]]) -> dict[tuple[bool, bool], tuple[tuple[X, X, X], ...]]:
    """Return (elements, rows, columns) of the tensors by (of experts, matrices); joint GEMMs are of several."""
    sides: dict[tuple[bool, bool], list[tuple[X, X, X]]] = {}
    for op in ops:
        for w in op.weights:
            if not w.trainable or w.adapter or is_plain(w.elements, 0):
                continue
            rows: X = cast(X, w.shape[0]) if w.shape else w.elements
            columns: X = cast(X, w.shape[1]) if len(w.shape) > 1 else rows
            of = w.expert, w.kind == "matrix"
            joint = op.parts if len(op.parts) > 1 and not w.expert and w.kind in ("matrix", "vector") else (rows,)
            whole = total(joint, 0 * rows)
            sides.setdefault(of, []).extend((divide(w.elements * part, whole), part, columns) for part in joint)
    return {of: tuple(some) for of, some in sides.items()}


def newton_schulz_flops(ops: Sequence[Op[X]], expert: bool, zero: X, adapter: bool = False) -> X:
    """Return FLOPs of five Newton-Schulz steps on the matrices of some operators: 20 r + 10 r^2 / c an element.

    r and c are the smaller and the larger side of a matrix as it lies on a rank (github.com/KellerJordan/Muon).
    """
    flops = zero
    for op in ops:
        if op.kind not in ("matmul", "grouped"):
            continue
        own = [w for w in op.weights if w.kind == "matrix" and w.expert is expert]
        matrices = [w for w in own if w.trainable and w.adapter is adapter]
        if matrices:
            small, large = minimum(op.columns, op.inner), maximum(op.columns, op.inner)
            flops = flops + total((w.elements for w in matrices), zero) * (20 * small + 10 * small * small / large)
    return flops


def gradient_shapes(ops: Sequence[Op[X]]) -> dict[str, X]:
    """Return the elements of the gradient of one weight of each GEMM, by operator; of one expert where grouped.

    The router is no linear module (Megatron-LM core/transformer/moe/router.py), and a frozen weight has no gradient.
    """
    return {
        op.name: op.columns * op.inner
        for op in ops
        if op.kind in ("matmul", "grouped") and op.role != "router" and op.region != CORE
        if not op.weights or any(w.trainable for w in op.weights)
    }
