"""FLOPs of a model by component, and the published conventions for FLOPs of training.

Letters: B sequences, S tokens a sequence, L layers, N heads, H head dim, P parameters, P_m those of matrix products:
all but the input embedding, norms and biases, the head included, chosen experts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwise.errors import InputError, Problem
from shardwise.ledger.op import Op, within
from shardwise.models import Model
from shardwise.ops.core import CORE
from shardwise.ops.count import Coverage, Line, active_parameters, component, lines, whole_layout
from shardwise.records import dataclass

RECOMPUTED: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": (CORE,),
    "attention": ("attention",),
    "norm-attention-norm": ("norm1", "attention", "norm2"),
    "full": ("",),
}
"""Regions of a block that each recompute mode runs again in backward (the modes of `Plan.recompute`)."""


def _runs(model: Model, batch: int, seq_len: int, coverage: Coverage) -> Iterator[tuple[Line, Op[float]]]:
    for line in lines(model, whole_layout(batch, seq_len, coverage)):
        for op in line.ops:
            yield line, op


def _component(line: Line, op: Op[float]) -> str:
    name = component(line.part, op)
    return "attention_core" if name == "attention" and within(op.region, CORE) else name


def count_flops(model: Model, batch: int, seq_len: int, coverage: Coverage = "full") -> dict[str, float]:
    """Return the forward FLOPs of each component for `batch` sequences of `seq_len` tokens, prediction layers apart.

    Matrix products, attention and recurrences, 2 a multiply-add. Coverage "full" counts attention over the whole
    square, "masked" over what masks leave. Equal to PyTorch's FLOP counter for every run of tests/data/ops/flops.json.

    >>> sum(count_flops(Model.load("gpt2"), 1, 1024).values())
    291648307200
    """
    found: dict[str, float] = {}
    for line, op in _runs(model, batch, seq_len, coverage):
        if line.part != "mtp" and op.flops:
            name = _component(line, op)
            found[name] = found.get(name, 0) + op.flops * line.times
    return found


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """Forward model FLOPs of one sequence: of matrix products and recurrences, and of attention by coverage.

    `causal` is half the square where a mask is causal, `masked` exactly what masks leave.
    """

    linear: float
    full: float
    causal: float
    masked: float


def forward_flops(model: Model, seq_len: int, regions: tuple[str, ...] | None = None) -> ForwardFlops:
    """Return the forward model FLOPs of one sequence, prediction layers and their logits included.

    `regions` keeps only what a recompute mode would run again: operators of blocks in those regions.

    >>> forward_flops(Model.load("gpt2"), 1024).full
    38654705664.0
    """
    linear = full = causal = masked = 0.0
    pairs = zip(_runs(model, 1, seq_len, "full"), _runs(model, 1, seq_len, "masked"), strict=True)
    for (line, op), (_, under_mask) in pairs:
        if regions is not None and not (line.block and any(within(op.region, r) for r in regions)):
            continue
        if op.kind != "attention":
            linear += op.model_flops * line.times
            continue
        whole, left = op.model_flops * line.times, under_mask.model_flops * line.times
        full, masked = full + whole, masked + left
        causal += whole if left == whole else whole / 2
    return ForwardFlops(linear, full, causal, masked)


def _six_n(model: Model, f: ForwardFlops) -> float:
    return 6.0 * active_parameters(model)


def _model_full(model: Model, f: ForwardFlops) -> float:
    return 3 * (f.linear + f.full)


def _model_causal(model: Model, f: ForwardFlops) -> float:
    return 3 * (f.linear + f.causal)


def _model_masked(model: Model, f: ForwardFlops) -> float:
    return 3 * (f.linear + f.masked)


def _lora(model: Model, f: ForwardFlops) -> float:
    return 2 * f.linear


@dataclass(frozen=True, slots=True)
class Convention:
    """A published way to count the FLOPs of training: what it counts and who uses it."""

    counts: str
    source: str
    of: Callable[[Model, ForwardFlops], float]
    per_sequence: bool = True


CONVENTIONS: dict[str, Convention] = {
    "6n": Convention(
        "6 a parameter that a token meets, no attention", "arXiv:2001.08361 table 1", _six_n, per_sequence=False
    ),
    "model-full": Convention(
        "6 P_m + 12 L N H S: attention over the whole square", "PaLM, arXiv:2204.02311 appendix B", _model_full
    ),
    "model-causal": Convention(
        "6 P_m + 6 L N H S: attention over half the square",
        "Megatron-LM megatron/training/training.py num_floating_point_operations, 2026-08",
        _model_causal,
    ),
    "model-masked": Convention(
        "attention over exactly what causal, window and chunk masks leave",
        "arXiv:2307.08691 section 4.1",
        _model_masked,
    ),
    "lora": Convention(
        "4 P_m: no weight gradients of frozen matrices, no attention",
        "NVIDIA NeMo and Megatron-Bridge performance tables of LoRA, 2026-08",
        _lora,
    ),
}
"""Conventions by name; each is per token, and a recomputed forward pass may be added to any of them."""


def train_flops(model: Model, seq_len: int, convention: str = "model-full", recompute: str = "none") -> float:
    """Return FLOPs a token of training by a published convention, with the forward passes that recompute adds.

    "model-full" with recompute "full" is the hardware FLOPs of Megatron-LM (arXiv:2104.04473 section 3.4).

    >>> round(train_flops(Model.load("llama-3-8b"), 8192) / 1e9, 1)
    57.9
    >>> round(train_flops(Model.load("llama-3-8b"), 8192, "model-causal") / 1e9, 1)
    51.5
    """
    _check(convention, recompute)
    rule = CONVENTIONS[convention]
    if not rule.per_sequence:
        return rule.of(model, forward_flops(model, 1, ()))
    total = rule.of(model, forward_flops(model, seq_len))
    if recompute != "none":
        # A convention takes so many forward passes: one more of what runs again, attention counted its way.
        again = forward_flops(model, seq_len, RECOMPUTED[recompute])
        total += rule.of(model, again) / (2 if convention == "lora" else 3)
    return total / seq_len


def _check(convention: str, recompute: str) -> None:
    problems = []
    for field, value, known in (("convention", convention, CONVENTIONS), ("recompute", recompute, RECOMPUTED)):
        if value not in known:
            problems.append(Problem(field, value, "is unknown", "use one of " + ", ".join(known)))
    if problems:
        raise InputError(problems)
