"""Megatron-Bridge's recipes and NeMo's: YAML over a recipe, the overrides of a command line, or both.

Source: github.com/NVIDIA-NeMo/Megatron-Bridge 067f987df0 src/megatron/bridge/training/config.py ConfigContainer and
scripts/training/run_recipe.py; NeMo 2's trees (trainer.strategy, data, model.config) and NeMo 1's (model, trainer).
Their fields are those of Megatron-Core, so what a setting means stands in the table of Megatron-LM's arguments.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.errors import Problem
from shardwise.files import YAML_BYTES, below, read_text
from shardwise.formats import _trainer, _yaml
from shardwise.formats._bridged import mixed_precision, take_states, take_word, torch_dtype
from shardwise.formats._bridged_recipes import captured, graphs_of, of_recipe
from shardwise.formats._exported import (
    ExportCase,
    Exported,
    lost,
    refuse,
    unexported,
    worded,
)
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys, flat_keys, table, top_level
from shardwise.formats._launch import Launch, started
from shardwise.formats._targets import target_names
from shardwise.formats.megatron import _job, _model, _plan, _write
from shardwise.formats.megatron._reader import Reader
from shardwise.formats.megatron._values import GivenArguments, arguments, by_name, facts
from shardwise.models import Model
from shardwise.plans import rank_of
from shardwise.records import replace

_TABLE = "nemo.toml"
_STARTS = re.compile(r"\b(run_recipe\.py|setup_experiment\.py|\w+_with_yaml\.py|nemo\s+llm\s+\w+)\b")
_SETTING = re.compile(r"(model|train|trainer|data|dataset|ddp|optim|optimizer)(\.[a-z_0-9]+)+")
_OWN = {"train", "ddp", "dist", "scheduler", "comm_overlap", "mixed_precision", "trainer"}
_NEGATED = ("untie_embeddings_and_output_weights",)
_LISTED = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_ADAPTER = _trainer.AdapterKeys(
    rank="peft.dim", alpha="peft.alpha", dropout="peft.dropout", targets="peft.target_modules", saved="",
    usual_rank=32, usual_targets=("all-linear",),
)  # fmt: skip
_OLD_ADAPTER = replace(
    _ADAPTER, rank="model.peft.lora_tuning.adapter_dim", alpha="model.peft.lora_tuning.alpha",
    dropout="model.peft.lora_tuning.adapter_dropout", targets="model.peft.lora_tuning.target_modules",
)  # fmt: skip


def recognises(name: str, text: str) -> bool:
    """Return whether a file is Megatron-Bridge's or NeMo's: YAML with their sections, or a script that starts them."""
    if not name.endswith((".yaml", ".yml")):
        return bool(_STARTS.search(text))
    keys = top_level(text)
    strategy = re.search(r"[\s{](tensor_model_parallel_size|global_batch_size|train_iters)\s*:", text)
    return ("model" in keys or "train" in keys) and bool(keys & _OWN) and strategy is not None


def read(text: str, source: str = "nemo.yaml", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of a file, or of the recipe and the settings that a script names.

    >>> text = "model:\n  tensor_model_parallel_size: 4\n  seq_length: 8192\ntrain:\n  micro_batch_size: 1\n"
    >>> case = read(text + "  global_batch_size: 256\n", around=ImportContext(num_devices=64))
    >>> case.plan.tp, case.plan.dp, case.plan.sharding, case.job.global_batch, case.stack.name
    (4, 16, 'distributed-optimizer', 256, 'megatron-bridge')
    """
    if source.endswith((".yaml", ".yml")):
        around.settings_alone(source)
        return _case(_yaml.resolved(dict(flat_keys(_yaml.parse(text, source)))), Launch(source=source), around)
    launch = started(text, _known, source, around.variables)
    assigned, words = _yaml.assigned((*launch.arguments, *around.more))
    flags = _flags(words)
    if path := flags.pop("config_file", ""):
        whole = below(source, str(path), around.follow, "config_file")
        assigned = dict(flat_keys(_yaml.parse(read_text(whole, YAML_BYTES, "config_file"), whole))) | flags | assigned
    else:
        assigned = flags | assigned
    case = _case(_yaml.resolved(assigned), launch.launch, around)
    return replace(case, assumed=(*launch.notes, *case.assumed))


def _known(word: str) -> bool:
    plain = word.lstrip("+~")
    flag = plain in ("--recipe", "--factory", "--config-file", "--config_file")
    return flag or bool(_SETTING.fullmatch(plain) and not plain.endswith((".py", ".json", ".sh")))


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Return what options of the launchers set, by the path of the setting; what they do not have keeps its name."""
    values: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            name = name.lstrip("-").replace("-", "_")
            if not equals:
                value = rest.pop(0) if rest and not rest[0].startswith("-") else "true"
            values[table(_TABLE)["flags"].get(name, name)] = _yaml.value_of(value)
    return values


def _case(values: Mapping[str, Any], launch: Launch, around: ImportContext, known: Model | None = None) -> Imported:
    keys = Keys({}, _TABLE, launch.source)
    keys.values, keys.table = dict(values), _worded_table(values)
    _yaml.refuse_open(keys)
    launch = _devices(keys, launch, around)
    reader = Reader(_given(keys))
    reader.problems.items = keys.problems.items
    recipe = known or of_recipe(keys)
    built = _build(keys, reader, recipe, launch, around.named_model() or recipe)
    reader.problems.items[:] = dict.fromkeys(_named(one) for one in reader.problems.items)
    keys.assumed += [_in_words(text) for text in reader.assumed]
    return keys.case(launch.source, num_devices=launch.num_devices, devices_per_node=launch.devices_per_node, **built)


def _build(keys: Keys, reader: Reader, recipe: Model | None, launch: Launch, asked: Model | None) -> dict[str, Any]:
    """Return model, plan, job and stack of settings that Megatron-LM's arguments have names for.

    Where the file has no sizes the plan is one of the model that is `asked` for, else of the recipe's.
    """
    given = reader.given.values
    whole = all(map(reader.has, ("hidden_size", "num_layers", "num_attention_heads")))
    _settle(reader, asked)
    silent = [name for name in ("seq_length", "micro_batch_size") if not reader.has(name)]
    for name in silent:
        given[name] = 1
    name = os.path.splitext(os.path.basename(launch.source))[0]
    built = _model.build(reader, name) if whole else recipe
    plan = _plan.build(reader, launch.num_devices)
    job = _job.build(reader, plan)
    if "seq_length" in silent:
        job = replace(job, seq_len=0, token_budget=0.0)
        keys.assumed.append("no length of sequences: the recipe has it")
    if "micro_batch_size" in silent:
        keys.assumed.append("micro_batch 1: the recipe has it")
    if built is None:
        keys.assumed.append("no model: " + ("no size of its vocabulary is said" if whole else "the recipe has it"))
    if keys.raw("recipe") or keys.raw("factory"):
        keys.assumed.append("what the recipe itself sets: only what overrides it stands here, of degrees too")
    alltoall = reader.word("moe_token_dispatcher_type") == "alltoall" and not reader.has("moe_flex_dispatcher_backend")
    stack = _job.stack(reader, "megatron-bridge" + "-alltoall" * bool(alltoall and reader.whole("num_experts", 0)))
    targets = _trainer.adapted(keys, *_adapter(keys))
    return {"model": built, "plan": plan, "job": replace(job, **targets), "stack": stack}


def _settle(reader: Reader, model: Model | None) -> None:
    """Put what Megatron-LM's arguments need, and settings that Bridge lets stand beside what overrides them."""
    given, granularity = reader.given.values, reader.word("recompute_granularity")
    for name in ("recompute_method", "recompute_num_layers") if granularity != "full" else ("recompute_modules",):
        given.pop(name, None)
    if not granularity:
        given.pop("recompute_modules", None)
    if model is not None and not reader.has("num_layers"):
        given["num_layers"] = model.num_layers
        given["num_experts"] = max(getattr(block.feed_forward, "experts", 0) for block in model.layers)
    ep, etp = (reader.whole(f"expert_{kind}_parallel_size") or 1 for kind in ("model", "tensor"))
    if model is None and not reader.has("num_experts") and max(ep, etp) > 1:
        given["num_experts"] = ep
    if reader.has("pipeline_model_parallel_layout"):
        _take_layout(reader)
    elif not reader.has("num_layers"):
        _plan.stand_in_layers(reader, "state model.num_layers, or give a script that names the recipe")


def _take_layout(reader: Reader) -> None:
    """Put a layout as text, and what it says: layers, those of multi-token prediction, and the chunks of a stage."""
    given = reader.given.values
    listed = given["pipeline_model_parallel_layout"]
    if isinstance(listed, (list, tuple)):
        given["pipeline_model_parallel_layout"] = "|".join(
            "".join(_LISTED.get(str(one), "?") for one in (part if isinstance(part, (list, tuple)) else [part]))
            for part in listed
        )
    text = str(given["pipeline_model_parallel_layout"])
    given.setdefault("mtp_num_layers", text.count("m"))
    sizes = _plan.layout(reader)
    given.setdefault("num_layers", sum(sizes) or 1)
    chunks = reader.whole("num_virtual_stages_per_pipeline_rank")
    if chunks and len(sizes) != chunks * reader.count("pipeline_model_parallel_size"):
        rule = f"x the stages is not the {len(sizes)} pieces of the layout"
        reader.fail("num_virtual_stages_per_pipeline_rank", rule, "leave it out, or change the layout")
    given.pop("num_virtual_stages_per_pipeline_rank", None)


def _given(keys: Keys) -> GivenArguments:
    """Return the settings by their names in Megatron-LM, and what recipes have where the file is silent."""
    given = GivenArguments(options=dict(_paths()))
    for path, value in keys.values.items():
        name = _name(path)
        switch = name and by_name()[name].values in ("on", "off")
        if name and value is not None and (switch or value is not False):
            value = "hybrid" if name == "fp8" and value is True else value
            value = not value if name in _NEGATED and isinstance(value, bool) else value
            value = table(_TABLE)["words"].get(value, value) if isinstance(value, str) else value
            if name in given.values and given.values[name] != value and by_name()[name].read:
                rule = f"contradicts {given.options[name]} = {given.values[name]}"
                keys.fail(path, rule, "give both the same value, or one of them")
            given.values[name], given.options[name] = value, path
    meant = dict(_precision(keys))
    keys.assumed += take_word(keys, given.values, meant)
    for name, value in (*meant.items(), *graphs_of(keys).items(), *table(_TABLE)["usual"].items()):
        given.values.setdefault(name, value)
    take_states(keys, given.values)
    if given.values["accumulate_allreduce_grads_in_fp32"] is False:
        given.values["grad_reduce_in_bf16"] = bool(given.values.get("bf16"))
    if given.values.get("fp16"):
        given.values["bf16"] = False
    given.values.setdefault("group_query_attention", "num_query_groups" in given.values)
    gated = keys.flag("model.gated_linear_unit") or keys.flag("model.config.gated_linear_unit")
    word = next((keys.word(path).replace("-", "_") for path in _ACTIVATIONS if keys.raw(path)), "")
    gated = gated or word.endswith("geglu")
    kind = "swiglu" if "silu" in word or "swiglu" in word else "squared_relu" if "squared_relu" in word else ""
    if kind or gated:
        given.values.setdefault(kind or "quick_geglu", True)
    return given


_ACTIVATIONS = ("model.activation_func._target_", "model.config.activation_func._target_", "model.activation")


def _precision(keys: Keys) -> tuple[tuple[str, object], ...]:
    """Return what a word of mixed precision means, before what is stated by itself."""
    for path in ("mixed_precision", "trainer.plugins.precision", "trainer.precision"):
        if word := keys.word(path):
            known = table(_TABLE)["precisions"].get(word) or table(_TABLE)["precisions"].get(word.replace("-", "_"))
            if known is None:
                keys.fail(path, "is not a recipe of precision that is read", "use for example bf16_mixed")
            return tuple((known or {}).items())
    named = re.search(r"gpu_[a-z0-9]+_([a-z0-9]+)", str(keys.raw("recipe") or ""))
    word = table(_TABLE)["named"].get(named[1], "") if named else ""
    if word:
        keys.assumed.append(f"{word}, gradients reduced in 16 bits: of the recipe's name")
    own = {"first_last_layers_bf16": False, "accumulate_allreduce_grads_in_fp32": False}  # _perf_precision
    return tuple((table(_TABLE)["precisions"][word] | own).items()) if word else ()


def _adapter(keys: Keys) -> tuple[str, _trainer.AdapterKeys]:
    """Return the method of adapters, empty for none, and where its settings stand."""
    schemes = ("peft", "mode", "peft.peft_scheme", "model.peft.peft_scheme", "peft._target_")
    schemes_text = " ".join(keys.word(path) for path in schemes)
    schemes_text += " lora" if re.search(r"_(peft|lora)_", keys.word("recipe")) else ""
    stated = any(path.startswith("peft.") and value is not None for path, value in keys.values.items())
    method = next((kind for kind in ("dora", "lora") if kind in schemes_text), "lora" if stated else "")
    return method, _OLD_ADAPTER if "model.peft.peft_scheme" in keys.values else _ADAPTER


def _devices(keys: Keys, launch: Launch, around: ImportContext) -> Launch:
    """Return a launch with its devices: as asked, of the trainer, of the launcher, or of the recipe's name."""
    each = keys.whole("trainer.devices", rest=True) or keys.whole("gpus_per_node") or launch.devices_per_node
    nodes = keys.whole("trainer.num_nodes") or 1
    named = re.search(r"_(\d{1,6})gpu", str(keys.raw("recipe") or ""))
    stated = (keys.whole("trainer.devices", rest=True) or 0) * nodes or keys.whole("num_gpus") or launch.num_devices
    stated = stated or (int(named[1]) if named else 0)
    if around.num_devices and around.num_devices != stated:
        return replace(launch, num_devices=around.num_devices, devices_per_node=0)
    return replace(launch, num_devices=stated, devices_per_node=each or 0)


def _name(path: str) -> str:
    """Return the name in Megatron-LM's parsed arguments of a setting, empty where it has none.

    >>> _name("model.num_moe_experts"), _name("trainer.strategy.context_parallel_size"), _name("logger.log_interval")
    ('num_experts', 'context_parallel_size', '')
    """
    section, _, last = path.rpartition(".")
    names = table(_TABLE)
    if section not in names["sections"]["keys"]:
        return ""
    name = names["names"].get(last, last)
    if name == "optimizer" and section not in ("optimizer", "optim", "optim.config", "model.optim"):
        return ""
    return name if name in by_name() and path not in names["read"] else ""


def _worded_table(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of settings with those of a file that Megatron-LM has, as its table of arguments has them."""
    words_table = dict(table(_TABLE))
    named = {path: by_name()[name] for path in values if (name := _name(path))}
    reasons = {
        word: {"because": because, "keys": [path for path, one in named.items() if one.meaning == word]}
        for word, because in facts()["reasons"].items()
    }
    quiet = [path for path, one in named.items() if one.meaning == "none"]
    words_table["read"] = words_table["read"] | {path: one.meaning[5:] for path, one in named.items() if one.read}
    words_table["reasons"] = reasons | words_table["reasons"]
    words_table["silent"] = {"keys": [*quiet, *words_table["silent"]["keys"]]}
    return words_table


def _paths() -> dict[str, str]:
    """Return where Megatron-Bridge has each of Megatron-LM's arguments."""
    written = table(_TABLE)["written"]
    return {name: written.get(name, f"model.{name}") for name in by_name()}


def _named(one: Problem) -> Problem:
    """Return a problem in the words of Megatron-Bridge."""
    field = _in_words(one.field) if one.field.startswith("--") else one.field
    return Problem(field, one.value, _in_words(one.rule), _in_words(one.remedy))


def _in_words(text: str) -> str:
    def word(match: re.Match[str]) -> str:
        return _paths()[arguments()[match[0]].name] if match[0] in arguments() else match[0]

    return re.sub(r"--[a-z0-9-]+", word, text)


def tree_of(case: ExportCase) -> dict[str, Any]:
    """Return the overrides of a case: all that is not the model's, which its recipe names."""
    tree: dict[str, Any] = {}
    for option, value in _write.plan_words(case).items():
        one = arguments()[option]
        if value is not None and one.name not in _PRECISIONS and (value is not False or one.name in _SAID_OFF):
            section, _, last = _paths()[one.name].partition(".")
            shown = one.values == "on" if value is True else list(value) if isinstance(value, tuple) else value
            tree.setdefault(section, {})[last] = torch_dtype(str(value)) if "_dtype" in last else shown
    if "comm_overlap" in tree:  # None in most recipes, where a mapping alone would stay one
        target = "megatron.bridge.training.comm_overlap.CommOverlapConfig"
        tree["comm_overlap"] = {"_target_": target, **tree["comm_overlap"]}
    tree["mixed_precision"] = mixed_precision(case)
    tree["ddp"] = {"use_distributed_optimizer": False, **tree.get("ddp", {})}
    tree["ddp"]["grad_reduce_in_fp32"] = "grads16" not in (case.job.precision or case.stack.precision)
    tree["dataset"] = {"seq_length": case.job.seq_len}
    for section, settings in captured(case).items():
        tree[section] = tree.get(section, {}) | settings
    if samples := tree["train"].get("train_samples"):  # beside a recipe's train_iters, which may not stand with it
        steps, rest = divmod(samples, case.job.global_batch)
        tree["train"] |= {"train_iters": None} if rest else {"train_iters": steps, "train_samples": None}
    if case.model.has_experts:
        tree["model"].setdefault("moe_token_dispatcher_type", "alltoall")
    return tree | _peft(case)


# Switches that a recipe may have on.
_SAID_OFF = ("sequence_parallel", "overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap")
_PRECISIONS = ("bf16", "fp16", "fp8", "fp4", "grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32",
               "fp8_recipe", "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
               "fp8_param_gather", "fp4_param_gather")  # fmt: skip


def _peft(case: ExportCase) -> dict[str, Any]:
    if not (job := case.job).adapter:
        return {}
    named = target_names(job, case.model, case.stack)
    targets = sorted(_trainer.CORE_LINEAR if named == ("all-linear",) else named)
    kind = "megatron.bridge.peft." + ("dora.DoRA" if job.adapter == "dora" else "lora.LoRA")
    more = {"alpha": job.adapter_alpha, "dropout": job.adapter_dropout, "target_modules": targets}
    return {"peft": {"_target_": kind, "dim": rank_of(job)} | {name: value for name, value in more.items() if value}}


def export(case: ExportCase) -> Exported:
    """Return overrides of a recipe for a case; raises `InputError` naming every field that they cannot say."""
    plan, differing = unexported(worded(case).plan, _write.EXPORTED | {"offload"})
    case = replace(case, plan=plan)
    text, nodes = _yaml.dump(tree_of(case)), _trainer.processes(case)
    recipe = re.sub(r"[^a-z0-9]+", "_", case.model.name.lower().replace("llama-", "llama").replace(".", ""))
    mode = case.job.adapter or "pretrain"
    start = f"torchrun --nnodes {nodes[0]} --nproc_per_node {nodes[1]} pretrain_with_yaml.py --config-file nemo.yaml"
    back = read_beside(text, case.model, case.plan.num_devices)
    refuse("Megatron-Bridge", differing | lost(case, back), case)
    made = _trainer.checked_file(case, _TABLE, "nemo.yaml", text, start)
    values = flat_keys(_yaml.parse(text))
    words = [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in values]
    words = [f"++{word}" if word.startswith(_FORCED) else word for word in words]
    head = f"torchrun --nnodes {nodes[0]} --nproc_per_node {nodes[1]} run_recipe.py --model {recipe} --mode {mode}"
    script = " \\\n    ".join([f"#!/bin/bash\n{head}", *map(shlex.quote, words), '"$@"']) + "\n"
    notes = (*made.notes, f"the recipe names the model: nemo.sh takes {recipe}, and the same settings as words")
    return replace(made, files={**made.files, "nemo.sh": script}, notes=notes, launch="bash nemo.sh")


# Sections that a recipe may lack, whose settings Hydra refuses unless they are forced.
_FORCED = ("comm_overlap.", "peft.", "mixed_precision.")


def read_beside(text: str, model: Model, num_devices: int) -> Imported:
    """Return the case of overrides of the recipe of a model."""
    values = dict(flat_keys(_yaml.parse(text, "nemo.yaml")))
    return _case(values, Launch(source="nemo.yaml"), ImportContext(num_devices=num_devices), model)
