"""Towers of images beside a language model: how many parameters they have, and where those count.

Counts are of transformers' classes on the meta device, tower and projector together (5.23.0; 5.24.0 of Qwen2-VL, GLM-4V
and Gemma 4).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serving.serving_cases import ask
from shardwise import count, load_model
from shardwise.models import catalogue, model_from_config
from shardwise.plans import Plan, Serving
from shardwise.serving import InferReport

GIB = 2**30
_TEXT = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
    "intermediate_size": 64, "vocab_size": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip
_QWEN = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN3 = _QWEN | {"num_position_embeddings": 2304, "patch_size": 16}
_LLAMA4 = {"projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 4096, "patch_size": 14}
_GEMMA4 = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
           "num_key_value_heads": 16, "head_dim": 72, "patch_size": 16, "position_embedding_size": 10240}  # fmt: skip
TOWERS: tuple[tuple[str, int, dict[str, Any], int], ...] = (
    ("qwen2_5_vl", 2048, _QWEN | {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "patch_size": 14,
     "out_hidden_size": 2048}, 668_684_288),
    ("qwen3_vl_moe", 2048, _QWEN3 | {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
     "out_hidden_size": 2048, "deepstack_visual_indexes": [8, 16, 24]}, 538_631_408),
    ("qwen3_vl", 2560, _QWEN3 | {"depth": 3, "hidden_size": 1024, "intermediate_size": 192, "out_hidden_size": 2560,
     "deepstack_visual_indexes": [0, 1]}, 99_551_296),
    ("qwen3_5", 4096, _QWEN3 | {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 3584},
     453_650_672),
    ("mistral3", 5120, {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 14},
     438_958_080),
    ("gemma3", 3840, {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_hidden_layers": 27,
     "patch_size": 14}, 421_290_864),
    ("llama4", 5120, _LLAMA4 | {"hidden_size": 1408, "image_size": 336, "intermediate_size": 5632,
     "num_hidden_layers": 34}, 871_932_416),
    ("qwen2_vl", 1536, _QWEN | {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "mlp_ratio": 4, "patch_size": 14},
     665_271_296),
    ("glm4v_moe", 4096, _QWEN | {"depth": 24, "hidden_size": 1536, "intermediate_size": 10944, "out_hidden_size": 4096,
     "image_size": 336, "patch_size": 14}, 858_681_856),
    ("gemma4", 5376, _GEMMA4, 575_741_232),
    ("qwen4_exp", 2560, _QWEN3 | {"depth": 3, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 2560,
     "deepstack_visual_indexes": []}, 83_182_960),
    ("mllama", 4096, {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_global_layers": 8,
     "image_size": 560, "patch_size": 14, "max_num_tiles": 4, "vision_output_dim": 7680}, 895_028_755),
    # A type without a form, and sizes that are left to the class.
    ("new_vl", 2048, {"hidden_size": 1152, "depth": 2}, 0),
    ("gemma3", 3840, {"hidden_size": 1152, "num_hidden_layers": 27}, 0),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "vision", "expected"), TOWERS, ids=lambda value: str(value)[:16])
def test_a_tower_in_a_file_is_counted_to_the_parameter(
    kind: str, text: int, vision: dict[str, Any], expected: int
) -> None:
    """Beside the language model, whose own count stays as it is."""
    config = {"model_type": kind, "text_config": _TEXT | {"hidden_size": text}, "vision_config": vision}
    assert model_from_config(config, part="text").tower_parameters == expected


def test_towers_of_the_catalogue_make_the_published_totals() -> None:
    """Language model and towers together are what the checkpoints have (safetensors totals on the hub)."""
    published = {"gemma-3-4b": 4_300_079_472, "gemma-3-12b": 12_187_325_040, "gemma-3-27b": 27_432_406_640,
                 "qwen3-vl-4b": 4_437_815_808, "qwen3-vl-8b": 8_767_123_696, "qwen3-vl-30b-a3b": 31_070_754_032,
                 "mistral-small-3.1-24b": 24_011_361_280, "llama-4-scout": 108_641_793_536,
                 "qwen2.5-vl-3b": 3_754_622_976, "qwen2.5-vl-7b": 8_292_166_656, "qwen2.5-vl-32b": 33_452_718_336,
                 "qwen2.5-vl-72b": 73_410_777_344, "qwen2-vl-2b": 2_208_985_600, "qwen2-vl-7b": 8_291_375_616,
                 "glm-4.5v": 107_710_933_120, "gemma-4-26b-a4b": 25_805_933_872, "gemma-4-31b": 31_273_088_876,
                 "ministral-3-3b": 3_849_090_048, "ministral-3-8b": 8_918_026_240}  # fmt: skip
    for name, total in published.items():
        model = load_model(name)
        assert model.tower_parameters == catalogue()[name]["towers"]
        assert count(model).parameters + model.tower_parameters == pytest.approx(total, rel=2e-4)


@pytest.mark.parametrize(
    ("name", "total", "unread"),
    [
        ("llama-3.2-11b-vision", 10_670_220_835, 0),
        ("qwen3.5-0.8b", 873_438_784, 0),
        ("qwen3.5-2b", 2_274_069_824, 0),
        # 35 scalars of layers, 928 bounds of clipped maps, and keys and values of 20 layers that read earlier ones.
        ("gemma-4-e2b", 5_123_178_979, 35 + 928 + 16 * (2 * 1536 * 256 + 256) + 4 * (2 * 1536 * 512 + 512)),
    ],
)
def test_small_models_with_their_towers_are_what_is_released(name: str, total: int, unread: int) -> None:
    """Language model, predictions of more tokens and towers, to the value (safetensors totals on the hub)."""
    counted = count(load_model(name))
    assert counted.parameters + counted.predictions + load_model(name).tower_parameters + unread == total


def test_a_tower_of_sound_is_counted_beside_that_of_images() -> None:
    """Gemma 4 E2B: Gemma4Model of transformers 5.24.0 without its language model."""
    vision = _GEMMA4 | {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "head_dim": 64}
    vision |= {"num_attention_heads": 12, "num_key_value_heads": 12}
    sound = {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "conv_kernel_size": 5}
    sound |= {"output_proj_dims": 1536, "subsampling_conv_channels": [128, 32]}
    text = _TEXT | {"hidden_size": 1536}
    config = {"model_type": "gemma4", "text_config": text, "vision_config": vision, "audio_config": sound}
    assert model_from_config(config, part="text").tower_parameters == 475_728_160


def test_a_tower_of_sound_without_its_sizes_leaves_both_unknown() -> None:
    """A file with both is not counted in part."""
    text = _TEXT | {"hidden_size": 1536}
    config = {"model_type": "gemma4", "text_config": text, "vision_config": _GEMMA4, "audio_config": {"hidden_size": 8}}
    assert model_from_config(config, part="text").tower_parameters == 0


def _memory(bare: bool, *asked: Any, **options: Any) -> InferReport:
    model = load_model("gemma-3-4b")
    return ask(replace(model, tower_parameters=0) if bare else model, *asked, **options)


@pytest.mark.parametrize(
    ("model", "tp", "weights", "cache"),
    [("gemma-3-27b", 1, 51.45, 19.53), ("gemma-3-12b", 1, 23.31, 47.72), ("mistral-small-3.1-24b", 1, 44.76, 28.19)],
)
def test_a_start_up_log_has_the_towers(model: str, tp: int, weights: float, cache: float) -> None:
    """VLLM 0.19.0 on H100 at 0.95 (github.com/llm-d-incubation/llm-d-planner, accuracy/results/v0.19.0), in GiB."""
    job = Serving(input_tokens=4096, output_tokens=4096, memory_fraction=0.95)
    memory = ask(model, job, Plan(tp=tp), engine="vllm-0.19").memory
    assert memory.weights / GIB == pytest.approx(weights, abs=0.65)
    assert memory.cache_budget / GIB == pytest.approx(cache, abs=0.8)


@pytest.mark.parametrize(
    ("engine", "plan", "job", "held"),
    [
        ("vllm", Plan(), Serving(), 1.0),
        ("vllm", Plan(tp=2), Serving(), 0.5),
        ("sglang", Plan(), Serving(weights="fp8"), 1.0),
        ("vllm", Plan(), Serving(language_model_only=True), 0.0),
        ("tensorrt-llm", Plan(tp=2), Serving(weights="fp8"), 0.5),
        ("tensorrt-llm", Plan(), Serving(language_model_only=True), 0.0),
        ("tensorrt-llm-0.12", Plan(), Serving(), 0.0),
        ("lmdeploy", Plan(), Serving(), 0.0),
        ("llama.cpp", Plan(), Serving(), 0.0),
    ],
)
def test_engines_hold_towers_in_sixteen_bits(engine: str, plan: Plan, job: Serving, held: float) -> None:
    """Split over the ranks of tensor parallelism, whatever the format of the language model's weights."""
    own, bare = (_memory(bare, job, plan, engine=engine).memory.weights for bare in (False, True))
    assert own - bare == pytest.approx(2 * 419_816_304 * held)


def test_the_first_stage_alone_has_the_towers() -> None:
    """Encoders run there (vllm/model_executor/models/interfaces.py, _mark_tower_model)."""
    own, bare = ([stage.weights for stage in _memory(bare, Serving(), Plan(pp=2)).on_devices] for bare in (False, True))
    assert [a - b for a, b in zip(own, bare, strict=True)] == pytest.approx([2 * 419_816_304, 0.0])
