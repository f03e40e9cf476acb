"""Releases of engines that a launch or --engine states: each is answered for by the entry that covers it."""

from __future__ import annotations

from shardwise.answers._inputs import Inputs
from shardwise.errors import InputError
from shardwise.formats import Launched
from shardwise.hardware import Device
from shardwise.records import replace


def with_release(server: Launched, inputs: Inputs) -> Launched:
    """Return a server whose engine is that of the release which its launch states, unless another is asked for."""
    stated, engine = server.release, str(server.values.get("engine", ""))
    if not stated or not engine or "engine" in inputs.values:
        return server
    from shardwise.serving import engine_of_release, not_taken

    runs, lost = engine_of_release(engine, stated, _device(inputs))
    another = runs != engine or stated.split(".")[:2] != server.version.split(".")[:2]
    read = f"release {stated}: engine {runs}; flags are read as those of {server.version}"
    notes = [*([read] if another else []), *not_taken(engine, runs, lost)]
    return replace(server, values={**server.values, "engine": runs}, assumed=(*server.assumed, *notes))


def name_releases(inputs: Inputs) -> None:
    """Put the entry that covers a release in place of an engine that is named with it, such as vllm==0.12.0."""
    asked = inputs.get("engine")
    words = asked if isinstance(asked, tuple) else (asked,) if isinstance(asked, str) else ()
    meant = tuple(_covering(word, inputs) for word in words)
    if meant != words:
        inputs.values["engine"] = meant if isinstance(asked, tuple) else meant[0]


def _covering(word: str, inputs: Inputs) -> str:
    """Return the engine that covers a release, the word itself where it names none or is an engine's own name."""
    from shardwise.serving import engine_on, release_notes

    try:
        engine = engine_on(word, _device(inputs))
    except InputError:
        return word  # which is told where the engine is looked up
    inputs.notes += release_notes(engine)
    return engine.name if engine.asked_as else word


def _device(inputs: Inputs) -> Device | None:
    """Return the device that is asked for, the first of several; None where it is not known."""
    from shardwise.hardware import Cluster

    text = inputs.get("on", "")
    if not text:
        return None
    try:
        if text.endswith(".toml") and not text[0].isdigit():
            return Cluster.load(text, inputs.get("follow", False)).device
        return Cluster.parse(text.split(",")[0]).device
    except InputError:
        return None  # which is told where the cluster is read
