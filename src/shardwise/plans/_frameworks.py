"""Which framework runs a plan that names none, and which ones people fine-tune with, as stacks.toml says."""

from __future__ import annotations

from functools import cache
from typing import Literal

from shardwise.plans._capabilities import refusals
from shardwise.plans._plan import Plan, alike, find_sharding
from shardwise.plans._stack import Stack, find_stack, stack_table
from shardwise.records import replace


def filling(plan: Plan, devices: int) -> Plan:
    """Return a plan whose replicas are those that fill so many devices, where it says none; they decide what runs it.

    >>> filling(Plan(dp=0, tp=2), 8).dp, filling(Plan(dp=2), 8).dp
    (4, 2)
    """
    ranks = plan.tp * plan.tp2 * plan.cp * plan.pp
    return plan if plan.dp else replace(plan, dp=max(devices // max(ranks, 1), 1))


def default_stack(plan: Plan, adapter: str = "", method: str = "sft") -> str:
    """Return the framework of a plan that names none: the one that brought its sharding, if it can run the plan.

    DeepSpeed brought ZeRO-1 for replicas; beside other axes it is Megatron's distributed optimizer. A pipeline schedule
    that the framework of the sharding does not run is of the framework that brought the schedule.

    Replicas with an adapter, and those of preferences and rewards, run on transformers, where peft and TRL are, sharded
    as it shards them; on TRL what its Trainer alone does not run. Adapters of split models are of a framework that has
    some.

    >>> default_stack(Plan(sharding="fsdp")), default_stack(Plan(sharding="zero1"))
    ('fsdp2', 'deepspeed')
    >>> [default_stack(Plan(sharding=word), adapter="lora") for word in ("none", "fsdp", "zero3")]
    ['transformers', 'transformers', 'deepspeed']
    >>> default_stack(Plan(offload=("activations",)), adapter="lora"), default_stack(Plan(), method="dpo")
    ('trl', 'transformers')
    >>> default_stack(Plan(sharding="zero1", tp=8)), default_stack(Plan(sharding="zero3", pp=2))
    ('megatron', 'fsdp2')
    >>> default_stack(Plan(sharding="zero1", pp=16, dp=128, ep=64, schedule="dualpipe"))
    'hai-llm'
    >>> default_stack(Plan(tp=8), adapter="lora")
    'megatron-bridge'
    """
    replicas = plan.tp * plan.tp2 * plan.cp * plan.pp * plan.vpp * plan.ep == 1
    if replicas and (adapter or method != "sft"):
        for name in _marked("brought_adapters"):
            runs = find_stack(name).runs
            if plan.sharding in runs.sharding and not any(refusals(runs, plan)):
                return name
    names, timed = _bringing(plan.sharding, plan.schedule if plan.pp > 1 else "", replicas)
    with_adapters = stack_table() if adapter else ()
    able = (name for name in (*names, *timed, *with_adapters)
            if not any(refusals(find_stack(name).runs, plan, adapter=adapter)))  # fmt: skip
    return next(able, (*names, *stack_table())[0])


def vendor_stack(vendor: str) -> str:
    """Return the framework that trains on a vendor's devices, the empty word where that of the plan does.

    TPUs and Trainium run what XLA compiles; kernels of Transformer Engine, which other devices are taken to run, are of
    CUDA and ROCm.

    >>> vendor_stack("AWS"), vendor_stack("NVIDIA")
    ('xla', '')
    """
    return next((name for name, row in stack_table().items() if vendor in row.get("vendors", ())), "")


@cache
def _bringing(sharding: str, schedule: str, replicas: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the frameworks that brought a sharding, the likeliest first, and those that brought a schedule."""
    table = stack_table()
    first = [name for name, row in table.items() if replicas and sharding in row.get("brought_replicas", ())]
    brought = [name for name, row in table.items() if any(alike(sharding, s) for s in row.get("brought", ()))]
    own = [name for name in brought if sharding in table[name]["brought"]]
    timed = [name for name, row in table.items() if schedule in row.get("brought_schedules", ())]
    return (*first, *own, *brought), tuple(timed)


_OF_TRAINERS = (
    *("loss", "loss_brings_layers", "attention_kernel", "leaves_groups", "repeats_kv", "calls_sdpa"),
    *("loads_sinks_kernel", "library", "experts_loop", "narrow_experts", "adapter_kernels", "adapts_experts"),
    *("leaves_expert_dropout", "reference", "uncounted"),
    *("checkpoint_reenters", "checkpoint_stops_early", "usual_recompute", "usual_narrow_recompute"),
)
"""What a trainer does to the model, whatever shards it."""


def patched(engine: Stack, trainer: Stack) -> Stack:
    """Return the stack of what shards a model with what a trainer does to that."""
    runs = replace(engine.runs, optimizer=(*engine.runs.optimizer, *engine.runs.client_optimizer))
    return replace(engine, runs=runs, **{name: getattr(trainer, name) for name in _OF_TRAINERS})


def sharding_stack(stack: Stack | str, *shardings: str) -> Stack:
    """Return what runs plans of some shardings: a trainer itself, or DeepSpeed where all are ZeRO's of its own.

    >>> [sharding_stack(name, "zero3").name for name in ("trl", "axolotl", "unsloth", "megatron")]
    ['trl', 'axolotl', 'unsloth', 'megatron']
    >>> [sharding_stack("trl", word).precision for word in ("fsdp", "zero2")], sharding_stack("trl", "zero2").loss
    (['amp-bf16', 'bf16-grads16'], 'fused-lm-head')
    >>> own = replace(find_stack("transformers"), precision="fp32")
    >>> [sharding_stack(own, "fsdp").precision, sharding_stack(sharding_stack(own, "fsdp"), "none").precision]
    ['amp-bf16', 'fp32']
    """
    stack = find_stack(stack) if isinstance(stack, str) else stack
    weights = all(word in stack.runs.sharding and find_sharding(word).weights for word in shardings)
    if stack.fsdp_precision and shardings and weights:
        own = stack.whole_precision or stack.precision
        return replace(stack, precision=stack.fsdp_precision, whole_precision=own)
    if stack.whole_precision and shardings:
        stack = replace(stack, precision=stack.whole_precision, whole_precision="")
    if not stack.zero_by or not shardings or any(word in stack.runs.sharding for word in shardings):
        return stack
    engine = find_stack(stack.zero_by)
    if not all(word in engine.runs.sharding for word in shardings):
        return stack
    title = f"{stack.title}, sharded by {engine.name}"
    return replace(patched(engine, stack), name=stack.name, title=title, settings=stack.settings)


def fine_tuners() -> tuple[str, ...]:
    """Return the frameworks that people fine-tune with."""
    return _marked("fine_tunes")


def proposed_for(saver: Literal["savers", "updates_in_backward", "narrow_experts"]) -> str:
    """Return the framework to name for a memory saver that the one of a plan has not.

    "savers" are most of them, "updates_in_backward" Adam in backward, "narrow_experts" experts of few bits that are
    parameters of three dimensions.

    >>> proposed_for("savers"), proposed_for("narrow_experts")
    ('transformers', 'unsloth')
    """
    return next(name for name, row in stack_table().items() if saver in row.get("proposed_for", ()))


def _marked(word: str) -> tuple[str, ...]:
    return tuple(name for name, row in stack_table().items() if row.get(word))
