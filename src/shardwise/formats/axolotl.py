"""axolotl's configuration, a flat YAML: full training, LoRA and QLoRA, under FSDP, DeepSpeed or neither.

Source: axolotl 0.19.0 axolotl/utils/schemas (config.py, training.py, peft.py, fsdp.py), whose AxolotlInputConfig was
run for defaults and for what one key implies of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from shardwise.formats import _trainer, _yaml, fsdp
from shardwise.formats._checkpoints import attention_words, liger_patches, reentrance_words, reentrant, under_deepspeed
from shardwise.formats._exported import ExportCase, Exported
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys, top_level
from shardwise.formats._unfrozen import unfrozen_parts
from shardwise.formats._words import words_of
from shardwise.models import Model
from shardwise.plans import Plan, Recompute, Sharding, Stack, Training, find_stack, rank_of, shard_of, with_attention
from shardwise.records import replace

_TABLE = "axolotl.toml"
_SIZES = {
    "tp": "tensor_parallel_size", "cp": "context_parallel_size", "ep": "expert_parallel_size",
    "shard": "dp_shard_size",
    "replicate": "dp_replicate_size",
}  # fmt: skip
_ADAPTER = _trainer.AdapterKeys(
    rank="lora_r", alpha="lora_alpha", dropout="lora_dropout", targets="lora_target_modules",
    saved="lora_modules_to_save", usual_rank=8, usual_targets=("all-linear",), parameters="lora_target_parameters",
)  # fmt: skip
_EXPORTED = ("tp", "cp", "dp", "ep", "micro_batch", "sharding", "shard", "recompute", "offload")
_FSDP_OFFLOAD = ("optimizer", "gradients", "parameters")
_LIGER, _CCE = "axolotl.integrations.liger.LigerPlugin", "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"


def recognises(name: str, text: str) -> bool:
    """Return whether a file is axolotl's: YAML with a base model and no name of another trainer's."""
    return name.endswith((".yaml", ".yml")) and "base_model" in top_level(text)


def read(text: str, source: str = "axolotl.yaml", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of a configuration.

    >>> text = "base_model: meta-llama/Llama-3.1-8B\nadapter: qlora\nload_in_4bit: true\nlora_r: 16"
    >>> case = read(text + "\nlora_target_linear: true\nsequence_len: 4096", around=ImportContext(num_devices=1))
    >>> case.model.name, case.job.adapter, case.job.base, case.job.rank, case.job.seq_len
    ('llama-3.1-8b', 'lora', 'nf4-dq', 16, 4096)
    """
    around.settings_alone(source)
    keys = Keys(_yaml.parse(text, source), _TABLE, source)
    model = _trainer.model_named(keys, "base_model")
    launched = _trainer.deepspeed_case(keys, "deepspeed", source, around)
    plan = _plan(keys, around.num_devices) if launched is None else launched.plan
    plan = fsdp.unit_by_unit(replace(plan, recompute=_recompute(keys), offload=_offload(keys, plan)))
    plan, batch, steps = _batches(keys, plan)
    seq_len = keys.whole("sequence_len") or 512
    job = Training(
        seq_len=seq_len,
        global_batch=batch,
        precision=_precision(keys) if launched is None else launched.job.precision,
        optimizer=_trainer.optimizer_of(keys, "optimizer"),
        **(_adapter(keys) or {"trains": unfrozen_parts(keys, "unfrozen_parameters", model)}),
        **_objective(keys),
    )
    job = _trainer.lasting(job, keys.whole("max_steps") or 0)
    if not keys.flag("sample_packing") and not keys.flag("pad_to_sequence_len"):
        _trainer.say_unpacked(keys, seq_len)
    stack = _stack(keys, under_deepspeed(launched, find_stack("axolotl")), model)
    stack = _rollouts(keys, stack) if job.method == "grpo" else stack
    devices = _trainer.world(keys, around.num_devices, plan, _SIZES["shard"], _SIZES["replicate"])
    return keys.case(
        source, model=model, plan=plan, job=job, stack=stack, num_devices=devices,
        accumulation=0 if batch else steps,
    )  # fmt: skip


def _rollouts(keys: Keys, stack: Stack) -> Stack:
    """Return a stack with where an engine of rollouts is that shares the trainer's devices.

    core/trainers/grpo/__init__.py: colocate as TRL has it, with vLLM's share from the engine's own settings.
    """
    if not keys.flag("trl.use_vllm") or keys.word("trl.vllm_mode") != "colocate":
        return stack
    if keys.flag("trl.vllm_enable_sleep_mode"):
        return replace(stack, settings=replace(stack.settings, rollout="asleep"))
    keys.keep_engine("vllm.gpu_memory_utilization", 0.9)
    return stack


def _objective(keys: Keys) -> dict[str, Any]:
    """Return what `rl` or `reward_model` optimises; TRL's rewards read a reference where beta is above 0."""
    word = keys.word("rl") or ("reward" if keys.flag("reward_model") else "")
    alone = word in ("grpo", "gdpo") and not keys.raw("trl.beta")
    # core/builders/rl.py hands log-probabilities from before the run to DPO's trainer alone.
    before = keys.flag("precompute_ref_log_probs") and word != "kto"
    return _trainer.objective(keys, word, not alone and not before)


def _plan(keys: Keys, devices: int) -> Plan:
    listed = keys.raw("fsdp") or any(path.startswith("fsdp_config") for path in keys.values)
    sharding: Sharding = "none"
    if listed or keys.whole(_SIZES["shard"]):
        kept = any(keys.flag(path) is False for path in _fsdp("reshard_after_forward"))
        word = next((word for path in _fsdp("sharding_strategy") if (word := keys.word(path))), "")
        sharding = "none" if word == "no_shard" else "shard-grad-op" if kept or word == "shard_grad_op" else "fsdp"
        if word.startswith("hybrid"):
            keys.assumed.append(f"sharding fsdp: the groups of {word} are nodes, which the file does not count")
    sizes = dict(_SIZES)
    for path in ("sequence_parallel_degree", "context_parallel.size"):
        if keys.raw(path) is not None:
            sizes["cp"] = path
    # utils/distributed.py _get_parallel_config_kwargs: copies that are not stated are what shards leave over.
    return _trainer.spread(keys, devices, sizes, sharding, copied=True)


def _fsdp(name: str) -> tuple[str, str]:
    """Return the paths of a setting of FSDP: version 1 spells it with a prefix."""
    return f"fsdp_config.{name}", f"fsdp_config.fsdp_{name}"


def _checkpoints(keys: Keys) -> bool:
    kept = keys.raw("gradient_checkpointing")
    return kept is True or (isinstance(kept, str) and kept.lower() not in ("false", ""))


def _hosted(keys: Keys) -> str:
    """Return what is sent to the host: "inputs" of checkpoints, or all that is "saved", which replaces recomputation.

    axolotl 0.19.0 core/builders/base.py _configure_gradient_checkpointing and loaders/model.py
    _apply_activation_checkpointing: checkpointing is turned off, and without an adapter each layer is wrapped again.
    """
    path = "activation_offloading"
    moved, word = keys.raw(path) or "", keys.word("gradient_checkpointing")
    if moved and not _checkpoints(keys):
        keys.fail(path, "needs gradient_checkpointing, beside an adapter too", "write gradient_checkpointing: true")
    if moved == "hidden_states" or (not moved and word.startswith("unsloth")):
        return "inputs"
    if not moved and not word.startswith("offload"):
        return ""
    return "saved" if keys.word("adapter") else "inputs"


def _recompute(keys: Keys) -> Recompute:
    on = _checkpoints(keys) and _hosted(keys) != "saved"
    return "full" if on or any(keys.flag(path) for path in _fsdp("activation_checkpointing")) else "none"


def _offload(keys: Keys, plan: Plan) -> tuple[str, ...]:
    offload = plan.offload
    if any(keys.flag(path) for path in _fsdp("offload_params")):
        offload += tuple(word for word in _FSDP_OFFLOAD if word not in offload)
    return (*offload, "activations") if _hosted(keys) and "activations" not in offload else offload


def _batches(keys: Keys, plan: Plan) -> tuple[Plan, int, int]:
    whole = keys.whole("batch_size")
    if whole and keys.raw("gradient_accumulation_steps") is not None:
        keys.fail("batch_size", "stands beside gradient_accumulation_steps", "keep one of the two")
    plan, batch, steps = _trainer.batches(keys, plan, "micro_batch_size", "gradient_accumulation_steps", 1)
    return plan, whole or batch, steps


def _precision(keys: Keys) -> str:
    """Return the recipe: weights are loaded in 16 bits under bf16, which is auto, and in fp32 where nothing is narrow.

    axolotl 0.21.0 utils/config/__init__.py resolve_dtype sets torch_dtype, which loaders/model.py loads in.
    """
    if keys.flag("fp16") or keys.flag("float16"):
        return "amp-fp16"
    wide = keys.flag("float32") or (keys.raw("bf16") is False and not keys.flag("bfloat16"))
    return "fp32" if wide else "bf16-pure"


def _adapter(keys: Keys) -> dict[str, Any]:
    method = keys.word("adapter")
    if method not in ("", "lora", "qlora"):
        keys.fail("adapter", "is not a method that is read", "use lora or qlora")
    narrow, wide = keys.flag("load_in_4bit"), keys.flag("load_in_8bit")
    if method == "qlora" and not narrow:
        keys.fail("adapter", "needs load_in_4bit", "write load_in_4bit: true")
    if not method:
        if narrow or wide:
            path = "load_in_4bit" if narrow else "load_in_8bit"
            keys.fail(path, "has weights that cannot be trained", "add adapter: qlora")
        return {}
    kind = "dora" if keys.flag("peft_use_dora") else "rslora" if keys.flag("peft_use_rslora") else "lora"
    if kind == "lora" and keys.raw("loraplus_lr_ratio") is not None:
        kind = "lora-plus"
    fields = _trainer.adapted(keys, kind, _ADAPTER)
    if keys.flag("lora_target_linear"):
        fields["targets"] = ("all-linear",)
    if keys.flag("peft_autocast_adapter_dtype") is False and not narrow and not wide:
        fields["adapter_precision"] = "bf16"
    # axolotl/loaders/model.py: BitsAndBytesConfig with bnb_4bit_use_double_quant True, nf4.
    return fields | {"base": "nf4-dq" if narrow else "int8" if wide else ""}


_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


# utils/schemas/enums.py LEGACY_ATTN_FLAG_TO_IMPL, in its order.
_TILE = 32768  # tokens of a shard of tiled_mlp where their number is not set, monkeypatch/tiled_mlp/patch.py
_ATTENTION = {
    "xformers_attention": "xformers", "sage_attention": "sage", "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
}  # fmt: skip


def _stack(keys: Keys, stack: Stack, model: Model | None) -> Stack:
    flags = [word for name, word in _ATTENTION.items() if keys.flag(name)]
    stack = with_attention(stack, keys.word("attn_implementation") or next(iter(flags), ""))
    # utils/schemas/config.py check_auto_enable_lora_kernels: on unless one of them is said, and then those alone.
    kernels = [keys.flag(name) for name in _KERNELS]
    if any(one is not None for one in kernels) and not kernels[0]:
        stack = replace(stack, adapter_kernels="")
    stack = _checkpointed(keys, stack)
    stack = _liger_layers(keys, stack, model)
    settings = _trainer.synchronised(keys, stack).settings
    if keys.flag("quantize_moe_experts"):
        settings = replace(settings, quantize_moe_experts=True)
    if keys.flag("liger_fused_linear_cross_entropy"):
        settings = replace(settings, loss="fused-linear")
    elif keys.flag("cut_cross_entropy") or _CCE in words_of(keys, "plugins"):
        settings = replace(settings, loss="cce")
    elif keys.flag("chunked_cross_entropy"):
        settings = replace(settings, loss="chunked")
    if keys.flag("tiled_mlp"):
        usual = ceil((keys.whole("sequence_len") or 1) / _TILE)
        settings = replace(settings, tile_mlp=keys.whole("tiled_mlp_num_shards") or usual)
    return replace(stack, settings=settings)


def _checkpointed(keys: Keys, stack: Stack) -> Stack:
    """Return a stack with its kind of checkpoints: those that axolotl or accelerate wrap itself are not reentrant."""
    given = reentrant(keys, stack, "gradient_checkpointing_kwargs.use_reentrant")
    if not _checkpoints(keys) and any(keys.flag(path) for path in _fsdp("activation_checkpointing")):
        return replace(stack, checkpoint_reenters="")
    wrapped = _hosted(keys) == "inputs" and keys.raw("activation_offloading") != "hidden_states"
    return stack if wrapped else given


def _liger_layers(keys: Keys, stack: Stack, model: Model | None) -> Stack:
    """Return a stack with the layers that Liger's plugin fuses, each by a switch (integrations/liger/args.py)."""
    fused = any([keys.flag(name) for name in ("liger_rms_norm", "liger_glu_activation", "liger_swiglu")])
    if _LIGER not in words_of(keys, "plugins") or (fused and not liger_patches(keys, model)):
        return stack
    if keys.flag("liger_rms_norm"):
        stack = replace(stack, norm="fused")
    if keys.flag("liger_glu_activation") or keys.flag("liger_swiglu"):
        stack = replace(stack, activation="fused")
    return stack


def tree_of(case: ExportCase) -> dict[str, Any]:
    """Return the configuration of a case."""
    p, job = case.plan, case.job
    # schemas/validation.py check_context_parallel_size: packed rings take one sequence at a time.
    micro = 1 if p.cp > 1 else p.micro_batch
    steps = max(job.global_batch // max(micro * p.dp, 1), 1)
    precision = job.precision or case.stack.precision
    tree: dict[str, Any] = {
        "base_model": _trainer.hub_id(case),
        "sequence_len": job.seq_len,
        **_objective_words(job),
        "micro_batch_size": micro,
        "gradient_accumulation_steps": steps,
        "optimizer": _trainer.optimizer_word(job.optimizer),
        **({"fp16": True, "bf16": False} if precision == "amp-fp16" else {"bf16": precision != "fp32"}),
        # Packed sequences stay apart, and context parallelism runs, with this one alone.
        "attn_implementation": "flash_attention_2",
        **attention_words(case.stack, find_stack("axolotl")),
        "gradient_checkpointing": p.recompute == "full" or "activations" in p.offload,
        "learning_rate": 2e-5,
    }
    if p.recompute == "full":
        tree |= reentrance_words(case.stack, find_stack("axolotl"))
    if "activations" in p.offload:
        tree["activation_offloading"] = "hidden_states" if job.adapter and p.recompute == "full" else True
    if job.run_tokens:
        tree["max_steps"] = round(job.run_tokens / job.tokens_per_step)
    return tree | _sharded(p) | _adapter_words(job) | _loss_words(case.stack)


def _objective_words(job: Training) -> dict[str, Any]:
    """Return what is optimised: packed rows of text, or pairs that are padded to the length of a sequence."""
    if job.method not in ("dpo", "kto", "reward"):
        return {"sample_packing": True}
    pairs = {"sample_packing": False, "pad_to_sequence_len": True}
    if job.method == "reward":
        return {**pairs, "reward_model": True, "model_type": "AutoModelForSequenceClassification", "num_labels": 1}
    if job.method == "kto":
        return {**pairs, "rl": "kto"}
    return {**pairs, "rl": "orpo" if job.reference == "none" else "dpo"}


def _sharded(p: Plan) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    if p.sharding_rules.shards:
        config = {
            "reshard_after_forward": not p.sharding_rules.keeps_gathered,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "offload_params": "parameters" in p.offload,
            "state_dict_type": "SHARDED_STATE_DICT",
        }
        tree = {"fsdp_version": 2, "fsdp_config": config, "dp_shard_size": shard_of(p)}
        tree["dp_replicate_size"] = max(p.dp // shard_of(p) // p.ep, 1)
    if p.ep > 1:
        tree |= {"plugins": ["axolotl.integrations.expert_parallel.ExpertParallelPlugin"], "expert_parallel_size": p.ep}
    degrees = {"tensor_parallel_size": p.tp, "context_parallel_size": p.cp}
    return tree | {name: value for name, value in degrees.items() if value > 1}


def _adapter_words(job: Training) -> dict[str, Any]:
    if not job.adapter:
        return {}
    narrow = job.base.startswith("nf4")
    tree: dict[str, Any] = {"adapter": "qlora" if narrow else "lora", "lora_r": rank_of(job)}
    tree |= {"lora_alpha": job.adapter_alpha or 16, "lora_dropout": job.adapter_dropout}
    if narrow or job.base == "int8":
        tree["load_in_4bit" if narrow else "load_in_8bit"] = True
    if job.targets in ((), ("all-linear",)):
        tree["lora_target_linear"] = True
    else:
        tree["lora_target_modules"] = list(job.targets)
    kinds = {"dora": "peft_use_dora", "rslora": "peft_use_rslora"}
    if job.adapter in kinds:
        tree[kinds[job.adapter]] = True
    elif job.adapter == "lora-plus":
        tree["loraplus_lr_ratio"] = 16
    saved = _trainer.saved_words(job)
    tree |= {"lora_modules_to_save": saved} if saved else {}
    return tree | ({"peft_autocast_adapter_dtype": False} if job.adapter_precision == "bf16" else {})


def _loss_words(stack: Stack) -> dict[str, Any]:
    loss = stack.settings.loss
    words: Mapping[str, dict[str, Any]] = {
        "fused-linear": {"plugins": [_LIGER], "liger_fused_linear_cross_entropy": True},
        "cce": {"plugins": [_CCE], "cut_cross_entropy": True},
        "chunked": {"chunked_cross_entropy": True},
    }
    fused = {"liger_rms_norm": stack.norm == "fused", "liger_glu_activation": stack.activation == "fused"}
    layers = {name: True for name, on in fused.items() if on}
    own = words.get(loss, {}) | layers
    if layers:
        own["plugins"] = list(dict.fromkeys([_LIGER, *own.get("plugins", [])]))
    tiles = stack.settings.tile_mlp
    tiled = {"tiled_mlp": True, "tiled_mlp_num_shards": tiles} if tiles > 1 else {}
    modules = {} if stack.adapter_kernels else dict.fromkeys(_KERNELS, False)
    experts = {"quantize_moe_experts": True} if stack.settings.quantize_moe_experts else {}
    return own | experts | tiled | modules | _trainer.sync_words(stack)


def export(case: ExportCase) -> Exported:
    """Return axolotl's YAML for a case; raises `InputError` naming every field that it cannot be told."""
    text = _trainer.written(case, _EXPORTED, tree_of, read)
    nodes, _ = _trainer.processes(case)
    rank = f" --num_machines {nodes} --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR" if nodes > 1 else ""
    port = " --main_process_port $MASTER_PORT" if nodes > 1 else ""
    start = f"accelerate launch --num_processes {case.plan.num_devices}{rank}{port} -m axolotl.cli.train axolotl.yaml"
    return _trainer.checked_file(case, _TABLE, "axolotl.yaml", text, start)
