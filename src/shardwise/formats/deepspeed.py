"""DeepSpeed's JSON configuration, in and out.

Sources: github.com/deepspeedai/DeepSpeed docs/_pages/config-json.md, deepspeed/runtime/zero/config.py and
deepspeed/runtime/config.py, version in deepspeed.toml. The file has neither the model nor the length of a sequence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardwise.files import parse_json
from shardwise.formats._exported import (
    ExportCase,
    Exported,
    lost,
    refuse,
    script_words,
    unexported,
    worded,
)
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys, table
from shardwise.plans import Plan, Sharding, Stack, Training, find_stack
from shardwise.records import replace

_TABLE = "deepspeed.toml"
_STAGES: tuple[Sharding, ...] = ("none", "zero1", "zero2", "zero3")
_PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16-grads16": {"bf16": {"enabled": True}},
    "bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16-grads16": {"fp16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "amp-bf16": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "amp-fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    "fp32": {},
}
_EXPORTED = frozenset(("tp", "cp", "cp_kind", "dp", "ep", "micro_batch", "sharding", "shard", "offload"))
_SCRIPT = ("seq_len", "token_budget")
_AUTO_EP = "expert_parallel."
_SPLIT = "activation_checkpointing.partition_activations"
# deepspeed/runtime/engine.py hands optimizer.params on as they are; transformers and accelerate alone fill "auto" in.
_RATE = "learning rate: set optimizer.params.lr, or it is the optimizer's default"
_OPTIMIZERS = {"adam": "AdamW", "lion": "Lion", "muon": "Muon", "sgd": "SGD"}


def recognises(name: str, text: str) -> bool:
    """Return whether a file is DeepSpeed's."""
    return name.endswith(".json")


def read(text: str, source: str = "ds_config.json", around: ImportContext = PLAIN) -> Imported:
    """Return the case of a configuration; batch sizes of "auto" are 0, to be given elsewhere.

    >>> case = read('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    >>> case.plan.sharding, case.job.precision
    ('zero3', 'bf16-grads16')
    """
    around.settings_alone(source)
    return read_tree(parse_json(text, source), source, around.num_devices)


def read_tree(tree: Mapping[str, Any], source: str = "", num_devices: int = 0) -> Imported:
    """Return the case of a configuration that was parsed already; raises `InputError` with everything wrong."""
    keys = Keys(tree, _TABLE, source or "settings")
    plan, job = _plan(keys, num_devices), _job(keys)
    stage = _STAGES.index(plan.sharding) if plan.sharding in _STAGES else 3
    overlap = keys.flag("zero_optimization.overlap_comm")
    stack = _bucketed(keys, find_stack("deepspeed"))
    stack = replace(stack, settings=replace(stack.settings, partition_activations=bool(keys.flag(_SPLIT))))
    return keys.case(
        source,
        model=None,
        plan=plan,
        job=job,
        stack=replace(stack, overlap_gradients=stage == 3 if overlap is None else overlap),
        num_devices=num_devices,
        accumulation=keys.whole("gradient_accumulation_steps") or 0,
    )


_BUCKET = "zero_optimization.reduce_bucket_size"


def _bucketed(keys: Keys, stack: Stack) -> Stack:
    """Return the stack with the size of a bucket of gradients that a file states.

    Under "auto" transformers fills in the hidden size squared (integrations/deepspeed.py), which is not counted.
    """
    if keys.values.get(_BUCKET) == "auto":
        keys.assumed.append(f"no bucket counted: {_BUCKET} is the hidden size squared, half a gigabyte at most")
        return replace(stack, bucket_elements=0.0)
    elements = keys.whole(_BUCKET) or 0
    return replace(stack, settings=replace(stack.settings, bucket_elements=float(elements)))


def _plan(keys: Keys, num_devices: int) -> Plan:
    stage = keys.whole("zero_optimization.stage", 0) or 0
    if stage > 3:
        keys.fail("zero_optimization.stage", "must be 0, 1, 2 or 3", "use 3")
    group = keys.whole("zero_optimization.mics_shard_size", rest=True) or 0
    grouped = group > 0
    if grouped and stage != 3:
        keys.fail("zero_optimization.mics_shard_size", "needs stage 3", "use stage 3, or leave it out")
    elif grouped:
        keys.assumed.append(f"sharding hsdp in groups of {group}: MiCS, which DeepSpeed had until release 0.18")
    tp, cp = keys.whole("tensor_parallel.autotp_size", 0) or 1, keys.whole("sequence_parallel_size") or 1
    if num_devices % (tp * cp):
        rule = f"tp x cp = {tp * cp} must divide the {num_devices} devices"
        keys.fail("tensor_parallel.autotp_size" if tp > 1 else "sequence_parallel_size", rule, "change it")
    return Plan(
        tp=tp,
        cp=cp,
        cp_kind="all-to-all" if cp > 1 else "ring",
        dp=num_devices // (tp * cp),
        ep=_experts(keys, num_devices),
        micro_batch=keys.whole("train_micro_batch_size_per_gpu") or 0,
        sequence_parallel=False,
        sharding="hsdp" if grouped else _STAGES[min(stage, 3)],
        shard=group if grouped else 1,
        offload=_offload(keys, stage),
    )


def _experts(keys: Keys, num_devices: int) -> int:
    """Return over how many ranks experts lie: AutoEP replaces modules of experts by its own where it is enabled.

    Source: deepspeed/module_inject/auto_ep_config.py, auto_ep_folding.py (0.19.8).
    """
    if not keys.flag(_AUTO_EP + "enabled"):
        return 1
    ep = keys.whole(_AUTO_EP + "autoep_size") or 1
    if (keys.whole(_AUTO_EP + "expert_tensor_parallel_size") or 1) > 1:
        keys.fail(_AUTO_EP + "expert_tensor_parallel_size", "is reserved, and not supported yet", "use 1")
    if num_devices % ep:
        keys.fail(_AUTO_EP + "autoep_size", f"must divide the {num_devices} devices", "change it or --on")
    return ep


def _offload(keys: Keys, stage: int) -> tuple[str, ...]:
    """Return what lies in the host's memory: gradients go where the optimizer is that reads them (stage_1_and_2.py)."""
    offload: tuple[str, ...] = ()
    for name, old, words in (
        ("offload_optimizer", ("cpu_offload",), ("optimizer", "gradients")),
        ("offload_param", ("cpu_offload_param", "cpu_offload_params"), ("parameters",)),
    ):
        path = f"zero_optimization.{name}.device"
        moved = [one for one in old if keys.flag(f"zero_optimization.{one}")]
        place = keys.word(path) or ("cpu" if moved else "none")
        if place not in ("none", "cpu", "nvme"):
            keys.fail(path, "is not a place of DeepSpeed", "use none, cpu or nvme")
        elif place != "none" and stage < (3 if "parameters" in words else 1):
            keys.assumed.append(f"{words[0]} on the device: stage {stage} of ZeRO does not move them")
        elif place != "none":
            offload += words
            if place == "nvme":
                keys.assumed.append(f"{words[0]} in the host's memory: disks are not modelled")
    return (*offload, "activations") if keys.flag("activation_checkpointing.cpu_checkpointing") else offload


def _job(keys: Keys) -> Training:
    name = keys.word("optimizer.type")
    optimizer = table(_TABLE)["optimizers"].get(name, "")
    if name and not optimizer:
        keys.assumed.append(f"optimizer adam: the states of {name} are not known")
    return Training(
        seq_len=0,
        global_batch=keys.whole("train_batch_size") or 0,
        precision=_precision(keys),
        optimizer=optimizer or "adam",
    )


def _precision(keys: Keys) -> str:
    """Return the recipe; gradients have 16 bits in bf16 and fp16 unless data_types asks for 32."""
    bf16 = keys.flag("bf16.enabled") or keys.flag("bfloat16.enabled")
    fp16 = keys.flag("fp16.enabled")
    if bf16 and fp16:
        keys.fail("fp16.enabled", "contradicts bf16.enabled", "enable one of them")
    whole = keys.word("data_types.grad_accum_dtype") in ("fp32", "float32", "torch.float32", "float")
    if keys.flag("torch_autocast.enabled"):
        return "amp-fp16" if keys.word("torch_autocast.dtype") in ("fp16", "float16", "half") else "amp-bf16"
    # deepspeed/runtime/engine.py _do_optimizer_sanity_check
    if whole and (bf16 or fp16) and not keys.whole("zero_optimization.stage", 0):
        keys.fail("data_types.grad_accum_dtype", "does not run at stage 0 of ZeRO", "use stage 1, or leave it out")
    if bf16 or fp16:
        return ("bf16" if bf16 else "fp16") + ("" if whole else "-grads16")
    for path in ("bf16.enabled", "fp16.enabled"):
        if keys.values.get(path) == "auto":
            keys.assumed.append(f"precision bf16-grads16: {path} is filled in by the training script")
            return "bf16-grads16"
    return "fp32"


def tree_of(case: ExportCase) -> dict[str, Any]:
    """Return the configuration of a case."""
    p, job = case.plan, case.job
    stage = _STAGES.index(p.sharding) if p.sharding in _STAGES else 3  # refused as such
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": case.stack.overlap_gradients}
    if buckets := case.stack.settings.bucket_elements:
        zero["reduce_bucket_size"] = int(buckets)
    if "optimizer" in p.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if "parameters" in p.offload:
        zero["offload_param"] = {"device": "cpu"}
    tree: dict[str, Any] = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": p.micro_batch,
        "gradient_accumulation_steps": max(job.global_batch // max(p.micro_batch * p.dp, 1), 1),
        "zero_optimization": zero,
        "optimizer": {"type": _OPTIMIZERS.get(job.optimizer, job.optimizer)},
    }
    tree |= _PRECISIONS.get(job.precision or case.stack.precision, {})
    if stage == 0:  # where engine.py wants gradients of the model's type: what comes back is then another precision
        tree.pop("data_types", None)
    if p.tp > 1:
        tree["tensor_parallel"] = {"autotp_size": p.tp}
    if p.ep > 1:
        tree["expert_parallel"] = {"enabled": True, "autoep_size": p.ep}
    kept = {
        "cpu_checkpointing": "activations" in p.offload,
        "partition_activations": case.stack.settings.partition_activations,
    }
    if any(kept.values()):
        tree["activation_checkpointing"] = {word: True for word, on in kept.items() if on}
    if p.cp > 1:
        tree["sequence_parallel_size"] = p.cp
    return tree


def export(case: ExportCase) -> Exported:
    """Return ds_config.json for a case; raises `InputError` naming every field that DeepSpeed cannot be told."""
    # Full recompute is a switch of the model, which the file does not have.
    case = worded(case)
    ours = replace(case.plan, recompute="none") if case.plan.recompute == "full" else case.plan
    ours, differing = unexported(ours, _EXPORTED)
    tree = tree_of(replace(case, plan=ours))
    back = read_tree(tree, num_devices=ours.num_devices)
    refuse("DeepSpeed", differing | lost(replace(case, plan=ours), back, _SCRIPT), case)
    notes = [f"for the training script: the model, {script_words(case.job)}", _RATE]
    if case.plan.recompute == "full":
        notes.append("full recompute: turn gradient checkpointing on in the training script")
    checked = table(_TABLE)["checked"]
    text = json.dumps(tree, indent=2) + "\n"
    return Exported(system="DeepSpeed", version=checked["version"], files={"ds_config.json": text}, notes=tuple(notes))
