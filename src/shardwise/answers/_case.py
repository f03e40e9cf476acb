"""From the values of flags to the model, the cluster, the plan and the job; every problem is collected."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from shardwise.answers import _flags, _precision
from shardwise.answers._commands import MANY
from shardwise.answers._inputs import Inputs, example_of
from shardwise.errors import InputError, Problem, plain
from shardwise.formats import SERVERS
from shardwise.plans import DEGREES
from shardwise.records import replace

if TYPE_CHECKING:
    from shardwise.cost import Efficiencies
    from shardwise.hardware import Cluster
    from shardwise.models import Model
    from shardwise.plans import Plan, Serving, Settings, Stack, Training

_EFFICIENCIES = {
    "compute_efficiency": "compute",
    "memory_efficiency": "memory",
    "fast_efficiency": "fast_link",
    "slow_efficiency": "slow_link",
    "matmul_flops": "matmul_flops_per_second",
    "memory_bandwidth_achieved": "memory_bytes_per_second",
    "fast_bandwidth_achieved": "fast_bytes_per_second",
    "slow_bandwidth_achieved": "slow_bytes_per_second",
    "ideal": "ideal",
}


# Endings of launch scripts and settings of trainers, which no configuration of a model has.
_SETTINGS = (".sh", ".yaml", ".yml", ".toml")


def load_the_model(inputs: Inputs) -> Model | None:
    """Return the model with its overrides, or None with the problems recorded."""
    given = {key: inputs.values[key] for key in _flags.model_flags() if key in inputs.values}
    if "part" in inputs.values and "model" not in inputs.values:
        inputs.fail("part", inputs.values["part"], "is of a model's own file, and none is named", "leave it out")
    if _flags.FROM.keys() & (inputs.values.keys() | inputs.bad) and "model" not in inputs.values:
        return _from_model(inputs, given)
    if inputs.bad & {"model", *_flags.model_flags()} or not (given or "model" in inputs.values):
        return None
    word = inputs.values.get("model", "")
    if os.path.splitext(word)[1].lower() in _SETTINGS and os.path.isfile(word):
        inputs.fail("model", word, "is no configuration of a model", f"read a script or settings with --from {word}")
        return None
    from shardwise.models import load_model, model_from_sizes

    try:
        if "model" not in inputs.values:
            return model_from_sizes(given)
        overrides = _overrides(given, inputs.values["model"])
        part, serves = inputs.get("part", ""), {inputs.command, inputs.get("what", "")} & {"infer", "serve"}
        if "max_context" in overrides and (serves or inputs.get("target", "") in SERVERS):
            # A server takes shorter requests of the same checkpoint, as with vLLM's --max-model-len.
            context = overrides["max_context"]
            others = {key: value for key, value in overrides.items() if key != "max_context"}
            model = load_model(inputs.values["model"], others, part=part)
            if 0 < context < model.max_context:
                return model.limited(context)
        return load_model(inputs.values["model"], overrides, part=part)
    except InputError as error:
        inputs.merge(error)
        inputs.bad.add("model")
    return None


def _from_model(inputs: Inputs, given: Mapping[str, Any]) -> Model | None:
    """Return the model of a file of another system, which takes no overrides."""
    for key, value in given.items():
        inputs.fail(key, value, "changes the model of a file", "change the file, or name the model too")
    if inputs.imported is not None and inputs.imported.model is None and "model" not in inputs.bad:
        why = [one.removeprefix("no model") for one in inputs.imported.assumed if one.startswith("no model: ")]
        rule = f"is missing, and {inputs.imported.source} has none that is read"
        inputs.fail("model", None, rule + "".join(why[:1]), example_of("model"))
    return inputs.imported.model if inputs.imported and not given else None


def _overrides(given: dict[str, Any], model: str) -> dict[str, Any]:
    """Return fields of a model that a named one can take; raises `InputError` for those of sizes alone."""
    from shardwise.models import SIZE_FIELDS

    rule, remedy = f"describes a model by its sizes alone, and {model} is named", "leave it out, or name no model"
    problems = [Problem(key, given[key], rule, remedy) for key in given if key in SIZE_FIELDS]
    if problems:
        raise InputError(problems)
    return given


def load_the_cluster(inputs: Inputs) -> Cluster | None:
    """Return the cluster with its overrides, or None with the problems recorded."""
    overrides = {key: inputs.values[key] for key in _flags.cluster_flags() if key in inputs.values}
    if "on" not in inputs.values:
        # Where devices are asked for their overrides wait for them.
        for key in overrides if "on" not in inputs.bad else ():
            inputs.fail(key, overrides[key], "is of devices, and none are named", "add --on, or leave it out")
        return None
    from shardwise.hardware import Cluster

    text = inputs.values["on"]
    if "," in text and inputs.command not in MANY and not text.endswith(".toml"):
        several = "`shardwise train`, `infer` and `serve` compare several"
        inputs.fail("on", text, f"names several devices, and {inputs.command} takes one", f"name one; {several}")
        return None
    try:
        most = overrides.pop("num_devices", 0)
        if text.endswith(".toml") and not text[0].isdigit():
            return _first(_from_file(text, overrides, inputs.get("follow", False)), text, most)
        return _first(Cluster.parse(text, overrides), text, most)
    except InputError as error:
        inputs.merge(error)
        inputs.bad.add("on")
    return None


def _first(cluster: Cluster, text: str, count: int) -> Cluster:
    """Return the first so many devices of a cluster, all of them for 0; raises `InputError` where it has fewer."""
    from shardwise.hardware import part_of
    from shardwise.units import counted

    if count > cluster.num_devices:
        rule = f"is more than the {counted(cluster.num_devices, 'device')} of {text}"
        raise InputError([Problem("num_devices", count, rule, "name more in --on, such as 64xh100")])
    return part_of(cluster, count) if count else cluster


def _from_file(path: str, overrides: Mapping[str, Any], follow: bool) -> Cluster:
    from shardwise.hardware import Cluster

    if overrides:
        key, value = next(iter(overrides.items()))
        rule = f"is given beside {path}, which describes the whole cluster"
        raise InputError([Problem(key, plain(value), rule, "change the file, or name a device in --on")])
    return Cluster.load(path, follow)


def make_plan(inputs: Inputs) -> Plan:
    """Return the plan that was asked for; dp and the micro-batch are 0 where they are to be deduced."""
    from shardwise.plans import Plan, schedule_for

    names = {f.name for f in fields(Plan)}
    given = {key: value for key, value in inputs.values.items() if key in names}
    if inputs.imported is not None:
        from shardwise.answers._from import base_plan

        given = base_plan(inputs.imported, given)
    given.setdefault("dp", 0)
    given.setdefault("micro_batch", 0)
    given.setdefault(
        "schedule", schedule_for(given.get("vpp", 1), _schedules(inputs) if given.get("pp", 1) > 1 else ())
    )
    order = given.get("order")
    if order is not None and "tp2" not in order and "tp" in order:
        at = order.index("tp") + 1
        given["order"] = (*order[:at], "tp2", *order[at:])
    return Plan(**given)


def _schedules(inputs: Inputs) -> tuple[str, ...]:
    """Return the schedules of the framework that is named; none where none is, or one that is not known."""
    from shardwise.plans import find_stack

    try:
        return find_stack(inputs.values["stack"]).runs.schedule if "stack" in inputs.values else ()
    except InputError:
        return ()


DEFAULT_SEQ_LEN = 4096


def seq_len_of(inputs: Inputs, model: Model | None) -> int:
    """Return the sequence length: as given, or 4096, or what the model can take where that is less."""
    if "seq_len" in inputs.values:
        return cast(int, inputs.values["seq_len"])
    length = usual_length(model, DEFAULT_SEQ_LEN)
    inputs.notes.append(f"seq_len {length}: not given")
    return length


def usual_length(model: Model | None, default: int) -> int:
    """Return a default length, or what the model can take where that is less; patches of an image are all there."""
    limit = (model.positions or model.max_context) if model is not None else 0
    if not limit:
        return default
    return min(default, limit) if model is None or model.embedding else limit


def make_job(inputs: Inputs, model: Model | None) -> Training:
    """Return the training job; a global batch of 0 is to be deduced."""
    from shardwise.plans import Training
    from shardwise.plans.fields import TRAINING, renamed

    _precision.take_dtype(inputs, "precision")
    names = {f.name for f in fields(Training)}
    own = renamed(TRAINING)
    given = {own.get(key, key): value for key, value in inputs.values.items() if own.get(key, key) in names}
    if inputs.imported is not None:
        from shardwise.answers._from import base_job

        given = base_job(inputs.imported, given)
    given.setdefault("global_batch", 0)
    if not given.get("seq_len"):
        given["seq_len"] = seq_len_of(inputs, model)
    lengths = inputs.values.get("document_lengths")
    if lengths:
        given["attention_density"] = packed_density(inputs, lengths, given["seq_len"])
    return Training(**given)


def packed_density(inputs: Inputs, lengths: Sequence[int], seq_len: int) -> float:
    """Return the attention density of packed documents, recording lengths that cannot be."""
    from shardwise.plans import density_of

    if "attention_density" in inputs.values:
        inputs.fail(
            "document_lengths", ",".join(map(str, lengths)), "gives attention_density too", "give one of the two"
        )
    if not 1 <= min(lengths) <= max(lengths) <= seq_len:
        rule = f"are tokens of documents within a sequence of {seq_len}"
        inputs.fail("document_lengths", ",".join(map(str, lengths)), rule, f"use lengths from 1 to {seq_len}")
        return 1.0
    return density_of(lengths, seq_len)


def make_efficiencies(inputs: Inputs) -> Efficiencies:
    """Return the efficiencies that were imposed."""
    from shardwise.cost import OVERLAP_AXES, Efficiencies

    given = {name: inputs.values[key] for key, name in _EFFICIENCIES.items() if key in inputs.values}
    exposed = tuple(axis for axis in OVERLAP_AXES if not inputs.get(f"overlap_{axis}", True))
    return Efficiencies(**given, exposed_axes=exposed)


def make_settings(inputs: Inputs, cluster: Cluster | None = None) -> Settings:
    """Return what a file and the flags set of a framework: a flag wins over the file, one tensor's over that of all."""
    from shardwise.plans import Settings
    from shardwise.plans.fields import SETTINGS

    given: dict[str, Any] = {}
    for row in SETTINGS:
        if row.key in inputs.values:
            given |= dict.fromkeys(row.names, inputs.values[row.key])
    settings = replace(inputs.imported.stack.settings if inputs.imported else Settings(), **given)
    if inputs.imported and cluster and inputs.command != "export" and "rollout_memory" not in inputs.values:
        return inputs.imported.beside_engine(settings, cluster)
    return settings


def make_stack(inputs: Inputs, default: str = "", cluster: Cluster | None = None) -> Stack | None:
    """Return the framework, by default the devices' or the sharding's own, or None with the problem recorded."""
    from shardwise.plans import carried, find_stack, sharding_stack

    given = inputs.values.get("sharding", ())
    shardings = (given,) if isinstance(given, str) else tuple(given)
    if inputs.imported is not None and "stack" not in inputs.values:
        own = sharding_stack(inputs.imported.stack, *shardings)
        if all(word in own.runs.sharding for word in shardings):
            return replace(_attending(inputs, own), settings=make_settings(inputs, cluster))
    try:
        word = cast(str, inputs.get("stack", default) or usual_stack(inputs, cluster))
        stack = find_stack(word)
        if stack.name != word:
            inputs.notes.append(f"stack {word} taken as {stack.name}")
        settings = make_settings(inputs, cluster)
        if (file := inputs.imported) is not None:
            stack = carried(stack, file.stack, file.job is None or file.job.method == "sft")
            settings = settings if settings.loss else replace(settings, loss=stack.settings.loss)
        return replace(_attending(inputs, sharding_stack(stack, *shardings)), settings=settings)
    except InputError as error:
        inputs.merge(error)
        inputs.bad.add("stack")
    return None


def _attending(inputs: Inputs, stack: Stack) -> Stack:
    """Return a framework with the attention that is named, the problem recorded where it takes none."""
    from shardwise.plans import attention_problems, with_attention

    word = inputs.values.get("attn_implementation", "")
    if not word:
        return stack
    if (problems := attention_problems(stack, word)).items:
        inputs.merge(InputError(problems.items))
        return stack
    title = re.sub(", (SDPA|eager|flash) attention$", "", stack.title)
    return replace(with_attention(stack, word), title=f"{title}, {word}")


def make_serving(inputs: Inputs, model: Model | None = None) -> Serving:
    """Return the batch to be served."""
    from shardwise.plans import Serving

    _precision.take_dtype(inputs, "weights")

    names = {f.name for f in fields(Serving)}
    given = {key: value for key, value in inputs.values.items() if key in names}
    if model is not None and not model.generates and "input_tokens" not in given:
        given["input_tokens"] = usual_length(model, Serving().input_tokens)
        inputs.notes.append(f"input_tokens {given['input_tokens']}: not given")
    if "misc_memory" in inputs.values:
        given["misc_bytes"] = inputs.values["misc_memory"]
    return Serving(**given)


# The engine that people run on devices of a vendor, where none is named; vLLM on all others.
ENGINES = {"Apple": "llama.cpp"}
USUAL_ENGINE = "vllm"


def engine_of(inputs: Inputs, cluster: Cluster) -> str:
    """Return the engine that was asked for, else the vendor's usual one, which is said where it is not vLLM."""
    usual = ENGINES.get(cluster.device.vendor, USUAL_ENGINE)
    if "engine" not in inputs.values and usual != USUAL_ENGINE:
        inputs.notes.append(f"engine {usual}: not given, and the devices are of {cluster.device.vendor}")
    return cast(str, inputs.get("engine", usual))


def _offloads(inputs: Inputs) -> tuple[str, ...]:
    """Return what is to leave the device; of several to try all of it, since one trainer runs each of them."""
    words: tuple[Any, ...] = inputs.values.get("offload") or ()
    several = words and isinstance(words[0], tuple)
    return tuple(dict.fromkeys(chain.from_iterable(words))) if several else words


def _recomputing(inputs: Inputs, plan: Plan) -> Plan:
    """Return a plan with what frameworks of fine-tuning recompute beside quantised weights, where nothing is said.

    The least that fits is not known yet: frameworks are asked for a plan without it.
    """
    from shardwise.plans import find_base

    base, given = inputs.values.get("base") or "", inputs.values.keys() | inputs.bad
    if plan.recompute == "auto":
        return replace(plan, recompute="none")
    if not isinstance(base, str) or not base or given & {"recompute", "modules", "recompute_layers"}:
        return plan
    return replace(plan, recompute="full") if find_base(base).narrow else plan


def usual_stack(inputs: Inputs, cluster: Cluster | None = None) -> str:
    """Return the framework of the devices, else of the plan that the flags describe, said where it is not expected."""
    from shardwise.plans import Plan, default_stack, filling, vendor_stack
    from shardwise.plans.fields import PLAN, keys

    vendor = cluster.device.vendor if cluster else ""
    if usual := vendor_stack(vendor):
        inputs.notes.append(f"stack {usual}: not given, and the devices are of {vendor}")
        return usual
    asked = str(inputs.values.get("adapter") or ""), str(inputs.values.get("method") or "sft")
    tried = any(isinstance(inputs.values.get(name), str) for name in DEGREES)
    if tried or any(isinstance(inputs.values.get(name), tuple) for name in keys(PLAN, "choice", "whole")):
        # Values to try, of a search.
        return default_stack(Plan(offload=_offloads(inputs)), *asked)
    plan = replace(_recomputing(inputs, make_plan(inputs)), offload=_offloads(inputs))
    plan = filling(plan, cluster.num_devices) if cluster else plan
    name, alone = default_stack(plan, *asked), default_stack(Plan(sharding=plan.sharding), *asked)
    if name != alone:
        without = {
            f"run {plan.schedule}": replace(plan, schedule=Plan().schedule),
            f"offload {', '.join(plan.offload)}": replace(plan, offload=()),
        }
        reasons = (words for words, usual in without.items() if default_stack(usual, *asked) != name)
        lacks = next(reasons, "split a model as this plan does")
        inputs.notes.append(f"stack {name}: not given, and {alone} does not {lacks}")
    return name
