"""LLaMA-Factory's configuration of USE_V1=1, a nested YAML: full training, LoRA, QLoRA and freezing under FSDP2.

Source: llamafactory 0.9.5 src/llamafactory/v1, its config/*_args.py, core/{model_engine,base_trainer}.py,
accelerator/interface.py and plugins.
"""

from __future__ import annotations

from typing import Any

from shardwise.formats import _trainer, _yaml
from shardwise.formats._exported import ExportCase, Exported
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys, top_level
from shardwise.formats.llamafactory import base_of, freeze_words, unfrozen
from shardwise.plans import Plan, Training, find_stack, in_groups, rank_of
from shardwise.records import replace

_TABLE = "llamafactory_v1.toml"
_PLUGINS = ("dist_config", "peft_config", "quant_config", "kernel_config", "init_config", "optim_config")
_OWN = frozenset((*_PLUGINS, "model_class", "train_dataset", "batching_strategy", "enable_activation_checkpointing"))
# plugins/model_plugins/peft.py get_lora_model: what a LoRA is where nothing is said.
_LORA = _trainer.AdapterKeys(
    rank="peft_config.r", alpha="peft_config.lora_alpha", dropout="peft_config.lora_dropout",
    targets="peft_config.target_modules", saved="peft_config.modules_to_save", usual_rank=8,
    usual_targets=("all-linear",),
)  # fmt: skip
_DROPOUT = 0.05
_EXPORTED = ("dp", "cp", "cp_kind", "micro_batch", "sharding", "shard", "recompute", "offload")
_OFFLOADED = ("optimizer", "gradients", "parameters")


def recognises(name: str, text: str) -> bool:
    """Return whether a file is one of LLaMA-Factory's v1: YAML with a model and one of its own keys."""
    keys = top_level(text) if name.endswith((".yaml", ".yml")) else set[str]()
    return "model" in keys and bool(keys & _OWN) and bool(keys & {"micro_batch_size", "cutoff_len", "train_dataset"})


def read(text: str, source: str = "llamafactory_v1.yaml", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of a configuration.

    >>> text = "model: Qwen/Qwen3-4B\ncutoff_len: 2048\npeft_config: {name: lora, r: 16}\ndist_config: {name: fsdp2}"
    >>> case = read(text, around=ImportContext(num_devices=8))
    >>> case.job.adapter, case.job.rank, case.plan.sharding, case.plan.recompute, case.job.precision
    ('lora', 16, 'fsdp', 'full', 'amp-bf16')
    """
    around.settings_alone(source)
    keys = Keys(_yaml.parse(text, source), _TABLE, source)
    keys.renew()
    for name in _PLUGINS:
        if keys.raw(name) is not None:
            keys.fail(name, "must be settings with a name", "write for example {name: fsdp2}, or leave it out")
    if keys.raw("optim_config.name") is not None:
        keys.fail("optim_config.name", "is no plugin of 0.9.5, which has none", "leave optim_config out: AdamW")
    model = _trainer.model_named(keys, "model")
    launched = _deepspeed(keys, source, around)
    plan = _plan(keys, around.num_devices) if launched is None else launched.plan
    off = keys.flag("enable_activation_checkpointing") is False
    plan = replace(plan, recompute="none" if off else "full", micro_batch=keys.whole("micro_batch_size") or 1)
    seq_len = keys.whole("cutoff_len") or 2048
    # core/utils/batching.py: a step is one micro-batch of each replica unless more are said.
    step = plan.micro_batch * plan.dp
    batch = keys.whole("global_batch_size") or step
    if plan.dp and batch % step:
        keys.fail("global_batch_size", f"must be a multiple of replicas x micro_batch_size = {step}", "change one")
        batch = step
    job = Training(
        seq_len=seq_len,
        global_batch=batch,
        precision=_precision(keys, plan) if launched is None else launched.job.precision,
        **_adapter(keys),
    )
    job = _trainer.lasting(job, keys.whole("max_steps", rest=True) or 0)
    if keys.word("batching_strategy") in ("", "normal"):
        _trainer.say_unpacked(keys, seq_len)
    stack = find_stack("llama-factory-v1") if launched is None else launched.stack
    return keys.case(
        source, model=model, plan=plan, job=job, stack=stack, num_devices=around.num_devices,
        accumulation=0 if batch else 1,
    )  # fmt: skip


def _deepspeed(keys: Keys, source: str, around: ImportContext) -> Imported | None:
    """Return the case of DeepSpeed's file, None under FSDP2 and plain replicas."""
    name = keys.word("dist_config.name")
    if name not in ("", "fsdp2", "deepspeed"):
        keys.fail("dist_config.name", "is no plugin of 0.9.5", "use fsdp2 or deepspeed")
    if name != "deepspeed":
        return None
    if (keys.whole("dist_config.cp_size") or 1) > 1:  # plugins/trainer_plugins/distributed/hub.py
        keys.fail("dist_config.cp_size", "splits sequences under fsdp2 alone", "use dist_config.name: fsdp2")
    if not keys.raw("dist_config.config_file"):
        keys.fail("dist_config.config_file", "is missing", "name DeepSpeed's file")
        return None
    return _trainer.deepspeed_case(keys, "dist_config.config_file", source, around)


def _plan(keys: Keys, devices: int) -> Plan:
    """Return the degrees: replicas beside sequences that are split, shards and copies of them over all devices.

    Source: accelerator/interface.py DistributedStrategy, whose two meshes are each of the whole world.
    """
    kept = keys.flag("dist_config.reshard_after_forward") is False
    sharded = keys.word("dist_config.name") == "fsdp2"
    plan = _trainer.spread(
        keys, devices, {"cp": "dist_config.cp_size"}, "none" if not sharded else "shard-grad-op" if kept else "fsdp"
    )
    if plan.cp > 1:
        plan = replace(plan, cp_kind="all-to-all")
        if keys.word("dist_config.cp_mode") not in ("", "ulysses"):
            keys.fail("dist_config.cp_mode", "is no plugin of 0.9.5", "use ulysses")
    if plan.sharding != "none" and keys.flag("dist_config.offload_params"):
        plan = replace(plan, offload=_OFFLOADED)
    copies, shards = keys.whole("dist_config.mp_replicate_size") or 1, keys.whole("dist_config.mp_shard_size")
    world = devices or copies * (shards or 0)
    if not world or plan.sharding == "none":
        return plan
    if world % copies or copies * (shards or world // copies) != world:
        at = "mp_shard_size" if shards else "mp_replicate_size"
        keys.fail(f"dist_config.{at}", f"x the other must be the {world} devices", "change the sizes or --on")
        return plan
    stated = keys.whole("dist_config.dp_size")
    if stated and stated * plan.cp != world:
        keys.fail("dist_config.dp_size", f"x cp_size must be the {world} devices", "leave it out")
    if copies == 1:
        return plan
    if world // copies % plan.cp:
        keys.fail("dist_config.mp_replicate_size", "leaves shards that a split sequence crosses", "use a smaller one")
        return plan
    return replace(plan, sharding=in_groups(plan.sharding), shard=world // copies // plan.cp)


def _precision(keys: Keys, plan: Plan) -> str:
    """Return the recipe: FSDP2 computes in bf16 unless told, and without it nothing casts what was loaded.

    Full training is loaded in fp32, what is frozen as the file has it (core/model_engine.py).
    """
    if plan.sharding == "none":
        return "bf16-pure" if keys.word("peft_config.name") == "lora" else "fp32"
    return "fp32" if keys.flag("bf16") is False else "amp-bf16"


def _adapter(keys: Keys) -> dict[str, Any]:
    kind, bits = keys.word("peft_config.name"), keys.whole("quant_config.quantization_bit")
    quantised = keys.word("quant_config.name")
    if kind not in ("", "lora", "freeze"):
        keys.fail("peft_config.name", "is no plugin of 0.9.5", "use lora or freeze")
    if quantised and kind != "lora":
        keys.fail("quant_config.name", "has weights that cannot be trained", "use peft_config.name: lora")
    if kind == "freeze":
        return {"trains": unfrozen(keys, "peft_config.")}
    if kind != "lora":
        return {}
    switches = {"use_dora": "dora", "use_rslora": "rslora"}
    method = next((ours for theirs, ours in switches.items() if keys.flag(f"peft_config.{theirs}")), "lora")
    fields = _trainer.adapted(keys, method, _LORA)
    if keys.raw(_LORA.dropout) is None:
        fields["adapter_dropout"] = _DROPOUT
    # plugins/model_plugins/quantization.py: bnb without a number is of four bits, auto is none.
    bits = bits or (4 if quantised == "bnb" else None)
    return fields | {"base": base_of(keys, bits, quantised.replace("auto", "bnb"), "quant_config.")}


def tree_of(case: ExportCase) -> dict[str, Any]:
    """Return the configuration of a case."""
    p, job = case.plan, case.job
    tree: dict[str, Any] = {"model": _trainer.hub_id(case)}
    if p.cp > 1:
        tree["flash_attn"] = "flash_attention_2"  # which core/base_trainer.py demands
    tree |= _adapter_words(job)
    if p.sharding_rules.shards:
        tree["dist_config"] = _mesh_words(p)
    tree |= {
        "micro_batch_size": p.micro_batch,
        "global_batch_size": job.global_batch,
        "cutoff_len": job.seq_len,
        "bf16": (job.precision or case.stack.precision) != "fp32",
        "enable_activation_checkpointing": p.recompute == "full",
    }
    return tree | ({"max_steps": round(job.run_tokens / job.tokens_per_step)} if job.run_tokens else {})


def _mesh_words(p: Plan) -> dict[str, Any]:
    tree: dict[str, Any] = {"name": "fsdp2", "reshard_after_forward": not p.sharding_rules.keeps_gathered}
    if p.sharding_rules.hybrid:
        tree |= {"mp_replicate_size": p.dp // p.shard, "mp_shard_size": p.shard * p.cp}
    tree |= {"cp_size": p.cp, "cp_mode": "ulysses"} if p.cp > 1 else {}
    return tree | ({"offload_params": True} if "parameters" in p.offload else {})


def _adapter_words(job: Training) -> dict[str, Any]:
    if not job.adapter:
        words = freeze_words(job)
        return {"peft_config": {"name": "freeze", **words}} if words else {}
    tree: dict[str, Any] = {
        "name": "lora", "r": rank_of(job), "lora_dropout": job.adapter_dropout,
        "target_modules": "all" if job.targets in ((), ("all-linear",)) else list(job.targets),
    }  # fmt: skip
    tree |= {"lora_alpha": round(job.adapter_alpha)} if job.adapter_alpha else {}
    tree |= {f"use_{job.adapter}": True} if job.adapter in ("dora", "rslora") else {}
    saved = _trainer.saved_words(job)
    tree |= {"modules_to_save": saved} if saved else {}
    bits = {"nf4-dq": 4, "nf4": 4, "int8": 8}.get(job.base)
    if not bits:
        return {"peft_config": tree}
    quantization = {"name": "bnb", "quantization_bit": bits} | (
        {"double_quantization": False} if job.base == "nf4" else {}
    )
    return {"peft_config": tree, "quant_config": quantization}


def export(case: ExportCase) -> Exported:
    """Return LLaMA-Factory's v1 YAML for a case; raises `InputError` naming every field that it cannot be told."""
    text = _trainer.written(case, _EXPORTED, tree_of, read)
    nodes, each = _trainer.processes(case)
    start = f"USE_V1=1 FORCE_TORCHRUN=1 NNODES={nodes} NPROC_PER_NODE={each} llamafactory-cli sft llamafactory_v1.yaml"
    return _trainer.checked_file(case, _TABLE, "llamafactory_v1.yaml", text, start)
