"""verl's training half of PPO and GRPO: its YAML, or Hydra's words behind `verl.trainer.main_ppo`.

Source: github.com/volcengine/verl b178a3cd56 verl/trainer/config and verl/workers/{fsdp,megatron}_workers.py. The
policy trains under FSDP or Megatron-Core; the engine that generates is a server, whose settings are left to `serve`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from shardwise.formats import _trainer, _yaml
from shardwise.formats._checkpoints import with_prompts, with_samples
from shardwise.formats._exported import ExportCase, Exported
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys, flat_keys, table, top_level
from shardwise.formats._launch import Launch, started
from shardwise.formats.megatron._beside import NAMES, plan_beside
from shardwise.formats.megatron._values import by_name
from shardwise.models import Model
from shardwise.plans import Plan, Stack, Training, find_stack, fused_layers, rank_of, shard_of
from shardwise.records import replace
from shardwise.units import counted

_TABLE = "verl.toml"
_A, _M, _F = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.actor.fsdp_config."
_G, _O = _A + "megatron.", _A + "optim.override_optimizer_config."
_R = "actor_rollout_ref.rollout."
_ADAPTER = _trainer.AdapterKeys(
    rank=_M + "lora_rank", alpha=_M + "lora_alpha", dropout="", targets=_M + "target_modules", saved="",
    usual_rank=8, usual_targets=("all-linear",),
)  # fmt: skip
# Under Megatron-Core they are Megatron-Bridge's (verl/trainer/config/model/hf_model.yaml, lora).
_BRIDGE = _trainer.AdapterKeys(
    rank=_M + "lora.rank", alpha=_M + "lora.alpha", dropout=_M + "lora.dropout", targets=_M + "lora.target_modules",
    saved="", usual_rank=8, usual_targets=("all-linear",),
)  # fmt: skip
_EXPORTED = ("dp", "cp", "cp_kind", "micro_batch", "sharding", "shard", "recompute", "offload")
_HOST = ("optimizer", "gradients", "parameters")
# verl/trainer/config/engine/megatron.yaml.
# The dispatcher: verl/models/mcore/config_converter.py, _get_base_transformer_config.
_USUAL = {"use_distributed_optimizer": True, "sequence_parallel": True, "moe_token_dispatcher_type": "alltoall"}
_TUNES = re.compile(r"\bverl\.trainer\.(fsdp_)?sft_trainer\b")
_ROOTS = "actor_rollout_ref|algorithm|data|trainer|critic|reward_model|model|engine|optim"
_SETTING = re.compile(rf"[+~]*({_ROOTS})(\.[a-z_0-9]+)+")


def recognises(name: str, text: str) -> bool:
    """Return whether a file holds verl's settings, or starts its PPO or its supervised fine-tuning."""
    if name.endswith((".yaml", ".yml")):
        return "actor_rollout_ref" in top_level(text)
    return "actor_rollout_ref." in text or bool(_TUNES.search(text))


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
    launch = started(text, _known, source, around.variables)
    assigned, rest = _yaml.assigned((*launch.arguments, *around.more))
    if _TUNES.search(text):
        case = _tuned(assigned, source, around, launch.launch)
        return replace(case, assumed=(*launch.notes, *case.assumed))
    megatron = any("megatron" in word for word in rest)
    case = _case(({_A + "strategy": "megatron"} if megatron else {}) | assigned, source, around)
    return replace(case, assumed=(*launch.notes, *case.assumed))


def _known(word: str) -> bool:
    setting = _SETTING.fullmatch(word) and not word.endswith((".py", ".json", ".sh"))
    return bool(setting) or word in ("--config-name", "--config-path")


def _case(values: Mapping[str, Any], source: str, around: ImportContext) -> Imported:
    keys = Keys({}, _TABLE, source)
    keys.values = _yaml.resolved(values)
    keys.table = keys.table | {"read": keys.table["read"] | dict.fromkeys(_of_megatron(keys).values(), "plan")}
    model = _model(keys, _M + "path")
    nodes, each = keys.whole("trainer.nnodes") or 1, keys.whole("trainer.n_gpus_per_node") or 8
    devices = around.num_devices or nodes * each
    answers, seq_len = keys.whole("actor_rollout_ref.rollout.n") or 1, _length(keys)
    mini = keys.whole(_A + "ppo_mini_batch_size") or 256
    batch, prompts = mini * answers, keys.whole("data.train_batch_size", least=0)
    if prompts == 0:  # verl/experimental/fully_async_policy: what a trainer fetches at once
        prompts = mini * (keys.whole("async_training.require_batches") or 1)
    prompts = 1024 if prompts is None else prompts
    steps = keys.whole("trainer.total_training_steps", rest=True) or 0
    job = Training(
        seq_len=seq_len, global_batch=batch, token_budget=float(steps * prompts * answers * seq_len),
        precision=_precision(keys), optimizer=_optimizer(keys), method=_method(keys), reference=_reference(keys),
        **_adapter(keys),
    )  # fmt: skip
    if keys.word(_A + "strategy") == "megatron":
        plan, stack = plan_beside(keys, _of_megatron(keys), devices, (_M + "path", model), _USUAL)
        job = replace(job, precision="bf16")
    else:
        plan, stack = _fsdp(keys, devices), find_stack("verl")
    plan = replace(plan, micro_batch=_micro_batch(keys, plan, seq_len))
    keys.assumed.append(
        f"one optimizer step: a rollout of {prompts} prompts has {prompts * answers / batch:g} an epoch"
    )
    _trainer.say_unpacked(keys, seq_len)
    return keys.case(
        source, model=model, plan=plan, job=job,
        stack=with_samples(_settings(keys, stack, devices), prompts * answers, batch),
        num_devices=devices, devices_per_node=0 if around.num_devices else each,
    )  # fmt: skip


def _model(keys: Keys, path: str) -> Model | None:
    """Return the model of a path, which may be a folder of the caller's that is named as its model."""
    named = str(keys.values.get(path) or "")
    if "$" in named and "$" not in named.rpartition("/")[2]:
        keys.values[path] = named.rpartition("/")[2]
    _yaml.refuse_open(keys)
    return _trainer.model_named(keys, path)


def _tuned(values: Mapping[str, Any], source: str, around: ImportContext, launch: Launch) -> Imported:
    """Return the case of supervised fine-tuning under FSDP: the launcher says on how many devices.

    Source: verl/trainer/{fsdp_sft_trainer,sft_trainer}.py, config/{sft_trainer,sft_trainer_engine}.yaml.
    """
    own = table(_TABLE)["sft"]
    keys = Keys({}, _TABLE, source)
    renamed = {own["also"].get(path, path): value for path, value in values.items()}
    keys.values, keys.table = _yaml.resolved(renamed), keys.table | own
    model, seq_len = _model(keys, "model.path"), keys.whole("data.max_length") or 1024
    if keys.word("engine") == "megatron":
        keys.fail("engine", "is read of verl's PPO and GRPO alone", "use engine=fsdp, or give Megatron-LM's arguments")
    devices, cp = around.num_devices or launch.num_devices, keys.whole("engine.ulysses_sequence_parallel_size") or 1
    plan = replace(_trainer.spread(keys, devices // cp, {}, "fsdp"), cp=cp, cp_kind="all-to-all" if cp > 1 else "ring")
    host = keys.flag("model.fsdp_config.cpu_offload") or keys.flag("model.fsdp_config.offload_params")
    kept = keys.flag("model.enable_gradient_checkpointing") is False
    size = keys.whole("data.micro_batch_size_per_gpu") or 4
    if "engine.strategy" in keys.values and keys.flag("data.use_dynamic_bsz") is not False:
        size = max((keys.whole("data.max_token_len_per_gpu") or 8192) * cp // seq_len, 1)
        keys.assumed.append(f"micro_batch {size}: as many whole sequences as a device's tokens hold")
    plan = replace(plan, micro_batch=size, offload=_HOST if host else (), recompute="none" if kept else "full")
    batch, steps = keys.whole("data.train_batch_size") or 256, keys.whole("trainer.total_training_steps") or 0
    lora = replace(_ADAPTER, rank="model.lora_rank", alpha="model.lora_alpha", targets="model.target_modules")
    narrow = keys.word("model.fsdp_config.model_dtype") in ("bf16", "bfloat16")
    job = Training(
        seq_len=seq_len, global_batch=batch, token_budget=float(steps * batch * seq_len),
        precision="bf16-pure" if narrow else "amp-bf16",
        **(_trainer.adapted(keys, "lora", lora) if keys.whole("model.lora_rank", least=0) else {}),
    )  # fmt: skip
    _trainer.say_unpacked(keys, seq_len)
    stack = find_stack("verl")
    if keys.flag("model.use_liger"):
        stack = fused_layers(stack)
    if "engine.strategy" not in keys.values:
        # fsdp_sft_trainer.py _compute_loss_and_backward: CrossEntropyLoss under autocast.
        stack = replace(stack, settings=replace(stack.settings, loss="eager"))
    return keys.case(source, model=model, plan=plan, job=job, stack=stack, num_devices=devices)


def _adapter(keys: Keys) -> dict[str, Any]:
    """Return the adapters of peft under FSDP, and of Megatron-Bridge under Megatron-Core; nothing without a rank."""
    if keys.word(_A + "strategy") != "megatron":
        return _trainer.adapted(keys, "lora", _ADAPTER) if keys.whole(_M + "lora_rank", least=0) else {}
    method = "dora" if keys.word(_M + "lora.type") == "dora" else "lora"
    return _trainer.adapted(keys, method, _BRIDGE) if keys.whole(_M + "lora.rank", least=0) else {}


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
    types, narrow = keys.word(_F + "model_dtype") or "fp32", keys.word(_F + "dtype") or "bfloat16"
    if types in ("fp32", "float32"):
        return "fp32" if narrow in ("fp32", "float32") else "amp-bf16"
    if types not in ("bf16", "bfloat16", "fp16", "float16"):
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


def _of_megatron(keys: Keys) -> dict[str, str]:
    """Return the settings of Megatron-Core that a plan has a word for, by the name of its argument.

    megatron/core/optimizer/optimizer_config.py: no share of the optimizer is on the host unless one is said.
    """
    read = {name for name, one in by_name().items() if one.read} | NAMES.keys()
    ours = [path for path in keys.values if path.startswith((_G, _O)) and path.rpartition(".")[2] in read]
    paths = {path.rpartition(".")[2]: path for path in ours}
    path = _O + "optimizer_offload_fraction"
    share = 1.0 if keys.raw(path) == 1 else _trainer.share(keys, path)
    if "optimizer_cpu_offload" in paths and not share:
        keys.assumed.append("offload none: optimizer_offload_fraction is 0 unless it is set")
        return {name: path for name, path in paths.items() if name != "optimizer_cpu_offload"}
    return paths


def _settings(keys: Keys, stack: Stack, devices: int) -> Stack:
    """Return a stack with its loss, and whether the engine sleeps while the policy trains."""
    # trainer/config/rollout/rollout.yaml: tensor_model_parallel_size 2 unless told.
    usual = 2 if devices % 2 == 0 else 1
    stack = with_prompts(keys, stack, "data.max_prompt_length", _R + "tensor_model_parallel_size", usual)
    settings = stack.settings
    if keys.flag(_M + "use_liger"):
        # workers/engine/fsdp/transformer_impl.py: Liger's forward without labels, which gives out whole logits.
        stack = fused_layers(stack)
    if keys.flag(_M + "use_fused_kernels"):
        settings = replace(settings, loss="fused-linear")
    if keys.whole("rollout.nnodes", least=0):  # verl/experimental: an engine on nodes of its own
        return replace(stack, settings=replace(settings, rollout="apart"))
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
        "path": _trainer.hub_id(case),
        "enable_gradient_checkpointing": p.recompute == "full",
        "enable_activation_offload": "activations" in p.offload,
        "use_fused_kernels": case.stack.settings.loss == "fused-linear",
        **({"use_liger": True} if case.stack.norm == "fused" else {}),
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
    length = {"total_training_steps": round(job.run_tokens / job.tokens_per_step)} if job.run_tokens else {}
    return {
        "algorithm": {"adv_estimator": "gae" if job.method == "ppo" else "grpo"},
        "data": {"train_batch_size": prompts, "max_prompt_length": job.seq_len // 2,
                 "max_response_length": job.seq_len - job.seq_len // 2},
        "actor_rollout_ref": {"model": model, "actor": actor, "rollout": {"name": "vllm", "n": answers}},
        "trainer": {"nnodes": nodes, "n_gpus_per_node": each, **length},
    }  # fmt: skip


def export(case: ExportCase) -> Exported:
    """Return the launch of a policy's training; raises `InputError` naming every field that verl cannot be told."""
    own = case.stack.settings
    if not own.rollout:
        own = replace(own, rollout="asleep")
    text = _trainer.written(replace(case, stack=replace(case.stack, settings=own)), _EXPORTED, tree_of, read)
    words = [
        f"{path}={value if isinstance(value, str) else json.dumps(value)}"
        for path, value in flat_keys(_yaml.parse(text))
    ]
    checked, count = table(_TABLE)["checked"], counted(case.plan.num_devices, "device")
    head = f"#!/bin/bash\n# {case.model.name} on {count}, for {checked['system']} {checked['version']}.\n"
    script = " \\\n    ".join([f"{head}python3 -m verl.trainer.main_ppo", *map(shlex.quote, words), '"$@"']) + "\n"
    notes = (
        "data, rewards and the learning rate are yours to add, behind the script's name",
        "half of a sequence is its prompt; what generates keeps verl's own settings, asleep while the policy trains: "
        "--rollout asleep counts its context, serve sizes it",
    )
    return Exported(system=checked["system"], version=checked["version"], files={"verl.sh": script}, notes=notes)
