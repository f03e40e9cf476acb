"""Configuration keys that change no size, no FLOP and no byte, so that leaving them out needs no mention."""

from __future__ import annotations

_KEYS = """
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

NO_EFFECT: frozenset[str] = frozenset(_KEYS.split())
