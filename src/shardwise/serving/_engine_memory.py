"""What an engine takes of a device's memory beside weights, and how it keeps the cache."""

from __future__ import annotations

import re
from typing import Literal

from shardwise.hardware import Device
from shardwise.ledger.number import X, ceil, maximum, minimum, total
from shardwise.models import STATE_TYPES, Architecture
from shardwise.records import dataclass
from shardwise.serving._cache import CacheRules, keeps_states, keeps_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """What an engine takes beside weights and cache, and how it spells its share of the memory."""

    budget: Literal["total", "static", "free"]
    """What the memory fraction bounds: all but the context, weights and cache, or the cache within what is left."""
    fraction: float
    """The share that it takes by default; 0 where it computes one (`[static_share]`)."""
    static_below: tuple[tuple[float, float, float], ...] = ()
    """GiB that it sets aside instead, below so many GiB of the device: of all, and for each rank of a replica."""
    static_grouped: float = 0.0
    """GiB more beside groups of attention that share experts."""
    static_guessing: float = 0.0
    """GiB more where tokens are guessed."""
    context_bytes: float
    communicator_bytes: float
    sampler_bytes_per_logit: float
    """Bytes of working memory for each logit of the sequences that may run."""
    v2_models: str = ""
    """Models of vLLM's second runner (a pattern of "dense", "experts" or "states", the family and "quantised")."""
    v2_sampler_bytes_per_logit: float = 0.0
    """Bytes of working memory for each of their logits."""
    v2_estimates_graphs: bool = True
    """Whether that runner captures graphs in its profile to say what all of them take."""
    sampler_row_bytes: float = 0.0
    """Bytes of a row of logits, for each entry of the vocabulary, that each core of the device has to itself."""
    library_bytes: tuple[tuple[str, float], ...] = ()
    """Workspace of the library of GEMMs on families of devices (patterns)."""
    communicator_bytes_of: tuple[tuple[str, float], ...] = ()
    """The same on families of devices (patterns)."""
    fusion_bytes: tuple[tuple[str, float], ...] = ()
    """Workspace of all-reduces that are fused with the norm behind them, on families of devices (patterns)."""
    expert_workspaces: tuple[tuple[str, str, str], ...] = ()
    """Families of devices and formats of weights (patterns) whose fused experts keep a workspace from the first step
    on; with "split" where they are split within, no expert parallelism beside."""
    gathers_tokens: bool = False
    """Groups of attention that share experts bring the tokens of all of them to every rank."""
    reserves_between_stages: bool = True
    """Stages of a pipeline have sent each other something by the time that the cache is sized."""
    block_tokens: int
    context_bytes_per_core: float = 0.0
    """Bytes of the context for each core of the device."""
    device_context: bool = False
    """All of the device's context counts, where nothing is sized by what is free behind it."""
    profiled_graph_bytes_per_core: float = 0.0
    """Bytes for each core that graphs captured in its profile leave on a rank without communicators."""
    graph_bytes: float = 0.0
    """Bytes that it sets aside for captured graphs beside those of each."""
    graph_bytes_each: float = 0.0
    """Bytes of each captured graph: one of a step of so many tokens, and one where all of them decode."""
    graph_sizes: tuple[tuple[int, ...], ...] = ()
    """Tokens of the captured steps: first, last and step of each run, up to the largest."""
    graph_vendors: str = ".*"
    """Vendors of devices (a pattern) that it captures graphs on."""
    loads_towers: bool = False
    """Towers of images and sound are on its first stage, in 16 bits, split over the tensor-parallel ranks."""
    tables_on_host: bool = False
    """Tables of embeddings stay with the host of a device that has memory of its own."""
    towers_asked: tuple[str, ...] = ()
    """Families whose towers are loaded only where a launch asks for them."""
    static_buffers: bool = False
    """All buffers of a pass exist at once."""
    rotary_element_bytes: float = 0.0
    """Bytes of an element of the tables of cosines and sines of all positions, which each stage holds."""
    rotary_families: str = ""
    """Families of models (a pattern) whose heads are rotated whole; tables of others are not counted."""
    absorbed_copies: tuple[tuple[str, float], ...] = ()
    """Bytes of an element of the copy of latents' up-projection that decoding reads, by its format (patterns)."""
    tied_head_copied: bool = False
    """A head that is tied to the embedding table has a copy of its own."""
    hybrid_kv_cache_groups: bool = False
    """Layers that keep different things share pages of one size."""
    windowed: tuple[str, ...] = (".*",)
    """Families of models (patterns) whose layers with a window keep that window alone; those of others keep all."""
    window_slack: int = 0
    """Tokens behind its window that such a layer keeps until they are dropped together."""
    window_step: bool = False
    """It keeps the tokens of a step of a prompt behind its window, too."""
    window_block: int = 1
    """Tokens that what such a layer keeps is rounded up to."""
    window_ratios: tuple[tuple[str, float], ...] = ()
    """Tokens of the pool of windows for each of the pool of other layers where prefixes are cached, by family of models
    (patterns, the first that matches); none: both take what they need."""
    state_share: float = 0.0
    """Share of the cache that recurrent states have to themselves where prefixes are cached (0: what they need)."""
    state_slots: tuple[tuple[str, int], ...] = ()
    """Slots of states that a running sequence counts for there, by family of models."""
    verified_states: int = 0
    """States of a sequence that verifies guesses beside its own and one a guess."""
    caches_prefixes: bool = False
    """Whether the server that is asked about caches prefixes."""
    packed_latents: bool = False
    """Latents of sparse attention in 8-bit floats have scales, and what is rotated stays in 16 bits."""
    bare_latents: tuple[tuple[str, str], ...] = ()
    """Families of models and of devices (patterns) whose kernels read such latents without either."""
    shared_layers: bool = False
    """Layers that read an earlier layer's keys and values have a cache of their own allocated, too."""
    wide_index_keys: bool = False
    """Keys of indexers are in the type of the cache."""
    input_bytes: float = 0.0
    """Bytes of an element of the inputs that a convolution keeps (0: as wide as activations)."""
    state_bytes: float = 4.0
    """Bytes of an element of a recurrent state (0: as wide as activations) where the model's file names no type."""
    state_keys: tuple[str, ...] = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    """Keys of the file by which it does."""
    profiles_reserved: bool = False
    """Its cache is what remains of all that the allocator reserved at the peak, in use or not: that is not modelled."""

    @property
    def cache_rules(self) -> CacheRules:
        """How it keeps what mixers say they keep.

        >>> from shardwise.serving import find_engine
        >>> [find_engine(name).memory.cache_rules.shared_layers for name in ("vllm", "sglang")]
        [False, True]
        """
        return CacheRules(
            shared_layers=self.shared_layers, wide_index_keys=self.wide_index_keys, input_bytes=self.input_bytes
        )

    def state_bytes_of(self, types: tuple[tuple[str, str], ...]) -> float:
        """Return bytes of an element of a recurrent state, 0 where it is as wide as activations.

        >>> from shardwise.serving import find_engine
        >>> [find_engine(name).memory.state_bytes_of((("mamba_ssm_dtype", "float32"),)) for name in ("vllm", "trtllm")]
        [4.0, 0.0]
        """
        named = (STATE_TYPES[word] for key, word in types if key in self.state_keys)
        return next(filter(None, named), self.state_bytes)

    def packs_latents(self, model: str, device: str) -> bool:
        """Return whether latents in 8-bit floats of a family of models are packed on one of devices."""
        bare = any(re.fullmatch(of, model) and re.fullmatch(on, device) for of, on in self.bare_latents)
        return self.packed_latents and not bare

    def kept_window(self, window: int, family: str, step: int) -> int:
        """Return the tokens that a layer with a window keeps beside steps of so many, 0 where it keeps all.

        >>> from shardwise.serving import find_engine
        >>> [find_engine(name).memory.kept_window(1024, "gemma3_text", 512) for name in ("vllm", "sglang", "llama.cpp")]
        [1024, 0, 1536]
        """
        if not window or not self.keeps_windows(family):
            return 0
        kept = window + self.window_slack + self.window_step * step
        return -(-kept // self.window_block) * self.window_block

    def loads_towers_of(self, family: str) -> bool:
        """Return whether the towers of a model of a family are loaded without being asked for.

        >>> from shardwise.serving import find_engine
        >>> [find_engine("sglang").memory.loads_towers_of(family) for family in ("llama4_text", "gemma3_text")]
        [False, True]
        """
        return self.loads_towers and not any(re.fullmatch(of, family) for of in self.towers_asked)

    def keeps_windows(self, family: str) -> bool:
        """Return whether layers with a window keep no more than that in models of a family.

        >>> from shardwise.serving import find_engine
        >>> [find_engine("sglang").memory.keeps_windows(family) for family in ("gpt_oss", "gemma3_text")]
        [True, False]
        """
        return any(re.fullmatch(one, family) for one in self.windowed)

    def window_ratio(self, family: str) -> float:
        """Return tokens of the pool of windows for each of the other layers' in models of a family, 0 for no such pool.

        >>> from shardwise.serving import find_engine
        >>> [one.memory.window_ratio("gpt_oss") for one in (find_engine("sglang"), find_engine("sglang").caching())]
        [0.0, 0.8]
        """
        ratios = self.window_ratios if self.caches_prefixes else ()
        return next((ratio for one, ratio in ratios if re.fullmatch(one, family)), 0.0)

    def divides_cache(self, model: Architecture) -> bool:
        """Return whether cached prefixes cost a model more than they hold: pools of fixed shares, or more states.

        >>> from shardwise.models import load_model
        >>> from shardwise.serving import find_engine
        >>> names = ("qwen3-8b", "gpt-oss-20b", "qwen3-next-80b-a3b")
        >>> [find_engine("sglang").caching().memory.divides_cache(load_model(name)) for name in names]
        [False, True, True]
        """
        windows = model.has_windows and self.keeps_windows(model.family) and self.window_ratio(model.family)
        states = self.pool_of_states or self.states_of(model.family, 0) > 1
        mixed = keeps_states(model.kinds) and any(map(keeps_tokens, model.kinds))
        return self.caches_prefixes and bool(windows or (states and mixed))

    @property
    def pool_of_states(self) -> float:
        """Share of the cache that is for recurrent states alone, 0 where they take what they need."""
        return self.state_share if self.caches_prefixes else 0.0

    @property
    def sizes_states(self) -> bool:
        """Whether it makes a state for each sequence that may run before it sizes the rest of its cache."""
        return self.state_share > 0 and not self.caches_prefixes

    def states_of(self, family: str, guesses: int) -> int:
        """Return the states that a sequence with so many guesses a step takes in models of a family."""
        slots = self.state_slots if self.caches_prefixes else ()
        own = next((count for one, count in slots if re.fullmatch(one, family)), 1)
        return own + guesses + (self.verified_states if guesses else 0)

    def communicator_bytes_on(self, family: str) -> float:
        """Return the buffers of a rank's communicators on a family of devices.

        >>> from shardwise.serving import find_engine
        >>> [find_engine("sglang").memory.communicator_bytes_on(one) / 1e9 for one in ("hopper", "ampere")]
        [1.3, 0.45]
        """
        own = (size for one, size in self.communicator_bytes_of if re.fullmatch(one, family))
        return next(own, self.communicator_bytes)

    def runs_v2(self, model: Architecture, quantised: bool = False) -> bool:
        """Return whether vLLM's second runner runs a model.

        >>> from shardwise.models import load_model
        >>> from shardwise.serving import find_engine
        >>> [find_engine("vllm-0.23").memory.runs_v2(load_model("llama-3.1-8b"), narrow) for narrow in (False, True)]
        [True, False]
        """
        layers = "states" if keeps_states(model.kinds) else "experts" if model.has_experts else "dense"
        return re.fullmatch(self.v2_models, f"{layers} {model.family}" + " quantised" * quantised) is not None

    def sampler_bytes(self, model: Architecture, quantised: bool = False) -> float:
        """Return bytes of working memory for each logit of a model's sequences that may run.

        >>> from shardwise.models import load_model
        >>> from shardwise.serving import find_engine
        >>> names = ("llama-3.1-8b", "qwen3-30b-a3b", "qwen3-next-80b-a3b")
        >>> [find_engine("vllm-0.28").memory.sampler_bytes(load_model(name)) for name in names]
        [6.125, 14.0, 14.0]
        """
        return self.v2_sampler_bytes_per_logit if self.runs_v2(model, quantised) else self.sampler_bytes_per_logit

    def absorbed_bytes(self, weights: str) -> float:
        """Return bytes of an element of the copy of latents' up-projection beside one in a format, 0 for no copy.

        >>> from shardwise.serving import find_engine
        >>> [find_engine(name).memory.absorbed_bytes(one) for name in ("vllm", "sglang") for one in ("bf16", "fp8")]
        [0.0, 2.0, 2.0, 1.0]
        """
        return next((size for one, size in self.absorbed_copies if re.fullmatch(one, weights)), 0.0)

    def library_bytes_on(self, family: str) -> float:
        """Return the workspace of the library of GEMMs on a family of devices.

        >>> from shardwise.serving import find_engine
        >>> [find_engine("vllm").memory.library_bytes_on(one) / 2**20 for one in ("hopper", "ampere", "cdna3")]
        [32.0, 8.125, 0.0]
        """
        return next((size for one, size in self.library_bytes if re.fullmatch(one, family)), 0.0)

    def fusion_bytes_on(self, family: str) -> float:
        """Return the workspace of fused all-reduces on a family of devices.

        >>> from shardwise.serving import find_engine
        >>> [find_engine("vllm").memory.fusion_bytes_on(one) / 2**20 for one in ("hopper", "blackwell-gddr")]
        [512.0, 0.0]
        """
        return next((size for one, size in self.fusion_bytes if re.fullmatch(one, family)), 0.0)

    def expert_workspace(self, family: str, weights: str) -> str:
        """Return "any" or "split" where experts of a format keep a workspace on a family of devices, else nothing.

        >>> from shardwise.serving import find_engine
        >>> memory = find_engine("vllm").memory
        >>> [memory.expert_workspace("hopper", one) for one in ("bf16", "fp8-block", "mxfp4")]
        ['any', 'split', '']
        """
        rows = self.expert_workspaces
        return next((kept for on, of, kept in rows if re.fullmatch(on, family) and re.fullmatch(of, weights)), "")

    def tables_apart(self, device: Device) -> bool:
        """Return whether tables of embeddings are in the memory of the host, which a device's own is apart from."""
        return self.tables_on_host and device.knows("host_bytes_per_second")

    def captures(self, device: Device, v2: bool = False) -> bool:
        """Return whether it sets memory aside for graphs that it captures on a device, or its second runner does."""
        estimates = self.v2_estimates_graphs or not v2
        return bool(self.graph_sizes) and estimates and re.fullmatch(self.graph_vendors, device.vendor) is not None

    def profiles_graphs_on(self, device: Device, v2: bool = False) -> bool:
        """Return whether graphs that it captures in its profile leave something on a device."""
        captured = self.profiled_graph_bytes_per_core > 0 and (self.v2_estimates_graphs or not v2)
        return captured and re.fullmatch(self.graph_vendors, device.vendor) is not None

    def captured_bytes(self, tokens: X, decoded: X) -> X:
        """Return the bytes of captured graphs of steps of up to so many tokens, and of so many that decode.

        >>> from shardwise.serving import find_engine
        >>> [round(find_engine("vllm").memory.captured_bytes(512.0, most) / 2**30, 2) for most in (256.0, 1024.0)]
        [0.8, 0.9]
        """
        graphs = self._sizes_up_to(tokens) + self._sizes_up_to(minimum(tokens, decoded))
        return self.graph_bytes + self.graph_bytes_each * graphs

    def _sizes_up_to(self, tokens: X) -> X:
        """Return how many captured steps have so many tokens at most."""
        runs = (
            minimum(maximum(ceil((tokens + 1 - first) / step), 0), (last - first) // step + 1)
            for first, last, step in self.graph_sizes
        )
        return total(runs, 0 * tokens)


def pool_notes(memory: EngineMemory, caching: EngineMemory, model: Architecture) -> list[str]:
    """Return how an engine divides its cache where its prefix cache is on, or would were it, as it would be then."""
    windows = model.has_windows and memory.keeps_windows(model.family)
    ratio = caching.window_ratio(model.family) if windows else 0.0
    parts = [f"{ratio:g} tokens of windows for each of other layers"] * bool(ratio)
    if caching.pool_of_states and keeps_states(model.kinds):
        slots = caching.states_of(model.family, 0)
        parts.append(f"{caching.pool_of_states:.0%} of the cache for states, {slots} a sequence")
    if not parts:
        return []
    alone = "no prefix cache: pools take what sequences need, where with one they are"
    return [f"{'pools beside cached prefixes:' if memory.caches_prefixes else alone} {', '.join(parts)}"]
