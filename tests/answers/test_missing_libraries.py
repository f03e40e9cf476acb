"""Libraries that Python cannot import: what needs none of them answers, the rest says which and how to get it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from command_line import run
from shardwise.libraries import how_to_install, is_installed, missing

# Blocks the library named first, runs each command line of the others, and prints [status, errors] of all.
_PROGRAM = """
import contextlib, importlib.abc, io, json, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from shardwise.cli import main

ends = []
for line in sys.argv[2:]:
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main(line.split())
    ends.append([status, errors.getvalue() + out.getvalue() * ("--json" in line)])
print(json.dumps(ends))
"""
_TRAIN = "train gpt2 --on 1xa100-sxm-40gb --seq-len 512 --global-batch 8"
_INFER = "infer gpt2 --on 1xa100-sxm-40gb --input-tokens 64 --output-tokens 8"
_SERVE = "serve gpt2 --on 1xa100-sxm-40gb --input-tokens 64 --output-tokens 8 --rate 1 --requests 40"
_STUDY = """
task = "train"

[fixed]
seq_len = 512
global_batch = 8

[grid]
model = ["gpt2"]
on = ["1xa100-sxm-40gb"]
"""
ANSWERED = {
    "numpy": [
        _TRAIN, f"{_TRAIN} --json", f"{_TRAIN} --savers", f"{_TRAIN} --energy", f"{_TRAIN} --vary micro_batch=1,2",
        f"{_TRAIN} --solve global_batch --max-step 1s",
        _INFER, f"{_INFER} --vary batch=1,2", f"{_INFER} --solve batch",
        "count gpt2", "comm gpt2 --on 2xa100-sxm-40gb --seq-len 512 --global-batch 8",
        "explain gpt2 --on 1xa100-sxm-40gb --seq-len 512 --global-batch 8",
        "roofline gpt2 --on 1xa100-sxm-40gb --seq-len 512 --global-batch 8",
        "models gpt2", "devices h100", "dtypes", _SERVE, f"{_SERVE} --vary rate=1,2", f"{_SERVE} --solve rate",
        f"{_SERVE} --explain tpot", _SERVE.replace("gpt2", "llama-3.1-70b"),
    ],
    "matplotlib": [_TRAIN, _SERVE],
    "polars": [f"{_TRAIN} --vary micro_batch=1,2 --rows FOLDER/rows.csv", "sweep FOLDER/study.toml --out FOLDER/out"],
    "tomli_w": [_TRAIN],
    "yaml": [_TRAIN],
}  # fmt: skip
LOADS = [
    # Attention groups whose requests wait for their turn, and those of another engine's way to share them out.
    "deepseek-v3 --on 16xh200 --tp 1 --ep 16 --rate 10 --input-tokens 2000 --output-tokens 200 --output-cv 0.5",
    "mixtral-8x7b --on 8xh100 --tp 2 --ep 4 --rate 30 --input-tokens 500..1500 --output-tokens 50 --engine sglang",
    "llama-3.1-70b --on 8xh100 --tp 2 --pp 2 --rate 5 --input-tokens 2000 --input-cv 0.7 --output-tokens 100",
    "llama-3.1-8b --on 4xh100 --prefill-workers 1 --rate 10 --input-tokens 2000 --output-tokens 100",
    "llama-3.1-8b --on 2xh100 --users 30 --input-tokens 1000 --output-tokens 50 --prefix-tokens 500 --mean-tpot 1s",
    "llama-3.1-8b --on 1xh100 --rate 10 --input-tokens 2000 --output-tokens 1",
    "llama-3.1-8b --on 1xh100 --rate 400 --input-tokens 2000 --output-tokens 50 --engine trtllm",
]
"""Loads whose closed forms differ in what they are made of."""
REFUSED = {
    "numpy": [f"{_SERVE} --sensitivity", f"plan {_TRAIN}", f"plan {_TRAIN} --json", f"plan {_INFER}", f"plan {_SERVE}",
              f"{_TRAIN} --sensitivity", f"{_TRAIN} --vary micro_batch=1,2 --rows FOLDER/rows.csv",
              "sweep FOLDER/study.toml --out FOLDER/out"],
    "matplotlib": [f"{_TRAIN} --plot FOLDER/x.svg", f"{_SERVE} --plot FOLDER/x.svg",
                   f"{_TRAIN} --timeline FOLDER/x.png"],
    "torch": ["measure --out FOLDER/mine"],
    "ray": ["sweep FOLDER/study.toml --out FOLDER/out --engine ray"],
    "yaml": ["import FOLDER/axolotl.yaml"],
}  # fmt: skip


@cache
def _ends(library: str) -> dict[str, tuple[int, str]]:
    """Return status and errors of all lines that are asked without a library: one process for each."""
    lines = [*dict.fromkeys([*ANSWERED.get(library, []), *REFUSED.get(library, [])])]
    with tempfile.TemporaryDirectory() as folder:
        return dict(zip(lines, _asked(library, lines, Path(folder)), strict=True))


def _asked(library: str, lines: list[str], folder: Path) -> list[tuple[int, str]]:
    (folder / "study.toml").write_text(_STUDY, encoding="utf-8")
    (folder / "axolotl.yaml").write_text("base_model: gpt2\nsequence_len: 512\n", encoding="utf-8")
    words = [line.replace("FOLDER", folder.as_posix()) for line in lines]
    program = [sys.executable, "-c", _PROGRAM, library, *words]
    quiet = {**os.environ, "COLUMNS": "400"}
    done = subprocess.run(program, capture_output=True, text=True, check=True, env=quiet, cwd=folder)
    return [(status, said) for status, said in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.parametrize("library", ANSWERED)
def test_what_needs_no_library_answers_without_it(library: str) -> None:
    """Single answers, and the same question for other values, need numpy no more than they need matplotlib."""
    for line in ANSWERED[library]:
        status, said = _ends(library)[line]
        assert status in (0, 1), f"{line}: {said}"


def _numbers(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of an answer with their paths."""
    if not isinstance(tree, (dict, list)):
        yield path, tree
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _numbers(value, f"{path}.{key}")


def test_a_load_has_the_same_answer_without_numpy(tmp_path: Path) -> None:
    """Every number of it to a billionth part, and every word."""
    lines = [f"serve {load} --requests 40 --json" for load in LOADS]
    for line, (status, told) in zip(lines, _asked("numpy", lines, tmp_path), strict=True):
        assert status in (0, 1), f"{line}: {told}"
        numbers = dict(_numbers(run(*line.split()).tree))
        assert dict(_numbers(json.loads(told))) == {
            path: pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
            for path, value in numbers.items()
        }, line


@pytest.mark.parametrize("library", REFUSED)
def test_a_missing_library_is_named_with_how_to_get_it(library: str) -> None:
    """It is no fault of the program: exit status 2, the library and the command that installs it."""
    for line in REFUSED[library]:
        status, said = _ends(library)[line]
        assert status == 2, f"{line}: {said}"
        assert "pip install" in said, f"{line}: {said}"
        assert library in said.lower() or how_to_install(library) in said, f"{line}: {said}"


def test_a_broken_import_of_our_own_is_a_fault() -> None:
    """A module of the package that is not there is nothing that a user can install."""
    assert missing(ModuleNotFoundError("No module named 'shardwise.x'", name="shardwise.x"), "train") is None
    assert missing(ImportError("cannot import name 'a' from 'shardwise.b'", name="shardwise.b"), "train") is None


def test_a_library_that_is_blocked_by_nothing_in_its_place_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sys.modules[name] = None` is how Python is told that there is no such module."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not is_installed("matplotlib")
