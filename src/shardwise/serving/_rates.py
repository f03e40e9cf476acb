"""Rates of GEMMs as an engine's own kernels and libraries reach them, beside those of the device."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Any

from shardwise.cost import Rates, bandwidth_of, constants, family_of, gemm_rates, rates_of
from shardwise.hardware import Device
from shardwise.ledger.number import X, maximum, minimum
from shardwise.ledger.traced import leaf
from shardwise.records import replace
from shardwise.serving._case import ServingCase
from shardwise.serving._engine import Engine
from shardwise.serving._formats import WeightFormat
from shardwise.serving._kernels import steady_state_memory, watts_per_core
from shardwise.serving._replayed import replay_seconds, replayed_start

# An input of 16 bits is read and written in 8: as the tables of GEMMs count it (accuracy/kernels/products.py).
_QUANTISED_BYTES = 3.0


def engine_rates(case: ServingCase, fitted: Rates[Any]) -> dict[str, Rates[Any]]:
    """Return the rates of GEMMs by type: in 16 bits, of which `fitted` are the device's, and in those of formats."""
    device, wanted = case.cluster.device, case.efficiencies
    own = _on_vectors(_by_library(_summed(fitted, case), case), case)
    rates = {case.dtype: _on_processor(captured(own, case.engine, wanted.ideal, device), case)}
    for form in case.format.narrow:
        if (dtype := type_of(case, form)) not in rates:
            one = replace(case, compute=dtype, format=form)
            device_rates = rates_of(device, dtype, 0.0, wanted, ("", "", "forward"))
            narrow = _by_blocks(captured(device_rates, case.engine, wanted.ideal, device), one)
            rates[dtype] = _on_processor(_fused_quantisation(_by_library(narrow, one, "fp8_shares"), one), one)
    return rates


def type_of(case: ServingCase, form: WeightFormat) -> str:
    """Return the type of GEMMs of the case's format, or of one of its parts, on the device."""
    if form.name == case.format.name:
        return case.compute
    return form.compute if form.compute in case.cluster.device.matrix_flops else case.dtype


def captured(rates: Rates[X], engine: Engine, ideal: bool, device: Device) -> Rates[X]:
    """Return rates whose small kernels start as in the engine: from a captured graph, not from Python."""
    if not engine.graphs.small_kernel_seconds:
        return rates
    zero, replay = 0 * rates.memory_start, replay_seconds(device.vendor)
    small = replayed_start(engine, rates.family) or engine.graphs.small_kernel_seconds
    started = zero + (0.0 if ideal else 1.0) * max(small, replay)
    start = rates.matmul_start if ideal else maximum(rates.matmul_start, replay)
    share = steady_state_memory(device.chip) * dict(engine.operators.streams_faster).get(rates.family, 1.0)
    streamed = rates.matmul_bytes * (1.0 if ideal else share)
    return replace(
        rates, memory_start=started, launch=zero, cast_traffic=0.0, matmul_bytes=streamed, matmul_start=start
    )


def merged_operators(case: ServingCase) -> tuple[str, ...]:
    """Return the operators that start no kernel of their own in steps of an engine on its devices."""
    engine = case.engine
    replays = replayed_start(engine, family_of(case.cluster.device))
    return engine.operators.fused + (engine.graphs.merged if replays else ())


def weight_only_rates(case: ServingCase, wide: Rates[X]) -> dict[str, Rates[X]]:
    """Return the rates of 16-bit GEMMs whose kernels widen narrow weights, by format, where such were measured.

    Arithmetic is that of `wide`, or the share of the peak that an engine's kernels reach (`widened_shares`): the tables
    do not say what the power limit takes from long ones. Formats that an engine widens on devices with a rate for
    them (`widened_formats`) have these rates, too; where no such kernel was measured they are those of 16-bit weights.
    """
    device, wanted, rows = case.cluster.device, case.efficiencies, constants().families[wide.family].matmul
    if not case.engine.quantisation.weight_only_kernels:
        return {}
    rates = {}
    for form in case.format.narrow:
        row = rows.get("int8_wo" if form.bits >= 8 else "int4_wo")
        widens = case.engine.quantisation.widens(form, wide.family)
        if not widens and (form.bits >= 16 or type_of(case, form) != case.dtype):
            continue
        slower = _beside_widening(case, wide, form)
        if row:
            products = gemm_rates(device, case.dtype, row, wanted)
            own: Any = replace(wide, **{one.name: getattr(products, one.name) for one in fields(products)})
            rates[form.name] = captured(
                replace(own, matmul_flops=slower.matmul_flops), case.engine, wanted.ideal, device
            )
        elif widens or slower is not wide:
            rates[form.name] = slower
    return rates


def _beside_widening(case: ServingCase, wide: Rates[X], form: WeightFormat) -> Rates[X]:
    """Return the rates of 16-bit GEMMs, no faster than kernels that widen their weights multiply and read them."""
    device, wanted = case.cluster.device, case.efficiencies
    share = dict(case.engine.quantisation.widened_shares).get(wide.family, 0.0)
    # Of nf4 and of llama.cpp's blocks whole matrices are widened, which 16-bit GEMMs multiply.
    if not share or wanted.ideal or wanted.compute or not re.match("int|fp|mxfp|nvfp", form.base):
        return wide
    peak = device.peak_flops(case.dtype)
    if device.knows("matrix_flops.int8"):
        # GeForce's cores add in 32 bits at half of what the others do, which leaves them time to widen.
        peak = max(peak, device.peak_flops("int8") / 2)
    why = dict(case.engine.sources)["quantisation.widened_shares"]
    slower = leaf("matrix FLOP/s beside widening", share * peak, why, "FLOP/s")
    streamed = wide.matmul_bytes * dict(case.engine.quantisation.widened_streams).get(wide.family, 1.0)
    return replace(wide, matmul_flops=minimum(wide.matmul_flops, slower), matmul_bytes=streamed)


def unpacked_weights(case: ServingCase) -> float:
    """Return narrow weights a second that a device without units for integers widens, 0 where that takes no time."""
    device, own = case.cluster.device, case.engine.quantisation
    each = next((count for names, count in own.unpack_operations if re.fullmatch(names, case.format.base)), 0.0)
    each *= next((share for names, share in own.unpack_shares if re.fullmatch(names, device.chip)), 1.0)
    other = family_of(device).startswith("cpu") or "int8" in device.matrix_flops or not device.knows("vector_flops")
    return 0.0 if other or not each or case.efficiencies.ideal else device.vector_flops / (2 * each)


def scanned_flops(case: ServingCase) -> float:
    """Return FLOP/s at which recurrences of prompts run token by token, 0 where the engine runs them in chunks.

    >>> from shardwise.serving import find_engine
    >>> find_engine("vllm").operators.scan_shares, dict(find_engine("llama.cpp").operators.scan_shares)[".*"]
    ((), 0.083)
    """
    device, shares = case.cluster.device, case.engine.operators.scan_shares
    share = next((one for names, one in shares if re.fullmatch(names, family_of(device))), 0.0)
    return 0.0 if case.efficiencies.ideal or not device.knows("vector_flops") else share * device.vector_flops


def widened_elements(case: ServingCase) -> float:
    """Return cached elements a second that a device without 8-bit floats widens in a kernel, 0 if none are."""
    device, floats = case.cluster.device, case.job.kv_cache.startswith("fp8")
    if not floats or "fp8" in device.matrix_flops or case.efficiencies.ideal or not device.knows("num_cores"):
        return 0.0
    return case.engine.quantisation.fp8_cache_elements_per_core * device.num_cores


def _by_library(rates: Any, case: ServingCase, name: str = "library_shares") -> Any:
    """Return rates of GEMMs as the engine's own library reaches them on a device that it names."""
    device, shares = case.cluster.device, dict(getattr(case.engine.operators, name))
    dtype = "fp8" if name == "fp8_shares" else case.dtype
    if case.efficiencies.ideal or device.chip not in shares or (dtype == "fp8" and case.format.base != "fp8"):
        return rates
    compute, memory = shares[device.chip]
    why = dict(case.engine.sources)[f"operators.{name}"]
    flops = leaf("achievable matrix FLOP/s", compute * device.peak_flops(dtype), why)
    moved = leaf("achievable HBM bytes/s", memory * device.memory_bytes_per_second, why)
    rates = replace(rates, matmul_flops=flops, matmul_bytes=moved)
    return rates if dtype == "fp8" else _untuned(rates, case)


def _by_blocks(rates: Any, case: ServingCase) -> Any:
    """Return rates of GEMMs in 8-bit blocks as a kernel that the engine is told to run reaches them."""
    share = dict(case.engine.quantisation.block_shares).get(rates.family, 0.0)
    if case.efficiencies.ideal or not share or (case.compute, case.format.name) != ("fp8", "fp8-block"):
        return rates
    why = dict(case.engine.sources)["quantisation.block_shares"]
    flops = share * case.cluster.device.peak_flops(case.compute)
    return replace(rates, matmul_flops=leaf("achievable matrix FLOP/s", flops, why))


def _untuned(rates: Any, case: ServingCase) -> Any:
    """Return rates of a library whose kernels were not measured: its tiles are the middle of other libraries'."""
    families = constants().families
    row = replace(families["generic"].matmul["bf16"], compute=families[rates.family].matmul["bf16"].compute)
    middle = gemm_rates(case.cluster.device, case.dtype, row, case.efficiencies)
    form = ("matmul_start", "sharpness", "tiling", "ramp_seconds", "ramp_traffic", "corrections")
    return replace(rates, **{name: getattr(middle, name) for name in form})


def _on_vectors(rates: Any, case: ServingCase) -> Any:
    """Return rates with which attention runs on vector units where matrix units do not take heads as the model's."""
    device, own = case.cluster.device, case.engine.attention
    rule = next((one for one in own.matrix_heads if re.fullmatch(one[0], rates.family)), None)
    if rule is None or case.efficiencies.ideal or not device.knows("vector_flops"):
        return rates
    _, widest, least = rule
    heads = (mixer.core(False) for block in case.model.kinds for mixer in block.mixers)
    if all(one.head <= widest and one.group >= least for one in heads if one):
        return rates
    flops = leaf("attention FLOP/s of vector units", own.vector_share * device.vector_flops, "datasheet and fit")
    return replace(rates, attention_forward_flops=flops)


def _on_processor(rates: Any, case: ServingCase) -> Any:
    """Return rates of a processor as the engine's own kernels reach them: its threads share one barrier an operator."""
    own, wanted, device = case.engine.operators, case.efficiencies, case.cluster.device
    if not own.processor_memory or not rates.family.startswith("cpu") or wanted.ideal or wanted.memory:
        return rates
    streamed, why = own.processor_memory * device.memory_bytes_per_second, dict(case.engine.sources)
    moved = leaf("achievable memory bytes/s", streamed, why["operators.processor_memory"])
    met = leaf("all cores meet", own.barrier_seconds * device.cores, why["operators.barrier_seconds"])
    return replace(rates, matmul_bytes=moved, matmul_start=met, memory_start=met, attention_start=met, launch=0 * met)


def _summed(rates: Any, case: ServingCase) -> Any:
    """Return rates of 16-bit GEMMs summed in 16 bits: tensor cores add so at half the rate of int8 at least.

    Cores of GeForce devices add in 32 bits at half that rate, which is their datasheet's (NVIDIA Ada architecture
    whitepaper 1.1, appendix A). Clocks go with the square root of the power of a core beside the measured device's.
    """
    device = case.cluster.device
    measured = watts_per_core(rates.family)
    known = device.knows("num_cores") and device.knows("power_watts") and "int8" in device.matrix_flops
    if case.engine.operators.accumulation != "fp16" or case.efficiencies.ideal or not measured or not known:
        return rates
    row = constants().families[rates.family].matmul["bf16"]
    clocks = math.sqrt(device.power_watts / device.num_cores / measured)
    share = min(row.compute * row.steady_state_share * clocks, 0.9)
    flops = max(float(rates.matmul_flops), share * device.peak_flops("int8") / 2)
    return replace(rates, matmul_flops=leaf("matrix FLOP/s summed in 16 bits", flops, "datasheet and fit", "FLOP/s"))


def _fused_quantisation(rates: Any, case: ServingCase) -> Any:
    """Return rates of narrow GEMMs whose inputs are quantised by the kernel before, or by a kernel of their own.

    What that kernel starts with, and the share of the bandwidth that it streams the input at, are part of the tables of
    GEMMs (accuracy/notes/calibration.md, `quantise`); it starts in at most what one kernel takes: tables hold whatever
    else a library does before a product. Every rank of tp quantises what is not split: the hidden states of all tokens.
    """
    if case.efficiencies.ideal:
        return rates
    kind = "fp8_block" if (case.compute, case.format.name) == ("fp8", "fp8-block") else case.compute
    if kind in (engine := case.engine).quantisation.unfused_types:
        row = constants().families[rates.family].matmul.get(kind)
        own = row.quantise.get(engine.kernels) if row else None
        seconds = min(own.start_seconds if own else math.inf, engine.quantisation.kernel_seconds)
        why = dict(engine.sources)["quantisation.unfused_types"]
        started = rates.matmul_start + leaf("quantisation of the input", seconds, why)
        streamed = own.efficiency * bandwidth_of(case.cluster.device) if own else float(rates.memory_bytes)
        traffic = _QUANTISED_BYTES * float(rates.memory_bytes) / streamed
        return replace(rates, matmul_start=started, cast_traffic=traffic)
    if float(rates.matmul_start) <= engine.quantisation.kernel_seconds:
        return rates
    why = dict(engine.sources)["quantisation.kernel_seconds"]
    return replace(rates, matmul_start=leaf("kernel start", engine.quantisation.kernel_seconds, why))
