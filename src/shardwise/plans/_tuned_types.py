"""The types of what fine-tuning trains and keeps: adapters, copies beside frozen weights, and what is not narrow."""

from __future__ import annotations

from shardwise.plans._bases import find_base
from shardwise.plans._jobs import Training
from shardwise.plans._precision import Precision, find_precision
from shardwise.plans._stack import Stack


def adapter_precision(job: Training, stack: Stack) -> Precision:
    """Return the bytes of each copy of an adapter's parameter: as stated, or as the framework keeps them.

    A framework whose own are fp32, whatever their GEMMs take, keeps to its own where fp32 is stated.
    """
    precision = stack.narrow_adapter_precision if find_base(job.base or "bf16").narrow else ""
    own = find_precision(precision or stack.adapter_precision or job.precision or stack.precision)
    if own.weight_bytes == 4 and stack.runs_lora(job):
        own = find_precision("amp-bf16")
    stated = {"fp32": "" if own.weight_bytes == 4 else "fp32", "bf16": "bf16-pure"}.get(job.adapter_precision, "")
    return find_precision(stated) if stated else own


def narrow_recipe(job: Training, stack: Stack) -> str:
    """Return the recipe of a job, or that of a framework beside narrow weights where it names none, "" if any.

    >>> from shardwise.plans import find_stack
    >>> job, other = (Training(seq_len=1, global_batch=1, adapter="lora", base=base) for base in ("nf4", "bf16"))
    >>> narrow_recipe(job, find_stack("transformers")), narrow_recipe(other, find_stack("transformers"))
    ('amp-bf16', '')
    """
    narrow = find_base(job.base or "bf16").narrow and stack.autocasts and not stack.adapter_autocast
    return job.precision or (stack.narrow_precision if narrow else "")


def autocasts_adapters(job: Training, stack: Stack) -> bool:
    """Return whether GEMMs of adapters run under autocast: always in some trainers, else as the recipe says."""
    recipe = narrow_recipe(job, stack)
    return stack.adapter_autocast or (stack.autocasts and bool(recipe) and find_precision(recipe).autocast)


def rest_bytes(job: Training, stack: Stack) -> float:
    """Return how wide embedding, head and norms are kept beside narrow weights, 0 where they stay as they come."""
    base = find_base(job.base or "bf16")
    if not base.narrow or base.rest_as_is:
        return 0.0
    narrow = find_precision(job.precision or stack.precision).weight_bytes < 4
    return 0.0 if stack.narrow_rest_as_loaded and narrow else stack.narrow_rest_bytes


def trained_recipe(job: Training, stack: Stack) -> str:
    """Return the recipe of what trains of a model beside frozen weights: as stated, or as the framework keeps it.

    A copy beside a frozen part has its type (peft utils/other.py ModulesToSaveWrapper), unless FSDP makes fp32 of it.

    >>> from shardwise.plans import find_stack
    >>> jobs = [Training(seq_len=1, global_batch=1, adapter="lora", base=base) for base in ("bf16", "nf4", "fp32")]
    >>> [trained_recipe(job, find_stack("trl")) for job in jobs]
    ['bf16-pure', 'amp-bf16', 'amp-bf16']
    """
    own = "" if stack.whole_precision else stack.frozen_precision
    recipe = narrow_recipe(job, stack) or own or stack.precision
    wide = 4 in (find_base(job.base or "bf16").bits / 8, rest_bytes(job, stack))
    return "amp-bf16" if stack.autocasts and wide and recipe == "bf16-pure" else recipe
