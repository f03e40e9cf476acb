"""What trainers built on Hugging Face's libraries say alike: models, batches, optimizers and adapters.

Sources: transformers 5.23.0 training_args.py OptimizerNames, peft 0.21.2 tuners/lora/config.py, accelerate 1.15.0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardwise.errors import InputError, Problem
from shardwise.files import JSON_BYTES, below, parse_json, read_text
from shardwise.formats import _yaml, deepspeed
from shardwise.formats._exported import (
    Differences,
    ExportCase,
    Exported,
    alone,
    canonical,
    lost,
    one_rank,
    refuse,
    unexported,
)
from shardwise.formats._imported import ImportContext, Imported, Keys, table
from shardwise.formats._words import experts_of, layers_of, words_of
from shardwise.models import Model, catalogue, find_model, load_model, namesake
from shardwise.plans import (
    Plan,
    Recompute,
    Sharding,
    Stack,
    Training,
    in_groups,
    objective_named,
    rank_of,
)
from shardwise.records import dataclass, replace
from shardwise.shell import left_open
from shardwise.units import counted

OPTIMIZERS = {
    "adamw_torch_fused": "adam", "adamw_torch": "adam", "adamw_torch_xla": "adam", "adamw_torch_npu_fused": "adam",
    "adamw_apex_fused": "adam", "adamw_hf": "adam", "adamw": "adam", "adamw_32bit": "adam",
    "adamw_bnb_8bit": "adam8bit", "adamw_8bit": "adam8bit", "adamw_torch_8bit": "adam8bit",
    "adamw_torch_4bit": "adam4bit", "ademamix_8bit": "ademamix8bit", "adafactor": "adafactor",
    "galore_adamw": "galore", "apollo_adamw": "apollo", "lion_32bit": "lion", "lion": "lion", "lion_8bit": "lion8bit",
    "paged_adamw_32bit": "paged-adam", "paged_adamw": "paged-adam", "paged_adamw_8bit": "paged-adam8bit",
    "paged_ademamix_8bit": "paged-ademamix8bit", "paged_lion_32bit": "paged-lion", "paged_lion_8bit": "paged-lion8bit",
    "muon": "muon", "sgd": "sgd-plain",
}  # fmt: skip
"""The words of transformers -> the optimizers that they are."""
SAVED = {"embed_tokens": "embedding", "wte": "embedding", "lm_head": "head", "norm": "norms"}
"""Modules that peft trains as whole copies beside the frozen ones -> parts of a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterKeys:
    """How a trainer spells what an adapter has; an empty path is one that it does not have."""

    rank: str
    alpha: str
    dropout: str
    targets: str
    saved: str
    usual_rank: int
    usual_targets: tuple[str, ...]
    parameters: str = ""


def model_named(keys: Keys, path: str) -> Model | None:
    """Return the model of a hub id, or the one that a copy or a folder is named after; None where none is known."""
    name = keys.model = str(keys.raw(path) or "")
    if why := left_open(name):
        keys.assumed.append(f"no model: {name} {why[0]}; {why[1]}, or name a model")
        return None
    known = find_model(name) or namesake(name)
    if name and known is None:
        keys.assumed.append(f"no model: {name} is not in the catalogue")
    elif known is not None and not find_model(name):
        keys.assumed.append(f"model {known}: {name} is named after it")
    return None if known is None else load_model(known)


def hub_id(case: ExportCase) -> str:
    """Return the id under which a hub has the model of a case, its own name where it has none."""
    ids: list[str] = catalogue().get(case.model.name, {}).get("hub", [])
    return case.named or (ids[0] if ids else case.model.name)


def optimizer_of(keys: Keys, path: str, usual: str = "adamw_torch_fused") -> str:
    """Return the optimizer that a word of transformers means."""
    word = keys.word(path) or usual
    return known_optimizer(keys, word, OPTIMIZERS.get(word, ""))


def known_optimizer(keys: Keys, word: str, optimizer: str) -> str:
    """Return the optimizer that was found for a word, Adam where none was; what that assumes is said."""
    if not optimizer:
        keys.assumed.append(f"optimizer adam: the states of {word} are not known")
    return optimizer or "adam"


def say_unpacked(keys: Keys, seq_len: int) -> None:
    """Say that sequences are counted whole though nothing packs or pads them."""
    keys.assumed.append(f"sequences of {seq_len} tokens: without packing shorter ones are not filled up")


def optimizer_word(ours: str) -> str:
    """Return the word of transformers for an optimizer, the name itself where it has none.

    >>> optimizer_word("adam"), optimizer_word("shampoo")
    ('adamw_torch_fused', 'shampoo')
    """
    return next((theirs for theirs, own in OPTIMIZERS.items() if own == ours), ours)


def spelled_words(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a command line as a YAML would hold them: what follows a name, or that it stands alone."""
    values: dict[str, Any] = {}
    name, problems = "", []
    for word in arguments:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = _value(value, name) if equals else True
        elif not name:
            problems.append(Problem("arguments", word, "follows no argument", "write --argument value"))
        else:
            setting = values[name]
            one = _value(word, name)
            values[name] = one if setting is True else [*setting, one] if isinstance(setting, list) else [setting, one]
    if problems:
        raise InputError(problems)
    return values


def _value(word: str, name: str = "") -> Any:
    """Return a word as the value that it spells.

    >>> [_value(word) for word in ("8", "1e-4", "True", "full_shard auto_wrap", "none")]
    [8, 0.0001, True, 'full_shard auto_wrap', None]
    """
    lower = word.lower()
    if name.endswith("_checkpointing_kwargs") or (word.startswith("{") and not word[1:-1].strip().isidentifier()):
        return parse_json(word, name, name)
    if lower in ("true", "false", "none", "null"):
        return {"true": True, "false": False}.get(lower)
    for kind in (int, float):
        try:
            return kind(word) if word.isascii() and len(word) < 40 else word
        except ValueError:
            continue
    return word


def share(keys: Keys, path: str) -> float:
    """Return a share of at least 0 and below 1, 0 where there is none."""
    value = keys.raw(path)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        keys.fail(path, "must be a share of at least 0 and below 1", "write for example 0.05")
        return 0.0
    return float(value)


CORE_LINEAR = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
"""What Megatron-Core calls all linear layers of a block."""


def adapted(keys: Keys, method: str, named: AdapterKeys) -> dict[str, Any]:
    """Return the fields of a job with an adapter as a trainer spells it, nothing without a method."""
    if not method:
        return {}
    targets = layers_of(keys, named.targets)
    if set(targets) & {"all", "all-linear"} or set(targets) == CORE_LINEAR:
        targets = ("all-linear",)
    alpha = keys.raw(named.alpha)
    if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < 1e9):
        keys.fail(named.alpha, "must be a number above 0", "write for example 16")
        alpha = None
    saved = words_of(keys, named.saved) if named.saved else ()
    for word in (one for one in saved if one not in SAVED):
        keys.assumed.append(f"{word} stays frozen: only embedding, head and norms are trained beside an adapter")
    return {
        "adapter": method,
        "rank": keys.whole(named.rank, least=min(named.usual_rank, 1)) or named.usual_rank,
        "targets": (*(targets or named.usual_targets), *experts_of(keys, named.parameters)),
        "adapter_alpha": float(alpha or 0.0),
        "adapter_dropout": share(keys, named.dropout),
        "trains": tuple(dict.fromkeys(SAVED[word] for word in saved if word in SAVED)),
    }


def deepspeed_case(keys: Keys, path: str, source: str, around: ImportContext) -> Imported | None:
    """Return the case of DeepSpeed's file that a trainer's settings name, None without one."""
    named = keys.raw(path)
    if not named:
        return None
    if not isinstance(named, str):
        keys.fail(path, "must be the path of DeepSpeed's file", "write for example ds_config.json")
        return None
    alone, shipped = replace(around, variables={}, more=()), table("deepspeed.toml")["shipped"]
    # Trainers look from the folder in which they are started, people often from that of the file.
    here = not os.path.exists(os.path.join(os.path.dirname(source), named)) and os.path.exists(named)
    text = shipped.get(os.path.basename(named))
    gone = text is not None and os.path.isabs(named) and not os.path.exists(named)
    whole = named if gone else below("" if here else source, named, around.follow, path)
    if not os.path.exists(whole) and text:
        keys.assumed.append(f"{named}: as it comes with {keys.table['checked']['system']}, since it is not here")
        return keys.with_file(named, deepspeed.read(text, named, alone))
    return keys.with_file(named, deepspeed.read(read_text(whole, JSON_BYTES, path), whole, alone))


_PLAIN = ("", "sft", "pt")


def objective(keys: Keys, word: str, compares: bool = True) -> dict[str, Any]:
    """Return what a job optimises and what that compares with, nothing where it is the next token.

    `compares` is whether a reference is read where the method has one.
    """
    named = objective_named(word, compares)
    if word in _PLAIN or named is None:
        lost = f"method sft: other models that {word} reads are not counted: memory and time are understated"
        keys.assumed += [] if word in _PLAIN else [lost]
        return {}
    return dict(zip(("method", "reference"), named, strict=True))


def lasting(job: Training, steps: int) -> Training:
    """Return a job that runs so many steps.

    >>> lasting(Training(seq_len=512, global_batch=4, method="dpo"), 10).token_budget
    40960.0
    """
    return replace(job, token_budget=float(steps * job.tokens_per_step))


def spread(keys: Keys, devices: int, paths: Mapping[str, str], sharded: Sharding, copied: bool = False) -> Plan:
    """Return the degrees of a trainer's settings on a number of devices, 0 where that is not said.

    `paths` name tp, cp, ep, shard and replicate; shards that are not stated take what is left of the devices, and where
    shards are, their copies do so if they are `copied`. Experts are spread over replicas, and what is beside them over
    the ranks of a shard.
    """
    tp, cp, ep, shards, copies = (
        (keys.whole(paths[name]) or 0) if name in paths else 0 for name in ("tp", "cp", "ep", "shard", "replicate")
    )
    used = max(tp, 1) * max(cp, 1)
    if ep > 1:
        if copies > 1:
            keys.fail(
                paths["replicate"], "is not beside experts that are spread: their ranks replicate it", "leave it out"
            )
        shards, copies = shards or max(devices // (used * ep), 1), max(copies, 1) * ep
    elif copies > 1 and not shards and sharded != "none":
        shards = max(devices // (used * copies), 1)
    elif shards and not copies and copied:
        copies = max(devices // (used * shards), 1)
    stated = max(shards, 1) * max(copies, 1) if shards or copies else 0
    if devices and devices % used:
        keys.fail(paths["tp" if tp > 1 else "cp"], f"x others = {used} must divide the {devices} devices", "change it")
    dp = stated or devices // used
    if devices and stated and stated * used != devices:
        rule = f"x all other degrees is {stated * used}, and there are {devices} devices"
        at = next(name for name in ("shard", "ep", "replicate") if keys.raw(paths.get(name, name)))
        keys.fail(paths[at], rule, "change the sizes or --on")
    sharding: Sharding = sharded if sharded != "none" and dp * max(cp, 1) != 1 else "none"
    grouped = in_groups(sharding) if copies > 1 else sharding
    return Plan(
        tp=max(tp, 1),
        cp=max(cp, 1),
        dp=dp,
        ep=max(ep, 1),
        sequence_parallel=False,
        sharding=grouped,
        shard=max(shards, 1) if grouped != sharding else 1,
    )


def world(keys: Keys, devices: int, plan: Plan, *paths: str) -> int:
    """Return the devices that are asked for, else those of a plan whose file states the settings at all the paths."""
    return devices or (0 if any(keys.raw(path) in (None, -1) for path in paths) else plan.num_devices)


def checkpointed(keys: Keys, mode: str, option: str, layers: int) -> tuple[Recompute, int]:
    """Return what torchtitan's checkpointing recomputes of a stage, and of how many layers (0: all of them).

    Every n-th layer, or by operator, where `Settings.checkpoint_policy` says what is kept. torchtitan v0.2.2
    torchtitan/distributed/activation_checkpoint.py; torchtune 0.6.1 training/checkpointing has the same words.
    """
    value = str(keys.raw(option) or "2")
    if mode != "selective" or value == "op":
        return ("none" if mode == "none" else "full"), 0
    if not value.isascii() or not value.isdigit() or not 0 < int(value) < 1000:
        keys.fail(option, "must be op, or a number of layers", "write op, or for example 2")
        return "full", 0
    if not layers:
        keys.assumed.append(f"recompute full: every {value} layers are recomputed, and no model says how many")
        return "full", 0
    every = layers // int(value)
    return ("full", every % layers) if every else ("none", 0)


def batches(keys: Keys, plan: Plan, micro: str, steps: str, usual: int) -> tuple[Plan, int, int]:
    """Return the plan with its micro-batch, the sequences of a step (0: devices are not said) and accumulation."""
    size, times = keys.whole(micro) or usual, keys.whole(steps) or 1
    return replace(plan, micro_batch=size), size * times * plan.dp, times


def checked_file(case: ExportCase, table_name: str, file: str, text: str, start: str) -> Exported:
    """Return a trainer's file under a head that says how it is started."""
    checked = table(table_name)["checked"]
    count = counted(case.plan.num_devices, "device")
    head = f"# {case.model.name} on {count}, for {checked['system']} {checked['version']}.\n# {start}\n"
    notes = (f"start it with: {start}", "data and the learning rate are yours to set", *one_rank(case.plan))
    files = {file: head + text}
    return Exported(system=checked["system"], version=checked["version"], files=files, notes=notes, launch=start)


def processes(case: ExportCase) -> tuple[int, int]:
    """Return how many nodes a case takes, and the processes on each."""
    nodes = -(-case.plan.num_devices // case.cluster.devices_per_node)
    return nodes, case.plan.num_devices // nodes


def saved_words(job: Training) -> list[str]:
    """Return the modules that are trained whole beside an adapter, as peft names them."""
    return [theirs for theirs, ours in SAVED.items() if ours in job.trains and theirs != "wte"]


def _named(case: ExportCase, differing: Differences) -> tuple[ExportCase, Differences]:
    """Return a case whose targets have the names of its model's class, those without one beside what cannot be said."""
    from shardwise.formats._targets import target_names

    case = replace(case, job=replace(case.job, targets=target_names(case.job, case.model, case.stack)))
    unnamed = {"targets": ("experts", "mlp or all-linear")} if "experts" in case.job.targets else {}
    return case, differing | unnamed


def written(
    case: ExportCase,
    fields_told: Iterable[str],
    tree_of: Callable[[ExportCase], dict[str, Any]],
    read: Callable[..., Imported],
) -> str:
    """Return a trainer's YAML for a case; raises `InputError` naming every field that does not come back from it."""
    ours, differing = unexported(alone(case.plan), frozenset(fields_told))
    asked = case.job.targets
    if case.job.adapter:
        case, differing = _named(case, differing)
    text = _yaml.dump(tree_of(replace(case, plan=ours)))
    try:
        back = read(text, around=ImportContext(num_devices=ours.num_devices))
    except InputError:
        # What its framework does not run, rather than what it says of the file.
        refuse(case.stack.name, differing, case)
        if not case.job.adapter or rank_of(case.job):
            raise
        # A method without a rank, of a file that asks for one: the method is what it cannot say.
        case = replace(case, job=replace(case.job, rank=1))
        back = read(_yaml.dump(tree_of(replace(case, plan=ours))), around=ImportContext(num_devices=ours.num_devices))
    case = replace(case, job=replace(case.job, targets=asked))
    refuse(back.system, _lost(replace(case, plan=ours), back) | differing, case)
    return text


def _lost(case: ExportCase, back: Imported) -> Differences:
    alike, differing = back.model is not None and canonical(back.model) == canonical(case.model), lost(case, back)
    # A model of sizes alone has the name of the system.
    named = back.model.name if back.model and back.model.name in catalogue() else ""
    return differing if alike or named == case.model.name else differing | {"model": (case.model.name, named)}


_SYNC = "accelerator_config.gradient_accumulation_kwargs.sync_each_batch"


def synchronised(keys: Keys, stack: Stack) -> Stack:
    """Return a stack that reduces gradients every micro-batch where accelerate is told so."""
    each = keys.raw(_SYNC) is not None and keys.flag(_SYNC)
    return replace(stack, settings=replace(stack.settings, sync_each_batch=True)) if each else stack


def sync_words(stack: Stack) -> dict[str, Any]:
    """Return what tells accelerate to reduce gradients every micro-batch; nothing where it need not."""
    if not stack.settings.sync_each_batch:
        return {}
    return {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
