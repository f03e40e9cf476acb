"""Inference engines and their kernels: seconds and bytes they add to the ledger, with the source of each figure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any, Literal

from shardwise.cost import family_of
from shardwise.errors import Problems, known_name
from shardwise.files import own_table
from shardwise.hardware import Device
from shardwise.plans import Stack, find_stack
from shardwise.records import dataclass, replace
from shardwise.serving._engine_attention import EngineAttention
from shardwise.serving._engine_host import GraphCapture, HostSeconds
from shardwise.serving._engine_memory import EngineMemory
from shardwise.serving._formats import WeightFormat
from shardwise.serving._runs import EngineFormats, EngineLayouts


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillSteps:
    """How prompts are cut into steps."""

    chunk_tokens: int = 0
    """Tokens of a prompt that run at a time (0: whole prompts)."""
    chunks_in_flight: int = 0
    """Pieces of a prompt that run as a pipeline (0: all)."""
    continuous_batching: bool = False
    """A request joins the batch when another one has ended; else a batch runs together from first to last token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOperators:
    """Kernels of the engine's own in place of those of the ledger."""

    custom_all_reduce: bool
    fused: tuple[str, ...]
    """Operators that run inside another kernel."""
    unmerged: tuple[str, ...] = ()
    """Products, joint in the ledger, that run one by one: their roles, or a linear layer that they stand for."""
    library_shares: tuple[tuple[str, tuple[float, float]], ...] = ()
    """Shares that its GEMMs reach of a device's rates of compute and of memory: (device, compute, memory)."""
    fp8_shares: tuple[tuple[str, tuple[float, float]], ...] = ()
    """The same of its GEMMs of 8-bit floats with one scale a tensor."""
    library: str = ""
    """The release of the library whose rates of 16-bit GEMMs apply ("": one before CUDA 12.8)."""
    accumulation: Literal["fp32", "fp16"] = "fp32"
    """The type that GEMMs are summed in."""
    experts_as: str = ""
    """The engine whose measured kernels of experts it runs ("": its own)."""
    experts_kernel: str = ""
    """The kernels of experts that it is told to run ("": those that it chooses)."""
    experts_release: str = ""
    """The releases that choose kernels of experts as it does ("": today's)."""
    torch_choices: tuple[str, str] = ("", "")
    """Mixtures whose experts kernels of PyTorch choose one after another (patterns of family of devices, type of
    products, family of models and number of experts): experts that no ranks share out, and that ranks do."""
    shared_beside: tuple[tuple[str, int], ...] = ()
    """Models whose shared experts run beside the routed ones in captured steps of up to so many tokens (a pattern of
    family of devices and of models, the first that matches)."""
    library_products: tuple[tuple[str, str, str], ...] = ()
    """GEMMs of few rows that run in no kernel but the one of the tables: (a pattern of family of devices, format of the
    weights and family of models, roles of those in 16 bits, roles of those in fewer), the first that matches."""
    router_kernels: tuple[tuple[str, str], ...] = ()
    """Routers of few tokens in a kernel of their own: (device family, model, experts and width, [router_kernels])."""
    all_reduce_as: tuple[tuple[str, str], ...] = ()
    """The engine whose all-reduce it runs (a pattern of family of devices and of models, the first that matches)."""
    experts: Literal["fused", "products"] = "fused"
    """With "products" experts run in the kernels of its other GEMMs, what is beside them in kernels of its own."""
    gemv_bound_by_cores: bool = False
    """Products of few rows are bound by what a core can load."""
    gemv_rows: int = 0
    """Rows up to which products run in matrix-vector kernels, which multiply these rows alone (0: in tiles of 16)."""
    streams_faster: tuple[tuple[str, float], ...] = ()
    """How much faster than the measured GEMMs of a family its own stream weights from memory."""
    scan_shares: tuple[tuple[str, float], ...] = ()
    """Share of the vector units' rate at which recurrences of prompts run token by token, by family of devices (a
    pattern, the first that matches); families without one run them in chunks."""
    splits_with_host: bool = False
    """The host's processor may hold layers and experts, and runs them."""
    device_tokens: float = 0.0
    """Tokens of a step from which the device runs them all the same."""
    processor_memory: float = 0.0
    """Share of a processor's memory bandwidth at which its GEMMs stream weights (0: as other programs' do)."""
    barrier_seconds: float = 0.0
    """Seconds for each core of a processor until all of them have met behind an operator."""
    sampling_bytes_per_logit: float = 14.0
    sampling_kernels: int = 3
    """Bytes that sampling moves for each logit, and its kernels one after another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineQuantisation:
    """How narrow weights and inputs are multiplied."""

    kernel_seconds: float
    """Start of a kernel that quantises the input of a GEMM."""
    expert_pads: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """What sides of experts in mxfp4 are padded to, by family of devices (`WeightFormat.expert_pads`)."""
    rest_bits: tuple[tuple[str, float], ...] = ()
    """Bits of the weights that a format of experts alone leaves, where its files do not keep 16: (format, bits)."""
    activation_bytes: float = 2.0
    """Bytes of an element of activations, which are cast for GEMMs."""
    dequantise_above_rows: int = 0
    """Weights of fewer than 16 bits are written out again for GEMMs of more rows than this (0: never)."""
    integer_share: float = 0.0
    """Share of the rate of integers at which GEMMs of many rows run on narrow weights as they are (0: none do)."""
    scaled_flops: float = 0.0
    """FLOPs on integers whose sums vector units scale with one of theirs."""
    load_rows: int = 0
    """Rows and columns of a tile of such GEMMs, whose weights are loaded beside the multiplications (0: once)."""
    experts_share: float = 1.0
    """Share of that rate that GEMMs of experts reach."""
    tile_rows: int = 0
    """Rows of a tile of such GEMMs: those of an expert end within one (0: as other GEMMs')."""
    unpack_operations: tuple[tuple[str, float], ...] = ()
    """Multiply-adds in which a weight of a format is widened where the device has no units for integers."""
    unpack_shares: tuple[tuple[str, float], ...] = ()
    """Share of these that takes time, by device (a pattern): what runs beside others in cores takes none."""
    unpack_rows: int = 0
    """Rows of a tile for which weights are widened once (0: they are not widened in tiles)."""
    fp4_gains: tuple[tuple[str, float], ...] = ()
    """How much faster than in integers GEMMs run on a format of 4-bit floats where matrix units take it."""
    unfused_types: tuple[str, ...] = ()
    """Types of inputs that kernels of their own quantise."""
    weight_only_kernels: bool = False
    """Whether GEMMs that widen weights themselves cost what the tables of such kernels have."""
    widened_shares: tuple[tuple[str, float], ...] = ()
    """Share of the 16-bit peak at which such kernels multiply, by family of devices."""
    widened_streams: tuple[tuple[str, float], ...] = ()
    """Share of what 16-bit GEMMs stream at which they read weights, by family of devices."""
    widened_formats: tuple[tuple[str, str], ...] = ()
    """Formats whose linear layers widen weights in a kernel on devices that have their rate: (format, family)."""
    narrow_inputs: tuple[tuple[str, str, str, str], ...] = ()
    """Formats whose GEMMs take narrow inputs too on some devices alone: (format, family, models, type of the GEMMs)."""
    block_shares: tuple[tuple[str, float], ...] = ()
    """Shares of the peak that GEMMs in 8-bit blocks reach in a kernel that it is told to run, by family of devices."""
    block_tile_seconds: tuple[tuple[str, float], ...] = ()
    """Seconds in which a tile of 128 by 128 multiplies 128 of depth, where such GEMMs have one tile for all shapes."""
    tuned_blocks: tuple[tuple[int, int], ...] = ()
    """Shapes of such GEMMs that have tiles of their own: (columns, depth)."""
    fp8_cache_elements_per_core: float = 0.0
    """Elements a second that a core widens from 8-bit floats without an instruction for it (0: as fast as it reads)."""

    def widens(self, form: WeightFormat, family: str) -> bool:
        """Return whether linear layers in a format multiply in 16 bits where a family of devices could in fewer."""
        return (form.kind, family) in self.widened_formats

    def with_inputs(self, form: WeightFormat, family: str, model: str) -> WeightFormat:
        """Return a format, and those of its parts, with the type of their GEMMs for a family of models on devices.

        >>> from shardwise.serving._formats import find_format
        >>> vllm, form = find_engine("vllm").quantisation, find_format("mxfp4")
        >>> [vllm.with_inputs(form, "cdna4", one).compute for one in ("llama", "gpt_oss")]
        ['fp4', '']
        """
        types = {
            one: kind
            for one, devices, models, kind in self.narrow_inputs
            if devices == family and re.fullmatch(models, model)
        }
        parts = tuple((part, replace(one, compute=types.get(one.kind, one.compute))) for part, one in form.parts)
        return replace(form, compute=types.get(form.kind, form.compute), parts=parts) if types else form

    def experts_of(self, form: WeightFormat, family: str) -> WeightFormat:
        """Return a format of experts alone as the engine keeps it on a family of devices."""
        pads = dict(self.expert_pads).get(family, ())
        return replace(form, expert_pads=pads, rest_bits=dict(self.rest_bits).get(form.base, form.rest_bits))


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One inference engine: what it adds to the kernels of the ledger, in the groups of engines.toml."""

    name: str
    title: str
    """The name that people know, with the releases that the entry covers."""
    sources: tuple[tuple[str, str], ...]
    kernels: str = ""
    """The engine whose measured kernels it takes."""
    runs: str = "megatron"
    """The stack whose operators it runs."""
    exporter: str = ""
    """The format that writes its launch line; empty: none does."""
    launch_of: str = ""
    """The engine whose launches run as this one where they say more, empty for one that a plain launch runs as."""
    launched_with: tuple[str, ...] = ()
    """What such a launch says."""
    asked_as: str = ""
    """The release that it was asked for as, such as vLLM 0.12.0; empty where it was asked for by its name."""
    not_taken: tuple[str, ...] = ()
    """What it was asked to be launched with that the entry of that release does not hold, in sentences."""
    memory: EngineMemory
    host: HostSeconds
    graphs: GraphCapture
    prefill: PrefillSteps
    operators: EngineOperators
    quantisation: EngineQuantisation
    attention: EngineAttention
    formats: EngineFormats
    layouts: EngineLayouts

    @property
    def brand(self) -> str:
        """The name of the engine alone, whatever its release and what its launch says.

        >>> find_engine("vllm-0.13").brand, find_engine("tensorrt-llm-windowed").brand
        ('vLLM', 'TensorRT-LLM')
        """
        plain = next((name for name in _plain() if self.name.startswith(f"{name}-")), "")
        return find_engine(plain).title if plain else self.title

    @cached_property
    def stack(self) -> Stack:
        """The ledger's view of the engine: fused norms, attention and activations, no dropout."""
        return replace(find_stack(self.runs), name=self.name, title=self.title)

    def refused_formats(self, weights: str, kv_cache: str, device: Device) -> Problems:
        """Return which formats of weights and cache the engine does not run on a device."""
        words = {"weights": weights, "kv_cache": kv_cache}
        others = {name: find_engine(name).formats for name in _plain()}
        return self.formats.problems(self.title, words, family_of(device), others)

    def caching(self) -> Engine:
        """The engine as a server that caches prefixes."""
        return replace(self, memory=replace(self.memory, caches_prefixes=True))

    def scheduling(self, ahead: bool) -> Engine:
        """The engine as a server that schedules a step while the one before it runs, or after it.

        A release that does the latter unless asked has its seconds either way: 161 rows of vLLM 0.10.2 with
        --async-scheduling (aiconfigurator silicon_sample.csv) are met within 4.8 % with them, within 7.0 % without.
        """
        between = self.host.scheduled_between or not ahead
        return replace(self, host=replace(self.host, scheduled_between=between))

    @cached_property
    def prompt_stack(self) -> Stack:
        """The same while prompts run."""
        return replace(self.stack, attention=self.attention.prompt)


_GROUPS: dict[str, Any] = {
    "memory": EngineMemory,
    "host": HostSeconds,
    "graphs": GraphCapture,
    "prefill": PrefillSteps,
    "operators": EngineOperators,
    "quantisation": EngineQuantisation,
    "attention": EngineAttention,
    "formats": EngineFormats,
    "layouts": EngineLayouts,
}


def _merged(base: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of figures over those of the engine that it extends."""
    merged = {**base, **row}
    for key in base.keys() & row.keys():
        if isinstance(base[key], dict) and key in (*_GROUPS, "sources"):
            merged[key] = _merged(base[key], row[key])
    return merged


@cache
def engine_tables() -> dict[str, dict[str, Any]]:
    """Return engines.toml, each engine with the figures of the one that it extends."""
    table = own_table(__file__, "engines.toml")
    for name, row in table["engines"].items():
        # An older or newer version of an engine states what differs; its kernels are those of the engine.
        base = table["engines"][row["extends"]] if "extends" in row else {}
        own = {"also": (), "launch_of": "", "launched_with": ()}
        table["engines"][name] = {"kernels": name, **_merged({**base, **own}, row)}
    return table


def engine_names() -> tuple[str, ...]:
    """Return the names of the engines that are known.

    >>> "vllm" in engine_names()
    True
    """
    return tuple(engine_tables()["engines"])


@cache
def _plain() -> tuple[str, ...]:
    """Return the names of engines as they are today, which releases and modes are named after."""
    names = engine_names()
    return tuple(name for name in names if not any(name.startswith(f"{other}-") for other in names))


@cache
def find_engine(word: str) -> Engine:
    """Return the engine of a name, or of another word that people have for it; raises `InputError` with known ones.

    >>> find_engine("vllm").memory.block_tokens, find_engine("trtllm").name
    (16, 'tensorrt-llm')
    """
    rows = engine_tables()["engines"]
    also = {one: rows[one].get("also", ()) for one in rows}
    row = rows[name := known_name("engine", word, "engine", also, _plain())]
    groups = {
        key: group(**{field: _frozen(value) for field, value in row.get(key, {}).items()})
        for key, group in _GROUPS.items()
    }
    own = {key: _frozen(value) for key, value in row.items() if key not in (*_GROUPS, "also", "extends", "sources")}
    return Engine(name=name, sources=tuple(_flat(row["sources"])), **own, **groups)


def launched_engine(engine: str, *says: str) -> str:
    """Return the engine that a launch runs as by what it says, the engine itself where that changes nothing.

    >>> launched_engine("tensorrt-llm", "windows"), launched_engine("tensorrt-llm", "eager")
    ('tensorrt-llm-windowed', 'tensorrt-llm')
    """
    rows = engine_tables()["engines"].items()
    of = (name for name, row in rows if row["launch_of"] == engine and {*row["launched_with"]} == {*says})
    return next(of, engine)


def _frozen(value: Any) -> Any:
    """Return a value of a table as tuples; a table is one of (key, *values)."""
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def static_row(device: Device) -> dict[str, Any]:
    """Return the chunk of prompts and the captured steps of SGLang on a device, by its memory.

    >>> from shardwise.hardware import find_device
    >>> static_row(find_device("h100-sxm-80gb").device)["chunk"]
    8192
    """
    rows: list[dict[str, Any]] = engine_tables()["static_share"]["devices"]
    return next(row for row in rows if device.usable_memory_bytes < row["below"] * 2**30)


def _flat(sources: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in sources.items():
        yield from _flat(value, f"{above}{key}.") if isinstance(value, dict) else ((above + key, value),)


def reduces_branches_once(family: str) -> bool:
    """Return whether engines add both branches of a parallel block before they reduce them, in a family of models.

    >>> reduces_branches_once("falcon"), reduces_branches_once("gpt-neox")
    (True, False)
    """
    return family in engine_tables()["summed_branches"]["families"]
