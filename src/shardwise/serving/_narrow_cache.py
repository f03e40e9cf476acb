"""Attention kernels that engines run for a case: those measured, others over caches of fewer than 16 bits."""

from __future__ import annotations

import re

from shardwise.cost import family_of, kernel_costs
from shardwise.hardware import Device
from shardwise.models import CoreSizes, Model
from shardwise.records import replace
from shardwise.serving._case import ServingCase
from shardwise.serving._engine import Engine
from shardwise.serving._kernels import AttentionKernels, SizedKernel, attention_kernels, core_sizes

UNSHARED = 1000  # larger than any group of query heads


def lone_heads(case: ServingCase) -> ServingCase:
    """Return the case with the engine's kernel for its cache: one that shares nothing, for narrow or windowed ones."""
    mixers = {mixer for block in case.model.kinds for mixer in block.mixers}
    windowed = case.engine.attention.unshared_with_window and any(mixer.whole_context() != mixer for mixer in mixers)
    if not windowed and not (case.engine.attention.unshared_with_narrow_cache and case.cache_element_bytes < 2):
        return case
    attention = replace(case.engine.attention, shared_query_heads=UNSHARED)
    return replace(case, engine=replace(case.engine, attention=attention))


def attention_of(case: ServingCase) -> AttentionKernels | None:
    """Return the engine's attention kernels for the model, None where efficiencies are imposed or none was measured."""
    wanted = case.efficiencies
    if wanted.ideal or wanted.compute or wanted.memory:
        return None
    device, engine = case.cluster.device, case.engine
    widths = (case.activation_bytes, case.cache_element_bytes)
    older = engine.attention.decode_family(family_of(device))
    kernels = attention_kernels(device, engine.kernels, case.model, widths, engine.attention.mla_kernels, older)
    if kernels and engine.attention.heads_apart:
        return kernels.with_heads_apart()
    return kernels and with_narrow_cache(kernels, device, engine, case.model, case.format.base)


def with_narrow_cache(
    kernels: AttentionKernels, device: Device, engine: Engine, model: Model, weights: str
) -> AttentionKernels:
    """Return the kernels that an engine runs over its cache beside a format of weights, where the cache is narrow."""
    if kernels.cache_width >= 2:
        return kernels
    if re.fullmatch(engine.attention.narrow_prompts, weights):
        kernels = _in_8_bits(kernels, device, engine, model)
    return _read_as_wide(kernels, device, engine)


def _in_8_bits(kernels: AttentionKernels, device: Device, engine: Engine, model: Model) -> AttentionKernels:
    """Return the kernels with those of prompts whose queries have 8 bits too, where these were measured."""

    def narrowed(kernel: SizedKernel, core: CoreSizes) -> SizedKernel:
        # Costs of latent attention are shares of the peak of 16 bits in either type.
        costs = core.kind == "prefill" and kernel_costs(device, core.kind, (engine.kernels, "fp8"), core.head, False)
        return replace(kernel, costs=costs, peak=peak) if costs and peak > 1 else kernel

    peak = device.peak_flops("fp8") / device.peak_flops("bf16") if "fp8" in device.matrix_flops else 0.0
    prompt = tuple(map(narrowed, kernels.prompt, core_sizes(model, False)))
    return replace(kernels, prompt=prompt)


def _read_as_wide(kernels: AttentionKernels, device: Device, engine: Engine) -> AttentionKernels:
    """Return the kernels of a release that reads 8-bit caches of large groups no faster than 16-bit ones."""
    attention, family = engine.attention, family_of(device)
    late = dict(attention.narrow_query_seconds).get(family, 0.0)
    shares = dict(attention.narrow_as_wide).get(family)

    def slower(kernel: SizedKernel) -> SizedKernel:
        wide = kernel_costs(device, "decode", (engine.kernels, "bf16"), kernel.dims / 2, False)
        if wide is None or kernel.cached != kernel.dims:
            return kernel
        kernel = replace(kernel, late=late)
        narrow = shares is None or kernel.group < shares
        return kernel if narrow else replace(kernel, costs=wide, widened=2 / kernels.cache_width)

    if kernels.cache_width >= 2 or not (late or shares):
        return kernels
    return replace(kernels, decode=tuple(map(slower, kernels.decode)))
