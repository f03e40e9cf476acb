"""What is known by name: models, devices and data types, many in a table or one with its sources."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from shardwise.answers._answer import Answer, nothing_found
from shardwise.answers._converters import fail
from shardwise.answers._files import one_to_write, write_text
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page
from shardwise.errors import InputError
from shardwise.hardware import (
    COMMITMENTS,
    Device,
    device_names,
    device_to_toml,
    find_device,
    find_rented,
    offers,
    other_names,
)
from shardwise.models import (
    Model,
    all_models,
    find_model,
    load_model,
    model_names,
    namesake,
    published_copy,
    quantised_copy,
)
from shardwise.ops import count_parameters
from shardwise.plans import DTYPES, find_precision, precision_names, precision_to_toml
from shardwise.serving import cache_names, find_format, format_names
from shardwise.units import show_count, show_field
from shardwise.user_catalogue import find_own


def _matches(search: str, *words: str) -> bool:
    pieces = search.lower().replace("_", "-").split()
    text = " ".join(words).lower()
    return all(piece in text for piece in pieces)


def search_models(search: str = "") -> list[str]:
    """Return the names of the models that a search means: one for an exact name, all for nothing.

    >>> search_models("meta-llama/Llama-3.1-70B")
    ['llama-3.1-70b']
    """
    own = find_own("models", search) if search else None
    exact = own.name if own else find_model(search) if search else None
    if exact is not None:
        return [exact]
    names = sorted(name for name, row in all_models().items() if _matches(search, name, *_words(row)))
    copied = copy_of(search) if search and not names else ""
    return [copied] if copied else names


def copy_of(search: str) -> str:
    """Return the model of which a search names a copy, as other questions take the name; "" for none.

    >>> copy_of("Qwen/Qwen3-32B-FP8"), copy_of("bartowski/Llama-3.2-3B-Instruct-GGUF"), copy_of("me/mine")
    ('qwen3-32b', 'llama-3.2-3b', '')
    """
    quantised = quantised_copy(search)
    return quantised[0] if quantised else namesake(search) or ""


def _copy_notes(name: str, search: str) -> list[str]:
    """Return what stands behind a model whose copy a search names, nothing where it names the model."""
    if find_own("models", search) or find_model(search) or _matches(search, name, *_words(all_models()[name])):
        return []
    quantised, published = quantised_copy(search), published_copy(search)
    if published:
        return [f"{search} is {name} whose weights are stored as {published[1]}"]
    if quantised:
        return [f"{search} is taken for {name} with weights in {quantised[1]}, as its name says"]
    return [f"{search} is taken for {name}, after which it is named"]


def _words(row: dict[str, Any]) -> list[str]:
    return [str(row["config"].get("model_type", "")), *row.get("hub", []), *row.get("also", [])]


def search_devices(search: str = "") -> list[str]:
    """Return the names of the devices that a search means: one for an exact name or a cloud's, all for nothing.

    >>> search_devices("h200-sxm"), search_devices("p5.48xlarge"), search_devices("m3max")
    (['h200-sxm-141gb'], ['h100-sxm-80gb'], ['apple-m3-max-40core'])
    """
    names = device_names()
    if search.lower() in names:
        return [search.lower()]
    if search and (rented := find_rented(search)):
        return [rented.device]
    others: dict[str, list[str]] = {}
    for other, (name, _) in other_names().items():
        others.setdefault(name, []).append(other)
    devices = [name for name in names if _matches(search, name, *others.get(name, []))]
    if search and not devices:
        with suppress(InputError):  # which is what questions of a device take the name as
            return [find_device(search).device.name]
    return devices


def model_row(name: str) -> dict[str, Any]:
    """Return what the catalogue says of a model, as one record; what nobody publishes is counted."""
    row = all_models()[name]
    published = row.get("parameters")
    return {
        "name": name,
        "family": row["config"].get("model_type"),
        "parameters": published or count_parameters(load_model(name)),
        "parameters_published": published is not None,
        "hub": row.get("hub", []),
        "source": row.get("source"),
        "uncertain": row.get("uncertain", []),
    }


def model_record(name: str, search: str = "") -> dict[str, Any]:
    """Return one model with its sizes, its blocks and its configuration; `search` is how it was asked for."""
    model = load_model(name)
    blocks = [{"layers": count, "block": _say_block(block)} for block, count in model.kinds.items()]
    sizes = {"hidden": model.hidden, "vocab": model.vocab, "layers": model.num_layers, "max_context": model.max_context}
    more = {"tied": model.tied, "blocks": blocks, "assumptions": [*_copy_notes(name, search), *model.assumptions]}
    return {**model_row(name), **sizes, **more, "config": all_models()[name]["config"]}


def model_file(name: str) -> str:
    """Return the text of the file that adds a model to the user's catalogue: its configuration and its source."""
    row = all_models()[name]
    return json.dumps({"source": row.get("source"), "config": row["config"]}, indent=2) + "\n"


def _say_block(block: Any) -> str:
    """Return a block in one line: each part with what is not its default."""
    parts = [_say(part) for part in (*block.mixers, *([block.feed_forward] if block.feed_forward is not None else []))]
    return " + ".join(parts)


def _say(part: Any) -> str:
    numbers = {name: value for name, value in asdict(part).items() if type(value) is int and value}
    return f"{type(part).__name__} ({', '.join(f'{name} {value}' for name, value in numbers.items())})"


def device_facts(device: Device) -> dict[str, Any]:
    """Return every figure of a device with its source and date, by field."""
    return {f.field: {"value": f.value, "source": f.source, "date": f.date, "assumed": f.assumed}
            for f in device.sources}  # fmt: skip


def device_record(name: str) -> dict[str, Any]:
    """Return one device with the source and date of every figure."""
    device = find_device(name).device
    words = {name: getattr(device, name) for name in ("name", "full_name", "vendor", "fast_link")}
    words["like"] = device.like or None
    prices = [
        {"provider": o.provider, "instance": o.instance, "devices": o.devices, "commitment": commitment, "term": o.term,
         "usd_per_device_hour": o.device_usd(commitment), "source": o.where}
        for o in offers() if o.device == device.name for commitment in o.usd
    ]  # fmt: skip
    return {**words, "facts": device_facts(device), "unknown": list(device.unknown), "prices": prices}


def figure(device: Device, field: str) -> str:
    """Return a figure of a device with its unit, a dash where it is not known."""
    if not device.knows(field):
        return "-"
    value = device.fact(field).value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field.endswith("usd_per_device_hour"):
        return f"{value:.2f}"
    return show_count(value, "B") if field == "last_cache_bytes" else show_field(field, value)


def models_page(names: Sequence[str], width: int = 80, search: str = "") -> Page:
    """Return models as a table, or one with its source."""
    page = Page(width)
    if len(names) == 1:
        _one_model(page, names[0], search)
        return page
    rows = [["model", "parameters", "hub", "family"]]
    for name in names:
        row = model_row(name)
        count = show_count(row["parameters"]) + (" " if row["parameters_published"] else "*")
        rows.append([name, count, (row["hub"] or ["-"])[0], str(row["family"])])
    # A model is one line to search and to copy from: an id stays whole, families are left out where there is no room.
    columns = 4 if sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True)) <= width + 2 else 3
    page.unbroken_table([row[:columns] for row in rows], (1,))
    page.blank()
    page.add(("* counted from the configuration: no count is published", "dim"))
    page.remark(f"{len(names)} models; `shardwise models NAME` shows one, `shardwise count NAME` counts it")
    return page


def _one_model(page: Page, name: str, search: str) -> None:
    record = model_record(name, search)
    model: Model = load_model(name)
    page.label("MODEL", f"{name} ({record['family']})", "bold", "bold")
    count = record["parameters"]
    origin = "" if record["parameters_published"] else ", counted: no count is published"
    page.note(f"{show_count(count)} parameters ({count:,}){origin}")
    tied = "tied to the head" if model.tied else "not tied to the head"
    page.note(f"{model.num_layers} layers of width {model.hidden:,}, context {model.max_context:,}")
    page.note(f"vocabulary {model.vocab:,}, {tied}")
    page.blank()
    for row in record["blocks"]:
        page.label(f"{row['layers']} x", str(row["block"]))
    page.blank()
    page.add(("SOURCE", "bold"))
    page.add(("  " + str(record["source"]), ""))
    for hub in record["hub"]:
        page.add(("  " + hub, "dim"))
    if record["assumptions"]:
        page.blank()
        page.add(("ASSUMED", "bold"))
        page.items(record["assumptions"], "dim")


def devices_page(names: Sequence[str], width: int = 80) -> Page:
    """Return devices as a table, or one with the source of every figure."""
    page = Page(width)
    if len(names) == 1:
        _one_device(page, names[0])
        return page
    fields = ("memory_bytes", "memory_bytes_per_second", "matrix_flops.bf16", "fast_bytes_per_second")
    rows = [["device", "memory", "bandwidth", "bf16", "link"]]
    for name in names:
        device = find_device(name).device
        rows.append([name, *(figure(device, field) for field in fields)])
    page.table(rows, right=(1, 2, 3, 4), header=True, indent=0)
    page.blank()
    page.remark(f"{len(names)} devices; `shardwise devices NAME` shows one with its sources")
    return page


def _one_device(page: Page, name: str) -> None:
    device = find_device(name).device
    page.label("DEVICE", f"{device.name}: {device.full_name}", "bold", "bold")
    if device.like:
        page.note(f"a variant of {device.like}, whose kernels it runs")
    page.blank()
    marks: dict[str, int] = {}
    for fact in device.sources:
        mark = marks.setdefault(f"{fact.source}, {fact.date}", len(marks) + 1)
        figures = f"{figure(device, fact.field):>18}  "
        page.add((f"  {fact.field:<26}", "bold"), (figures, ""), (f"[{mark}]", "dim"))
    page.blank()
    for source, mark in marks.items():
        page.label(f"{f'[{mark}]':>9}", source, "dim", "dim")
    if device.unknown:
        page.blank()
        page.label("UNKNOWN", ", ".join(device.unknown))
    rented = [offer for offer in offers() if offer.device == device.name and (offer.usd or offer.instance)]
    if rented:
        page.blank()
        rows = [["by", "devices", *COMMITMENTS, "region or date", "rented as"]]
        for offer in rented:
            usd = (f"{offer.device_usd(c):.2f}" if c in offer.usd else "-" for c in COMMITMENTS)
            where = offer.where.split(",")[0].replace("one price in every region", "all") if offer.usd else "-"
            rows.append([offer.provider, f"{offer.devices}", *usd, where, offer.instance or "-"])
        page.unbroken_table(rows, (1, 2, 3, 4))
        page.remark("dollars an hour of a device; --price PROVIDER:COMMITMENT takes one, --json has dates and sources")


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise models`, of `shardwise devices` and of `shardwise dtypes`."""
    inputs.problems.raise_if_any()
    if inputs.command == "dtypes":
        return dtypes_answer(inputs, width)
    search, what = inputs.get("search", ""), inputs.command
    names = search_models(search) if what == "models" else search_devices(search)
    if not names:
        return nothing_found(what, search, model_names() if what == "models" else device_names())
    if "write" in inputs.values:
        path = inputs.values["write"]
        name = one_to_write(path, names, what[:-1])
        write_text(path, model_file(name) if what == "models" else device_to_toml(find_device(name).device))
    if what == "devices":
        return Answer(0, lambda: {what: [device_record(name) for name in names]}, lambda: devices_page(names, width))
    one = len(names) == 1
    return Answer(
        0,
        lambda: {what: [model_record(name, search) if one else model_row(name) for name in names]},
        lambda: models_page(names, width, search),
    )


def dtypes_answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise dtypes`."""
    search = inputs.get("search", "")
    rows = search_dtypes(search)
    if not rows:
        return nothing_found("dtypes", search, tuple(dict.fromkeys(row["name"] for row in search_dtypes())))
    if "write" in inputs.values:
        _write_recipe(inputs.values["write"], search, rows)
    return Answer(0, lambda: {"dtypes": rows}, lambda: dtypes_page(rows, width))


def _write_recipe(path: str, search: str, rows: list[dict[str, Any]]) -> None:
    """Write one recipe of training as a file of the user's catalogue."""
    training = [row for row in rows if row["kind"] == "training"]
    if len(training) != 1:
        rule = f"needs one recipe of training, and {len(training)} match {search!r}"
        raise fail("write", path, rule, "name one, such as bf16")
    write_text(path, precision_to_toml(find_precision(training[0]["name"])))


_HEADS = {
    "training": "RECIPES OF TRAINING, bytes of each copy of a parameter (--precision)",
    "weights": "FORMATS OF SERVED WEIGHTS (--weights)",
    "cache": "FORMATS OF THE KEY-VALUE CACHE (--kv-cache)",
    "preset": "PRESETS OF BITS (--dtype)",
}
_COLUMNS = {
    "training": ("compute", "weight", "activation", "gradient", "master", "state", "embedding"),
    "weights": ("bits", "bytes", "scope", "group", "compute"),
    "cache": ("bytes",),
    "preset": ("weights", "activations", "embedding"),
}


def search_dtypes(search: str = "") -> list[dict[str, Any]]:
    """Return a record of every data type whose name holds the words; an exact name is meant alone.

    >>> [(row["kind"], row["bytes"]) for row in search_dtypes("nvfp4")]
    [('weights', 0.5625), ('cache', 0.5625)]
    """
    rows = [*_recipes(), *_formats(), *_caches(), *_presets()]
    exact = [row for row in rows if row["name"] == search.strip().lower()]
    return exact or [row for row in rows if all(word in row["name"] for word in search.lower().split())]


def _recipes() -> list[dict[str, Any]]:
    rows = []
    for name in precision_names():
        if name in DTYPES:
            continue
        precision = find_precision(name)
        widths = {key.removesuffix("_bytes"): value for key, value in asdict(precision).items() if "_bytes" in key}
        own = {"source": precision.note} if precision.note else {}
        rows.append({"kind": "training", "name": name, "compute": precision.compute, **widths, **own})
    return rows


def _formats() -> list[dict[str, Any]]:
    rows = []
    for name in format_names():
        form = find_format(name)
        more = {"bits": form.bits, "bytes": form.bytes, "scope": form.scope, "group": form.group}
        rows.append(
            {"kind": "weights", "name": name, **more, "compute": form.compute or "16 bits", "source": form.source}
        )
    return rows


def _caches() -> list[dict[str, Any]]:
    return [{"kind": "cache", "name": name, "bytes": size} for name, size in cache_names().items()]


def _presets() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, widths in DTYPES.items():
        trains = True
        try:
            find_precision(name)
        except InputError:
            trains = False
        rows.append({"kind": "preset", "name": name, **widths._asdict(), "trains": trains})
    return rows


def dtypes_page(rows: Sequence[dict[str, Any]], width: int = 80) -> Page:
    """Return data types as one table for each kind."""
    page = Page(width)
    for kind, head in _HEADS.items():
        chosen = [row for row in rows if row["kind"] == kind]
        if not chosen:
            continue
        page.remark(head, "bold")
        columns = _COLUMNS[kind]
        table = [["name", *columns], *([row["name"], *(_cell(row[c]) for c in columns)] for row in chosen)]
        page.table(table, right=tuple(range(1, len(columns) + 1)), header=True, indent=0)
        if len(chosen) == 1 and chosen[0].get("source"):
            page.note(str(chosen[0]["source"]), "dim")
        page.blank()
    page.remark("`shardwise dtypes NAME --write FILE` writes a recipe of training to change")
    return page


def _cell(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
