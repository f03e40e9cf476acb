"""What Windows does otherwise, tried with its rules of words, line ends, consoles and processes on any system."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command_line import run
from fuzz.inputs import ACCELERATE, CLUSTER, DEEPSPEED, EXPORTED, LOADS, MEASURED, SCRIPTS, _exported
from shardwise.answers._page import Page, command_lines, wants_colour
from shardwise.answers._typed import quoted, split
from shardwise.models import catalogue
from shardwise.search import ProcessExecutor

CASE = 'command = "train"\nmodel = "gpt2"\non = "8xh100"\nmicro_batch = 1\n'
LLAMA = json.dumps(catalogue()["llama-3.1-8b"]["config"], indent=1)
SERVE = "serve gpt2 --on 1xh100 --requests 20 --json"
# Texts that people write, the command that reads one, and what else lies beside it.
READ: dict[str, tuple[str, str]] = {
    "case.toml": ("--config case.toml --json", CASE),
    "lab.toml": ("count gpt2 --seq-len 64 --on lab.toml --json", CLUSTER),
    "m.csv": ("validate m.csv --json", MEASURED),
    "config.json": ("count config.json --json", LLAMA),
    "ds.json": ("import ds.json --json", json.dumps(DEEPSPEED, indent=1)),
    "a.yaml": ("import a.yaml --json", ACCELERATE.replace("FULL_SHARD", "HYBRID_SHARD").partition("deepspeed_")[0]),
    **{
        name: (f"{SERVE} --trace {name}", text)
        for name, text in LOADS.items()
        if name not in ("classes.toml", "study.toml")
    },
    **{path.name: (f"import {path.name} --json", path.read_text(encoding="utf-8")) for path in SCRIPTS.iterdir()},
}


def both_ways(name: str, text: str, command: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Any]:
    """Return what a command makes of a text with the line ends of either system, in folders of one name."""
    found = []
    for ends in ("\n", "\r\n"):
        place = folder / str(len(found)) / "probe"
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(text.replace("\n", ends).encode())
        monkeypatch.chdir(place)
        done = run(*command.split())
        found.append((done.status, done.out, done.err))
    return found


@pytest.mark.parametrize("name", READ)
def test_a_file_means_the_same_with_line_ends_of_windows(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Cases, clusters, measurements, traces, configurations and scripts saved on Windows are read as any others."""
    command, text = READ[name]
    unix, windows = both_ways(name, text, command, monkeypatch, tmp_path)
    assert unix == windows


@pytest.mark.parametrize("target", EXPORTED)
def test_what_is_exported_reads_the_same_from_windows(
    target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files of every trainer and engine are read the same once an editor of Windows has saved them."""
    for name, text in _exported(target).items():
        unix, windows = both_ways(name, text, f"import {name} --json", monkeypatch, tmp_path)
        assert unix == windows


def test_a_table_in_utf16_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CSV file that PowerShell wrote in UTF-16 is refused: read as bytes, its first column had another name."""
    monkeypatch.chdir(tmp_path)
    for encoding in ("utf-16", "utf-16-be"):
        mark = "" if encoding == "utf-16" else "\ufeff"
        Path("m.csv").write_bytes((mark + MEASURED).encode(encoding))
        Path("azure.csv").write_bytes((mark + LOADS["azure.csv"]).encode(encoding))
        for command in ("validate m.csv", f"{SERVE} --trace azure.csv"):
            done = run(*command.split())
            assert done.status == 2 and "is not UTF-8 text" in done.err + done.out


@pytest.mark.parametrize(
    ("word", "typed"),
    [
        ("8xh100", "8xh100"),
        (r"C:\runs\a.toml", r"C:\runs\a.toml"),
        (r"C:\my runs\a.toml", r'"C:\my runs\a.toml"'),
        ("C:\\my runs\\", '"C:\\my runs\\\\"'),
        ('say "x"', '"say \\"x\\""'),
        ('a\\"b', '"a\\\\\\"b"'),
        ("a&b", '"a&b"'),
        ("", '""'),
    ],
)
def test_words_are_typed_as_windows_takes_them(word: str, typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is printed on Windows quotes with double quotes, and backslashes only before them."""
    monkeypatch.setattr(sys, "platform", "win32")
    assert quoted(word) == typed


def test_a_path_in_the_flags_of_a_side_keeps_its_backslashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that stand in one text, as those of `compare`, name files of Windows as they are called there."""
    text = r'train --on C:\runs\lab.toml --save "C:\my runs\a.toml"'
    monkeypatch.setattr(sys, "platform", "win32")
    assert split(text) == ["train", "--on", r"C:\runs\lab.toml", "--save", r"C:\my runs\a.toml"]
    monkeypatch.setattr(sys, "platform", "linux")
    assert split(r"a\ b #c 'd e'") == ["a b", "#c", "d e"]


def test_a_command_that_is_printed_is_one_line_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell of Windows goes on after a backslash at the end of a line."""
    words = ["shardwise train gpt2", *[f"--flag-{number} {number}" for number in range(20)]]
    for platform, lines in (("linux", 4), ("win32", 1)):
        monkeypatch.setattr(sys, "platform", platform)
        page = Page(80)
        command_lines(page, "AGAIN", words)
        assert page.plain().split("AGAIN\n")[1].count("\n") + 1 == lines


@pytest.mark.parametrize(("mode", "can", "wanted"), [(3, True, True), (3, False, False), (None, False, True)])
def test_a_console_of_windows_is_told_of_colours(
    mode: int | None, can: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old console shows escape sequences as letters until it is told what they are; one that cannot gets none."""
    told: list[int] = []

    def get_mode(_: object, where: Any) -> int:
        where._obj.value = mode or 0
        return mode is not None

    kernel = SimpleNamespace(GetConsoleMode=get_mode, SetConsoleMode=lambda _, one: told.append(one.value) or can)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(get_osfhandle=lambda number: number))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream: Any = SimpleNamespace(isatty=lambda: True, fileno=lambda: 1)
    assert wants_colour(stream) is wanted
    assert told == ([mode | 4] if mode else [])


def test_no_more_processes_than_windows_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows waits for 63 handles at once: a search on a larger machine starts no more processes than that."""

    class Work:
        known = None

        def learn(self, known: Any) -> None:
            """Take nothing in."""

        def __call__(self, parts: Sequence[tuple[int, int]]) -> Any:
            """Return the part."""
            return parts[0]

    started: list[int] = []
    monkeypatch.setattr("shardwise.search._executor._started", lambda work: work)
    monkeypatch.setattr("shardwise.search._executor._busy", lambda new, left, known: started.append(len(new)) or [])
    monkeypatch.setattr("shardwise.search._executor.MOMENT", 0.0)
    parts = [(one, one + 1) for one in range(200)]
    for platform, most in (("win32", 60), ("linux", 128)):
        monkeypatch.setattr("shardwise.search._executor.sys", SimpleNamespace(platform=platform))
        started.clear()
        assert sorted(ProcessExecutor(128).run(Work(), parts)) == parts
        assert started[0] == most


def test_memory_is_told_by_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `measure` asks of a system that has no sysconf: the first of MEMORYSTATUSEX' long words."""
    from shardwise.measuring._device import _memory_bytes

    def status(held: Any) -> int:
        assert int.from_bytes(held.raw[:4], "little") == len(held.raw) == 64
        held[8:16] = (96 << 30).to_bytes(8, "little")
        return 1

    here = _memory_bytes()
    assert here > 1 << 28
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(
        ctypes, "windll", SimpleNamespace(kernel32=SimpleNamespace(GlobalMemoryStatusEx=status)), raising=False
    )
    assert _memory_bytes() == 96 << 30


def test_a_model_in_a_folder_of_windows_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A trainer's file that names a folder of a drive means the model that the folder is named after."""
    monkeypatch.chdir(tmp_path)
    text = "model_name_or_path: D:\\models\\Qwen2.5-7B-Instruct\nstage: sft\nfinetuning_type: lora\ncutoff_len: 2048\n"
    Path("x.yaml").write_text(text + "per_device_train_batch_size: 2\nbf16: true\n", encoding="utf-8")
    done = run("import", "x.yaml", "--json")
    assert done.status == 0 and "qwen2.5-7b" in json.dumps(done.tree)
