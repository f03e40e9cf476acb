"""From a row of a training file to the stack that ran it: the framework, its kernels and its precision."""

from __future__ import annotations

from shardwise.models import Model, MoE
from shardwise.plans import default_stack, find_stack, precision_names
from shardwise.validation._cells import Cells, refuse
from shardwise.validation._frameworks import Framework, has_habit, variant_of


def named_stack(cells: Cells, framework: Framework, sharding: str, model: Model) -> str:
    """Return the name of the stack that ran a row: the framework's, or the variant of it that the cells say."""
    if not cells.text("attention_kernel"):
        cells.taken("attention_kernel")
    return variant_of(framework.stack or default_stack(sharding), cells.row, _experts(model))


def _experts(model: Model) -> str:
    """Return what the feed-forward of a model is, as frameworks.toml calls it."""
    experts = [block.feed_forward for block in model.kinds if isinstance(block.feed_forward, MoE)]
    if not experts:
        return "none"
    return "gated" if all(one.gated for one in experts) else "ungated"


def precision_of(cells: Cells, stack: str, rates: set[str]) -> str:
    """Return the recipe of a row: the widths it states, or the stack's for its type of products."""
    dtype = cells.text("compute_dtype").lower()
    if not dtype:
        cells.taken("compute_dtype")
        dtype = "bf16" if "bf16" in rates or not rates else "fp16"
    if dtype in ("fp8", "mxfp8", "nvfp4"):
        return _narrow(cells, stack, dtype, rates)
    if dtype in ("fp32", "tf32"):
        return dtype
    if dtype not in ("bf16", "fp16"):
        raise refuse("compute_dtype", dtype, "is not a known data type")
    weights, gradients = cells.text("param_dtype"), cells.text("grad_dtype")
    if not gradients and has_habit(stack, "narrow_gradients") and find_stack(stack).precision == f"{dtype}-grads16":
        gradients = dtype
    if weights == "fp32" and dtype == "bf16":
        return "amp-bf16"
    if not weights and not gradients:
        cells.taken("param_dtype")
        return "" if dtype == "bf16" else "fp16"
    masters = cells.text("master_weights")
    mixed = masters == "1" or (masters != "0" and has_habit(stack, "master_weights"))
    if weights == "bf16" and gradients in ("", "bf16") and not mixed:
        return "bf16-pure"
    name = f"{dtype}-grads16" if gradients in ("bf16", "fp16") else dtype
    return name if name in precision_names() else dtype


def _narrow(cells: Cells, stack: str, dtype: str, rates: set[str]) -> str:
    """Return the recipe of products narrower than 16 bits, with the gradients of the stack."""
    name = "fp4" if dtype == "nvfp4" and "fp4" in rates else "fp8"
    if dtype == "nvfp4":
        cells.taken("nvfp4")
    recipe = find_stack(stack).precision
    if cells.text("param_dtype") == "fp32" or (recipe.startswith("amp") and not cells.says("param_dtype")):
        return f"{name}-amp"
    return f"{name}-grads16" if recipe.endswith("grads16") else name


def dropout_of(cells: Cells, model: Model, stack: str) -> bool | None:
    """Return whether dropout is on: as the model says, and by default in Megatron-LM before Megatron-Core."""
    if model.dropout or not has_habit(stack, "dropout"):
        return None
    cells.taken("dropout")
    return True
