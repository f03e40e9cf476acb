"""AMD's Primus: an experiment's YAML, whose trainer runs Megatron-LM, torchtitan or MaxText by their words.

Sources: github.com/AMD-AGI/Primus fd1eeabb primus/core/launcher/parser.py, core/config/{yaml_loader,preset_loader}.py,
configs/{modules,models} and backends/megatron/patches. Nothing writes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.errors import InputError, Problem, Problems, plain
from shardwise.formats import _trainer, _yaml, maxtext, torchtitan
from shardwise.formats._imported import (
    PLAIN,
    ImportContext,
    Imported,
    Keys,
    ReadArgument,
    flat_keys,
    matches,
    top_level,
)
from shardwise.formats.megatron import _job, _model, _plan, _read
from shardwise.formats.megatron._beside import worded
from shardwise.formats.megatron._reader import Reader
from shardwise.formats.megatron._values import GivenArguments, arguments, by_name
from shardwise.models import Model, find_model, load_model, namesake
from shardwise.plans import Plan
from shardwise.records import replace

_TABLE = "primus.toml"
_TRAINERS = ("pre_trainer", "post_trainer", "sft_trainer")
_MODULES = re.compile(rf"(?m)^modules:\s*\n(\s*#.*\n|\s*\n)*\s+({'|'.join(_TRAINERS)}):")
_VARIABLE = re.compile(r"\$\{([^:{}]{1,200})(?::([^}]{0,1000}))?\}")
_LORA = _trainer.AdapterKeys(
    rank="lora.dim", alpha="lora.alpha", dropout="lora.dropout", targets="lora.target_modules", saved="",
    usual_rank=32, usual_targets=("all-linear",),
)  # fmt: skip


# What patch_zero_bubble alone has an effect of (configs/modules/megatron/zero_bubble.yaml).
_ZERO_BUBBLE = ("enable_zero_bubble", "zero_bubble_v_schedule", "enable_1f1b_v", "zero_bubble_v_schedule_mem_setup")


def recognises(name: str, text: str) -> bool:
    """Return whether a file is an experiment of Primus: YAML whose modules have a trainer."""
    return name.endswith((".yaml", ".yml")) and "modules" in top_level(text) and bool(_MODULES.search(text))


def read(text: str, source: str = "exp.yaml", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of an experiment on a number of devices, of which it says nothing itself.

    >>> head = "modules:\n  pre_trainer:\n    framework: megatron\n    config: pre_trainer.yaml\n"
    >>> text = head + "    model: llama3.1_8B.yaml\n    overrides: {seq_length: '${LENGTH:64}', global_batch_size: 64}"
    >>> case = read(text, around=ImportContext(num_devices=8, variables={"LENGTH": "4096"}))
    >>> case.plan.dp, case.plan.micro_batch, case.job.seq_len, case.job.global_batch, case.plan.sharding
    (8, 2, 4096, 64, 'distributed-optimizer')
    """
    replace(around, variables={}).settings_alone(source)
    problems = Problems()
    tree = _set(_yaml.parse(text, source), around.variables, problems, "")
    problems.raise_if_any()
    modules = tree.get("modules")
    named = [name for name in _TRAINERS if isinstance(modules, dict) and isinstance(modules.get(name), dict)]
    if len(named) != 1 or not isinstance(modules, dict):
        rule = f"must hold one trainer, and holds {len(named)}"
        raise InputError([Problem("modules", source, rule, f"write one of {', '.join(_TRAINERS)}")])
    module = modules[named[0]]
    keys = Keys(module.get("overrides") or {}, _TABLE, source)
    keys.values |= {name: str(module.get(name) or "") for name in ("framework", "config", "model")}
    if "extends" in tree:
        keys.problems.add("extends", tree["extends"], "takes another file's settings, which is not read", "write them")
    readers = {"megatron": _core, "torchtitan": _titan, "maxtext": _maxtext}
    framework = keys.word("framework")
    if framework not in readers:
        keys.fail("framework", "is not one whose experiments are read", f"use {' or '.join(readers)}")
        keys.problems.raise_if_any()
    return readers[framework](keys, module.get("overrides") or {}, source, around.num_devices)


def _set(value: Any, variables: Mapping[str, str], problems: Problems, path: str) -> Any:
    """Return settings in which variables have their values, or the defaults beside them (yaml_loader.py)."""
    if isinstance(value, dict):
        inner = f"{path}." if path else ""
        return {key: _set(one, variables, problems, f"{inner}{key}") for key, one in value.items()}
    if isinstance(value, list):
        return [_set(one, variables, problems, path) for one in value]
    if not isinstance(value, str) or not _VARIABLE.search(value):
        return value

    def put(match: re.Match[str]) -> str:
        if match[1] not in variables and match[2] is None:
            problems.add(path, value, f"hangs on {match[1]}, which is not set", f"--set {match[1]}=VALUE")
        return variables.get(match[1], match[2] or "")

    return _yaml.value_of(_VARIABLE.sub(put, value))


def _preset(keys: Keys, kind: str) -> dict[str, Any]:
    """Return the settings of a preset's file with those that it extends, none where the preset is not known."""
    name: str = keys.values["model"].removesuffix(".yaml").removesuffix(".yml")
    rows: dict[str, dict[str, Any]] = keys.table[kind]
    settings: dict[str, Any] = {}
    if name not in rows:
        keys.assumed.append(f"no model: {name} is not among the presets that are read")
    while name in rows:
        settings = rows[name] | settings
        name = rows[name].get("extends", "")
    return {key: value for key, value in settings.items() if key != "extends"}


def _core(keys: Keys, overrides: Mapping[str, Any], source: str, devices: int) -> Imported:
    """Return the case of a training with Megatron-LM, whose arguments the overrides are."""
    keys.table = worded(keys)
    config = keys.word("config").removesuffix(".yaml")
    if config not in keys.table["usual"]:
        keys.fail("config", "is not a configuration that is read", "use pre_trainer.yaml or sft_trainer.yaml")
        keys.problems.raise_if_any()
    preset = _preset(keys, "presets")
    values = {**keys.table["usual"].get(config, {}), **preset, **overrides}
    values |= _turbo(keys)
    given = GivenArguments(options={name: name for name in by_name()})
    given.problems.items = keys.problems.items
    given.values = {name: one for name, one in values.items() if name in by_name() and one not in (None, "null")}
    reader = Reader(given)
    built = _settle(keys, reader, preset)
    _read.check(reader)
    plan = _recomputed(keys, _plan.build(reader, devices))
    job = _job.build(reader, plan)
    lora = "lora" if keys.flag("lora.enabled") else ""
    job = replace(job, **_trainer.adapted(keys, lora, _LORA))
    stack = _job.stack(reader)
    given.problems.items[:] = dict.fromkeys(_named(one) for one in given.problems.items)
    keys.assumed += [_in_words(text) for text in reader.assumed]
    return keys.case(source, model=built, plan=plan, job=job, stack=stack, num_devices=devices)


def _turbo(keys: Keys) -> dict[str, Any]:
    """Return what Primus' own words set of Megatron-LM's arguments, and refuse schedules of its own.

    backends/megatron/patches/turbo/moe_dispatcher_patches.py; patches/args/rocm_arg_validation.py for what is set
    without synchronisation; core/extensions/primus_turbo.py for windows, of even layers from 0. All of it runs under
    enable_primus_turbo alone.
    """
    for path in ("patch_zero_bubble", "patch_primus_pipeline", "decoder_pipeline_manual_split_list"):
        if keys.raw(path):
            keys.fail(path, "changes the pipeline in a way of Primus' own, which is not read", "leave it out")
    if not keys.flag("enable_primus_turbo"):
        return {}
    stage = keys.whole("turbo_sync_free_moe_stage", least=0) or 0
    sends = bool(keys.flag("use_turbo_deepep")) or stage > 1
    settings: dict[str, Any] = {"moe_enable_deepep": True, "moe_token_dispatcher_type": "flex"} if sends else {}
    width = keys.whole("sink_sliding_window", least=0)
    if width and keys.flag("use_sink_attention") and keys.flag("use_turbo_attention"):
        some = keys.flag("sink_window_even_layers_only") is not False
        settings |= {"window_size": (width, 0)} | ({"window_attn_skip_freq": 2} if some else {})
    return settings


def _settle(keys: Keys, reader: Reader, preset: Mapping[str, Any]) -> Model | None:
    """Return the model, with what of the arguments hangs on it put where the file leaves it open."""
    given, granularity = reader.given.values, reader.word("recompute_granularity")
    for name in ("recompute_method", "recompute_num_layers") if granularity != "full" else ("recompute_modules",):
        given.pop(name, None)
    if granularity == "full" and keys.raw("recompute_layer_ids"):
        given |= {"recompute_method": "block", "recompute_num_layers": 1}
    elif not granularity or given.get("recompute_num_layers") == 0:  # a block of no layers
        for name in ("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers"):
            given.pop(name, None)
    for name in _ZERO_BUBBLE:
        given.pop(name, None)
    model = load_model(preset["catalogue"]) if "catalogue" in preset else None
    if model:
        given["num_layers"] = model.num_layers
        given["num_experts"] = max(getattr(block.feed_forward, "experts", 0) for block in model.layers)
    if not reader.whole("num_experts", 0):
        for name in ("moe_enable_deepep", "moe_token_dispatcher_type", "moe_layer_freq"):
            given.pop(name, None)
    if model:
        return model
    if not preset:
        _plan.stand_in_layers(reader, "say overrides.num_layers")
        return None
    word = str(given.get("tokenizer_model") or "")
    known = (find_model(word) or namesake(word)) if word else None
    if known and not reader.has("vocab_size"):
        given["vocab_size"] = load_model(known).vocab
        reader.assume(f"vocab_size {given['vocab_size']}: of {word}")
    return _model.build(reader, keys.values["model"].removesuffix(".yaml"))


def _recomputed(keys: Keys, plan: Plan) -> Plan:
    """Return a plan that recomputes as many layers of each stage as are listed, wherever these lie."""
    listed = keys.raw("recompute_layer_ids")
    if not isinstance(listed, (str, list)) or not listed or plan.recompute != "full":
        return plan
    ids = set(map(str, listed if isinstance(listed, list) else str(listed).replace(",", " ").split()))
    each = max(-(-len(ids) // plan.pp), 1)
    keys.assumed.append(f"recompute_layers {each}: the {len(ids)} that are listed, evenly over {plan.pp} stages")
    return replace(plan, recompute_layers=each)


def _titan(keys: Keys, overrides: Mapping[str, Any], source: str, devices: int) -> Imported:
    """Return the case of a training with torchtitan, whose tables the overrides are."""
    theirs: dict[str, Any] = {}
    ours = {name: keys.values[name] for name in ("framework", "config", "model")}
    for path, value in flat_keys(overrides):
        (ours if matches(path, keys.table["own"]["keys"]) else theirs)[path] = value
    keys.values = ours
    preset = _preset(keys, "flavors")
    usual = {**keys.table["torchtitan"], **{f"model.{name}": value for name, value in preset.items()}}
    for path, value in theirs.items():
        above = any(path.startswith(f"{other}.") for other in usual)
        if above or (value is not None and any(other.startswith(f"{path}.") for other in usual)):
            keys.problems.add(path, plain(value), "is a value in place of a map, or the reverse", "write torchtitan's")
    if ".mx" in str(theirs.get("model.converters")):
        keys.problems.add("model.converters", "quantize.linear.mx", "is not a precision that is read", "use float8")
    keys.problems.raise_if_any()
    return _within(keys, torchtitan.read_tree(_nested(usual | theirs), source, devices), theirs, source)


def _maxtext(keys: Keys, overrides: Mapping[str, Any], source: str, devices: int) -> Imported:
    """Return the case of a training with MaxText, whose settings the overrides are."""
    keys.values = {name: keys.values[name] for name in ("framework", "config", "model")}
    theirs = {path: value for path, value in flat_keys(overrides) if path not in keys.table["own"]["keys"]}
    preset = _preset(keys, "maxtext_models")
    case = maxtext.read_tree({**keys.table["maxtext"], **preset, **theirs}, source, devices)
    if not preset:  # whose sizes are none of base.yml's
        case = replace(case, model=None, assumed=tuple(text for text in case.assumed if "base.yml" not in text))
    return _within(keys, case, theirs, source)


def _within(keys: Keys, case: Imported, theirs: Mapping[str, Any], source: str) -> Imported:
    """Return the case of another trainer's settings as Primus': what became of the words that the file has is told."""
    whole = keys.case(
        source, model=case.model, plan=case.plan, job=case.job, stack=case.stack, num_devices=case.num_devices,
        accumulation=case.accumulation,
    )  # fmt: skip

    def told_of(name: str) -> tuple[ReadArgument, ...]:
        return (*getattr(whole, name), *(one for one in getattr(case, name) if one.argument in theirs))

    return replace(
        whole,
        assumed=(*whole.assumed, *case.assumed),
        silent=(*whole.silent, *(path for path in case.silent if path in theirs)),
        understood=told_of("understood"),
        ignored=told_of("ignored"),
        unknown=told_of("unknown"),
    )


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of dotted paths as maps in maps."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parts, last = path.split(".")
        inner = tree
        for part in parts:
            inner = inner.setdefault(part, {})
        if value is not None:
            inner[last] = value
    return tree


def _named(one: Problem) -> Problem:
    """Return a problem in the words of Primus, which are the names of Megatron-LM's arguments."""
    return Problem(_in_words(one.field), one.value, _in_words(one.rule), _in_words(one.remedy))


def _in_words(text: str) -> str:
    return re.sub(r"--[a-z0-9-]+", lambda m: arguments()[m[0]].name if m[0] in arguments() else m[0], text)
