"""Seeded random small configurations of every family, for the parameter goldens: legal, and unlike each other."""

import random
from typing import Any

FLAGS = """
tie_word_embeddings attention_bias mlp_bias qkv_bias use_bias use_qkv_bias use_qk_norm qk_layernorm attention_out_bias
lm_head_bias mamba_proj_bias mamba_conv_bias use_conv_bias conv_bias add_bias_linear projectors_bias mamba_rms_norm
use_parallel_residual parallel_attn bias multi_query new_decoder_architecture do_layer_norm_before
_remove_final_layer_norm enable_bias layer_norm_elementwise_affine learned_pos_emb use_sliding_window
use_shared_attention_adapter attention_k_eq_v enable_moe_block use_double_wide_mlp use_expert_bias
block_auto_adjust_ff_dim norm_bias classifier_bias decoder_bias query_bias key_bias value_bias proj_bias
use_swiglu_ffn use_gated_mlp use_mask_token use_mean_pooling use_absolute_position_embeddings
use_relative_position_bias use_shared_relative_position_bias
""".split()  # noqa: SIM905
# Classes that tie whatever the file says or never do, and one that shares its blocks only if it also ties the head.
ALWAYS = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "distilbert", "zamba2"), True),
    **dict.fromkeys(("nemotron_h", "xlstm", "kimi_linear", "bailing_hybrid"), False),
}
FREE_HEAD_DIM = """
llama mistral mixtral ministral ministral3 qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5_text qwen3_5_moe_text
gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe gpt_oss llama4_text nemotron nemotron_h
minimax_m2 minimax minimax_m3_vl_text qwen4_exp_text hy_v3 seed_oss arcee solar_open mimo_v2_flash step3p5 afmoe
flint kolibri1 ernie4_5 hunyuan_v1_dense hunyuan_v1_moe smollm3 granite olmo2 glm_ocr_text molmo2_text
voxtral_realtime_text
""".split()  # noqa: SIM905
SMALL = {
    "max_position_embeddings": (16, 200),
    "n_positions": (16, 200),
    "max_seq_len": (16, 200),
    "type_vocab_size": (1, 4),
    "q_lora_rank": (8, 40),
    "kv_lora_rank": (8, 40),
    "qk_nope_head_dim": (4, 24),
    "v_head_dim": (4, 24),
    "index_n_heads": (1, 5),
    "index_head_dim": (9, 24),
    "moe_intermediate_size": (8, 40),
    "expert_ffn_hidden_size": (8, 40),
    "shared_expert_intermediate_size": (8, 40),
    "moe_shared_expert_intermediate_size": (8, 40),
    "shared_intermediate_size": (8, 40),
    "share_expert_dim": (8, 40),
    "intermediate_size_mlp": (8, 40),
    "num_shared_experts": (1, 3),
    "n_shared_experts": (1, 3),
    "moe_num_shared_experts": (0, 3),
    "first_k_dense_replace": (0, 3),
    "num_dense_layers": (0, 3),
    "num_register_tokens": (0, 4),
    "decoder_sparse_step": (1, 3),
    "linear_conv_kernel_dim": (2, 5),
    "linear_key_head_dim": (4, 12),
    "linear_value_head_dim": (4, 12),
    "linear_num_heads": (1, 5),
    "linear_head_dim": (4, 12),
    "state_size": (4, 20),
    "ssm_state_size": (4, 20),
    "mamba_d_state": (4, 20),
    "conv_kernel": (2, 5),
    "mamba_d_conv": (2, 5),
    "conv1d_width": (2, 5),
    "conv_L_cache": (2, 5),
    "time_step_rank": (2, 9),
    "mamba_dt_rank": (2, 9),
    "laurel_rank": (4, 12),
    "altup_num_inputs": (2, 5),
    "vocab_size_per_layer_input": (20, 90),
    "hidden_size_per_layer_input": (4, 16),
    "adapter_rank": (2, 9),
    "attn_layer_period": (1, 4),
    "expert_layer_period": (1, 3),
    "interleave_moe_layer_step": (1, 3),
    "moe_layer_interval": (1, 3),
    "moe_layer_start_index": (0, 3),
    "zero_expert_num": (0, 6),
    "attention_hidden_size": (8, 48),
    "hc_mult": (2, 5),
    "o_lora_rank": (4, 12),
    "block_multiple_of": (4, 16),
    "global_attn_every_n_layers": (2, 5),
}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts")


def fields(model_type: str, config: Any, rng: random.Random) -> dict[str, Any]:
    """The overrides of one random configuration of a class, from the attributes its default instance has."""
    names, has = dict(getattr(config, "attribute_map", {})), _attributes(config)
    heads, dim, layers = rng.choice((2, 3, 4, 6, 8)), 2 * rng.randint(4, 12), rng.randint(1, 7)
    hidden = heads * dim if model_type not in FREE_HEAD_DIM else 4 * rng.randint(6, 24)
    kv = rng.choice([k for k in range(1, heads + 1) if heads % k == 0])
    experts = rng.randint(2, 9)
    wanted = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "num_hidden_layers": layers,
        "intermediate_size": rng.randint(16, 90),
        "vocab_size": rng.randint(60, 300),
    }
    if model_type not in FREE_HEAD_DIM:
        del wanted["head_dim"]
    out = {names.get(key, key): value for key, value in wanted.items() if key in has or key == "head_dim"}
    for key in FLAGS:
        if key in has and isinstance(getattr(config, key), bool):
            out[key] = rng.random() < 0.5
    for key, (low, high) in SMALL.items():
        if key in has:
            out[names.get(key, key)] = rng.randint(low, high)
    out |= {key: experts for key in EXPERTS if key in has and key not in names}
    out |= {key: rng.randint(1, experts) for key in TOP_K if key in has and key not in names}
    rule = RULES.get(model_type)
    out = rule(out, layers, rng) if rule else out
    return out | {"tie_word_embeddings": ALWAYS[model_type]} if model_type in ALWAYS else out


def _attributes(config: Any) -> set[str]:
    """The attributes of a configuration; one that differs by layer (Gemma 4's head width) is there, if not to read."""
    found = set(config.attribute_map)
    for key in dir(config):
        try:
            getattr(config, key)
        except AttributeError:
            continue
        except RuntimeError:  # it is there, and differs by layer
            found.add(key)
        found.add(key)
    return found


def _types(rng: random.Random, layers: int, *words: str) -> list[str]:
    return [rng.choice(words) for _ in range(layers)]


def _set(**values: Any) -> Any:
    """A rule that sets fixed values."""
    return lambda out, layers, rng: out | values


def _sliding(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    """Sometimes an explicit list of layer types."""
    if rng.random() < 0.5:
        out["layer_types"] = [*_types(rng, layers - 1, "sliding_attention", "full_attention"), "full_attention"]
    return out | {"sliding_window": rng.randint(2, 20)}


def _linear(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    keys = rng.randint(1, 3)
    out |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * rng.randint(1, 3)}
    if rng.random() < 0.5:
        out["layer_types"] = _types(rng, layers, "linear_attention", "full_attention")
    if "mlp_only_layers" in out or rng.random() < 0.5:
        out["mlp_only_layers"] = sorted(rng.sample(range(layers), rng.randint(0, layers)))
    return out


def _qwen_moe(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return out | {"mlp_only_layers": sorted(rng.sample(range(layers), rng.randint(0, layers)))}


def _latent(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out["num_key_value_heads"] = out["num_attention_heads"]
    out["qk_rope_head_dim"] = 2 * rng.randint(2, 8)
    out.pop("head_dim", None)
    out["first_k_dense_replace"] = rng.randint(0, layers)
    if rng.random() < 0.4 and "index_n_heads" not in out:
        out["q_lora_rank"] = None
    return out


def _dsa(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out = _latent(out, layers, rng) | {"index_head_dim": 32}
    return out | {"indexer_types": ["full", *_types(rng, layers - 1, "full", "shared")]}


def _hy4(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out = _dsa(out, layers, rng) | {"q_lora_rank": rng.randint(8, 40)}
    out.pop("first_k_dense_replace")
    return out | {"mlp_layer_types": _types(rng, layers, "dense", "sparse")}


def _mistral_large(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out = _dsa(out, layers, rng)
    out.pop("q_lora_rank", None)
    return out | ({"no_rope_layers": [rng.randint(0, 1) for _ in range(layers)]} if rng.random() < 0.7 else {})


def _mamba2(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    groups = rng.randint(1, 3)
    heads, dim = groups * rng.randint(1, 4), 2 * rng.randint(2, 6)
    return out | {"hidden_size": heads * dim // 2, "num_heads": heads, "head_dim": dim, "n_groups": groups, "expand": 2}


def _hybrid(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    """Mamba-2 beside attention: heads times head width must be expand times hidden."""
    inner = 2 * out["hidden_size"]
    heads = rng.choice([h for h in range(1, inner + 1) if inner % h == 0 and h <= 16])
    groups = rng.choice([g for g in (1, 2, 4) if heads % g == 0])
    return out | {"mamba_n_heads": heads, "mamba_d_head": inner // heads, "mamba_n_groups": groups, "mamba_expand": 2}


def _bamba(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return _hybrid(out, layers, rng) | {"attn_layer_indices": sorted(rng.sample(range(layers), rng.randint(0, layers)))}


def _granite_hybrid(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out = _hybrid(out, layers, rng) | {"layer_types": _types(rng, layers, "linear_attention", "full_attention")}
    return out | ({"num_local_experts": 0} if rng.random() < 0.3 else {})


def _falcon_h1(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    heads, dim = rng.choice((2, 4)), 2 * rng.randint(2, 6)
    sizes = {"mamba_d_ssm": heads * dim, "mamba_n_heads": heads, "mamba_d_head": dim}
    return out | sizes | {"mamba_n_groups": rng.choice((1, 2))}


def _nemotron_h(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    groups = rng.randint(1, 3)
    out |= {"n_groups": groups, "mamba_num_heads": groups * rng.randint(1, 4), "mamba_head_dim": rng.randint(4, 12)}
    out["layers_block_type"] = _types(rng, layers, "linear_attention", "moe", "full_attention", "mlp")
    out["moe_latent_size"] = rng.choice((None, 8, 16))
    out.pop("num_hidden_layers", None)
    return out


def _zamba2(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out["num_key_value_heads"] = out["num_attention_heads"]
    out["layers_block_type"] = _types(rng, layers, "linear_attention", "hybrid")
    for derived in ("attention_hidden_size", "attention_head_dim", "head_dim"):
        out.pop(derived, None)
    inner = 2 * out["hidden_size"]
    heads = rng.choice([h for h in range(1, 9) if inner % h == 0])
    return out | {
        "n_mamba_heads": heads,
        "mamba_ngroups": rng.choice([g for g in (1, 2) if heads % g == 0 and inner % g == 0]),
        "num_mem_blocks": rng.randint(1, 3),
    }


def _gemma3n(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    """Layers that reuse a cache need one of their own kind before them."""
    layers = rng.randint(4, 8)
    kinds = ["sliding_attention", "full_attention", *_types(rng, layers - 2, "sliding_attention", "full_attention")]
    kinds[-1] = "full_attention"
    out |= {"num_hidden_layers": layers, "layer_types": kinds, "num_kv_shared_layers": rng.randint(0, layers - 2)}
    if rng.random() < 0.5:
        out["intermediate_size"] = [rng.randint(16, 90) for _ in range(layers)]
    return out | {"activation_sparsity_pattern": [0.0] * layers, "sliding_window": rng.randint(2, 20)}


def _gemma4(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out = _gemma3n(out, layers, rng)
    out.pop("activation_sparsity_pattern")
    out["intermediate_size"] = rng.randint(16, 90)
    out |= {"global_head_dim": 2 * rng.randint(4, 16), "num_experts": rng.randint(2, 6), "top_k_experts": 2}
    if out["attention_k_eq_v"] and rng.random() < 0.7:
        out["num_global_key_value_heads"] = 1
    if rng.random() < 0.3:
        out["hidden_size_per_layer_input"] = 0
    return out


def _gemma4_unified(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out = _gemma4(out, layers, rng)
    for absent in ("num_experts", "top_k_experts", "hidden_size_per_layer_input", "vocab_size_per_layer_input"):
        out.pop(absent, None)
    return out


def _llama4(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return out | {"no_rope_layers": [1] * layers}


def _kimi(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out = _latent(out, layers, rng)
    out.pop("first_k_dense_replace")
    out["layer_types"] = _types(rng, layers, "linear_attention", "full_attention")
    return out | {"mlp_layer_types": _types(rng, layers, "dense", "sparse")}


def _longcat(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out = _latent(out, layers, rng) | {"num_layers": layers, "q_lora_rank": rng.randint(8, 40)}
    for derived in ("num_hidden_layers", "first_k_dense_replace", "qk_head_dim", "intermediate_size"):
        out.pop(derived, None)
    return out | {"qk_head_dim": out["qk_nope_head_dim"] + out["qk_rope_head_dim"]}


def _deepseek_v4(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    words = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
    out |= {"layer_types": _types(rng, layers, *words), "num_key_value_heads": 1, "n_shared_experts": 1}
    out |= {"mlp_layer_types": ["moe"] * layers, "head_dim": 32, "index_head_dim": 16, "mlp_bias": False}
    out["o_groups"] = rng.choice([g for g in (1, 2, 4) if out["num_attention_heads"] % g == 0])
    out["compress_rates"] = {words[1]: rng.randint(2, 6), words[2]: rng.randint(7, 20)}
    return out


def _mimo(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    heads = out["num_attention_heads"]
    out["num_key_value_heads"] = rng.choice([k for k in (1, 2, 4) if heads % (2 * k) == 0] or [1])
    if heads % 2:
        out |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    out["layer_types"] = _types(rng, layers, "sliding_attention", "full_attention")
    return out | {"mlp_layer_types": _types(rng, layers, "dense", "sparse")}


def _step(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out = {key: value for key, value in out.items() if key not in ("num_local_experts",)}
    out["layer_types"] = _types(rng, layers, "sliding_attention", "full_attention")
    out["num_sliding_attention_heads"] = out["num_attention_heads"] * rng.randint(1, 2)
    out |= {"sliding_window": 8, "mlp_bias": False}
    return out | {"mlp_layer_types": _types(rng, layers, "dense", "sparse")}


def _inkling(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    kv = rng.randint(1, 3)
    out |= {"swa_num_key_value_heads": kv, "swa_num_attention_heads": kv * rng.randint(1, 3)}
    out |= {"swa_head_dim": rng.choice((4, 8)), "sliding_window_size": rng.randint(4, 12), "d_rel": rng.randint(2, 6)}
    out |= {
        "rel_extent": rng.randint(8, 20),
        "conv_kernel_size": rng.randint(2, 5),
        "n_shared_experts": rng.randint(1, 3),
    }
    out["layer_types"] = _types(rng, layers, "hybrid_sliding", "hybrid")
    return out | {"mlp_layer_types": _types(rng, layers, "dense", "sparse")}


def _falcon(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out.pop("num_key_value_heads", None)
    heads = out["num_attention_heads"]
    out["num_kv_heads"] = rng.choice([k for k in range(1, heads + 1) if heads % k == 0])
    out["num_ln_in_parallel_attn"] = rng.choice((None, 1, 2)) if out["new_decoder_architecture"] else None
    return out | {"ffn_hidden_size": rng.randint(16, 90)}


def _opt(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    width = rng.choice((out["hidden_size"], 8, 16))
    return out | {"ffn_dim": rng.randint(16, 90), "word_embed_proj_dim": width}


def _gpt(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return out | {"n_inner": rng.choice((None, rng.randint(16, 90)))}


def _codegen(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    dim = 2 * rng.randint(4, 12)
    return _gpt(out, layers, rng) | {"n_head": 4 * rng.randint(1, 2), "n_embd": 8 * dim, "rotary_dim": 4}


def _mpt(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return {k: v for k, v in out.items() if k != "num_key_value_heads"} | {"expansion_ratio": 4}


def _neo(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    layers = 2 * rng.randint(1, 3)
    out |= {"num_layers": layers, "attention_types": [[["global", "local"], layers // 2]]}
    return out | {"intermediate_size": rng.choice((None, 40))}


def _xlstm(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    heads = rng.choice((2, 4))
    hidden = heads * 4 * rng.randint(2, 6)
    return {"hidden_size": hidden, "embedding_dim": hidden, "num_heads": heads, "num_hidden_layers": layers,
            "num_blocks": layers, "use_bias": rng.random() < 0.5, "vocab_size": rng.randint(60, 300),
            "qk_dim_factor": rng.choice((0.5, 1.0)), "ffn_round_up_to_multiple_of": 8,
            "tie_word_embeddings": rng.random() < 0.5}  # fmt: skip


def _olmo_hybrid(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    keys, kinds = rng.randint(1, 3), ["linear_attention", "full_attention"]
    more = _types(rng, layers, *kinds)
    return out | {"num_hidden_layers": layers + 2, "layer_types": kinds + more,
                  "linear_num_key_heads": keys, "linear_num_value_heads": keys * rng.randint(1, 3),
                  "linear_key_head_dim": rng.randint(4, 12), "linear_value_head_dim": rng.randint(4, 12)}  # fmt: skip


def _minimax(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        out["layer_types"] = _types(rng, layers, "linear_attention", "full_attention")
    return out | {"block_size": rng.choice((16, 64))}


def _bailing(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out = _latent(out, layers, rng) | {"head_dim": 2 * rng.randint(4, 12), "num_local_experts": 2 * rng.randint(2, 5)}
    out.pop("q_lora_rank", None)
    for derived in ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "num_experts"):
        out.pop(derived, None)
    out["num_experts_per_token"] = rng.randint(1, 4)
    if rng.random() < 0.5:
        out["layer_types"] = _types(rng, layers, "linear_attention", "full_attention")
    return out | {"short_conv_kernel_size": rng.randint(2, 5), "layer_group_size": rng.randint(1, 4), "n_group": 1}


def _hy3(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return out | ({"mlp_layer_types": _types(rng, layers, "dense", "sparse")} if rng.random() < 0.5 else {})


def _minimax_m3(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out |= {"index_n_heads": out["num_key_value_heads"], "index_block_size": 4, "index_topk_blocks": rng.randint(1, 4)}
    out |= {"dense_intermediate_size": rng.randint(16, 90), "index_head_dim": 2 * rng.randint(4, 12)}
    out["layer_types"] = _types(rng, layers, "minimax_m3_sparse", "full_attention")
    return out | {"mlp_layer_types": _types(rng, layers, "dense", "sparse"), "rotary_dim": 8}


def _glm5_next(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out = _latent(out, layers, rng) | {"qk_rope_head_dim": 0, "q_lora_rank": rng.randint(8, 40)}
    out |= {"layer_types": _types(rng, layers, "linear_attention", "indexed_attention"), "attention_bias": False}
    out |= {"indexer_types": ["full", *_types(rng, layers - 1, "full", "shared")], "index_kpool": rng.randint(2, 6)}
    out |= {"index_topk": 12 * out["index_kpool"], "mlp_layer_types": _types(rng, layers, "dense", "sparse")}
    return {key: value for key, value in out.items() if key not in ("first_k_dense_replace", "qk_head_dim")}


def _qwen4(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    keys = rng.randint(1, 3)
    out |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * rng.randint(1, 3), "eos_token_id": 0}
    out["layer_types"] = ["linear_attention", *_types(rng, layers - 1, "linear_attention", "indexed_attention")]
    linear = [i + 1 for i, kind in enumerate(out["layer_types"]) if kind == "linear_attention"]
    out |= {"ple_layer_ids": sorted(rng.sample(linear, rng.randint(0, min(2, len(linear))))), "ngram_size": 3}
    out |= {"heads_per_ngram": rng.randint(1, 3), "ngram_vocab_size_base": rng.randint(50, 500), "hc_lowrank": 6}
    out |= {"ple_embed_dim": 2 * out["heads_per_ngram"] * rng.randint(2, 6), "hc_count": rng.randint(2, 4)}
    out |= {"indexer_n_heads": rng.randint(1, 4), "indexer_kv_heads": 1, "indexer_head_dim": 2 * rng.randint(14, 20)}
    return out | {"indexer_compress_ratio": 4, "indexer_budget": 4 * rng.randint(1, 6)}


def _ocr(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return out | {"mlp_layer_types": _types(rng, layers, "dense", "sparse"), "mlp_bias": False}


def _molmo(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return out | {"additional_vocab_size": rng.randint(0, 40), "qk_norm_type": rng.choice(("qwen3", "olmo"))}


def _flint(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return _qwen_moe(_sliding(out, layers, rng), layers, rng)


def _image(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    side = rng.randint(2, 6)
    return _no_kv(out, layers, rng) | {"patch_size": side, "image_size": side * rng.randint(1, 5),
                                       "num_channels": rng.randint(1, 4)}  # fmt: skip


def _dino(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out = _image(out, layers, rng) | {"mlp_ratio": rng.randint(1, 5)}
    return {key: value for key, value in out.items() if key != "intermediate_size"}


def _beit(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return _image(out, layers, rng) | {"layer_scale_init_value": rng.choice((0.0, 0.1))}


def _deit(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return _image(out, layers, rng) | {"pooler_output_size": rng.randint(8, 40)}


def _siglip(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return _no_kv(out, layers, rng) | {"projection_size": rng.choice((None, rng.randint(8, 40)))}


def _modern(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return _sliding(_no_kv(out, layers, rng), layers, rng) | {"local_attention": 2 * rng.randint(1, 10)}


def _lfm2(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return out | {"layer_types": _types(rng, layers, "conv", "full_attention")}


def _lfm3(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    switches = {"use_sandwich_norm": rng.random() < 0.5, "use_attention_gate": rng.random() < 0.5}
    return out | switches | {"layer_types": _types(rng, layers, "conv", "full_attention", "sliding_attention")}


def _recurrent_gemma(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    out |= {"lru_width": out["num_attention_heads"] * rng.randint(4, 12), "attention_window_size": 16}
    return {k: v for k, v in out.items() if k != "head_dim"}


def _jamba(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    period, experts = rng.randint(1, 4), rng.randint(1, 3)
    out |= {"attn_layer_period": period, "attn_layer_offset": rng.randint(0, period - 1)}
    out |= {"expert_layer_period": experts, "expert_layer_offset": rng.randint(0, experts - 1)}
    return out | {"mamba_expand": rng.randint(1, 3), "use_mamba_kernels": False}


def _no_kv(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return {key: value for key, value in out.items() if key != "num_key_value_heads"}


def _mamba(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return {k: v for k, v in out.items() if k != "intermediate_size"} | {"expand": rng.randint(1, 3)}


def _distil(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return _no_kv(out, layers, rng) | {"hidden_dim": rng.randint(16, 90)}


def _square(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    """Heads that add up to the hidden size."""
    return out | {"head_dim": out["hidden_size"] // out["num_attention_heads"]}


def _afmoe(out: dict[str, Any], layers: int, rng: random.Random) -> dict[str, Any]:
    return _sliding(out, layers, rng) | {"attention_bias": False}


RULES = {
    "deepseek_ocr2_text": _ocr,
    "unlimited_ocr_text": _ocr,
    "molmo2_text": _molmo,
    **dict.fromkeys(("gemma2", "gemma3_text", "olmo3", "exaone4", "cohere2", "gpt_oss"), _sliding),
    "afmoe": _afmoe,
    "helium": _square,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _linear),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _qwen_moe),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "mistral4", "glm4_moe_lite"), _latent),
    "glm_moe_dsa": _dsa,
    "hy_v4": _hy4,
    "mistral_large4_text": _mistral_large,
    "mamba2": _mamba2,
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "bamba": _bamba,
    "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "zamba2": _zamba2,
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4_unified,
    "llama4_text": _llama4,
    "kimi_linear": _kimi,
    "longcat_flash": _longcat,
    "deepseek_v4": _deepseek_v4,
    "mimo_v2_flash": _mimo,
    "inkling_text": _inkling,
    "step3p5": _step,
    "olmo_hybrid": _olmo_hybrid,
    "minimax": _minimax,
    "minimax_m3_vl_text": _minimax_m3,
    "glm5_next_text": _glm5_next,
    "flint": _flint,
    "kolibri1": _sliding,
    "qwen4_exp_text": _qwen4,
    "bailing_hybrid": _bailing,
    "hy_v3": _hy3,
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), _dino),
    **dict.fromkeys(("dinov3_vit", "vit"), _image),
    "deit": _deit,
    "beit": _beit,
    "clip_text_model": _no_kv,
    **dict.fromkeys(("siglip_text_model", "siglip2_text_model"), _siglip),
    "modernbert": _modern,
    "falcon": _falcon,
    "opt": _opt,
    "gpt2": _gpt,
    "gptj": _gpt,
    "codegen": _codegen,
    "gpt_bigcode": lambda out, layers, rng: _no_kv(_gpt(out, layers, rng), layers, rng),
    "gpt_neo": _neo,
    "mpt": _mpt,
    "xlstm": _xlstm,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "lfm3": _lfm3,
    "recurrent_gemma": _recurrent_gemma,
    "jamba": _jamba,
    "distilbert": _distil,
    **dict.fromkeys(("bloom", "gpt_neox", "bert", "roberta", "xlm-roberta", "persimmon"), _no_kv),
}
