"""Inference engines and their kernels: seconds and bytes they add to the ledger, with the source of each figure."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from importlib import resources
from typing import Any, Literal

from shardwise.errors import InputError, Problem
from shardwise.plans import Stack, find_stack


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One inference engine: what it adds to the kernels of the ledger, in the fields of engines.toml.

    Seconds named after a thing are those of the host for each such thing.
    """

    name: str
    title: str
    """The name that people know, with the releases that the entry covers."""
    sources: tuple[tuple[str, str], ...]
    kernels: str = ""
    """The engine whose measured kernels it takes."""
    runs: str = "megatron"
    """The stack whose operators it runs."""

    # Memory
    budget: Literal["total", "static", "free"]
    """What the memory fraction bounds: all but the context, weights and cache, or the cache within what is left."""
    memory_fraction: float
    context_bytes: float
    context_core_bytes: float = 0.0
    """Bytes of the context for each core of the device."""
    communicator_bytes: float
    sampler_bytes: float
    """Bytes of working memory for each logit of the sequences that may run."""
    static_buffers: bool = False
    """All buffers of a pass exist at once."""
    head_copy: bool = False
    """A head that is tied to the table of words has a copy of its own."""
    expert_pads: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """What sides of experts in mxfp4 are padded to, by family of devices (`Format.expert_pads`)."""
    activation_bytes: float = 2.0
    """Bytes of an element of activations, which are cast for products."""

    # Cache
    block_tokens: int
    page_groups: bool = False
    """Layers that keep different things share pages of one size."""
    whole_context: bool = False
    """Windows of a model are not used: every layer keeps and reads all tokens."""

    # Host
    step_seconds: float
    sequence_seconds: float
    block_seconds: float = 0.0
    worker_seconds: float = 0.0
    """Seconds of a step for each time that the tensor-parallel workers double."""
    layer_seconds: float = 0.0
    """Seconds between the kernels of a layer where no captured graph holds them."""
    stage_seconds: float = 0.0
    """Seconds to hand over from one part of a layer split to the next."""
    split_seconds: float = 0.0
    """Seconds of a layer and rank where each product sends to all ranks and back."""
    small_kernel_seconds: float
    """Start of a small kernel; 0 takes the launches of the stack that it runs."""
    quantised_start_seconds: float
    """Start of a kernel that quantises the input of a product."""

    # Steps
    chunk_tokens: int = 0
    """Tokens of a prompt that run at a time (0: whole prompts)."""
    chunks_together: int = 0
    """Pieces of a prompt that run as a pipeline (0: all)."""
    mixed_steps: bool = False
    """Prompts and generated tokens share steps."""

    # Operators
    own_all_reduce: bool
    fused: tuple[str, ...]
    """Operators that run inside another kernel."""
    apart: tuple[str, ...] = ()
    """Products, joint in the ledger, that run one by one."""
    library: tuple[tuple[str, float, float], ...] = ()
    """Shares that its products reach of a device's rates of compute and of memory: (device, compute, memory)."""
    adds: Literal["fp32", "fp16"] = "fp32"
    """The type that products are summed in."""
    thin_products: bool = False
    """Products of few rows are bound by what a core can load."""
    dequantise_rows: int = 0
    """Weights of fewer than 16 bits are written out again for products of more rows than this (0: never)."""
    quantised_apart: tuple[str, ...] = ()
    """Types of inputs that kernels of their own quantise."""
    widened_per_core: float = 0.0
    """Elements a second that a core widens from 8-bit floats without an instruction for it (0: as fast as it reads)."""
    sampling_bytes: float = 14.0
    """Bytes that sampling moves for each logit."""

    # Attention
    prompt_attention: Literal["flash", "scores"] = "flash"
    score_bytes: float = 4.0
    """Bytes that a score moves beside its products where attention is not fused."""
    in_attention: tuple[str, ...] = ()
    """Operators whose seconds the measured kernels of attention hold."""
    latent_kernels: str = ""
    """The engine whose kernels over latent caches stand for its own."""
    older_kernels: tuple[tuple[str, str], ...] = ()
    """The older family of devices whose kernels over a cache it runs, by family."""
    sharing_heads: int = 1
    """Only groups of so many query heads share what they read of the cache (1: all groups do)."""
    narrow_alone: bool = False
    """No heads share what they read of caches of fewer than 16 bits."""
    window_alone: bool = False
    """No heads share what they read in models with windows."""
    unsplit_items: int = 0
    """More sequences times heads than this are not cut along the context (0: always cut)."""
    uncut: bool = False
    """No kernel whose heads do not share is cut along the context."""
    head_bytes_per_core: float = 0.0
    """Bytes a second that a core reads of the cache where heads do not share (0: as measured for the device)."""

    def cache_kernels(self, family: str) -> str:
        """Return the family whose kernels over a cache the engine runs on devices of a family."""
        return dict(self.older_kernels).get(family, family)

    @cached_property
    def stack(self) -> Stack:
        """The ledger's view of the engine: fused norms, attention and activations, no dropout."""
        return replace(find_stack(self.runs), name=self.name, title=self.title)

    @cached_property
    def prompt_stack(self) -> Stack:
        """The same while prompts run."""
        return replace(self.stack, attention=self.prompt_attention)


@cache
def engine_tables() -> dict[str, dict[str, Any]]:
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
    return tuple(engine_tables()["engines"])


@cache
def find_engine(name: str) -> Engine:
    """Return the named engine; raises `InputError` naming the known ones.

    >>> find_engine("vllm").block_tokens
    16
    """
    if name not in engine_tables()["engines"]:
        problem = Problem("engine", name, "is not a known engine", "use one of " + ", ".join(engine_names()))
        raise InputError([problem])
    row = engine_tables()["engines"][name]
    apart = ("sources", "library", "expert_pads", "older_kernels")
    given = {f.name: row[f.name] for f in fields(Engine) if f.name in row and f.name not in apart}
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    values["older_kernels"] = tuple(row.get("older_kernels", {}).items())
    values["library"] = tuple((device, *shares) for device, shares in row.get("library", {}).items())
    values["expert_pads"] = tuple((family, tuple(sides)) for family, sides in row.get("expert_pads", {}).items())
    return Engine(name=name, sources=tuple(row["sources"].items()), **values)


def sums_branches(family: str) -> bool:
    """Return whether engines add both branches of a parallel block before they reduce them, in a family of models.

    >>> sums_branches("falcon"), sums_branches("gpt-neox")
    (True, False)
    """
    return family in engine_tables()["summed_branches"]["families"]
