"""Hugging Face accelerate's YAML configuration with FSDP, in and out.

Sources: accelerate/commands/config/cluster.py, utils/dataclasses.py, utils/fsdp_utils.py and parallelism_config.py,
version in fsdp.toml. The file has neither the model nor batches, which are the training script's.
"""

from __future__ import annotations

from typing import Any

from shardwise.files import JSON_BYTES, below, read_text
from shardwise.formats import _yaml, deepspeed
from shardwise.formats._exported import (
    ExportCase,
    Exported,
    canonical_plan,
    lost,
    refuse,
    script_words,
    unexported,
)
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys, table
from shardwise.plans import Plan, Recompute, Sharding, Training, find_stack, in_groups, shard_of
from shardwise.records import replace

_TABLE = "fsdp.toml"
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_SHARDINGS: dict[str, Sharding] = {
    "true": "fsdp",
    "full_shard": "fsdp",
    "false": "shard-grad-op",
    "shard_grad_op": "shard-grad-op",
    "no_shard": "none",
    "hybrid_shard": "hsdp",
    "hybrid_shard_zero2": "shard-grad-op",
}
# accelerate utils/environment.py str_to_bool
_SWITCHES = {
    **dict.fromkeys(("y", "yes", "t", "true", "on", "1"), "true"),
    **dict.fromkeys(("n", "no", "f", "false", "off", "0"), "false"),
}
# Mixed precision keeps parameters and gradients in fp32 and computes in the narrow type (accelerate, fsdp_utils.py).
_PRECISIONS = {"": "fp32", "no": "fp32", "false": "fp32", "bf16": "amp-bf16", "fp16": "amp-fp16", "fp8": "fp8"}
_EXPORTED = frozenset(("tp", "cp", "cp_kind", "dp", "micro_batch", "sharding", "shard", "recompute", "offload"))
_SCRIPT = ("seq_len", "global_batch", "optimizer", "token_budget")
# CPUOffload of FSDP moves parameters and gradients, and so the optimizer that updates them.
HOST = ("optimizer", "gradients", "parameters")
_MIXED = {"fp32": "no", "amp-bf16": "bf16", "amp-fp16": "fp16"}
_SIZES = "parallelism_config.parallelism_config_"
_HEADS = _SIZES + "sp_size"


def unit_by_unit(plan: Plan) -> Plan:
    """Return a plan of FSDP's settings: one rank shards nothing, but brings weights in from the host by units too.

    torch v2.13 distributed/fsdp/_fully_shard/_fsdp_param.py: offload_to_cpu, whatever the size of the mesh.
    """
    alone = plan.sharding == "none" and "parameters" in plan.offload
    return replace(plan, sharding="fsdp") if alone else plan


def recognises(name: str, text: str) -> bool:
    """Return whether a file is accelerate's."""
    return name.endswith((".yaml", ".yml"))


def read(text: str, source: str = "accelerate.yaml", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of a configuration, with DeepSpeed's own file where it names one.

    >>> case = read("distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16")
    >>> case.plan.sharding, case.num_devices, case.job.precision
    ('fsdp', 8, 'amp-bf16')
    """
    around.settings_alone(source)
    tree = _yaml.parse(text, source)
    keys = Keys(tree, _TABLE, source or "settings")
    kind = keys.word("distributed_type") or "no"
    started = keys.whole("num_processes")
    devices = around.num_devices or started or 1
    if kind == "deepspeed":
        return _deepspeed(keys, source, replace(around, num_devices=devices))
    if kind not in ("fsdp", "multi_gpu", "no"):
        keys.fail("distributed_type", "is not a kind that is read", "use FSDP, DEEPSPEED, MULTI_GPU or NO")
    plan = _plan(keys, kind, devices)
    job = Training(seq_len=0, global_batch=0, precision=_precision(keys))
    keys.problems.raise_if_any()
    return _imported(keys, plan, job, source, devices)


def _imported(keys: Keys, plan: Plan, job: Training, source: str, devices: int) -> Imported:
    machines = keys.whole("num_machines") or 1
    return keys.case(
        source,
        model=None,
        plan=plan,
        job=job,
        stack=find_stack("pytorch" if not plan.sharding_rules.shards else "accelerate"),
        num_devices=devices,
        devices_per_node=devices // machines,
    )


def _deepspeed(keys: Keys, source: str, around: ImportContext) -> Imported:
    """Return the case of a file that hands over to DeepSpeed, whose own file has the last word."""
    path = keys.raw("deepspeed_config.deepspeed_config_file")
    if path:
        whole = below(source, str(path), around.follow, "deepspeed_config_file")
        case = deepspeed.read(read_text(whole, JSON_BYTES, "deepspeed_config_file"), whole, around)
    else:
        mixed = keys.word("mixed_precision")
        stage = keys.whole("deepspeed_config.zero_stage", 0)
        # utils/dataclasses.py DeepSpeedPlugin: ACCELERATE_DEEPSPEED_ZERO_STAGE, 2 where nobody sets it
        zero: dict[str, Any] = {"stage": 2 if stage is None else stage}
        for ours, theirs in (("offload_optimizer", "optimizer"), ("offload_param", "param")):
            place = keys.word(f"deepspeed_config.offload_{theirs}_device")
            zero |= {ours: {"device": place}} if place not in ("", "none") else {}
        inner: dict[str, Any] = {"zero_optimization": zero}
        inner |= {mixed: {"enabled": True}} if mixed in ("bf16", "fp16") else {}
        steps = keys.whole("deepspeed_config.gradient_accumulation_steps")
        inner |= {"gradient_accumulation_steps": steps} if steps else {}
        case = deepspeed.read_tree(inner, source, around.num_devices)
    case = replace(case, plan=_heads_split(keys, case.plan, around.num_devices))
    keys.problems.raise_if_any()
    machines = keys.whole("num_machines") or 1
    return replace(
        case,
        devices_per_node=around.num_devices // machines,
        understood=(*keys.understood(), *case.understood),
        ignored=(*keys.ignored(), *case.ignored),
        silent=(*keys.silent(), *case.silent),
        unknown=(*keys.unknown(), *case.unknown),
    )


def _heads_split(keys: Keys, plan: Plan, devices: int) -> Plan:
    """Return a plan under DeepSpeed with the ranks that split attention's heads (accelerator.py _prepare_deepspeed)."""
    ranks = keys.whole(_HEADS) or 1
    if ranks == 1:
        return plan
    if devices % (plan.tp * ranks):
        keys.fail(_HEADS, f"x tp = {plan.tp * ranks} must divide the {devices} devices", "change the sizes")
    return replace(plan, cp=ranks, cp_kind="all-to-all", dp=max(devices // (plan.tp * ranks), 1))


def _precision(keys: Keys) -> str:
    word = keys.word("mixed_precision")
    if word not in _PRECISIONS:
        keys.fail("mixed_precision", "is not known", "use no, bf16, fp16 or fp8")
    return _PRECISIONS.get(word, "fp32")


def _plan(keys: Keys, kind: str, devices: int) -> Plan:
    replicas, shards = keys.whole(_SIZES + "dp_replicate_size") or 1, keys.whole(_SIZES + "dp_shard_size") or 0
    tp, cp, heads = (keys.whole(_SIZES + name) or 1 for name in ("tp_size", "cp_size", "sp_size"))
    if cp > 1 and heads > 1:
        keys.fail(_HEADS, "contradicts cp_size, which splits the sequence too", "use one of them")
    elif heads > 1:
        keys.assumed.append(f"cp 1: sp_size {heads} splits sequences under DeepSpeed alone, and this is not DeepSpeed")
        # parallelism_config.py build_device_mesh: then there is no mesh, and FSDP shards over all processes.
        replicas, shards, tp = 1, 0, 1
    word = _strategy(keys) if kind == "fsdp" else "no_shard"
    sharding = _SHARDINGS.get(word, "fsdp")
    if devices % (tp * cp):
        keys.fail("num_processes", f"must be a multiple of tp x cp = {tp * cp}", "change the sizes")
    dp = max(devices // (tp * cp), 1)
    if shards and replicas * shards != dp:
        keys.fail(_SIZES + "dp_shard_size", f"x dp_replicate_size must be {dp}", f"use {dp // replicas}")
    shard = shards if replicas > 1 else 1
    if replicas > 1 and (shard == 1 or in_groups(sharding) != sharding):
        sharding = in_groups("fsdp")
    elif word.startswith("hybrid") and replicas == 1:
        shard = max(devices // (keys.whole("num_machines") or 1), 1)
    host = HOST if keys.flag("fsdp_config.fsdp_offload_params") and word != "no_shard" else ()
    recompute: Recompute = "full" if keys.flag("fsdp_config.fsdp_activation_checkpointing") else "none"
    if keys.flag("fsdp_config.fsdp_activation_checkpointing_offload") and recompute == "full" and word != "no_shard":
        host = (*host, "activations")
    return Plan(
        tp=tp,
        cp=cp,
        dp=dp,
        micro_batch=0,
        sequence_parallel=False,
        cp_kind="all-gather" if keys.word(_SIZES + "cp_comm_strategy") == "allgather" else "ring",
        sharding=sharding,
        shard=shard,
        recompute=recompute,
        offload=host,
    )


def _strategy(keys: Keys) -> str:
    """Return torch's word for how weights are sharded, or whether they are resharded after forward."""
    old = keys.raw("fsdp_config.fsdp_sharding_strategy")
    if isinstance(old, int) and not isinstance(old, bool) and 1 <= old <= len(_STRATEGIES):
        old = _STRATEGIES[old - 1]
    new = keys.raw("fsdp_config.fsdp_reshard_after_forward")
    if str(keys.raw("fsdp_config.fsdp_version")) == "2":
        return _resharded(keys, old, new)
    if old is not None and new is not None and str(old).lower() != str(new).lower():
        keys.fail("fsdp_config.fsdp_sharding_strategy", f"contradicts fsdp_reshard_after_forward = {new}", "keep one")
    word = str(new if new is not None else old if old is not None else "full_shard").lower()
    if word not in _SHARDINGS:
        keys.fail("fsdp_config.fsdp_reshard_after_forward", "is not known", "use true or false")
    return word


def _resharded(keys: Keys, old: object, new: object) -> str:
    """Return whether FSDP version 2 reshards weights after forward, which takes no strategy in place of it.

    accelerate 1.15.0 utils/dataclasses.py FullyShardedDataParallelPlugin: str_to_bool of fsdp_reshard_after_forward,
    true unless told; FSDP_SHARDING_STRATEGY is read under version 1 alone.
    """
    word = "true" if new is None else _SWITCHES.get(str(new).lower(), "")
    if not word:
        rule = "is a strategy of FSDP version 1: version 2 takes true or false"
        keys.fail("fsdp_config.fsdp_reshard_after_forward", rule, "use true for FULL_SHARD, false for SHARD_GRAD_OP")
    elif old is not None and _SHARDINGS.get(str(old).lower()) != _SHARDINGS[word]:
        keys.assumed.append(
            f"sharding {_SHARDINGS[word]}: FSDP version 2 does not read fsdp_sharding_strategy, {old}, and "
            f"fsdp_reshard_after_forward is {word}"
        )
    return word or "true"


def tree_of(case: ExportCase) -> dict[str, Any]:
    """Return the configuration of a case, for FSDP version 2."""
    p, machines = case.plan, -(-case.plan.num_devices // case.cluster.devices_per_node)
    sharded = p.sharding_rules.shards
    sizes: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": p.dp // shard_of(p),
        "parallelism_config_dp_shard_size": shard_of(p),
        "parallelism_config_tp_size": p.tp,
        "parallelism_config_cp_size": p.cp,
        "parallelism_config_cp_comm_strategy": "allgather" if p.cp_kind == "all-gather" else "alltoall",
    }
    tree: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded else "MULTI_GPU",
        "num_machines": machines,
        "num_processes": p.num_devices,
        "machine_rank": 0,
        "mixed_precision": _MIXED.get(case.job.precision or case.stack.precision, "bf16"),
    }
    if sharded:
        tree["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": not p.sharding_rules.keeps_gathered,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": p.recompute == "full",
            "fsdp_offload_params": "parameters" in p.offload,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        if "activations" in p.offload:
            tree["fsdp_config"]["fsdp_activation_checkpointing_offload"] = True
    if sharded or p.tp * p.cp > 1:
        tree["parallelism_config"] = sizes
    return tree


def _switched(plan: Plan) -> tuple[Plan, str]:
    """Return the plan without what is the training script's to switch where nothing is sharded, and words for it."""
    if plan.sharding_rules.shards:
        return plan, ""
    words = ", gradient checkpointing" if plan.recompute == "full" else ""
    words += ", torch.autograd.graph.save_on_cpu around forward" if "activations" in plan.offload else ""
    kept = tuple(word for word in plan.offload if word != "activations")
    return replace(plan, recompute="none" if plan.recompute == "full" else plan.recompute, offload=kept), words


def export(case: ExportCase) -> Exported:
    """Return accelerate's YAML for a case; raises `InputError` naming every field that it cannot be told."""
    plain, switched = _switched(replace(canonical_plan(case.plan), micro_batch=0))
    ours, differing = unexported(plain, _EXPORTED)
    tree, checked = tree_of(replace(case, plan=ours)), table(_TABLE)["checked"]
    text = _yaml.dump(tree)
    back = read(text)
    steps = case.job.global_batch // max(case.plan.micro_batch * case.plan.dp, 1)
    refuse("accelerate", differing | lost(replace(case, plan=ours), back, _SCRIPT), case)
    note = (
        f"for the training script: {case.plan.micro_batch} a device of {script_words(case.job)}, {steps} accumulation "
        f"steps, optimizer {case.job.optimizer}{switched}"
    )
    head = f"# {case.model.name} on {case.plan.num_devices} devices, for accelerate {checked['version']}.\n# {note}\n"
    files = {"accelerate.yaml": head + text}
    return Exported(system="accelerate", version=checked["version"], files=files, notes=(note,))
