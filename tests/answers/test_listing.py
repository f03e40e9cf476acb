"""The catalogue as a list: every model has a count, and says whether anyone published it."""

from __future__ import annotations

import pytest

from shardwise.answers._listing import model_row, models_page
from shardwise.models import load_model, model_names
from shardwise.ops import count_parameters


@pytest.mark.parametrize(("name", "published"), [("llama-3.1-8b", True), ("apertus-70b", False)])
def test_a_model_without_a_published_count_is_counted(name: str, published: bool) -> None:
    """The list holds the published count, else the one of the configuration, and tells which it is."""
    row = model_row(name)
    assert row["parameters"] == count_parameters(load_model(name))
    assert row["parameters_published"] is published
    assert ("no count is published" in models_page([name]).plain()) is not published


def test_no_model_of_the_list_is_without_a_count() -> None:
    """A reader who compares models finds the size of every one."""
    assert all(model_row(name)["parameters"] for name in model_names())
