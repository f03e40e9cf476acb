"""Encoders and vision transformers: what they are made of, and what a run over samples costs."""

from __future__ import annotations

import pytest

from shardwise import Cluster, Plan, Training, train
from shardwise.errors import InputError
from shardwise.models import load_model, model_from_config
from shardwise.ops import count_parameters, forward_flops


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("bert-base", 109_482_240),
        ("bert-base-masked-lm", 109_514_298),
        ("bert-large", 335_141_888),
        ("scibert", 109_918_464),
        ("all-minilm-l6-v2", 22_713_216),
        ("all-minilm-l12-v2", 33_360_000),
        ("vit-base", 86_567_656),
        ("vit-large", 304_326_632),
        ("vit-huge", 632_404_480),
    ],
)
def test_encoders_have_the_parameters_that_transformers_builds(name: str, parameters: int) -> None:
    """Counts of transformers 5.23.0: BertModel, BertForMaskedLM, ViTForImageClassification and ViTModel."""
    assert count_parameters(load_model(name)) == parameters


def test_a_bert_that_generates_has_the_head_of_words() -> None:
    """BertLMHeadModel ends in Model as BertModel does, and has the head of masked words in place of a pooler."""
    given = {"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
             "intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512}  # fmt: skip
    classes = ("BertLMHeadModel", "BertForMaskedLM", "BertModel")
    counts = [count_parameters(model_from_config({**given, "architectures": [name]})) for name in classes]
    assert counts == [109_514_298, 109_514_298, 109_482_240]


@pytest.mark.parametrize(
    ("name", "tokens", "flops"), [("bert-base", 512, 96_637_943_808), ("vit-base", 197, 35_127_656_448)]
)
def test_forward_flops_are_those_of_the_flop_counter(name: str, tokens: int, flops: int) -> None:
    """Torch 2.13.0's FlopCounterMode over one sequence: poolers run on a first token, a class token has no patch."""
    found = forward_flops(load_model(name), tokens)
    assert found.linear + found.full == flops


def test_the_transformer_over_weather_fields_is_its_layers() -> None:
    """48 layers of width 12288 over 64800 patches: 12 D^2 + 13 D a layer, no vocabulary, attention both ways."""
    model = load_model("vit-era5")
    assert count_parameters(model) == 48 * (12 * 12288**2 + 13 * 12288)
    assert (model.max_context, model.head, model.embedding, model.generates) == (64800, False, False, False)
    flops = forward_flops(model, 64800)
    assert (flops.linear, flops.full) == (48 * 24 * 64800 * 12288**2, 48 * 4 * 64800**2 * 12288)


def test_a_budget_of_samples_is_one_of_tokens() -> None:
    """Samples times their tokens times the epochs is the budget: the same run costs the same however it is said."""
    model, cluster = load_model("vit-base"), Cluster.parse("8xa100-sxm-80gb")

    def days(**job: float) -> float:
        return train(model, cluster, Plan(dp=0), Training(seq_len=197, global_batch=1024, **job)).training_seconds  # type: ignore[arg-type]

    assert days(sample_budget=1e6, epochs=3) == days(sample_budget=3e6) == days(token_budget=197e6, epochs=3) > 0
    assert days() == 0


@pytest.mark.parametrize(
    ("job", "fields"),
    [
        ({"epochs": 2.0}, {"epochs"}),
        ({"sample_budget": 1e6, "epochs": 0.0}, {"epochs"}),
        ({"sample_budget": 1e6, "token_budget": 1e9}, {"samples"}),
        ({"sample_budget": float("nan")}, {"sample_budget"}),
    ],
)
def test_a_budget_that_says_nothing_is_refused(job: dict[str, float], fields: set[str]) -> None:
    """Epochs of nothing, two budgets at once and no number name their field."""
    with pytest.raises(InputError) as caught:
        train(
            load_model("vit-base"), Cluster.parse("8xh100"), Plan(dp=0), Training(seq_len=197, global_batch=64, **job)
        )  # type: ignore[arg-type]
    assert {p.field for p in caught.value.problems} == fields
