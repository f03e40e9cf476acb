"""A training of Hugging Face's Trainer: accelerate's YAML and the launch script of run_clm.py beside it.

Sources: transformers 5.23.0 training_args.py and examples/pytorch/language-modeling/run_clm.py; the YAML is `fsdp`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.formats import _yaml, fsdp
from shardwise.formats._canonical import canonical_plan
from shardwise.formats._exported import ExportCase, Exported, Found, differences, refuse, untold, worded
from shardwise.formats._keys import table
from shardwise.models._load import catalogue
from shardwise.plans import Plan, Training

_TOLD = frozenset(("tp", "cp", "cp_kind", "dp", "micro_batch", "sharding", "shard", "recompute"))
# A recipe -> accelerate's mixed_precision and the type in which the script loads the weights.
_PRECISIONS = {"bf16-pure": ("no", "bfloat16"), "amp-bf16": ("bf16", "float32"), "fp32": ("no", "float32")}
_OPTIMIZERS = {
    "adam": "adamw_torch",
    "adam8bit": "adamw_bnb_8bit",
    "adam4bit": "adamw_torch_4bit",
    "ademamix8bit": "ademamix_8bit",
    "adafactor": "adafactor",
    "galore": "galore_adamw",
    "apollo": "apollo_adamw",
    "lion": "lion_32bit",
    "lion8bit": "lion_8bit",
    "sgd-plain": "sgd",
}


def _words(case: ExportCase) -> dict[str, Any]:
    """Return the arguments of the training script."""
    p, job = case.plan, case.job
    precision = job.precision or case.stack.precision
    words: dict[str, Any] = {
        "model_name_or_path": catalogue().get(case.model.name, {}).get("hub", [case.model.name])[0],
        "dtype": _PRECISIONS.get(precision, ("no", "float32"))[1],
        "block_size": job.seq_len,
        "per_device_train_batch_size": p.micro_batch,
        "gradient_accumulation_steps": max(job.global_batch // max(p.micro_batch * p.dp, 1), 1),
        "optim": _OPTIMIZERS.get(job.optimizer, job.optimizer),
    }
    if job.run_tokens:
        words["max_steps"] = round(job.run_tokens / job.tokens_per_step)
    if p.recompute == "full" and p.sharding == "none":
        words["gradient_checkpointing"] = True
    return words


def _read(words: Mapping[str, Any], tree: str) -> tuple[Plan, Training]:
    """Return the plan and the job of the arguments of the training script and accelerate's YAML."""
    around = fsdp.read(tree)
    mixed = {"bf16": "bf16"}.get(around.job.precision.partition("-")[2], "no")
    micro, steps = int(words["per_device_train_batch_size"]), int(words["gradient_accumulation_steps"])
    precision = next((name for name, pair in _PRECISIONS.items() if pair == (mixed, words["dtype"])), "")
    recompute = "full" if words.get("gradient_checkpointing") else around.plan.recompute
    job = Training(
        seq_len=int(words["block_size"]),
        global_batch=micro * steps * around.plan.dp,
        precision=precision,
        optimizer=next((ours for ours, theirs in _OPTIMIZERS.items() if theirs == words["optim"]), ""),
    )
    return replace(around.plan, micro_batch=micro, recompute=recompute), job


def export(case: ExportCase) -> Exported:
    """Return the files of a training; raises `InputError` naming every field that the Trainer cannot be told."""
    case = worded(case)
    ours, found = untold(canonical_plan(case.plan), _TOLD)
    stated = replace(case, plan=ours)
    words = _words(stated)
    tree = _yaml.dump(fsdp.tree_of(stated) | {"mixed_precision": _mixed(case)})
    plan, job = _read(words, tree)
    found |= {path: (a, b) for path, a, b in differences(ours, canonical_plan(plan))}
    refuse("transformers", found | _lost(case, job), case)
    checked = table("fsdp.toml")["checked"]
    notes = ("data, learning rate and checkpoints are yours to add, behind the script's name",)
    head = f"# {case.model.name} on {ours.num_devices} devices, for accelerate {checked['version']}.\n"
    files = {"train.sh": _script(case, words), "accelerate.yaml": head + tree}
    return Exported(system="transformers", version="5.23.0", files=files, notes=notes)


def _mixed(case: ExportCase) -> str:
    return _PRECISIONS.get(case.job.precision or case.stack.precision, ("no", ""))[0]


def _lost(case: ExportCase, back: Training) -> Found:
    job = case.job
    pairs: dict[str, tuple[object, object]] = {
        "precision": (job.precision or case.stack.precision, back.precision),
        "optimizer": (job.optimizer, back.optimizer),
        "seq_len": (job.seq_len, back.seq_len),
        "global_batch": (job.global_batch, back.global_batch),
    }
    found = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if case.stack.runs.exporter != "transformers":
        found["stack"] = (case.stack.name, "transformers")
    return found


def _script(case: ExportCase, words: Mapping[str, Any]) -> str:
    """Return the launch script."""
    lines = ["    --" + (name if value is True else f"{name} {value}") for name, value in words.items()]
    head = f"#!/bin/bash\n# {case.model.name} on {case.plan.num_devices} devices, as transformers 5.23.0 reads it.\n"
    start = 'accelerate launch --config_file accelerate.yaml run_clm.py "$@" \\\n'
    return head + start + " \\\n".join(lines) + "\n"
