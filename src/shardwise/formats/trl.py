"""TRL's own YAML, which `trl sft`, `dpo`, `kto` and `reward` take with --config: all of Trainer's settings and peft's.

Source: trl 1.16.0 scripts/{sft,dpo,kto,reward}.py, trainer/{base,sft,dpo,kto,reward,model}_config.py; what a setting
means is `transformers`'. Beside adapters the base is the reference, else a copy of the model, which TRL makes.
"""

from __future__ import annotations

from typing import Any

from shardwise.formats import _trainer, transformers
from shardwise.formats._checkpoints import attention_words, reentrance_words
from shardwise.formats._exported import ExportCase, Exported
from shardwise.formats._imported import PLAIN, ImportContext, Imported, top_level
from shardwise.plans import find_stack, rank_of

_TABLE = "transformers.toml"
_EXPORTED = ("pp", "schedule", "dp", "micro_batch", "sharding", "recompute", "offload")
_SHARDED = {"fsdp": "full_shard auto_wrap", "shard-grad-op": "shard_grad_op auto_wrap"}
# Settings that only the program of an objective has, by which a file of it is known.
_OBJECTIVES: dict[str, dict[str, Any]] = {
    "sft": {"packing": True}, "dpo": {"loss_type": ["sigmoid"]}, "kto": {"loss_type": "kto"},
    "reward": {"center_rewards_coefficient": None},
}  # fmt: skip
_PRECISIONS: dict[str, dict[str, Any]] = {"bf16-pure": {"dtype": "bfloat16"}, "fp32": {"bf16": False}}


def recognises(name: str, text: str) -> bool:
    """Return whether a file is TRL's: YAML with a model's name."""
    return name.endswith((".yaml", ".yml")) and "model_name_or_path" in top_level(text)


def read(text: str, source: str = "trl.yaml", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of a configuration.

    >>> text = "model_name_or_path: Qwen/Qwen3-4B\nuse_peft: true\npacking: true"
    >>> case = read(text, around=ImportContext(num_devices=1))
    >>> case.stack.name, case.job.rank, case.job.seq_len, case.plan.recompute
    ('trl', 16, 1024, 'full')
    """
    return transformers.read(text, source, around)


def tree_of(case: ExportCase) -> dict[str, Any]:
    """Return the configuration of a case."""
    p, job = case.plan, case.job
    tree: dict[str, Any] = {
        "model_name_or_path": _trainer.hub_id(case),
        **_PRECISIONS.get(job.precision or case.stack.precision, {"bf16": True}),
        "max_length": job.seq_len,
        **_OBJECTIVES.get(job.method, {}),
        "per_device_train_batch_size": p.micro_batch,
        "gradient_accumulation_steps": max(job.global_batch // max(p.micro_batch * p.dp, 1), 1),
        "optim": _trainer.optimizer_word(job.optimizer),
        "gradient_checkpointing": p.recompute == "full",
        **_adapter(case),
    }
    if job.method in ("dpo", "kto"):
        tree["precompute_ref_log_probs"] = job.reference == "none"
    if job.run_tokens:
        tree["max_steps"] = round(job.run_tokens / job.tokens_per_step)
    if p.sharding in _SHARDED:
        tree["fsdp"] = _SHARDED[p.sharding] + (" offload" if "parameters" in p.offload else "")
    if p.pp > 1:
        tree["model_init_kwargs"] = {"device_map": "auto"}
    if "activations" in p.offload:
        tree["activation_offloading"] = True
    if case.stack.norm == "fused":
        tree["use_liger_kernel"] = True
    usual = find_stack("trl")
    tree |= attention_words(case.stack, usual)
    return (
        tree | _trainer.sync_words(case.stack) | (reentrance_words(case.stack, usual) if p.recompute == "full" else {})
    )


def _adapter(case: ExportCase) -> dict[str, Any]:
    job = case.job
    if not job.adapter:
        return {}
    switches = {"dora": {"use_dora": True}, "rslora": {"use_rslora": True}}
    targets = "all-linear" if job.targets in ((), ("all-linear",)) else list(job.targets)
    tree: dict[str, Any] = {"use_peft": True, "lora_r": rank_of(job), "lora_target_modules": targets}
    tree |= {"lora_dropout": job.adapter_dropout, **switches.get(job.adapter, {})}
    tree |= {"lora_alpha": job.adapter_alpha} if job.adapter_alpha else {}
    saved = _trainer.saved_words(job)
    tree |= {"lora_modules_to_save": saved} if saved else {}
    # trainer/model_config.py: frozen weights are loaded in fp32 unless told.
    tree |= {"dtype": {"fp16": "float16"}.get(job.base, "bfloat16")} if job.base in ("", "bf16", "fp16") else {}
    narrow = job.base in ("nf4", "nf4-dq", "int8") and not case.stack.narrow_rest_bytes
    tree |= {"dtype": "bfloat16"} if narrow else {}
    four = {"load_in_4bit": True, "use_bnb_nested_quant": job.base == "nf4-dq"}
    return tree | (four if job.base in ("nf4", "nf4-dq") else {"load_in_8bit": True} if job.base == "int8" else {})


def export(case: ExportCase) -> Exported:
    """Return TRL's YAML for a case; raises `InputError` naming every field that it cannot be told."""
    text = _trainer.written(case, _EXPORTED, tree_of, read)
    nodes, each = _trainer.processes(case)
    # A model that is split over devices has one process (trl 1.16.0 trainer/sft_trainer.py).
    started = "python" if case.plan.pp > 1 else f"torchrun --nnodes {nodes} --nproc_per_node {each}"
    start = f"{started} -m trl.scripts.{case.job.method} --config trl.yaml"
    return _trainer.checked_file(case, _TABLE, "trl.yaml", text, start)
