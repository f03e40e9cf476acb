"""The attention kernels that an engine runs for a case."""

from __future__ import annotations

from shardwise.cost import family_of
from shardwise.records import replace
from shardwise.serving._case import ServingCase
from shardwise.serving._kernels import AttentionKernels, attention_kernels
from shardwise.serving._narrow_cache import with_narrow_cache

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
