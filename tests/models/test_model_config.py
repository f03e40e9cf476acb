"""What a configuration is refused for: every bad value, all of them at once, each with a remedy."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import InputError, Problem
from shardwise.models import FIELDS, catalogue, load_model, model_from_config
from shardwise.models._config import DROPOUTS, Config
from shardwise.models.families import FAMILIES, builder

DATA = Path(__file__).parents[1] / "data/models/param_counts.json"
GOOD = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 100,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


@cache
def randoms() -> dict[str, list[dict[str, Any]]]:
    """The random configurations of every family."""
    found: dict[str, list[dict[str, Any]]] = json.loads(DATA.read_text())["random"]
    return found


def problems(config: Any) -> tuple[Problem, ...]:
    """The problems of a configuration that is refused."""
    with pytest.raises(InputError) as caught:
        model_from_config(config)
    return caught.value.problems


@pytest.mark.parametrize("key", [key for key, value in GOOD.items() if type(value) is int])
@pytest.mark.parametrize("value", [-1, "64", True, 6.5, 64.0, [1, 2], {"a": 1}, 10**12, float("nan")])
def test_a_size_that_is_no_size_is_refused(key: str, value: object) -> None:
    """Negative, textual, true, fractional and absurd sizes are problems of that field."""
    found = problems({**GOOD, key: value})
    assert key in [problem.field for problem in found]


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "moe_intermediate_size"]
)
@pytest.mark.parametrize("value", [0, None])
def test_a_size_that_must_be_there_is_not_nothing(key: str, value: object) -> None:
    """Zero and null are no sizes where a size is needed."""
    assert key in [problem.field for problem in problems({**GOOD, key: value})]


@pytest.mark.parametrize("key", ["attention_bias", "tie_word_embeddings"])
@pytest.mark.parametrize("value", [1, "yes", 0.0, []])
def test_a_flag_is_true_or_false(key: str, value: object) -> None:
    """Numbers and words are no flags."""
    assert key in [problem.field for problem in problems({**GOOD, key: value})]


@pytest.mark.parametrize(
    ("change", "field", "rule"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads", "must divide the 8 query heads"),
        ({"num_key_value_heads": 16}, "num_key_value_heads", "must divide the 8 query heads"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok", "must not exceed the 8 experts"),
        ({"head_dim": None, "hidden_size": 65}, "hidden_size", "must be a multiple of the 8 heads"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types", "lists 3 layers where the model has 4"),
        ({"layer_types": "full_attention"}, "layer_types", "must be a list of words"),
        ({"mlp_only_layers": ["a"]}, "mlp_only_layers", "must be a list of layer numbers"),
        ({"hidden_act": "wavy"}, "hidden_act", "is not a known activation"),
        ({"hidden_act": 7}, "hidden_act", "must be text"),
        ({"num_local_experts": 4}, "num_experts", "disagrees with num_local_experts"),
        ({"attention_dropout": 1.5}, "attention_dropout", "must be a number from 0 to 1"),
        ({"quantization_config": "fp8"}, "quantization_config", "must be an object"),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 33}, "num_nextn_predict_layers", "at most 32"),
        ({"model_type": None}, "model_type", "is missing or not text"),
        ({"model_type": "qwen3moe"}, "model_type", "is not a supported family"),
    ],
)
def test_each_rule_is_stated(change: dict[str, Any], field: str, rule: str) -> None:
    """A broken rule is told with its field, its value and what to do."""
    found = [problem for problem in problems({**GOOD, **change}) if problem.field == field]
    assert found and rule in found[0].rule and found[0].remedy


def test_missing_sizes_are_named() -> None:
    """A file without its main sizes is refused for each of them, not filled with its class's defaults."""
    found = {problem.field for problem in problems({"model_type": "llama"})}
    assert {"hidden_size", "num_layers", "num_attention_heads", "vocab_size"} <= found


def test_all_problems_come_at_once() -> None:
    """Four bad values are four problems."""
    bad = {"hidden_size": -1, "num_hidden_layers": "4", "vocab_size": True, "num_experts": 0}
    assert set(bad) <= {problem.field for problem in problems({**GOOD, **bad})}


@pytest.mark.parametrize(
    ("name", "key"), [("qwen3.5-397b-a17b", "mamba_ssm_dtype"), ("nemotron-3-nano-30b-a3b", "mamba_ssm_cache_dtype")]
)
def test_a_type_of_states_that_no_engine_has_is_refused(name: str, key: str) -> None:
    """A word beside MambaDType of vLLM 0.33.0 is a problem, not the engine's own type; "auto" leaves that to it."""
    raw = catalogue()[name]["config"]
    assert [problem.field for problem in problems({**raw, key: "float8_e4m3fn"})] == [key]
    assert model_from_config({**raw, key: "auto"}).state_types == ((key, "auto"),)


@pytest.mark.parametrize("config", [[], "llama", None, 7, [{}]])
def test_a_configuration_is_an_object(config: Any) -> None:
    """Anything but an object is refused as a whole."""
    assert [problem.field for problem in problems(config)] == ["config"]


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**13),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-2, 9), st.text(max_size=3), st.none()), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


class Recorder(dict[str, Any]):
    """A configuration that remembers which keys were looked up."""

    def __init__(self, keys: dict[str, Any]) -> None:
        super().__init__(keys)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value and remember its key."""
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)


@cache
def examples() -> dict[str, dict[str, Any]]:
    """A configuration of every family that has one, without lists, so that rules of layers are read."""
    catalogued = {entry["config"]["model_type"]: entry["config"] for entry in catalogue().values()}
    found = {name: rows[0]["config"] for name, rows in randoms().items()}
    found |= {name: config for name, config in catalogued.items() if name in FAMILIES and name not in found}
    return {name: {k: v for k, v in keys.items() if not isinstance(v, list)} for name, keys in found.items()}


def read_by(family: str) -> list[str]:
    """The keys that a family reads in ways of its own: not the sizes and switches of every model, nor dropouts."""
    config = Recorder(examples()[family])
    builder(family)(Config(config, family))
    common = {key for field in FIELDS.values() for key in field.keys} | set(DROPOUTS) | {"hidden_act", "activation"}
    return sorted(config.seen - common)


HOSTILE = (True, -1, 1e308, float("nan"), "x", "", [1], [[1]], {"x": 1}, [[["global"], 10**9]])


@pytest.mark.parametrize("family", sorted(examples()))
def test_no_value_of_a_key_breaks_a_family(family: str) -> None:
    """Each key that a family reads its own way, with each of ten hostile values, gives a model or an input error."""
    for key in read_by(family):
        for value in HOSTILE:
            try:
                model_from_config({**examples()[family], key: value})
            except InputError as error:
                assert all(problem.field and problem.rule and problem.remedy for problem in error.problems)


@pytest.mark.parametrize(
    ("model_type", "change", "field"),
    [
        ("gpt_neo", {"attention_types": [1]}, "attention_types"),
        ("gpt_neo", {"attention_types": [[["global"], 10**9]]}, "attention_types"),
        ("gpt_neo", {"attention_types": [[["wavy"], 2]]}, "attention_types"),
        ("mpt", {"expansion_ratio": 1e308}, "expansion_ratio"),
        ("mpt", {"attn_config": {"kv_n_heads": 7}}, "kv_n_heads"),
        ("xlstm", {"qk_dim_factor": 1e308}, "qk_dim_factor"),
        ("deepseek_v4", {"compress_ratios": [[1]]}, "compress_ratios"),
        ("deepseek_v4", {"compress_ratios": 3}, "compress_ratios"),
        ("cohere2", {"sliding_window_pattern": ""}, "sliding_window_pattern"),
        ("cohere2", {"sliding_window_pattern": 0, "layer_types": None}, "sliding_window_pattern"),
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval"),
    ],
)
def test_values_that_were_faults_are_refused(model_type: str, change: dict[str, Any], field: str) -> None:
    """Rules of layers and factors that cannot be are problems of their key."""
    assert field in [problem.field for problem in problems({**examples()[model_type], **change})]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_nothing_in_a_file_breaks_the_importer(data: st.DataObject) -> None:
    """Whatever stands under a key of a real configuration gives a model or an input error with remedies."""
    family = data.draw(st.sampled_from(sorted(randoms())))
    config = data.draw(st.sampled_from(randoms()[family]))["config"]
    keys = data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3))
    changed = {**config, **{key: data.draw(ANYTHING) for key in keys}}
    try:
        model_from_config(changed)
    except InputError as error:
        assert all(problem.field and problem.rule and problem.remedy for problem in error.problems)


def test_layers_that_predict_are_as_many_as_can_be_answered() -> None:
    """Each layer of multi-token prediction is a ledger with a head and a loss: more than 32 are refused at once."""
    model = load_model("deepseek-v3")
    assert len(replace(model, mtp=model.mtp * 32).mtp) == 32
    with pytest.raises(InputError, match="num_mtp_layers = 33"):
        replace(model, mtp=model.mtp * 33)
