"""Unsloth's scripts: what `FastLanguageModel` and the trainer's configuration are told in literals. Nothing is run.

Source: unsloth 2026.10.9 models/loader.py from_pretrained, models/llama.py get_peft_model, and models/rl.py, which
gives TRL's configurations defaults of its own. Nothing writes them.
"""

from __future__ import annotations

import re
from typing import Any

from shardwise.formats import _trainer
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys
from shardwise.formats._literals import Call, Unread, calls_of
from shardwise.plans import Plan, Training, find_stack
from shardwise.records import replace

_TABLE = "unsloth.toml"
_LOADS = re.compile(r"\bFast\w*Model\s*\.\s*from_pretrained\b")
_MODELS = ("FastLanguageModel", "FastModel")
# Configuration, and the trainer that takes it -> what it optimises.
_PROGRAMS = {
    "SFTConfig": "sft", "UnslothTrainingArguments": "sft", "TrainingArguments": "", "SFTTrainer": "sft",
    "UnslothTrainer": "sft", "Trainer": "sft", "DPOConfig": "dpo", "DPOTrainer": "dpo", "ORPOConfig": "orpo",
    "ORPOTrainer": "orpo", "CPOConfig": "cpo", "CPOTrainer": "cpo", "KTOConfig": "kto", "KTOTrainer": "kto",
    "RewardConfig": "reward", "RewardTrainer": "reward", "GRPOConfig": "grpo", "GRPOTrainer": "grpo",
}  # fmt: skip
_LORA = _trainer.AdapterKeys(
    rank="peft.r", alpha="peft.lora_alpha", dropout="peft.lora_dropout", targets="peft.target_modules",
    saved="peft.modules_to_save", usual_rank=16, usual_targets=("all-linear",),
)  # fmt: skip
# Checkpoints of 4 bits, which from_pretrained takes the place of others with, and others the place of them.
_NARROW = re.compile(r"-(unsloth-)?bnb-4bit$")
_EVERY = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def recognises(name: str, text: str) -> bool:
    """Return whether a file is a script that loads a model with Unsloth."""
    return name.endswith(".py") and bool(_LOADS.search(text))


def read(text: str, source: str = "train.py", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of a script, of one device or of as many as are asked for.

    >>> text = "model, t = FastLanguageModel.from_pretrained('unsloth/Qwen3-4B', max_seq_length=4096)\n"
    >>> text += "model = FastLanguageModel.get_peft_model(model, r=32)\n"
    >>> case = read(text + "args = SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4)")
    >>> case.model.name, case.job.base, case.job.rank, case.job.seq_len, case.job.global_batch, case.job.optimizer
    ('qwen3-4b', 'nf4-dq', 32, 4096, 8, 'adam8bit')
    """
    around.settings_alone(source)
    keys = Keys({}, _TABLE, source)
    program = _take(keys, calls_of(text, source))
    if isinstance(name := keys.values.get("model.model_name"), str):
        keys.values["model.model_name"] = _NARROW.sub("", name)
    model = _trainer.model_named(keys, "model.model_name")
    tuned = any(path.startswith("peft.") for path in keys.values)
    plan = _plan(keys, around.num_devices, tuned)
    # models/rl.py: TRL's configurations have 4 sequences, 2 steps and an optimizer of 8 bits unless told.
    own = program["config"] != "TrainingArguments"
    if not program["config"] and not program["method"]:
        keys.fail("trainer", "is missing: the script makes none that is read", "give the script that makes SFTTrainer")
    keys.values.setdefault("args.gradient_accumulation_steps", 2 if own else 1)
    micro, steps = "args.per_device_train_batch_size", "args.gradient_accumulation_steps"
    plan, batch, times = _trainer.batches(keys, plan, micro, steps, 4 if own else 8)
    job = Training(
        seq_len=_length(keys),
        global_batch=batch,
        optimizer=_trainer.optimizer_of(keys, "args.optim", "adamw_8bit" if own else "adamw_torch_fused"),
        **_adapter(keys, tuned),
        **_objective(keys, program["method"]),
    )
    job = _trainer.lasting(job, keys.whole("args.max_steps", rest=True) or 0)
    if not (keys.flag("args.packing") or keys.flag("trainer.packing")):
        _trainer.say_unpacked(keys, job.seq_len)
    stack = find_stack("unsloth")
    return keys.case(
        source, model=model, plan=plan, job=job, stack=stack, num_devices=around.num_devices or 1,
        accumulation=0 if batch else times,
    )  # fmt: skip


def _take(keys: Keys, calls: list[Call]) -> dict[str, str]:
    """Put what the calls are told among the settings; return the configuration and what is optimised."""
    program = {"config": "", "method": ""}
    for call in calls:
        owner, _, last = call.name.rpartition(".")
        kind = owner.rpartition(".")[2]
        if last == "from_pretrained" and re.fullmatch(r"Fast\w*Model", kind):
            _put(keys, "model", call, {"0": "model_name", "1": "max_seq_length"})
            if kind not in _MODELS:
                keys.fail("model", f"of {kind} is not read", f"use {' or '.join(_MODELS)}")
            if kind == "FastModel":
                keys.assumed.append("language layers alone: those of images and sound are not counted as trained")
        elif last == "get_peft_model" and re.fullmatch(r"Fast\w*Model", kind):
            _put(keys, "peft", call, {"0": "", "1": "r"})
            keys.values.setdefault("peft.r", 16)
        elif last in _PROGRAMS:
            config = not last.endswith("Trainer")
            _put(keys, "args" if config else "trainer", call, {"0": "", "1": "", "2": ""})
            program["config"] = last if config else program["config"]
            # A trainer says what is optimised, whatever configuration it is given.
            program["method"] = (program["method"] if config else "") or _PROGRAMS[last]
    return program


def _put(keys: Keys, section: str, call: Call, places: dict[str, str]) -> None:
    """Put the arguments of a call, of the first where there are several; what is read must be a literal."""
    if any(path.startswith(f"{section}.") for path in keys.values):
        keys.assumed.append(f"{call.name} stands again: the first is read")
        return
    for name, value in call.values.items():
        path = f"{section}.{places.get(name, name)}"
        if path == f"{section}.":
            continue
        if not isinstance(value, Unread):
            keys.values[path] = value
        elif name == "**" or path in keys.table["read"]:
            keys.fail(path, f"is {value.text}, no literal of the script", "write the value in the call")
        else:
            keys.values[path] = None  # data, tokenizers and the like


def _plan(keys: Keys, devices: int, tuned: bool) -> Plan:
    """Return replicas on the devices, with the checkpoints that are asked for: on the host unless told, of adapters."""
    plan = Plan(dp=devices or 1, sequence_parallel=False)
    path = "peft.use_gradient_checkpointing" if tuned else "model.use_gradient_checkpointing"
    # models/llama.py: "unsloth" is what get_peft_model and from_pretrained have.
    asked = keys.values.get(path, "unsloth")
    if asked == "unsloth":
        return replace(plan, recompute="full", offload=("activations",))
    return replace(plan, recompute="full" if asked is True or str(asked).lower() == "true" else "none")


def _length(keys: Keys) -> int:
    """Return the tokens of a sequence: of the trainer where that is less than what the model was loaded with."""
    loaded = keys.whole("model.max_seq_length") or 2048
    lengths = [keys.whole(f"{at}.{name}") for at in ("args", "trainer") for name in ("max_length", "max_seq_length")]
    return min([loaded, *(one for one in lengths if one)])


def _adapter(keys: Keys, tuned: bool) -> dict[str, Any]:
    whole, half = keys.flag("model.full_finetuning"), keys.flag("model.load_in_16bit")
    wide = keys.flag("model.load_in_8bit")
    narrow = keys.flag("model.load_in_4bit")
    narrow = not (whole or half or wide) if narrow is None else narrow
    if not tuned:
        if not whole:
            keys.fail(
                "peft", "is missing: no call of get_peft_model adds an adapter", "add it, or full_finetuning=True"
            )
        return {}
    kind = "dora" if keys.flag("peft.use_dora") else "rslora" if keys.flag("peft.use_rslora") else "lora"
    listed = keys.raw("peft.target_modules")
    names = {*listed} if isinstance(listed, list) and all(isinstance(one, str) for one in listed) else set()
    # models/llama.py: the embedding and the head among the targets train whole, as modules_to_save do.
    tables = sorted(names & {"embed_tokens", "lm_head"})
    if tables:
        keys.values["peft.target_modules"] = [one for one in listed if one not in tables]
        saved = keys.raw("peft.modules_to_save")
        keys.values["peft.modules_to_save"] = [*(saved if isinstance(saved, list) else []), *tables]
    fields = _trainer.adapted(keys, kind, _LORA)
    if names - {*tables} == _EVERY:
        fields["targets"] = ("all-linear",)
    half_type = "fp16" if str(keys.raw("model.dtype")) in ("float16", "half") else ""
    return fields | {"base": "nf4-dq" if narrow else "int8" if wide else half_type}


def _objective(keys: Keys, word: str) -> dict[str, Any]:
    """Return what is optimised; rollouts of GRPO share the policy's weights with vLLM, which is not counted."""
    if word == "grpo":
        keys.fail("trainer", "of rollouts beside Unsloth is not read", "use --method grpo --stack trl for TRL's own")
        return {}
    return _trainer.objective(keys, word)
