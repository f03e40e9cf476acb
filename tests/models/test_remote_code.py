"""Families whose code lives beside their checkpoints: counts of that code, and of released models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.errors import InputError
from shardwise.models import Attention, LightningAttention, load_model, model_from_config
from shardwise.ops import active_parameters, count_parameters

COUNTS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/models/remote_counts.json").read_text())
SEARCHED = {
    "model_type": "nemotron-nas",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": None,
    "intermediate_size": None,
    "hidden_act": "silu",
    "vocab_size": 100,
}


def searched(*blocks: dict[str, Any]) -> dict[str, Any]:
    """A pruned Llama of these layers."""
    return {**SEARCHED, "num_hidden_layers": len(blocks), "block_configs": list(blocks)}


def test_random_configurations_of_ling_have_the_counts_of_its_own_class() -> None:
    """Biases, norms of queries and keys, leading dense layers and shared experts, to the last parameter."""
    wrong = [
        config for count, config in COUNTS["bailing_moe_v2"] if count_parameters(model_from_config(config)) != count
    ]
    assert wrong == []


def test_language_models_of_wrappers_have_the_counts_of_the_layers_they_are_read_as() -> None:
    """Hunyuan VL, Granite 4 Vision, Emu 3, Apertus 1.5 and Cosmos 3 have words of their own for known layers."""
    wrong = [config for count, config in COUNTS["texts"] if count_parameters(model_from_config(config)) != count]
    assert wrong == [] and len({config["model_type"] for _, config in COUNTS["texts"]}) == 6


@pytest.mark.parametrize("wrapper", ["glm_ocr", "molmo2", "deepseek_ocr2", "voxtral_realtime", "hunyuan_vl"])
def test_a_wrapper_that_leaves_out_the_type_of_its_language_model_is_read(wrapper: str) -> None:
    """Its own type says which, and the other parts are named."""
    text = {key: value for key, value in SEARCHED.items() if key != "model_type"} | {"num_key_value_heads": 4}
    text |= {"intermediate_size": 64, "head_dim": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 64}
    text |= {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if wrapper != "deepseek_ocr2":
        text = {key: value for key, value in text.items() if "expert" not in key and "moe" not in key}
    file = {"model_type": wrapper, "text_config": text, "vision_config": {"hidden_size": 8, "depth": 1}}
    model = model_from_config(file, part="text")
    assert model.num_layers == 3 and any("vision_config" in note for note in model.assumptions)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama-3.3-nemotron-super-49b", 49.867, 49.867),
        ("llama-3.1-nemotron-ultra-253b", 253.4, 253.4),
        ("mimo-7b", 7.62, 7.62),
        ("ling-mini-2.0", 16.26, 1.43),
        ("ling-flash-2.0", 103, 6.1),
        ("ling-1t", 1000, 51),
        ("ring-mini-linear-2.0", 16.4, 1.6),
        ("deepseek-moe-16b", 16.376, 2.83),
    ],
)
def test_released_models_are_as_large_as_their_makers_say(name: str, total: float, active: float) -> None:
    """Billions in all and of each token."""
    model = load_model(name)
    assert count_parameters(model) / 1e9 == pytest.approx(total, rel=0.01)
    assert active_parameters(model) / 1e9 == pytest.approx(active, rel=0.02)


def test_a_pruned_layer_lacks_what_its_entry_says() -> None:
    """Of three layers one has both parts, one no attention, one nothing; widths are filled up to 256."""
    both = {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.3125}}
    fed = {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"ffn_mult": 5.25, "no_op": False}}
    none = {"attention": {"no_op": True}, "ffn": {"no_op": True, "ffn_mult": None}}
    model = model_from_config(searched(both, fed, none))
    first, second, third = model.layers
    assert [(one.kv_heads, one.head_dim) for one in first.mixers if isinstance(one, Attention)] == [(2, 32)]
    assert first.dense is not None and second.dense is not None
    assert (first.dense.ffn, second.dense.ffn) == (256, 1024)
    assert (first.norms, second.norms, third.norms) == (2, 1, 0) and not second.mixers and third.feed_forward is None
    attention, embeddings = 256 * (256 + 2 * 64 + 256), 2 * 100 * 256
    assert count_parameters(model) == embeddings + attention + 3 * 256 * (256 + 1024) + 3 * 256 + 256


@pytest.mark.parametrize(
    ("blocks", "rule"),
    [
        (None, "is missing"),
        ([{"attention": {"n_heads_in_group": 3}, "ffn": {"ffn_mult": 1.0}}], "must divide the 8 heads"),
        ([{"attention": {"replace_with_linear": True, "no_op": True}, "ffn": {"no_op": True}}], "not understood"),
        (["none"], "must be a list of objects"),
        ([], "lists 0 layers where the model has 1"),
    ],
)
def test_entries_that_say_nothing_that_can_be_counted_are_refused(blocks: Any, rule: str) -> None:
    """The problem names the key and its rule."""
    config = {**SEARCHED, "num_hidden_layers": 1, "block_configs": blocks}
    with pytest.raises(InputError) as error:
        model_from_config(config)
    assert any(one.field == "block_configs" and rule in one.rule for one in error.value.problems)


def test_ring_linear_attends_to_all_at_the_end_of_each_group_and_behind_the_last() -> None:
    """Of 7 layers in groups of 3, those are the third, the sixth and the one left over."""
    config = {**COUNTS["bailing_moe_v2"][0][1], "model_type": "bailing_moe_linear", "num_hidden_layers": 7}
    model = model_from_config({**config, "layer_group_size": 3})
    assert [isinstance(b.mixers[0], LightningAttention) for b in model.layers] == [1, 1, 0, 1, 1, 0, 0]


def test_a_layer_of_nothing_costs_an_engine_nothing() -> None:
    """A pruned model of one whole layer is as fast with an empty layer behind it."""
    whole = {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 4.0}}
    none = {"attention": {"no_op": True}, "ffn": {"no_op": True}}
    one, two = (model_from_config(searched(*blocks)) for blocks in ((whole,), (whole, none)))
    reports = [sw.infer(model, sw.Cluster.parse("1xh100"), sw.Plan(), sw.Serving(batch=4)) for model in (one, two)]
    assert reports[0].tpot_seconds == pytest.approx(reports[1].tpot_seconds, rel=0.02) and reports[0].fits


def test_kimi_k3_has_the_weights_that_its_own_code_makes() -> None:
    """Delta attention with a gate at once and a decay of low rank, experts in a latent, residuals that layers mix."""
    model = load_model("kimi-k3")
    hidden, width, heads, latent, full = 7168, 96 * 128, 96, 3584, 24
    delta = 5 * hidden * width + 12 * width + 128 * (hidden + width) + hidden * heads + heads + width + 128
    queries = hidden * 1536 + 1536 + 1536 * heads * 192
    attention = queries + hidden * 576 + 512 + 512 * heads * 256 + 2 * heads * 128 * hidden
    experts = 896 * 3 * latent * 3072 + 896 * hidden + 2 * hidden * latent + latent + 3 * hidden * 6144
    around = 2 * 163840 * hidden + 3 * hidden + 93 * 6 * hidden
    layers = (93 - full) * delta + full * attention + 92 * experts + 3 * hidden * 33792
    assert count_parameters(model) == around + layers
    assert sum(bool(b.mixers[0].attends) for b in model.layers) == full
    assert "recurrent=bf16" in model.quantization and "latent=mxfp4" in model.quantization
