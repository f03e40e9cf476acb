"""The model that Megatron-LM's arguments describe, with the widths that its own code derives.

Derivations: megatron/training/arguments.py validate_args, megatron/core/transformer (transformer_config.py, mlp.py,
moe/router.py, multi_latent_attention.py), megatron/core/models/hybrid and megatron/core/ssm, 2026-08.
"""

from __future__ import annotations

from shardwise.formats.megatron._reader import Reader
from shardwise.formats.megatron._values import facts
from shardwise.models import (
    MLP,
    MOST_LAYERS,
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


def build(reader: Reader, name: str) -> Model | None:
    """Return the model, or None where its vocabulary is not known; problems are recorded."""
    runs = _runs(reader)
    norm = _norm(reader)
    layers, mtp = _hybrid(reader, norm, runs) if runs else _layers(reader, norm)
    if reader.flag("mtp_use_repeated_layer"):
        mtp = tuple(replace(one, also=_passes(one.also)) for one in _passes(mtp))
    vocab = vocabulary(reader)
    if vocab is None:
        return None
    return Model(
        name=name,
        family="megatron",
        hidden=reader.needed("hidden_size"),
        vocab=vocab,
        layers=layers,
        tied=not reader.flag("untie_embeddings_and_output_weights"),
        norm=norm,
        embedding_norm=reader.flag("embed_layernorm"),
        positions=reader.needed("max_position_embeddings") if position(reader) == "learned_absolute" else 0,
        max_context=reader.whole("max_position_embeddings") or 0,
        dropout=max(reader.number("attention_dropout"), reader.number("hidden_dropout")) > 0,
        mtp=mtp,
    )


def _passes(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Return blocks whose further copies are passes of one."""
    return tuple(replace(block, shared_weights="mtp") for block in blocks)


def _norm(reader: Reader) -> NormKind:
    return "rmsnorm" if reader.word("normalization", "LayerNorm", "RMSNorm") == "RMSNorm" else "layernorm"


def position(reader: Reader) -> str:
    """Return the kind of position embedding; the older switches for rotary and for none count."""
    if reader.flag("use_rotary_position_embeddings"):
        return "rope"
    kind = reader.word("position_embedding_type", "learned_absolute", "rope", "yarn", "mrope", "none", "alibi")
    if not reader.flag("add_position_embedding") and kind == "learned_absolute":
        rule = "contradicts learned positions, which are the default"
        reader.fail("add_position_embedding", rule, "use --position-embedding-type none or rope")
    return kind


def vocabulary(reader: Reader) -> int | None:
    """Return the entries of the vocabulary before padding: as given, or those of the tokenizer."""
    extra = reader.whole("vocab_extra_ids", 0) or 0
    padded, given = reader.whole("padded_vocab_size"), reader.whole("vocab_size")
    if given and (padded is None or padded == padded_vocab(reader, given + extra)):
        return given + extra
    if padded:
        return padded
    kind, known = reader.word("tokenizer_type"), facts()["tokenizers"]
    word = str(reader.given.values.get("tokenizer_model", ""))
    size = known.get(kind) if kind or not reader.has("vocab_file") else known["GPT2BPETokenizer"]
    if size is None and kind == "HuggingFaceTokenizer":
        size = _catalogued(word)
    if size is None:
        reader.problems.add("--vocab-size", None, "is missing, and the tokenizer does not tell it", "give --vocab-size")
        return None
    reader.assume(f"vocab_size {size}: of {kind or 'GPT2BPETokenizer'}" + (f" {word}" if word else ""))
    return int(size) + extra


def padded_vocab(reader: Reader, entries: int) -> int:
    """Return a vocabulary padded to a multiple of --make-vocab-size-divisible-by x tp."""
    multiple = reader.count("make_vocab_size_divisible_by") * reader.count("tensor_model_parallel_size")
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


def _runs(reader: Reader) -> list[str]:
    """Return the pattern of letters of a hybrid model and of its further predictions, or nothing."""
    text = reader.word("hybrid_layer_pattern") or reader.word("hybrid_override_pattern")
    if reader.has("hybrid_layer_pattern") and reader.has("hybrid_override_pattern"):
        reader.fail("hybrid_override_pattern", "is the old name of --hybrid-layer-pattern, given too", "give one")
    if not text:
        return []
    main, *more = text.replace("|", "").split("/")
    if not more and reader.has("mtp_hybrid_override_pattern"):
        more = [reader.word("mtp_hybrid_override_pattern")] * predictions(reader)
    unknown = sorted(set("".join([main, *more])) - set(_HYBRID))
    if unknown or not main:
        reader.problems.add(
            "--hybrid-layer-pattern", text, f"has the unknown letters {unknown}", "use M, G, *, +, D, -, E"
        )
        return []
    return [main, *more]


def predictions(reader: Reader) -> int:
    """Return the number of layers that predict further tokens."""
    number = reader.whole("mtp_num_layers", 0) or 0
    if number > MOST_PREDICTIONS:
        reader.fail("mtp_num_layers", f"must be at most {MOST_PREDICTIONS}", "write a smaller number")
    return min(number, MOST_PREDICTIONS)


def num_layers(reader: Reader) -> int:
    """Return the number of layers: those of the pattern where there is one."""
    runs = _runs(reader)
    if runs:
        given = reader.whole("num_layers")
        if given and given != len(runs[0]):
            reader.assume(f"num_layers {len(runs[0])}: of the pattern, which wins over --num-layers {given}")
        return len(runs[0])
    return reader.needed("encoder_num_layers" if reader.has("encoder_num_layers") else "num_layers")


def _hybrid(reader: Reader, norm: NormKind, runs: list[str]) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Layers of one mixer or feed-forward each, by letters."""
    made: dict[str, Block] = {}
    for letter in dict.fromkeys("".join(runs)):
        one = Block(mixers=(), feed_forward=None, norm=norm, norms=1)
        kind = _HYBRID[letter]
        if kind in ("mlp", "moe"):
            made[letter] = replace(one, feed_forward=_mlp(reader) if kind == "mlp" else _moe(reader))
        else:
            made[letter] = replace(one, mixers=(_mixer(reader, kind),))
    main, *more = runs
    mtp = []
    for run in more:
        first, *rest = (made[letter] for letter in run)
        mtp.append(replace(first, also=tuple(rest)))
    return tuple(made[letter] for letter in main), tuple(mtp)


def _mixer(reader: Reader, kind: str) -> Mixer:
    if kind == "mamba":
        return _mamba(reader)
    if kind == "delta":
        return _delta(reader)
    if kind == "attention":
        return _attention(reader, windowed=False)
    return _latent(reader, sparse=kind == "sparse")


def _layers(reader: Reader, norm: NormKind) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Layers of attention and a feed-forward, and those that predict further tokens, which repeat the last."""
    number = min(num_layers(reader), MOST_LAYERS)
    sparse = _every(reader, "moe_layer_freq", number, lambda i, n: i % n == 0) if _experts(reader) else [False] * number
    delta = _linear(reader, number)
    windowed = _windowed(reader, number)
    made = {key: _block(reader, norm, *key) for key in dict.fromkeys(zip(sparse, delta, windowed, strict=True))}
    layers = tuple(made[key] for key in zip(sparse, delta, windowed, strict=True))
    return layers, (layers[-1],) * predictions(reader)


def _every(reader: Reader, name: str, number: int, chosen: object) -> list[bool]:
    """Return for each layer whether a frequency or a list chooses it."""
    given = reader.pattern(name, number)
    if isinstance(given, list):
        return [bool(one) for one in given]
    return [chosen(i, given or 1) for i in range(number)]  # type: ignore[operator]


def _linear(reader: Reader, number: int) -> list[bool]:
    """Return which layers are linear attention: all but every n-th."""
    variant = reader.word("experimental_attention_variant", "gated_delta_net", "dsa")
    if variant != "gated_delta_net":
        return [False] * number
    if not reader.has("linear_attention_freq"):  # experimental_attention_variant_module_specs.py raises as well
        option = reader.option("linear_attention_freq")
        reader.problems.add(option, None, "is missing beside linear attention", f"give {option} 4")
    return _every(reader, "linear_attention_freq", number, lambda i, n: (i + 1) % n != 0)


def _windowed(reader: Reader, number: int) -> list[bool]:
    if not reader.has("window_size"):
        return [False] * number
    if not reader.has("window_attn_skip_freq"):
        return [True] * number
    return _every(reader, "window_attn_skip_freq", number, lambda i, n: (i + 1) % n != 0)


def _block(reader: Reader, norm: NormKind, sparse: bool, delta: bool, windowed: bool) -> Block:
    if delta:
        mixer: Mixer = _delta(reader)
    elif reader.flag("multi_latent_attention"):
        mixer = _latent(reader, sparse=reader.word("experimental_attention_variant") == "dsa")
    else:
        mixer = _attention(reader, windowed)
    feed: FeedForward = _moe(reader) if sparse else _mlp(reader)
    return Block(mixers=(mixer,), feed_forward=feed, norm=norm)


def _attention(reader: Reader, windowed: bool) -> Attention:
    heads, hidden = reader.needed("num_attention_heads"), reader.needed("hidden_size")
    width = reader.whole("kv_channels") or 0
    if not width and hidden % heads:
        reader.fail("hidden_size", f"must be a multiple of the {heads} heads", "give --kv-channels")
    groups = (
        reader.count("num_query_groups")
        if reader.flag("group_query_attention")
        else reader.whole("num_key_value_heads") or heads
    )
    if (
        reader.has("num_query_groups")
        and not reader.flag("group_query_attention")
        and groups != reader.count("num_query_groups")
    ):
        reader.fail("num_query_groups", "has no effect without --group-query-attention", "give --group-query-attention")
    if heads % groups:
        reader.fail("num_query_groups", f"must divide the {heads} heads", "give a divisor")
        groups = heads
    return Attention(
        heads=heads,
        kv_heads=groups,
        head_dim=width or max(hidden // heads, 1),
        qkv_bias=reader.flag("add_bias_linear") or reader.flag("add_qkv_bias"),
        out_bias=reader.flag("add_bias_linear"),
        qk_norm="head" if reader.flag("qk_layernorm") or reader.flag("qk_l2_norm") else "none",
        qk_norm_kind=_qk_norm(reader),
        sinks=reader.word("softmax_type", "vanilla", "off-by-one", "learnable") == "learnable",
        output_gate=reader.flag("attention_output_gate"),
        rotary=position(reader) not in ("learned_absolute", "none", "alibi"),
        window=_window(reader) if windowed else 0,
    )


def _qk_norm(reader: Reader) -> NormKind:
    """Return the kind of norm on queries and keys; where there is none, the plain one."""
    if reader.flag("qk_l2_norm"):
        return "rmsnorm-no-weight"
    return _norm(reader) if reader.flag("qk_layernorm") else "rmsnorm"


def _window(reader: Reader) -> int:
    """Return how many tokens a window sees: itself and those before it."""
    text = ",".join(reader.words("window_size")).strip("()").replace(" ", "")
    try:
        before = int(text.split(",")[0])
    except ValueError:
        reader.fail("window_size", "must be two numbers of tokens", 'write for example "(128,0)"')
        return 0
    return before + 1 if before >= 0 else 0


def _latent(reader: Reader, sparse: bool) -> LatentAttention:
    if reader.flag("group_query_attention"):
        reader.fail("group_query_attention", "contradicts --multi-latent-attention", "give one of them")
    if reader.flag("add_bias_linear"):
        reader.assume("multi_latent_attention: the biases of its projections are left out")
    indexer = None
    if sparse:
        sizes = (reader.needed(f"dsa_indexer_{part}") for part in ("n_heads", "head_dim", "topk"))
        heads, width, top_k = sizes
        indexer = Indexer(heads=heads, head_dim=width, top_k=top_k)
    return LatentAttention(
        heads=reader.needed("num_attention_heads"),
        q_lora_rank=reader.whole("q_lora_rank", 0) or 0,
        kv_lora_rank=reader.count("kv_lora_rank"),
        qk_nope_head_dim=reader.count("qk_head_dim"),
        qk_rope_head_dim=reader.count("qk_pos_emb_head_dim"),
        v_head_dim=reader.count("v_head_dim"),
        latent_norm=_norm(reader) if reader.flag("qk_layernorm") else "none",
        indexer=indexer,
    )


def _delta(reader: Reader) -> GatedDelta:
    return GatedDelta(
        key_heads=reader.count("linear_num_key_heads"),
        value_heads=reader.count("linear_num_value_heads"),
        key_dim=reader.count("linear_key_head_dim"),
        value_dim=reader.count("linear_value_head_dim"),
        conv=reader.count("linear_conv_kernel_dim"),
    )


def _mamba(reader: Reader) -> Mamba2:
    """Megatron-Core's mixer: an inner width of twice the hidden size unless the heads are given, convolution of 4."""
    width = reader.count("mamba_head_dim")
    return Mamba2(
        heads=reader.whole("mamba_num_heads") or max(2 * reader.needed("hidden_size") // width, 1),
        head_dim=width,
        groups=reader.count("mamba_num_groups"),
        state=reader.count("mamba_state_dim"),
        conv=4,
        chunk=128,
    )


def _activation(reader: Reader) -> tuple[Activation, bool]:
    """Return the activation and whether it is gated; GELU where none is asked for."""
    asked = [row for row in _ACTIVATIONS if reader.flag(row[0])]
    for row in asked[1:]:
        reader.fail(row[0], f"contradicts {reader.option(asked[0][0])}", "give one of them")
    return (asked[0][1], asked[0][2]) if asked else ("gelu", False)


def ffn(reader: Reader) -> int:
    """Return the width of the feed-forward: as given, 4 times hidden, or with SwiGLU 8/3 in whole 64s."""
    hidden = reader.needed("hidden_size")
    derived = int((4 * hidden * 2 / 3) / 64) * 64 if reader.flag("swiglu") else 4 * hidden
    return reader.whole("ffn_hidden_size") or max(derived, 1)


def _mlp(reader: Reader) -> MLP:
    activation, gated = _activation(reader)
    return MLP(ffn=ffn(reader), gated=gated, bias=reader.flag("add_bias_linear"), activation=activation)


def _experts(reader: Reader) -> int:
    return reader.whole("num_experts", 0) or 0


def _moe(reader: Reader) -> MoE:
    activation, gated = _activation(reader)
    experts, top_k = reader.needed("num_experts"), reader.count("moe_router_topk")
    if top_k > experts:
        reader.fail("moe_router_topk", f"must not exceed the {experts} experts", f"use at most {experts}")
    shared, bias = reader.whole("moe_shared_expert_intermediate_size", 0) or 0, reader.flag("add_bias_linear")
    if not reader.has("moe_ffn_hidden_size"):
        reader.assume(f"expert_ffn {ffn(reader)}: --moe-ffn-hidden-size is not given, so the feed-forward's width")
    return MoE(
        experts=experts,
        top_k=top_k,
        ffn=reader.whole("moe_ffn_hidden_size") or ffn(reader),
        gated=gated,
        bias=bias,
        activation=activation,
        router_bias=bias,
        correction_bias=reader.flag("moe_router_enable_expert_bias"),
        shared=MLP(ffn=shared, gated=gated, activation=activation) if shared else None,
        shared_gate=bool(shared) and reader.flag("moe_shared_expert_gate"),
        latent=reader.whole("moe_latent_size", 0) or 0,
        normalised=reader.word("moe_router_score_function") == "sigmoid" and top_k > 1,
        clamped=reader.has("activation_func_clamp_value"),
    )
