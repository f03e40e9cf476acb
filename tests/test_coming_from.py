"""The tables for people who come from other tools: every replacement in them runs, and every gap has its reason."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import shardwise as sw
from command_line import run

PAGE = Path(__file__).parents[1] / "tests/data/coming-from.md"
_BASE = re.compile(r"(?:Behind|Keys of) `([^`]+)`")
_KEYS = re.compile(r"keys are of the same command with `([^`]+)`")


class Row(NamedTuple):
    """One row of a table: where it stands, theirs, ours and the difference, and the commands above its table."""

    section: str
    theirs: str
    ours: str
    differs: str
    base: str
    keys: str


def rows() -> Iterator[Row]:
    """Yield the rows of every table."""
    section = tool = base = keys = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            tool = line.strip("# ") if line.startswith("## ") else tool
            section, base, keys = f"{tool}: {line.strip('# ')}", "", ""
        if found := _BASE.search(line):
            base = keys = found[1]
        if found := _KEYS.search(line):
            keys = f"{base} {found[1]}"
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("| ") else []
        if len(cells) >= 2 and "here" not in cells:
            cells = [cell.strip(" |") for cell in (*cells, "")]
            yield Row(section, cells[0], cells[1].strip("`"), cells[2], base, keys)


ROWS = list(rows())


@cache
def answer_of(command: str) -> dict[str, Any]:
    """Return the JSON of a command."""
    return run(*shlex.split(command)[1:], *([] if "--json" in command else ["--json"])).tree


@cache
def names() -> dict[str, Any]:
    """What Python replacements may use."""
    model, cluster = sw.load_model("gpt2"), sw.Cluster.parse("8xh100-sxm-80gb")
    plan, job = sw.Plan(dp=0, tp=2), sw.Training(seq_len=1024, global_batch=32)
    report = sw.train(model, cluster, plan, job)
    served = sw.infer(model, cluster, sw.Plan(dp=8), sw.Serving(batch=8))
    found = {"sw": sw, "replace": replace, "model": model, "cluster": cluster, "plan": plan, "job": job}
    return {**found, "report": report, "served": served}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.section}: {row.theirs}"[:90])
def test_every_replacement_runs(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command answers, a flag is taken, a key exists, Python evaluates; what has no replacement has a reason."""
    monkeypatch.chdir(tmp_path)
    if row.ours == "none":
        assert len(row.differs.split()) > 3
    elif row.ours.startswith("."):
        value: Any = answer_of(row.keys)
        for name in row.ours.strip(".").split("."):
            value = value[int(name)] if name.isdigit() else value[name]
    elif row.ours.startswith(("-", "shardwise ")):
        command = row.ours if row.ours.startswith("shardwise ") else f"{row.base} {row.ours}"
        assert command.startswith("shardwise "), f"no command stands above {row.theirs}"
        done = run(*shlex.split(command)[1:])
        assert done.status in (0, 1), done.err
    else:
        assert eval(row.ours, names()) is not None


_WHOLE = [
    command
    for command in re.findall(r"`(shardwise [^`]+)`", (PAGE.parents[2] / "docs/coming-from.md").read_text("utf-8"))
    if not re.search(r"MODEL|[.]{3}|pretrain[.]sh|^shardwise export", command)
]


@pytest.mark.parametrize("command", _WHOLE)
def test_every_whole_command_of_the_short_page_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that name their model answer, those of engines and estimators among them."""
    monkeypatch.chdir(tmp_path)
    done = run(*shlex.split(command)[1:])
    assert done.status in (0, 1), done.err
    assert len(_WHOLE) >= 10


def test_the_page_is_read() -> None:
    """The tables are found, with a replacement for nearly every row."""
    tools = Counter(row.section.partition(":")[0] for row in ROWS)
    counted = ", ".join(f"{count} {tool.lower()}" for tool, count in tools.items())
    assert f"There are {len(ROWS)} rows: {counted}." in " ".join(PAGE.read_text(encoding="utf-8").split()).replace(
        "EleutherAI", "eleutherai"
    ).replace("Megatron-LM", "megatron-lm")
    assert sum(row.ours == "none" for row in ROWS) < 15
