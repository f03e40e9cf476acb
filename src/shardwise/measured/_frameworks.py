"""Which stack runs a row of training and which engine one of serving, by their words (frameworks.toml, engines.toml).

Functions take the table that they read, so that a table with more entries is read alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal, TypeAlias

from shardwise.errors import InputError
from shardwise.hardware import Device
from shardwise.measured._record import Record, read, refuse
from shardwise.plans import Stack, find_stack
from shardwise.records import dataclass, replace
from shardwise.serving import STATED, find_engine, release_table, released

Table: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """What a framework does where a row is silent: its stack, sharding, and sequence parallelism with tp.

    An entry for a part of the runs of a framework asks for matching record with `where`. `mixture_sharding` is
    what FSDP is for models with experts, where it differs. `pipeline_batch` is what a stated micro-batch of a pipeline
    is, `recompute_policy` that nobody prints how much selective recompute runs again, `whole_batch` that a step has one
    micro-batch unless told, `experts_over_tp` that tensor parallelism splits experts too unless told, `balances_head`
    that stages are balanced by the products of layers and head.
    """

    pattern: str
    stack: str
    sharding: str
    sequence_parallel: bool
    source: str
    where: Mapping[str, str] = field(default_factory=dict)
    mixture_sharding: str = ""
    pipeline_batch: Literal["stated", "replica", "sequence"] = "stated"
    recompute_policy: bool = False
    whole_batch: bool = False
    experts_over_tp: bool = False
    balances_head: bool = False

    @property
    def known(self) -> bool:
        """Whether this is the entry of a framework, not the one for all others."""
        return bool(self.pattern or self.stack)


def frameworks(table: Table) -> tuple[Framework, ...]:
    """Return what frameworks do, the first pattern that matches first."""
    return tuple(Framework(**row) for row in table["framework"])


def framework_of(table: Table, name: str, row: Mapping[str, str]) -> Framework:
    """Return the entry of a framework by its name in a file, the one for all others where it is not known.

    A name that no entry knows may be a stack's own, or another word for it.

    >>> from shardwise.measured import read
    >>> known = read("frameworks.toml")
    >>> framework_of(known, "torchtitan 2025-06", {}).stack, framework_of(known, "my own trainer", {}).known
    ('fsdp2', False)
    >>> framework_of(known, "MCore", {}).stack, framework_of(known, "hf-accelerate", {}).stack
    ('megatron', 'accelerate')
    """
    word = name.lower()
    matching = (
        one for one in table["framework"] if re.search(one["pattern"], word) and matches(one.get("where", {}), row)
    )
    entry = Framework(**next(matching))
    stack = "" if entry.known else _stack_named(word.strip())
    if not stack:
        return entry
    plain = (one for one in table["framework"] if one["stack"] == stack and "where" not in one)
    return next((Framework(**one) for one in plain), replace(entry, stack=stack))


def _stack_named(word: str) -> str:
    """Return the stack that a word names, the empty word where none has it."""
    try:
        return find_stack(word).name if word else ""
    except InputError:
        return ""


def matches(where: Mapping[str, str], record: Mapping[str, str]) -> bool:
    """Return whether every named cell of a row matches its whole pattern.

    >>> matches({"device": "h[12]00.*"}, {"device": "h100-sxm-80gb"}), matches({"device": "h100"}, {})
    (True, False)
    """
    return all(re.fullmatch(pattern, (record.get(name) or "").strip()) for name, pattern in where.items())


def variant_of(table: Table, stack: str, row: Mapping[str, str], experts: str) -> str:
    """Return the name of the stack that runs a row of a framework; `experts` are "none", "gated" or "ungated".

    >>> from shardwise.measured import read
    >>> known = read("frameworks.toml")
    >>> variant_of(known, "megatron", {"attention_kernel": "unfused"}, "none"), variant_of(known, "fsdp2", {}, "none")
    ('megatron-scores', 'fsdp2')
    """
    conditions = {**row, "experts": experts}
    for one in table["variant"]:
        if re.fullmatch(one["of"], stack) and matches(one["where"], conditions):
            stack = one["stack"]
    return stack


def adjusted(table: Table, stack: Stack, row: Mapping[str, str]) -> Stack:
    """Return a stack with what the cells of a row, its notes too, say of how it was set.

    >>> from shardwise.plans import find_stack
    >>> from shardwise.measured import read
    >>> row = {"recompute": "selective", "recompute_detail": "by operator"}
    >>> adjusted(read("frameworks.toml"), find_stack("fsdp2"), row).settings.checkpoint_policy
    'second-matmuls'
    """
    for one in table["adjustment"]:
        conditions = {**row, "stack.loss": stack.loss, "stack.attention_kernel": stack.attention_kernel}
        if re.fullmatch(one["of"], stack.name) and matches(one["where"], conditions):
            stack = replace(stack, **one.get("sets", {}), settings=replace(stack.settings, **one.get("settings", {})))
    return stack


def has_default(table: Table, stack: str, habit: str) -> bool:
    """Return whether a stack does something by default where rows are silent.

    >>> from shardwise.measured import read
    >>> known = read("frameworks.toml")
    >>> has_default(known, "megatron-2021", "dropout"), has_default(known, "megatron", "dropout")
    (True, False)
    """
    return bool(re.fullmatch(table["habit"][habit]["stacks"], stack))


def offload_bytes_per_second(table: Table) -> float:
    """Return the rate to the host's memory above which recipes send activations there rather than recompute."""
    return float(table["recompute_recipe"]["offload_bytes_per_second"])


FIXED = ("static", "single_stream")
"""Modes of files in which a batch starts and ends together."""


def engine_table() -> Table:
    """Return what is known of engines in files of measurements: their words, and which entry runs which release."""
    return {**read("engines.toml"), **release_table()}


def engine_of(table: Table, record: Record, device: Device) -> str:
    """Return the name of the engine that ran a row; what stands in for another, or for no release, is said."""
    word, version = record.text("engine").lower(), record.text("engine_version")
    if not word:
        if not record.says("weight_dtype"):
            raise refuse("engine", None, "is not stated, and neither is the precision")
        return record.rule_value("engine")
    engine: str | None = table["words"].get(word)
    if engine is None:
        raise refuse("engine", word, f"is not an engine that is modelled: {', '.join(table['words'])}")
    if engine != word and word not in table["spellings"]["words"]:
        record.assume(f"engine {word}: overheads of {engine}")
    for row in table["foreign"]:
        if re.fullmatch(row["engine"], engine) and re.fullmatch(row["device"], device.name):
            raise refuse("engine", word, f"is another one on {device.name}: {row['says']}")
    mode = "" if version else record.text("serving_mode")
    conditions = {"device": device.name, "vendor": device.vendor}
    conditions |= {name: record.notes.get(name, "") for name in STATED}
    for row in released(table, engine, conditions, version, mode):
        if "says" in row:
            stated = version or "of a version that is not stated"
            record.assume(f"{find_engine(engine).title} {stated}: {row['says']}")
        return str(row["runs"])
    return engine


def narrows_cache(engine: str, weights: str) -> bool:
    """Return whether an engine keeps its cache in 8 bits for weights of a format unless it is told otherwise.

    >>> [narrows_cache(engine, "fp8") for engine in ("tensorrt-llm", "vllm")]
    [True, False]
    """
    row = read("engines.toml")["narrow_cache"]
    return bool(re.fullmatch(row["engines"], engine) and re.fullmatch(row["weights"], weights))


def served_step_tokens() -> int:
    """Return the tokens of a step in which a server runs prompts and tokens of other requests together."""
    return int(read("engines.toml")["serving"]["step_tokens"])
