"""Cases from another system's file or command line: the file says what the flags leave open."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from shardwise.answers._commands import command as found
from shardwise.answers._inputs import Inputs
from shardwise.answers._released import name_releases, with_release
from shardwise.answers._typed import joined
from shardwise.errors import InputError
from shardwise.formats import SERVERS, Imported
from shardwise.records import replace
from shardwise.units import counted

if TYPE_CHECKING:
    from shardwise.formats import Launched
    from shardwise.models import Model
    from shardwise.plans import Plan, Stack


_SHOWN = 6


def take(inputs: Inputs) -> None:
    """Name the engine of a release, read the file or the arguments of a case, and complete where it runs from these."""
    if "engine" in inputs.values:
        name_releases(inputs)
    if "set" in inputs.values and not {"from", "file"} & inputs.values.keys():
        inputs.fail("set", ",".join(inputs.values["set"]), "has no effect without --from", "leave it out")
    if "skip" in inputs.values and not {"from", "from_args", "file"} & inputs.values.keys():
        inputs.fail("skip", ",".join(inputs.values["skip"]), "has no effect without --from", "leave it out")
    if not {"from", "from_args"} & inputs.values.keys():
        return
    if inputs.command == "validate":
        return  # what a file says stands where rows are blank
    if "from_args" in inputs.values and _of_server(inputs):
        words = joined(inputs.values["from_args"])
        inputs.fail("from_args", words, "is the command of a training, not of a server", "name the file by --from")
        return
    if _of_server(inputs):
        _take_server(inputs)
        return
    try:
        inputs.imported = case = read(inputs)
    except InputError as error:
        inputs.problems.items += error.problems
        inputs.bad |= {"from", "from_args"} & inputs.values.keys()
        return
    # A file that states all three sizes of a batch means so many devices.
    left = not case.num_devices and case.accumulation and not (case.job and case.job.global_batch)
    if left and _alone(inputs):
        # As everywhere a device named alone is one, where the file of a trainer leaves their number to its launcher.
        inputs.values["on"] = "1x" + inputs.get("on", "")
        inputs.notes.append(f"{case.source}: 1 device, it leaves their number to the launcher")
        inputs.imported = case = read(inputs)
    if case.accumulation and inputs.command != "plan":
        inputs.values.setdefault("accumulation", case.accumulation)
    elif case.accumulation and "global_batch" not in inputs.values:
        plan = case.plan
        replicas = (devices_of(inputs) or case.num_devices) // (plan.tp * plan.tp2 * plan.cp * plan.pp)
        inputs.values["global_batch"] = batch = case.accumulation * max(plan.micro_batch, 1) * max(replicas, 1)
        inputs.notes.append(f"{case.source}: global_batch {batch}, of the devices that are asked for")
    _complete(inputs, case)
    _tell(inputs, case)


_SERVED = ("infer", "serve")


def _of_server(inputs: Inputs) -> bool:
    """Return whether `--from` is the launch of a server: what is asked is of one, or counts whatever a file starts."""
    if inputs.command == "count" and "from" in inputs.values:
        from shardwise.formats import starts_server

        try:
            return starts_server(inputs.values["from"])
        except InputError:
            return False
    return bool({inputs.command, inputs.get("what", "")} & {*_SERVED}) or inputs.get("target", "") in SERVERS


def _take_server(inputs: Inputs) -> None:
    """Put what the launch of a server says in place of flags that are not given."""
    from shardwise.formats import import_server

    try:
        server = with_release(import_server(inputs.values["from"], variables(inputs), devices_of(inputs)), inputs)
    except InputError as error:
        inputs.problems.items += error.problems
        inputs.bad.add("from")
        return
    kind, target = inputs.get("what", ""), inputs.get("target", "")
    given, flags = inputs.values.keys() | inputs.bad, found(inputs.command, kind or target).flags
    if target and _of_another(server, target):
        # Each engine spells its share of the memory in its own way.
        own = {key: value for key, value in server.values.items() if key in ("engine", "memory_fraction")}
        settings = ", ".join(f"{key} {value}" for key, value in own.items())
        inputs.notes.append(f"{server.source}: {settings}: of {server.system}, {target} keeps its own")
        server = replace(server, values={key: value for key, value in server.values.items() if key not in own})
    server = _without_other_pool(server, flags)
    if server.role and "prefill_workers" not in given and inputs.command != "count":
        rest = "prompts" if server.role == "decode" else "decode"
        note = (
            f"runs {server.role} alone, and is answered as one that runs {rest} too: start both pools in one script, "
        )
        inputs.notes.append(f"{server.source}: {note}or give serve --prefill-workers N of decode's file")
    # Numbers are searched; a format is the checkpoint's, the one choice of a search.
    space = {key: value for key, value in server.values.items() if key in flags and flags[key].group == "space"}
    searched = [key for key, value in space.items() if not isinstance(value, str)]
    if searched:
        inputs.notes.append(f"{server.source}: {', '.join(searched)} are searched, not taken from it")
    for key, value in server.values.items():
        if key in searched:
            continue
        if key in flags:
            inputs.values.setdefault(key, (value,) if key in space else value)
        elif key not in given:
            inputs.notes.append(f"{server.source}: {key} {value} is not of {inputs.command}")
    if "model" not in inputs.values:
        inputs.fail("model", None, f"is missing, and {server.source} names none", "name a model")
    if inputs.get("what", "") != "serve":
        _complete(inputs, server)  # a search for a load asks how many devices there must be
    del inputs.values["from"]
    inputs.values.pop("set", None)
    inputs.notes += [f"{server.source}: {text}" for text in server.assumed]
    for word, readings in (("not followed", server.ignored), ("not known", server.unknown)):
        inputs.notes += [f"{server.source}: {one.argument} {word}: {one.meaning}" for one in readings]


def _without_other_pool(server: Launched, flags: Container[str]) -> Launched:
    """Return the pool that decodes of a server with two, where what is asked has one."""
    if "prefill_workers" not in server.values or "prefill_workers" in flags:
        return server
    values = {key: value for key, value in server.values.items() if not key.startswith("prefill_")}
    alone = values.get("tp", 1) * values.get("pp", 1) * values.get("dp", 1)
    note = f"the {alone} of its {counted(server.num_devices, 'device')} that decode: `serve` answers for both pools"
    return replace(server, values=values, num_devices=alone, assumed=(*server.assumed, note))


def _of_another(server: Launched, target: str) -> bool:
    """Return whether a launch is of another engine than a target's."""
    from shardwise.formats import engine_for
    from shardwise.serving import find_engine

    own = engine_for(target)
    return find_engine(server.values.get("engine", own)).exporter != find_engine(own).exporter


def read(inputs: Inputs) -> Imported:
    """Return the case of the file or of the arguments, on the devices that are asked for."""
    asked = devices_of(inputs)
    case = _read(inputs, asked)
    launched = _launched(inputs) if asked else 0
    if launched > 1 and launched != asked:
        inputs.notes.append(f"{case.source}: starts {launched} devices, {asked} are asked for with --on")
    return case


def _launched(inputs: Inputs) -> int:
    """Return the number of devices that the file itself starts, 0 where it does not say or cannot be read so."""
    try:
        return _read(inputs, 0).num_devices
    except InputError:
        return 0


def _read(inputs: Inputs, num_devices: int) -> Imported:
    from shardwise.formats import ImportContext, import_file
    from shardwise.formats.megatron import read_command

    around = ImportContext(
        num_devices=num_devices,
        skipped=inputs.get("skip", ()),
        follow=inputs.get("follow", False),
        model=inputs.get("model", ""),
    )
    if "from" not in inputs.values:
        return read_command(inputs.values["from_args"], around)
    more = inputs.get("from_args", ())
    return import_file(inputs.values["from"], variables(inputs), replace(around, more=more))


def variables(inputs: Inputs) -> dict[str, str]:
    """Return the variables that --set gives."""
    values: dict[str, str] = {}
    for pair in inputs.get("set", ()):
        name, equals, value = pair.partition("=")
        if not equals:
            inputs.fail("set", pair, "must be NAME=VALUE", "for example --set NNODES=4")
        values[name] = value
    return values


def devices_of(inputs: Inputs) -> int:
    """Return the number of devices that --on names, 0 where it names a device alone or is wrong."""
    from shardwise.hardware import Cluster

    text = inputs.get("on", "")
    if "num_devices" in inputs.values:
        return int(inputs.values["num_devices"])
    try:
        if text.endswith(".toml") and not text[0].isdigit():
            return Cluster.load(text, inputs.get("follow", False)).num_devices
        return Cluster.parse(text).num_devices if text[:1].isdigit() else 0
    except InputError:
        return 0


def _alone(inputs: Inputs) -> bool:
    """Return whether --on names a device without a number."""
    text = inputs.get("on", "")
    return bool(text) and not text[0].isdigit() and not text.endswith(".toml")


def _complete(inputs: Inputs, case: Imported | Launched) -> None:
    """Put the number of devices of the launch before a device named alone."""
    if not _alone(inputs):
        return
    text = inputs.get("on", "")
    if not case.num_devices:
        rule = f"names no number of devices, and neither does {case.source}"
        inputs.fail("on", text, rule, f"write for example --on {64 if isinstance(case, Imported) else 1}x{text}")
        del inputs.values["on"]
        return
    from shardwise.answers._value_lists import instance_of, on_count

    each = case.devices_per_node if isinstance(case, Imported) else 0
    nodes, rest = divmod(case.num_devices, each or case.num_devices)
    whole = not rest and nodes > 1
    if instance_of(text)[1]:
        inputs.values |= on_count(text, case.num_devices)
        return
    inputs.values["on"] = f"{nodes}x{each}x{text}" if whole else f"{case.num_devices}x{text}"


def _tell(inputs: Inputs, case: Imported) -> None:
    """Note what the file leaves open or says in vain."""
    inputs.notes += [f"{case.source}: {text}" for text in case.assumed]
    for word, readings in (("ignored", case.ignored), ("unknown", case.unknown)):
        names = [reading.argument for reading in readings]
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            inputs.notes.append(f"{case.source}: {word} {', '.join(names[:_SHOWN])}{more}; `shardwise import` says why")
    if "model" in inputs.values and case.model is not None:
        inputs.notes.append(f"{case.source}: its model is not used, {inputs.values['model']} is named")


def base_plan(case: Imported, given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a plan: as given, else as the file has them; what follows from a changed one is deduced."""
    from shardwise.plans import schedule_for

    base = {f.name: getattr(case.plan, f.name) for f in fields(case.plan)}
    if given.keys() & {"tp", "tp2", "cp", "pp"}:
        base["dp"] = 0
    if given.keys() & {"pp", "vpp"}:
        base["stage_layers"] = ()
        base["schedule"] = schedule_for(given.get("vpp", base["vpp"]), case.stack.runs.schedule)
    experts = case.model is not None and case.model.has_experts
    if "tp" in given and experts and base["etp"] == base["tp"]:
        base["etp"] = given["tp"]
    if "tp" in given:
        base["sequence_parallel"] = base["sequence_parallel"] or base["tp"] == 1
    return base | given


def base_job(case: Imported, given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a job: as given, else as the file has them."""
    return {f.name: getattr(case.job, f.name) for f in fields(case.job)} | given


def settled(inputs: Inputs, stack: Stack | None, model: Model, plan: Plan, seq_len: int) -> Plan:
    """Return a plan without sequence parallelism where nobody asked for it and it cannot split the sequence.

    Experts need it (`expert_laws`): beside them it stays, whatever then refuses the plan or a launch of it. What is
    recomputed and offloaded is what the framework does where nobody says.
    """
    from shardwise.plans.laws import field_problems, splits_sequence

    plan = _usual(inputs, stack, plan)
    asked = inputs.imported is not None or "sequence_parallel" in inputs.values.keys() | inputs.bad
    experts = model.has_experts
    split = plan.tp > 1 and plan.sequence_parallel
    if not asked and split and not experts and stack is not None and stack.runs.sequence_parallel == (False,):
        inputs.notes.append(f"sequence_parallel off: {stack.name} does not have it")
        return replace(plan, sequence_parallel=False)
    filled = replace(plan, dp=plan.dp or 1, micro_batch=plan.micro_batch or 1)
    if asked or experts or field_problems(filled).items or splits_sequence(plan, seq_len):
        return plan
    inputs.notes.append(f"sequence_parallel off: {seq_len // plan.cp} tokens of a rank do not divide by tp {plan.tp}")
    return replace(plan, sequence_parallel=False)


def _usual(inputs: Inputs, stack: Stack | None, plan: Plan) -> Plan:
    """Return a plan with what its framework recomputes, and keeps on the host, where the flags do not say."""
    if stack is None or inputs.imported is not None:
        return plan
    from shardwise.plans import usual_recompute

    given = inputs.values.keys() | inputs.bad
    usual = usual_recompute(stack, "" if "base" in inputs.bad else inputs.values.get("base", ""))
    if usual != "none" and not given & {"recompute", "modules", "recompute_layers"}:
        condition = "" if usual == stack.usual_recompute else " beside quantised weights"
        inputs.notes.append(f"recompute {usual}: what {stack.name} does{condition} unless told")
        plan = replace(plan, recompute=usual)
    if stack.usual_offload and plan.recompute == "full" and "offload" not in given:
        inputs.notes.append(f"offload {','.join(stack.usual_offload)}: what {stack.name} does unless told")
        plan = replace(plan, offload=stack.usual_offload)
    return plan
