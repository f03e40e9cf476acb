"""The documents: their commands run, what they name exists, and the tables they show are what programs print today."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import update_docs

from command_line import run
from shardwise.measured._run import KINDS

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    p
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "examples/**/*.md", "accuracy/**/*.md")
    for p in ROOT.glob(pattern)
)
GUIDES = ("how-to.md", "plots.md", "formats.md", "cli.md", "comm.md", "fine-tuning.md", "json.md", "own-runs.md")
RUN = [ROOT / "README.md", *(ROOT / "docs" / name for name in GUIDES)]
# Files that a page takes its reader to have.
HELD = {"runs.csv": "metric,value,model,device,num_gpus,tp,seq_len\nstep_time,5.9,llama-3.1-8b,h100,8,8,4096\n"}
OURS = "src|accuracy|tests|docs|benchmarks|scripts|.ci".replace(".", r"\.")

_BLOCK = re.compile(r"^```(\w+)?[ ]*([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_PRINTED = re.compile(r"<!-- output of (?:(?!```sh).)*?<!-- end -->", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NAMED = re.compile(rf"`((?:{OURS})/[\w./-]+)`")
_REFERENCE = re.compile(r"docs/(\w+\.md)(?:, ([a-z][a-z -]*[a-z]))?")
_FOREIGN = re.compile(r"github\.com/\S+ docs/\S+")
# Pages with the output of programs; tests/accuracy has those that predict every published run.
MADE = [p for p in DOCUMENTS if "<!-- output of " in p.read_text("utf-8") and ROOT / "accuracy" not in p.parents]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the exit status that its last command is said to have, and its text."""

    language: str
    status: int
    text: str


def blocks(path: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a document in order, but for what a program printed of commands that are not shown."""
    for language, more, text in _BLOCK.findall(_PRINTED.sub("", path.read_text(encoding="utf-8"))):
        yield Block(language, int(more.partition("exit=")[2] or 0), text)


def headings(path: Path) -> set[str]:
    """Return the headings of a document in lower case, code in them left as text."""
    without_code = _BLOCK.sub("", path.read_text(encoding="utf-8"))
    return {line.lstrip("#").strip().lower() for line in without_code.splitlines() if line.startswith("#")}


def runnable(text: str) -> str:
    """Return a shell block without what sets up an environment, which whoever runs the tests has done already."""
    lines = []
    for line in text.splitlines():
        if "pytest" in line:
            continue
        steps = [s for s in line.split(" && ") if " -m venv " not in f" {s} " and "pip install" not in s]
        lines.append(" && ".join(steps).replace(".venv/bin/", ""))
    return "\n".join(lines)


_HERE = re.compile(r"<<'?(\w+)'?$")


def steps(text: str) -> Iterator[str]:
    """Yield the commands of a shell block, each with the lines that it is continued on and that it reads."""
    lines = iter(text.splitlines())
    for line in lines:
        whole = [line]
        while whole[-1].endswith("\\"):
            whole.append(next(lines))
        if until := _HERE.search(line):
            while whole[-1] != until[1]:
                whole.append(next(lines))
        if line and not line.startswith("#"):
            yield "\n".join(whole)


def alone(step: str) -> list[str]:
    """Return the words of a command of shardwise that needs no shell, else nothing."""
    step = step.replace("\\\n", " ")
    if not step.startswith("shardwise ") or set(step) & set("|<>&;$`*~"):
        return []
    return shlex.split(step, comments=True)[1:]


def unprinted(shown: str, printed: str) -> list[str]:
    """Return the lines of a shown answer that were not printed, each up to where it breaks off with dots."""
    words = " ".join(printed.split())
    return [line for line in shown.splitlines() if " ".join(line.partition("...")[0].split()) not in words]


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of a reader: `shardwise` and `python` are those under test."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, command in (("shardwise", "-m shardwise"), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n', encoding="utf-8")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize("path", RUN, ids=lambda p: p.name)
def test_every_command_runs(path: Path, tmp_path: Path, shell: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shell and Python block ends with status 0, or with the one that the block states, in the order written.

    TOML is a case file. What needs no shell runs in this process. A block of text behind one of commands is what those
    printed.
    """
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    for name, text in HELD.items():
        (work / name).write_text(text, encoding="utf-8")
    printed = ""
    for block in blocks(path):
        if block.language == "text" and printed:
            assert unprinted(block.text, printed) == []
        printed = ""
        if block.language == "toml":
            (work / "case.toml").write_text(block.text, encoding="utf-8")
            assert run("--config", "case.toml").status == 0
        if block.language == "python":
            exec(compile(block.text, path.name, "exec"), {"__name__": "__main__"})
        ended, said = 0, ""
        for step in steps(runnable(block.text)) if block.language == "sh" else ():
            if words := alone(step):
                done = run(*words)
                printed += done.out + done.err
                ended, said = done.status, f"{step}\n{done.out[-2000:]}\n{done.err[-2000:]}"
            else:
                command = ["bash", "-euo", "pipefail", "-c", step]
                other = subprocess.run(command, cwd=work, env=shell, capture_output=True, text=True)
                printed += other.stdout + other.stderr
                ended, said = other.returncode, f"{step}\n{other.stdout[-2000:]}\n{other.stderr[-2000:]}"
            if ended:
                break
        assert ended == block.status, said


def test_how_to_states_what_commands_run() -> None:
    """The how-tos show commands, one of which says that it does not fit."""
    found = [b for b in blocks(ROOT / "docs" / "how-to.md") if b.language in ("sh", "python")]
    assert len(found) >= 6
    assert any(b.status == 1 for b in found)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_named_files_exist(path: Path) -> None:
    """Links lead somewhere, anchors are headings, and files of this repository that are named are there."""
    text = path.read_text(encoding="utf-8")
    missing = [name for name in _NAMED.findall(text) if not (ROOT / name).exists()]
    for link in _LINK.findall(text):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        known = {re.sub(r"[^\w -]", "", h).replace(" ", "-") for h in headings(file)} if file.exists() else set()
        if not file.exists() or (anchor and anchor not in known):
            missing.append(link)
    assert not missing


def test_references_from_the_code_lead_to_headings() -> None:
    """Where the code or its data say "docs/formulas.md, collectives", that page has such a heading."""
    lost = []
    for file in (p for p in (ROOT / "src").rglob("*") if p.suffix in (".py", ".toml")):
        for name, heading in _REFERENCE.findall(_FOREIGN.sub("", file.read_text(encoding="utf-8"))):
            page = ROOT / "docs" / name
            if not page.exists() or (heading and heading not in headings(page)):
                lost.append(f"{file.relative_to(ROOT)}: docs/{name}, {heading}")
    assert not lost


@pytest.mark.parametrize("path", MADE, ids=lambda p: p.name)
def test_shown_outputs_are_up_to_date(path: Path) -> None:
    """A table in a document is what its program prints; `python benchmarks/update_docs.py` brings it up to date."""
    text = path.read_text(encoding="utf-8")
    assert update_docs.updated(text) == text


def test_the_readme_shows_what_its_first_command_prints() -> None:
    """Line by line, up to where a line of the block breaks off with dots."""
    texts = [block.text for block in blocks(ROOT / "README.md")]
    words = shlex.split(next(text for text in texts if "shardwise train" in text).partition("/shardwise ")[2])
    assert unprinted(next(text for text in texts if text.startswith("FITS")), run(*words).out) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_documents_are_plain_text(path: Path) -> None:
    """Pages are ASCII without trailing blanks, and tables have as many cells in every row as in their head."""
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    assert not re.search(r"[ \t]+$", text, re.MULTILINE)
    head = 0
    for line in _BLOCK.sub("", text).splitlines():
        cells = line.count("|") if line.startswith("|") else 0
        assert not (head and cells) or cells == head, line
        head = cells


def test_the_page_on_searches_states_the_pairs_that_ties_rest_on() -> None:
    """How many pairs of runs there are, and within how much of their predicted ratio 8 of 10 came."""
    bands = tomllib.loads((ROOT / "src/shardwise/cost/bands.toml").read_text(encoding="utf-8"))
    page = " ".join((ROOT / "docs" / "search.md").read_text(encoding="utf-8").split())
    for quantity, words in (
        ("step_seconds", "{pairs} published pairs of plans of one job came within {share} %"),
        ("request_seconds", "{pairs} pairs of deployments came within {share} %"),
    ):
        paired = bands[quantity]["paired"]
        assert words.format(pairs=paired["pairs"], share=round(100 * math.expm1(paired["log"]))) in page


def test_the_page_on_own_runs_names_every_column() -> None:
    """Those of each kind of file, and those of both, no more and no fewer."""
    rows = re.findall(
        r"^[|] (training|inference|both) [|](.*)$", (ROOT / "docs/own-runs.md").read_text("utf-8"), re.MULTILINE
    )
    named = {kind: set(re.findall(r"`(\w+)`", cells)) for kind, cells in rows}
    for kind in KINDS:
        assert named[kind.name] | named["both"] == kind.columns | kind.further
        assert not named[kind.name] & named["both"]


def test_pages_of_users_stay_short() -> None:
    """README and guides have up to 14,000 words; printed answers, generated tables and references do not count."""
    references = {"flags.md", "json.md", "formulas.md", "notation.md"}
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.name not in references]
    whole = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *pages))
    read = re.sub(r"<!-- output of .*?<!-- end -->|^```text$.*?^```$", "", whole, flags=re.DOTALL | re.MULTILINE)
    assert 10_000 < len(read.split()) < 14_000
