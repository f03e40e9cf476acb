"""One serving question, and the device and links that it runs on.

A `Case` holds what stays the same for all plans: model, cluster, job, engine and formats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.cost import Efficiencies, bandwidth_of, constants, family_of, network_of, rates_of, with_peers
from shardwise.hardware import Cluster
from shardwise.ledger.number import X
from shardwise.ledger.op import Op
from shardwise.ledger.traced import leaf
from shardwise.models import Attention, Block, Model, MoE
from shardwise.ops.inputs import LayoutOptions, ParallelSizes, TokenBatch
from shardwise.ops.layout import Layout, lay_out
from shardwise.plans import Plan, Serving
from shardwise.serving._attention import AttentionKernels, attention_kernels
from shardwise.serving._engine import Engine, kernels_of, replay_seconds, sums_branches, watts_per_core
from shardwise.serving._ledger import Views, embedding_ops, head_ops, layer_ops
from shardwise.serving._price import Server, captured
from shardwise.serving._quantization import Format
from shardwise.serving._sizes import Sizes

UNSHARED = 1000  # larger than any group of query heads


def most_tokens(model: Model) -> int:
    """Return the tokens that a model has learned positions or patches for, 0 where positions do not end."""
    return model.positions or (0 if model.embedding else model.max_context)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One serving question, complete: `dtype` is the 16-bit (or fp32) type, `compute` that of the format's products."""

    model: Model
    cluster: Cluster
    plan: Plan
    job: Serving
    engine: Engine
    format: Format
    dtype: str
    compute: str
    cache_element_bytes: float
    efficiencies: Efficiencies = field(default_factory=Efficiencies)

    @property
    def domains(self) -> tuple[int, ...]:
        """Devices in one domain of each tier."""
        return tuple(tier.size for tier in self.cluster.tiers)

    @property
    def activation_bytes(self) -> int:
        """Bytes of one activation element."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def new_input_tokens(self) -> int:
        """Input tokens of a request that the cache does not hold yet."""
        return self.job.input_tokens - self.job.prefix_tokens

    @property
    def step_tokens(self) -> int:
        """Most tokens of one prefill step, 0 for the whole batch at once."""
        return self.job.max_batched_tokens or self.engine.chunk_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One engine step: `sequences` (0: the whole batch) of `tokens` new tokens each, after `context` cached ones."""

    phase: Any
    tokens: float
    context: float
    sequences: float = 0.0


def server_of(case: Case, z: Sizes[X], decoding: bool) -> Server[X]:
    """Return the device and links that a phase runs on."""
    device, wanted = case.cluster.device, case.efficiencies
    case = _alone(case)
    fitted = rates_of(device, case.dtype, 0.0, wanted)
    apart = case.compute == ("fp8" if case.format.name == "fp8-block" else case.dtype)
    kernels = kernels_of(device, fitted.family, case.format.name if apart else case.compute, case.engine, wanted)
    replay = replay_seconds(device.vendor)
    wide = captured(_by_library(_summed(fitted, case), case), case.engine, wanted.ideal, replay)
    narrow = wide
    if case.compute != case.dtype:
        narrow = captured(rates_of(device, case.compute, 0.0, wanted), case.engine, wanted.ideal, replay)
        narrow = _fused_quantisation(narrow, case)
    kept = device.memory_bytes_per_second if wanted.ideal else bandwidth_of(device)
    return Server(
        rates=wide,
        narrow=narrow,
        narrow_dtype=case.compute,
        network=with_peers(network_of(case.cluster, wanted)),
        spans=z.spans,
        bandwidth=leaf("HBM bytes/s", wanted.memory_bytes_per_second or kept, "datasheet", "bytes/s"),
        peak=leaf("matrix FLOP/s", device.peak_flops(case.dtype), "datasheet", "FLOP/s"),
        narrow_peak=leaf("matrix FLOP/s of the format", device.peak_flops(case.compute), "datasheet", "FLOP/s"),
        experts_peak=leaf(
            "matrix FLOP/s of experts", device.peak_flops(kernels.experts_type or case.dtype), "datasheet", "FLOP/s"
        ),
        fused_experts=not wanted.ideal,
        cores=float(device.num_cores) if device.knows("num_cores") else 1.0,
        activation_width=case.activation_bytes,
        cache_width=case.cache_element_bytes,
        kernels=kernels,
        engine=case.engine,
        decoding=decoding,
        widened=_widened(case),
        attention=_attention(case),
    )


def _alone(case: Case) -> Case:
    """Return the case with the engine's kernel for its cache: one that shares nothing, for narrow or windowed ones."""
    mixers = {mixer for block in case.model.layers for mixer in block.mixers}
    windowed = case.engine.window_alone and any(isinstance(m, Attention) and m.window for m in mixers)
    if not windowed and not (case.engine.narrow_alone and case.cache_element_bytes < 2):
        return case
    return replace(case, engine=replace(case.engine, sharing_heads=UNSHARED))


def _widened(case: Case) -> float:
    """Return cached elements a second that a device without 8-bit floats widens in a kernel, 0 if none are."""
    device, floats = case.cluster.device, case.job.kv_cache.startswith("fp8")
    if not floats or "fp8" in device.matrix_flops or case.efficiencies.ideal or not device.knows("num_cores"):
        return 0.0
    return case.engine.widened_per_core * device.num_cores


def _attention(case: Case) -> AttentionKernels | None:
    """Return the engine's attention kernels for the model, None where efficiencies are imposed or none was measured."""
    wanted = case.efficiencies
    if wanted.ideal or wanted.compute or wanted.memory:
        return None
    device, engine = case.cluster.device, case.engine
    widths = (case.activation_bytes, case.cache_element_bytes)
    older = engine.cache_kernels(family_of(device))
    return attention_kernels(device, engine.kernels, case.model, widths, engine.latent_kernels, older)


def _by_library(rates: Any, case: Case) -> Any:
    """Return rates of 16-bit products as the engine's own library reaches them on a device that it names."""
    shares = {device: (compute, memory) for device, compute, memory in case.engine.library}
    if case.efficiencies.ideal or case.cluster.device.name not in shares:
        return rates
    compute, memory = shares[case.cluster.device.name]
    why = dict(case.engine.sources)["library"]
    flops = leaf("achievable matrix FLOP/s", compute * case.cluster.device.peak_flops(case.dtype), why)
    moved = leaf("achievable HBM bytes/s", memory * case.cluster.device.memory_bytes_per_second, why)
    return replace(rates, matmul_flops=flops, matmul_bytes=moved)


def _summed(rates: Any, case: Case) -> Any:
    """Return rates of 16-bit products summed in 16 bits: tensor cores add so at half the rate of int8 at least.

    Cores of GeForce devices add in 32 bits at half that rate, which is their datasheet's (NVIDIA Ada architecture
    whitepaper 1.1, appendix A). Clocks go with the square root of the power of a core beside the measured device's.
    """
    device = case.cluster.device
    measured = watts_per_core(rates.family)
    known = device.knows("num_cores") and device.knows("power_watts") and "int8" in device.matrix_flops
    if case.engine.adds != "fp16" or case.efficiencies.ideal or not measured or not known:
        return rates
    row = constants().families[rates.family].matmul["bf16"]
    clocks = math.sqrt(device.power_watts / device.num_cores / measured)
    share = min(row.compute * row.steady_state_share * clocks, 0.9)
    flops = max(float(rates.matmul_flops), share * device.peak_flops("int8") / 2)
    return replace(rates, matmul_flops=leaf("matrix FLOP/s summed in 16 bits", flops, "datasheet and fit", "FLOP/s"))


def _fused_quantisation(rates: Any, case: Case) -> Any:
    """Return rates of narrow products whose inputs are quantised by the kernel before, or by a kernel of their own.

    What that kernel starts with is part of the tables of products (accuracy/notes/calibration.md, `quantise`).
    """
    engine = case.engine
    if case.efficiencies.ideal:
        return rates
    if case.compute in engine.quantised_apart:
        row = constants().families[rates.family].matmul.get(case.compute)
        own = row.quantise.get(engine.kernels) if row else None
        seconds = own.start_seconds if own else engine.quantised_start_seconds
        why = dict(engine.sources)["quantised_apart"]
        return replace(rates, matmul_start=rates.matmul_start + leaf("quantisation of the input", seconds, why))
    if float(rates.matmul_start) <= engine.quantised_start_seconds:
        return rates
    why = dict(engine.sources)["quantised_start_seconds"]
    return replace(rates, matmul_start=leaf("kernel start", engine.quantised_start_seconds, why))


def views_of(case: Case, z: Sizes[X], step: Step) -> Views[X]:
    """Return one step laid out on the ranks of a plan."""
    zero = 0 * z.tp

    def layout(weight_bytes: float, dtype: str) -> Layout[X]:
        work = TokenBatch(
            B=z.batch if not step.sequences else zero + step.sequences,
            S=zero + step.tokens,
            context=zero + step.context,
            phase=step.phase,
            activation_bytes=case.activation_bytes,
            weight_bytes=weight_bytes,
            cache_bytes=case.cache_element_bytes,
            dtype=dtype,
            imbalance=case.job.expert_imbalance,
            copies=z.batch if case.job.same_prompts and not step.sequences else 1.0,
        )
        one = zero + 1
        degrees = ParallelSizes(tp=z.tp, tp2=one, cp=one, ep=z.ep, etp=z.etp, panels=one)
        stack = case.engine.prompt_stack if step.phase == "prefill" else case.engine.stack
        return lay_out(degrees, work, LayoutOptions(stack=stack))

    wide = layout(case.format.rest_bytes if case.dtype != "fp32" else 4.0, case.dtype)
    return Views(wide=wide, narrow=layout(case.format.bytes, case.compute), format=case.format)


def label_of(block: Block, index: int) -> str:
    """Return the name of a kind of layer.

    >>> label_of(Block(mixers=(), feed_forward=None), 0)
    'layer kind 0'
    """
    words = [type(m).__name__ for m in block.mixers]
    if block.feed_forward is not None:
        words.append("experts" if isinstance(block.feed_forward, MoE) else "feed-forward")
    return f"layer kind {index}" + (f" ({', '.join(words)})" if words else "")


def lines_of(case: Case, views: Views[X]) -> list[tuple[str, tuple[Op[X], ...]]]:
    """Return the operators of every kind of layer, of the embedding and of the head, each with its name."""
    model = case.model
    summed = sums_branches(model.family)
    kinds = [
        (label_of(block, i), layer_ops(views, block, model.hidden, case.job.use_kv_cache, summed))
        for i, block in enumerate(model.kinds)
    ]
    return [
        *kinds,
        ("embedding", embedding_ops(views, model)),
        ("head", head_ops(views, model, case.engine.sampling_bytes)),
    ]
