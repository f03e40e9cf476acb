"""Where answers and errors are written: what a stream that fails means, and JSON that stays JSON."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import select
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import shardwise.answers
from command_line import run
from shardwise.answers._page import _ASCII, Page, substitutes, text_of
from shardwise.cli import main

FITS = ["train", "gpt2", "--on", "8xh100", "--micro-batch", "1"]
NO_FIT = ["train", "llama-3.1-405b", "--on", "1xh100-sxm-80gb"]
BAD = ["train", "gpt2", "--on", "8xD"]
STATUS = {"fits": (FITS, 0), "no fit": (NO_FIT, 1), "bad": (BAD, 2)}


class Broken(io.StringIO):
    """A stream whose every write fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        """Fail."""
        raise self.error


def status_with(words: list[str], stdout: Any, stderr: Any = None) -> int:
    """Return the exit status with these streams."""
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr or io.StringIO()):
        return main(words)


def shell(line: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Return what a shell makes of a line in which "$@" is a command of ours."""
    command = [sys.executable, "-m", "shardwise", *words]
    return subprocess.run(["bash", "-c", line, "sh", *command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("error", [OSError(28, "No space"), OSError(22, "Invalid"), ValueError("I/O on closed file")])
@pytest.mark.parametrize("name", ["fits", "no fit"])
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_answer_that_cannot_be_written_is_neither_yes_nor_no(name: str, more: list[str], error: Exception) -> None:
    """A full or closed standard output ends with 74 whatever the answer was."""
    assert status_with([*STATUS[name][0], *more], Broken(error)) == 74


@pytest.mark.parametrize("name", STATUS)
def test_no_standard_output_at_all_is_a_closed_one(name: str) -> None:
    """A process without standard output ends with 74, or with 2 where the problem went to standard error."""
    assert status_with(STATUS[name][0], None) == (2 if name == "bad" else 74)
    assert status_with([*STATUS[name][0], "--json"], None) == 74


@pytest.mark.parametrize("name", STATUS)
@pytest.mark.parametrize("stderr", [None, OSError(9, "Bad descriptor"), BrokenPipeError()])
def test_what_standard_error_cannot_take_changes_no_status(name: str, stderr: Exception | None) -> None:
    """Errors that nobody can read are still bad input."""
    words, status = STATUS[name]
    assert status_with(words, io.StringIO(), Broken(stderr) if stderr else None) == status


@pytest.mark.parametrize("name", STATUS)
def test_a_reader_that_goes_away_leaves_the_status_that_was_found(name: str) -> None:
    """What does not fit does not fit, though nobody reads to the end."""
    words, status = STATUS[name]
    assert status_with([*words, "--json"], Broken(BrokenPipeError())) == status


@pytest.mark.skipif(not hasattr(select, "poll"), reason="cannot tell whether a pipe is read")
def test_an_answer_that_nobody_waits_for_is_not_worked_out() -> None:
    """Where the reader of a pipe has gone before there is an answer the command ends with 74, and says nothing."""
    load = "--rate 20/s --input-tokens 2000 --output-tokens 500 --p99-ttft 2s"
    words = f"-m shardwise plan serve deepseek-v3 --on 64xh200-sxm-141gb {load}".split()
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.wait(timeout=240), process.stderr.read()) == (74, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("line", ['"$@" > /dev/full', '"$@" >&-', '"$@" > /dev/full 2>&1', '"$@" >&- 2>&-'])
def test_a_shell_sees_74_and_no_traceback(line: str) -> None:
    """A full disk and a closed descriptor say nothing on standard error, not at the end of the process either."""
    done = shell(line, *FITS)
    assert (done.returncode, done.stderr) == (74, "")


@pytest.mark.parametrize(
    ("words", "status"), [(["--json=1"], 0), (["--json=on"], 0), (["--json", "yes"], 0), (["--json=TRUE"], 0)]
)
def test_every_spelling_of_the_switch_prints_json(words: list[str], status: int) -> None:
    """What the switch takes as true prints JSON, and never a page."""
    done = run(*FITS, *words)
    assert done.status == status
    assert done.tree["fits"]


@pytest.mark.parametrize("words", [["--json=0"], ["--no-json"], ["--json=off"]])
def test_a_switch_that_is_off_prints_a_page(words: list[str]) -> None:
    """What the switch takes as false prints a page."""
    assert run(*FITS, *words).out.startswith("FITS")


@pytest.mark.parametrize("name", ["case.toml", "case.json"])
def test_a_case_file_may_ask_for_json(tmp_path: Path, name: str) -> None:
    """`json = true` in a case file prints JSON, and errors as JSON too."""
    table = {"command": "train", "model": "gpt2", "on": "8xh100", "micro_batch": 1, "json": True}
    path = tmp_path / name
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
    path.write_text(json.dumps(table) if name.endswith("json") else lines, encoding="utf-8")
    assert run("--config", str(path)).tree["fits"]
    assert run("--config", str(path), "--tp", "x").fields == ["tp"]
    assert run("--config", str(path), "--no-json").out.startswith("FITS")


def test_json_of_another_program_is_not_ours() -> None:
    """Words behind -- ask nothing of this command."""
    assert run("train", "gpt2", "--on", "8xD", "--", "python", "a.py", "--json").out == ""


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e999", "9" * 5000])
def test_errors_are_json_whatever_the_value(tmp_path: Path, value: str) -> None:
    """Values that JSON has no number for are said as text."""
    path = tmp_path / "case.toml"
    path.write_text(f'model = "gpt2"\non = "8xh100"\nprice = {value}\ntp = {value}\n', encoding="utf-8")
    done = run("train", "--config", str(path), "--json")
    assert done.status == 2
    json.loads(done.out, parse_constant=lambda word: pytest.fail(word))


def test_what_is_wrong_is_echoed_shortly() -> None:
    """A value of a million characters, in whatever field, is cut in page and JSON."""
    for words in (
        ["train", "x" * 10**6, "--on", "8xh100"],
        [*FITS, "--tokens", "9" * 10**6],
        [*FITS, "--" + "y" * 10**6],
    ):
        for more in ([], ["--json"]):
            done = run(*words, *more)
            assert done.status == 2
            assert len(done.out + done.err) < 12_000


@cache
def _glyphs() -> set[str]:
    """Return the characters beyond ASCII in constants of the modules that make pages."""
    folder = Path(next(iter(shardwise.answers.__path__)))
    files = [path for path in folder.glob("*.py") if not path.name.startswith("_plot")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {char for text in texts for char in text if not char.isascii()}


@pytest.mark.parametrize("encoding", ["cp437", "cp850", "cp1252", "cp65001", "ascii", "latin-1", "utf-8"])
def test_every_glyph_has_what_a_console_can_show(encoding: str) -> None:
    """Each glyph of the pages is in the console's encoding, or ASCII stands for it."""
    assert {ord(glyph) for glyph in _glyphs()} <= _ASCII.keys()
    page = Page(80)
    page.add(("".join(map(chr, _ASCII)), ""))
    text = text_of(page, io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert len(text.encode(encoding).decode(encoding)) == len(_ASCII) + 1
    assert not (substitutes(encoding) and encoding in ("utf-8", "cp65001"))


def test_an_encoding_that_nobody_knows_is_ascii() -> None:
    """A stream of an encoding that Python lacks gets ASCII."""
    assert substitutes("no-such-encoding").keys() == _ASCII.keys()
