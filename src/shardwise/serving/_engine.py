"""Inference engines and their kernels: seconds and bytes they add to the ledger, with the source of each figure."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from shardwise.cost import (
    Efficiencies,
    EngineReduce,
    ExpertsFit,
    KernelCosts,
    constants,
    fit_from,
    last_cache_bytes,
    nearest_costs,
    reduce_of,
)
from shardwise.errors import InputError, Problem
from shardwise.hardware import Device
from shardwise.plans import Stack, find_stack


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One inference engine.

    `budget` is how it spells its memory fraction: "total" bounds weights, activations and cache, "static" weights and
    cache, "free" is the cache's share of what is left. `fused` names operators that run inside another kernel,
    `kernels` the engine whose measured kernels it takes. The host adds `step_seconds` a step, `sequence_seconds` a
    sequence, `block_seconds` a block of its cache and `worker_seconds` each time that tensor-parallel workers double.
    `layer_seconds` pass between the kernels of a layer where no captured graph holds them, `stage_seconds` when a layer
    split hands over, `split_seconds` a layer and rank where each product sends to all ranks and back. Only groups of
    `sharing_heads` query heads share what they read of the cache (1: all groups do); more than `unsplit_items`
    sequences times heads are not cut along the context (0: always cut), with `uncut` none that does not share is.
    `library` says what its products reach of the device's compute and memory rates, by device. Prompts run
    `chunk_tokens` at a time (0: whole), `chunks_together` as a pipeline (0: all), with the attention
    `prompt_attention`; a score that is not fused moves `score_bytes` beside its products. Weights of fewer than 16 bits
    are written out again for more than `dequantise_rows` rows (0: never).
    `adds` is the type that products are summed in, `thin_products` whether those of few rows are bound by what a core
    can load. Activations lie in `activation_bytes` and are cast for products. `runs` is the stack whose operators it
    runs, and no `small_kernel_seconds` means that kernels start as in that stack.

    `context_core_bytes` are bytes of the context for each core. Layers that keep different things share pages of one
    size with `page_groups`; with `static_buffers` all buffers of a pass exist at once, with `head_copy` a tied head has
    a table of its own. `expert_pads` is what families of devices pad experts in mxfp4 to (`Format.expert_pads`).
    No heads share what they read of caches of fewer than 16 bits with `narrow_alone`, nor in models with windows with
    `window_alone`. `widened_per_core` are elements a second that a core widens from 8-bit floats where its device has
    no instruction for it (0: as fast as it reads).
    With `whole_context` windows of a model are not used: its layers keep and read every token.
    Prompts and tokens share steps with `mixed_steps`. Inputs of the types `quantised_apart` are quantised by kernels of
    their own, and the kernels over latent caches of the engine `latent_kernels` stand for its own. The seconds of its
    attention kernels hold the operators `in_attention`, and the products `apart`, joint in the ledger, run one by one.
    Its kernels over a cache are those of an older family where `older_kernels` names one for the device's. Sampling
    moves `sampling_bytes` a logit.
    """

    name: str
    title: str
    budget: Literal["total", "static", "free"]
    memory_fraction: float
    own_all_reduce: bool
    step_seconds: float
    sequence_seconds: float
    small_kernel_seconds: float
    fused: tuple[str, ...]
    context_bytes: float
    communicator_bytes: float
    sampler_bytes: float
    block_tokens: int
    quantised_start_seconds: float
    sources: tuple[tuple[str, str], ...]
    kernels: str = ""
    block_seconds: float = 0.0
    worker_seconds: float = 0.0
    layer_seconds: float = 0.0
    stage_seconds: float = 0.0
    split_seconds: float = 0.0
    sharing_heads: int = 1
    unsplit_items: int = 0
    uncut: bool = False
    head_bytes_per_core: float = 0.0
    library: tuple[tuple[str, float, float], ...] = ()
    chunk_tokens: int = 0
    chunks_together: int = 0
    activation_bytes: float = 2.0
    prompt_attention: Literal["flash", "scores"] = "flash"
    score_bytes: float = 4.0
    dequantise_rows: int = 0
    adds: Literal["fp32", "fp16"] = "fp32"
    thin_products: bool = False
    runs: str = "megatron"
    context_core_bytes: float = 0.0
    narrow_alone: bool = False
    window_alone: bool = False
    widened_per_core: float = 0.0
    whole_context: bool = False
    page_groups: bool = False
    mixed_steps: bool = False
    quantised_apart: tuple[str, ...] = ()
    latent_kernels: str = ""
    in_attention: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    older_kernels: tuple[tuple[str, str], ...] = ()
    sampling_bytes: float = 14.0
    static_buffers: bool = False
    head_copy: bool = False
    expert_pads: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def cache_kernels(self, family: str) -> str:
        """Return the family whose kernels over a cache the engine runs on devices of a family."""
        return dict(self.older_kernels).get(family, family)

    @property
    def stack(self) -> Stack:
        """The ledger's view of the engine: fused norms, attention and activations, no dropout."""
        return replace(find_stack(self.runs), name=self.name, title=self.title)

    @property
    def prompt_stack(self) -> Stack:
        """The same while prompts run."""
        return replace(self.stack, attention=self.prompt_attention)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Constants of kernels that training does not have: decode attention, fused experts, the engine's all-reduce.

    `decode` is None where efficiencies are imposed, `last_cache` the bytes that its tables find in the last cache.
    `all_reduce` is None where that of NCCL stands. `head_bytes_per_second` is the rate of one core where every query
    head reads the cache for itself, 0 where the heads of a group share what they read, `unsplit_bytes_per_second` the
    same where no context is cut; `thin_bytes_per_second` that of
    products of few rows, 0 where only the memory bounds them. `cached_rate` is how much faster than memory activations
    of a piece of a prompt pass where the last cache holds them.
    """

    decode: KernelCosts | None
    last_cache: float
    experts_wide: ExpertsFit
    experts_narrow: ExpertsFit
    experts_type: str
    all_reduce: EngineReduce | None
    head_bytes_per_second: float
    unsplit_bytes_per_second: float
    thin_bytes_per_second: float
    cached_rate: float
    sources: tuple[str, ...]


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = resources.files("shardwise.serving").joinpath("engines.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    for name, row in table["engines"].items():
        # An older or newer version of an engine states what differs; its kernels are those of the engine.
        base = table["engines"][row["extends"]] if "extends" in row else {}
        sources = {**base.get("sources", {}), **row["sources"]}
        table["engines"][name] = {"kernels": name, **base, **row, "sources": sources}
    return table


def engine_names() -> tuple[str, ...]:
    """Return the names of the engines that are known.

    >>> "vllm" in engine_names()
    True
    """
    return tuple(_table()["engines"])


@cache
def find_engine(name: str) -> Engine:
    """Return the named engine; raises `InputError` naming the known ones.

    >>> find_engine("vllm").block_tokens
    16
    """
    if name not in _table()["engines"]:
        problem = Problem("engine", name, "is not a known engine", "use one of " + ", ".join(engine_names()))
        raise InputError([problem])
    row = _table()["engines"][name]
    apart = ("sources", "library", "expert_pads", "older_kernels")
    given = {f.name: row[f.name] for f in fields(Engine) if f.name in row and f.name not in apart}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    values["older_kernels"] = tuple(row.get("older_kernels", {}).items())
    values["library"] = tuple((device, *shares) for device, shares in row.get("library", {}).items())
    values["expert_pads"] = tuple((family, tuple(sides)) for family, sides in row.get("expert_pads", {}).items())
    return Engine(name=name, sources=tuple(row["sources"].items()), **values)


def _core_rate(kind: str, device: Device, family: str, used: bool) -> float:
    """Return bytes a second that one core reads in a kind of kernel, 0 where it is not used or not bound by that."""
    rates = _table()[kind]["bytes_per_second_per_core"]
    return float(rates.get(device.name, rates.get(family, 0.0))) if used else 0.0


def watts_per_core(family: str) -> float:
    """Return watts a core of the device on which the products of a family were measured, 0 where it is not stated.

    >>> watts_per_core("ampere")
    3.7
    """
    return float(_table()["measured"]["watts_per_core"].get(family, 0.0))


def lasting_memory(family: str) -> float:
    """Return the share of the streaming rate of measured products that steps of engines keep, 1 where it is all.

    >>> lasting_memory("ampere"), lasting_memory("hopper")
    (0.91, 1.0)
    """
    return float(_table()["measured"]["lasting_memory"].get(family, 1.0))


def replay_seconds(vendor: str) -> float:
    """Return the seconds that a kernel of a captured graph takes at least on a maker's devices, 0 where not known.

    >>> replay_seconds("AMD"), replay_seconds("NVIDIA")
    (3.9e-06, 0.0)
    """
    return float(_table()["measured"]["replay_seconds"].get(vendor, 0.0))


_NARROW = {
    "fp8": ("fp8", "fp8_block"),
    "fp8-block": ("fp8_block", "fp8"),
    "int8": ("fp8", "fp8_block"),
    "fp4": ("nvfp4", "w4a8_mxfp4_mxfp8", "fp8"),
}
# Kernels that multiply a format's weights with 8-bit inputs where an engine was measured with them.
_WIDENED = {"mxfp4": "w4a8_mxfp4_mxfp8"}


def _own(table: dict[str, Any], engine: str) -> dict[str, Any]:
    """Return the rows of an engine; engines without a measurement take vLLM's."""
    row: dict[str, Any] = table.get(engine, table["vllm"])
    return row


def _expert_row(table: dict[str, Any], types: tuple[str, ...]) -> dict[str, Any]:
    """Return the row of the kernel with the most measurements of the first type that was measured."""
    by_kernel = next((table[t] for t in types if t in table), table["bf16"])
    plain = {name: row for name, row in by_kernel.items() if not name.endswith(("nongated", "min_latency"))}
    return max(plain.values(), key=lambda row: row["rows"])


_WASTE = ("pad_rows", "chain_share", "row_traffic", "others_traffic")


def _wide_row(experts: dict[str, Any], products: str) -> tuple[str, dict[str, Any]]:
    """Return the type and the row of experts in 16 bits, or in the narrower type that widens a format's weights."""
    kind = _WIDENED.get(products, "bf16")
    return (kind if kind in experts else "bf16"), _expert_row(experts, (kind, "bf16"))


def _imposed(row: dict[str, Any], imposed: Efficiencies) -> dict[str, Any]:
    """Return a row with the user's efficiencies; ideal kernels stream at full rate and start at once."""
    shares = {"compute": imposed.compute, "memory": imposed.memory}
    found = row | {name: min(user or row[name], 1.0) for name, user in shares.items()}
    if not imposed.ideal:
        return found
    free = {name: 0.0 for name in row if name.endswith("_seconds") or name in _WASTE}
    return found | free | {"compute": 1.0, "memory": 1.0}


def kernels_of(device: Device, family: str, products: str, engine: Engine, imposed: Efficiencies) -> Kernels:
    """Return the kernel constants of a family under an engine for products of a type or of a format.

    Imposed efficiencies replace the fitted ones; a family without tables of engines takes those of L40S.
    """
    table = constants()[family if "experts" in constants()[family] else "ada"]
    experts = _own(table["experts"], engine.kernels)
    decode, source = nearest_costs(device, engine.kernels, engine.cache_kernels(family))
    kind, wide = _wide_row(experts, products)
    narrow = _expert_row(experts, _NARROW.get(products, ("bf16",)))
    own = engine.own_all_reduce and not (imposed.ideal or imposed.fast_bytes_per_second or imposed.fast_link)
    # Engines' own kernels were measured without peer access where ranks slow each other with their square.
    reduce = reduce_of(device, engine.kernels) if own else None
    return Kernels(
        decode=None if imposed.ideal or imposed.compute or imposed.memory else decode,
        last_cache=last_cache_bytes(device),
        experts_wide=fit_from(ExpertsFit, _imposed(wide, imposed)),
        experts_narrow=fit_from(ExpertsFit, _imposed(narrow, imposed)),
        experts_type="fp8" if kind.startswith("w4a8") else "",
        all_reduce=None if reduce and reduce.fit.crowding > 1 else reduce,
        head_bytes_per_second=engine.head_bytes_per_core
        or _core_rate("own_heads", device, family, engine.sharing_heads > 1 and not imposed.ideal),
        unsplit_bytes_per_second=_core_rate(
            "unsplit", device, family, bool(engine.unsplit_items) and not imposed.ideal
        ),
        cached_rate=float(_table()["measured"]["cached_rate"].get(family, 1.0)),
        thin_bytes_per_second=_core_rate("thin_products", device, family, engine.thin_products and not imposed.ideal),
        sources=(source, wide["source"], narrow["source"], *((reduce.source,) if reduce else ())),
    )
