"""Precision recipes and optimizers: how many bytes each trainable parameter costs, by what they are kept for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardwise.errors import InputError, Problem

OptimizerName: TypeAlias = Literal["adam", "adam8bit", "lion", "muon", "sgd"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Bytes per element of each copy of a parameter; names follow what frameworks call the recipe.

    `compute` is the data type of matrix products and `activation_bytes` that of what is saved for backward.
    `master_bytes` is 0 when the stored weight is what the optimizer updates. `state_bytes` is one optimizer moment.
    Source: Megatron-LM optimizer docs (18 bytes for bf16 with fp32 gradients), arXiv:1910.02054 section 3.1 (16
    bytes).
    """

    name: str
    compute: str
    weight_bytes: int
    activation_bytes: int
    gradient_bytes: int
    master_bytes: int
    state_bytes: int
    stored_bytes: int = 0


def _recipes() -> dict[str, Precision]:
    rows = (
        # name, compute, weight, activation, gradient, master, state
        ("bf16", "bf16", 2, 2, 4, 4, 4),
        ("bf16-grads16", "bf16", 2, 2, 2, 4, 4),
        ("fp16", "fp16", 2, 2, 4, 4, 4),
        ("fp16-grads16", "fp16", 2, 2, 2, 4, 4),
        ("fp32", "fp32", 4, 4, 4, 0, 4),
        ("tf32", "tf32", 4, 4, 4, 0, 4),
        ("bf16-pure", "bf16", 2, 2, 2, 0, 2),
        ("fp8", "fp8", 2, 2, 4, 4, 4),
        ("amp-bf16", "bf16", 4, 2, 4, 0, 4),
    )
    return {
        n: Precision(
            name=n, compute=c, weight_bytes=w, activation_bytes=a, gradient_bytes=g, master_bytes=m, state_bytes=s
        )
        for n, c, w, a, g, m, s in rows
    }


PRECISIONS: dict[str, Precision] = _recipes()


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """How many moments an optimizer keeps per parameter, and how wide; `vector_moments` where it treats matrices apart.

    A `moment_bytes` of 0 takes the recipe's state width. Sources: Adam arXiv:1412.6980, Lion arXiv:2302.06675 (one
    moment), 8-bit Adam arXiv:2110.02861 (one byte a moment, one fp32 scale per 256 elements), Muon (one momentum for
    matrices; embeddings, head, norms and biases use Adam; github.com/KellerJordan/Muon).
    """

    name: OptimizerName
    matrix_moments: int
    vector_moments: int
    moment_bytes: float = 0.0


OPTIMIZERS: dict[str, Optimizer] = {
    "adam": Optimizer(name="adam", matrix_moments=2, vector_moments=2),
    "adam8bit": Optimizer(name="adam8bit", matrix_moments=2, vector_moments=2, moment_bytes=1 + 4 / 256),
    "lion": Optimizer(name="lion", matrix_moments=1, vector_moments=1),
    "muon": Optimizer(name="muon", matrix_moments=1, vector_moments=2),
    "sgd": Optimizer(name="sgd", matrix_moments=1, vector_moments=1),
}


def find_precision(name: str) -> Precision:
    """Return the named precision recipe; raises `InputError` naming the known ones.

    >>> find_precision("bf16").gradient_bytes
    4
    """
    if name not in PRECISIONS:
        raise InputError([Problem("precision", name, "is not a known recipe", "use one of " + ", ".join(PRECISIONS))])
    return PRECISIONS[name]


def find_optimizer(name: str) -> Optimizer:
    """Return the named optimizer; raises `InputError` naming the known ones.

    >>> find_optimizer("lion").matrix_moments
    1
    """
    if name not in OPTIMIZERS:
        raise InputError(
            [Problem("optimizer", name, "is not a known optimizer", "use one of " + ", ".join(OPTIMIZERS))]
        )
    return OPTIMIZERS[name]
