"""Parameter counts of imported models against transformers' own classes, to the last parameter."""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from shardwise.models import MoE, catalogue, load_model, model_from_config, model_names
from shardwise.models.families import FAMILIES
from shardwise.ops import active_parameters, count_parameters

DATA = Path(__file__).parents[1] / "data/models/param_counts.json"
FACTS: dict[str, dict[str, bool]] = json.loads(DATA.with_name("class_facts.json").read_text())["facts"]


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
    if family in (
        "apertus",
        "gemma4_text",
        "gemma4_unified_text",
        "gpt_neo",
        "deepseek_v4",
        "minimax",
        "qwen4_exp_text",
    ):
        pytest.skip("these classes store scalars, masks, decays or routing tables too")
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


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("qwen3.5-2b", 1.9, 1.9),
        ("qwen3.5-122b-a10b", 122, 10),
        ("deepseek-v4-pro", 1600, 49),
        ("glm-4.7-flash", 30, 3.9),
        ("mistral-small-4-119b", 119, 6.5),
        ("mistral-large-3-675b", 673, 39),
        ("mistral-large-4-1t-a52b", 1050, 52),
        ("nemotron-3-ultra-550b-a55b", 550, 55),
        ("nemotron-nano-9b-v2", 8.9, 8.9),
        ("mimo-v2-flash", 309, 15),
        ("trinity-large", 400, 13),
        ("command-a-plus-218b", 218, 25),
        ("hy3", 295, 21),
        ("k-exaone-236b-a23b", 236, 23),
        ("solar-open-100b", 102.6, 12),
        ("falcon-h1-7b", 7.59, 7.59),
        ("exaone-4.0-1.2b", 1.28, 1.28),
    ],
)
def test_catalogue_models_are_as_large_as_their_makers_say(name: str, total: float, active: float) -> None:
    """Where no exact count is published, billions in all and of each token are met but for rounding: 4%."""
    model = load_model(name)
    assert count_parameters(model) / 1e9 == pytest.approx(total, rel=0.04)
    assert active_parameters(model) / 1e9 == pytest.approx(active, rel=0.04)


@pytest.mark.parametrize(
    ("name", "format_"),
    [
        ("devstral-2-123b", "fp8-tensor"),
        ("mistral-large-3-675b", "fp8"),
        ("ministral-3-8b-instruct", "fp8-tensor"),
        ("ministral-3-8b", ""),
        ("mimo-v2-flash", "fp8"),
        ("deepseek-v4-pro", "mxfp4+attention=fp8-block+shared=fp8-block"),
    ],
)
def test_catalogue_models_are_quantised_as_released(name: str, format_: str) -> None:
    """A model that is released in a smaller format says so."""
    assert (load_model(name).quantization or "") == format_


def test_biases_of_shared_experts_of_aria_are_counted() -> None:
    """AriaSharedExpertsMLP has them where mlp_bias says so, and routed experts do not (transformers 5.24.0)."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24}
    keys = {"model_type": "aria_text", "vocab_size": 100, "moe_num_experts": 4, "moe_topk": 2, **sizes}
    counts = [
        count_parameters(model_from_config(keys | {"moe_num_shared_experts": 2, "mlp_bias": bias}))
        for bias in (False, True)
    ]
    assert counts[1] - counts[0] == 3 * (2 * 2 * 24 + 64)


def test_goldens_cover_every_class_that_transformers_can_build() -> None:
    """Each family has goldens, but for those that transformers has no class for or cannot build."""
    without = {
        "dbrx",
        "glm4v_text",
        "mllama_text_model",
        "aria_text",
        "ernie4_5_vl_moe_text",
        # On transformers' main branch alone: counted below.
        "deepseek_v41_text",
        *(name for name, module in FAMILIES.items() if module in ("described", "remote", "remote_moe")),
    }
    assert set(FAMILIES) - without == set(goldens()["random"])


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"engram_layer_ids": [], "engram_num_embeddings": []},
        {"num_hidden_layers": 6, "compress_ratios": [0, 2, 2, 1, 1, 0], "kv_source_layer_ids": [1, 3],
         "index_source_layer_ids": [1, 3, 4], "engram_layer_ids": [2], "engram_num_embeddings": [1003], "hc_mult": 2,
         "engram_max_ngram_size": 3, "o_groups": 4, "num_attention_heads": 16},
    ],
)  # fmt: skip
def test_deepseek_v41_has_the_tensors_of_its_class(said: dict[str, Any]) -> None:
    """Every tensor of transformers' models/deepseek_v41 (main branch of 2026-09), layer by layer."""
    config = catalogue()["deepseek-v4.1-flash"]["config"] | said
    D, H, N, ql = (config[key] for key in ("hidden_size", "head_dim", "num_attention_heads", "q_lora_rank"))
    groups, rank, hc, E = (config[key] for key in ("o_groups", "o_lora_rank", "hc_mult", "n_routed_experts"))
    heads, width, ffn = config["index_n_heads"], config["index_head_dim"], config["moe_intermediate_size"]
    total = 2 * config["vocab_size"] * D + D
    columns = (config["engram_max_ngram_size"] - 1) * config["engram_n_heads"]
    for rows in config["engram_num_embeddings"]:
        # embed (without its scales), wkv, q_weight and k_weight
        total += config["engram_head_dim"] * (rows + columns * D * (hc + 1)) + 2 * hc * D
    mixes = (2 + hc) * hc
    for i, rate in enumerate(config["compress_ratios"][: config["num_hidden_layers"]]):
        # wq_a, q_norm, wq_b, wkv, kv_norm, wo_a, wo_b and attn_sink
        total += D * ql + ql + ql * N * H + D * H + H + N * H * rank + groups * rank * D + N
        if i in config["kv_source_layer_ids"]:
            # wkv, wgate, norm, and wk and k_norm of the indexer
            total += (2 if rate > 1 else 1) * D * H + H + H * width + width
        if i in config["index_source_layer_ids"]:
            total += ql * heads * width + D * heads
        # gate with bias and bias_vl, experts, the shared one, two norms, hyper-connections
        total += E * (D + 2) + (E + 1) * 3 * D * ffn + 2 * D + 2 * (mixes * hc * D + mixes + 3)
    assert count_parameters(model_from_config(config)) == total


# Families of which a fact makes no difference to what is kept: no rotary positions, attention that only runs eagerly,
# latent attention, whose own code joins heads, copies of the fused heads, and linear attention that alone is fused.
WITHOUT_ROTARY = ("bloom", "gpt2", "gpt_bigcode", "mpt")
EAGER_ALONE = ("codegen", "gptj")
LATENT = ("deepseek_v32", "glm_moe_dsa")
COPIED = ("falcon",)
LINEAR_ALONE = ("minimax",)


@pytest.mark.parametrize("name", sorted(FACTS))
def test_a_family_is_written_as_its_class_is(name: str) -> None:
    """Fused projections, joined heads and routers in fp32 are those of the source of transformers 5.23.0."""
    facts = import_module(f"shardwise.models.families.{FAMILIES[name]}").ROWS[name].facts
    beside = name in (*WITHOUT_ROTARY, *EAGER_ALONE, *LATENT, *COPIED, *LINEAR_ALONE)
    asked = [fact for fact in FACTS[name] if not fact.endswith("_norm") and (not beside or fact == "float_router")]
    assert {fact: getattr(facts, fact) for fact in asked} == {fact: FACTS[name][fact] for fact in asked}


@pytest.mark.parametrize("kind", ["float", "power"])
def test_norms_meet_their_weights_as_their_classes_say(kind: str) -> None:
    """Families whose RMSNorm multiplies in fp32, or takes a power, are those of the source of transformers 5.24.0."""
    wrong = {}
    for name in sorted({*FACTS} & {*goldens()["random"]}):
        norms = {block.norm for block in model_from_config(goldens()["random"][name][0]["config"]).kinds}
        if (f"rmsnorm-{kind}" in norms) != FACTS[name][f"{kind}_norm"]:
            wrong[name] = norms
    assert not wrong


def test_every_family_has_a_row_in_its_module() -> None:
    """The module that a model type names has a row for it, and no other."""
    modules = {module: set(import_module(f"shardwise.models.families.{module}").ROWS) for module in FAMILIES.values()}
    assert {name: module for module, names in modules.items() for name in names} == FAMILIES
