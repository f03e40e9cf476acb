"""What other programs read of the table of flags: editors a schema, shells completion."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from command_line import run
from shardwise.answers import _commands
from shardwise.answers._inputs import WRITTEN
from shardwise.answers._reference import SHELLS, schema


def test_the_schema_has_every_key_of_every_case() -> None:
    """A key that a case file may hold is in the schema with its meaning, and nothing else is."""
    keys = schema()["properties"]
    taken = {key for c in _commands.every().values() if "config" in c.flags for key in c.flags}
    assert keys.keys() - {"command"} == taken - {"help", "config", "follow", *WRITTEN}
    assert all(key == "command" or keys[key]["description"] for key in keys)


def test_a_saved_case_obeys_the_schema(tmp_path: Path) -> None:
    """What --save writes has keys of the schema, and values of their types and choices."""
    path = tmp_path / "case.json"
    words = ("--sharding", "fsdp", "--tp", "2", "--tokens", "1e9", "--no-overlap", "--document-lengths", "1024,3072")
    run("train", "llama-3.2-1b", "--on", "8xh100", "--seq-len", "4096", *words, "--save", str(path))
    types = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array"}
    known = schema()["properties"]
    case = json.loads(path.read_text())
    assert len(case) > 6
    for key, value in case.items():
        for one in known[key].get("anyOf", [known[key]]):
            said = one.get("type", [])
            allowed = [said] if isinstance(said, str) else said
            if value in one.get("enum", [value]) and (not allowed or types[type(value)] in (*allowed, "number")):
                break
        else:
            pytest.fail(f"{key} = {value!r} is not in {known[key]}")


def test_the_schema_prints_as_a_file() -> None:
    """Standard output is the schema itself, to be kept beside case files."""
    printed = json.loads(run("schema").out)
    assert printed["properties"]["recompute"]["anyOf"] and printed["$schema"].startswith("https://json-schema.org")


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_names_models_devices_and_choices(shell: str) -> None:
    """Every shell is told models, devices, flags and the words that they take."""
    script = run("completion", shell).out
    for word in ("llama-3.1-70b", "h100-sxm-80gb", "seq-len", "all-gather", "megatron"):
        assert word in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("tra", "train"),
        ("train llama-3.1-4", "llama-3.1-405b"),
        ("train gpt2 --on 8xgb2", "8xgb200"),
        ("infer gpt2 --input-t", "--input-tokens"),
        ("train gpt2 --cp-kind all-g", "all-gather"),
        ("plan inf", "infer"),
        ("plan serve gpt2 --p99-tt", "--p99-ttft"),
        ("infer gpt2 --on h100,2xmi30", "h100,2xmi300x"),
        ("infer gpt2 --solve max_s", "max_sequences"),
        ("train gpt2 --vary seq_l", "seq_len="),
        ("infer gpt2 --engine sgl", "sglang"),
        ("infer gpt2 --host cpu-g", "cpu-generic"),
    ],
)
def test_bash_completes_the_word_that_is_typed(typed: str, completed: str) -> None:
    """The script completes commands, models, devices behind a number or a comma, fields, flags and choices."""
    assert completed in completed_by("bash", typed)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete_as_bash_does(shell: str) -> None:
    """Devices behind a number and a comma are the hardest of it."""
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    assert "h100,2xmi300x" in completed_by(shell, "infer gpt2 --on h100,2xmi30")


def completed_by(shell: str, typed: str) -> list[str]:
    """Return the words that a shell offers for what is typed behind shardwise."""
    words = ["shardwise", *typed.split()]
    asked = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shardwise; echo ${{COMPREPLY[@]}}"
    line = f"complete -C'{' '.join(words)}'" if shell == "fish" else asked
    script = f"{run('completion', shell).out}\n{line}\n"
    done = subprocess.run([shell], input=script, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_values_that_are_free_are_completed_by_files() -> None:
    """Behind a flag that takes a file or a number bash is told no words, and offers files."""
    script = run("completion", "bash").out
    line = "COMP_WORDS=(shardwise train gpt2 --plot ''); COMP_CWORD=4; _shardwise; echo ${#COMPREPLY[@]}"
    assert subprocess.run(["bash", "-c", f"{script}\n{line}"], capture_output=True, text=True).stdout == "0\n"


def test_a_shell_that_is_not_known_is_refused() -> None:
    """Completion is of bash, zsh and fish; without one it asks which."""
    assert run("completion", "tcsh", "--json").fields == ["shell"]
    assert run("completion", "--json").fields == ["shell"]


def test_choices_of_completion_are_words() -> None:
    """Where several values are tried, no brace or range of the help is among the choices: fish refuses it."""
    script = run("completion", "fish").out
    given = [line.split(" -a '")[1].split("'")[0] for line in script.splitlines() if " -x -a '" in line]
    assert any("bf16" in words.split() for words in given)
    assert not [words for words in given if set("{}|") & set(words)]
