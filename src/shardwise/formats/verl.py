"""verl's training half of PPO and GRPO: its YAML, or Hydra's words behind `verl.trainer.main_ppo`.

Source: github.com/volcengine/verl b178a3cd56 verl/trainer/config and verl/workers/{fsdp,megatron}_workers.py. The
policy trains under FSDP or Megatron-Core; the engine that generates is a server, whose settings are left to `serve`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.formats import _trainer, _yaml
from shardwise.formats._exported import ExportCase, Exported
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys, flat_keys, table, top_level
from shardwise.formats._launch import started
from shardwise.formats.megatron import _job, _plan
from shardwise.formats.megatron._reader import Reader
from shardwise.formats.megatron._values import GivenArguments, by_name
from shardwise.models import Model
from shardwise.plans import Plan, Stack, Training, find_stack, rank_of, shard_of, with_stage_layers
from shardwise.units import counted

_TABLE = "verl.toml"
_A, _M, _F = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.actor.fsdp_config."
_G = _A + "megatron."
_OVERRIDES = _G + "override_transformer_config."
_ADAPTER = _trainer.AdapterKeys(
    rank=_M + "lora_rank", alpha=_M + "lora_alpha", dropout="", targets=_M + "target_modules", saved="",
    usual_rank=8, usual_targets=("all-linear",),
)  # fmt: skip
_TOLD = ("dp", "cp", "cp_kind", "micro_batch", "sharding", "shard", "recompute", "offload")
_HOST = ("optimizer", "gradients", "parameters")
_NAMES = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
_SETTING = re.compile(r"[+~]*(actor_rollout_ref|algorithm|data|trainer|critic|reward_model)(\.[a-z_0-9]+)+")


def recognises(name: str, text: str) -> bool:
    """Return whether a file holds verl's settings, or starts its PPO."""
    if name.endswith((".yaml", ".yml")):
        return "actor_rollout_ref" in top_level(text)
    return "actor_rollout_ref." in text


def read(text: str, source: str = "verl.yaml", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of the policy's training: an optimizer step is a mini-batch of prompts, each answered n times.

    >>> words = "python3 -m verl.trainer.main_ppo data.max_prompt_length=1024 data.max_response_length=1024 "
    >>> words += "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 actor_rollout_ref.rollout.n=5 "
    >>> case = read(words + "algorithm.adv_estimator=grpo trainer.n_gpus_per_node=8", "run.sh")
    >>> case.num_devices, case.job.method, case.job.global_batch, case.job.seq_len, case.plan.sharding
    (8, 'grpo', 1280, 2048, 'fsdp')
    """
    if source.endswith((".yaml", ".yml")):
        around.settings_alone(source)
        return _case(dict(flat_keys(_yaml.parse(text, source))), source, around)
    found = started(text, _known, source, around.variables)
    said, rest = _yaml.assigned((*found.arguments, *around.more))
    megatron = any("megatron" in word for word in rest)
    case = _case(({_A + "strategy": "megatron"} if megatron else {}) | said, source, around)
    return replace(case, assumed=(*found.notes, *case.assumed))


def _known(word: str) -> bool:
    setting = _SETTING.fullmatch(word) and not word.endswith((".py", ".json", ".sh"))
    return bool(setting) or word in ("--config-name", "--config-path")


def _case(values: Mapping[str, Any], source: str, around: ImportContext) -> Imported:
    keys = Keys({}, _TABLE, source)
    keys.values = _yaml.resolved(values)
    keys.table = keys.table | {"read": keys.table["read"] | dict.fromkeys(_of_megatron(keys), "plan")}
    path = str(keys.values.get(_M + "path") or "")
    if "$" in path and "$" not in path.rpartition("/")[2]:
        keys.values[_M + "path"] = path.rpartition("/")[2]  # a folder of the caller's, named as its model
    _yaml.refuse_open(keys)
    model = _trainer.model_named(keys, _M + "path")
    nodes, each = keys.whole("trainer.nnodes") or 1, keys.whole("trainer.n_gpus_per_node") or 8
    devices = around.num_devices or nodes * each
    answers, seq_len = keys.whole("actor_rollout_ref.rollout.n") or 1, _length(keys)
    batch = (keys.whole(_A + "ppo_mini_batch_size") or 256) * answers
    prompts = keys.whole("data.train_batch_size") or 1024
    steps = keys.whole("trainer.total_training_steps", rest=True) or 0
    job = Training(
        seq_len=seq_len, global_batch=batch, token_budget=float(steps * prompts * answers * seq_len),
        precision=_precision(keys), optimizer=_optimizer(keys), method=_method(keys), reference=_reference(keys),
        **(_trainer.adapted(keys, "lora", _ADAPTER) if keys.whole(_M + "lora_rank", least=0) else {}),
    )  # fmt: skip
    if keys.word(_A + "strategy") == "megatron":
        plan, stack = _megatron(keys, devices, model)
        job = replace(job, precision="bf16")
    else:
        plan, stack = _fsdp(keys, devices), find_stack("verl")
    plan = replace(plan, micro_batch=_micro_batch(keys, plan, seq_len))
    keys.assumed.append(
        f"one optimizer step: a rollout of {prompts} prompts has {prompts * answers / batch:g} an epoch"
    )
    _trainer.say_unpacked(keys, seq_len)
    return keys.case(
        source, model=model, plan=plan, job=job, stack=_settings(keys, stack),
        num_devices=devices, devices_per_node=0 if around.num_devices else each,
    )  # fmt: skip


def _length(keys: Keys) -> int:
    return (keys.whole("data.max_prompt_length") or 512) + (keys.whole("data.max_response_length") or 512)


def _method(keys: Keys) -> str:
    """Return the objective: generalised advantages need a critic, all other estimators a group of answers."""
    return "ppo" if (keys.word("algorithm.adv_estimator") or "gae") == "gae" else "grpo"


def _reference(keys: Keys) -> str:
    read_at_all = keys.flag(_A + "use_kl_loss") or keys.flag("algorithm.use_kl_in_reward")
    return "" if read_at_all else "none"


def _optimizer(keys: Keys) -> str:
    word = keys.word(_A + "optim.optimizer") or "adamw"
    known = {"adamw": "adam", "adam": "adam", "sgd": "sgd-plain", "adamw8bit": "adam8bit", "pagedadamw": "paged-adam"}
    return _trainer.known_optimizer(keys, word, {**known, "pagedadamw8bit": "paged-adam8bit"}.get(word, ""))


def _precision(keys: Keys) -> str:
    held, narrow = keys.word(_F + "model_dtype") or "fp32", keys.word(_F + "dtype") or "bfloat16"
    if held in ("fp32", "float32"):
        return "fp32" if narrow in ("fp32", "float32") else "amp-bf16"
    if held not in ("bf16", "bfloat16", "fp16", "float16"):
        keys.fail(_F + "model_dtype", "is not a type of weights", "use fp32 or bfloat16")
    return "bf16-pure"


def _micro_batch(keys: Keys, plan: Plan, seq_len: int) -> int:
    """Return the sequences of a micro-batch: as stated, or whole ones within the tokens of a dynamic one."""
    whole = keys.whole(_A + "ppo_micro_batch_size")
    size = keys.whole(_A + "ppo_micro_batch_size_per_gpu") or (whole // max(plan.dp, 1) if whole else 0)
    if keys.flag(_A + "use_dynamic_bsz"):
        tokens = (keys.whole(_A + "ppo_max_token_len_per_gpu") or 16384) * plan.cp
        size = max(tokens // seq_len, 1)
        keys.assumed.append(f"micro_batch {size}: as many whole sequences as {tokens} tokens hold")
    if not size:
        path = _A + "ppo_micro_batch_size_per_gpu"
        keys.problems.add(path, None, "is missing: verl has no default of it", f"set {path}")
    return size or 1


def _fsdp(keys: Keys, devices: int) -> Plan:
    """Return the plan of FSDP, whose data parallelism is what Ulysses leaves of the devices."""
    for path in (_A, _F):
        cp = keys.whole(path + "ulysses_sequence_parallel_size") or 1
        if cp > 1:
            break
    if devices % cp:
        keys.fail(_A + "ulysses_sequence_parallel_size", f"must divide the {devices} devices", "use a divisor")
        cp = 1
    size = keys.whole(_F + "fsdp_size", rest=True) or devices
    if devices % size:
        keys.fail(_F + "fsdp_size", f"must divide the {devices} devices", "use -1, or a divisor")
    mixed = size < devices and size > 1
    kept = keys.flag(_F + "reshard_after_forward") is False
    sharded: Any = "none" if devices == 1 else "hsdp" if mixed else "shard-grad-op" if kept else "fsdp"
    host = _HOST if keys.flag(_F + "offload_policy") else ()
    more = ("activations",) if keys.flag(_M + "enable_activation_offload") else ()
    return Plan(
        cp=cp, dp=devices // cp, cp_kind="all-to-all" if cp > 1 else "ring", sequence_parallel=False, sharding=sharded,
        shard=max(size // cp, 1) if mixed else 1, offload=(*host, *more),
        recompute="none" if keys.flag(_M + "enable_gradient_checkpointing") is False else "full",
    )  # fmt: skip


def _of_megatron(keys: Keys) -> list[str]:
    """Return the settings of Megatron-Core that a plan has a word for."""
    read = {name for name, one in by_name().items() if one.read} | _NAMES.keys()
    return [path for path in keys.values if path.startswith(_G) and path.rpartition(".")[2] in read]


def _megatron(keys: Keys, devices: int, model: Model | None) -> tuple[Plan, Stack]:
    """Return plan and stack of Megatron-Core's settings, by the names of its arguments."""
    paths = {_NAMES.get(name, name): path for path in _of_megatron(keys) for name in [path.rpartition(".")[2]]}
    given = GivenArguments(values={name: keys.values[path] for name, path in paths.items()}, options=paths)
    given.problems.items = keys.problems.items
    usual = {"use_distributed_optimizer": True, "sequence_parallel": True, "bf16": True, "micro_batch_size": 1}
    given.values = usual | {name: value for name, value in given.values.items() if value is not None}
    if not given.values.get("recompute_granularity"):
        for name in ("recompute_modules", "recompute_method", "recompute_num_layers"):
            given.values.pop(name, None)
    r = Reader(given)
    ep = r.count("expert_model_parallel_size")
    given.values["num_experts"] = ep if (model.has_experts if model else ep > 1) else 0
    if model is None:
        _plan.stand_in_layers(r, "name the model by its hub id in actor_rollout_ref.model.path")
    else:
        given.values["num_layers"] = model.num_layers
        pieces = r.count("pipeline_model_parallel_size") * r.count("num_virtual_stages_per_pipeline_rank")
        if model.num_layers % pieces and not any(map(r.has, (*_plan.COUNTED, "pipeline_model_parallel_layout"))):
            return _cut(keys, r, model.num_layers, devices), _job.stack(r)
    plan = _plan.build(r, devices)
    keys.assumed += r.assumed
    return plan, _job.stack(r)


def _cut(keys: Keys, r: Reader, layers: int, devices: int) -> Plan:
    """Return a plan whose stages are as even as the layers allow, where they do not divide."""
    pp, vpp = r.count("pipeline_model_parallel_size"), r.count("num_virtual_stages_per_pipeline_rank")
    r.given.values["num_layers"] = pp * vpp
    keys.assumed.append(f"stages as even as {layers} layers allow: verl has the model's own bridge cut them")
    return with_stage_layers(_plan.build(r, devices), layers, "uniform")


def _settings(keys: Keys, stack: Stack) -> Stack:
    """Return a stack with its loss, and whether the engine sleeps while the policy trains."""
    settings = stack.settings
    if keys.flag(_M + "use_fused_kernels") or keys.flag(_M + "use_liger"):
        settings = replace(settings, loss="fused-linear")
    if keys.flag("actor_rollout_ref.rollout.free_cache_engine") is False:
        keys.assumed.append("no memory of the engine that stays awake: give --rollout awake --rollout-memory")
        return replace(stack, settings=settings)
    return replace(stack, settings=replace(settings, rollout="asleep"))


def tree_of(case: ExportCase) -> dict[str, Any]:
    """Return the settings of a case; what generates is left at verl's own."""
    p, job = case.plan, case.job
    answers = next(n for n in (8, 4, 2, 1) if job.global_batch % n == 0) if job.method == "grpo" else 1
    prompts = job.global_batch // answers
    sharded: dict[str, Any] = {"fsdp_size": shard_of(p) * p.cp if p.sharding_rules.hybrid else -1}
    sharded |= {
        "reshard_after_forward": not p.sharding_rules.keeps_gathered,
        "offload_policy": "parameters" in p.offload,
    }
    precision = job.precision or case.stack.precision
    sharded |= {"model_dtype": "bfloat16" if precision == "bf16-pure" else "fp32"}
    sharded |= {"dtype": "float32" if precision == "fp32" else "bfloat16"}
    model: dict[str, Any] = {
        "path": _trainer.hub_id(case.model),
        "enable_gradient_checkpointing": p.recompute == "full",
        "enable_activation_offload": "activations" in p.offload,
        "use_fused_kernels": case.stack.settings.loss == "fused-linear",
    }
    if job.adapter:
        model |= {"lora_rank": rank_of(job), "lora_alpha": round(job.adapter_alpha) or 16}
        model["target_modules"] = (
            job.targets[0] if job.targets in (("all-linear",),) else list(job.targets or ("all-linear",))
        )
    actor: dict[str, Any] = {
        "strategy": "fsdp2",
        "ppo_mini_batch_size": prompts,
        "ppo_micro_batch_size_per_gpu": p.micro_batch,
        "ulysses_sequence_parallel_size": p.cp,
        "use_kl_loss": job.reference != "none",
        "optim": {"optimizer": {"adam": "AdamW", "sgd-plain": "SGD"}.get(job.optimizer, job.optimizer)},
        "fsdp_config": sharded,
    }
    whole = case.cluster.devices_per_node
    nodes, each = _trainer.processes(case) if p.num_devices > whole else (1, p.num_devices)
    return {
        "algorithm": {"adv_estimator": "gae" if job.method == "ppo" else "grpo"},
        "data": {"train_batch_size": prompts, "max_prompt_length": job.seq_len // 2,
                 "max_response_length": job.seq_len - job.seq_len // 2},
        "actor_rollout_ref": {"model": model, "actor": actor, "rollout": {"name": "vllm", "n": answers}},
        "trainer": {"nnodes": nodes, "n_gpus_per_node": each},
    }  # fmt: skip


def export(case: ExportCase) -> Exported:
    """Return the launch of a policy's training; raises `InputError` naming every field that verl cannot be told."""
    text = _trainer.written(case, _TOLD, tree_of, read)
    words = [
        f"{path}={value if isinstance(value, str) else json.dumps(value)}"
        for path, value in flat_keys(_yaml.parse(text))
    ]
    checked, count = table(_TABLE)["checked"], counted(case.plan.num_devices, "device")
    head = f"#!/bin/bash\n# {case.model.name} on {count}, for {checked['system']} {checked['version']}.\n"
    script = " \\\n    ".join([f"{head}python3 -m verl.trainer.main_ppo", *map(shlex.quote, words), '"$@"']) + "\n"
    notes = (
        "data, rewards and the learning rate are yours to add, behind the script's name",
        "half of a sequence is its prompt; what generates keeps verl's own settings: serve sizes it",
    )
    return Exported(system=checked["system"], version=checked["version"], files={"verl.sh": script}, notes=notes)
