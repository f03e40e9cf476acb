"""Attention kernels that engines run over caches of fewer than 16 bits, by release and format of the weights."""

from __future__ import annotations

import re

from shardwise.cost import family_of, kernel_costs
from shardwise.hardware import Device
from shardwise.models import CoreSizes, Model
from shardwise.records import replace
from shardwise.serving._engine import Engine
from shardwise.serving._kernels import AttentionKernels, SizedKernel, core_sizes


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
