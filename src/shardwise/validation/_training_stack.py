"""From a row of a training file to the stack that ran it: the framework, its kernels and its precision."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import cast

from shardwise.models import Model, MoE
from shardwise.plans import PRECISIONS, Stack, default_stack, find_stack
from shardwise.plans._stack import LossKernel
from shardwise.validation._cells import Cells, refuse
from shardwise.validation._rules import Framework

# Megatron-LM before 2024, and what runs its GPT: dropout is on by default.
_OLD = ("megatron-2021", "megatron-scores", "megatron-deepspeed", "megatron-2023", "oneflow")
# Gradients have the type of the weights unless a source says otherwise.
_NARROW_SUMS = ("megatron-deepspeed", "internevo")
_ASYNC = r"async ?tp"
# torchtune recipes/full_finetune_single_device.py, optimizer_in_bwd.
_IN_BACKWARD = r"optimi[sz]er[ _-]in[ _-](bwd|backward)"
# torchtitan's selective checkpointing by operator.
_BY_OPERATOR = r"\bsac\b|by operator|per[ -]op"
# torchtune modules/loss: the head's result goes to the loss in pieces.
_CHUNKED = r"chunked (?:output |cross[ -]?entropy|loss|ce\b)"
_FUSED = ("flash", "cudnn_fused", "te_auto", "te_flash_or_cudnn")


def named_stack(cells: Cells, framework: Framework, sharding: str, model: Model) -> str:
    """Return the name of the framework's stack that a row says."""
    return _recipe(_stack(cells, framework, sharding), model)


def used_stack(cells: Cells, name: str) -> str | Stack:
    """Return the stack with what the notes of a row say of its loss and of its messages."""
    return _gathered(cells, _updated(cells, _kept(cells, _sent(cells, _settled(cells, name)))))


def _updated(cells: Cells, named: str | Stack) -> str | Stack:
    """Return the stack with whether its notes say that tensors are updated within the backward pass."""
    if not re.search(_IN_BACKWARD, cells.text("notes").lower()):
        return named
    stack = find_stack(named) if isinstance(named, str) else named
    return replace(stack, settings=replace(stack.settings, updates_in_backward=True))


def _gathered(cells: Cells, named: str | Stack) -> str | Stack:
    """Return the stack with the width in which its recipes gather sharded weights: that of 8-bit products.

    github.com/NVIDIA-NeMo/Megatron-Bridge training/mixed_precision.py: fp8_param_gather with one scale a tensor; blocks
    of MXFP8 have two copies, as many bytes as in 16 bits.
    """
    stack = find_stack(named) if isinstance(named, str) else named
    if cells.text("compute_dtype").lower() != "fp8" or not stack.name.startswith("megatron-bridge"):
        return named
    return replace(stack, gather_bytes=1.0)


def by_operator(cells: Cells) -> bool:
    """Return whether recompute keeps chosen operators, as torchtitan's policy does."""
    detail = cells.text("recompute_detail").lower()
    return cells.text("recompute") == "selective" and bool(re.search(_BY_OPERATOR, detail))


def _kept(cells: Cells, named: str | Stack) -> str | Stack:
    """Return the stack with what its recompute keeps."""
    if not by_operator(cells):
        return named
    stack = find_stack(named) if isinstance(named, str) else named
    return replace(stack, settings=replace(stack.settings, keeps_products=True))


def _stack(cells: Cells, framework: Framework, sharding: str) -> str:
    kernel, stack = cells.text("attention_kernel"), _compiled(cells, framework.stack or default_stack(sharding))
    if not kernel:
        cells.taken("attention_kernel")
        return stack
    if kernel == "unfused" and stack.startswith("megatron"):
        return stack if stack in _OLD else "megatron-scores"
    if kernel in _FUSED and stack in ("megatron-2021", "megatron-scores", "megatron-deepspeed"):
        return "megatron"
    return stack


def _recipe(stack: str, model: Model) -> str:
    """Return the stack of a row: the fused kernels of release 26.06 are those of gated experts.

    NeMo AutoModel has layers of its own for mixtures, and runs those of transformers otherwise.
    """
    experts = [b.feed_forward for b in model.kinds if isinstance(b.feed_forward, MoE)]
    if stack == "automodel" and not experts:
        return "transformers"
    plain = stack == "megatron-bridge-2606" and not all(e.gated for e in experts)
    return "megatron-bridge" if plain else stack


def _compiled(cells: Cells, stack: str) -> str:
    """Return torchtitan's stack as the notes of a row say: compiled, with asynchronous tensor parallelism, or eager."""
    notes = cells.text("notes").lower()
    if not stack.startswith("fsdp2") or not ("compile" in notes or re.search(_ASYNC, notes)):
        return stack
    if re.search(_ASYNC, notes):
        return "fsdp2-async-tp"
    return "fsdp2-compiled" if stack == "fsdp2-2024" else "fsdp2-compiled-loss"


def _sent(cells: Cells, named: str | Stack) -> str | Stack:
    """Return the stack with the messages that a row's notes say to overlap, and its dispatch of tokens to experts."""
    notes = cells.text("notes").lower()
    if not re.search("deepep|hybridep|1f1b overlap|tp-comm-overlap", notes):
        return named
    stack = find_stack(named) if isinstance(named, str) else named
    if "deepep" in notes or "hybridep" in notes:
        stack = replace(stack, dispatch="deduplicated")
    if "tp-comm-overlap" in notes:
        stack = replace(stack, overlap_tensor=True)
    return replace(stack, overlap_experts="always") if "1f1b overlap" in notes else stack


def _settled(cells: Cells, stack: str) -> str | Stack:
    """Return the stack of a row with the kernel of the loss that its notes name."""
    if "fused cross entropy" in cells.text("notes") and stack.startswith("megatron"):
        kernel = "vocab-parallel-in-place" if "+ te" in cells.text("framework").lower() else "vocab-parallel-compiled"
        return replace(find_stack(stack), loss=cast(LossKernel, kernel))
    if re.search(_CHUNKED, cells.text("notes").lower()) and find_stack(stack).loss == "eager":
        return replace(find_stack(stack), loss="chunked")
    return stack


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
    if not gradients and stack in _NARROW_SUMS and find_stack(stack).precision == f"{dtype}-grads16":
        gradients = dtype
    if weights == "fp32" and dtype == "bf16":
        return "amp-bf16"
    if not weights and not gradients:
        cells.taken("param_dtype")
        return "" if dtype == "bf16" else "fp16"
    mixed = cells.text("master_weights") == "1" or (
        stack.startswith("megatron") and cells.text("master_weights") != "0"
    )
    if weights == "bf16" and gradients in ("", "bf16") and not mixed:
        return "bf16-pure"
    name = f"{dtype}-grads16" if gradients in ("bf16", "fp16") else dtype
    return name if name in PRECISIONS else dtype


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
    if model.dropout or stack not in _OLD:
        return None
    cells.taken("dropout")
    return True
