"""A model from its sizes alone: the defaults that are taken, the ratios, and all that is wrong at once."""

from __future__ import annotations

from typing import Any

import pytest

from command_line import run
from shardwise.errors import InputError
from shardwise.models import SIZE_FIELDS, Attention, Model, MoE, load_model
from shardwise.ops import count_parameters, forward_flops


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"num_layers": 32, "hidden_size": 4096, "gated": True, "ffn": 14336, "kv_ratio": 0.25, "vocab_size": 128256},
         "llama-3-8b"),
        ({"num_layers": 32, "hidden_size": 4096, "gated": True, "ffn": 14336, "num_key_value_heads": 8,
          "vocab_size": 32000, "num_experts": 8, "experts_per_token": 2}, "mixtral-8x7b"),
        ({"num_layers": 32, "hidden_size": 4096, "gated": True, "ffn": 11008, "vocab_size": 32000}, "llama-2-7b"),
        ({"num_layers": 12, "hidden_size": 768, "vocab_size": 50257, "tied": True, "learned_positions": True,
          "max_context": 1024}, "gpt2"),
        ({"num_layers": 96, "hidden_size": 12288, "vocab_size": 50257, "tied": True, "learned_positions": True},
         "gpt3-175b"),
    ],
)  # fmt: skip
def test_sizes_give_the_model_that_they_are_of(sizes: dict[str, Any], named: str) -> None:
    """The sizes of a known model give its parameters and FLOPs to the last one."""
    model, known = Model.from_sizes(**sizes), load_model(named)
    assert count_parameters(model) == count_parameters(known)
    assert forward_flops(model, 1024) == forward_flops(known, 1024)


def test_a_gpt_of_two_sizes_has_what_the_formula_says() -> None:
    """L layers of width D: 12 D^2 + 13 D each, a norm of 2 D, and 2 V D of tables; every default is listed."""
    model = Model.from_sizes(num_layers=96, hidden_size=12288)
    assert count_parameters(model) == 96 * (12 * 12288**2 + 13 * 12288) + 2 * 12288 + 2 * 51200 * 12288
    told = {line.partition(" ")[0] for line in model.assumptions}
    assert told == {"gated", "learned_positions", "num_attention_heads", "ffn", "vocab_size", "tied"}


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"tied": True}, -51200 * 512),
        ({"learned_positions": True}, 2048 * 512),
        ({"learned_positions": True, "max_context": 4096}, 4096 * 512),
        ({"vocab_size": 51201}, 2 * 512),
        ({"ffn_ratio": 8}, 6 * (2 * 512 * 2048 + 2048)),
        ({"kv_ratio": 0.5}, -6 * (512 * 512 + 512)),
        ({"num_key_value_heads": 1}, -6 * (2 * 512 * 448 + 2 * 448)),
        ({"attention_bias": False}, -6 * 4 * 512),
        ({"mlp_bias": False}, -6 * 5 * 512),
        ({"num_experts": 4}, 6 * (4 * 2 * 512 * 2048 + 4 * 512 - (2 * 512 * 2048 + 5 * 512))),
        ({"num_experts": 4, "expert_interval": 3}, 2 * (4 * 2 * 512 * 2048 + 4 * 512 - (2 * 512 * 2048 + 5 * 512))),
        ({"num_experts": 4, "expert_ffn": 64}, 6 * (4 * 2 * 512 * 64 + 4 * 512 - (2 * 512 * 2048 + 5 * 512))),
        ({"gated": True}, 6 * (512 * 2048 - 9 * 512 - 2 * 512) - 512),
    ],
)  # fmt: skip
def test_each_size_changes_the_parameters_that_it_names(change: dict[str, Any], difference: int) -> None:
    """A table of changes to one small model, and by how many parameters each changes it."""
    plain = {"num_layers": 6, "hidden_size": 512}
    assert (
        count_parameters(Model.from_sizes(**plain, **change)) - count_parameters(Model.from_sizes(**plain))
        == difference
    )


def test_every_so_many_layers_one_is_a_mixture() -> None:
    """With an interval of two the second, the fourth and so on are mixtures, as in Fairseq's and GLaM's models."""
    model = Model.from_sizes(num_layers=6, hidden_size=512, num_experts=8, expert_interval=2, experts_per_token=2)
    assert [isinstance(b.feed_forward, MoE) for b in model.layers] == [False, True] * 3
    mixture = model.layers[1].feed_forward
    assert isinstance(mixture, MoE)
    assert (mixture.experts, mixture.top_k, mixture.ffn) == (8, 2, 2048)


@pytest.mark.parametrize(("hidden", "heads"), [(512, 8), (768, 12), (2048, 16), (12288, 96), (192, 3)])
def test_heads_are_as_wide_as_usual(hidden: int, heads: int) -> None:
    """Heads of 64 below a width of 2048 and of 128 from there on, and as many keys as queries."""
    core = Model.from_sizes(num_layers=1, hidden_size=hidden).layers[0].mixers[0]
    assert isinstance(core, Attention)
    assert (core.heads, core.kv_heads, core.heads * core.head_dim) == (heads, heads, hidden)


@pytest.mark.parametrize(
    ("sizes", "fields"),
    [
        ({}, {"hidden_size", "num_layers"}),
        ({"num_layers": 0, "hidden_size": "wide"}, {"hidden_size", "num_layers"}),
        ({"num_layers": 2, "hidden_size": 100}, {"num_attention_heads"}),
        ({"num_layers": 2, "hidden_size": 512, "num_attention_heads": 7}, {"num_attention_heads"}),
        ({"num_layers": 2, "hidden_size": 512, "ffn": 3, "ffn_ratio": 4.0}, {"ffn_ratio"}),
        ({"num_layers": 2, "hidden_size": 512, "ffn_ratio": 0.001, "kv_ratio": 0.3}, {"ffn_ratio", "kv_ratio"}),
        ({"num_layers": 2, "hidden_size": 512, "kv_ratio": 0.375}, {"kv_ratio"}),
        ({"num_layers": 2, "hidden_size": 512, "num_key_value_heads": 3}, {"num_key_value_heads"}),
        ({"num_layers": 2, "hidden_size": 512, "moe": True}, {"num_experts"}),
        ({"num_layers": 2, "hidden_size": 512, "moe": False, "num_experts": 2}, {"moe"}),
        ({"num_layers": 2, "hidden_size": 512, "experts_per_token": 2, "expert_interval": 2},
         {"experts_per_token", "expert_interval"}),
        ({"num_layers": 2, "hidden_size": 512, "num_experts": 4, "experts_per_token": 5, "expert_interval": 3},
         {"experts_per_token", "expert_interval"}),
        ({"num_layers": 2, "hidden_size": 512, "kv_lora_rank": 64, "depth": 3}, {"kv_lora_rank", "depth"}),
        ({"num_layers": 2, "hidden_size": 512, "vocab_size": -1, "ffn_ratio": "four"}, {"vocab_size", "ffn_ratio"}),
    ],
)  # fmt: skip
def test_all_that_is_wrong_is_said_at_once(sizes: dict[str, Any], fields: set[str]) -> None:
    """Missing, impossible, contradictory and unknown sizes are named together, each with what would do."""
    with pytest.raises(InputError) as caught:
        Model.from_sizes(**sizes)
    assert {p.field for p in caught.value.problems} == fields
    assert all(p.rule and p.remedy for p in caught.value.problems)


@pytest.mark.parametrize("name", SIZE_FIELDS)
def test_fields_of_sizes_override_no_named_model(name: str) -> None:
    """What describes a model by its sizes alone is refused beside a name."""
    value = () if SIZE_FIELDS[name].kind is bool else ("2",)
    done = run("count", "gpt2", "--" + name.replace("_", "-"), *value, "--json")
    assert (done.status, done.fields) == (2, [name])
