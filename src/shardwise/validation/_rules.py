"""What is assumed for fields that a source leaves blank: one published rule a field, the same for all rows."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The rule for one blank field: what is taken, in words, and why."""

    field: str
    taken: str
    says: str
    because: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """What a framework does where a row is silent: its stack, sharding, and sequence parallelism with tp."""

    pattern: str
    stack: str
    sharding: str
    sequence_parallel: bool
    source: str


@cache
def _tables() -> dict[str, Any]:
    text = resources.files("shardwise.validation").joinpath("rules.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def rules() -> tuple[Rule, ...]:
    """Return the rules for blank fields, in the order of the table.

    >>> rules()[0].field
    'recompute'
    """
    return tuple(Rule(**row) for row in _tables()["rule"])


@cache
def rule(field: str) -> Rule:
    """Return the rule of one field."""
    return next(one for one in rules() if one.field == field)


@cache
def frameworks() -> tuple[Framework, ...]:
    """Return what frameworks do, the first pattern that matches first."""
    return tuple(Framework(**row) for row in _tables()["framework"])


@cache
def framework_of(name: str) -> Framework:
    """Return the entry of a framework by its name in a file.

    >>> framework_of("torchtitan 2025-06").stack
    'fsdp2'
    """
    return next(one for one in frameworks() if re.search(one.pattern, name.lower()))


@cache
def _of_citation(citation: str) -> tuple[dict[str, Any], ...]:
    return tuple(row for row in _tables()["documented"] if re.search(row["citation"], citation))


def documented(citation: str, row: Mapping[str, str] | None = None) -> tuple[dict[str, str], str]:
    """Return the settings that a cited source documents beside its table of results, and where.

    What it documents of a part of its rows counts for rows whose cells match.

    >>> documented("github:MooreThreads/SimuMax@4dcaae5:docs/b200")[0]
    {'cp_kind': 'a2a'}
    """
    cells = row or {}
    found = (
        one
        for one in _of_citation(citation)
        if all(re.fullmatch(pattern, cells.get(name) or "") for name, pattern in one.get("where", {}).items())
    )
    return next(((one["cells"], one["source"]) for one in found), ({}, ""))


@cache
def words(table: str) -> dict[str, str]:
    """Return a table that maps words of files to words of the package."""
    found: dict[str, str] = _tables()[table]
    return found
