"""`shardwise export`: a plan as another system's files."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.cli import _train
from shardwise.cli._answer import Answer
from shardwise.cli._case import Inputs
from shardwise.cli._kinds import fail

if TYPE_CHECKING:
    from shardwise.formats import Exported
    from shardwise.report._page import Page

_STACKS = {"megatron": "megatron", "deepspeed": "deepspeed", "fsdp": "fsdp2"}


def ask(inputs: Inputs) -> Exported:
    """Return the files of a case; raises `InputError` with every problem, and every field that cannot be told."""
    from shardwise.formats import Case

    target = inputs.get("target", "megatron")
    if inputs.imported is None or not inputs.imported.stack.name.startswith(_STACKS[target]):
        inputs.values.setdefault("stack", _STACKS[target])
    report = _train.ask(inputs)
    stated = Case(
        model=report.case.model,
        cluster=report.case.cluster,
        plan=report.plan,
        job=report.job,
        stack=report.case.stack,
    )
    module = import_module(f"shardwise.formats.{target}")
    found: Exported = module.export(stated)
    return found


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
    found = ask(inputs)
    if "write" in inputs.values:
        write(inputs.values["write"], dict(found.files))

    def tree() -> dict[str, Any]:
        said = {"system": found.system, "version": found.version}
        return {**said, "files": dict(found.files), "notes": list(found.notes)}

    def page() -> Page:
        from shardwise.report._page import Page

        made = Page(width)
        for name, text in found.files.items():
            if "write" in inputs.values:
                made.label("WRITTEN", os.path.join(inputs.values["write"], name))
                continue
            for line in text.splitlines():
                made.add((line, ""))
        if "write" in inputs.values:
            made.label("FOR", f"{found.system} {found.version}")
            made.items(found.notes)
        return made

    return Answer(0, tree, page)
