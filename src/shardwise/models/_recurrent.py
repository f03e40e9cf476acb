"""Recurrent mixers: state-space models, linear attention, gated convolutions."""

from __future__ import annotations

from typing import ClassVar, Literal

from shardwise.models._kept import State, TokenCache
from shardwise.models._mixers import Mixer
from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba1(Mixer):
    """Selective state space (arXiv:2312.00752); `inner` = expand * hidden. `norms` are Jamba's on dt, B and C."""

    inner: int
    state: int
    conv: int
    dt_rank: int
    conv_bias: bool = True
    proj_bias: bool = False
    norms: bool = False

    def splits(self) -> tuple[tuple[str, int], ...]:
        """Channels."""
        return (("inner width", self.inner),)

    def recurrent_state(self) -> State:
        """The recurrence, and the inputs of the convolution."""
        return State(wide=self.inner * self.state, narrow=(self.conv - 1) * self.inner)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2(Mixer):
    """State space duality (arXiv:2405.21060); `inner` = heads * head_dim. `proj_bias` is of the input projection."""

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int
    chunk: int = 256
    conv_bias: bool = True
    proj_bias: bool = False
    out_bias: bool = False
    gated_norm: bool = True

    @property
    def inner(self) -> int:
        """The width of the state-space stream."""
        return self.heads * self.head_dim

    def splits(self) -> tuple[tuple[str, int], ...]:
        """Heads."""
        return (("state-space heads", self.heads),)

    def recurrent_state(self) -> State:
        """The recurrence, and the inputs of the convolution of stream, B and C.

        Ranks beyond the groups of B and C have copies (github.com/vllm-project/vllm v0.33.0
        vllm/model_executor/layers/mamba/mamba_utils.py, extra_groups_for_head_shards).
        """
        ring = self.conv - 1
        return State(
            wide=self.inner * self.state, narrow=ring * self.inner, groups=self.groups, of_group=2 * ring * self.state
        )


_DELTA_LAYERS = {
    "gated-delta-net": ("in_proj_qkvz", "in_proj_ba"),
    "kda": ("q", "k", "v", "b"),
    "kda-full-rank": ("q", "k", "v", "f", "b", "g"),
}
"""Linear layers of transformers 5.23.0 models/qwen3_next, kimi_linear and bailing_hybrid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDelta(Mixer):
    """Gated delta rule linear attention (arXiv:2412.06464).

    `style` names the projections around the recurrence: "gated-delta-net" (Qwen3-Next, a decay a head), "kda" (Kimi
    Linear, a decay a channel, whose decay and output gates go through a low rank of `value_dim`), or "kda-full-rank"
    (Ling 3.0, both gates projected at once). `projections` are the linear layers that read the stream where they are
    not those of the style, as their class names them: the letters of the last word are what a layer makes, q, k and v,
    the output gate z or g, the step b, and the decay a or f; what goes through a low rank is not among them.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    style: Literal["gated-delta-net", "kda", "kda-full-rank"] = "gated-delta-net"
    projections: tuple[str, ...] = ()

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """The linear layers that read the stream, where the class has others than that of the first of its style."""
        return self.projections or _DELTA_LAYERS[self.style]

    @property
    def decays(self) -> int:
        """Values of decay a head: one, or one a channel of its keys."""
        return 1 if self.style == "gated-delta-net" else self.key_dim

    def splits(self) -> tuple[tuple[str, int], ...]:
        """Heads of keys and of values."""
        return (("linear-attention key heads", self.key_heads), ("linear-attention value heads", self.value_heads))

    @property
    def float_state(self) -> bool:
        """With a decay a channel (github.com/vllm-project/vllm vllm/model_executor/layers/mamba, kda_state_dtype)."""
        return self.style != "gated-delta-net"

    def recurrent_state(self) -> State:
        """A key-by-value matrix a head, and the inputs of the convolution of queries, keys and values."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return State(wide=self.key_dim * values, narrow=(self.conv - 1) * (2 * keys + values))


@dataclass(frozen=True, kw_only=True, slots=True)
class LightningAttention(Mixer):
    """Linear attention with a fixed decay a head, in blocks of `block` tokens (arXiv:2401.04658, arXiv:2501.08313)."""

    heads: int
    head_dim: int
    block: int = 256

    def splits(self) -> tuple[tuple[str, int], ...]:
        """Heads."""
        return (("linear-attention heads", self.heads),)

    def recurrent_state(self) -> State:
        """A key-by-value matrix a head."""
        return State(wide=self.heads * self.head_dim**2)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConv(Mixer):
    """Gated short convolution (LFM2)."""

    width: int
    conv: int
    bias: bool = False

    def splits(self) -> tuple[tuple[str, int], ...]:
        """Channels."""
        return (("mixer width", self.width),)

    def recurrent_state(self) -> State:
        """The inputs of the convolution."""
        return State(narrow=(self.conv - 1) * self.width)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConvs(Mixer):
    """Short convolutions around attention (Inkling).

    Of the keys and values of `kv_heads`, and of what attention and the feed-forward add to a stream of `width`.
    """

    kv_heads: int
    head_dim: int
    width: int
    conv: int

    def replicates(self) -> tuple[int, ...]:
        """Key-value heads."""
        return (self.kv_heads,)

    def caches(self) -> tuple[TokenCache, ...]:
        """The last inputs of each convolution in 16 bits, those of the stream whole on every tensor-parallel rank.

        github.com/sgl-project/sglang python/sglang/srt/models/inkling.py, InklingConvStream.
        """
        heads = TokenCache(
            heads=self.kv_heads, elements=0, bytes8=2 * 2 * self.head_dim, limit=self.conv - 1, ring=True
        )
        return heads, TokenCache(elements=0, bytes8=2 * 2 * self.width, limit=self.conv - 1, ring=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentGate(Mixer):
    """Real-gated linear recurrent unit with its two branches (Griffin, arXiv:2402.19427).

    transformers 5.23.0 modeling_recurrent_gemma.py: recurrent_states and conv1d_state of the modules.
    """

    remembers: ClassVar[bool] = True
    width: int
    heads: int
    conv: int

    def splits(self) -> tuple[tuple[str, int], ...]:
        """Heads, which are blocks of its gates."""
        return (("recurrent heads", self.heads),)

    @property
    def float_state(self) -> bool:
        """It is: transformers' modules hold it so."""
        return True

    def recurrent_state(self) -> State:
        """The recurrence, and the inputs of the convolution."""
        return State(wide=self.width, narrow=(self.conv - 1) * self.width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rwkv(Mixer):
    """RWKV-4 time mixing (arXiv:2305.13048)."""

    width: int

    def splits(self) -> tuple[tuple[str, int], ...]:
        """Channels."""
        return (("mixer width", self.width),)

    @property
    def float_state(self) -> bool:
        """It is: sums of exponentials."""
        return True

    def recurrent_state(self) -> State:
        """Numerator, denominator and maximum of the recurrence, and two shifted inputs (arXiv:2305.13048)."""
        return State(wide=3 * self.width, narrow=2 * self.width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlstm(Mixer):
    """Matrix LSTM cell of xLSTM (arXiv:2405.04517); dims are per head."""

    heads: int
    qk_dim: int
    v_dim: int
    bias: bool = False

    def splits(self) -> tuple[tuple[str, int], ...]:
        """Heads."""
        return (("recurrent heads", self.heads),)

    @property
    def float_state(self) -> bool:
        """It is: sums of exponentials."""
        return True

    def recurrent_state(self) -> State:
        """A matrix, a normaliser and a maximum of gates a head (arXiv:2405.04517 section 2.3)."""
        return State(wide=self.heads * (self.qk_dim * self.v_dim + self.qk_dim + 1))
