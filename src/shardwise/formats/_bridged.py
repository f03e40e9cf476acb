"""Megatron-Bridge's mixed precision: the word that a case is, or the fields of its class where no word is that.

What stands there wins over the same settings of the model and of ddp (training/config.py runtime_config_update,
training/mixed_precision.py setup).
"""

from __future__ import annotations

from typing import Any

from shardwise.formats._exported import ExportCase
from shardwise.formats._imported import Keys, table
from shardwise.formats.megatron._values import split_states

_SECTION = "mixed_precision."
_MODULE = "megatron.bridge.training.mixed_precision."
_WORDS = {"delayed": "fp8_delayed_scaling", "tensorwise": "fp8_current_scaling", "mxfp8": "mxfp8"}
_WORDS |= {"blockwise": "fp8_subchannel_scaling"}
_GATHERS = ("fp8_param_gather", "fp4_param_gather")
_ENDS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
# training/mixed_precision.py: what its functions set beside what is counted
_DETAILS: dict[str, dict[str, Any]] = {
    "delayed": {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"},
    "mxfp8": {"fp8": "e4m3"},
}


def mixed_precision(case: ExportCase) -> str | dict[str, Any]:
    """Return what mixed_precision is for a case: a word, or a mapping that makes the class."""
    precision = split_states(case.job.precision or case.stack.precision)[0]
    kind, own = precision.removesuffix("-grads16"), case.stack.settings
    recipe = own.fp8_recipe or "tensorwise"
    half = kind == "fp16"
    fields: dict[str, Any] = {"fp16" if half else "bf16": True}  # none is of 32 bits alone
    fields["grad_reduce_in_fp32"] = not precision.endswith("-grads16")
    word = "fp16_mixed" if half else "bf16_mixed"
    if kind == "fp8":
        word = f"bf16_with_{_WORDS[recipe]}_mixed"
        fields |= {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_param_gather": own.fp8_param_gather}
        fields |= _DETAILS.get(recipe, {})
        fields |= {"reuse_grad_buf_for_mxfp8_param_ag": True} if recipe == "mxfp8" and own.fp8_param_gather else {}
    elif kind == "fp4":
        word = "bf16_with_nvfp4_mixed"
        fields |= {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": own.fp8_param_gather}
    ends = (own.bf16_first_layers, own.bf16_last_layers) if kind in ("fp8", "fp4") else (0, 0)
    if any(ends):
        fields |= {"first_last_layers_bf16": True, **dict(zip(_ENDS, ends, strict=True))}
    if _counted(fields) == _counted(table("nemo.toml")["precisions"][word]):
        return word
    dtype = torch_dtype("fp16" if half else "bf16")
    return {"_target_": _MODULE + "MixedPrecisionConfig", "params_dtype": dtype, "pipeline_dtype": dtype, **fields}


def torch_dtype(word: str) -> dict[str, Any]:
    """Return what makes a data type of torch of the word for one."""
    name = {"fp16": "torch.float16", "bf16": "torch.bfloat16", "fp32": "torch.float32"}[word]
    return {"_target_": name, "_call_": False}


def take_states(keys: Keys, values: dict[str, object]) -> None:
    """Put the types of gradients and moments among the settings, and what a precision-aware optimizer holds of masters.

    Its fp8_recipe is that of mixed_precision, tensorwise unless another is asked for, in bf16 too (training/config.py).
    """
    for path in ("optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype", "ddp.megatron_fsdp_main_grads_dtype"):
        if word := keys.word(f"{path}._target_"):
            values[path.rpartition(".")[2]] = word
    if values.get("use_precision_aware_optimizer"):
        values.setdefault("fp8_recipe", "tensorwise")


def take_word(keys: Keys, values: dict[str, object], meant: dict[str, object]) -> list[str]:
    """Put what a word of mixed precision means over settings of the model and of ddp; return what to say of it."""
    if "bias_swiglu_fusion" in values:  # bias_activation_fusion, whatever the activation
        values.setdefault("bias_gelu_fusion", values["bias_swiglu_fusion"])
    name = "accumulate_allreduce_grads_in_fp32"
    wide = bool(meant.get(name, True))
    asked = values.get(name, wide)
    if keys.raw("mixed_precision"):
        values |= meant | {name: wide}
        text = f"gradients of {32 if wide else 16} bits: of mixed_precision, which wins over ddp"
        return [] if asked == wide else [text]
    narrow = keys.raw("ddp.grad_reduce_in_fp32") is False and not any(one.startswith(_SECTION) for one in keys.values)
    text = "gradients of 16 bits: of ddp, over which a recipe's own mixed_precision wins, of 32 in bf16_mixed"
    return [text] if narrow and not meant else []


def _counted(fields: dict[str, Any]) -> tuple[object, ...]:
    """Return what is counted of the fields of a mixed precision, under either name of the width of gradients."""
    wide = fields.get("grad_reduce_in_fp32", fields.get("accumulate_allreduce_grads_in_fp32", True))
    ends = tuple(fields.get(name, 0) for name in _ENDS)
    return wide, fields.get("fp8_recipe"), any(fields.get(name) for name in _GATHERS), ends
