"""torchtune's configuration: full, LoRA and QLoRA recipes on one device or under FSDP2.

Source: torchtune 0.6.1 recipes/{full,lora}_finetune_{distributed,single_device}.py and recipes/configs; the YAML names
classes, and the command line names the recipe.
"""

from __future__ import annotations

from typing import Any

from shardwise.formats import _trainer, _yaml, fsdp
from shardwise.formats._exported import ExportCase, Exported
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys, table, top_level
from shardwise.models import Model, load_model
from shardwise.plans import LossKernel, Recompute, Stack, Training, find_stack, rank_of, shard_of
from shardwise.records import replace

_TABLE = "torchtune.toml"
_SIZES = {
    "tp": "tensor_parallel_dim", "cp": "context_parallel_dim", "shard": "data_parallel_shard_dim",
    "replicate": "data_parallel_replicate_dim",
}  # fmt: skip
_ADAPTER = _trainer.AdapterKeys(
    rank="model.lora_rank", alpha="model.lora_alpha", dropout="model.lora_dropout", targets="model.lora_attn_modules",
    saved="", usual_rank=8, usual_targets=("q_proj", "v_proj"),
)  # fmt: skip
_EXPORTED = ("tp", "dp", "micro_batch", "sharding", "shard", "recompute", "recompute_layers", "offload")
_HOST = ("optimizer", "gradients", "parameters")
_OPTIMIZERS = {
    "torch.optim.AdamW": "adam", "torch.optim.Adam": "adam", "bitsandbytes.optim.PagedAdamW8bit": "paged-adam8bit",
    "bitsandbytes.optim.AdamW8bit": "adam8bit", "torchao.optim.AdamW8bit": "adam8bit",
    "torchao.optim.AdamW4bit": "adam4bit", "torch.optim.SGD": "sgd-plain",
    "bitsandbytes.optim.PagedAdamW": "paged-adam",
}  # fmt: skip
_LINEAR = ("q_proj", "k_proj", "v_proj", "output_proj")
_OF_MLP = ("gate_proj", "up_proj", "down_proj")
_OUTPUT = ("output_proj", "o_proj")  # torchtune names its head "output", and attention's last GEMM so
_NO_TRAINING = {"policy_model", "value_model", "grpo_samples", "orchestration", "tasks", "max_new_tokens"}
_RECIPE = {True: "distributed", False: "single_device"}


def recognises(name: str, text: str) -> bool:
    """Return whether a file is a training of torchtune's: YAML whose model is a component of it."""
    keys = top_level(text) if name.endswith((".yaml", ".yml")) and "_component_: torchtune." in text else frozenset()
    return "model" in keys and not keys & _NO_TRAINING


def read(text: str, source: str = "torchtune.yaml", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of a configuration.

    >>> text = "model:\n  _component_: torchtune.models.llama3_1.qlora_llama3_1_8b\n  lora_rank: 16\n"
    >>> text += "  lora_attn_modules: [q_proj, v_proj]\ntokenizer: {max_seq_len: 2048}\nbatch_size: 2"
    >>> case = read(text, around=ImportContext(num_devices=1))
    >>> case.model.name, case.job.base, case.job.rank, case.job.targets, case.job.precision
    ('llama-3.1-8b', 'nf4-dq', 16, ('q_proj', 'v_proj'), 'bf16-pure')
    """
    around.settings_alone(source)
    keys = Keys(_yaml.parse(text, source), _TABLE, source)
    devices = around.num_devices
    kept = keys.flag("fsdp_reshard_after_forward") is False
    plan = _trainer.spread(keys, devices, _sizes(keys), "shard-grad-op" if kept else "fsdp")
    builder, model = _model(keys)
    recompute, layers = _recompute(keys, model)
    plan = fsdp.unit_by_unit(replace(plan, recompute=recompute, recompute_layers=layers, offload=_offload(keys)))
    plan, batch, steps = _trainer.batches(keys, plan, "batch_size", "gradient_accumulation_steps", 2)
    seq_len = keys.whole("tokenizer.max_seq_len") or 0
    if not seq_len:
        keys.assumed.append("no length of sequences: tokenizer.max_seq_len is not set, and the longest sample counts")
    elif not keys.flag("dataset.packed"):
        _trainer.say_unpacked(keys, seq_len)
    job = Training(
        seq_len=seq_len,
        global_batch=batch,
        precision=_precision(keys),
        optimizer=_optimizer(keys),
        **_adapter(keys, builder),
        **_objective(keys),
    )
    job = _trainer.lasting(job, keys.whole("max_steps_per_epoch") or 0)
    return keys.case(
        source, model=model, plan=plan, job=job, stack=_stack(keys),
        num_devices=_trainer.world(keys, devices, plan, _SIZES["shard"]),
        accumulation=0 if batch else steps,
    )  # fmt: skip


def _sizes(keys: Keys) -> dict[str, Any]:
    """Return the paths of degrees that are stated: -1 of the shards stands for the rest."""
    return {name: path for name, path in _SIZES.items() if keys.raw(path) not in (None, -1)}


def _model(keys: Keys) -> tuple[str, Model | None]:
    """Return the builder that the file names and its model; None where that is not known."""
    builder = str(keys.raw("model._component_") or "").rpartition(".")[2]
    plain = builder.removeprefix("qlora_").removeprefix("lora_")
    own = {_untuned(pair[1]): name for name, pair in table(_TABLE)["models"].items()} | table(_TABLE)["newer"]
    known = own.get(_untuned(plain))
    if known is None:
        keys.assumed.append(f"no model: {builder or 'model._component_'} is not in the catalogue")
    return builder, None if known is None else load_model(known)


def _untuned(builder: str) -> str:
    return builder.removesuffix("_instruct").removesuffix("_base")


def _objective(keys: Keys) -> dict[str, Any]:
    """Return what the loss optimises: pairs, beside a second checkpoint or beside the base of adapters."""
    loss = str(keys.raw("loss._component_") or "")
    return _trainer.objective(keys, "dpo" if "rlhf" in loss or "DPO" in loss else "")


def _recompute(keys: Keys, model: Model | None) -> tuple[Recompute, int]:
    """Return what is recomputed, and of how many layers (0: all)."""
    if keys.raw("ac_mode") is not None:
        return _trainer.checkpointed(keys, keys.word("ac_mode"), "ac_option", model.num_layers if model else 0)
    return ("full" if keys.flag("enable_activation_checkpointing") else "none"), 0


def _offload(keys: Keys) -> tuple[str, ...]:
    host = _HOST if keys.flag("fsdp_cpu_offload") else ()
    return (*host, "activations") if keys.flag("enable_activation_offloading") else host


def _precision(keys: Keys) -> str:
    """Return the recipe: the type of weights, gradients and states alike."""
    word = keys.word("dtype") or "bf16"
    if word not in ("bf16", "fp32"):
        keys.fail("dtype", "is not a type that its recipes take", "use bf16 or fp32")
    return "fp32" if word == "fp32" else "bf16-pure"


def _optimizer(keys: Keys) -> str:
    word = str(keys.raw("optimizer._component_") or "torch.optim.AdamW")
    return _trainer.known_optimizer(keys, word, _OPTIMIZERS.get(word, ""))


def _adapter(keys: Keys, builder: str) -> dict[str, Any]:
    if not builder.startswith(("lora_", "qlora_")):
        return {}
    fields = _trainer.adapted(keys, "dora" if keys.flag("model.use_dora") else "lora", _ADAPTER)
    targets = tuple(_OUTPUT[1] if word == _OUTPUT[0] else word for word in fields["targets"])
    more = ("mlp",) if keys.flag("model.apply_lora_to_mlp") else ()
    targets = ("all-linear",) if more and set(fields["targets"]) == set(_LINEAR) else (*targets, *more)
    head = ("head",) if keys.flag("model.apply_lora_to_output") else ()
    quantized = builder.startswith("qlora_") or keys.flag("model.quantize_base")
    # torchao's NF4: an 8-bit scale for 64 elements and an fp32 one for 256 of those, as bitsandbytes' double one.
    return fields | {"targets": (*targets, *head), "base": "nf4-dq" if quantized else ""}


def _stack(keys: Keys) -> Stack:
    compiled = keys.flag("compile" if keys.raw("compile.model") is None else "compile.model")
    stack = find_stack("torchtune-compiled" if compiled else "torchtune")
    if keys.raw("loss._component_") == "torch.nn.CrossEntropyLoss":
        loss: LossKernel = "compiled-fp32" if compiled else "eager"
        stack = replace(stack, settings=replace(stack.settings, loss=loss))
    if keys.flag("optimizer_in_bwd"):
        stack = replace(stack, settings=replace(stack.settings, updates_in_backward=True))
    if keys.word("ac_mode") == "selective" and keys.word("ac_option") == "op":
        stack = replace(stack, settings=replace(stack.settings, checkpoint_policy="second-matmuls"))
    return stack


def tree_of(case: ExportCase) -> dict[str, Any]:
    """Return the configuration of a case."""
    p, job = case.plan, case.job
    package, builder = table(_TABLE)["models"].get(case.model.name, ("", case.model.name))
    kind = "" if not job.adapter else "qlora_" if job.base not in ("", "bf16") else "lora_"
    named = f"torchtune.models.{package}.{kind}{builder}" if package else f"torchtune.models.{case.model.name}"
    words = {ours: theirs for theirs, ours in reversed(_OPTIMIZERS.items())}
    length = {"max_steps_per_epoch": round(job.run_tokens / job.tokens_per_step)} if job.run_tokens else {}
    tree: dict[str, Any] = {
        "model": {"_component_": named, **_adapter_words(job)},
        "tokenizer": {"max_seq_len": job.seq_len},
        "dataset": {"packed": True},
        "batch_size": p.micro_batch,
        "gradient_accumulation_steps": max(job.global_batch // max(p.micro_batch * p.dp, 1), 1),
        "optimizer": {"_component_": words.get(job.optimizer, job.optimizer), "lr": 2e-5},
        "dtype": "fp32" if (job.precision or case.stack.precision) == "fp32" else "bf16",
        **_checkpointing(case),
        "enable_activation_offloading": "activations" in p.offload,
        "fsdp_cpu_offload": "parameters" in p.offload,
        "fsdp_reshard_after_forward": not p.sharding_rules.keeps_gathered,
        **({"compile": True} if case.stack.name == "torchtune-compiled" else {}),
        "optimizer_in_bwd": case.stack.settings.updates_in_backward,
        "tensor_parallel_dim": p.tp,
        "data_parallel_shard_dim": shard_of(p),
        "data_parallel_replicate_dim": p.dp // shard_of(p),
    }
    return tree | length


def _checkpointing(case: ExportCase) -> dict[str, Any]:
    p, by_operator = case.plan, case.stack.settings.checkpoint_policy
    if p.recompute != "full" or not (by_operator or p.recompute_layers):
        return {"enable_activation_checkpointing": p.recompute == "full"}
    return {"ac_mode": "selective", "ac_option": "op" if by_operator else case.model.num_layers // p.recompute_layers}


def _adapter_words(job: Training) -> dict[str, Any]:
    if not job.adapter:
        return {}
    targets = set(job.targets or ("all-linear",))
    whole = "all-linear" in targets
    named = [_OUTPUT[0] if word == _OUTPUT[1] else word for word in job.targets if word in (*_LINEAR, "o_proj")]
    spelled = list(_LINEAR) if whole else named
    words: dict[str, Any] = {"lora_attn_modules": spelled, "apply_lora_to_mlp": whole or set(_OF_MLP) <= targets}
    words |= {"apply_lora_to_output": "lm_head" in targets, "lora_rank": rank_of(job)}
    words |= {"lora_alpha": job.adapter_alpha or 16, "lora_dropout": job.adapter_dropout}
    return words | ({"use_dora": True} if job.adapter == "dora" else {})


def export(case: ExportCase) -> Exported:
    """Return torchtune's YAML for a case; raises `InputError` naming every field that it cannot be told."""
    text = _trainer.written(case, _EXPORTED, tree_of, read)
    nodes, each = _trainer.processes(case)
    kind = "lora" if case.job.adapter else "full"
    many = case.plan.num_devices > 1
    launch = f"--nnodes {nodes} --nproc_per_node {each} " if many else ""
    start = f"tune run {launch}{kind}_finetune_{_RECIPE[many]} --config torchtune.yaml"
    return _trainer.checked_file(case, _TABLE, "torchtune.yaml", text, start)
