"""Attention over the latents that an indexer picks (DeepSeek-V3.2), in kernels that pad heads and walk every pick."""

from __future__ import annotations

import re

from shardwise.cost import family_of
from shardwise.ledger.number import X, above, ceil, maximum
from shardwise.ledger.op import Op
from shardwise.models import Model
from shardwise.records import dataclass, replace
from shardwise.serving._case import ServingCase
from shardwise.serving._engine import Engine, engine_tables


@dataclass(frozen=True, kw_only=True, slots=True)
class PickedKernel:
    """A kernel of sparse attention over latents: heads of queries are padded to a multiple of `heads`.

    `cores` walk the picks of a query and so many heads one after another (0: all cores of the device share them), at
    `share` of the peak of 16 bits; a head takes `head_flops` for all picks, those beyond the context among them.
    Prompts of more than `prompts_above` keys run in it too (below 0: none).
    """

    heads: float
    cores: float
    share: float
    head_flops: float
    prompts_above: float


def picked_kernel(case: ServingCase) -> PickedKernel | None:
    """Return the kernel of picked latents that an engine runs for a model on a device, None where it runs others."""
    wanted, engine, family = case.efficiencies, case.engine, family_of(case.cluster.device)
    if wanted.ideal or wanted.compute or wanted.memory:
        return None
    width = "narrow" if case.cache_element_bytes < 2 else "wide"
    name = next((k for families, w, k in engine.attention.picked if w == width and re.fullmatch(families, family)), "")
    elements, picks = _picked_latents(case.model)
    if not picks or not name:
        return None
    row = engine_tables()["picked_latents"][name]
    return PickedKernel(
        heads=float(row["heads"][family]),
        cores=float(row["cores"][family]),
        share=float(row["share"][family]),
        head_flops=2.0 * picks * elements,
        prompts_above=float(engine.attention.picked_prompts_above),
    )


def _picked_latents(model: Model) -> tuple[int, int]:
    """Return elements of key and value of a latent, and how many an indexer picks; 0 where a model has no such."""
    every = ((mixer.core(True), mixer.cost_breakpoints()) for block in model.kinds for mixer in block.mixers)
    latents = ((core, most) for core, most in every if core and core.kind == "latent_decode" and most)
    return next(((core.elements, max(most)) for core, most in latents), (0, 0))


def with_indexer(case: ServingCase) -> Engine:
    """Return the engine of a case; what an indexer runs beside its scores was counted for latents alone."""
    engine = case.engine
    if _picked_latents(case.model)[1]:
        return engine
    return replace(engine, attention=replace(engine.attention, indexer_kernels=0, pick_key_seconds=0.0))


def picked_seconds(kernel: PickedKernel, chip: tuple[X, float], start: X, op: Op[X]) -> X:
    """Return seconds of attention over what is picked: `chip` is the peak of the device and its cores."""
    peak, cores = chip
    tiles = op.rows * ceil(op.batch / kernel.heads)
    each = kernel.heads * kernel.head_flops / (kernel.share * peak)
    if not kernel.cores:
        return tiles * each + start
    waves = ceil(tiles * kernel.cores / cores)
    return waves * each * cores / kernel.cores + start


def with_picked(
    kernel: PickedKernel | None, engine: Engine, chip: tuple[X, float, X], decoding: bool, op: Op[X], seconds: X
) -> X:
    """Return seconds of attention or of its indexer, beside the choice of what attention reads.

    `chip` are the peak of the device, its cores and the seconds of a small kernel.
    """
    peak, cores, small = chip
    if op.role == "indexer":
        each = engine.attention.pick_key_seconds * op.columns * ceil(op.rows / cores) if decoding else 0 * seconds
        return seconds + engine.attention.indexer_kernels * small + each
    if kernel is None:
        return seconds
    walked = picked_seconds(kernel, (peak, cores), small, op)
    if decoding:
        return maximum(seconds, walked)
    return above(op.columns, kernel.prompts_above, walked, seconds) if kernel.prompts_above >= 0 else seconds
