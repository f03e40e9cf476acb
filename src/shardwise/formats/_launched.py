"""Launch lines of serving engines, read: a word sets something, is silent, is not followed for a reason, or not known.

An engine's module has `STARTS`, what its command line begins with, and `read_words(words, source, beside)`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

from shardwise import files
from shardwise.errors import InputError, Problem, Problems, near
from shardwise.formats import _yaml
from shardwise.formats._around import with_surroundings
from shardwise.formats._imported import SIZES, ReadArgument, matches, table
from shardwise.formats._launch import commands_in, unread, words_behind
from shardwise.formats._systems import SERVERS
from shardwise.models import find_model, load_model, namesake, published_copy, quantised_copy
from shardwise.records import dataclass, replace
from shardwise.serving import find_engine, launched_engine
from shardwise.shell import left_open

ENGINES = tuple(name for name in SERVERS if name != "dynamo")
"""The engines whose launch lines are read."""
WIDE = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
"""16-bit types and fp32, by the words that engines have for them."""
_CACHED = re.compile(r".*models--([\w.-]+?)--([\w.-]+)(/.*)?")  # a folder of the hub's cache
_COUNTED_FROM_0 = ("gpu_layers", "captured_sequences")  # fields of which 0 says something
_THOUSANDS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """A server read from its launch: fields of the plan and of the job by their keys, and what became of every word.

    `role` is "prefill" or "decode" of a server that runs one of both. `num_devices` is 0 where the launch is silent.
    `version` is the release whose flags are read, `release` the one that the launch states, empty for none.
    """

    system: str
    version: str
    source: str
    values: Mapping[str, Any]
    num_devices: int = 0
    role: str = ""
    release: str = ""
    understood: tuple[ReadArgument, ...] = ()
    assumed: tuple[str, ...] = ()
    ignored: tuple[ReadArgument, ...] = ()
    silent: tuple[str, ...] = ()
    unknown: tuple[ReadArgument, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchFiles:
    """What stands beside a launch line: the folder of its file, texts that the script writes, and files by name."""

    folder: str = "."
    documents: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)


HERE = LaunchFiles()


def flags_of_file(words: Sequence[str], around: LaunchFiles) -> list[str]:
    """Return the flags of the YAML that `--config` names, over which the line's own win.

    Its model stands there too: a line that names one as well names it behind. Sources: vllm/utils/argparse_utils.py
    load_config_file, sglang/srt/server_args_config_parser.py.
    """
    pairs = [word.partition("=")[::2] if "=" in word else (word, after) for word, after in pairwise([*words, ""])]
    named = next((value for word, value in pairs if word == "--config"), "")
    if not named:
        return []
    path = os.path.join(around.folder, os.path.basename(named))
    text = around.named.get(os.path.basename(named)) or files.read_text(path, files.YAML_BYTES, "from")
    flags: list[str] = []
    for key, value in _yaml.parse(text, named).items():
        flag = "--" + str(key).lstrip("-")
        if value is not False and value is not None:
            flags += [flag] if value is True else [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]
    return flags


class LaunchLine:
    """The flags of one launch line by their long names, read as a table says, with a record of what was read.

    >>> line = LaunchLine(["-tp", "4", "--port=8000", "--max-model-len", "8k", "--frob"], "vllm.toml", "run.sh")
    >>> line.whole("--tensor-parallel-size"), line.whole("--max-model-len"), line.silent, line.unknown[0].argument
    (4, 8000, ('--port',), '--frob')
    """

    def __init__(self, words: Sequence[str], name: str, source: str) -> None:
        self.table, self.source, self.problems = table(name), source, Problems()
        self.values: dict[str, Any] = {}
        self.positional: list[str] = []
        self.stored = ""
        self.followed: dict[str, str] = {}
        self.assumed: list[str] = []
        rest = [word for word in words if word not in ("$@", "\n", "")]
        while rest:
            word = rest.pop(0)
            if not re.match(r"--?[A-Za-z]", word):
                self.positional.append(word)
                continue
            key, equals, value = word.partition("=")
            base, *path = key.split(".")
            if path and (equals or rest) and key not in self.table["switches"]["keys"]:
                self._nest(self._long(base), path, value if equals else rest.pop(0))
            else:
                self._take(self._long(key), value if equals else None, rest)

    def _long(self, key: str) -> str:
        key = self.table["also"].get(key, key)
        key = "--" + key[2:].replace("_", "-") if key.startswith("--") else key
        if self.table["checked"].get("abbreviates") and key.startswith("--"):
            parts = (self.table["silent"], *self.table["reasons"].values(), self.table["switches"])
            listed = {*self.table["also"], *self.table["read"], *(one for part in parts for one in part["keys"])}
            key = begun[0] if len(begun := [one for one in listed if one.startswith(key)]) == 1 else key
        return str(self.table["also"].get(key, key))

    def _nest(self, key: str, path: list[str], value: str) -> None:
        """Put a value into the object of a flag (vllm/utils/argparse_utils.py FlexibleArgumentParser.parse_args)."""
        tree = at = self.tree(key)
        for name in path[:-1]:
            at = at.setdefault(name, {}) if isinstance(at.get(name, {}), dict) else {}
        try:
            at[path[-1]] = json.loads(value)
        except ValueError:
            at[path[-1]] = value
        self.values[key] = json.dumps(tree)

    def _take(self, key: str, value: str | None, rest: list[str]) -> None:
        switches, several = self.table["switches"]["keys"], self.table.get("several", {}).get("keys", ())
        if key.startswith("--no-") and key not in switches and "--" + key[5:] in switches:
            key, value = "--" + key[5:], "false"
        switch = key in switches
        if value is None and not switch and rest and not re.match(r"--?[A-Za-z]", rest[0]):
            value = rest.pop(0)
            while key in several and rest and not rest[0].startswith("-"):
                value += " " + rest.pop(0)
        if value is None and self._read(key) and not switch:
            self.problems.add(key, None, "has no value", f"write {key} VALUE")
            return
        self.values[key] = True if value is None else value

    def add(self, tree: Mapping[str, Any]) -> None:
        """Add settings of a file, which win over flags."""
        self.values |= tree

    def _read(self, key: str) -> bool:
        return key in self.table["read"] or key in self.followed

    def follow(self, keys: Iterable[str], meaning: str) -> None:
        """Note that flags which are left out of account elsewhere set something in this line."""
        self.followed |= {key: meaning for key in keys if key in self.values}

    def word(self, key: str) -> str:
        """Return a word, empty where there is none or the engine finds it itself; an open one is a problem."""
        value = str(self.values.get(key, ""))
        if why := left_open(value):
            self.problems.add(key, value, *why)
            value = ""
        return "" if value in ("auto", "None", "none", "null") else value

    def flag(self, key: str) -> bool:
        """Return whether a switch is on."""
        return str(self.values.get(key, False)).lower() in ("true", "1", "yes")

    def auto(self, key: str) -> int:
        """Return a whole number, 0 where there is none or -1 leaves it to the engine."""
        return 0 if str(self.values.get(key)) == "-1" else self.whole(key)

    def whole(self, key: str, least: int = 1) -> int:
        """Return a whole number, 0 where there is none; 8k, 25.6k and 1M are read as vLLM does."""
        text = self.word(key)
        match = re.fullmatch(r"(\d{1,12})([kKmMgG]?)|(\d{1,9}\.\d{1,9})([kmg])", text)
        number = -1
        if match and match[1]:
            number = int(match[1]) * _THOUSANDS.get(match[2], 1)
        elif match:
            number = int(float(match[3]) * _THOUSANDS[match[4]])
        if text and number < least:
            self.problems.add(key, text, f"must be a whole number of at least {least}", "write a whole number")
        return max(number, 0)

    def share(self, key: str) -> float:
        """Return a share of the memory, 0 where there is none."""
        text = self.word(key)
        try:
            share = float(text or 0)
        except ValueError:
            share = -1.0
        if text and not 0 < share <= 1:
            self.problems.add(key, text, "must be more than 0 and at most 1", "write for example 0.9")
        return share

    def named(self, key: str, known: Mapping[str, str]) -> str:
        """Return what a word is called here, empty where there is none."""
        text = self.word(key)
        if text and text not in known:
            self.problems.add(key, text, "is not modelled", "use one of " + ", ".join(known))
        return known.get(text, "")

    def tree(self, key: str) -> dict[str, Any]:
        """Return what a flag says in JSON, empty where there is none."""
        text = self.word(key)
        try:
            parsed = json.loads(text or "{}")
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            self.problems.add(key, text, "must be an object in JSON", 'write for example {"method": "mtp"}')
            return {}
        return parsed

    def model(self, key: str) -> str:
        """Return the name of a model: a copy's or a folder's that is not here is the one it is named after."""
        named = str(self.values.get(key) or (self.positional[0] if self.positional else ""))
        if why := left_open(named):
            self.assumed.append(f"no model: {named} {why[0]}; {why[1]}, or name a model")
            return ""
        if find_model(named) or published_copy(named) or os.path.exists(os.path.expanduser(named)):
            return named
        for word in (_CACHED.sub(r"\1/\2", named), str(self.values.get("--served-model-name", ""))):
            if published_copy(word):
                self.assumed.append(f"model {word}: {named} is a folder of it")
                return word
            known, stored = (quantised_copy(word) or (namesake(word), "")) if word else (None, "")
            if known is not None:
                self.stored, storage = stored, f", stored in {stored}" if stored else ""
                self.assumed.append(f"model {known}: {word} is named after it{storage}")
                return known
        return named

    def experts(self, model: str) -> bool:
        """Return whether a model has experts; one that is not known has none."""
        try:
            return load_model(model).has_experts
        except InputError:
            self.assumed.append(f"{model}: not known here, name the model")
            return False

    def caching(self, engine: str, model: str) -> str:
        """Return an engine as it is with its prefix cache on: another where that takes more of the cache of a model."""
        try:
            cached = launched_engine(engine, "prefix_cache")
            return cached if model and find_engine(cached).memory.divides_cache(load_model(model)) else engine
        except InputError:
            return engine

    def eager(self, engine: str, model: str) -> str:
        """Return an engine that captures no graphs."""
        return self._uncached(engine, "eager", model)

    def with_option(self, engine: str, what: str, model: str, keys: Iterable[str]) -> str:
        """Return an engine as a launch has it that says so by `keys`, as of steps scheduled when the last has ended."""
        self.follow(keys, "engine")
        return self._uncached(engine, what, model)

    def _uncached(self, engine: str, what: str, model: str) -> str:
        """Return an engine as a launch has it whose entry has no prefix cache: said where that matters."""
        other = launched_engine(engine, what)
        if self.caching(engine, model) != engine:
            self.assumed.append(f"no prefix cache beside {other}: with it fewer requests fit in the cache")
        return other

    def wide(self, model: str) -> str:
        """Return the type of weights that a line says with that of activations, empty where they are stored narrower.

        What a checkpoint stores in fewer bits stays so (vllm/config/model.py, dtype: of weights and activations).
        """
        wide = self.named("--dtype", WIDE)
        try:
            stored = self.stored or (model and load_model(model).quantization)
        except InputError:
            stored = ""
        if wide and stored:
            self.assumed.append(f"--dtype {self.word('--dtype')} is of activations: weights stay as they are stored")
        return "" if stored else wide

    @property
    def silent(self) -> tuple[str, ...]:
        """Flags that change neither bytes nor seconds."""
        return tuple(key for key in self.values if not self._read(key) and matches(key, self.table["silent"]["keys"]))

    @property
    def ignored(self) -> tuple[ReadArgument, ...]:
        """Flags that are left out of account, with the reason."""
        return tuple(
            ReadArgument(argument=key, value=value, meaning=reason["because"])
            for key, value in self.values.items()
            for reason in self.table["reasons"].values()
            if not self._read(key) and matches(key, reason["keys"])
        )

    @property
    def unknown(self) -> tuple[ReadArgument, ...]:
        """Flags that the release does not have."""
        known = {*self.silent, *(reading.argument for reading in self.ignored)}
        reason = f"not a flag of {self.table['checked']['system']} {self.table['checked']['version']}"
        return tuple(
            ReadArgument(argument=key, value=value, meaning=reason)
            for key, value in self.values.items()
            if not self._read(key) and key not in known
        )

    def launched(self, values: Mapping[str, Any], num_devices: int, role: str = "") -> Launched:
        """Return the server of this line; raises `InputError` with everything wrong. Empty values are not said."""
        for one in self.unknown:
            close = near(one.argument, self.table["read"], 1, 0.9)
            remedy = f"did you mean {close[0]}?" if close else "leave it out, and say what it means in flags"
            if close or SIZES.search(one.argument):
                self.problems.add(one.argument, one.value, f"is {one.meaning}, and may change the answer", remedy)
        self.problems.raise_if_any()
        checked, read = self.table["checked"], self.table["read"] | self.followed
        values = {**values, "weights": values.get("weights") or self.stored}
        args = (ReadArgument(argument=k, value=value, meaning=read[k]) for k, value in self.values.items() if k in read)
        return Launched(
            system=checked["system"], version=checked["version"], source=self.source, role=role,
            values={key: value for key, value in values.items() if value or key in _COUNTED_FROM_0},
            num_devices=num_devices, understood=tuple(args),
            assumed=tuple(self.assumed), ignored=self.ignored, silent=self.silent, unknown=self.unknown,
        )  # fmt: skip


def engine_in(text: str) -> str:
    """Return the engine whose launch a text holds, empty for none.

    >>> engine_in("python3 -m sglang.launch_server --model-path a"), engine_in("torchrun a.py")
    ('sglang', '')
    """
    return next(iter(_engines_in(text)), "")


def _engines_in(text: str) -> list[str]:
    """Return the engines that a text starts or names the image of, in the order of their table."""
    code = re.sub(r"(?m)(^|\s)#.*$", "", text)
    return [name for name in ENGINES if re.search(_engine(name).STARTS, code)]


def _engine(name: str) -> Any:
    return import_module(f"shardwise.formats.{name}")


def read_launch(text: str, source: str, variables: Mapping[str, str], files: LaunchFiles = HERE) -> Launched:
    """Return the server that a script or a command line starts; raises `InputError` where it starts none.

    >>> one = read_launch("vllm serve meta-llama/Llama-3.1-8B -tp 2 --gpu-memory-utilization 0.9", "run.sh", {})
    >>> one.num_devices, one.values["model"], one.values["memory_fraction"]
    (2, 'meta-llama/Llama-3.1-8B', 0.9)
    """
    return first_of(launches_of(text, source, variables, files))


def first_of(servers: Sequence[Callable[[], Launched]]) -> Launched:
    """Return the first of the servers that a script starts, which is said where there are more."""
    one = servers[0]()
    if len(servers) == 1:
        return one
    return replace(one, assumed=(*one.assumed, f"the first of {len(servers)} servers that the script starts"))


def launches_of(
    text: str, source: str, variables: Mapping[str, str], files: LaunchFiles = HERE
) -> list[Callable[[], Launched]]:
    """Return what reads each server that a script starts; raises `InputError` where it starts none."""
    names = _engines_in(text)
    if not names:
        other = unread(text)
        rule = f"is of {other}, which is not read" if other else "starts no server that is known"
        remedy = "give a line of vllm serve, sglang.launch_server, trtllm-serve or llama-server"
        raise InputError([Problem("from", source, rule, remedy)])
    commands, documents = commands_in(text, source, variables)
    # A script may name the image of another engine than it starts.
    engines = map(_engine, names)
    engine, launches = next(
        ((one, made) for one in engines if (made := words_behind(one.STARTS, commands))), (None, [])
    )
    if engine is None:
        raise InputError([Problem("from", source, f"names {names[0]} and starts none", "give its launch line")])

    def read(words: list[str]) -> Launched:
        return with_surroundings(engine.read_words(words, source, replace(files, documents=documents)), text, variables)

    return [partial(read, words) for words in launches]
