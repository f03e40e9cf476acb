"""From a row of a training file to the stack that ran it: the framework, its kernels and its precision."""

from __future__ import annotations

import re

from shardwise.measured._frameworks import Framework, Table, has_habit, variant_of
from shardwise.measured._record import Record, refuse
from shardwise.measured._rules import words
from shardwise.measured._training_tuning import is_tuned
from shardwise.models import Model
from shardwise.plans import TUNINGS, Effort, Plan, Sharding, default_stack, find_stack, precision_names


def named_stack(record: Record, framework: Framework, sharding: Sharding, model: Model, table: Table) -> str:
    """Return the name of the stack that ran a row: the stated one, or that of the framework with what the cells say."""
    if not record.text("attention_kernel"):
        record.taken("attention_kernel")
    if record.says("stack"):
        return record.text("stack")
    return variant_of(table, framework.stack or default_stack(Plan(sharding=sharding)), record.row, _experts(model))


def _experts(model: Model) -> str:
    """Return what the feed-forward of a model is, as frameworks.toml calls it."""
    experts = [block.experts for block in model.kinds if block.experts]
    if not experts:
        return "none"
    return "gated" if all(one.gated for one in experts) else "ungated"


def precision_of(record: Record, stack: str, rates: set[str], table: Table) -> str:
    """Return the recipe of a row: the widths it states, or the stack's for its type of products."""
    dtype = record.text("compute_dtype").lower()
    if not dtype:
        record.taken("compute_dtype")
        dtype = "bf16" if "bf16" in rates or not rates else "fp16"
    if dtype in ("fp8", "mxfp8", "nvfp4"):
        return _narrow(record, stack, dtype, rates)
    if dtype in ("fp32", "tf32"):
        return dtype
    if dtype not in ("bf16", "fp16"):
        raise refuse("compute_dtype", dtype, "is not a known data type")
    if is_tuned(record):
        return ""
    weights, gradients = record.text("param_dtype"), record.text("grad_dtype")
    if (
        not gradients
        and has_habit(table, stack, "narrow_gradients")
        and find_stack(stack).precision == f"{dtype}-grads16"
    ):
        gradients = dtype
    if weights == "fp32" and dtype == "bf16":
        return "amp-bf16"
    if not weights and not gradients:
        record.taken("param_dtype")
        return "" if dtype == "bf16" else "fp16"
    masters = record.text("master_weights")
    mixed = masters == "1" or (masters != "0" and has_habit(table, stack, "master_weights"))
    if weights == "bf16" and gradients in ("", "bf16") and not mixed:
        return "bf16-pure"
    name = f"{dtype}-grads16" if gradients in ("bf16", "fp16") else dtype
    return name if name in precision_names() else dtype


def _narrow(record: Record, stack: str, dtype: str, rates: set[str]) -> str:
    """Return the recipe of products narrower than 16 bits, with the gradients of the stack."""
    name = "fp4" if dtype == "nvfp4" and "fp4" in rates else "fp8"
    if dtype == "nvfp4":
        record.taken("nvfp4")
    recipe = find_stack(stack).precision
    if record.text("param_dtype") == "fp32" or (recipe.startswith("amp") and not record.says("param_dtype")):
        return f"{name}-amp"
    return f"{name}-grads16" if recipe.endswith("grads16") else name


def effort_of(record: Record) -> Effort:
    """Return how well a run was tuned: for a record where its source is known for that, else as most runs are."""
    said = record.notes.get("tuning", "") or record.text("tuning")
    if said:
        if said not in TUNINGS:
            raise refuse("tuning", said, "is not a way that runs are tuned")
        return said
    cited = f"{record.text('source')} {record.text('citation')}"
    if any(re.search(pattern, cited) for pattern in words("records").values()):
        return "record"
    if is_tuned(record):
        record.taken("adapter_tuning")
        return "record"
    record.taken("tuning")
    return "typical"


def dropout_of(record: Record, model: Model, stack: str, table: Table) -> bool | None:
    """Return whether dropout is on: as the model says, and by default in Megatron-LM before Megatron-Core."""
    if model.dropout or not has_habit(table, stack, "dropout"):
        return None
    record.taken("dropout")
    return True
