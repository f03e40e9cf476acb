"""The catalogue as a list: every model has a count, and says whether anyone published it."""

from __future__ import annotations

import re

import pytest

from command_line import run
from shardwise.answers._listing import model_record, model_row, models_page, search_models
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


@pytest.mark.parametrize(
    ("copy", "name", "says"),
    [
        ("Qwen/Qwen3-32B-FP8", "qwen3-32b", "whose weights are stored as fp8"),
        ("nvidia/Kimi-K2.5-NVFP4", "kimi-k2.5", "whose weights are stored as modelopt-nvfp4"),
        ("bartowski/Llama-3.2-3B-Instruct-GGUF", "llama-3.2-3b", "with weights in q4_k_m, as its name says"),
        ("NousResearch/Meta-Llama-3.1-8B", "llama-3.1-8b", "after which it is named"),
    ],
)
def test_a_copy_is_shown_as_the_model_that_it_is(copy: str, name: str, says: str) -> None:
    """What `infer` takes a hub's name for is what the list shows, and it says why."""
    assert search_models(copy) == [name]
    assert says in model_record(name, copy)["assumptions"][0]
    assert copy in models_page([name], search=copy).plain()


def test_a_model_by_its_own_name_is_no_copy() -> None:
    """Names of the catalogue, hub ids and words that one model holds are not said to be copies."""
    for word in ("qwen3-32b", "Qwen/Qwen3-32B", "kimi-linear"):
        (name,) = search_models(word)
        assert not any("taken for" in note or "stored as" in note for note in model_record(name, word)["assumptions"])
    assert search_models("me/mine") == []


@pytest.mark.parametrize("width", [60, 80, 160])
def test_a_model_is_one_line_of_the_list(width: int) -> None:
    """Ids stay whole, so that a line can be searched for and copied from; families need room."""
    lines = models_page(model_names(), width).plain().splitlines()
    assert any(line.startswith("deepseek-r1 ") and " deepseek-ai/DeepSeek-R1" in line for line in lines)
    assert len([line for line in lines if line and not line.startswith(" ")]) >= len(model_names()) + 1
    assert ("family" in lines[0]) is (width == 160)


def test_names_of_instances_are_whole_where_devices_are_shown() -> None:
    """What --on takes is copied from there, and a year is no number with a comma."""
    page = run("devices", "h100-sxm-80gb").out
    assert re.search(r"^nebius +8 .* gpu-h100-sxm_8gpu-128vcpu-1600gb$", page, re.MULTILINE)
    assert re.search(r"^ +year +2022 ", page, re.MULTILINE)
    assert "http" not in page and "cloud.google" not in page.partition("rented as")[2]
