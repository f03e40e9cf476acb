"""From a configuration to a model: wrappers, aliases, defaults, overrides, and what is said about them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import InputError
from shardwise.models import (
    FIELDS,
    Attention,
    GatedDelta,
    LatentAttention,
    Mamba2,
    Model,
    MoE,
    catalogue,
    load_model,
    model_from_config,
)
from shardwise.models.families import FAMILIES, SAME_AS
from shardwise.ops import count_parameters

DATA = Path(__file__).parents[1] / "data/models/param_counts.json"
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
NVFP4 = "modelopt-nvfp4"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@cache
def randoms() -> dict[str, list[dict[str, Any]]]:
    """The random configurations of every family."""
    found: dict[str, list[dict[str, Any]]] = json.loads(DATA.read_text())["random"]
    return found


def attention(model: Model, layer: int = 0) -> Attention:
    """The softmax attention of a layer."""
    core = model.layers[layer].mixers[0]
    assert isinstance(core, Attention)
    return core


def test_at_least_fifty_five_model_types_are_read() -> None:
    """The importer knows the families of the hub's language models and their wrappers."""
    assert len(FAMILIES) >= 76
    assert set(SAME_AS.values()) <= set(FAMILIES)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("n_embd", "hidden_size"),
        ("n_layer", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
        ("n_positions", "max_position_embeddings"),
    ],
)
def test_aliases_mean_the_same(left: str, right: str) -> None:
    """A field under another family's key gives the same model."""
    config = {
        "model_type": "gpt2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "vocab_size": 50,
    }
    renamed = {left if key == right else key: value for key, value in config.items()}
    assert model_from_config(config) == model_from_config(renamed)


def test_aliases_that_disagree_are_refused() -> None:
    """Two keys of one field with different values are a problem that names both."""
    with pytest.raises(InputError, match="disagrees with hidden_size"):
        model_from_config({**LLAMA, "n_embd": 32})


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen3-8b", "head_dim", 128),
        ("gpt-oss-20b", "head_dim", 64),
        ("mistral-nemo-12b", "head_dim", 128),
        ("gemma-2b", "head_dim", 256),
        ("llama-2-7b", "kv_heads", 32),
        ("falcon-7b", "kv_heads", 1),
        ("falcon-40b", "kv_heads", 8),
        ("starcoder-15b", "kv_heads", 1),
        ("gpt-oss-20b", "sinks", True),
        ("gpt2", "rotary", False),
        ("qwen2.5-7b", "qkv_bias", True),
        ("qwen2.5-7b", "out_bias", False),
    ],
)
def test_attention_is_what_the_family_has(name: str, field: str, value: object) -> None:
    """Explicit head widths win, key-value heads follow the family's own rule, biases and sinks are where they are."""
    assert getattr(attention(load_model(name)), field) == value


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("MptForCausalLM", 0),
        ("MPTForCausalLM", 24 * (3 * 1024 + 1024 + 2048 + 1024 + 2 * 1024) + 1024 - 24 * 2 * 1024 * 2048),
    ],
)
def test_mpt_is_the_class_that_its_file_names(architecture: str, more: int) -> None:
    """Transformers' MPT has no biases and four times the width; MosaicML's heeds no_bias and expansion_ratio."""
    config = {"model_type": "mpt", "d_model": 1024, "n_layers": 24, "n_heads": 16, "vocab_size": 100}
    config |= {"no_bias": False, "expansion_ratio": 2, "max_seq_len": 64, "tie_word_embeddings": True}
    config |= {"attn_config": {"alibi": True}, "architectures": [architecture]}
    bare = 24 * (4 * 1024**2 + 2 * 1024 * 4096 + 2 * 1024) + 1024 + 100 * 1024
    assert count_parameters(model_from_config(config)) == bare + more
    silent = {key: value for key, value in config.items() if key != "architectures"}
    assert any("MosaicML" in note for note in model_from_config(silent).assumptions)


MPT = {"model_type": "mpt", "d_model": 1024, "n_layers": 24, "n_heads": 16, "vocab_size": 100, "max_seq_len": 64}
BARE = 24 * (12 * 1024**2 + 2 * 1024) + 1024 + 100 * 1024


@pytest.mark.parametrize(
    ("said", "more"),
    [
        ({"no_bias": True, "attn_config": {"alibi": True}}, 0),
        ({"no_bias": True}, 64 * 1024),
        ({"no_bias": True, "attn_config": {"rope": True}}, 0),
        ({"attn_config": {"alibi": True}}, 24 * (3 + 1 + 4 + 1 + 2) * 1024 + 1024),
        ({"no_bias": True, "attn_config": {"alibi": True, "attn_type": "multiquery_attention"}}, -24 * 1920 * 1024),
        ({"no_bias": True, "attn_config": {"alibi": True}, "ffn_config": {"ffn_type": "mptglu"}}, 24 * 4 * 1024**2),
        ({"no_bias": True, "attn_config": {"alibi": True}, "ffn_config": {"ffn_hidden_size": 1024}}, -24 * 6 * 1024**2),
    ],
)
def test_what_a_file_of_mosaicml_leaves_out_is_its_own_class(said: dict[str, object], more: int) -> None:
    """MPTForCausalLM has biases, learned positions and no gate unless told; each word of its parts counts."""
    config = MPT | {"architectures": ["MPTForCausalLM"], "tie_word_embeddings": True} | said
    assert count_parameters(model_from_config(config)) == BARE + more


def test_feed_forwards_of_mosaicml_that_are_not_read_are_refused() -> None:
    """Experts of llm-foundry are no dense feed-forward."""
    with pytest.raises(InputError, match="mb_dmoe"):
        model_from_config(MPT | {"architectures": ["MPTForCausalLM"], "ffn_config": {"ffn_type": "mb_dmoe"}})


@pytest.mark.parametrize(
    ("name", "period"),
    [
        ("gemma-3-27b", "sssssf"),
        ("gpt-oss-120b", "sf"),
        ("mistral-7b-v0.1", "s"),
        ("mistral-7b-v0.3", "f"),
        ("qwen2.5-7b", "f"),
    ],
)
def test_windows_are_on_the_layers_that_have_them(name: str, period: str) -> None:
    """A window counts only on the layers and under the switches that use it: sliding and full ones in this order."""
    model = load_model(name)
    found = "".join("s" if attention(model, i).window else "f" for i in range(model.num_layers))
    assert found == (period * model.num_layers)[: model.num_layers]


SIZES_OF_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "intermediate_size": 16}
COHERE = {"first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 2, "prefix_dense_intermediate_size": 48}


@pytest.mark.parametrize(
    ("family", "more", "windows", "experts"),
    [
        ("cwm", {}, "fsssfs", "......"),
        ("granite_swa", {}, "fsssfs", "......"),
        ("vaultgemma", {"head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"}, "sfsfsf", "......"),
        ("exaone_moe", {"sliding_window_pattern": "LLLG"}, "sssfss", ".eeeee"),
        ("mellum", {"layer_types": ["sliding_attention", "full_attention"] * 3}, "sfsfsf", "eeeeee"),
        ("mellum", {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4}, "ffffff", "..eeee"),
        ("granitemoe_swa", {}, "fsssfs", "eeeeee"),
        ("cohere2_moe", COHERE, "sfsssf", "..eeee"),
        ("laguna", {"num_attention_heads_per_layer": [8, 4] * 3}, "ffffff", ".eeeee"),
        ("flint", {}, "ffsssf", "..eeee"),
        ("flint", {"mlp_only_layers": []}, "ffsssf", "eeeeee"),
        ("kolibri1", {}, "ssssfs", "eeeeee"),
        ("gemma4_unified_text", {"hidden_activation": "gelu_pytorch_tanh"}, "sssssf", "......"),
        ("lfm3", {"conv_L_cache": 3}, "ccfcsc", "......"),
    ],
)
def test_windows_and_experts_of_families_of_2026(family: str, more: dict[str, Any], windows: str, experts: str) -> None:
    """Counts do not see windows: each class has its own pattern, and its own layers in front."""
    given = {**LLAMA, "num_hidden_layers": 6, "sliding_window": 32, "head_dim": 8, **SIZES_OF_EXPERTS}
    layers = model_from_config({**given, "model_type": family, **more}).layers
    mixers = [block.mixers[0] for block in layers]
    kinds = ["c" if not isinstance(m, Attention) else "s" if m.window else "f" for m in mixers]
    assert "".join(kinds) == windows
    assert "".join("e" if block.has_experts else "." for block in layers) == experts


@pytest.mark.parametrize("family", ["flint", "kolibri1"])
def test_positions_rotate_in_windowed_layers_alone(family: str) -> None:
    """Counts do not see rotations: full layers of Flint and Kolibri have no positions."""
    given = {**LLAMA, "num_hidden_layers": 6, "sliding_window": 32, "head_dim": 8, **SIZES_OF_EXPERTS}
    mixers = [block.mixers[0] for block in model_from_config({**given, "model_type": family}).layers]
    assert all(mixer.rotary is bool(mixer.window) for mixer in mixers if isinstance(mixer, Attention))


LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 8}
INDEXED = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("family", "more", "own", "rotated"),
    [
        ("hy_v4", {"q_lora_rank": 16, "hc_mult": 2}, [0, 1, 5], [4] * 6),
        ("mistral_large4_text", {}, [0, 1, 2, 3, 4, 5], [4, 4, 4, 0, 4, 4]),
        ("mistral_large4_text", {"index_topk_freq": 2, "no_rope_layers": [0] * 6}, [0, 1, 3, 5], [0] * 6),
    ],
)
def test_indexers_and_rotations_of_latent_families_of_2026(
    family: str, more: dict[str, Any], own: list[int], rotated: list[int]
) -> None:
    """Some layers take the selection of an earlier one, some have no rotary part: their heads are as wide without."""
    given = {**LLAMA, "num_hidden_layers": 6, **SIZES_OF_EXPERTS, **LATENT, **INDEXED, "model_type": family, **more}
    mixers = [block.mixers[0] for block in model_from_config(given).layers]
    latent = [mixer for mixer in mixers if isinstance(mixer, LatentAttention)]
    assert [i for i, mixer in enumerate(latent) if mixer.indexer and not mixer.indexer.shared] == own
    assert [mixer.qk_rope_head_dim for mixer in latent] == rotated
    assert {mixer.qk_head_dim for mixer in latent} == {12}


def test_latents_of_another_layer_are_refused() -> None:
    """Mistral Large 4 may share latents between layers, which no operator here does."""
    given = {**LLAMA, **SIZES_OF_EXPERTS, **LATENT, **INDEXED, "model_type": "mistral_large4_text"}
    with pytest.raises(InputError, match="kv_source_layers"):
        model_from_config({**given, "kv_source_layers": [0, 0, 2]})


@pytest.mark.parametrize(
    ("other", "family", "keys"),
    [
        ("exaone", "llama", {"num_hidden_layers": "num_layers", "hidden_act": "activation_function"}),
        ("internlm3", "llama", {}),
        ("iquestcoder", "llama", {}),
    ],
)
def test_types_that_are_llamas_layers_are_read_so(other: str, family: str, keys: dict[str, str]) -> None:
    """EXAONE 3, InternLM 3 and IQuest-Coder are Llama's classes under their own keys."""
    given = {**LLAMA, "hidden_act": "silu", "head_dim": 8}
    renamed = {keys.get(key, key): value for key, value in given.items()} | {"model_type": other}
    model = model_from_config(renamed)
    assert (model.family, model.layers) == (family, model_from_config(given).layers)


@pytest.mark.parametrize(
    ("name", "sparse"),
    [
        ("mixtral-8x7b", 32),
        ("deepseek-v3", 58),
        ("llama-4-maverick", 24),
        ("jamba-v0.1", 16),
        ("glm-4.5", 89),
        ("ernie-4.5-21b-a3b", 27),
        ("nemotron-3-nano-30b-a3b", 23),
    ],
)
def test_mixtures_are_on_the_layers_that_have_them(name: str, sparse: int) -> None:
    """Dense layers come first, or every so often, by five different keys."""
    assert sum(isinstance(block.feed_forward, MoE) for block in load_model(name).layers) == sparse


@pytest.mark.parametrize(
    ("name", "kind", "number"),
    [
        ("qwen3-next-80b-a3b", GatedDelta, 36),
        ("kimi-linear-48b-a3b", GatedDelta, 20),
        ("kimi-linear-48b-a3b", LatentAttention, 7),
        ("bamba-9b", Mamba2, 29),
        ("falcon-h1-0.5b", Mamba2, 36),
        ("nemotron-h-8b", Mamba2, 24),
    ],
)
def test_mixers_are_on_the_layers_that_have_them(name: str, kind: type, number: int) -> None:
    """Hybrids have as many layers of each mixer as their pattern says."""
    model = load_model(name)
    assert sum(any(isinstance(m, kind) for m in block.mixers) for block in model.layers) == number


def test_a_wrapper_is_read_for_its_language_model() -> None:
    """A multimodal file gives the model under text_config, whose absent keys are its class's, and both are told."""
    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240}
    model = model_from_config(
        {"model_type": "gemma3", "text_config": inner, "vision_config": {"hidden_size": 1152}}, part="text"
    )
    # The sizes of its tower are not all in the file, and no scaling of positions is.
    bare = replace(load_model("gemma-3-4b", {"window": 4096}), tower_parameters=0, rotary_factor=0.0)
    assert model == replace(bare, name=model.name)
    assert any("text_config" in note for note in model.assumptions)
    assert any("num_attention_heads = 8" in note for note in model.assumptions)


@pytest.mark.parametrize("name", ["qwen-72b", "recurrentgemma-2b"])
def test_a_width_of_two_projections_is_two_at_least(name: str) -> None:
    """Half of 1 is no width: a model of width 0 divided by it when it was asked for its seconds."""
    with pytest.raises(InputError, match="must be at least 2"):
        model_from_config({**catalogue()[name]["config"], "intermediate_size": 1})


def test_the_default_of_tying_is_the_familys_own() -> None:
    """A file that leaves tie_word_embeddings out means the default of its own class."""
    config = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    assert not model_from_config(config).tied
    assert model_from_config({**config, "model_type": "gemma"}).tied


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": None}, "fp8-tensor"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8-tensor"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "awq", "bits": 4}, "awq-int4"),
        ({"quant_method": "gptq", "bits": 8}, "gptq-int8"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, "gptq-int8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "gptq-int4-g32"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["self_attn"]},
         "awq-int4-g64+attention=bf16"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {
            "lm_head": {}, "-:.*attn.*": {}, "-:.*visual.*": {}, "+:.*down_proj.*": {"group_size": 64}}},
         "gptq-int4+attention=bf16"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {r"+:.*\.18\..*gate.*": {"bits": 8}}},
         "gptq-int4+layers=different"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*attn.*": {"bits": 8}}}, "gptq-int4+attention=int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, "bitsandbytes"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, "bitsandbytes-int8"),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"lm_head": {"bits": 16}}}, "auto-round-int4"),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {
            f"model.layers.{i}.self_attn.o_proj": {"bits": 16} for i in range(3)}},
         "auto-round-int4+attention-out=bf16"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}, "exclude": ["lm_head"]},
         "quark-fp8"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}},
          "exclude": ["*self_attn*", "lm_head"]}, "quark-mxfp4+attention=bf16+feed-forward=mxfp4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}}},
         "compressed-tensors-int4-g32"),
        (None, ""),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.norm"]}, "modelopt-fp8"),
        ({**MODELOPT, "ignore": ["model.layers.0.self_attn*", "*.1.*norm"]}, f"{NVFP4}+attention=bf16*1/3"),
        ({**MODELOPT, "ignore": [f"model.layers.{i}.self_attn.{p}_proj" for i in range(3) for p in "qkvo"]},
         f"{NVFP4}+attention=bf16"),
        ({**MODELOPT, "ignore": [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]},
         f"{NVFP4}+attention=different"),
        ({**MODELOPT, "ignore": [f"model.layers.{i}.self_attn.{p}_proj" for i in range(3) for p in "qkv"]},
         f"{NVFP4}+attention=bf16+attention-out=own"),
        ({**MODELOPT, "ignore": [f"model.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in "qkv"]},
         f"{NVFP4}+attention=different"),
        ({**MODELOPT, "ignore": ["model.layers.1*"]}, f"{NVFP4}+attention=bf16*1/3+feed-forward=bf16*1/3"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"],
            "input_activations": None, "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}},
         "compressed-tensors-nvfp4-w4a16"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "group_size": 32}}}},
         "compressed-tensors-mxfp8"),
        ({"quant_method": "exl2", "bits": 4.25, "head_bits": 6}, "exl2"),
        ({"quant_method": "torchao", "quant_type": {"default": {
            "_type": "Float8DynamicActivationFloat8WeightConfig", "_data": {}}}}, "torchao-fp8"),
        ({"quant_method": "torchao", "modules_to_not_convert": ["re:.*self_attn.*"], "quant_type": {"default": {
            "_type": "Int4WeightOnlyConfig", "_data": {"group_size": 32}}}}, "torchao-int4-g32+attention=bf16"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "FqnToConfig", "_data": {}}}}, "torchao"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "torchao"),
        ({**MODELOPT, "ignore": ["model.layers.1.wings"]}, f"{NVFP4}+layers=different"),
        ({**MODELOPT, "ignore": ["mtp.layers.0*", "mtp*"]}, NVFP4),
        ({**MODELOPT, "quantized_layers": {"lm_head": {"quant_algo": "W4A16_NVFP4"}, **{
            f"model.layers.{i}.{part}": {"quant_algo": algo} for i in range(3)
            for part, algo in (("mlp.up_proj", "W4A16_NVFP4"), ("mlp.down_proj", "W4A16_NVFP4"),
                               ("self_attn", "FP8"))}}},
         "modelopt-w4a16_nvfp4+attention=fp8+head=w4a16_nvfp4"),
        ({"quant_method": "fp8", "modules_to_not_convert": [
            f"model.layers.{i}.{name}" for i in range(3)
            for name in ("self_attn.indexers_proj", "mlp.gate.e_score_correction_bias", "eh_proj")]}, "fp8"),
        ({**MODELOPT, "quantized_layers": {f"model.layers.{i}.mlp*": {"quant_algo": "NVFP4"} for i in range(3)}},
         f"{NVFP4}+attention=bf16"),
        ({"quant_method": "compressed-tensors", "ignore": ["re:.*self_attn.*"], "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}},
         "compressed-tensors-nvfp4+attention=bf16"),
    ],
)  # fmt: skip
def test_a_quantised_checkpoint_says_how(section: object, expected: str) -> None:
    """The method of quantization_config, with its bits and the parts that differ, is the model's quantization."""
    assert model_from_config({**LLAMA, "quantization_config": section}).quantization == expected


@pytest.mark.parametrize("keys", [("quantization",), ("quantization", "quantization_config")])
def test_a_checkpoint_of_mlx_is_not_read_as_16_bits(keys: tuple[str, ...]) -> None:
    """Its section is called quantization, in older files that alone: it was ignored, and the weights taken for bf16."""
    section = {"group_size": 64, "bits": 4, "mode": "affine"}
    model = model_from_config({**LLAMA, **dict.fromkeys(keys, section)})
    assert model.quantization == "mlx-int4" and not any("ignored" in note for note in model.assumptions)


def test_steps_of_delta_attention_in_16_bits_leave_its_other_layers_in_fp8() -> None:
    """Files of Qwen3.5 in FP8 name two linear layers of a value a head, and the convolution; not the whole mixer."""
    config = catalogue()["qwen3.6-35b-a3b"]["config"]
    layers = [i for i in range(config["num_hidden_layers"]) if i % 4 != 3]
    kept = [
        f"model.language_model.layers.{i}.linear_attn.{name}" for i in layers for name in ("in_proj_a", "in_proj_b")
    ]
    fp8 = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", *kept]}
    assert model_from_config({**config, "quantization_config": fp8}).quantization == "fp8"
    whole = [*kept, *(f"model.layers.{i}.linear_attn.out_proj" for i in layers)]
    fp8 = {"quant_method": "fp8", "modules_to_not_convert": whole}
    assert model_from_config({**config, "quantization_config": fp8}).quantization == "fp8+recurrent=bf16"


@pytest.mark.parametrize(("left", "parts"), [(None, "+attention-out=bf16"), (1, "+attention=bf16*69/70")])
def test_output_projections_that_stay_wide_leave_their_attention_in_fp8(left: int | None, parts: str) -> None:
    """MiMo-V2.5-Pro keeps them in 16 bits, 13.12 GiB of 70 layers, and maps of queries, keys and values in 8."""
    config = catalogue()["mimo-v2.5-pro"]["config"]
    section = config["quantization_config"] | {
        "ignored_layers": [f"model.layers.{i}.self_attn.o_proj" for i in range(left or 0, 70)]
    }
    model = model_from_config({**config, "model_type": "mimo_v2", "quantization_config": section})
    assert model.family == "mimo_v2_flash" and model.quantization == "fp8" + parts


@pytest.mark.parametrize("inside", [False, True])
def test_experts_of_deepseek_v4_are_narrower_than_its_other_layers(inside: bool) -> None:
    """Its file calls the method fp8 and the type of experts fp4, beside the section or in it."""
    config = {key: value for key, value in catalogue()["deepseek-v4-flash"]["config"].items() if key != "expert_dtype"}
    section, word = {"quant_method": "fp8", "weight_block_size": [128, 128]}, {"expert_dtype": "fp4"}
    given = {**config, "quantization_config": section | word} if inside else {**config, **word}
    assert model_from_config(given).quantization == "mxfp4+attention=fp8-block+shared=fp8-block"
    plain = model_from_config({**config, "quantization_config": section})
    assert plain.quantization == "fp8"
    experts = {
        "quantization_config": section | {"moe_quant_algo": "NVFP4", "ignore": ["*.attn.*"]},
        "expert_dtype": "fp4",
    }
    assert model_from_config(config | experts).quantization == "nvfp4+attention=fp8-block+shared=fp8-block"


def test_keys_that_are_not_understood_are_listed() -> None:
    """A key that the family does not read is named, unless it changes nothing."""
    model = model_from_config({**LLAMA, "wings": 2, "rope_theta": 1e4, "architectures": ["LlamaForCausalLM"]})
    assert "ignored: wings" in model.assumptions


def test_an_unknown_type_with_llamas_keys_is_read_as_llama() -> None:
    """A type that says all that Llama says is read so, and the assumption is told; one with experts is refused."""
    config = {**LLAMA, "model_type": "new", "hidden_act": "silu", "rms_norm_eps": 1e-6}
    model = model_from_config(config)
    assert model.family == "llama" and "unknown" in model.assumptions[0]
    with pytest.raises(InputError, match="num_experts"):
        model_from_config({**config, "num_experts": 4})
    by_class = model_from_config({**config, "model_type": "new", "architectures": ["Qwen3ForCausalLM"]})
    assert by_class.family == "qwen3"
    assert model_from_config({**config, "layer_types": ["full_attention"] * 3, "early_exit": None}).family == "llama"


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"model_type": "ouro", "total_ut_steps": 4}, "total_ut_steps"),
        ({"model_type": "longcat_flash_ngram", "ngram_vocab_size_ratio": 78}, "ngram_vocab_size_ratio"),
        ({"model_type": "new", "num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ({"model_type": "new", "layer_types": ["linear_attention", "full_attention", "full_attention"]}, "layer_types"),
        ({"architectures": ["LoopedLlamaForCausalLM"], "num_loops": 4}, "num_loops"),
        ({"draft_vocab_size": 32, "architectures": ["LlamaForCausalLMEagle3"]}, "another model's states"),
        ({"model_type": "new", "hidden_act": "xielu"}, "hidden_act"),
        ({"model_type": "qwen3", "head_dim": 8, "dflash_config": {"causal": True}}, "another model's states"),
    ],
)
def test_what_a_file_says_beyond_the_layers_that_are_counted_is_refused(said: dict[str, Any], named: str) -> None:
    """Loops, tables of n-grams, predictions, mixers and drafts are not left out of a total that looks whole."""
    with pytest.raises(InputError, match=named):
        model_from_config({**LLAMA, "hidden_act": "silu", "rms_norm_eps": 1e-6, **said})


def test_an_override_is_applied_under_the_familys_key_and_told() -> None:
    """Overrides by field name or by the file's key give the same model and are listed with what was there before."""
    by_field, by_key = load_model("gpt2", {"num_layers": 4}), load_model("gpt2", {"n_layer": 4})
    assert by_field == by_key and by_field.num_layers == 4
    assert by_field.assumptions == ("override: num_layers = 4 (was 12)",)
    assert load_model("mixtral-8x7b", {"expert_ffn": 64}) == load_model("mixtral-8x7b", {"intermediate_size": 64})


@pytest.mark.parametrize(
    ("name", "field"),
    [("llama-2-7b", "num_experts"), ("mixtral-8x7b", "ffn"), ("deepseek-v3", "head_dim"), ("gpt2", "wings")],
)
def test_an_override_that_nobody_reads_is_refused(name: str, field: str) -> None:
    """A field that the family has no use for is a problem whose remedy lists those it has."""
    with pytest.raises(InputError, match="have no use for") as caught:
        load_model(name, {field: 4})
    assert "num_layers" in caught.value.problems[0].remedy


def test_more_layers_continue_a_pattern_that_repeats() -> None:
    """Overriding the number of layers cuts or continues a periodic pattern; a pattern without a period is refused."""
    config = {**LLAMA, "model_type": "gemma2", "sliding_window": 4, "num_hidden_layers": 4}
    periodic = {**config, "layer_types": ["sliding_attention", "full_attention"] * 2}
    longer = model_from_config(periodic, overrides={"num_layers": 7})
    assert [attention(longer, i).window for i in range(7)] == [4, 0, 4, 0, 4, 0, 4]
    assert any("repeated to 7" in note for note in longer.assumptions)
    crooked = {**config, "layer_types": ["sliding_attention", *["full_attention"] * 3]}
    assert model_from_config(crooked, overrides={"num_layers": 2}).num_layers == 2
    with pytest.raises(InputError, match="lists 4 layers"):
        model_from_config(crooked, overrides={"num_layers": 7})


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_every_override_of_a_read_field_holds_or_is_refused(data: st.DataObject) -> None:
    """Any whole number for any field gives a model that lists the override, or an input error, never another error."""
    family = data.draw(st.sampled_from(sorted(randoms())))
    config = data.draw(st.sampled_from(randoms()[family]))["config"]
    field = data.draw(st.sampled_from(sorted(name for name in FIELDS if FIELDS[name].kind is int)))
    value = data.draw(st.one_of(st.integers(-2, 64), st.just(10**12)))
    try:
        model = model_from_config(config, overrides={field: value})
    except InputError as error:
        assert all(problem.field and problem.rule and problem.remedy for problem in error.problems)
    else:
        assert any(note.startswith(f"override: {field} = {value}") for note in model.assumptions)


@given(st.sampled_from(sorted(randoms())), st.integers(0, 19), st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_importing_is_a_function_of_the_configuration(family: str, index: int, seed: int) -> None:
    """The order of keys and keys without effect change nothing; equal files give equal models."""
    config = randoms()[family][index]["config"]
    items = list(config.items())
    shuffled = dict(items[seed % len(items) :] + items[: seed % len(items)])
    assert model_from_config(config) == model_from_config({**shuffled, "rope_theta": 5.0, "use_cache": True})
