"""Parameter counts of imported models against transformers' own classes, to the last parameter."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardwise.models import MoE, load_model, model_from_config, model_names
from shardwise.models._load import catalogue
from shardwise.models.families import FAMILIES
from shardwise.ops import count_parameters

DATA = Path(__file__).parents[1] / "data/models/param_counts.json"


@cache
def goldens() -> dict[str, Any]:
    """The golden file, read once."""
    golden: dict[str, Any] = json.loads(DATA.read_text())
    return golden


@pytest.mark.parametrize("name", goldens()["models"])
def test_named_models_have_their_exact_count(name: str) -> None:
    """A whole configuration of a known model gives the count that transformers builds."""
    entry = goldens()["models"][name]
    model = model_from_config(entry["config"])
    assert count_parameters(model) == entry["parameters"]


@pytest.mark.parametrize("family", goldens()["random"])
def test_random_configurations_have_their_exact_count(family: str) -> None:
    """Twenty random configurations of every family, as saved to a file, give the count that transformers builds."""
    assert not wrong_counts(family)


def wrong_counts(family: str) -> dict[str, int]:
    """The random configurations of a family whose count is off, and by how much."""
    wrong = {}
    for entry in goldens()["random"][family]:
        counted = count_parameters(model_from_config(entry["config"]))
        if counted != entry["parameters"]:
            wrong[json.dumps(entry["config"])] = counted - entry["parameters"]
    return wrong


@pytest.mark.parametrize("family", goldens()["random"])
def test_stored_buffers_are_the_correction_biases(family: str) -> None:
    """What a checkpoint stores beside parameters is one value for each expert of a router with a correction bias."""
    if family in ("apertus", "gemma4_text", "gpt_neo", "deepseek_v4"):
        pytest.skip("these classes store scalars, masks or routing tables too")
    for entry in goldens()["random"][family]:
        assert correction_biases(model_from_config(entry["config"])) == entry["stored_buffers"]


def correction_biases(model: Any) -> int:
    """How many correction values the routers of a model have."""
    mixtures = [b.feed_forward for b in model.layers if isinstance(b.feed_forward, MoE)]
    return sum(m.experts + m.zero_experts for m in mixtures if m.correction_bias)


@pytest.mark.parametrize("name", [name for name in model_names() if "parameters" in catalogue()[name]])
def test_catalogue_models_have_their_published_count(name: str) -> None:
    """A published count is met exactly; checkpoints with a correction bias count that too."""
    model = load_model(name)
    counted, published = count_parameters(model), catalogue()[name]["parameters"]
    assert published in (counted, counted + correction_biases(model))


def test_goldens_cover_every_class_that_transformers_can_build() -> None:
    """Each family has goldens, but for those that transformers has no class for or cannot build."""
    without = {
        "dbrx",
        "vit",
        "glm4v_text",
        "mllama_text_model",
        "aria_text",
        *(name for name, module in FAMILIES.items() if module in ("described", "remote")),
    }
    assert set(FAMILIES) - without == set(goldens()["random"])
