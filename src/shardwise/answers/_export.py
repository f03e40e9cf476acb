"""`shardwise export`: a plan as another system's files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.answers import _train
from shardwise.answers._answer import Answer, print_error
from shardwise.answers._case import USUAL_ENGINE
from shardwise.answers._commands import command
from shardwise.answers._converters import fail
from shardwise.answers._imposed import exported_imposed
from shardwise.answers._infer import ask as ask_batch
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page
from shardwise.errors import InputError, Problem, plain
from shardwise.formats import SERVERS, SYSTEMS
from shardwise.plans import find_stack, stack_names
from shardwise.plans.fields import SERVING, SETTINGS, TRAINING, Field
from shardwise.records import replace
from shardwise.units import counted, show_bytes, show_seconds

if TYPE_CHECKING:
    from shardwise.answers._page import Page
    from shardwise.formats import Asked, Exported
    from shardwise.serving import InferReport
    from shardwise.serving.load import ServeReport
    from shardwise.training import TrainReport

# Systems whose servers are told that they compute prompts, or decode.
_POOLED = ("vllm", "sglang", "dynamo")
# What says when requests arrive.
_LOADS = {"rate", "users", "trace", "arrivals"}
_NO_LOAD = "is of a load, and nothing says when requests arrive"
_SHARDED = ("fsdp", "torchtitan", "verl")


def with_target(words: list[str]) -> list[str]:
    """Return the words of an export with the target that writes for a framework, or an engine, where that is named.

    >>> with_target(["llama-factory", "gpt2"]), with_target(["vllm", "gpt2"])
    (['llamafactory', 'gpt2', '--stack', 'llama-factory'], ['vllm', 'gpt2'])
    """
    if not words or words[0].startswith("-") or words[0] in (*SYSTEMS, *SERVERS):
        return words
    from shardwise.serving import engine_names, find_engine

    named = words[0]
    if named in stack_names():
        if not (target := find_stack(named).runs.exporter):
            rule = f"is {find_stack(named).title}, whose files are not written"
            remedy = f"use one of {', '.join(SYSTEMS)}, or `shardwise train --stack {named}` for its memory and time"
            raise InputError([Problem("target", named, rule, remedy)])
        given = any(word.partition("=")[0] in ("--stack", "--config", "--from") for word in words)
        return [target, *words[1:], *([] if given else ["--stack", named])]
    if named in engine_names() and (target := find_engine(named).exporter):
        return [target, *words[1:]]
    return words


def _complete(inputs: Inputs, target: str) -> None:
    """Put the target's framework, and that of FSDP its sharding, where neither flags nor a file name one."""
    values = inputs.values
    if target in _SHARDED and inputs.imported is None and not {"stack", "sharding"} & values.keys():
        values["sharding"] = "fsdp"
        inputs.notes.append("sharding fsdp: what the file is asked for")
    stack = _stack_of(target, values.get("sharding", "fsdp" if target in _SHARDED else "none"))
    if inputs.imported is None or inputs.imported.stack.runs.exporter != target:
        values.setdefault("stack", stack)


def _stack_of(target: str, sharding: str) -> str:
    """Return the framework that a target's files are for: the first that it writes, or of several that shards so.

    >>> _stack_of("torchtitan", "fsdp"), _stack_of("fsdp", "fsdp"), _stack_of("fsdp", "none")
    ('fsdp2', 'accelerate', 'pytorch')
    """
    named = [name for name in stack_names() if find_stack(name).runs.exporter == target]
    return next((name for name in named if sharding in find_stack(name).runs.sharding), named[0])


def ask(inputs: Inputs) -> tuple[Exported, TrainReport | InferReport, list[str]]:
    """Return the files of a case, what was assumed as comments, its report, and what it misses of a load.

    Raises `InputError` with every problem, and every field that cannot be told.
    """
    from shardwise.formats import ExportCase

    target = inputs.get("target", "megatron")
    if target in SERVERS:
        return _served(inputs, target)
    _complete(inputs, target)
    report = _train.trained(inputs)
    stated = ExportCase(
        model=report.case.model,
        cluster=report.case.cluster,
        plan=report.plan,
        job=report.job,
        stack=report.case.stack,
        named=_named(inputs),
    )
    export: Callable[[ExportCase], Exported] = import_module(f"shardwise.formats.{target}").export
    exported, imposed = exported_imposed(inputs, stated, report, export)
    if "wrap" in inputs.values:
        from shardwise.formats import processes

        nodes, each = processes(stated)
        exported = _wrapped(inputs, replace(exported, nodes=nodes, node_devices=each), report)
    apart = [*_apart(exported, (TRAINING, stated.job), (SETTINGS, stated.stack.settings)), *imposed]
    report = replace(report, assumptions=(*report.assumptions, *apart))
    notes = [*_unfit(report), *(f"assumed: {note}" for note in report.assumptions)]
    files = {name: commented(name, text, notes) for name, text in exported.files.items()}
    return replace(exported, files=files), report, []


def _apart(exported: Exported, *asked: tuple[Iterable[Field], Any]) -> list[str]:
    """Return the facts of a question that no setting of a system says."""
    from shardwise.formats import unsaid

    return [f"{one}: no setting of {exported.system} says it" for one in unsaid(*asked)]


def _named(inputs: Inputs) -> str:
    """Return the hub's name of the model as it was asked for, or as the file names it; empty where neither has one."""
    from shardwise.models import namesake

    model = inputs.get("model", inputs.imported.named if inputs.imported else "")
    return model if model.count("/") == 1 and namesake(model) and not os.path.exists(model) else ""


def _check_load(inputs: Inputs) -> None:
    """Record what is asked of a load where nothing says when requests arrive, and of a batch where something does."""
    load, batch = (command(name).flags.keys() for name in ("serve", "infer"))
    loaded = inputs.values.keys() & _LOADS
    idle = (batch - load if loaded else load - batch - {"cached_share"}) & inputs.values.keys()
    for key in sorted(idle):
        rule = f"is of a batch, and --{min(loaded)} asks for a load" if loaded else _NO_LOAD
        remedy = "leave it out" if loaded else "add --rate, --users or --trace"
        inputs.problems.add(key, plain(inputs.values[key]), rule, remedy)


def _missed(load: ServeReport | None) -> list[str]:
    """Return what an engine misses of a load and the limits that were asked of it."""
    if load is None or not load.fits:
        return []
    if not load.stable:
        return ["under this load the queue grows without end"]
    broken = ((f"{one.quantile} {one.metric}", show_seconds(load.value(one)), one.seconds) for one in load.broken)
    return [f"under this load {name} is {value}, over {show_seconds(most)}" for name, value, most in broken]


def _served(inputs: Inputs, target: str) -> tuple[Exported, InferReport, list[str]]:
    """Return the launch line of an engine for a batch, or where something says when requests arrive under load."""
    from shardwise.formats import Asked, engine_for

    if engine_for(target) != USUAL_ENGINE:  # which the devices choose the release of
        inputs.values.setdefault("engine", engine_for(target))
    workers = inputs.get("prefill_workers", 0)
    if workers and target not in _POOLED:
        rule = "are started by an orchestrator of its own, which is not written"
        inputs.problems.add("prefill_workers", workers, rule, f"export {', '.join(_POOLED)}")
    if workers and "wrap" in inputs.values:
        inputs.problems.add("wrap", inputs.values["wrap"], "stands around one server", "export dynamo, or leave it out")
    _check_load(inputs)
    inputs.problems.raise_if_any()
    prefixes = bool({"prefix_tokens", "cached_share"} & {key for key, value in inputs.values.items() if value})
    load = None
    if inputs.values.keys() & _LOADS:
        # What simulates a load takes a fifth of a second to import.
        from shardwise.answers._serve import ask as ask_load

        load = ask_load(inputs)
    report = load.base if load else ask_batch(inputs)
    prefixes = load.workload.repeats if load else prefixes
    asked = Asked(prefixes=prefixes, context=inputs.get("max_context", 0), model=_named(inputs))
    try:
        exported = _exported(target, report, asked, load.prefill.base if load and load.prefill else None)
    except InputError as error:
        inputs.merge(error)
        raise InputError(dict.fromkeys(inputs.problems.items)) from None
    if "wrap" in inputs.values:
        exported = _wrapped(inputs, exported, report)
    report = replace(report, assumptions=(*report.assumptions, *_apart(exported, (SERVING, report.job))))
    missed = _missed(load)
    notes = [*_unfit(report), *missed, *(f"assumed: {note}" for note in report.assumptions)]
    files = {name: commented(name, text, notes) for name, text in exported.files.items()}
    return replace(exported, files=files), report, missed


def _exported(target: str, report: InferReport, asked: Asked, prefill: InferReport | None) -> Exported:
    """Return what starts a server, or both of its pools."""
    export: Callable[..., Exported] = import_module(f"shardwise.formats.{target}").export
    if prefill is None:
        return export(report, asked)
    if target == "dynamo":
        return export(report, asked, prefill)
    first, last = export(prefill, asked, "prefill"), export(report, asked, "decode")
    pools = f"{counted(first.copies, 'server')} of the prefill pool and {last.copies} that decode, behind a router"
    notes = (*last.notes, pools)
    return replace(last, files={**first.files, **last.files}, notes=tuple(dict.fromkeys(notes)), launch="")


def _wrapped(inputs: Inputs, exported: Exported, report: TrainReport | InferReport) -> Exported:
    from shardwise.formats import wrapped

    return wrapped(inputs.values["wrap"], exported, report.case.model.name, report.case.cluster.device)


def commented(name: str, text: str, notes: Sequence[str]) -> str:
    r"""Return the text of a file with notes as comments, behind those that it begins with; JSON has none.

    >>> commented("run.sh", "#!/bin/bash\n# gpt2\nset -e\n", ["assumed: dp 8"])
    '#!/bin/bash\n# gpt2\n# assumed: dp 8\nset -e\n'
    """
    if name.endswith(".json"):
        return text
    lines = text.splitlines(keepends=True)
    at = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    comments = [f"# {' '.join(note.split())}\n" for note in notes]
    return "".join([*lines[:at], *comments, *lines[at:]])


def _unfit(report: TrainReport | InferReport) -> list[str]:
    from shardwise.serving import InferReport

    short = report.short_by_bytes if isinstance(report, InferReport) else report.verdict.short_by_bytes
    more = show_bytes(max(short, 0.0))
    return [] if report.fits else [f"this plan does not fit, {more} too much on the fullest device"]


def _warn(report: TrainReport | InferReport, files: Iterable[str], missed: Sequence[str]) -> None:
    """Say beside the files that the plan does not fit or misses a limit, and what no comment of theirs can say."""
    print_error("".join(f"warning: {text}\n" for text in (*_unfit(report), *missed)))
    if all(name.endswith(".json") for name in files):
        print_error("".join(f"assumed: {' '.join(note.split())}\n" for note in report.assumptions))


def write(folder: str, files: dict[str, str]) -> None:
    """Write files into a folder, which is made; raises `InputError` where that cannot be."""
    try:
        os.makedirs(folder, exist_ok=True)
        for name, text in files.items():
            with open(os.path.join(folder, name), "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
    except OSError as error:
        raise fail("write", folder, f"cannot be written ({error.strerror})", "give a folder") from None


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise export`."""
    exported, report, missed = ask(inputs)
    if "write" in inputs.values:
        write(inputs.values["write"], dict(exported.files))

    def tree() -> dict[str, Any]:
        answer_tree = {"system": exported.system, "version": exported.version, "fits": report.fits}
        notes = {"notes": [*exported.notes, *missed], "assumptions": list(report.assumptions)}
        return {**answer_tree, "files": dict(exported.files), **notes}

    def page() -> Page:
        made = Page(width)
        for name, text in exported.files.items():
            if "write" in inputs.values:
                made.label("WRITTEN", os.path.join(inputs.values["write"], name))
                continue
            for line in text.splitlines():
                made.add((line, ""))
        if "write" in inputs.values:
            made.label("FOR", f"{exported.system} {exported.version}")
            made.items(exported.notes)
        return made

    _warn(report, exported.files, missed)
    return Answer(0 if report.fits and not missed else 1, tree, page)
