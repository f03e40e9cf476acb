"""What every setting sets, and that alone: each key that a system's table says is read, against the whole case."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import asdict, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml

from shardwise.answers._import import import_tree
from shardwise.errors import InputError
from shardwise.formats import ImportContext, Imported
from shardwise.formats._imported import table
from shardwise.formats._launched import Launched, LaunchFiles
from shardwise.formats.megatron._values import arguments
from shardwise.models import catalogue
from shardwise.plans import Plan, Training

KEYS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("keys.toml").read_text(encoding="utf-8"))
UNSAID = {**asdict(Plan()), **asdict(Training(seq_len=0, global_batch=0))}
GONE = "gone"


def merged(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a tree with one value in place of another."""
    key, _, rest = path.partition(".")
    inner = tree.get(key)
    return {**tree, key: merged(inner if isinstance(inner, dict) else {}, rest, value) if rest else value}


def read_with(system: str, said: dict[str, Any], row: str) -> Imported | Launched:
    """Return what a system's file means with more settings, or a command line with more words."""
    module = import_module(f"shardwise.formats.{system}")
    if said["file"] == "serve.sh":
        words = shlex.split(f"{said['base']} {row}")
        beside = LaunchFiles(documents=(f"{{{words[-1]}}}",)) if "--config" in words else LaunchFiles()
        start = {"sglang": 3, "vllm": 2}.get(system, 1)
        return module.read_words(words[start:], "serve.sh", beside)  # type: ignore[no-any-return]
    if said["file"] == "train.sh":
        words = row.split()
        program = said.get("program", "pretrain_gpt.py")
        if words and not words[0].startswith("--"):  # another program of the system
            program = words.pop(0)
        again = {word for word in words if word.startswith("--")}
        base = [pair for pair in re.findall(r"--\S+ \S+", said["base"]) if pair.split()[0] not in again]
        text = " ".join([*base, *map(shlex.quote, words)])
        return module.read(f"{program} {text}", "train.sh", ImportContext(num_devices=said["devices"]))  # type: ignore[no-any-return]
    tree = yaml.safe_load(said["base"])
    for path, value in yaml.safe_load(f"{{{row}}}").items():
        tree = merged(tree, path, value)
    dump = {".toml": tomli_w.dumps, ".json": json.dumps}.get(Path(said["file"]).suffix, yaml.safe_dump)
    return module.read(dump(tree), said["file"], ImportContext(num_devices=said["devices"]))  # type: ignore[no-any-return]


def meaning(system: str, said: dict[str, Any], row: str) -> dict[str, Any]:
    """Return every field that is set beyond a plan and a job that nothing was said of, and what is assumed."""
    try:
        case = read_with(system, said, row)
    except InputError as error:
        return {"refused": sorted({problem.field for problem in error.problems})}
    if isinstance(case, Launched):
        found = {**case.values, "num_devices": case.num_devices, "role": case.role}
    else:
        whole, told = import_tree(case), asdict(case.plan) | asdict(case.job)
        found = {name: value for name, value in told.items() if value != UNSAID[name]}
        found |= {name: whole[name] for name in ("num_devices", "devices_per_node", "accumulation") if whole[name]}
        found |= {"stack": case.stack.name, **whole["stack"]["changed"], **model_of(case)}
    found |= {f"assumes {text[:40]}".strip(): True for text in case.assumed}
    return {name: listed(value) for name, value in found.items() if value != ""}


def listed(value: Any) -> Any:
    """Return a value as a file has it."""
    return [listed(one) for one in value] if isinstance(value, list | tuple) else value


def model_of(case: Imported) -> dict[str, Any]:
    """Return the name of a model that is known, and of one that its sizes describe every one of them."""
    if case.model is None or case.model.name in catalogue():
        return {"model": case.model.name if case.model else ""}
    found = flat(case.model, "model")
    layers = list(dict.fromkeys(case.model.layers))
    found["model.pattern"] = "".join(str(layers.index(one)) for one in case.model.layers)
    for number, one in enumerate(layers):
        found |= flat(one, f"layer{number}")
    return found


def flat(record: Any, path: str) -> dict[str, Any]:
    """Return the fields of a record that are not empty, and of those within it but for its layers, by path."""
    found: dict[str, Any] = {}
    for one in fields(record):
        value = getattr(record, one.name)
        inner = value if isinstance(value, tuple) else (value,)
        if inner and all(map(is_dataclass, inner)):
            for part in inner if one.name != "layers" else ():
                found |= {f"{path}.{one.name}": type(part).__name__, **flat(part, f"{path}.{one.name}")}
        elif value not in ((), None, "", False, 0):
            found[f"{path}.{one.name}"] = value
    return found


@pytest.mark.parametrize("system", KEYS)
def test_a_file_that_says_little_means_what_its_system_does_by_itself(system: str) -> None:
    """What a file leaves open has the values of the system's own defaults, and what matters of them is said."""
    assert meaning(system, KEYS[system], "") == KEYS[system]["usual"]


@pytest.mark.parametrize("system", KEYS)
def test_a_setting_sets_what_it_means_and_nothing_else(system: str) -> None:
    """Every other field keeps the value that it has without the setting; a value that the system refuses is named."""
    usual = KEYS[system]["usual"]
    for row, sets in KEYS[system]["sets"].items():
        expected = dict(sets)
        if "refused" not in expected:
            gone = expected.pop("without", [])
            expected = {name: value for name, value in usual.items() if name not in gone} | expected
        assert meaning(system, KEYS[system], row) == expected, row


# What needs a file of its own beside it.
ELSEWHERE = {
    *("--load", "--use-checkpoint-args", "--use-mp-args-from-checkpoint-args", "--vocab-file", "--tokenizer-model"),
}


@pytest.mark.parametrize("system", KEYS)
def test_every_setting_that_is_read_is_among_these(system: str) -> None:
    """A key that a table says is read has a row that shows what it sets."""
    said = KEYS[system]
    shown = {word.replace("_", "-") for word in re.findall(r"[\w.-]+", " ".join([said["base"], *said["sets"]]))}
    shown |= {word.lstrip("-") for word in shown}
    if system == "megatron":
        read = {
            one.option: [word for word, other in arguments().items() if other.name == one.name]
            for one in arguments().values()
            if one.read and one.option not in ELSEWHERE
        }
    else:
        found = table(f"{system}.toml")
        also = {
            name: [short for short, long in found.get("also", {}).items() if long == name] for name in found["read"]
        }
        read = {name: [name, name.rpartition(".")[2], *also[name]] for name in found["read"]}
    assert [name for name, words in read.items() if not {word.replace("_", "-") for word in words} & shown] == []
