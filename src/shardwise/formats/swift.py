"""ms-swift's launches: `swift sft`, `pt` and `rlhf`, and `megatron sft`, `pt` and `rlhf`; a command, or its YAML.

Sources: ms-swift 4.6.0 swift/cli/main.py, arguments/{sft,rlhf,tuner}_args.py and base_args, trainers/arguments.py,
megatron/arguments/megatron_args.py; 3.12.0 llm/argument and 2.6.1 llm/utils/argument.py for what they call otherwise.
Nothing writes them.
"""

from __future__ import annotations

import re
from math import ceil, gcd
from typing import Any

from shardwise.formats import _trainer, _yaml
from shardwise.formats._checkpoints import liger_patches, reentrant, under_deepspeed, with_prompts
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys, table, top_level
from shardwise.formats._launch import started
from shardwise.formats._words import words_of
from shardwise.formats.megatron._beside import plan_beside
from shardwise.models import Attention, Model
from shardwise.plans import OBJECTIVES, Plan, Recompute, Stack, Training, find_stack, fused_layers, with_attention
from shardwise.records import replace

_TABLE = "swift.toml"
_COMMAND = re.compile(
    r"\b(?:swift[ \t]+(?:sft|pt|rlhf)|megatron[ \t]+(?:sft|pt|rlhf)|swift/cli/(?:_megatron/)?\w+\.py)\b"
)
_MEGATRON = re.compile(r"\bmegatron[ \t]+(?:sft|pt|rlhf)\b|_megatron/")
_OWN = frozenset(("tuner_type", "train_type", "attn_impl", "torch_dtype", "rlhf_type", "max_length"))
_LORA = _trainer.AdapterKeys(
    rank="lora_rank", alpha="lora_alpha", dropout="lora_dropout", targets="target_modules", saved="modules_to_save",
    usual_rank=8, usual_targets=("all-linear",), parameters="target_parameters",
)  # fmt: skip
_USUAL_DROPOUT = 0.05
# tuner_type -> the method; a rank of its own where it has one.
_METHODS = {"lora": "lora", "lora_llm": "lora", "vera": "vera", "boft": "boft", "fourierft": "fourierft",
            "adalora": "adalora"}  # fmt: skip
_RANKS = {"vera": ("vera_rank", 256), "adalora": ("adalora_init_r", 12)}
_ATTENTION = {"flash_attn": "flash_attention_2", "flash_attention_2": "flash_attention_2", "sdpa": "sdpa",
              "eager": "eager"}  # fmt: skip
_PLUGINS = {"galore": "galore", "muon": "muon", "lorap": "", "default": "", "multimodal": ""}
# What its arguments set of Megatron-Core where nobody says: megatron/arguments/megatron_args.py.
_CORE_USUAL: dict[str, Any] = {
    "recompute_granularity": "selective", "use_distributed_optimizer": True, "moe_grouped_gemm": True,
    "cross_entropy_loss_fusion": True, "overlap_p2p_comm": True, "attention_backend": "flash",
    "data_parallel_sharding_strategy": "optim_grads_params", "expert_tensor_parallel_size": 1,
    "create_attention_mask_in_dataloader": False,
}  # fmt: skip


def recognises(name: str, text: str) -> bool:
    """Return whether a file is ms-swift's: its command, or YAML with a model and one of its own keys."""
    if name.endswith((".yaml", ".yml")):
        keys = top_level(text)
        return "model" in keys and bool(keys & _OWN) and bool(keys & {"dataset", "cached_dataset"})
    return not name.endswith((".json", ".toml")) and bool(_COMMAND.search(_code(text)))


def _code(text: str) -> str:
    """Return a script without its comments, each command on a line."""
    return re.sub(r"[ \t]*\\\r?\n[ \t]*", " ", re.sub(r"(?m)(^|\s)#.*$", "", text))


def read(text: str, source: str = "train.sh", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of a command or a script of it, or of the YAML that its commands take.

    >>> text = "NPROC_PER_NODE=4 swift sft --model Qwen/Qwen3-8B --dataset d --max_length 4096 --packing true"
    >>> case = read(text)
    >>> case.num_devices, case.job.adapter, case.job.rank, case.job.seq_len, case.job.global_batch, case.plan.recompute
    (4, 'lora', 8, 4096, 16, 'full')
    """
    if source.endswith((".yaml", ".yml")):
        around.settings_alone(source)
        tree = _yaml.parse(text, source)
        environment = tree.pop("ENV", None) if isinstance(tree, dict) else None
        each = environment.get("NPROC_PER_NODE") if isinstance(environment, dict) else None
        keys = Keys(tree, _TABLE, source)
        core = any(path in keys.values for path in ("micro_batch_size", "recompute_granularity"))
        devices = around.num_devices or (each if isinstance(each, int) and each > 0 else 0)
        return _case(keys, source, replace(around, num_devices=devices), core)
    own_table = table(_TABLE)
    known = {f"--{key}" for key in (*own_table["read"], *own_table["other_releases"])}
    launch = started(text, known.__contains__, source, around.variables)
    keys = Keys(_trainer.spelled_words((*launch.arguments, *around.more)), _TABLE, source)
    _yaml.refuse_open(keys)
    command = next((line for line in _code(text).splitlines() if _COMMAND.search(line)), "")
    own = re.search(r"\bNPROC_PER_NODE=(\d{1,6})\b", command)
    each = int(own[1]) if own else launch.launch.devices_per_node
    nodes = launch.launch.num_devices // max(launch.launch.devices_per_node, 1)
    # As many processes as a node has, on one node unless NNODES says more.
    devices = around.num_devices or each * max(nodes, 1) or launch.launch.num_devices
    seen, core = _visible(command) or _visible(text), bool(_MEGATRON.search(command))
    alone = not devices and seen > 1 and not core
    within = replace(around, num_devices=devices if devices or core else max(seen, 1))
    case = _case(keys, source, within, core, alone)
    each = 0 if around.num_devices else each
    return replace(case, devices_per_node=each, assumed=(*launch.notes, *case.assumed))


def _visible(text: str) -> int:
    """Return the devices that one process sees (CUDA_VISIBLE_DEVICES), 0 where that is not said."""
    listed = re.search(
        r"\b(?:CUDA|ASCEND_RT)_VISIBLE_DEVICES=[\"']?(\d+(?:,\d+)*)\b", re.sub(r"(?m)^\s*#.*$", "", text)
    )
    return len(listed[1].split(",")) if listed else 0


def _case(keys: Keys, source: str, around: ImportContext, core: bool, alone: bool = False) -> Imported:
    """Return the case of settings; `alone` is one process that splits the layers over the devices it sees."""
    keys.renew()
    # What the Trainer that it hands use_liger_kernel to patches.
    keys.table = keys.table | {"liger": table("transformers.toml")["liger"]}
    if core:
        return _megatron_case(keys, source, around)
    model = _trainer.model_named(keys, "model")
    launched = None if alone else _trainer.deepspeed_case(keys, "deepspeed", source, around)
    stack = under_deepspeed(launched, find_stack("ms-swift"))
    plan = launched.plan if launched else _split(around.num_devices) if alone else _plan(keys, around.num_devices)
    plan = _sequence_parallel(keys, plan, model, around.num_devices)
    plan = replace(plan, recompute=_recompute(keys, plan), offload=_offload(keys, plan))
    plan, batch, times = _batches(keys, plan, around.num_devices)
    fields, goal = _adapter(keys, "lora"), _objective(keys)
    job = Training(
        seq_len=_length(keys, model, goal.get("method", "sft")),
        global_batch=batch,
        precision=_precision(keys, launched),
        optimizer=_optimizer(keys),
        **fields,
        **goal,
    )
    job = _trainer.lasting(job, keys.whole("max_steps", rest=True) or 0)
    stack = _stack(keys, stack, model)
    return keys.case(
        source, model=model, plan=plan, job=job, stack=_rollouts(keys, stack), num_devices=around.num_devices,
        accumulation=0 if batch else times,
    )  # fmt: skip


def _megatron_case(keys: Keys, source: str, around: ImportContext) -> Imported:
    """Return the case of a training with Megatron-Core's layers, whose adapters are peft's around them."""
    model = _trainer.model_named(keys, "model")
    core = {path: path for path in keys.values if path in keys.table["megatron"]["keys"]}
    keys.table = keys.table | {"read": keys.table["read"] | dict.fromkeys(core, "plan")}
    if keys.word("recompute_granularity") == "none":
        keys.values["recompute_granularity"] = None
        usual = {name: value for name, value in _CORE_USUAL.items() if name != "recompute_granularity"}
    else:
        usual = _CORE_USUAL
    plan, stack = plan_beside(keys, core, around.num_devices, ("model", model), usual)
    plan = replace(plan, micro_batch=keys.whole("micro_batch_size") or 1)
    batch = keys.whole("global_batch_size") or 16
    fields, goal = _adapter(keys, "full"), _objective(keys)
    job = Training(
        seq_len=_length(keys, model, goal.get("method", "sft")),
        global_batch=batch,
        precision=_core_precision(keys),
        optimizer={"sgd": "sgd", "muon": "muon", "dist_muon": "muon"}.get(keys.word("optimizer"), "adam"),
        **fields,
        **goal,
    )
    job = _trainer.lasting(job, keys.whole("train_iters") or 0)
    return keys.case(
        source, model=model, plan=plan, job=job, stack=_rollouts(keys, stack), num_devices=around.num_devices
    )


def _core_precision(keys: Keys) -> str:
    """Return the recipe: 16 bits with sums of gradients in 32 unless told (megatron_args.py _map_dtype)."""
    narrow = keys.word("main_grads_dtype") == "bf16"
    eight = keys.word("fp8_format")
    if keys.word("fp4_format"):
        return "fp4" + "-grads16" * narrow
    if eight:
        return "fp8" + "-grads16" * narrow
    return "fp16" if keys.flag("fp16") or keys.word("torch_dtype") == "float16" else "bf16" + "-grads16" * narrow


def _split(devices: int) -> Plan:
    """Return the plan of one process whose layers lie on the devices that it sees.

    swift/utils/env.py is_mp and swift/model/register.py: device_map auto where a process has several devices.
    """
    return Plan(pp=max(devices, 1), schedule="sequential", sequence_parallel=False)


def _plan(keys: Keys, devices: int) -> Plan:
    """Return replicas, or FSDP version 2 as swift/config/fsdp2.json has it."""
    word = keys.word("fsdp")
    if word and word != "fsdp2":
        keys.fail("fsdp", "is a configuration that is not read", "use fsdp2, ms-swift's own")
    return _trainer.spread(keys, devices, {}, "fsdp" if word else "none")


def _sequence_parallel(keys: Keys, plan: Plan, model: Model | None, devices: int) -> Plan:
    """Return a plan whose sequences are split: over heads as far as these divide, around a ring beyond.

    swift/sequence_parallel/sequence_parallel.py: heads take the greatest common divisor of theirs and the ranks.
    """
    cp = keys.whole("sequence_parallel_size") or 1
    if cp == 1:
        return plan
    if devices and devices % cp:
        keys.fail("sequence_parallel_size", f"must divide the {devices} devices", "use a divisor")
        return plan
    heads = {m.heads for block in model.layers for m in block.mixers if isinstance(m, Attention)} if model else set()
    kind: Any = "all-to-all" if gcd(cp, *heads) == cp else "ring"
    if kind == "ring":
        keys.assumed.append(f"cp_kind ring: {cp} ranks do not divide the heads, and what is left goes around a ring")
    return replace(plan, cp=cp, dp=max((plan.dp or devices) // cp, 1) if devices else plan.dp, cp_kind=kind)


def _recompute(keys: Keys, plan: Plan) -> Recompute:
    """Return whether layers are recomputed: unless told; FSDP version 2 does so by itself (swift/config/fsdp2.json)."""
    asked = keys.flag("gradient_checkpointing")
    return "none" if asked is False and not plan.sharding_rules.weights else "full"


def _offload(keys: Keys, plan: Plan) -> tuple[str, ...]:
    named = "activation_cpu_offload" in words_of(keys, "callbacks")
    return tuple(dict.fromkeys((*plan.offload, *(("activations",) if named else ()))))


def _batches(keys: Keys, plan: Plan, devices: int) -> tuple[Plan, int, int]:
    """Return the plan with its micro-batch, the sequences of a step and accumulation.

    trainers/arguments.py: as many micro-batches as make 16 sequences of the processes, unless told.
    """
    size = keys.whole("per_device_train_batch_size") or 1
    processes = 1 if plan.pp > 1 else max(devices, 1)
    times = keys.whole("gradient_accumulation_steps") or max(ceil(16 / (size * processes)), 1)
    if keys.raw("gradient_accumulation_steps") is None:
        keys.assumed.append(f"accumulation {times}: as many as make 16 sequences, as without the setting")
    return replace(plan, micro_batch=size), size * times * plan.dp, times


def _length(keys: Keys, model: Model | None, method: str) -> int:
    """Return the tokens of a sequence; those of a prompt and its answer where answers are generated."""
    packed, length = keys.flag("packing"), keys.whole("max_length")
    if method in ("grpo", "ppo"):
        if length is None:
            keys.assumed.append("prompts of 512 tokens: only the length of answers is set")
        return (length or 512) + (keys.whole("max_completion_length") or keys.whole("response_length") or 512)
    length = (keys.whole("packing_length") if packed else None) or length
    pairs = OBJECTIVES[method].sequences
    if packed and length and pairs > 1:
        # dataset/packing.py create_packed_idx: a row counts with the sum of its lengths, of both answers of a pair.
        length = max(length // pairs, 1)
        keys.assumed.append(f"seq_len {length}: what is packed holds {pairs} answers of each sample")
    if length is None:
        keys.assumed.append("seq_len: without max_length sequences are as long as the model takes")
        return model.most_tokens if model is not None else 0
    if not packed:
        _trainer.say_unpacked(keys, length)
    return length


def _method(keys: Keys) -> str:
    return keys.word("rlhf_type")


def _objective(keys: Keys) -> dict[str, Any]:
    """Return what rlhf optimises; answers are compared with a reference unless beta is 0 (rlhf_args.py: 0.04)."""
    word = _method(keys)
    beta = keys.raw("beta")
    return _trainer.objective(keys, word, word != "grpo" or beta is None or bool(beta))


def _optimizer(keys: Keys) -> str:
    plugin = "galore" if keys.flag("use_galore") else keys.word("optimizer")
    if plugin:
        ours = _PLUGINS.get(plugin)
        if ours != "":
            return _trainer.known_optimizer(keys, plugin, ours or "")
    return _trainer.optimizer_of(keys, "optim")


def _precision(keys: Keys, launched: Imported | None) -> str:
    """Return the recipe: that of the framework for weights of bfloat16, 32-bit weights beside autocast else.

    base_args/model_args.py _init_mixed_precision: bf16 beside bfloat16, fp16 beside float16 and float32, unless told.
    """
    kind, half, brain = keys.word("torch_dtype"), keys.flag("fp16"), keys.flag("bf16")
    narrow = brain if brain is not None else half is not True and kind not in ("float16", "float32", "fp16", "fp32")
    if launched is not None:
        return "bf16-grads16" if narrow else "fp16-grads16"
    if not narrow:
        return "fp32" if half is False else "amp-fp16"
    return "amp-bf16" if kind in ("float32", "fp32") else ""


def _adapter(keys: Keys, usual: str) -> dict[str, Any]:
    """Return what trains: adapters, parts of the model, or all of it."""
    kind = keys.word("tuner_type") or usual
    if kind == "full":
        return {"trains": _unfrozen(keys)}
    if kind not in _METHODS:
        known = ", ".join(("full", *_METHODS))
        keys.fail("tuner_type", "is a way to train that is not read", f"use one of {known}")
        return {}
    method = _METHODS[kind]
    if method == "lora":
        switches = {"dora": keys.flag("use_dora"), "rslora": keys.flag("use_rslora")}
        switches["lora-plus"] = keys.raw("lorap_lr_ratio") is not None
        method = next((name for name, on in switches.items() if on), "lora")
    named = _LORA
    if kind in _RANKS:
        named = replace(_LORA, rank=_RANKS[kind][0], usual_rank=_RANKS[kind][1])
    if keys.raw("target_regex"):
        named = replace(named, targets="target_regex")
    old = words_of(keys, "target_modules")
    if {word.upper() for word in old} & {"ALL", "DEFAULT"} and keys.raw("target_regex") is None:
        # 2.6.1 llm/utils/argument.py handle_lora_target_modules: DEFAULT is what MODEL_MAPPING has, of most models qkv.
        keys.values["target_modules"] = ["all-linear"] if "ALL" in old or "all" in old else ["q", "k", "v"]
    fields = _trainer.adapted(keys, method, named)
    if keys.raw("lora_dropout") is None and kind in ("lora", "lora_llm", "adalora"):
        fields["adapter_dropout"] = _USUAL_DROPOUT
    if keys.word("lora_dtype") in ("bfloat16", "bf16"):
        fields["adapter_precision"] = "bf16"
    return fields | {"base": _base(keys)}


def _unfrozen(keys: Keys) -> tuple[str, ...]:
    """Return what trains of a whole model; a share that is frozen from the bottom up is not told apart."""
    share = keys.raw("freeze_parameters_ratio")
    named = [path for path in ("freeze_parameters", "freeze_parameters_regex", "trainable_parameters",
                               "trainable_parameters_regex") if keys.raw(path)]  # fmt: skip
    for path in [*named, *(["freeze_parameters_ratio"] if share else [])]:
        keys.assumed.append(f"everything trains: what {path} names is not told apart")
    return ()


def _base(keys: Keys) -> str:
    """Return the type of frozen weights that bitsandbytes makes of them."""
    bits, way = keys.whole("quant_bits", least=0), keys.word("quant_method") or "bnb"
    if not bits:
        return ""
    if way != "bnb" or bits not in (4, 8) or (keys.word("bnb_4bit_quant_type") or "nf4") != "nf4":
        keys.fail("quant_bits", "is read for bitsandbytes' nf4 and 8 bits alone", "use 4 or 8 with quant_method bnb")
    if bits == 8:
        return "int8"
    return "nf4" if keys.flag("bnb_4bit_use_double_quant") is False else "nf4-dq"


def _stack(keys: Keys, stack: Stack, model: Model | None) -> Stack:
    word = keys.word("attn_impl")
    if word and word not in _ATTENTION:
        keys.assumed.append(f"attention as PyTorch's own: {word} is not told apart")
    stack = with_attention(stack, _ATTENTION.get(word, ""))
    stack = reentrant(keys, _trainer.synchronised(keys, stack), "gradient_checkpointing_kwargs.use_reentrant")
    if not keys.flag("use_liger_kernel") or not liger_patches(keys, model):
        return stack
    if _method(keys):  # rlhf_trainers: losses of pairs and of answers are Liger's own, of hidden states
        return fused_layers(stack)
    return replace(stack, settings=replace(stack.settings, loss="fused-linear"))


def _rollouts(keys: Keys, stack: Stack) -> Stack:
    """Return a stack with where the engine of rollouts is while the policy trains.

    rlhf_args.py, rlhf_trainers/args_mixin.py: without sleep_level it keeps its share of each device, 0.9 unless told.
    """
    if _method(keys) != "grpo" or not keys.flag("use_vllm"):
        return stack
    server = keys.word("vllm_mode") == "server"
    stack = with_prompts(keys, stack, "max_length", "" if server else "vllm_tensor_parallel_size")
    settings = stack.settings
    if server:
        return replace(stack, settings=replace(settings, rollout="apart"))
    if keys.whole("sleep_level", least=0):
        return replace(stack, settings=replace(settings, rollout="asleep"))
    keys.keep_engine("vllm_gpu_memory_utilization", 0.9)
    return replace(stack, settings=settings)
