"""How peft and bitsandbytes find the experts of a model: linear layers, or parameters of three dimensions."""

from __future__ import annotations

from typing import Literal

from shardwise.plans._stack import Stack

NAMED_EXPERTS: dict[str, tuple[str, ...]] = {
    "mixtral": ("minimax", "minimax_m2", "mixtral"),
    "qwen2_moe": (
        "afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe",
        "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash",
        "mellum", "olmoe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text", "solar_open",
    ),
}  # fmt: skip
"""Types of models by how the experts' linear layers were called before they became parameters of three dimensions.

transformers 5.23.0 conversion_mapping.py _MODEL_TO_CONVERSION_PATTERN, as far as peft 0.21.2 knows the names
(_MOE_TARGET_MODULE_MAPPING of the file above). Experts of other types are no target of "all-linear".
"""
LINEAR_ROUTERS = ("afmoe", "dbrx", "gemma4_text", "hunyuan_v1_moe", "llama4_text", "longcat_flash", "phimoe")
"""Types whose router is a linear layer or has one (transformers 5.23.0, Llama4Router, PhimoeTopKRouter and others)."""
LINEAR_EXPERTS = ("llama4_text",)
"""Types whose experts become linear layers for bitsandbytes (transformers 5.24.0 quantizers/base.py
MODULES_TO_PATCH_FOR_QUANTIZATION)."""


def experts_of(stack: Stack, family: str) -> Literal["modules", "mixtral", "qwen2_moe", "hidden"]:
    """Return how "all-linear" finds the experts of a type of models, which are named where it has no type."""
    if stack.experts != "grouped-mm":
        return "modules"
    if not family or family in NAMED_EXPERTS["mixtral"]:
        return "mixtral"
    return "qwen2_moe" if family in NAMED_EXPERTS["qwen2_moe"] else "hidden"


def wide_experts(stack: Stack, family: str) -> bool:
    """Return whether bitsandbytes leaves the experts of a type of models as they come.

    >>> from shardwise.plans import find_stack
    >>> [wide_experts(find_stack(name), "qwen3_moe") for name in ("transformers", "unsloth", "transformers-2024")]
    [True, False, False]
    """
    return not stack.narrow_experts and family not in LINEAR_EXPERTS
