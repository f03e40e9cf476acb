"""A deployment as the launch line of an engine: what every engine is told, and what none of them can be."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from shardwise.cost import family_of
from shardwise.errors import InputError, Problems
from shardwise.formats._exported import Exported
from shardwise.formats._imported import table
from shardwise.models import catalogue
from shardwise.plans import Plan, Serving
from shardwise.plans.fields import PLAN, SERVING
from shardwise.records import dataclass, replace
from shardwise.serving import InferReport, ServingOptions, checkpoint_format, engine_names, find_engine, infer

Words = dict[str, str | int | float | bool | tuple[int, ...]]
"""Flags by name with their values; True stands alone."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a launch is told beside the answer: whether prefixes are cached, the longest request, the hub's name.

    `context` 0 is the longest request of the answer, `model` empty what the catalogue has.
    """

    prefixes: bool = False
    context: int = 0
    model: str = ""


PLAIN = Asked()
"""An answer alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """What an answer assumed of a server, in the terms of a launch: `plan.dp` replicas run beside each other.

    With `spread` experts lie on the devices of all replicas, which then are one engine. `apart` is whether other
    replicas are launched one by one. `role` is "prefill" or "decode" of a pool that does one of both.
    """

    report: InferReport
    asked: Asked = PLAIN
    apart: bool = False
    role: str = ""

    @property
    def plan(self) -> Plan:
        """The complete plan."""
        return self.report.plan

    @property
    def job(self) -> Serving:
        """The job as it was asked."""
        return self.report.job

    @property
    def model(self) -> str:
        """The name under which the engine loads the model."""
        return self.asked.model or hub_name(self.report.case.model.name)

    @property
    def context(self) -> int:
        """Tokens of the longest request that the engine takes."""
        return max(self.asked.context, self.job.total_tokens)

    @property
    def prefixes(self) -> bool:
        """Whether prefixes are cached: where it is asked for, and by engines that do so."""
        return self.asked.prefixes or self.report.case.engine.memory.caches_prefixes

    @property
    def spread(self) -> bool:
        """Whether experts are split over more devices than one replica has."""
        return self.plan.dp > 1 and self.plan.ep * self.plan.etp > self.plan.tp

    @property
    def node(self) -> int:
        """Devices of a node."""
        return self.report.case.cluster.devices_per_node

    @property
    def together(self) -> int:
        """Replicas that one launch starts: all that share experts, or else those that lie on one node."""
        near = self.plan.tp * self.plan.pp * self.plan.dp <= self.node
        return self.plan.dp if self.spread or (near and not self.apart) else 1

    @property
    def nodes(self) -> int:
        """Nodes of one launch."""
        return -(-self.plan.tp * self.plan.pp * self.together // self.node)

    @property
    def sequences(self) -> int:
        """Sequences that run at once on a replica."""
        return max(self.job.batch, self.report.case.profiled.sequences)

    @property
    def stage_sequences(self) -> int:
        """Sequences of a step: of all that may run, which a pipeline has in as many batches as stages, or the batch."""
        return max(self.job.batch, -(-self.report.case.profiled.sequences // self.plan.pp))

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step of a replica: without a bound the whole batch of prompts."""
        return self.report.case.step_tokens or max(self.job.batch * self.report.case.new_input_tokens, self.sequences)

    @property
    def share(self) -> float:
        """The share of the memory that the engine may use, as it spells it."""
        share = self.report.memory_share
        return (
            share if share in (self.job.memory_fraction, self.report.case.engine.memory.fraction) else round(share, 3)
        )

    @property
    def wide(self) -> str:
        """The 16-bit type, or fp32, where it is not what an engine takes by itself."""
        sixteen_bits = self.job.weights in ("fp16", "float16", "bf16", "bfloat16", "fp32", "float32")
        return self.report.case.dtype if sixteen_bits or self.report.case.dtype != "bf16" else ""

    @property
    def narrowed(self) -> str:
        """The format that weights of a wide checkpoint are brought into at the start; empty: as they are stored."""
        named = self.report.case.format.name
        return "" if self.report.case.model.quantization or named in ("bf16", "fp32") else named


def hub_name(name: str) -> str:
    """Return the hub id of a model, or its name where it has none.

    >>> hub_name("llama-3.1-8b"), hub_name("./mine")
    ('meta-llama/Llama-3.1-8B', './mine')
    """
    return str(catalogue().get(name, {}).get("hub", [name])[0])


def engine_for(target: str) -> str:
    """Return the engine whose launch a target writes; Dynamo's workers are vLLM's.

    >>> engine_for("trtllm"), engine_for("dynamo")
    ('tensorrt-llm', 'vllm')
    """
    written = "vllm" if target == "dynamo" else target
    return next(name for name in engine_names() if find_engine(name).exporter == written)


# Exporters of engines whose step must have room for a token of every sequence: vllm/config/scheduler.py
# verify_max_model_len; tensorrt_llm/llmapi/llm_args.py validate_runtime_args.
_ONE_TOKEN_EACH = ("vllm", "dynamo", "trtllm")


def check(one: Deployment, target: str, narrows: Sequence[str] = ("fp8",)) -> Problems:
    """Return what no launch line says, and an engine that is another; `narrows` are formats made as it starts."""
    problems, case, job = Problems(), one.report.case, one.job
    own = find_engine(engine_for(target))
    system = own.title
    if case.engine.exporter != own.exporter:
        problems.add("engine", case.engine.name, f"is not {system}", f"use {own.name}, or leave it out")
    if not case.model.generates:
        problems.add(
            "model", case.model.name, f"generates no tokens, and {system} is started for those that do", "use infer"
        )
    if case.model.family in own.formats.lacks:
        rule = f"is of a family that {system} has no class for ({case.model.family})"
        problems.add("model", case.model.name, rule, "name an engine that runs it")
    family = family_of(case.cluster.device)
    problems.items += own.layouts.refused(system, case.model, one.plan, case.format.name, family).items
    shared = one.plan.ep * one.plan.etp
    if one.spread and shared % one.plan.tp == 0 and one.plan.tp * one.plan.dp != shared:
        rule = f"is more than one engine, whose experts lie on {shared} devices, and a launch is of one"
        problems.add("dp", one.plan.dp, rule, f"use dp {shared // one.plan.tp}")
    wide = [axis for axis in one.plan.order if getattr(one.plan, axis) > 1]
    if "tp" in wide[1:]:
        rule = f"cannot be said to {system}, whose neighbours are ranks of tensor parallelism"
        problems.add("order", ",".join(one.plan.order), rule, "put tp first, or leave it out")
    stored = case.model.quantization
    if case.format.name not in ([checkpoint_format(stored).name] if stored else ["bf16", "fp32", *narrows]):
        rule = f"is no format that {system} brings weights {'of ' + stored + ' ' if stored else ''}into as it starts"
        named = "" if stored else "".join(f"use {way} or " for way in narrows[:3])
        problems.add("weights", job.weights, rule, f"{named}leave it out, or name a checkpoint that is stored so")
    most = case.model.max_context
    if most and job.total_tokens > most:
        rule = f"and output exceed the context of {most} that {system} takes the checkpoint at"
        problems.add("input_tokens", job.input_tokens, rule, f"use at most {most} together")
    if 0 < one.report.most_started < one.sequences:
        rule = f"is more than the {one.report.most_started} blocks of states that {system} has room for"
        problems.add("max_sequences", one.sequences, rule, f"use {one.report.most_started}, or fewer")
    least = one.stage_sequences if target == "trtllm" else one.sequences
    if target in _ONE_TOKEN_EACH and 0 < one.step_tokens < least:
        rule = f"must be at least the {least} sequences of a step"
        problems.add("max_batched_tokens", one.step_tokens, rule, f"use {least}")
    return problems


def types(one: Deployment, system: str, caches: Mapping[str, str], problems: Problems) -> Words:
    """Return the types of weights, activations and cache, in the flags that vLLM and SGLang have in common."""
    words: Words = {}
    if one.wide:
        words["--dtype"] = _DTYPES[one.wide]
    if one.narrowed:
        words["--quantization"] = one.narrowed
    cache = one.job.kv_cache
    if cache and cache not in caches:
        problems.add("kv_cache", cache, f"is no type of a cache of {system}", "use one of " + ", ".join(caches))
    elif cache:
        words["--kv-cache-dtype"] = caches[cache]
    return words


def proposer(one: Deployment, system: str, names: Mapping[str, str], problems: Problems) -> tuple[str, str]:
    """Return an engine's word for what proposes tokens, and the checkpoint that it loads; both empty for nothing.

    Where a head is one of EAGLE's third version, its checkpoint's name says so.
    """
    method, draft = one.job.speculative_method, one.job.draft_model
    if not method:
        return "", ""
    if method == "eagle" and not draft:
        problems.add(
            "draft_model", None, f"is missing: {system} loads the checkpoint of a head", "name it: --draft-model"
        )
    third = method == "eagle" and re.search(r"eagle-?3", draft, re.IGNORECASE) is not None
    return names["eagle3" if third else method], hub_name(draft) if draft else ""


def stage_variable(one: Deployment, name: str) -> str:
    """Return the assignment that cuts layers into stages, empty where all are equal."""
    layers = one.plan.stage_layers
    return f"{name}={','.join(map(str, layers))} " if len(set(layers)) > 1 else ""


def lost(one: Deployment, system: str, text: str, files: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the engine that a launch is read back as; `files` are its other files, by their names.

    Raises `InputError` naming every field that it was not told and that moves the answer.
    """
    from shardwise.formats._launched import LaunchFiles, read_launch

    if "$" in one.job.draft_model:
        return ""  # which a reader takes for a variable that is left open
    back = read_launch(text, system, {"NODE_RANK": "0", "MASTER_ADDR": "first"}, LaunchFiles(named=files)).values
    own, copies = one.report, one.plan.dp // one.together
    usual = {f.name: f.default for kind in (Plan, Serving) for f in fields(kind)}
    theirs = {
        name: back.get(name) or usual[name]
        for row in (*PLAN, *SERVING)
        if row.exported and (row in SERVING or "infer" in row.taken_by)
        for name in row.names
    }
    theirs |= {"dp": (back.get("dp") or 1) * copies, "gpu_layers": back.get("gpu_layers", -1)}
    theirs["captured_sequences"] = back.get("captured_sequences", -1)
    if abs(back.get("memory_fraction", 0.0) - own.memory_share) < _ROUNDED:
        # Said, it holds whatever else is: SGLang's own would follow --max-running-requests.
        theirs["memory_fraction"] = one.job.memory_fraction or own.memory_share
    if theirs["draft_model"] == hub_name(one.job.draft_model):
        theirs["draft_model"] = one.job.draft_model
    ours = {name: getattr(one.plan if hasattr(one.plan, name) else one.job, name) for name in theirs}
    other = {name: value for name, value in theirs.items() if value != ours[name]}
    if not _moves(own, other):
        return str(back.get("engine", ""))
    alone = {name: value for name, value in other.items() if _moves(own, {name: value})}
    problems = Problems()
    for name, value in (alone or other).items():
        remedy = "leave it out" if value == usual[name] else f"use {value}"
        problems.add(name, ours[name], f"cannot be said to {table(f'{system}.toml')['checked']['system']}", remedy)
    raise InputError(dict.fromkeys(problems.items))


def engine_note(one: Deployment, system: str, read: str) -> tuple[str, ...]:
    """Return what a launch is to be read with where its flags alone are `read` as another engine than the answer's."""
    asked, checked = one.report.case.engine.name, table(f"{system}.toml")["checked"]
    if read in ("", asked):
        return ()
    flags = f"flags are those of {checked['system']} {checked['version']}"
    return (f"computed for engine {asked}; {flags}, which --from reads as {read} unless --engine {asked} is given",)


# Shares of the memory are written with so many digits.
_ROUNDED = 6e-4


def _moves(report: InferReport, values: Mapping[str, Any]) -> bool:
    """Return whether a case takes other bytes or seconds, or is refused, with other values of its fields."""
    case, plan, job = report.case, report.plan, report.job
    named: list[dict[str, Any]] = [{k: v for k, v in values.items() if hasattr(part, k)} for part in (plan, job)]
    options = ServingOptions(engine=case.engine, efficiencies=case.efficiencies)
    try:
        other = infer(case.model, case.cluster, replace(plan, **named[0]), replace(job, **named[1]), options)
    except InputError:
        return True
    pairs = zip(_figures(report), _figures(other), strict=True)
    return any(abs(a - b) > 1e-3 * abs(a) for a, b in pairs)


def _figures(report: InferReport) -> tuple[float, ...]:
    return report.memory.needed, report.kv_cache_tokens, report.ttft_seconds, report.tpot_seconds


def written(
    one: Deployment,
    system: str,
    start: str,
    words: Words,
    notes: Sequence[str],
    files: Mapping[str, str] = MappingProxyType({}),
) -> Exported:
    """Return the launch script of an engine, with the files that it names."""
    checked: Mapping[str, str] = table(f"{system}.toml")["checked"]
    devices = one.plan.tp * one.plan.pp * one.together
    lines = [f"    {name}" + ("" if value is True else f" {_shown(value)}") for name, value in words.items()]
    file = f"{system}-{one.role}.sh" if one.role else f"{system}.sh"
    case, many = one.report.case, one.plan.dp // one.together
    head = f"#!/bin/bash\n# {case.model.name} on {devices} x {case.cluster.device.name}, for "
    comments = list(notes)
    if many > 1:
        comments.append(f"{many} such servers stand beside each other, each on {devices} devices of its own")
    if one.nodes > 1:
        comments.append(f"on {one.nodes} nodes")
    if any("$NODE_RANK" in str(value) or "$MASTER_ADDR" in str(value) for value in words.values()):
        comments.append("started on each node, with NODE_RANK and MASTER_ADDR set")
    first = head + f"{checked['system']} {checked['version']}.\n"
    line = " \\\n".join([start, *lines, '    "$@"']) + "\n"
    comments += engine_note(one, system, lost(one, system, line, files))
    text = first + "".join(f"# {note}\n" for note in comments) + line
    return Exported(
        system=checked["system"], version=checked["version"], files={file: text, **files}, notes=tuple(comments),
        launch=f"bash {file}", nodes=one.nodes, node_devices=devices // one.nodes, copies=many, serves=True,
    )  # fmt: skip


# What the shell is to fill in; in anything else a dollar is a letter of a name.
_OURS = re.compile(r'\$NODE_RANK|\$MASTER_ADDR(:\d+)?|\$\(dirname "\$0"\)/\w+\.yaml')


def given_words(value: str | float | tuple[int, ...]) -> list[str]:
    """Return the words behind a flag: none behind a switch that is on, and all of several.

    >>> given_words(True), given_words(8), given_words((1, 2))
    ([], ['8'], ['1', '2'])
    """
    return [] if value is True else [*map(str, value)] if isinstance(value, tuple) else [f"{value}"]


def _shown(value: str | float | tuple[int, ...]) -> str:
    if isinstance(value, tuple):
        return " ".join(given_words(value))
    if isinstance(value, float):
        return f"{value:g}"
    return f'"{value}"' if _OURS.fullmatch(str(value)) else shlex.quote(str(value))


def refuse(problems: Problems) -> None:
    """Raise `InputError` with everything that cannot be said."""
    if problems.items:
        raise InputError(dict.fromkeys(problems.items))
