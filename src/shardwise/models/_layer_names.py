"""The names that classes of transformers 5.23.0 give their linear layers, where they are not the ledger's and "_proj".

Read from the classes themselves by shapes: a linear layer of the ledger is that of the class with its features in and
out. Those of classes with code of their own (qwen, chatglm, baichuan) are from that code, 2024-06.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

_NAMES = {
    (
        "afmoe cohere2_moe dots1 ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4v_moe kolibri1 mellum "
        "minimax_m2 minimax_m3_vl_text mixtral olmoe "
        "qwen3_moe qwen3_omni_moe_text solar_open"
    ): "mlp.router=gate",
    "bailing_hybrid": (
        "attention.head_gate=g_proj attention.kv_down=kv_a_proj_with_mqa attention.kv_up=kv_b_proj ssm.out=o_proj"
    ),
    "bamba falcon_h1 mamba2 qwen3_5_text": "ssm.out=out_proj",
    "beit deit nanochat vit": "mlp.down=fc2 mlp.up=fc1",
    "bert roberta xlm-roberta": (
        "attention.k=key attention.o=dense attention.q=query attention.v=value embedding.head_transform=dense "
        "mlp.down=dense mlp.up=dense"
    ),
    "bloom falcon gpt_neox persimmon": (
        "attention.o=dense attention.qkv=query_key_value mlp.down=dense_4h_to_h mlp.up=dense_h_to_4h"
    ),
    "clip_text_model opt siglip2_text_model siglip_text_model": "attention.o=out_proj mlp.down=fc2 mlp.up=fc1",
    "codegen gptj": "attention.o=out_proj mlp.down=fc_out mlp.up=fc_in",
    "dbrx": "mlp.router=layer",
    "deepseek_v32 glm_moe_dsa hy_v4 mistral_large4_text": (
        "attention.kv_down=kv_a_proj_with_mqa attention.kv_up=kv_b_proj attention.q_down=q_a_proj "
        "attention.q_up=q_b_proj attention.indexer.q=wq_b attention.indexer.k=wk "
        "attention.indexer.weights=weights_proj mlp.router=gate"
    ),
    "glm5_next_text": (
        "attention.kv_down=kv_a_proj_with_mqa attention.kv_up=kv_b_proj attention.q_down=q_a_proj "
        "attention.q_up=q_b_proj attention.indexer.q=wq_b attention.indexer.k=wk "
        "attention.indexer.weights=weights_proj ssm.out=o_proj"
    ),
    "deepseek_v2 deepseek_v3 axk1 youtu minicpm3 glm4_moe_lite": (
        "attention.kv_down=kv_a_proj_with_mqa attention.kv_up=kv_b_proj attention.q_down=q_a_proj "
        "attention.q_up=q_b_proj mlp.router=gate"
    ),
    "mistral4": (
        "attention.kv_down=kv_a_proj_with_mqa attention.kv_up=kv_b_proj attention.q_down=q_a_proj "
        "attention.q_up=q_b_proj"
    ),
    "deepseek_v4": (
        "attention.o_a=o_a_proj attention.out=o_b_proj attention.q=q_b_proj attention.q_down=q_a_proj "
        "attention.q_up=q_b_proj"
    ),
    "distilbert": (
        "attention.k=k_lin attention.o=out_lin attention.q=q_lin attention.v=v_lin "
        "embedding.head_transform=vocab_transform mlp.down=lin2 mlp.up=lin1"
    ),
    "falcon_mamba jamba mamba": "ssm.out=out_proj ssm.select=x_proj ssm.time_step=dt_proj",
    "gemma3n_text": (
        "embedding.per_layer_projection=per_layer_model_projection extras.altup_correct=correction_coefs "
        "extras.altup_predict=prediction_coefs extras.altup_router=modality_router extras.laurel_left=linear_left "
        "extras.laurel_right=linear_right extras.per_layer_gate=per_layer_input_gate "
        "extras.per_layer_out=per_layer_projection"
    ),
    "gemma4_text": (
        "embedding.per_layer_projection=per_layer_model_projection extras.per_layer_gate=per_layer_input_gate "
        "extras.per_layer_out=per_layer_projection mlp.router=proj"
    ),
    "gpt2 gpt_bigcode": "attention.o=c_proj attention.qkv=c_attn mlp.down=c_proj mlp.up=c_fc",
    "gpt_neo": "attention.o=out_proj mlp.down=c_proj mlp.up=c_fc",
    "granitemoehybrid": "mlp.down=output_linear mlp.gate_up=input_linear ssm.out=out_proj",
    "granitemoeshared granitemoe_swa": "mlp.down=output_linear mlp.gate_up=input_linear",
    "hunyuan_v1_moe": "mlp.router=wg",
    "kimi_linear": (
        "attention.kv_down=kv_a_proj_with_mqa attention.kv_up=kv_b_proj attention.q_down=q_a_proj "
        "attention.q_up=q_b_proj ssm.out=o_proj"
    ),
    "lfm2 lfm2_moe": "attention.o=out_proj mlp.down=w2 mlp.gate=w1 mlp.up=w3 ssm.out=out_proj",
    "lfm3": "attention.head_gate=g_proj mlp.down=w2 mlp.gate=w1 mlp.up=w3 ssm.out=out_proj",
    "llama4_text phimoe": "mlp.router=router",
    "longcat_flash": (
        "attention.kv_down=kv_a_proj_with_mqa attention.kv_up=kv_b_proj attention.q_down=q_a_proj "
        "attention.q_up=q_b_proj mlp.router=classifier"
    ),
    "minimax": "mlp.router=gate ssm.out=out_proj ssm.qkv=qkv_proj",
    "modernbert": "attention.o=Wo attention.qkv=Wqkv embedding.head_transform=dense mlp.down=Wo mlp.gate_up=Wi",
    "mpt": "attention.o=out_proj attention.qkv=Wqkv",
    "nemotron_h": "mlp.latent_down=fc1_latent_proj mlp.latent_up=fc2_latent_proj ssm.out=out_proj",
    "olmo_hybrid": "ssm.out=o_proj",
    "phi": "attention.o=dense mlp.down=fc2 mlp.up=fc1",
    "qwen2_moe": "mlp.shared_gate=shared_expert_gate",
    "qwen3_5_moe_text": "mlp.shared_gate=shared_expert_gate ssm.out=out_proj",
    "qwen4_exp_text": (
        "attention.indexer.k=index_qk_proj attention.indexer.q=index_qk_proj mlp.router=gate "
        "mlp.shared_gate=shared_expert_gate ssm.out=out_proj"
    ),
    "qwen3_next": "mlp.router=gate mlp.shared_gate=shared_expert_gate ssm.out=out_proj",
    "recurrent_gemma": "ssm.out=linear_out",
    "rwkv": "mlp.down=value mlp.up=key ssm.k=key ssm.out=output ssm.v=value",
    "starcoder2": "mlp.down=c_proj mlp.up=c_fc",
    "step3p5 laguna": "attention.head_gate=g_proj",
    "xlstm": "mlp.down=proj_down mlp.gate=proj_up_gate mlp.up=proj_up ssm.out=out_proj",
    "zamba2": "attention.o=o_proj extras.hybrid_linear=linear ssm.out=out_proj",
    "baichuan": "attention.qkv=W_pack",
    "chatglm": "attention.o=dense attention.qkv=query_key_value mlp.down=dense_4h_to_h mlp.gate_up=dense_h_to_4h",
    "qwen": "attention.o=c_proj attention.qkv=c_attn mlp.down=c_proj mlp.gate=w2 mlp.up=w1",
}
"""By types of models: REGION.LAYER of the ledger and its name in the class."""


@cache
def layer_names(family: str) -> Mapping[str, str]:
    """Return the names of a type's linear layers that are not the ledger's, by region and layer.

    >>> layer_names("bloom")["attention.o"]
    'dense'
    """
    text = next((text for families, text in _NAMES.items() if family in families.split()), "")
    return MappingProxyType(dict(pair.split("=") for pair in text.split()))


_AS_THEY_ARE = ("in_proj_", "linear_", "output_gate", "receptance", "project_", "shared_expert_gate", "classifier")


def layer_name(family: str, region: str, layer: str) -> str:
    """Return what the class of a type of models calls a linear layer of the ledger, in a region.

    >>> layer_name("llama", "attention", "q"), layer_name("gpt2", "mlp", "down"), layer_name("qwen3_next", "ssm", "out")
    ('q_proj', 'c_proj', 'out_proj')
    """
    names = layer_names(family)
    own = names.get(f"{region}.{layer}") or names.get(f"{region.partition('.')[0]}.{layer}")
    kept = layer.startswith(_AS_THEY_ARE) or (family in ("xlstm", "gemma3n_text") and "_" in layer)
    return own or (layer if kept else f"{layer}_proj")


EXPERT_NAMES: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {
        ("mixtral", "up"): ("w1", "w3"),
        ("mixtral", "down"): ("w2",),
        ("qwen2_moe", "up"): ("gate_proj", "up_proj"),
        ("qwen2_moe", "down"): ("down_proj",),
    }
)
"""What peft calls the linear layers of experts, by whose they are like: as before they became parameters."""
