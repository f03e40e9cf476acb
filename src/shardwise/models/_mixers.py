"""What mixes the tokens of a layer, with its own sizes: what every mixer says, and the kinds of attention.

A mixer says what tensor parallelism splits, what it keeps between tokens, where its cost bends, and its modules;
nothing above asks for its class to know.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from shardwise.models._kept import State, TokenCache
from shardwise.records import dataclass, replace

NormKind: TypeAlias = Literal[
    "rmsnorm", "rmsnorm-float", "rmsnorm-offset", "rmsnorm-power", "rmsnorm-no-weight", "rmsnorm-power-no-weight",
    "layernorm", "layernorm-no-bias", "layernorm-float", "layernorm-no-weight", "layernorm-wide-no-weight", "none",
]  # fmt: skip
"""How a norm is learned, and where transformers applies its weights.

"rmsnorm-offset" stores its weights as an offset from one (Gemma, Qwen3-Next), "rmsnorm-float" meets them in fp32
(OLMo 2, gpt-oss), "rmsnorm-power" casts them to fp32 and takes a power of the mean square (Gemma 4), "layernorm-float"
has no bias and is written out in fp32 (Cohere), "layernorm-wide-no-weight" runs on an fp32 copy (OLMo).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreSizes:
    """What measured kernels of attention are known by: their kind, and sizes of a head.

    `elements` are those of a key and a value, `head` the size of a query, `cached` elements of a token in the cache for
    a head, `group` query heads for each of them.
    """

    kind: Literal["prefill", "decode", "latent_prefill", "latent_decode"]
    elements: int
    head: int
    cached: int
    group: float = 1.0


@dataclass(frozen=True, slots=True)
class KeyHeads:
    """The heads of keys and values of softmax attention: how many, their widths, those of queries, learnt sinks.

    `viewed_keys` is whether all query heads are handed the one head as a view.
    """

    heads: int
    head_dim: int
    value_dim: int
    query_heads: int
    windowed: bool
    sinks: bool = False
    viewed_keys: bool = False


class Mixer:
    """What every mixer says of itself; these are the answers of one that keeps nothing and splits nothing."""

    __slots__ = ()
    attends: ClassVar[bool] = False
    """Whether it is softmax attention, which looks at past tokens one by one."""
    latent: ClassVar[bool] = False
    """Whether keys and values go through one low-rank latent."""
    two_dimensional: ClassVar[bool] = False
    """Whether it is built for the two-dimensional layout."""
    remembers: ClassVar[bool] = False
    """Whether modules of transformers keep its state in themselves, not in a cache that they are given."""

    @property
    def is_causal(self) -> bool:
        """Whether it sees only a token and those before it."""
        return True

    @property
    def rotated(self) -> int:
        """How many elements of a head positions rotate; a head that is rotated in part counts whole."""
        return 0

    @property
    def query_width(self) -> int:
        """Elements of a token's queries over all heads; 0 where there are none."""
        return 0

    def splits(self) -> tuple[tuple[str, int], ...]:
        """Return (what, how many) of everything in it that tensor parallelism splits."""
        return ()

    def replicates(self) -> tuple[int, ...]:
        """Return how many there are of what tensor parallelism splits, or holds on several ranks where they are few."""
        return ()

    def core(self, decoding: bool) -> CoreSizes | None:
        """Return what the kernel of its core is measured by, over a prompt or over a cache; None where none is."""
        return None

    def whole_context(self) -> Mixer:
        """Return it without the window by which it forgets tokens."""
        return self

    def caches(self) -> tuple[TokenCache, ...]:
        """Return what it keeps of every token."""
        return ()

    def allocated(self) -> tuple[TokenCache, ...]:
        """Return what it would keep did it read no earlier layer's: some engines have room for that all the same."""
        return self.caches()

    def cached_heads(self) -> KeyHeads | None:
        """Return its heads of keys and values; None where keys are made of latents or there are none."""
        return None

    @property
    def float_state(self) -> bool:
        """Whether its recurrence is kept in fp32 even by engines that keep others in the type of activations."""
        return False

    def recurrent_state(self) -> State:
        """Return what it keeps of a sequence whatever its length."""
        return State()

    def cost_breakpoints(self) -> tuple[int, ...]:
        """Return the context lengths at which the cost of a token changes its slope: windows, chunks, selections."""
        return ()

    def modules(self) -> tuple[str, ...]:
        """Return the modules of Megatron-LM that can be recomputed by name (transformer_config.py)."""
        return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexer:
    """The selector of sparse attention (DeepSeek-V3.2): small heads that pick `top_k` past tokens.

    A `shared` one takes the selection of an earlier layer and has no weights (GLM-5, arXiv:2603.12201). Keys of `pool`
    tokens become one before they are scored: by a learned gate (GLM-5.3), or their mean. A style norms
    queries too and has no weights of heads: "groups" picks for each key-value head (MiniMax-M3), "mean" for all
    (Qwen3.8-Flash-Next).
    """

    heads: int
    head_dim: int
    top_k: int
    shared: bool = False
    pool: int = 0
    style: Literal["", "groups", "mean"] = ""

    def caches(self) -> tuple[TokenCache, ...]:
        """Return what it keeps, whatever the format of the cache: a key in 8 bits and a scale, in 16 where unweighted.

        What a pool that is not full is made of is in 16 bits (github.com/vllm-project/vllm 2026-11,
        DeepseekV32IndexerCache, MiniMaxM3IndexerCache, Glm5NextIndexerCache, Glm5NextTailCache).
        """
        weighted = not self.style
        key = self.head_dim + 4 if weighted else 2 * self.head_dim
        keys = TokenCache(elements=0, bytes8=key, keys=self.head_dim, rate=self.pool or 1)
        tail = TokenCache(elements=0, bytes8=(4 if weighted else 2) * self.head_dim, limit=self.pool, ring=True)
        return () if self.shared else (keys, tail) if self.pool else (keys,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention(Mixer):
    """Softmax attention with grouped key-value heads (MHA, GQA and MQA are numbers of `kv_heads`).

    `window` and `chunk` are in tokens, 0 for none. `qk_norm` "head" normalises each head with weights of `head_dim`,
    "full" the whole projection, "heads" has weights of heads * head_dim but normalises each head. `kv_from_earlier`
    marks a layer that reads the KV cache of an earlier layer and so has no key and value projections.
    `shared_key_value` makes one projection serve as key and value. `output_gate` has a gate of every output element,
    which is a linear layer of its own where it is `gate_apart`, `head_gate` one of every head. `v_norm` has no weights.
    `rotary` is whether positions rotate queries and keys, `softcap` whether scores go through a tanh, `indexer` what
    picks the tokens attended to. `fused_projection` is one matrix for queries, keys and values, of which what is not
    rotated is a view; `joined_rotary` puts heads together from a rotated and an unrotated part. `viewed_keys` are
    one head that its class hands to all query heads as a view; `masked` classes give SDPA a mask where it would need
    none, and a `narrow_softmax` is in the type of the scores.
    """

    attends: ClassVar[bool] = True
    two_dimensional: ClassVar[bool] = True
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "heads", "full"] = "none"
    qk_norm_kind: NormKind = "rmsnorm"
    v_norm: bool = False
    sinks: bool = False
    output_gate: bool = False
    gate_apart: bool = False
    head_gate: bool = False
    rotary: bool = True
    window: int = 0
    chunk: int = 0
    causal: bool = True
    shared_key_value: bool = False
    kv_from_earlier: bool = False
    input_width: int = 0
    softcap: bool = False
    fused_projection: bool = False
    joined_rotary: bool = False
    viewed_keys: bool = False
    masked: bool = False
    narrow_softmax: bool = False
    indexer: Indexer | None = None

    @property
    def value_dim(self) -> int:
        """The width of one value head."""
        return self.v_head_dim or self.head_dim

    @property
    def is_causal(self) -> bool:
        """Whether a mask hides the tokens that follow."""
        return self.causal

    @property
    def rotated(self) -> int:
        """The width of a head, where positions rotate it."""
        return self.head_dim if self.rotary else 0

    @property
    def query_width(self) -> int:
        """Those of all heads."""
        return self.heads * self.head_dim

    def splits(self) -> tuple[tuple[str, int], ...]:
        """Query heads; key-value heads are replicated where there are fewer than ranks."""
        return (("query heads", self.heads),)

    def replicates(self) -> tuple[int, ...]:
        """Key-value heads."""
        return (self.kv_heads,)

    def core(self, decoding: bool) -> CoreSizes:
        """Keys and values of a head, which query heads share in groups."""
        both, group = self.head_dim + self.value_dim, self.heads / self.kv_heads
        return CoreSizes(
            kind="decode" if decoding else "prefill", elements=both, head=self.head_dim, cached=both, group=group
        )

    def whole_context(self) -> Attention:
        """The same without its window."""
        return replace(self, window=0) if self.window else self

    def caches(self) -> tuple[TokenCache, ...]:
        """K * (H + Hv) elements; attention both ways keeps nothing.

        Keys and values of one projection are both kept: keys are rotated, values are not (transformers 5.23.0
        modeling_gemma4.py; vLLM's and SGLang's gemma4.py call a kernel with two caches, llama.cpp allocates both).
        """
        if self.kv_from_earlier or not self.causal:
            return ()
        width = self.head_dim + self.value_dim
        cache = TokenCache(heads=self.kv_heads, elements=width, limit=self.window or self.chunk)
        return cache, *(self.indexer.caches() if self.indexer else ())

    def allocated(self) -> tuple[TokenCache, ...]:
        """Its own, whether or not an earlier layer's are read in their place."""
        return replace(self, kv_from_earlier=False).caches() if self.kv_from_earlier else self.caches()

    def cached_heads(self) -> KeyHeads:
        """Those of a layer, whether it makes them itself or reads those of an earlier one."""
        heads = KeyHeads(self.kv_heads, self.head_dim, self.value_dim, self.heads, self.window > 0, self.sinks)
        return replace(heads, viewed_keys=self.viewed_keys)

    def cost_breakpoints(self) -> tuple[int, ...]:
        """Its window or chunk, and the tokens that its indexer picks."""
        return (self.window, self.chunk, *((self.indexer.top_k,) if self.indexer else ()))

    def modules(self) -> tuple[str, ...]:
        """Its core."""
        return ("core_attn",)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention(Mixer):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values through a low-rank latent.

    `q_lora_rank` 0 means a full-rank query projection. `latent_norm` "none" leaves the latents as they are (Megatron-LM
    without --qk-layernorm). `head_gate` has a gate of every head on the output (Ling 3.0), `output_gate` one of every
    element, with a linear layer of its own (Hy4).
    """

    attends: ClassVar[bool] = True
    latent: ClassVar[bool] = True
    heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool = False
    latent_norm: NormKind = "rmsnorm"
    indexer: Indexer | None = None
    head_gate: bool = False
    output_gate: bool = False
    causal: bool = True

    @property
    def qk_head_dim(self) -> int:
        """The width of one query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def is_causal(self) -> bool:
        """Whether a mask hides the tokens that follow."""
        return self.causal

    @property
    def rotated(self) -> int:
        """The part of a head that positions rotate."""
        return self.qk_rope_head_dim

    @property
    def query_width(self) -> int:
        """Those of all heads."""
        return self.heads * self.qk_head_dim

    def splits(self) -> tuple[tuple[str, int], ...]:
        """Query heads; latents are whole on every rank."""
        return (("query heads", self.heads),)

    def core(self, decoding: bool) -> CoreSizes:
        """Absorbed over the latents in decode, expanded to keys and values over a prompt."""
        if decoding:
            wide = self.kv_lora_rank + self.qk_rope_head_dim
            return CoreSizes(kind="latent_decode", elements=wide + self.kv_lora_rank, head=wide, cached=wide)
        both = self.qk_head_dim + self.v_head_dim
        return CoreSizes(kind="latent_prefill", elements=both, head=self.qk_head_dim, cached=both)

    def caches(self) -> tuple[TokenCache, ...]:
        """Kv + r elements for all heads, and what its indexer keeps.

        What is picked is packed: a scale of 4 bytes for 128 elements of the latent (FlashMLA's ABI, 656 bytes a token).
        """
        packed = -(-self.kv_lora_rank // 128) * 4 + self.qk_rope_head_dim if self.indexer else 0
        latent = TokenCache(elements=self.kv_lora_rank + self.qk_rope_head_dim, packed8=packed)
        return latent, *(self.indexer.caches() if self.indexer else ())

    def cost_breakpoints(self) -> tuple[int, ...]:
        """The tokens that its indexer picks."""
        return (self.indexer.top_k,) if self.indexer else ()

    def modules(self) -> tuple[str, ...]:
        """Its core, and the projections up from the latents."""
        return ("core_attn", "mla_up_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedAttention(Mixer):
    """DeepSeek-V4's attention: one key-value head, a window, and past tokens compressed `rate` to one beside it.

    Keys are values, `rope_head_dim` of their elements rotated. The query goes through `q_lora_rank`, the output through
    `out_groups` maps of `out_lora_rank` each. `rate` 0 is the window alone. An indexed layer compresses overlapping
    windows and picks `indexer.top_k` of them. `entries` "own" are a layer's own, with keys of the indexer beside them;
    those of a "source" are of windows that do not overlap, make the indexer's keys and are read by the layers behind it
    too, which have "earlier" ones (DeepSeek-V4.1). `query_norm` is of each head's query, without weights.
    """

    attends: ClassVar[bool] = True
    heads: int
    head_dim: int
    q_lora_rank: int
    out_groups: int
    out_lora_rank: int
    window: int
    rate: int = 0
    rope_head_dim: int = 0
    indexer: Indexer | None = None
    entries: Literal["own", "source", "earlier"] = "own"
    query_norm: bool = True

    def caches(self) -> tuple[TokenCache, ...]:
        """One key-value head: a window, one entry for every `rate` tokens, and values and gates until that is made.

        Packed, what is rotated stays in 16 bits and 64 elements of the rest have a scale of one byte, with one of
        padding: 584 bytes (github.com/vllm-project/vllm v0.33.0 vllm/models/deepseek_v4/attention.py, and SGLang 0.5.23
        python/sglang/srt/model_executor/pool_configurator.py, DSV4PoolConfigurator). Keys of the indexer have one of 4
        bytes for 128. Values and gates that are not pooled yet are in 32 bits, twice as many of twice as many tokens
        where windows overlap (vllm/models/deepseek_v4/compressor.py, CompressorStateCache), and of 8 tokens in a source
        (vllm/models/deepseek_v41/compressor.py).
        """
        packed = self.rope_head_dim + -(-(self.head_dim - self.rope_head_dim) // 64) + 1
        window = TokenCache(elements=self.head_dim, packed8=packed, limit=self.window)
        if not self.rate or self.entries == "earlier":
            return (window,)
        x = self.indexer if self.indexer and not self.indexer.shared else None
        keys, width = (x.head_dim + -(-x.head_dim // 128) * 4, self.head_dim + x.head_dim) if x else (0, self.head_dim)
        kept = TokenCache(elements=self.head_dim, bytes8=keys, packed8=packed, rate=self.rate)
        if self.entries == "source":
            open_rows = TokenCache(elements=0, bytes8=4 * 2 * self.head_dim, limit=8, ring=True)
            return (window, kept, open_rows) if self.rate > 1 else (window, kept)
        series = 2 if self.indexer else 1
        pooled = TokenCache(elements=0, bytes8=4 * 2 * series * width, limit=series * self.rate, ring=True)
        return window, kept, pooled

    def cost_breakpoints(self) -> tuple[int, ...]:
        """Its window, and the tokens that its indexer picks."""
        return (self.window, self.indexer.top_k * self.rate if self.indexer else 0)
