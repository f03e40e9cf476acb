"""The model that Megatron-LM's arguments describe, with the widths that its own code derives.

Derivations: megatron/training/arguments.py validate_args, megatron/core/transformer (transformer_config.py, mlp.py,
moe/router.py, multi_latent_attention.py), megatron/core/models/hybrid and megatron/core/ssm, 2026-08.
"""

from __future__ import annotations

from shardwise.formats.megatron._reader import Reader
from shardwise.formats.megatron._values import facts
from shardwise.models import (
    MLP,
    MOST_PREDICTIONS,
    Activation,
    Attention,
    Block,
    FeedForward,
    GatedDelta,
    Indexer,
    LatentAttention,
    Mamba2,
    Mixer,
    Model,
    MoE,
    NormKind,
)
from shardwise.records import replace

_ACTIVATIONS: tuple[tuple[str, Activation, bool], ...] = (
    ("swiglu", "silu", True),
    ("quick_geglu", "gelu", True),
    ("squared_relu", "relu2", False),
    ("openai_gelu", "gelu-tanh", False),
)
_HYBRID = {"M": "mamba", "*": "attention", "+": "latent", "D": "sparse", "G": "delta", "-": "mlp", "E": "moe"}


def build(r: Reader, name: str) -> Model | None:
    """Return the model, or None where its vocabulary is not known; problems are recorded."""
    runs = _runs(r)
    norm = _norm(r)
    layers, mtp = _hybrid(r, norm, runs) if runs else _layers(r, norm)
    if r.flag("mtp_use_repeated_layer"):
        mtp = tuple(replace(one, also=_passes(one.also)) for one in _passes(mtp))
    vocab = vocabulary(r)
    if vocab is None:
        return None
    return Model(
        name=name,
        family="megatron",
        hidden=r.needed("hidden_size"),
        vocab=vocab,
        layers=layers,
        tied=not r.flag("untie_embeddings_and_output_weights"),
        norm=norm,
        embedding_norm=r.flag("embed_layernorm"),
        positions=r.needed("max_position_embeddings") if position(r) == "learned_absolute" else 0,
        max_context=r.whole("max_position_embeddings") or 0,
        dropout=max(r.number("attention_dropout"), r.number("hidden_dropout")) > 0,
        mtp=mtp,
    )


def _passes(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Return blocks whose further copies are passes of one."""
    return tuple(replace(block, shared_weights="mtp") for block in blocks)


def _norm(r: Reader) -> NormKind:
    return "rmsnorm" if r.word("normalization", "LayerNorm", "RMSNorm") == "RMSNorm" else "layernorm"


def position(r: Reader) -> str:
    """Return the kind of position embedding; the older switches for rotary and for none count."""
    if r.flag("use_rotary_position_embeddings"):
        return "rope"
    kind = r.word("position_embedding_type", "learned_absolute", "rope", "yarn", "mrope", "none", "alibi")
    if not r.flag("add_position_embedding") and kind == "learned_absolute":
        rule = "contradicts learned positions, which are the default"
        r.fail("add_position_embedding", rule, "use --position-embedding-type none or rope")
    return kind


def vocabulary(r: Reader) -> int | None:
    """Return the entries of the vocabulary before padding: as given, or those of the tokenizer."""
    extra = r.whole("vocab_extra_ids", 0) or 0
    padded, given = r.whole("padded_vocab_size"), r.whole("vocab_size")
    if given and (padded is None or padded == padded_vocab(r, given + extra)):
        return given + extra
    if padded:
        return padded
    kind, known = r.word("tokenizer_type"), facts()["tokenizers"]
    word = str(r.given.values.get("tokenizer_model", ""))
    size = known.get(kind) if kind or not r.has("vocab_file") else known["GPT2BPETokenizer"]
    if size is None and kind == "HuggingFaceTokenizer":
        size = _catalogued(word)
    if size is None:
        r.problems.add("--vocab-size", None, "is missing, and the tokenizer does not tell it", "give --vocab-size")
        return None
    r.assume(f"vocab_size {size}: of {kind or 'GPT2BPETokenizer'}" + (f" {word}" if word else ""))
    return int(size) + extra


def padded_vocab(r: Reader, entries: int) -> int:
    """Return a vocabulary padded to a multiple of --make-vocab-size-divisible-by x tp."""
    multiple = r.count("make_vocab_size_divisible_by") * r.count("tensor_model_parallel_size")
    return -(-entries // multiple) * multiple


def _catalogued(word: str) -> int | None:
    """Return the vocabulary of a tokenizer that has the name of a model of the catalogue."""
    from shardwise.errors import InputError
    from shardwise.models import load_model, model_names

    name = word.rstrip("/").rpartition("/")[2].lower()
    try:
        return load_model(name).vocab if name in model_names() or "/" not in name else None
    except InputError:
        return None


def _runs(r: Reader) -> list[str]:
    """Return the pattern of letters of a hybrid model and of its further predictions, or nothing."""
    text = r.word("hybrid_layer_pattern") or r.word("hybrid_override_pattern")
    if r.has("hybrid_layer_pattern") and r.has("hybrid_override_pattern"):
        r.fail("hybrid_override_pattern", "is the old name of --hybrid-layer-pattern, given too", "give one")
    if not text:
        return []
    main, *more = text.replace("|", "").split("/")
    if not more and r.has("mtp_hybrid_override_pattern"):
        more = [r.word("mtp_hybrid_override_pattern")] * predictions(r)
    unknown = sorted(set("".join([main, *more])) - set(_HYBRID))
    if unknown or not main:
        r.problems.add("--hybrid-layer-pattern", text, f"has the unknown letters {unknown}", "use M, G, *, +, D, -, E")
        return []
    return [main, *more]


def predictions(r: Reader) -> int:
    """Return the number of layers that predict further tokens."""
    number = r.whole("mtp_num_layers", 0) or 0
    if number > MOST_PREDICTIONS:
        r.fail("mtp_num_layers", f"must be at most {MOST_PREDICTIONS}", "write a smaller number")
    return min(number, MOST_PREDICTIONS)


def num_layers(r: Reader) -> int:
    """Return the number of layers: those of the pattern where there is one."""
    runs = _runs(r)
    if runs:
        given = r.whole("num_layers")
        if given and given != len(runs[0]):
            r.assume(f"num_layers {len(runs[0])}: of the pattern, which wins over --num-layers {given}")
        return len(runs[0])
    return r.needed("encoder_num_layers" if r.has("encoder_num_layers") else "num_layers")


def _hybrid(r: Reader, norm: NormKind, runs: list[str]) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Layers of one mixer or feed-forward each, by letters."""
    made: dict[str, Block] = {}
    for letter in dict.fromkeys("".join(runs)):
        one = Block(mixers=(), feed_forward=None, norm=norm, norms=1)
        kind = _HYBRID[letter]
        if kind in ("mlp", "moe"):
            made[letter] = replace(one, feed_forward=_mlp(r) if kind == "mlp" else _moe(r))
        else:
            made[letter] = replace(one, mixers=(_mixer(r, kind),))
    main, *more = runs
    mtp = []
    for run in more:
        first, *rest = (made[letter] for letter in run)
        mtp.append(replace(first, also=tuple(rest)))
    return tuple(made[letter] for letter in main), tuple(mtp)


def _mixer(r: Reader, kind: str) -> Mixer:
    if kind == "mamba":
        return _mamba(r)
    if kind == "delta":
        return _delta(r)
    if kind == "attention":
        return _attention(r, windowed=False)
    return _latent(r, sparse=kind == "sparse")


def _layers(r: Reader, norm: NormKind) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Layers of attention and a feed-forward, and those that predict further tokens, which repeat the last."""
    number = min(num_layers(r), 10_000)
    sparse = _every(r, "moe_layer_freq", number, lambda i, n: i % n == 0) if _experts(r) else [False] * number
    delta = _linear(r, number)
    windowed = _windowed(r, number)
    made = {key: _block(r, norm, *key) for key in dict.fromkeys(zip(sparse, delta, windowed, strict=True))}
    layers = tuple(made[key] for key in zip(sparse, delta, windowed, strict=True))
    return layers, (layers[-1],) * predictions(r)


def _every(r: Reader, name: str, number: int, chosen: object) -> list[bool]:
    """Return for each layer whether a frequency or a list chooses it."""
    given = r.pattern(name, number)
    if isinstance(given, list):
        return [bool(one) for one in given]
    return [chosen(i, given or 1) for i in range(number)]  # type: ignore[operator]


def _linear(r: Reader, number: int) -> list[bool]:
    """Return which layers are linear attention: all but every n-th."""
    variant = r.word("experimental_attention_variant", "gated_delta_net", "dsa")
    if variant != "gated_delta_net":
        return [False] * number
    if not r.has("linear_attention_freq"):  # experimental_attention_variant_module_specs.py raises as well
        option = r.option("linear_attention_freq")
        r.problems.add(option, None, "is missing beside linear attention", f"give {option} 4")
    return _every(r, "linear_attention_freq", number, lambda i, n: (i + 1) % n != 0)


def _windowed(r: Reader, number: int) -> list[bool]:
    if not r.has("window_size"):
        return [False] * number
    if not r.has("window_attn_skip_freq"):
        return [True] * number
    return _every(r, "window_attn_skip_freq", number, lambda i, n: (i + 1) % n != 0)


def _block(r: Reader, norm: NormKind, sparse: bool, delta: bool, windowed: bool) -> Block:
    if delta:
        mixer: Mixer = _delta(r)
    elif r.flag("multi_latent_attention"):
        mixer = _latent(r, sparse=r.word("experimental_attention_variant") == "dsa")
    else:
        mixer = _attention(r, windowed)
    feed: FeedForward = _moe(r) if sparse else _mlp(r)
    return Block(mixers=(mixer,), feed_forward=feed, norm=norm)


def _attention(r: Reader, windowed: bool) -> Attention:
    heads, hidden = r.needed("num_attention_heads"), r.needed("hidden_size")
    width = r.whole("kv_channels") or 0
    if not width and hidden % heads:
        r.fail("hidden_size", f"must be a multiple of the {heads} heads", "give --kv-channels")
    groups = r.count("num_query_groups") if r.flag("group_query_attention") else r.whole("num_key_value_heads") or heads
    if r.has("num_query_groups") and not r.flag("group_query_attention") and groups != r.count("num_query_groups"):
        r.fail("num_query_groups", "has no effect without --group-query-attention", "give --group-query-attention")
    if heads % groups:
        r.fail("num_query_groups", f"must divide the {heads} heads", "give a divisor")
        groups = heads
    return Attention(
        heads=heads,
        kv_heads=groups,
        head_dim=width or max(hidden // heads, 1),
        qkv_bias=r.flag("add_bias_linear") or r.flag("add_qkv_bias"),
        out_bias=r.flag("add_bias_linear"),
        qk_norm="head" if r.flag("qk_layernorm") or r.flag("qk_l2_norm") else "none",
        qk_norm_kind=_qk_norm(r),
        sinks=r.word("softmax_type", "vanilla", "off-by-one", "learnable") == "learnable",
        output_gate=r.flag("attention_output_gate"),
        rotary=position(r) not in ("learned_absolute", "none", "alibi"),
        window=_window(r) if windowed else 0,
    )


def _qk_norm(r: Reader) -> NormKind:
    """Return the kind of norm on queries and keys; where there is none, the plain one."""
    if r.flag("qk_l2_norm"):
        return "rmsnorm-no-weight"
    return _norm(r) if r.flag("qk_layernorm") else "rmsnorm"


def _window(r: Reader) -> int:
    """Return how many tokens a window sees: itself and those before it."""
    text = ",".join(r.words("window_size")).strip("()").replace(" ", "")
    try:
        before = int(text.split(",")[0])
    except ValueError:
        r.fail("window_size", "must be two numbers of tokens", 'write for example "(128,0)"')
        return 0
    return before + 1 if before >= 0 else 0


def _latent(r: Reader, sparse: bool) -> LatentAttention:
    if r.flag("group_query_attention"):
        r.fail("group_query_attention", "contradicts --multi-latent-attention", "give one of them")
    if r.flag("add_bias_linear"):
        r.assume("multi_latent_attention: the biases of its projections are left out")
    indexer = None
    if sparse:
        sizes = (r.needed(f"dsa_indexer_{part}") for part in ("n_heads", "head_dim", "topk"))
        heads, width, top_k = sizes
        indexer = Indexer(heads=heads, head_dim=width, top_k=top_k)
    return LatentAttention(
        heads=r.needed("num_attention_heads"),
        q_lora_rank=r.whole("q_lora_rank", 0) or 0,
        kv_lora_rank=r.count("kv_lora_rank"),
        qk_nope_head_dim=r.count("qk_head_dim"),
        qk_rope_head_dim=r.count("qk_pos_emb_head_dim"),
        v_head_dim=r.count("v_head_dim"),
        latent_norm=_norm(r) if r.flag("qk_layernorm") else "none",
        indexer=indexer,
    )


def _delta(r: Reader) -> GatedDelta:
    return GatedDelta(
        key_heads=r.count("linear_num_key_heads"),
        value_heads=r.count("linear_num_value_heads"),
        key_dim=r.count("linear_key_head_dim"),
        value_dim=r.count("linear_value_head_dim"),
        conv=r.count("linear_conv_kernel_dim"),
    )


def _mamba(r: Reader) -> Mamba2:
    """Megatron-Core's mixer: an inner width of twice the hidden size unless the heads are given, convolution of 4."""
    width = r.count("mamba_head_dim")
    return Mamba2(
        heads=r.whole("mamba_num_heads") or max(2 * r.needed("hidden_size") // width, 1),
        head_dim=width,
        groups=r.count("mamba_num_groups"),
        state=r.count("mamba_state_dim"),
        conv=4,
        chunk=128,
    )


def _activation(r: Reader) -> tuple[Activation, bool]:
    """Return the activation and whether it is gated; GELU where none is asked for."""
    asked = [row for row in _ACTIVATIONS if r.flag(row[0])]
    for row in asked[1:]:
        r.fail(row[0], f"contradicts {r.option(asked[0][0])}", "give one of them")
    return (asked[0][1], asked[0][2]) if asked else ("gelu", False)


def ffn(r: Reader) -> int:
    """Return the width of the feed-forward: as given, 4 times hidden, or with SwiGLU 8/3 in whole 64s."""
    hidden = r.needed("hidden_size")
    derived = int((4 * hidden * 2 / 3) / 64) * 64 if r.flag("swiglu") else 4 * hidden
    return r.whole("ffn_hidden_size") or max(derived, 1)


def _mlp(r: Reader) -> MLP:
    activation, gated = _activation(r)
    return MLP(ffn=ffn(r), gated=gated, bias=r.flag("add_bias_linear"), activation=activation)


def _experts(r: Reader) -> int:
    return r.whole("num_experts", 0) or 0


def _moe(r: Reader) -> MoE:
    activation, gated = _activation(r)
    experts, top_k = r.needed("num_experts"), r.count("moe_router_topk")
    if top_k > experts:
        r.fail("moe_router_topk", f"must not exceed the {experts} experts", f"use at most {experts}")
    shared, bias = r.whole("moe_shared_expert_intermediate_size", 0) or 0, r.flag("add_bias_linear")
    if not r.has("moe_ffn_hidden_size"):
        r.assume(f"expert_ffn {ffn(r)}: --moe-ffn-hidden-size is not given, so the feed-forward's width")
    return MoE(
        experts=experts,
        top_k=top_k,
        ffn=r.whole("moe_ffn_hidden_size") or ffn(r),
        gated=gated,
        bias=bias,
        activation=activation,
        router_bias=bias,
        correction_bias=r.flag("moe_router_enable_expert_bias"),
        shared=MLP(ffn=shared, gated=gated, activation=activation) if shared else None,
        shared_gate=bool(shared) and r.flag("moe_shared_expert_gate"),
        latent=r.whole("moe_latent_size", 0) or 0,
        normalised=r.word("moe_router_score_function") == "sigmoid" and top_k > 1,
        clamped=r.has("activation_func_clamp_value"),
    )
