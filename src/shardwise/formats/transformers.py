"""A training of Hugging Face's Trainer or of TRL: a launch script with accelerate's YAML beside it, or TRL's own YAML.

Sources: transformers 5.23.0 training_args.py and examples/pytorch/language-modeling/run_clm.py; trl 1.16.0
trainer/{base,sft,model}_config.py, whose parsers were run for defaults. accelerate's YAML is `fsdp`'s.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from shardwise.files import YAML_BYTES, below, read_text
from shardwise.formats import _trainer, _yaml, deepspeed, fsdp
from shardwise.formats._checkpoints import attending, liger_patches, reentrant, under_deepspeed, with_prompts
from shardwise.formats._exported import ExportCase, Exported, lost, refuse, unexported, worded
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys, table
from shardwise.formats._launch import Launch, started
from shardwise.formats._trl_programs import NO_MISMATCH, PROGRAMS, program_of
from shardwise.formats._words import words_of
from shardwise.models import Model
from shardwise.plans import (
    WHOLE_LOSSES,
    Plan,
    Recompute,
    Stack,
    Training,
    find_base,
    find_precision,
    find_stack,
    fused_layers,
)
from shardwise.records import replace

_TABLE = "transformers.toml"
_EXPORTED = frozenset(("tp", "cp", "cp_kind", "dp", "micro_batch", "sharding", "shard", "recompute", "offload"))
# A recipe -> accelerate's mixed_precision and the type in which the script loads the weights.
_PRECISIONS = {
    "bf16-pure": ("no", "bfloat16"),
    "amp-bf16": ("bf16", "float32"),
    "amp-fp16": ("fp16", "float32"),
    "fp32": ("no", "float32"),
}
_TELLING = frozenset(("--per_device_train_batch_size", "--gradient_accumulation_steps", "--model_name_or_path"))
# What a training is told and scripts that generate, convert or judge with a named model are not.
_TRAINS = re.compile(
    r"--(?:per_device_train|gradient_|learning_rate|num_train|max_steps|do_train|train_|block_size|optim|dataset|data_path|"
    r"deepspeed|fsdp|use_peft|lora_|bf16)|\btrl\b|(?i:train|tune|sft|dpo|grpo|run_[a-z]?lm)\w*\.py"
)
_OTHERS = re.compile(r"--micro-batch-size|--actor_model_name|(?i:infer|generat|convert|merge)\w*\.py")
_LENGTHS = ("max_length", "max_seq_length", "block_size", "max_seq_len", "model_max_length", "cutoff_len")
_REENTRANT = tuple(f"{name}_checkpointing_kwargs.use_reentrant" for name in ("activation", "gradient"))
_ADAPTER = _trainer.AdapterKeys(
    rank="lora_r", alpha="lora_alpha", dropout="lora_dropout", targets="lora_target_modules",
    saved="lora_modules_to_save", usual_rank=16, usual_targets=("q", "v"), parameters="lora_target_parameters",
)  # fmt: skip


def recognises(name: str, text: str) -> bool:
    """Return whether a file starts a training with transformers' arguments."""
    others = name.endswith((".json", ".yaml", ".yml")) or re.search(_OTHERS, text)
    return any(word in text for word in _TELLING) and not others and bool(_TRAINS.search(text))


def read(text: str, source: str = "train.sh", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of a launch script, or of the YAML that TRL's commands take.

    >>> text = "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path meta-llama/Llama-3.1-8B --bf16"
    >>> case = read(text + " --block_size 4096 --per_device_train_batch_size 2 --gradient_checkpointing")
    >>> case.plan.dp, case.plan.micro_batch, case.job.seq_len, case.job.global_batch, case.job.precision
    (8, 2, 4096, 16, 'amp-bf16')
    """
    if source.endswith((".yaml", ".yml")):
        around.settings_alone(source)
        keys = Keys(_yaml.parse(text, source), _TABLE, source)
        return _case(keys, Launch(program=program_of(keys, source)), source, around)
    launch = started(text, _TELLING.__contains__, source, around.variables)
    case = _case(Keys(_trainer.spelled_words(launch.arguments), _TABLE, source), launch.launch, source, around)
    return replace(case, assumed=(*launch.notes, *case.assumed))


def _case(
    keys: Keys, launch: Launch, source: str, around: ImportContext, accelerate: Imported | None = None
) -> Imported:
    """Return the case of settings, as TRL's program has its defaults or as transformers has them.

    `accelerate` is accelerate's file, else the one that the launcher names.
    """
    program = launch.program.rpartition("/")[2].removesuffix(".py").removeprefix("trl.scripts.")
    trl = program in PROGRAMS
    _yaml.refuse_open(keys)
    accelerate = accelerate or _named_config(keys, launch, source, around)
    devices = around.num_devices or (accelerate.num_devices if accelerate else 0) or launch.num_devices
    launched = _deepspeed(keys, source, replace(around, num_devices=devices)) or _launched_deepspeed(accelerate)
    base = launched or accelerate
    plan = base.plan if base else _split(keys, devices) if launch.num_devices < 2 else None
    plan = plan or _plan(keys, devices)
    plan = replace(plan, recompute=_recompute(keys, trl) if plan.recompute == "none" else plan.recompute)
    plan = replace(plan, offload=_offload(keys, plan))
    plan, batch, steps = _trainer.batches(keys, plan, "per_device_train_batch_size", "gradient_accumulation_steps", 8)
    seq_len = _answered(keys) if program in ("grpo", "rloo") else _length(keys, trl)
    sharded = plan.sharding_rules.weights
    job = Training(
        seq_len=seq_len,
        global_batch=batch,
        precision=_under_deepspeed(keys, launched, trl) if launched else _precision(keys, accelerate, trl, sharded),
        optimizer=_trainer.optimizer_of(keys, "optim"),
        **_adapter(keys, trl),
        **(_objective(keys, program) if trl else _of_chat(keys, source)),
    )
    job = _trainer.lasting(job, keys.whole("max_steps", rest=True) or 0)
    model = _trainer.model_named(keys, "model_name_or_path")
    stack = _stack(keys, under_deepspeed(launched, find_stack("trl" if trl else "transformers")), model)
    if trl and job.adapter and launched and plan.sharding_rules.weights:
        # trl 1.16.0 trainer/{sft,dpo,kto,grpo,rloo,reward}_trainer.py: forced, until DeepSpeed takes the other kind.
        stack = replace(stack, checkpoint_reenters="always")
    if trl and find_base(job.base or "bf16").narrow and _dtype(keys) not in ("", "float32"):
        # trl 1.16.0 trainer/utils.py create_model_from_path: what is not quantised is loaded so, and nothing casts it.
        stack = replace(stack, narrow_rest_bytes=0.0)
    stack = _rollouts(keys, stack) if program in ("grpo", "rloo") else stack
    stack = stack if job.precision or not keys.flag("use_peft") else replace(stack, adapter_autocast=True)
    return keys.case(
        source,
        model=model,
        plan=plan,
        job=job,
        stack=stack,
        num_devices=devices,
        devices_per_node=launch.devices_per_node,
        accumulation=0 if batch else steps,
    )


def _launched_deepspeed(accelerate: Imported | None) -> Imported | None:
    """Return the case of accelerate's file where that starts DeepSpeed."""
    return accelerate if accelerate and accelerate.stack.name == find_stack("deepspeed").name else None


def _under_deepspeed(keys: Keys, launched: Imported, trl: bool) -> str:
    """Return the recipe under DeepSpeed: what its file says, or the trainer where accelerate fills the file in.

    transformers 5.24.0 training_args.py: bf16 and fp16 set ACCELERATE_MIXED_PRECISION, which DeepSpeed's plugin reads.
    """
    if keys.raw("deepspeed") is not None:
        return launched.job.precision
    widths = dict.fromkeys(("amp-bf16", "bf16-pure", ""), "bf16-grads16") | {"amp-fp16": "fp16-grads16"}
    return widths.get(_precision(keys, None, trl), launched.job.precision)


def _named_config(keys: Keys, launch: Launch, source: str, around: ImportContext) -> Imported | None:
    """Return the case of accelerate's file that the launcher names, None without one."""
    if not launch.config_file:
        return None
    path = below(source, launch.config_file, around.follow, "config_file")
    devices = around.num_devices or launch.num_devices
    alone = replace(around, num_devices=devices, variables={}, more=())
    return keys.with_file(launch.config_file, fsdp.read(read_text(path, YAML_BYTES, "config_file"), path, alone))


def _deepspeed(keys: Keys, source: str, around: ImportContext) -> Imported | None:
    """Return the case of DeepSpeed's file, or of its stage as the scripts of DeepSpeed-Chat are told it.

    There `--deepspeed` is a switch: github.com/deepspeedai/DeepSpeedExamples DeepSpeed-Chat dschat/utils/ds_utils.py.
    """
    if keys.raw("deepspeed") is not True:
        return _trainer.deepspeed_case(keys, "deepspeed", source, around)
    if keys.raw("deepspeed_config") is not None:
        return _trainer.deepspeed_case(keys, "deepspeed_config", source, around)
    place = {"device": "cpu" if keys.flag("offload") else "none"}
    zero = {"stage": keys.whole("zero_stage", least=0) or 0, "offload_optimizer": place, "offload_param": place}
    kind = "bf16" if keys.word("dtype") == "bf16" else "fp16"
    return deepspeed.read_tree({"zero_optimization": zero, kind: {"enabled": True}}, source, around.num_devices)


def _split(keys: Keys, devices: int) -> Plan | None:
    """Return the plan of one process that splits layers over its devices, None where it does not.

    Source: accelerate 1.15.0 utils/modeling.py get_balanced_memory: as many bytes on each device. Several processes
    load the model whole (trl 1.16.0 trainer/sft_trainer.py).
    """
    device_map = keys.values.get("model_init_kwargs.device_map")
    if device_map is None:
        return None
    if device_map not in ("auto", "balanced"):
        keys.fail("model_init_kwargs.device_map", "is a split that is not read", "use auto, for equal bytes a device")
    return Plan(pp=max(devices, 1), schedule="sequential", sequence_parallel=False)


def _plan(keys: Keys, devices: int) -> Plan:
    fsdp_word = keys.raw("fsdp")
    words = fsdp_word if isinstance(fsdp_word, list) else str(fsdp_word or "").split()
    sharded = fsdp_word is True or bool({"full_shard", "shard_grad_op", "hybrid_shard"} & set(words))
    kept = "shard_grad_op" in words or keys.flag("fsdp_config.reshard_after_forward") is False
    host = sharded and ("offload" in words or keys.flag("fsdp_config.cpu_offload"))
    plan = _trainer.spread(keys, devices, {}, "none" if not sharded else "shard-grad-op" if kept else "fsdp")
    return fsdp.unit_by_unit(replace(plan, offload=fsdp.HOST if host else ()))


def _recompute(keys: Keys, trl: bool) -> Recompute:
    checkpointing = keys.flag("gradient_checkpointing")
    checkpointing = keys.flag("activation_checkpointing") if checkpointing is None else checkpointing
    return "full" if (trl if checkpointing is None else checkpointing) else "none"


def _offload(keys: Keys, plan: Plan) -> tuple[str, ...]:
    """Return what lies in the host's memory, what is saved for backward as a setting of the trainer says."""
    inputs = any([keys.flag(f"{name}_checkpointing_kwargs.offload") for name in ("activation", "gradient")])
    saved = keys.flag("activation_offloading") or (inputs and plan.recompute == "full")
    return tuple(dict.fromkeys((*plan.offload, *(("activations",) if saved else ()))))


def _length(keys: Keys, trl: bool) -> int:
    """Return the tokens of a sequence: of TRL's trainer 1,024 unless told, of a script what it calls its blocks."""
    length = next((n for name in _LENGTHS if (n := keys.whole(name))), None)
    if trl and not keys.flag("packing"):
        _trainer.say_unpacked(keys, length or 1024)
    return length or (1024 if trl else 0)


def _answered(keys: Keys) -> int:
    """Return the tokens of a prompt and its answer; TRL bounds answers alone."""
    prompt = keys.whole("max_prompt_length")
    if prompt is None:
        keys.assumed.append("prompts of 512 tokens: only the length of answers is set")
    return (prompt or 512) + (keys.whole("max_completion_length") or 512)


def _objective(keys: Keys, program: str) -> dict[str, Any]:
    """Return what TRL's program optimises; answers are compared with a reference where beta is above 0."""
    if program in ("grpo", "rloo"):
        beta = keys.raw("beta")
        usual = 0.05 if program == "rloo" else 0.0  # trl 1.16 trainer/{grpo,rloo}_config.py
        return _trainer.objective(keys, program, bool(usual if beta is None else beta))
    if program == "kto" and NO_MISMATCH in words_of(keys, "loss_type"):
        keys.assumed.append(f"method kto: {NO_MISMATCH} scores no mismatched answers: time is overstated")
    return _trainer.objective(keys, program, not keys.flag("precompute_ref_log_probs"))


def _of_chat(keys: Keys, source: str) -> dict[str, Any]:
    """Return what a script of DeepSpeed-Chat optimises: those of all steps start main.py with the same arguments.

    Source: github.com/deepspeedai/DeepSpeedExamples DeepSpeed-Chat training/step2_{reward_model,dpo}_finetuning.
    """
    reward = keys.raw("num_padding_at_beginning") is not None
    word = "dpo" if "step2_dpo" in source else "reward" if reward else ""
    keys.assumed += [f"method {word}: a script of DeepSpeed-Chat's second step"] if word else []
    return _trainer.objective(keys, word)


def _precision(keys: Keys, accelerate: Imported | None, trl: bool, sharded: bool = False) -> str:
    """Return the recipe: whether GEMMs take 16 bits beside fp32 weights, or the weights are loaded in 16.

    Beside mixed precision FSDP makes fp32 of what trains, whatever was loaded (accelerate 1.15.0 utils/fsdp_utils.py
    fsdp2_prepare_model, and accelerator.py for FSDP1). Beside frozen 16 bits it is "", and autocast runs all the same.
    """
    flag, stated = keys.flag("bf16"), accelerate.job.precision if accelerate else ""
    mixed = flag or (trl if flag is None else False) or stated == "amp-bf16"
    frozen = mixed and keys.flag("use_peft")
    if frozen and _dtype(keys) in ("bfloat16", "float16"):
        return ""
    if _dtype(keys) == "bfloat16" and not (sharded and mixed):
        return "bf16-pure"
    half = "amp-fp16" if keys.flag("fp16") else "amp-bf16" if (trl if flag is None else flag) else ""
    return half or (stated if stated and find_precision(stated).autocast else "fp32")


def _dtype(keys: Keys) -> str:
    """Return the type in which a script is told to load the weights, "" where it is not."""
    if "auto" in (keys.values.get("dtype"), keys.values.get("torch_dtype")):
        keys.assumed.append("dtype auto: bfloat16, the type of most checkpoints")
        return "bfloat16"
    return keys.word("dtype") or keys.word("torch_dtype")


# Switches of scripts in the manner of Alpaca: of Qwen's and LLaVA's, which adapt all linear layers, and of FastChat's.
_SWITCHES = ("use_lora", "lora_enable", "q_lora")


def _adapter(keys: Keys, trl: bool) -> dict[str, Any]:
    own = [name for name in _SWITCHES if keys.flag(name)]
    bits = keys.whole("bits")
    narrow = keys.flag("load_in_4bit") or "q_lora" in own or bits == 4
    wide = keys.flag("load_in_8bit") or bits == 8
    plain = not trl and keys.raw("use_peft") is None and keys.raw("lora_r") is not None
    if own or plain:
        whole = bool({"use_lora", "lora_enable"} & {*own})
        named = replace(_ADAPTER, usual_rank=64 if whole else 8)
        named = replace(named, usual_targets=("all-linear",)) if whole else named
        if keys.raw("lora_target_modules") is None:
            targets = ", ".join(named.usual_targets)
            keys.assumed.append(f"targets {targets}: what such scripts choose where no modules are named")
        return _trainer.adapted(keys, "lora", named) | {"base": "nf4-dq" if narrow else "int8" if wide else ""}
    if not keys.flag("use_peft"):
        if narrow or wide:
            path = "load_in_4bit" if narrow else "load_in_8bit"
            keys.fail(path, "has weights that cannot be trained", "add use_peft")
        return {}
    method = "dora" if keys.flag("use_dora") else "rslora" if keys.flag("use_rslora") else "lora"
    if keys.raw("lora_target_modules") is None:
        keys.assumed.append("targets q, v: peft's own list of most models where no modules are named")
    fields = _trainer.adapted(keys, method, _ADAPTER)
    if keys.raw("lora_dropout") is None:
        fields["adapter_dropout"] = 0.05
    nested = keys.flag("use_bnb_nested_quant")
    # trl 1.16.0 trainer/model_config.py: dtype float32, frozen weights too.
    usual = "fp32" if trl and _dtype(keys) in ("", "float32") else "fp16" if _dtype(keys) == "float16" else ""
    return fields | {"base": "nf4-dq" if narrow and nested else "nf4" if narrow else "int8" if wide else usual}


def _rollouts(keys: Keys, stack: Stack) -> Stack:
    """Return a stack with where TRL's engine of rollouts is while the policy trains.

    trl 1.16.0 trainer/grpo_config.py: colocate unless told, whose share of each device stays taken without sleep mode;
    grpo_trainer.py scores again where vLLM's probabilities are corrected, or updates do not end with a generation.
    """
    steps = keys.whole("gradient_accumulation_steps") or 1
    every = (keys.whole("steps_per_generation") or steps) * (keys.whole("num_iterations") or 1)
    corrected = keys.flag("use_vllm") and keys.flag("vllm_importance_sampling_correction") is not False
    stack = replace(stack, scores_rollouts=bool(corrected or steps % every))
    if not keys.flag("use_vllm"):
        return stack
    server = keys.word("vllm_mode") == "server"
    stack = with_prompts(keys, stack, "max_prompt_length", "" if server else "vllm_tensor_parallel_size")
    place = "apart" if server else "asleep" if keys.flag("vllm_enable_sleep_mode") else "awake"
    if place == "awake":
        keys.keep_engine("vllm_gpu_memory_utilization", 0.3)
        return stack
    return replace(stack, settings=replace(stack.settings, rollout=place))


def _stack(keys: Keys, stack: Stack, model: Model | None) -> Stack:
    stack = _trainer.synchronised(keys, attending(keys, stack, "attn_implementation"))
    stack = reentrant(keys, stack, *_REENTRANT)
    if not keys.flag("use_liger_kernel") or not liger_patches(keys, model):
        return stack
    if stack.loss in WHOLE_LOSSES:
        # trl 1.16.0 trainer/sft_trainer.py and its like: fused_linear_cross_entropy False, for their own stands there.
        return fused_layers(stack)
    return replace(stack, settings=replace(stack.settings, loss="fused-linear"))


def _settings(case: ExportCase) -> dict[str, Any]:
    """Return the arguments of the training script."""
    p, job = case.plan, case.job
    precision = job.precision or case.stack.precision
    words: dict[str, Any] = {
        "model_name_or_path": _trainer.hub_id(case),
        "dtype": _PRECISIONS.get(precision, ("no", "float32"))[1],
        "block_size": job.seq_len,
        "per_device_train_batch_size": p.micro_batch,
        "gradient_accumulation_steps": max(job.global_batch // max(p.micro_batch * p.dp, 1), 1),
        "optim": _trainer.optimizer_word(job.optimizer),
    }
    if job.run_tokens:
        words["max_steps"] = round(job.run_tokens / job.tokens_per_step)
    if p.recompute == "full" and not p.sharding_rules.shards:
        words["gradient_checkpointing"] = True
        if "activations" in p.offload:
            words["activation_checkpointing_kwargs"] = {"offload": True}
    return words | _trainer.sync_words(case.stack)


def export(case: ExportCase) -> Exported:
    """Return the files of a training; raises `InputError` naming every field that the Trainer cannot be told."""
    case = worded(case)
    ours, differing = unexported(case.plan, _EXPORTED)
    stated = replace(case, plan=ours)
    words = _settings(stated)
    tree = _yaml.dump(fsdp.tree_of(stated) | {"mixed_precision": _mixed(case)})
    around = ImportContext(num_devices=ours.num_devices)
    back = _case(Keys(words, _TABLE), Launch(), "train.sh", around, fsdp.read(tree))
    refuse("transformers", differing | lost(stated, back), case)
    checked, accelerate = table(_TABLE)["checked"], table("fsdp.toml")["checked"]
    note = "--from train.sh reads both files; accelerate.yaml alone has no model, batch or length"
    notes = ("data, learning rate and checkpoints are yours to add, behind the script's name", note)
    head = f"# {case.model.name} on {ours.num_devices} devices, for accelerate {accelerate['version']}.\n"
    files = {"train.sh": _script(case, words, checked["version"]), "accelerate.yaml": head + tree}
    return Exported(system=checked["system"], version=checked["version"], files=files, notes=notes)


def _mixed(case: ExportCase) -> str:
    return _PRECISIONS.get(case.job.precision or case.stack.precision, ("no", ""))[0]


def _script(case: ExportCase, words: Mapping[str, Any], version: str) -> str:
    """Return the launch script."""
    arguments = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in words.items()}
    lines = [
        "    --" + (name if value is True else f"{name} {shlex.quote(str(value))}") for name, value in arguments.items()
    ]
    head = f"#!/bin/bash\n# {case.model.name} on {case.plan.num_devices} devices, as transformers {version} reads it.\n"
    start = 'accelerate launch --config_file accelerate.yaml run_clm.py "$@" \\\n'
    return head + start + " \\\n".join(lines) + "\n"
