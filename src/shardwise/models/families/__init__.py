"""One small module a group of families; `builder` finds the one for a model type and imports only that one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from shardwise.models._architecture import Architecture
from shardwise.models._config import Config
from shardwise.models.families._parts import FamilyRow

_MODULES = {
    "dense": """
        llama cwm granite granite_swa hyperclovax mistral ministral ministral3 phi3 qwen2 qwen3 smollm3 gemma gemma2
        vaultgemma gemma3_text seed_oss glm glm4
        glm4v_text glm_ocr_text mllama_text_model
        helium olmo olmo2 olmo3 exaone4 apertus arcee nemotron jais2 hunyuan_v1_dense ernie4_5 nanochat bitnet stablelm
        cohere cohere2 starcoder2 phi persimmon gpt_neox gptj codegen""",
    "classic": "gpt2 gpt_bigcode gpt_neo opt bloom mpt falcon",
    "moe": """
        mixtral minimax_m2 olmoe flex_olmo phimoe gpt_oss granitemoe granitemoeshared qwen2_moe qwen3_moe glm4_moe dots1
        hy_v3 solar_open ernie4_5_moe hunyuan_v1_moe llama4_text dbrx aria_text ernie4_5_vl_moe_text""",
    "moe_windows": """
        afmoe mimo_v2_flash step3p5 cohere2_moe exaone_moe granitemoe_swa laguna mellum flint kolibri1 inkling_text""",
    "latent": """
        deepseek_v2 deepseek_v3 deepseek_v32 axk1 youtu minicpm3 glm_moe_dsa glm4_moe_lite mistral4 longcat_flash
        deepseek_v4 deepseek_v41_text hy_v4 mistral_large4_text glm5_next_text""",
    "hybrid": "mamba falcon_mamba mamba2 jamba bamba granitemoehybrid falcon_h1 zamba2",
    "gemma": "gemma3n_text gemma4_text gemma4_unified_text",
    "nemotron": "nemotron_h",
    "recurrent": """
        recurrent_gemma rwkv xlstm lfm2 lfm2_moe lfm3 qwen3_next qwen3_5_text qwen3_5_moe_text kimi_linear
        olmo_hybrid minimax bailing_hybrid""",
    "sparse": "minimax_m3_vl_text qwen4_exp_text",
    "encoder": """
        bert roberta xlm-roberta distilbert modernbert clip_text_model siglip_text_model siglip2_text_model""",
    "vision": "vit deit beit dinov2 dinov2_with_registers dinov3_vit",
    "texts": "molmo2_text deepseek_ocr2_text unlimited_ocr_text voxtral_realtime_text",
    "described": "gpt2-like llama-like mcore_gpt mcore_moe mcore_hybrid",
    "remote": "internlm baichuan qwen chatglm deci mimo nemotron-nas",
    "remote_moe": "deepseek bailing_moe bailing_moe_v2 bailing_moe_linear",
}

FAMILIES: dict[str, str] = {name: module for module, names in _MODULES.items() for name in names.split()}
"""Model type -> the module that builds it."""

SAME_AS: dict[str, str] = {
    "kimi_k2": "deepseek_v3",
    "yi": "llama",
    "aquila": "llama",
    "internlm2": "llama",
    "internlm3": "llama",
    "exaone": "llama",
    "iquestcoder": "llama",
    "sarvam_moe": "glm4_moe",
    "hy_v4_vl_text": "hy_v4",
    "mimo_v2": "mimo_v2_flash",
    "sarvam_mla": "deepseek_v3",
    "step3p7_text": "step3p5",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
    "glm4v_moe_text": "glm4_moe",
    "paddleocr_vl_text": "ernie4_5",
    "gpt-sw3": "gpt2",
    "starcoder": "gpt_bigcode",
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
    "hunyuan_vl_text": "hunyuan_v1_dense",
    "granite4_vision_text": "granite",
    "granite_docling_text": "granite",
    "emu3_text_model": "llama",
    "apertus1p5_text": "apertus",
    "cosmos3_edge_text": "arcee",
}
"""Model types of remote code and of language models in wrappers -> the type whose layers they have."""

TEXT_OF: dict[str, str] = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "deepseek_v41": "deepseek_v41_text",
    "inkling_mm_model": "inkling_text",
    "hy_v4_vl": "hy_v4_vl_text",
    "mistral_large4": "mistral_large4_text",
    "llama4": "llama4_text",
    "mllama": "mllama_text_model",
    "aria": "aria_text",
    "clip": "clip_text_model",
    "siglip": "siglip_text_model",
    "siglip2": "siglip2_text_model",
    "ernie4_5_vl_moe": "ernie4_5_vl_moe_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "paddleocr_vl": "paddleocr_vl_text",
    "phi4_multimodal": "phi3",
    "phi4mm": "phi3",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_5_omni": "qwen2_5_omni_text",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_omni_moe": "qwen3_omni_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "glm5_next": "glm5_next_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "qwen4_exp": "qwen4_exp_text",
    "kimi_k3": "kimi_linear",
    "minimax_m3": "minimax_m3_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "step3p7": "step3p7_text",
    "glm_ocr": "glm_ocr_text",
    "hunyuan_vl": "hunyuan_vl_text",
    "granite4_vision": "granite4_vision_text",
    "granite_docling": "granite_docling_text",
    "emu3": "emu3_text_model",
    "apertus1p5": "apertus1p5_text",
    "cosmos3_edge": "cosmos3_edge_text",
    "molmo2": "molmo2_text",
    "deepseek_ocr2": "deepseek_ocr2_text",
    "unlimited_ocr": "unlimited_ocr_text",
    "voxtral_realtime": "voxtral_realtime_text",
}
"""Model types of wrappers -> the type of the language model inside."""


DESCRIBED: tuple[str, ...] = ("bloom", "mpt", "falcon", "nemotron", "phi", "gpt_neox")
"""Model types that are also written field by field; the fields then have the last word."""


def builder(model_type: str, described: bool = False) -> Callable[[Config], Architecture]:
    """Return the function that makes a model of this type, from its class's keys or from a description."""
    row: FamilyRow = import_module(f"shardwise.models.families.{FAMILIES[model_type]}").ROWS[model_type]
    build = import_module("shardwise.models.families.described").build if described else row.build

    def built(config: Config) -> Architecture:
        config.facts = row.facts
        return cast(Architecture, build(config))

    return built
