"""The reference of JSON keys and the answers agree, so that a renamed, removed or new key shows."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from json_keys import TABLE, rows, spelt

from shardwise.answers._commands import SUMMARIES
from shardwise.answers._main import SCHEMA, run

ANSWERS: dict[str, dict[str, Any]] = {
    answer["name"]: answer for answer in tomllib.loads(TABLE.read_text("utf-8"))["answer"]
}
ASKED = [name for name, answer in ANSWERS.items() if "asked" in answer]
FILES = {
    "runs.csv": (
        "metric,value,model,device,num_gpus,seq_len,micro_batch,global_batch,tp,dp,sharding,recompute,framework\n"
        "step_time,4.9,llama-3.1-8b,h100-sxm-80gb,16,8192,1,64,1,16,fsdp,full,torchtitan\n"
        "step_time,4.9,llama-3.1-8b,h100-sxm-80gb,16,8192,1,64,3,16,fsdp,full,torchtitan\n"
    ),
    "classes.toml": (
        '[[class]]\nname = "chat"\nshare = 0.75\ninput_tokens = 500\noutput_tokens = 50\np90_ttft = "1s"\n'
        '[[class]]\nname = "code"\nshare = 0.25\ninput_tokens = 900\noutput_tokens = 20\n'
    ),
    "study.toml": (
        '[fixed]\nmodel = "gpt2"\nglobal_batch = 8\nseq_len = 256\ncp = 1\npp = 1\n[grid]\non = ["2xa100-sxm-80gb"]\n'
    ),
    "serve.sh": "vllm serve meta-llama/Llama-3.1-8B -tp 2 --port 8000",
    "ds.json": '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}',
}


def paths(tree: object, at: str = "") -> Iterator[str]:
    """Yield the path of every value, entries of a list as `[]`."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from paths(value, f"{at}.{name}" if at else name)
    elif isinstance(tree, list) and tree:
        for value in tree:
            yield from paths(value, f"{at}[]")
    else:
        yield at


def documented(name: str) -> list[str]:
    """Return the keys that the tables promise of an answer, those that it shares with others among them."""
    answer = ANSWERS[name]
    own = [key for row in rows(answer) for key in spelt(row[0])]
    return own + [f"{at}.{key}" for at, of in answer.get("same", {}).items() for key in documented(of)]


def detail(name: str) -> list[str]:
    """Return the subtrees that may change."""
    answer = ANSWERS[name]
    shared = [f"{at}.{key}" for at, of in answer.get("same", {}).items() for key in detail(of)]
    return [*answer.get("detail", []), *shared]


def pattern(key: str) -> str:
    """Return the expression that a key is, a star standing for any name."""
    return re.escape(key).replace(r"\*", ".+")


@cache
def sample(name: str, folder: Path) -> frozenset[str]:
    """Return the paths of the sample answers of a command."""
    found: set[str] = set()
    for command in ANSWERS[name]["asked"]:
        words = [str(folder / word) if word in (*FILES, "answers") else word for word in shlex.split(command)]
        tree = asked(words)
        assert next(iter(tree)) == "schema"
        assert tree.pop("schema") == SCHEMA
        found.update(paths(tree))
    return frozenset(found)


def asked(words: list[str]) -> dict[str, Any]:
    """Return the object that a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run([*words, "--json"])
    tree: dict[str, Any] = json.loads(out.getvalue())
    return tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the sample commands read."""
    made = tmp_path_factory.mktemp("json")
    for name, text in FILES.items():
        (made / name).write_text(text, encoding="utf-8")
    return made


@pytest.mark.parametrize("name", ASKED)
def test_every_key_of_the_reference_is_answered(name: str, folder: Path) -> None:
    """Each key of the tables, and each subtree called detail, is in a sample answer of its command."""
    found = sample(name, folder)
    answer = ANSWERS[name]
    keys = [key for row in rows(answer) for key in spelt(row[0])] + [
        *answer.get("same", ()),
        *answer.get("detail", ()),
    ]
    missing = [key for key in keys if not any(re.match(pattern(key) + r"(?=$|[.\[])", path) for path in found)]
    assert not missing


@pytest.mark.parametrize("name", ASKED)
def test_every_key_of_an_answer_is_in_the_reference(name: str, folder: Path) -> None:
    """Each key of a sample answer stands in a table, or below a subtree that is called detail."""
    exact = re.compile("|".join(rf"{pattern(key)}(\[\])*" for key in documented(name)))
    below = re.compile("|".join(rf"{pattern(key)}($|[.\[].*)" for key in detail(name)) or "$^")
    above = {key[: end.start()] for key in documented(name) for end in re.finditer(r"[.\[]", key)}  # where it is empty
    found = (path for path in sample(name, folder) if path not in above)
    assert not sorted(path for path in found if not (exact.fullmatch(path) or below.fullmatch(path)))


def test_all_commands_are_in_the_reference() -> None:
    """Each command of the program has sample answers; that of a measurement is made in tests/measuring."""
    assert {name.split()[0] for name in [*ASKED, "measure"]} - {"error"} == set(SUMMARIES)
