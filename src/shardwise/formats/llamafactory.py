"""LLaMA-Factory's configuration, a flat YAML or the words of its command: full training, LoRA, QLoRA, OFT, freezing.

Source: llamafactory 0.9.5 hparams/{finetuning_args,model_args,training_args,data_args,parser}.py, whose parser was run
for defaults; what it does not say itself is transformers' TrainingArguments.
"""

from __future__ import annotations

import re
from typing import Any

from shardwise.formats import _trainer, _yaml
from shardwise.formats._checkpoints import attention_words, liger_patches, under_deepspeed
from shardwise.formats._exported import ExportCase, Exported
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys, table, top_level
from shardwise.formats._launch import started
from shardwise.formats._words import words_of
from shardwise.formats.megatron._beside import plan_beside
from shardwise.models import MOST_LAYERS, Model
from shardwise.plans import (
    OBJECTIVES,
    OFT_BLOCK,
    Plan,
    Recompute,
    Stack,
    Training,
    find_stack,
    fused_layers,
    rank_of,
    with_attention,
)
from shardwise.records import replace

_TABLE = "llamafactory.toml"
_OWN = frozenset(("finetuning_type", "cutoff_len", "stage", "template"))
_LORA = _trainer.AdapterKeys(
    rank="lora_rank", alpha="lora_alpha", dropout="lora_dropout", targets="lora_target", saved="additional_target",
    usual_rank=8, usual_targets=("all-linear",),
)  # fmt: skip
_OFT = replace(_LORA, rank="oft_rank", dropout="", targets="oft_target", usual_rank=0)
_EXPORTED = ("dp", "micro_batch", "sharding", "recompute", "offload")
_STAGES = {"sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "rm"}
# hparams/finetuning_args.py: a switch for each optimizer that transformers' own word does not name.
_SWITCHES = {"use_galore": "galore", "use_apollo": "apollo", "use_muon": "muon"}


# What no other trainer takes: its ways to train, or its own command with arguments.
_COMMAND = re.compile(r"--finetuning_type\b|llamafactory-cli train\s+(\\\n\s*)*--")


def recognises(name: str, text: str) -> bool:
    """Return whether a file is LLaMA-Factory's: YAML with a model's name and one of its own keys, or its command."""
    if not name.endswith((".yaml", ".yml")):
        return not name.endswith((".json", ".toml")) and bool(_COMMAND.search(text))
    keys = top_level(text)
    return "model_name_or_path" in keys and bool(keys & _OWN)


def read(text: str, source: str = "llamafactory.yaml", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of a configuration.

    >>> text = "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\nfinetuning_type: lora\nlora_target: all\nbf16: true"
    >>> case = read(text, around=ImportContext(num_devices=1))
    >>> case.job.adapter, case.job.rank, case.job.seq_len, case.plan.micro_batch, case.plan.recompute
    ('lora', 8, 2048, 8, 'full')
    """
    if source.endswith((".yaml", ".yml")):
        around.settings_alone(source)
        return _case(Keys(_yaml.parse(text, source), _TABLE, source), source, around)
    launch = started(text, {f"--{key}" for key in table(_TABLE)["read"]}.__contains__, source, around.variables)
    keys = Keys(_trainer.spelled_words(launch.arguments), _TABLE, source)
    _yaml.refuse_open(keys)
    # launcher.py: NNODES is 1 unless said.
    launched = around.num_devices or launch.launch.num_devices or launch.launch.devices_per_node
    case = _case(keys, source, replace(around, num_devices=launched))
    each = 0 if around.num_devices else launch.launch.devices_per_node
    return replace(case, devices_per_node=each, assumed=(*launch.notes, *case.assumed))


def _case(keys: Keys, source: str, around: ImportContext) -> Imported:
    """Return the case of settings."""
    if keys.flag("do_train") is False and (keys.flag("do_predict") or keys.flag("do_eval")):
        keys.fail("do_train", "trains nothing: the file asks for answers", "give the file of a training")
    if not around.num_devices and (workers := keys.whole("ray_num_workers")):
        around = replace(around, num_devices=workers)  # one process for each worker of Ray
    model = _trainer.model_named(keys, "model_name_or_path")
    launched = _trainer.deepspeed_case(keys, "deepspeed", source, around)
    stack = under_deepspeed(launched, find_stack("llama-factory"))
    core = {path: path for path in keys.values if path in keys.table["megatron"]["keys"]}
    if core:
        keys.table = keys.table | {"read": keys.table["read"] | dict.fromkeys(core, "plan")}
        plan, stack = plan_beside(keys, core, around.num_devices, ("model_name_or_path", model), _usual(keys))
    else:
        plan = _plan(keys, around.num_devices) if launched is None else launched.plan
        plan = replace(plan, recompute=_recompute(keys))
    if keys.flag("use_unsloth_gc") and plan.recompute == "full":
        plan = replace(plan, offload=("activations",))
    patched = bool(keys.flag("use_unsloth"))
    unsloth = patched and not core and launched is None
    if patched and not unsloth:
        keys.assumed.append("layers as they are: use_unsloth beside what splits the model is not counted")
    if unsloth:
        # model/model_utils/unsloth.py: its layers, and its checkpoints whatever disable_gradient_checkpointing says.
        stack = replace(find_stack("unsloth"), adapts_experts=stack.adapts_experts)
        plan = replace(plan, recompute="full", offload=("activations",))
    micro, steps = "per_device_train_batch_size", "gradient_accumulation_steps"
    plan, batch, times = _trainer.batches(keys, plan, micro, steps, 8)
    seq_len = keys.whole("cutoff_len") or 2048
    job = Training(
        seq_len=seq_len,
        global_batch=batch,
        precision=_recipe(keys, bool(core), unsloth) if launched is None else launched.job.precision,
        optimizer=_optimizer(keys),
        **_adapter(keys),
        **_objective(keys),
    )
    job = _trainer.lasting(job, keys.whole("max_steps", rest=True) or 0)
    packed = keys.flag("packing") or keys.flag("neat_packing") or keys.word("stage") == "pt"
    if not packed:
        _trainer.say_unpacked(keys, seq_len)
    stack = stack if unsloth else _stack(keys, stack, model)
    return keys.case(
        source, model=model, plan=plan, job=job, stack=stack, num_devices=around.num_devices,
        accumulation=0 if batch else times,
    )  # fmt: skip


def _usual(keys: Keys) -> dict[str, Any]:
    """Return what its adapters of Megatron-Core set where nobody says: one layer a group of full recomputation.

    Source: github.com/alibaba/ROLL 2d35671 mcore_adapter/src/mcore_adapter/models/model_config.py __post_init__.
    """
    open_ = keys.raw("recompute_method") is None and keys.raw("recompute_num_layers") is None
    whole = keys.word("recompute_granularity") == "full" and open_
    return {"recompute_method": "uniform", "recompute_num_layers": 1} if whole else {}


def _objective(keys: Keys) -> dict[str, Any]:
    """Return what a stage optimises; two losses of preferences read no reference (hparams/finetuning_args.py).

    Beside LoRA the base is the reference, unless another model is named; else a copy is loaded
    (train/trainer_utils.py create_ref_model).
    """
    stage, loss = keys.word("stage"), keys.word("pref_loss")
    fields = _trainer.objective(keys, loss if stage == "dpo" and loss in ("orpo", "simpo") else stage)
    copied = keys.raw("ref_model") is not None or keys.word("finetuning_type") == "oft"
    compares = fields and fields["reference"] != "none" and OBJECTIVES[fields["method"]].reference
    return fields | ({"reference": "copy"} if copied and compares else {})


def _plan(keys: Keys, devices: int) -> Plan:
    sharded = keys.raw("fsdp") not in (None, "", False) or any(path.startswith("fsdp_config") for path in keys.values)
    kept = keys.flag("fsdp_config.reshard_after_forward") is False or "shard_grad_op" in keys.word("fsdp")
    return _trainer.spread(keys, devices, {}, "none" if not sharded else "shard-grad-op" if kept else "fsdp")


def _recompute(keys: Keys) -> Recompute:
    """Return what is recomputed: all layers unless told (908cd68 model/model_utils/checkpointing.py)."""
    return "none" if keys.flag("disable_gradient_checkpointing") else "full"


def _recipe(keys: Keys, core: bool, unsloth: bool) -> str:
    """Return the recipe, that of Megatron-Core or Unsloth where one of them keeps what trains."""
    own = _precision(keys)
    return "bf16" if core else "" if unsloth and own in ("amp-bf16", "bf16-pure") else own


def _precision(keys: Keys) -> str:
    """Return the recipe: what trains is cast to fp32 unless pure_bf16, and GEMMs take 16 bits where asked."""
    if keys.flag("pure_bf16"):
        return "bf16-pure"
    if keys.flag("fp16"):
        return "amp-fp16"
    return "amp-bf16" if keys.flag("bf16") else "fp32"


def _optimizer(keys: Keys) -> str:
    asked = [ours for theirs, ours in _SWITCHES.items() if keys.flag(theirs)]
    return asked[0] if asked else _trainer.optimizer_of(keys, "optim")


def _adapter(keys: Keys) -> dict[str, Any]:
    kind, bits = keys.word("finetuning_type") or "lora", keys.whole("quantization_bit")
    if kind not in ("lora", "oft", "freeze", "full"):
        keys.fail("finetuning_type", "is not a method that is read", "use lora, oft, freeze or full")
    if kind not in ("lora", "oft"):
        if bits:
            keys.fail("quantization_bit", "has weights that cannot be trained", "use finetuning_type: lora")
        return {"trains": unfrozen(keys)} if kind == "freeze" else {}
    switches = {"use_dora": "dora", "use_rslora": "rslora"}
    method = next((ours for theirs, ours in switches.items() if keys.flag(theirs)), kind)
    if method == "lora" and keys.raw("loraplus_lr_ratio") is not None:
        method = "lora-plus"
    fields = _trainer.adapted(keys, method, _OFT if kind == "oft" else _LORA)
    if kind == "oft":
        side = keys.whole("oft_block_size") or OFT_BLOCK
        fields["oft_block_size"] = 0 if fields["rank"] or side == OFT_BLOCK else side
    if keys.flag("pure_bf16") and not bits:
        fields["adapter_precision"] = "bf16"
    return fields | {"base": base_of(keys, bits, keys.word("quantization_method"))}


def unfrozen(keys: Keys, under: str = "") -> tuple[str, ...]:
    """Return what trains under freeze: so many last layers, or first ones where the number is negative.

    Source: model/adapter.py _setup_freeze_tuning.
    """
    count = keys.raw(f"{under}freeze_trainable_layers")
    count = 2 if count is None else count
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < abs(count) < MOST_LAYERS:
        rule = "must be a number of layers, negative for the first"
        keys.fail(f"{under}freeze_trainable_layers", rule, "write for example 2")
        count = 2
    part = words_of(keys, f"{under}freeze_trainable_modules")
    if part and part != ("all",):
        keys.assumed.append(f"whole layers train: {', '.join(part)} alone are not told apart")
    more = words_of(keys, f"{under}freeze_extra_modules")
    own = [_trainer.SAVED[word] for word in more if word in _trainer.SAVED]
    keys.assumed += [
        f"{word} stays frozen: it is no part that is told apart" for word in more if word not in _trainer.SAVED
    ]
    return (f"last:{count}" if count > 0 else f"first:{-count}", *own)


def base_of(keys: Keys, bits: int | None, way: str, under: str = "") -> str:
    """Return the type of frozen weights of so many bits by a library, bitsandbytes where none is named."""
    if not bits:
        return ""
    ways = (way or "bnb", keys.word(f"{under}quantization_type") or "nf4")
    if bits not in (4, 8) or ways not in (("bnb", "nf4"), ("bitsandbytes", "nf4")):  # until 0.9.1 it was spelled out
        rule = "is read for bitsandbytes' 4 bits in nf4 and 8 bits alone"
        keys.fail(f"{under}quantization_bit", rule, "use 4 or 8 with bnb")
    if bits == 8:
        return "int8"
    return "nf4" if keys.flag(f"{under}double_quantization") is False else "nf4-dq"


# model/model_utils/attention.py configure_attn_implementation; auto is transformers' own choice
# but for gpt_oss (`Stack.loads_sinks_kernel`).
_ATTENTION = {"disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}


def _stack(keys: Keys, stack: Stack, model: Model | None) -> Stack:
    asked = keys.word("flash_attn")
    stack = with_attention(_trainer.synchronised(keys, stack), _ATTENTION.get(asked, ""))
    if model is not None and model.family == "gemma2" and asked in ("", "auto"):
        keys.assumed.append(
            "eager attention: of Gemma 2, auto is fa2 where flash_attn is installed: give flash_attn: fa2"
        )
    if keys.flag("use_reentrant_gc") is False:
        stack = replace(stack, checkpoint_reenters="")
    if not keys.flag("enable_liger_kernel") or not liger_patches(keys, model):
        return stack
    if keys.word("stage") not in ("", "sft", "pt"):
        # model/model_utils/liger_kernel.py require_logits: stages that read logits have no fused linear cross entropy.
        return fused_layers(stack)
    return replace(stack, settings=replace(stack.settings, loss="fused-linear"))


def tree_of(case: ExportCase) -> dict[str, Any]:
    """Return the configuration of a case, without DeepSpeed's file or accelerate's."""
    p, job = case.plan, case.job
    precision = job.precision or case.stack.precision
    tree: dict[str, Any] = {
        "model_name_or_path": _trainer.hub_id(case),
        "stage": _STAGES.get(job.method, "sft"),
        "do_train": True,
        **_adapter_words(job),
        "cutoff_len": job.seq_len,
        **({"packing": True} if job.method == "sft" else {}),
        "per_device_train_batch_size": p.micro_batch,
        "gradient_accumulation_steps": max(job.global_batch // max(p.micro_batch * p.dp, 1), 1),
        "optim": _trainer.optimizer_word(job.optimizer),
        "disable_gradient_checkpointing": p.recompute != "full",
        **({} if case.stack.checkpoint_reenters else {"use_reentrant_gc": False}),
    }
    if job.method == "dpo":
        tree["pref_loss"] = "orpo" if job.reference == "none" else "sigmoid"
    if job.adapter == "lora" and job.reference == "copy":
        tree["ref_model"] = _trainer.hub_id(case)
    if job.run_tokens:
        tree["max_steps"] = round(job.run_tokens / job.tokens_per_step)
    switch = next((theirs for theirs, ours in _SWITCHES.items() if ours == job.optimizer), "")
    if switch:
        tree = {name: value for name, value in tree.items() if name != "optim"} | {switch: True}
    if p.sharding_rules.shards:
        tree |= {"fsdp": f"{'shard_grad_op' if p.sharding_rules.keeps_gathered else 'full_shard'} auto_wrap"}
    kinds = {"bf16-pure": "pure_bf16", "amp-bf16": "bf16", "amp-fp16": "fp16"}
    # model/adapter.py: what trains, adapters too, is cast to fp32 unless pure_bf16.
    narrow = bool(job.adapter) and job.adapter_precision == "bf16"
    tree |= {"pure_bf16": True} if narrow else {kinds[precision]: True} if precision in kinds else {}
    if "activations" in p.offload:
        tree["use_unsloth_gc"] = True
    if case.stack.settings.loss == "fused-linear" or case.stack.norm == "fused":
        tree["enable_liger_kernel"] = True
    attention = attention_words(case.stack, find_stack("llama-factory")).get("attn_implementation", "")
    if asked := next((theirs for theirs, word in _ATTENTION.items() if word == attention), ""):
        tree["flash_attn"] = asked
    return tree | _trainer.sync_words(case.stack)


def _adapter_words(job: Training) -> dict[str, Any]:
    if not job.adapter:
        words = freeze_words(job)
        return {"finetuning_type": "freeze", **words} if words else {"finetuning_type": "full"}
    kind = "oft" if job.adapter == "oft" else "lora"
    named = _OFT if kind == "oft" else _LORA
    targets = "all" if job.targets in ((), ("all-linear",)) else ",".join(job.targets)
    tree: dict[str, Any] = {"finetuning_type": kind, named.rank: rank_of(job), named.targets: targets}
    tree |= {"oft_block_size": job.oft_block_size} if job.oft_block_size else {}
    tree |= {"lora_dropout": job.adapter_dropout} if job.adapter_dropout else {}
    tree |= {"lora_alpha": round(job.adapter_alpha)} if job.adapter_alpha and kind == "lora" else {}
    switches: dict[str, dict[str, Any]] = {"dora": {"use_dora": True}, "rslora": {"use_rslora": True}}
    tree |= (switches | {"lora-plus": {"loraplus_lr_ratio": 16.0}}).get(job.adapter, {})
    saved = _trainer.saved_words(job)
    tree |= {"additional_target": ",".join(saved)} if saved else {}
    bits = {"nf4-dq": 4, "nf4": 4, "int8": 8}.get(job.base)
    tree |= {"quantization_bit": bits} if bits else {}
    return tree | ({"double_quantization": False} if job.base == "nf4" else {})


def freeze_words(job: Training) -> dict[str, Any]:
    """Return what says which layers train, nothing where all do."""
    kind, _, count = job.trains[0].partition(":") if job.trains else ("", "", "")
    if kind not in ("first", "last"):
        return {}
    tree: dict[str, Any] = {"freeze_trainable_layers": int(count) * (1 if kind == "last" else -1)}
    saved = _trainer.saved_words(job)
    return tree | ({"freeze_extra_modules": ",".join(saved)} if saved else {})


def export(case: ExportCase) -> Exported:
    """Return LLaMA-Factory's YAML for a case; raises `InputError` naming every field that it cannot be told."""
    text = _trainer.written(case, _EXPORTED, tree_of, read)
    nodes, each = _trainer.processes(case)
    start = f"FORCE_TORCHRUN=1 NNODES={nodes} NPROC_PER_NODE={each} llamafactory-cli train llamafactory.yaml"
    return _trainer.checked_file(case, _TABLE, "llamafactory.yaml", text, start)
