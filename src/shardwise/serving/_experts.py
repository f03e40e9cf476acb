"""Which measured kernel runs the experts of a model: by the engine, the family of devices and what is multiplied."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from shardwise.cost import (
    Datasheet,
    ExpertsFit,
    constants,
    experts_seconds,
    mapped_seconds,
    others_seconds,
    routed_tiles,
)
from shardwise.hardware import Device
from shardwise.ledger.number import X, above, maximum, minimum
from shardwise.ledger.op import Op
from shardwise.models import Model
from shardwise.records import replace
from shardwise.serving._engine import Engine, EngineOperators, engine_tables

_Experts: TypeAlias = Mapping[str, Mapping[str, ExpertsFit]]
_NARROW = {
    "fp8": ("fp8", "fp8_block"),
    "fp8-block": ("fp8_block", "fp8"),
    "int8": ("fp8", "fp8_block"),
    "fp4": ("nvfp4", "w4a8_mxfp4_mxfp8", "fp8"),
}
# Kernels that widen a format's weights themselves, where an engine was measured with them: beside 8-bit inputs, and
# Marlin and its like beside 16-bit ones; [[experts]] of engines.toml has those of other engines.
_WIDENED = {"mxfp4": "w4a8_mxfp4_mxfp8", "int4": "int4_wo"}
# Rows that tokens of an expert are padded to at most in a fit (accuracy/calibration/experts.py, _TOPS). A kernel whose
# fit ends there is not described by the form, and so slow that engines choose others.
_PADS_MOST = 200.0


def _expert_row(table: _Experts, types: tuple[str, ...]) -> ExpertsFit:
    """Return the row of the kernel with the most measurements of the first type with one that the form describes.

    >>> experts = constants().families["hopper"].experts["vllm"]
    >>> _expert_row(experts, ("fp8", "fp8_block")) in experts["fp8_block"].values()
    True
    """
    fits: list[ExpertsFit] = []
    for by_kernel in (*(table[t] for t in types if t in table), table["bf16"]):
        plain = {name: row for name, row in by_kernel.items() if not name.endswith(("nongated", "min_latency"))}
        fits = fits or [row for row in plain.values() if row.pad_rows < _PADS_MOST]
    return max(fits, key=lambda row: row.rows)


def _stated(products: str, family: str, engine: Engine, model: str, unspread: bool = False) -> Mapping[str, Any] | None:
    """Return the entry of the kernel that an engine runs for a family of models, None where none is stated.

    `unspread` asks for that of experts which are not spread over ranks. An entry of some releases names all of them.

    >>> from shardwise.serving import find_engine
    >>> _stated("bf16", "blackwell", find_engine("sglang"), "qwen3_moe") is None
    True
    """
    rows = cast(Sequence[Mapping[str, Any]], engine_tables().get("experts", ()))
    own, chooses = (engine.kernels, family, products), engine.operators
    for one in rows:
        fits = own == (one["engine"], one["family"], one["weights"])
        asked = one.get("option", "") == chooses.experts_kernel
        asked &= chooses.experts_release in one.get("releases", (chooses.experts_release,))
        asked &= one.get("unspread", False) == unspread
        if fits and asked and re.fullmatch(one.get("models", ".*"), model):
            return one
    return None


def called_seconds(products: str, family: str, engine: Engine, model: str) -> float:
    """Return seconds of Python in which a layer's experts are called beyond what as many other kernels take.

    >>> from shardwise.serving import find_engine
    >>> [called_seconds("mxfp4", family, find_engine("sglang"), "gpt_oss") > 0 for family in ("hopper", "blackwell")]
    [True, False]
    """
    stated = _stated(products, family, engine, model)
    rows: Sequence[Mapping[str, Any]] = engine_tables()["hosts"]["experts"]
    return next((float(row["seconds"]) for row in rows if stated and stated["kernel"] == row["kernel"]), 0.0)


def _row_of(stated: Mapping[str, Any], family: str) -> ExpertsFit:
    """Return the row of an entry."""
    row: ExpertsFit = constants().families[family].experts[stated["measured_in"]][stated["type"]][stated["kernel"]]
    return row


def wide_row(experts: _Experts, products: str, family: str, engine: Engine, model: str) -> tuple[str, ExpertsFit]:
    """Return the type and the row of experts in 16 bits, or in the narrower type that widens a format's weights."""
    kind = _WIDENED.get(products, "bf16")
    usual = (kind if kind in experts else "bf16"), _expert_row(experts, (kind, "bf16"))
    stated = None if products in _NARROW else _stated(products, family, engine, model)
    return (stated["type"], _row_of(stated, family)) if stated else usual


def narrow_row(experts: _Experts, products: str, family: str, engine: Engine, model: str) -> ExpertsFit:
    """Return the row of experts whose weights and inputs are narrow."""
    stated = _stated(products, family, engine, model) if products in _NARROW else None
    return _row_of(stated, family) if stated else _expert_row(experts, _NARROW.get(products, ("bf16",)))


def unspread_row(products: str, family: str, engine: Engine, model: str) -> tuple[ExpertsFit, float] | None:
    """Return the row of narrow experts that are not spread over ranks, and ranks that split each from which it counts.

    None where it is that of all others.

    >>> from shardwise.serving import find_engine
    >>> families = "hopper", "blackwell"
    >>> [unspread_row("fp8-block", one, find_engine("vllm"), "glm4_moe") is None for one in families]
    [False, True]
    """
    stated = _stated(products, family, engine, model, True) if products in _NARROW else None
    return (_row_of(stated, family), float(stated.get("split_ranks", 1))) if stated else None


def on_device(row: ExpertsFit, device: Device, family: str) -> ExpertsFit:
    """Return a row where matrix units are slower beside all else that a core does than where it was measured.

    What a kernel takes beyond its arithmetic, as loads and addresses, takes as long on any core of a family, so that a
    core with slower matrix units reaches more of their peak. Checked on other kernels of H20: 0.87 of the peak where
    cuBLAS reaches 0.955, 0.86 where FlashAttention-3 reaches 0.81 to 0.85, 0.67 where FlashAttention-2 reaches 0.56.

    >>> from shardwise.hardware import find_device
    >>> row = constants().families["hopper"].experts["sglang"]["bf16"]["sglang_fused_moe_triton"]
    >>> [round(on_device(row, find_device(name).device, "hopper").compute, 2) for name in ("h100", "h20")]
    [0.27, 0.61]
    """
    slower = constants().families[family]
    rate, best = slower.matrix_rate_by_device.get(device.chip, 1.0), slower.matrix_best_share
    return replace(row, compute=1 / (1 / best + (1 / row.compute - 1 / best) * rate)) if rate < 1 else row


def torch_choices(chooses: EngineOperators, family: str, products: str, model: Model) -> tuple[bool, bool]:
    """Return whether kernels of PyTorch choose the experts of a model where no ranks share them out, and where some do.

    >>> from shardwise.models import load_model
    >>> from shardwise.serving import find_engine
    >>> old = find_engine("sglang-0.5.15").operators
    >>> [torch_choices(old, "hopper", "bf16", load_model(name)) for name in ("glm-4.6", "qwen3-30b-a3b")]
    [(True, False), (False, False)]
    """
    words = f"{family} {products} {model.family} {model.most_experts}"
    alone, spread = (re.fullmatch(one, words) is not None for one in chooses.torch_choices)
    return alone, spread


def with_choice(chosen: tuple[bool, bool], groups: Mapping[str, tuple[X, ...]], op: Op[X], seconds: X) -> X:
    """Return seconds of an operator, beside the choice of experts where kernels of PyTorch make it behind a router.

    Ranks that split attention have all tokens, each of which the ledger routes once.
    """
    if op.role != "router" or not any(chosen):
        return seconds
    costs, ranks = engine_tables()["torch_choices"], groups["ep"][-1]
    longer: X = seconds + costs["kernel_seconds"] + costs["token_seconds"] * (op.rows * groups["tp"][-1])
    alone, spread = (longer if one else seconds for one in chosen)
    return above(ranks, 1, spread, alone)


def fused_seconds(row: ExpertsFit, chip: Datasheet[X], op: Op[X], ranks: tuple[X, X], choices: float) -> X:
    """Return seconds of one GEMM in a kernel of all experts.

    `ranks` have experts of their own, and split attention; a token is of so many `choices`.
    """
    spread, split = ranks
    hit, experts = op.batch + 0 * op.rows, op.weights[0].shape[0] + 0 * op.rows
    shape = (op.rows * hit, experts, hit, op.columns, op.inner)
    tokens = op.rows * hit * spread / maximum(choices, 1.0)
    tiles = routed_tiles(row, tokens, op.rows * hit, hit)
    seconds = experts_seconds(row, chip, op.forward_bytes, shape, tiles) + mapped_seconds(row, spread) / 2
    if op.role != "up":
        return seconds
    # Ranks that split attention have all tokens, and choices of the experts of others beside their own.
    shared = minimum(split, spread)
    return seconds + others_seconds(row, chip, op.rows * hit * (shared - 1), op.columns + op.inner)


def most_choices(model: Model) -> float:
    """Return how many experts a token of a model passes at most, 0 where it has none."""
    return float(max((moe.top_k for moe in model.moes), default=0))
