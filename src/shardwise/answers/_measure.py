"""`shardwise measure`: what kernels reach on this machine, as a file of the user's catalogue and a raw table."""

from __future__ import annotations

import os
import re
import statistics
from pathlib import Path
from typing import Any

from shardwise.answers._answer import Answer
from shardwise.answers._files import write_text
from shardwise.answers._inputs import Inputs
from shardwise.answers._listing import device_facts, figure
from shardwise.answers._page import Page
from shardwise.answers._typed import quoted
from shardwise.errors import Problems
from shardwise.hardware import Device, device_to_toml
from shardwise.libraries import is_installed
from shardwise.measuring import (
    SHAPES,
    Clock,
    Machine,
    Measurement,
    copies_of,
    describe,
    device_of,
    measurements_csv,
    timed,
)

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
# Other programs that take more of the processors than this make a measurement doubtful.
_QUIET = 0.05
_PATIENCE_SECONDS = 20.0


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise measure`, after everything that can be wrong was looked at."""
    name, out = inputs.get("name", ""), Path(os.path.expanduser(inputs.get("out", "")))
    if not is_installed("torch"):
        rule = "times kernels with PyTorch, which is not installed"
        inputs.problems.add("measure", None, rule, "pip install 'shardwise[torch]'")
    if name and not _NAME.fullmatch(name):
        inputs.problems.add("name", name, "must be small letters, digits, dots and dashes", "use for example cpu-lab")
    inputs.problems.raise_if_any()
    machine = _machine(name)
    place, table = out / "devices" / f"{machine.key}.toml", out / f"{machine.key}.csv"
    _check(machine, out, (place, table))
    rows = timed(
        Clock(device=machine.device, patience_seconds=_PATIENCE_SECONDS),
        SHAPES[machine.device],
        copies_of(machine),
    )
    made = device_of(machine, rows)
    for path, text in ((table, measurements_csv(rows)), (place, device_to_toml(made))):
        write_text(str(path), text)
    files = [str(place), str(table)]
    return Answer(0, lambda: _tree(made, rows, files), lambda: _page(made, rows, files, width))


def _machine(name: str) -> Machine:
    # Threads of OpenMP that sleep between kernels come back late on a machine where others run too.
    os.environ.setdefault("OMP_WAIT_POLICY", "ACTIVE")
    import torch

    return describe("cuda" if torch.cuda.is_available() else "cpu", key=name)


def _check(machine: Machine, out: Path, files: tuple[Path, ...]) -> None:
    """Raise `InputError` for a name without constants, one that is taken, or a folder that is closed."""
    problems = Problems()
    if machine.device == "cpu" and not machine.key.startswith("cpu-"):
        rule = "must begin with cpu-, by which the constants of processors are found"
        problems.add("name", machine.key, rule, f"use cpu-{machine.key}")
    for path in files:
        if path.exists():
            problems.add("name", machine.key, f"is taken: {path} exists", "give another --name, or remove the file")
    try:
        (out / "devices").mkdir(parents=True, exist_ok=True)
        writable = os.access(out, os.W_OK) and os.access(out / "devices", os.W_OK)
    except (OSError, ValueError):
        writable = False
    if not writable:
        problems.add("out", str(out), "is not a folder that can be written", "give a folder of your own")
    problems.raise_if_any()


def _noise(rows: list[Measurement]) -> dict[str, float]:
    return {"spread": statistics.median(row.spread for row in rows), "others": max(row.others for row in rows)}


def _tree(made: Device, rows: list[Measurement], files: list[str]) -> dict[str, Any]:
    return {"device": made.name, "facts": device_facts(made), "kernels": len(rows), **_noise(rows), "files": files}


def _page(made: Device, rows: list[Measurement], files: list[str], width: int) -> Page:
    page, noise = Page(width), _noise(rows)
    page.label("MEASURED", f"{made.name}: {made.full_name}", "bold", "bold")
    page.note(f"{len(rows)} kernels; median distance of quartiles {noise['spread']:.1%} of the median")
    if noise["others"] > _QUIET:
        page.note(f"other programs took up to {noise['others']:.0%} of the processors: measure again when it is quiet")
    page.blank()
    for fact in made.sources:
        page.add((f"  {fact.field:<26}", "bold"), (f"{figure(made, fact.field):>18}", ""))
    page.blank()
    page.note("links between devices and nodes are not measured: --fast-bandwidth and --slow-bandwidth state them")
    page.blank()
    page.items(files, "dim")
    folder = quoted(str(Path(files[1]).parent))
    page.add((f"use it: --catalogue {folder} --on 1x{made.name}", "dim"))
    return page
