"""How peft and bitsandbytes find the experts of a model: linear layers, or parameters of three dimensions."""

from __future__ import annotations

from typing import Literal, TypeAlias

from shardwise.plans._stack import Stack

ExpertAdapters: TypeAlias = Literal["grouped", "modules", "parameters", "mixtral", "qwen2_moe", "hidden"]
"""How the names of targets reach experts: as grouped GEMMs or as linear layers, with adapters beside them, as the
parameters that they are, as peft converts the names that they had in one of `NAMED_EXPERTS`, or not at all."""

MLP_NAMES = ("gate", "up", "gate_up", "down")
"""Linear layers of a feed-forward by their short names, and so those of experts that were linear layers."""

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
BARE_EXPERTS = (
    "flex_olmo", "minimax", "minimax_m2", "mixtral", "olmoe", "qwen3_moe", "qwen3_omni_moe_text",
)  # fmt: skip
"""Types among those without a shared expert or a dense feed-forward that goes by the names of the experts' layers.

transformers 5.24.0 modeling_*.py; Qwen3-MoE builds its dense layers for mlp_only_layers, which no release has.
"""
PARAMETER_EXPERTS = (
    "dbrx", "gpt_oss", "granitemoe", "granitemoehybrid", "granitemoeshared", "jetmoe", "llama4_text",
    "qwen3_vl_moe_text",
)  # fmt: skip
"""Types whose experts were parameters before transformers 5 too (4.57.6 modeling_*.py)."""
LINEAR_ROUTERS = ("afmoe", "dbrx", "gemma4_text", "hunyuan_v1_moe", "llama4_text", "longcat_flash", "phimoe")
"""Types whose router is a linear layer or has one (transformers 5.23.0, Llama4Router, PhimoeTopKRouter and others)."""
LINEAR_EXPERTS = ("llama4_text",)
"""Types whose experts become linear layers for bitsandbytes (transformers 5.24.0 quantizers/base.py
MODULES_TO_PATCH_FOR_QUANTIZATION)."""


def experts_of(stack: Stack, family: str) -> ExpertAdapters:
    """Return how names of targets reach the experts of a type of models, which are named where it has no type.

    >>> from shardwise.plans import find_stack
    >>> [experts_of(find_stack(name), "qwen3_moe") for name in ("megatron", "transformers-2025", "trl", "unsloth")]
    ['grouped', 'modules', 'qwen2_moe', 'parameters']
    """
    if stack.permutes_experts:
        return "grouped"
    if stack.experts_loop:
        return "hidden" if family in PARAMETER_EXPERTS else "modules"
    if stack.adapts_experts == "parameters":
        return "parameters"
    if stack.adapts_experts == "none":
        return "hidden"
    if not family or family in NAMED_EXPERTS["mixtral"]:
        return "mixtral"
    return "qwen2_moe" if family in NAMED_EXPERTS["qwen2_moe"] else "hidden"


def all_reaches_experts(stack: Stack, family: str) -> bool:
    """Return whether the names of all linear layers of a type of models are those that reach its experts.

    A framework that lists them by itself finds no experts that are parameters, but others that go by their names.

    >>> from shardwise.plans import find_stack
    >>> [all_reaches_experts(find_stack("axolotl"), family) for family in ("qwen3_moe", "deepseek_v3")]
    [False, True]
    """
    listed = stack.adapts_experts == "listed" and experts_of(stack, family) in NAMED_EXPERTS
    return not (listed and family in BARE_EXPERTS)


def wide_experts(stack: Stack, family: str) -> bool:
    """Return whether bitsandbytes leaves the experts of a type of models as they come.

    >>> from shardwise.plans import find_stack
    >>> [wide_experts(find_stack(name), "qwen3_moe") for name in ("transformers", "unsloth", "transformers-2024")]
    [True, False, False]
    >>> wide_experts(find_stack("transformers-2025"), "gpt_oss")
    True
    """
    if family in LINEAR_EXPERTS:
        return False
    if stack.settings.quantize_moe_experts:
        return False
    return not stack.narrow_experts or (stack.experts_loop and family in PARAMETER_EXPERTS)
