"""`shardwise import`: what a file of another system says, and what became of every word of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from shardwise.answers import _from
from shardwise.answers._answer import Answer
from shardwise.answers._files import command_words
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page, command_lines
from shardwise.answers._released import with_release
from shardwise.errors import InputError
from shardwise.formats import Imported, Launched, ReadArgument, import_server, starts_server
from shardwise.models import Model
from shardwise.ops.count import count_parameters
from shardwise.plans import Plan, Training, find_stack
from shardwise.units import counted, show_count


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise import`."""
    if "file" in inputs.values:
        inputs.values["from"] = inputs.values.pop("file")
    if not {"from", "from_args"} & inputs.values.keys() and not inputs.problems.items:
        inputs.fail("file", None, "is missing", "name a file, or give the training command behind --")
    if "from" in inputs.values and not inputs.problems.items and starts_server(inputs.values["from"]):
        return _served(inputs, width)
    if inputs.imported is None and not inputs.problems.items:
        _from.take(inputs)
    case = inputs.imported
    if case is None or inputs.problems.items:
        raise InputError(inputs.problems.items)

    def words() -> list[str]:
        kept = {key: value for key, value in inputs.values.items() if key in ("from", "from_args", "set", "skip")}
        named = {"model": "MODEL"} if case.model is None else {}
        usual = "h100-sxm-80gb" if case.num_devices else "64xh100-sxm-80gb"
        return command_words("train", {**named, **kept, "on": inputs.get("on", usual)})

    def tree() -> dict[str, Any]:
        return import_tree(case)

    def page() -> Page:
        return import_page(case, words(), width)

    return Answer(0, tree, page)


def import_tree(case: Imported) -> dict[str, Any]:
    """Return an imported case as the record that `--json` prints."""
    return {
        **_checked(case),
        "model": None if case.model is None else {"name": case.model.name, **_sizes(case.model)},
        "plan": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(case.plan).items()},
        "job": asdict(case.job),
        "stack": {"name": case.stack.name, "changed": {k: _plain(v) for k, v in stack_changes(case).items()}},
        "num_devices": case.num_devices,
        "devices_per_node": case.devices_per_node,
        "accumulation": case.accumulation,
        **_readings(case),
    }


def _checked(case: Imported | Launched) -> dict[str, Any]:
    return {"system": case.system, "version": case.version, "source": case.source}


def _readings(case: Imported | Launched) -> dict[str, Any]:
    """Return what became of every word of a file."""

    def listed(readings: Sequence[ReadArgument]) -> list[dict[str, object]]:
        return [{**asdict(reading), "value": _plain(reading.value)} for reading in readings]

    return {
        "understood": listed(case.understood),
        "assumed": list(case.assumed),
        "ignored": listed(case.ignored),
        "silent": list(case.silent),
        "unknown": listed(case.unknown),
    }


def _served(inputs: Inputs, width: int) -> Answer:
    """Return the answer for the launch of a server."""
    server = with_release(import_server(inputs.values["from"], _from.variables(inputs)), inputs)

    def tree() -> dict[str, Any]:
        values = {key: _plain(value) for key, value in server.values.items()}
        return {
            **_checked(server),
            "serving": values,
            "release": server.release,
            "num_devices": server.num_devices,
            **_readings(server),
        }

    def page() -> Page:
        from shardwise.answers._files import command_words

        made = Page(width)
        made.label("FROM", f"{server.source}, read as {server.system} {server.version}")
        launch = counted(server.num_devices, "device") if server.num_devices else "devices that are not said"
        role = f", which run {server.role} alone" if server.role else ""
        settings = ", ".join(f"{key} {_word(value)}" for key, value in server.values.items())
        made.label("SERVER", f"{launch}{role}: {settings}")
        _words_of(made, server)
        kept = {key: value for key, value in inputs.values.items() if key in ("from", "set")}
        named = {} if "model" in server.values else {"model": "MODEL"}
        on = "h100-sxm-80gb" if server.num_devices else "8xh100-sxm-80gb"
        asked = {**named, **kept, "on": inputs.get("on", on)}
        both = "prefill_workers" in server.values  # pools that a load alone is asked of
        words = command_words("serve", {**asked, "rate": "1/s"}) if both else command_words("infer", asked)
        command_lines(made, "NEXT", words)
        return made

    return Answer(0, tree, page)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def stack_changes(case: Imported) -> dict[str, object]:
    """Return what a file changes in the behaviour of its framework."""
    base = find_stack(case.stack.name)
    changed = _differing(case.stack, base, ("sources", "settings", "runs"))
    changed |= _differing(case.stack.settings, base.settings)
    return dict(sorted(changed.items()))


def _differing(record: Any, base: Any, left_out: tuple[str, ...] = ()) -> dict[str, object]:
    names = (f.name for f in fields(base) if f.name not in left_out)
    return {name: getattr(record, name) for name in names if getattr(base, name) != getattr(record, name)}


def _sizes(model: Model) -> dict[str, object]:
    return {
        "parameters": count_parameters(model),
        "hidden": model.hidden,
        "layers": model.num_layers,
        "vocab": model.vocab,
    }


def import_page(case: Imported, command: Sequence[str], width: int) -> Page:
    """Return an imported case as a page."""
    page = Page(width)
    page.label("FROM", f"{case.source}, read as {case.system} {case.version}")
    if case.model is not None:
        sizes = _sizes(case.model)
        page.label("MODEL", f"{show_count(float(str(sizes['parameters'])))} parameters: {model_line(case.model)}")
    launch = counted(case.num_devices, "device") if case.num_devices else "a number of devices that is not said"
    page.label("PLAN", f"{launch}: {_changed_fields(case.plan, Plan())}")
    page.label("JOB", _changed_fields(case.job, Training(seq_len=0, global_batch=0)))
    changes = ", ".join(f"{name} {_word(value)}" for name, value in stack_changes(case).items())
    page.label("STACK", case.stack.name + (f": {changes}" if changes else ""))
    _words_of(page, case)
    command_lines(page, "NEXT", command)
    return page


def _words_of(page: Page, case: Imported | Launched) -> None:
    """Append what became of every word of a file."""
    page.blank()
    page.add((f"UNDERSTOOD ({len(case.understood)})", "bold"))
    page.table([(r.argument, _word(r.value), r.meaning.replace("+", ", ")) for r in case.understood])
    _listed(page, "ASSUMED", case.assumed)
    _listed(page, "IGNORED", [f"{r.argument} {_word(r.value)}: {r.meaning}" for r in case.ignored])
    unknown = [f"{r.argument} {_word(r.value)}: {r.meaning}, taken to change nothing" for r in case.unknown]
    _listed(page, "UNKNOWN", unknown)
    _listed(page, "WITHOUT EFFECT ON BYTES AND SECONDS", [", ".join(case.silent)] if case.silent else [])
    page.blank()


def model_line(model: Model) -> str:
    """Return a model's sizes in one line."""
    return f"{model.num_layers} layers of width {model.hidden}, vocabulary of {model.vocab}"


def _listed(page: Page, word: str, texts: Sequence[str]) -> None:
    if texts:
        page.blank()
        page.add((word, "bold"))
        page.items(texts)


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _changed_fields(record: Any, plain: Any) -> str:
    """Return the fields of a record that differ from a plain one, in one line; a degree of 0 is left to be deduced."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    changed = [name for name, value in values.items() if value != getattr(plain, name) and (value or value is False)]
    return ", ".join(f"{name} {_word(getattr(record, name))}" for name in changed) or "nothing beyond the defaults"
