"""Every field of a plan, a job and a framework's settings has its row, and flags and checks are read from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest

from shardwise.answers._converters import converter_of
from shardwise.answers._flags import infer_flags, job_flags, plan_flags, settings_flags
from shardwise.answers._search_flags import plan_search_flags
from shardwise.errors import InputError
from shardwise.plans import Plan, Serving, Settings, Training
from shardwise.plans.fields import PLAN, SERVING, SETTINGS, TRAINING, Field, keys
from shardwise.plans.laws import field_problems

# What importers find in launch scripts and what no flag sets.
IMPORTED = {
    "attention_mask",
    "blas_workspace_bytes",
    "optimizer_instances",
    "separate_weight_gradients",
}
RECORDS: tuple[tuple[type, tuple[Field, ...], set[str]], ...] = (
    (Plan, PLAN, set()),
    (Training, TRAINING, set()),
    (Serving, SERVING, set()),
    (Settings, SETTINGS, IMPORTED),
)


@pytest.mark.parametrize(("record", "table", "unsaid"), RECORDS)
def test_every_field_of_a_record_has_its_row(record: Any, table: Iterable[Field], unsaid: set[str]) -> None:
    """Keys are unique, set fields that the record has, and leave none out."""
    names = {f.name for f in fields(record)}
    said = {name for row in table for name in row.names}
    assert said == names - unsaid
    assert len({row.key for row in table}) == len(list(table))
    assert all(row.help and not row.help.endswith(".") for row in table)


def test_flags_are_the_rows_of_the_table() -> None:
    """Each row is a flag with its help, in its order; a search takes those that it varies as values to try."""
    for flags, table in ((plan_flags(), PLAN), (job_flags(), TRAINING), (settings_flags(), SETTINGS)):
        assert [(flag.key, flag.help) for flag in flags.values()] == [(row.key, row.help) for row in table]
    assert {row.key for row in SERVING} <= set(infer_flags())
    search = plan_search_flags()
    assert all(search[key].group == "space" for key in keys(PLAN, searched="values"))
    assert not set(keys((*PLAN, *TRAINING), searched="no")) & set(search)


@pytest.mark.parametrize("row", [row for row in PLAN if row.names], ids=lambda row: row.key)
def test_flags_and_checks_agree(row: Field) -> None:
    """A value that a flag refuses is refused by the checks of a plan, and a choice that it takes is taken."""
    kind = converter_of(row)
    if row.type == "whole":
        assert kind.read(str(row.least), row.key) == row.least
        assert field_problems(replace(Plan(), **{row.key: row.least - 1})).items
        with pytest.raises(InputError):
            kind.read(row.least - 1, row.key)
    for word in row.choices:
        assert kind.read(word, row.key) == word
        assert not field_problems(replace(Plan(), **{row.key: word})).items
    if row.choices:
        assert field_problems(replace(Plan(), **{row.key: "another"})).items
