"""Sparse attention of 2026 as released files say it: MiniMax-M3's blocks, GLM-5.3's pools and delta layers."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.errors import InputError
from shardwise.models import Attention, GatedDelta, LatentAttention, Model, model_from_config
from shardwise.ops import active_parameters, count_parameters

_FREQ = [0] * 3 + [1] * 57
SPARSE: dict[str, Any] = {
    "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 4, "sparse_topk_blocks": 16,
    "sparse_block_size": 128, "sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 1,
    "sparse_disable_index_value": _FREQ, "sparse_attention_freq": _FREQ,
}  # fmt: skip
M3: dict[str, Any] = {
    "hidden_size": 6144, "intermediate_size": 3072, "dense_intermediate_size": 12288, "shared_intermediate_size": 3072,
    "num_hidden_layers": 60, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 200064, "max_position_embeddings": 1048576, "use_gemma_norm": True, "attention_output_gate": False,
    "rotary_dim": 64, "hidden_act": "swigluoai", "use_qk_norm": True, "qk_norm_type": "per_head",
    "num_local_experts": 128, "num_experts_per_tok": 4, "n_shared_experts": 1, "use_routing_bias": True,
    "num_mtp_modules": 7, "num_nextn_predict_layers": 1, "moe_layer_freq": _FREQ, "sparse_attention_config": SPARSE,
}  # fmt: skip
"""The language model of MiniMaxAI/MiniMax-M3, as its file has it."""

_KDA = {"num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}
GLM: dict[str, Any] = {
    "model_type": "glm5_next_text", "vocab_size": 154880, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 45, "num_attention_heads": 64, "num_key_value_heads": 64, "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048, "n_routed_experts": 288, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "mhc": True, "hc_mult": 4, "mla_use_nope": True, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128,
    "index_topk": 2048, "index_kpool": 4, "index_kpool_compress": True, "num_nextn_predict_layers": 1,
    "linear_attn_config": _KDA,
    "layer_types": ["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(45)],
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
}  # fmt: skip
"""The language model of zai-org/GLM-5.3-Flash, as its file has it."""


def m3(**more: object) -> Model:
    """The language model of a file that wraps it."""
    return model_from_config({"model_type": "minimax_m3_vl", "text_config": {**M3, **more}}, part="text")


def test_minimax_m3_picks_blocks_behind_its_first_three_layers() -> None:
    """Each key-value head has 16 blocks of 128 tokens picked for it, by four heads that score one key a token."""
    model = m3()
    cores = [block.mixers[0] for block in model.layers if isinstance(block.mixers[0], Attention)]
    assert [core.indexer is not None for core in cores] == [False] * 3 + [True] * 57
    assert [block.has_experts for block in model.layers] == [False] * 3 + [True] * 57
    last = cores[-1].indexer
    assert last is not None and (last.heads, last.head_dim, last.top_k) == (4, 128, 2048)
    assert count_parameters(model) == 426_174_565_632
    kept = [cache.elements * cache.heads * 2 + cache.bytes8 for core in cores for cache in core.caches()]
    assert sum(kept) == 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2


def test_minimax_m3_is_the_same_in_the_words_of_transformers() -> None:
    """Transformers saves lists of layer types and keys of its own for the same layers."""
    words = {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57, "hidden_act": "silu"}
    words |= {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57, "index_n_heads": 4, "index_head_dim": 128}
    given = {key: value for key, value in M3.items() if key not in ("sparse_attention_config", "moe_layer_freq")}
    saved = model_from_config({"model_type": "minimax_m3_vl_text", **given, **words})
    assert saved.layers == m3().layers


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"attention_output_gate": True}, "attention_output_gate"),
        ({"sparse_attention_config": {**SPARSE, "sparse_num_index_heads": 8}}, "index_n_heads"),
        ({"sparse_attention_config": {**SPARSE, "sparse_attention_freq": [1] * 7}}, "sparse_attention_freq"),
        ({"mlp_layer_types": ["moe"] * 60}, "mlp_layer_types"),
    ],
)
def test_what_minimax_m3_cannot_be_is_refused(more: dict[str, Any], field: str) -> None:
    """A gate, indexers that are not those of key-value heads, and lists of another length are problems."""
    with pytest.raises(InputError, match=field):
        m3(**more)


def test_qwen_3_8_flash_next_has_a_table_of_n_grams() -> None:
    """A prime number of rows of 160 for each of 16 heads; 125.7 billion parameters beside it, 7.3 of which are met."""
    model = Model.load("Qwen/Qwen3.8-Flash-Next")
    assert model.extra_embedding == 320_001_536 * 160
    assert count_parameters(model) - model.extra_embedding == 125_743_653_760
    assert active_parameters(model) == 7_306_994_560
    core = model.layers[3].mixers[0]
    assert isinstance(core, Attention) and core.indexer is not None
    cache, keys, tail = core.caches()
    assert (cache.elements, cache.heads) == (512, 2)
    assert (keys.bytes8, keys.rate) == (256, 4) and (tail.bytes8, tail.limit) == (256, 4)


def test_glm_5_3_has_delta_layers_and_pools_the_keys_of_its_indexers() -> None:
    """Every fourth layer attends, without rotary positions; an entry of its indexer stands for four tokens."""
    model = model_from_config(GLM)
    mixers = [block.mixers[0] for block in model.layers]
    assert [isinstance(mixer, GatedDelta) for mixer in mixers] == [i % 4 != 3 for i in range(45)]
    core = mixers[3]
    assert isinstance(core, LatentAttention) and core.qk_rope_head_dim == 0
    latent, keys, tail = core.caches()
    assert (latent.elements, keys.bytes8, keys.rate) == (512, 132, 4)
    assert (tail.bytes8, tail.limit, tail.ring) == (512, 4, True)
    assert [block.has_experts for block in model.layers] == [False] * 3 + [True] * 42
    assert [isinstance(block.mixers[0], LatentAttention) for block in model.mtp] == [True]
