"""The fields that describe a model, under one name each, with the keys that configuration files use for them.

Every field is also an override (`Model.load(name, {"num_layers": 4})`) and a flag of the command line.
"""

from __future__ import annotations

from typing import NamedTuple


class ConfigField(NamedTuple):
    """One field: its name here, its type, what it means, and its keys in configuration files in order of preference."""

    name: str
    kind: type
    help: str
    keys: tuple[str, ...]


def _fields(kind: type, rows: tuple[tuple[str, str, str], ...]) -> dict[str, ConfigField]:
    """Make the fields of one type from rows of name, keys and help; the name itself is a key too, the last one."""
    return {
        name: ConfigField(name, kind, text, tuple(dict.fromkeys([*keys.split(), name]))) for name, keys, text in rows
    }


_SIZES = (
    ("hidden_size", "hidden_size n_embd d_model", "width of the residual stream"),
    ("num_layers", "num_hidden_layers n_layer n_layers num_layers num_blocks", "number of layers"),
    ("vocab_size", "vocab_size padded_vocab_size", "rows of the embedding table"),
    (
        "max_context",
        "max_position_embeddings n_positions max_seq_len model_max_length context_length",
        "longest context",
    ),
    ("num_attention_heads", "num_attention_heads n_head n_heads", "query heads"),
    (
        "num_key_value_heads",
        "num_key_value_heads num_kv_heads n_head_kv "
        "num_query_groups num_attention_groups kv_n_heads multi_query_group_num",
        "key-value heads",
    ),
    ("head_dim", "head_dim attention_head_dim", "width of one head"),
    ("v_head_dim", "v_head_dim", "width of one value head"),
    ("ffn", "intermediate_size n_inner ffn_dim ffn_hidden_size", "width of the dense feed-forward"),
    ("window", "sliding_window attention_window_size window_size", "tokens a sliding-window layer sees, 0 for none"),
    ("attention_chunk", "attention_chunk_size", "tokens of one attention chunk, 0 for none"),
    ("q_lora_rank", "q_lora_rank", "rank of the latent query, 0 for a full-rank projection"),
    ("kv_lora_rank", "kv_lora_rank", "rank of the latent key and value"),
    ("qk_nope_head_dim", "qk_nope_head_dim", "head width without rotary position"),
    ("qk_rope_head_dim", "qk_rope_head_dim", "head width with rotary position"),
    ("index_n_heads", "index_n_heads", "heads of the sparse-attention indexer"),
    ("index_head_dim", "index_head_dim", "head width of the sparse-attention indexer"),
    ("index_topk", "index_topk", "past tokens that the indexer selects"),
    (
        "num_experts",
        "num_local_experts num_experts n_routed_experts moe_num_experts",
        "routed experts of an MoE layer",
    ),
    (
        "experts_per_token",
        "num_experts_per_tok moe_topk moe_k num_experts_per_token top_k_experts moe_top_k experts_per_token",
        "experts each token visits",
    ),
    ("expert_ffn", "moe_intermediate_size expert_ffn_hidden_size moe_ffn_hidden_size", "width of one routed expert"),
    (
        "num_shared_experts",
        "n_shared_experts num_shared_experts moe_num_shared_experts num_shared_expert",
        "experts that every token visits",
    ),
    (
        "shared_expert_ffn",
        "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size share_expert_dim",
        "width of the shared expert",
    ),
    ("first_dense_layers", "first_k_dense_replace num_dense_layers", "leading layers with a dense feed-forward"),
    ("moe_latent", "moe_latent_size", "width that routed experts work on, 0 for the hidden size"),
    (
        "num_mtp_layers",
        "num_nextn_predict_layers mtp_num_hidden_layers num_mtp_layers num_mtp_modules",
        "multi-token-prediction layers",
    ),
    ("ssm_state", "state_size mamba_d_state ssm_state_size mamba_state_dim", "state size of a state-space layer"),
    ("ssm_conv", "conv_kernel mamba_d_conv", "convolution width of a state-space layer"),
    ("ssm_heads", "mamba_num_heads mamba_n_heads n_mamba_heads", "heads of a state-space layer"),
    ("ssm_head_dim", "mamba_head_dim mamba_headdim", "head width of a state-space layer"),
    (
        "ssm_groups",
        "n_groups mamba_n_groups mamba_ngroups mamba_num_groups",
        "groups of B and C of a state-space layer",
    ),
    ("ssm_chunk", "chunk_size mamba_chunk_size", "tokens of one state-space chunk"),
    ("linear_key_heads", "linear_num_key_heads linear_num_heads", "key heads of linear attention"),
    ("linear_value_heads", "linear_num_value_heads", "value heads of linear attention"),
    ("linear_key_head_dim", "linear_key_head_dim linear_head_dim", "key head width of linear attention"),
    ("linear_value_head_dim", "linear_value_head_dim", "value head width of linear attention"),
    ("linear_conv", "linear_conv_kernel_dim", "convolution width of linear attention"),
)

_FLAGS = (
    ("tied", "tie_word_embeddings", "whether the output head shares the embedding table"),
    ("attention_bias", "attention_bias qkv_bias use_qkv_bias", "whether attention projections have biases"),
    ("mlp_bias", "mlp_bias", "whether feed-forward projections have biases"),
)

FIELDS: dict[str, ConfigField] = _fields(int, _SIZES) | _fields(bool, _FLAGS)
"""Every field of a model by name; each is an override and a flag."""

SIZE_FIELDS: dict[str, ConfigField] = {
    name: ConfigField(name, kind, text, (name,))
    for name, kind, text in (
        ("ffn_ratio", float, "width of the feed-forward over hidden_size, in place of ffn"),
        ("kv_ratio", float, "key-value heads over query heads, in place of num_key_value_heads"),
        ("gated", bool, "a gated feed-forward of three GEMMs (SwiGLU), with RMSNorm and no biases"),
        ("moe", bool, "MoE layers of num_experts experts"),
        ("expert_interval", int, "every so many layers one is MoE, the others dense"),
        ("learned_positions", bool, "positions have learned rows of the embedding, max_context of them"),
    )
}
"""Fields that describe a model from its sizes alone, beside those of `FIELDS`; they override no named model."""


def keys_of(name: str) -> tuple[str, ...]:
    """Return the keys under which configuration files hold a field.

    >>> keys_of("experts_per_token")[:2]
    ('num_experts_per_tok', 'moe_topk')
    """
    field = FIELDS.get(name)
    return field.keys if field else (name,)


# Keys of configuration files that change no size, no FLOP and no byte: leaving them out needs no mention.
_SILENT = """
    _attn_implementation _name_or_path activation_sparsity_pattern add_cross_attention alibi_bias_max
    altup_active_idx altup_coef_clip altup_correct_scale apply_query_key_layer_scaling
    apply_residual_connection_post_layernorm apply_yarn_scaling architectures attention_in_multiplier
    attention_multiplier attention_out_multiplier attention_softmax_in_fp32 attention_value_scale
    attn_implementation attn_scale attn_temperature_tuning attn_type auto_map autocast_kernel_dtype
    aux_loss_alpha bf16 boi_token_index bos_token bos_token_id chunk_size_feed_forward chunkwise_kernel
    classifier_dropout clip_qkv cls_token_id compress_rope_theta cross_attention_hidden_size decoder_start_token_id
    dim_model_base dtype embedding_multiplier eod_token_id eoi_token_index eos_token eos_token_id ep_size eps
    final_w_init_variance_scale finetuning_task floor_scale fp16 fp32 fp32_residual_connection fused_swiglu
    gate_soft_cap global_rope_theta gradient_checkpointing hc_eps hc_rope hc_sinkhorn_iters hidden_act_alpha
    id2label image_token_id image_token_index inference_state_dtype init_config init_device init_method init_std
    initializer_cfg initializer_factor initializer_range input_jitter_noise interpolation_factor is_decoder
    is_encoder_decoder key_multiplier kv_cache_quant label2id layer_norm_eps layer_norm_epsilon layerdrop
    layernorm_epsilon lm_head_multiplier logit_scale logits_scaling low_precision_layernorm mamba_hidden_act
    mamba_norm_before_gate mask_token_id max_inference_chunksize max_rope_position_embeddings mixer_rms_eps
    mlp_multipliers mm_tokens_per_image mode model_type moe_aux_loss_coef moe_dropless moe_norm_min
    moe_normalize_expert_weights moe_router_activation_func moe_router_dtype moe_router_padding_for_fp8
    moe_router_scaling_factor moe_router_score_function moe_use_gate mup_base_width mup_enabled n_ctx n_group
    name_or_path no_bias_softmax no_rope_layer_interval no_rope_layers norm_eps norm_epsilon
    norm_reduction_force_float32 num_expert_group num_hash_layers num_labels num_logits_to_keep onnx_safe
    original_max_position_embeddings original_rope output_attentions output_hidden_states output_router_logits
    pad_token pad_token_id partial_rotary_factor prefix pretraining_tp problem_type pruned_heads qa_dropout
    query_pre_attn_scalar reorder_and_upcast_attn rescale_every rescale_prenorm_residual residual_in_fp32
    residual_multiplier return_dict return_last_states rms_norm_eps rope_interleave rope_local_base_freq
    rope_parameters rope_ratio rope_scaling rope_theta rope_type rotary rotary_dim rotary_emb_base
    rotary_emb_fraction rotary_pct rotary_percentage route_scale routed_scaling routed_scaling_factor
    router_aux_loss_coef router_dtype router_jitter_noise router_scaling router_z_loss_coef
    scale_attention_softmax_in_fp32 scale_attn_by_inverse_layer_idx scale_attn_weights scale_depth scale_emb
    score_func score_function scoring_func sep_token_id seq_aux seq_classif_dropout seq_length sequence_kernel
    sinusoidal_pos_embds slow_but_exact softmax_in_fp32 softmax_scale ssm_in_multiplier ssm_multipliers
    ssm_out_multiplier step_kernel summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj swa_rope_theta swiglu_alpha swiglu_limit swiglu_limits swiglu_limits_shared
    task_specific_params tie_encoder_decoder time_step_floor time_step_init_scheme time_step_limit time_step_max
    time_step_min time_step_rank_scheme time_step_scale tokenizer_class topk_group topk_method torch_dtype
    torchscript transformers_version unk_token_id use_associative_scan use_bidirectional_attention use_cache
    use_cache_kernel use_cache_quantization use_dynamic_ntk use_flash_attn use_logn_attn use_long_context
    use_mamba_kernels use_mambapy use_mem_eff_path use_mem_rope video_token_id vision_end_token_id
    vision_feature_layer vision_start_token_id w_init_variance_scale weight_mode z_loss_coefficient
"""

NO_EFFECT: frozenset[str] = frozenset(_SILENT.split())
