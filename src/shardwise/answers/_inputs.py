"""The values of one command: read, typed, and every problem collected."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from shardwise.answers import _flags
from shardwise.answers._converters import meant_by
from shardwise.answers._flags import Command
from shardwise.errors import InputError, Problem, Problems, plain
from shardwise.files import below
from shardwise.plans.fields import meant
from shardwise.records import dataclass

if TYPE_CHECKING:
    from shardwise.formats import Imported


# What the layers below call a field -> the flag that sets it, beside those of the table of fields.
FLAG_OF = {
    "fast_link_efficiency": "fast_efficiency",
    "slow_link_efficiency": "slow_efficiency",
    "matmul_flops_per_second": "matmul_flops",
    "memory_bytes_per_second": "memory_bandwidth_achieved",
    "fast_bytes_per_second": "fast_bandwidth_achieved",
    "slow_bytes_per_second": "slow_bandwidth_achieved",
    "cluster": "on",
    "cv": "arrivals",
    "max_step_seconds": "max_step",
    "max_run_seconds": "max_time",
    "min_free_bytes": "min_free",
    "max_ttft_seconds": "max_ttft",
    "max_tpot_seconds": "max_tpot",
    "max_latency_seconds": "max_latency",
    "max_usd": "max_cost",
    "min_tokens_per_second": "min_rate",
    "orders": "order",
}


# A problem of the first follows from a wrong value of the others, even where its rule does not name them.
_FOLLOWS = {
    "vpp": {"pp"},
    "schedule": {"pp", "vpp"},
    "recompute_layers": {"recompute", "modules"},
    "shard": {"sharding", "dp", "tp", "pp", "cp", "on"},
    "tp2": {"layout", "seq_len", "cp"},
    "panels": {"layout"},
    "sequence_parallel": {"tp", "layout"},
    "stage_layers": {"pp", "vpp"},
    "cp": {"seq_len"},
    "tp": {"seq_len"},
    "dp": {"tp", "tp2", "cp", "pp", "on"},
    "ep": {"tp", "tp2", "cp", "dp", "pp", "on", "etp"},
    "global_batch": {"micro_batch", "accumulation", "dp", "pp", "tp", "tp2", "cp", "vpp", "on", "schedule"},
    "accumulation": {"global_batch", "dp", "pp", "tp", "tp2", "cp", "on"},
    "checkpoint_interval": {"checkpoint"},
    "precision": {"stack"},
}


@dataclass(frozen=True, slots=True)
class CaseFile:
    """Where a case was read, and whether it may name files anywhere."""

    path: str
    follow: bool = False


@dataclass(slots=True)
class Inputs:
    """The values of one command, typed, by key; `bad` are the keys that could not be read."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    bad: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    imported: Imported | None = None
    command: str = ""
    raw: Mapping[str, object] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or the default where it was not given."""
        return self.values.get(key, default)

    def fail(self, key: str, value: object, rule: str, remedy: str) -> None:
        """Record a problem of a key."""
        self.problems.add(key, plain(value), rule, remedy)
        self.bad.add(key)

    def merge(self, error: InputError, dtype: str = "precision") -> None:
        """Record the problems of an error under the names of flags, leaving out what follows from other problems.

        A data type is set by the flag `dtype`: the precision of training, the weights of serving.
        """
        from shardwise.plans.fields import SETTINGS, TRAINING, renamed

        flags = {**FLAG_OF, **{name: key for key, name in renamed((*TRAINING, *SETTINGS)).items()}}
        for p in error.problems:
            key = dtype if p.field == "dtype" else flags.get(p.field, p.field)
            causes = self.bad - {key}
            named = {word for word in causes if re.search(rf"\b{re.escape(word)}\b", p.rule)}
            follows = causes & _FOLLOWS.get(key, set())
            if follows == {"seq_len"} and "tokens" not in p.rule:
                # Of the laws of an axis only those that divide the sequence follow from its length.
                follows = set()
            # A value that could not be read is not asked for a second time.
            reported = key in self.bad and any(known.field == key for known in self.problems.items)
            if not named and not follows and not reported and p not in self.problems.items:
                self.problems.items.append(Problem(key, plain(p.value), p.rule, p.remedy))


# A number without its unit.
_BARE = re.compile(r"[+]?[0-9._]+(e[+-]?[0-9_]+)?", re.IGNORECASE)


def read_values(raw: Mapping[str, object], command: Command, inputs: Inputs) -> None:
    """Convert raw values into typed ones, recording what is wrong with them and what is missing."""
    inputs.bad |= {p.field for p in inputs.problems.items}
    for key, value in raw.items():
        try:
            inputs.values[key] = command.flags[key].kind.read(value, key)
            text = value.strip() if isinstance(value, str) and command.flags[key].kind.word == "TIME" else ""
            if _BARE.fullmatch(text) and inputs.values[key]:
                inputs.notes.append(f"{key} {text} s: seconds, as no unit is given")
        except InputError as error:
            inputs.problems.items += _of_several(key, value, command) or error.problems
            inputs.bad.add(key)
    for key in command.required:
        from_sizes = key in ("model", "first") and not raw.keys().isdisjoint({*_flags.model_flags(), *_flags.FROM})
        if key not in raw and not from_sizes and not inputs.bad & {key, "config", "from"}:
            inputs.fail(key, None, "is missing", example_of(key, several="vary" in command.flags))


def _of_several(key: str, value: object, command: Command) -> tuple[Problem, ...]:
    """Return what is wrong with several values where one is taken, each of which is right; nothing else is."""
    if not isinstance(value, str) or not ("," in value or ".." in value) or "vary" not in command.flags:
        return ()
    from shardwise.answers._value_lists import listed_values

    try:
        each = listed_values(value, key)
        for one in each:
            command.flags[key].kind.read(one, key)
    except InputError:
        return ()
    try:
        # A list that is badly written is none of several values.
        command.flags[key].kind.read(",".join(each), key)
    except InputError:
        pass
    else:
        return ()
    rule, remedy = f"is several values, and {command.name} takes one", f"give one, or --vary {key}={value}"
    return (Problem(key, value, rule, remedy),)


def example_of(key: str, several: bool = False) -> str:
    """Return what to write for something that is missing, with `several` devices where a command takes them.

    >>> example_of("tp")
    'give --tp'
    """
    devices = ", or --on rtx-4090,l40s,h100 to compare several" if several else ""
    return {
        "model": "name a model, such as llama-3.1-70b (`shardwise models` lists them), or give its sizes",
        "on": f"write for example --on 64xh100{devices}; `shardwise devices` lists devices",
        "study": "name the TOML file of the study behind the command",
        "out": "name the folder of the answers: --out FOLDER",
        "what": "name what to plan behind the command: train or infer",
        "target": "name the target behind the command: megatron, deepspeed, fsdp, vllm or another of its help",
    }.get(key, f"give --{key.replace('_', '-')}")


WRITTEN = ("save", "save_best", "plot", "timeline", "rows", "html", "write", "out")
"""Keys of files that are written: whoever starts a command names them, and no file does."""
_READ = ("model", "draft_model", "on", "from", "catalogue", "trace", "classes", "against", "first", "second", "study")

_COUNTED = re.compile(r"^(?:[0-9]+x)+")


def known_keys(
    every: Mapping[str, Command], file: Mapping[str, object], command: Command, inputs: Inputs, place: CaseFile
) -> dict[str, object]:
    """Return the keys of a case file that a command takes; keys of no command are problems, of another notes.

    A file that came from someone else names no file to be written, and none to be read that lies elsewhere.
    """
    if "command" in file and file["command"] not in tuple(every):
        names = tuple(name for name in every if " " not in name)
        remedy = f"{meant_by(str(file['command']), names)}use one of {', '.join(names)}"
        inputs.fail("command", file["command"], "is not a command", remedy)
    known = {"command", *(key for c in every.values() for key in c.flags)}
    keys: dict[str, object] = {}
    for key, value in file.items():
        if key in (*WRITTEN, "follow"):
            inputs.fail(key, value, "is no key of a file", f"give --{key.replace('_', '-')} where the command starts")
        elif key in command.flags:
            keys[key] = value
        elif key not in known:
            names = meant(key, known)
            hint = f"did you mean {' or '.join(names)}? " if names else meant_by(key, tuple(sorted(known)))
            remedy = hint + "`shardwise schema` prints all keys"
            inputs.problems.add(key, plain(value), "is not a key of a case file", remedy)
        elif key != "command":
            inputs.notes.append(f"{key}: in the case file, not used by {command.name}")
    for key in keys.keys() & set(_READ):
        value = keys[key]
        texts = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
        if not all(_is_placed(key, text, place, inputs) for text in texts):
            del keys[key]
    return keys


def _is_placed(key: str, named: str, place: CaseFile, inputs: Inputs) -> bool:
    """Return whether a file that a case names is below the case, or below where it is asked; a problem where not."""
    path = os.path.expanduser(_COUNTED.sub("", named) if key == "on" else named)
    try:
        below("", path, place.follow, key)
    except InputError:
        try:
            below(place.path, path, place.follow, key)
        except InputError as error:
            inputs.merge(error)
            inputs.bad.add(key)
            return False
    return True
