"""What is assumed for fields that a source leaves blank.

There is one published rule for each field, the same for all rows (rules.toml), and what single sources document
elsewhere than in their table of results (documented.toml).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from shardwise.validation._frameworks import matches
from shardwise.validation._toml import read


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The rule for one blank field: what is taken, in words, and why."""

    field: str
    taken: str
    says: str
    because: str


@cache
def rules() -> tuple[Rule, ...]:
    """Return the rules for blank fields, in the order of the table.

    >>> rules()[0].field
    'framework'
    """
    return tuple(Rule(**row) for row in read("rules.toml")["rule"])


@cache
def rule(field: str) -> Rule:
    """Return the rule of one field."""
    return next(one for one in rules() if one.field == field)


_ADDRESS = re.compile(r"^https://github[.]com/([^/]+/[^/]+)(?:/(?:blob|tree)/([^/]+)/?)?")


@cache
def _of_citation(citation: str) -> tuple[dict[str, Any], ...]:
    """Return the entries of a citation, github:OWNER/NAME@COMMIT:PATH or the page's address."""
    said = _ADDRESS.sub(lambda m: f"github:{m[1]}@{m[2]}:" if m[2] else f"github:{m[1]}", citation)
    return tuple(row for row in read("documented.toml")["documented"] if re.search(row["citation"], said))


def documented(citation: str, row: Mapping[str, str] | None = None) -> tuple[dict[str, str], str]:
    """Return the settings that a cited source documents beside its table of results, and where.

    What it documents of a part of its rows counts for rows whose cells match.

    >>> documented("github:MooreThreads/SimuMax@4dcaae5:docs/b200")[0]
    {'cp_kind': 'a2a'}
    >>> documented("https://github.com/MooreThreads/SimuMax/blob/4dcaae5/docs/b200")[0]
    {'cp_kind': 'a2a'}
    """
    cells = row or {}
    found = (one for one in _of_citation(citation) if matches(one.get("where", {}), cells))
    return next(((one["cells"], one["source"]) for one in found), ({}, ""))


@cache
def words(table: str) -> dict[str, str]:
    """Return a table that maps words of files to words of the package."""
    found: dict[str, str] = read("rules.toml")[table]
    return found


@cache
def network_words() -> dict[str, float]:
    """Return bytes a second of a node over networks that files name without a rate.

    >>> network_words()["omnipath"]
    19850000000.0
    """
    found: dict[str, float] = read("rules.toml")["networks"]
    return found
