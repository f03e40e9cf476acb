"""What ModelOpt writes into a file of its own, and layers or heads that checkpoints keep wide or narrow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.errors import InputError
from shardwise.models import catalogue, load_model, model_from_config
from shardwise.serving import find_format

LLAMA = catalogue()["llama-3.1-70b"]["config"]


def folder(path: Path, quantised: Any, config: dict[str, Any] = LLAMA) -> str:
    """A folder of a checkpoint with ModelOpt's own file."""
    (path / "config.json").write_text(json.dumps(config))
    (path / "hf_quant_config.json").write_text(json.dumps(quantised))
    return str(path)


def weights_bytes(model: sw.Model) -> float:
    """Bytes of the weights on one of two devices."""
    report = sw.infer(model, sw.Cluster.parse("2xh200"), sw.Plan(tp=2), sw.Serving(batch=1))
    return report.weights_bytes_per_gpu


def test_a_file_of_modelopt_beside_config_json_is_read(tmp_path: Path) -> None:
    """As nvidia/Llama-3.1-70B-Instruct-FP8 has it: half the bytes of its linear layers, as vLLM loads them."""
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    model = load_model(folder(tmp_path, said))
    assert model.quantization == "modelopt-fp8"
    assert 0.5 < weights_bytes(model) / weights_bytes(load_model("llama-3.1-70b")) < 0.53


def test_config_json_has_the_last_word_on_quantisation(tmp_path: Path) -> None:
    """Newer exports write both files: what config.json says counts."""
    config = {**LLAMA, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    assert (
        load_model(folder(tmp_path, {"quantization": {"quant_algo": "FP8"}}, config)).quantization == "modelopt-nvfp4"
    )


@pytest.mark.parametrize("content", [[], {}, {"quantization": "FP8"}])
def test_a_file_that_is_not_modelopts_is_a_problem(tmp_path: Path, content: Any) -> None:
    """It is named, and what it lacks."""
    with pytest.raises(InputError, match="has no object quantization"):
        load_model(folder(tmp_path, content))


def test_a_layer_of_experts_that_is_kept_whole_is_no_format() -> None:
    """Leading dense layers may be kept whole, as GLM-5.1 and Kimi-K2.6 in NVFP4 are; experts of one layer may not."""
    config = {key: value for key, value in catalogue()["kimi-k2"]["config"].items() if key != "quantization_config"}
    kept = ["lm_head", *(f"model.layers.{i}.self_attn*" for i in range(1, 61)), "model.layers.0*"]
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": kept}
    model = model_from_config({**config, "quantization_config": section})
    assert model.quantization == "modelopt-nvfp4+attention=bf16+feed-forward=bf16"
    section = {**section, "ignore": [*kept, "model.layers.7*"]}
    assert "layers=different" in model_from_config({**config, "quantization_config": section}).quantization


def test_a_head_that_is_named_is_narrow_and_stays_wide_otherwise() -> None:
    """Qwen3.6-27B in NVFP4 has a head of 248,320 x 5,120 in 4.5 bits."""
    wide, narrow = (_bytes_in(form) for form in ("nvfp4-w4a16", "nvfp4-w4a16+head=nvfp4-w4a16"))
    assert wide - narrow == pytest.approx(248320 * 5120 * (2 - 0.5625) / 2, rel=0.001)


def _bytes_in(form: str) -> float:
    model, job = sw.Model.load("qwen3.5-27b"), sw.Serving(batch=1, weights=form)
    return sw.infer(model, sw.Cluster.parse("2xh200"), sw.Plan(tp=2), job).weights_bytes_per_gpu


@pytest.mark.parametrize(("name", "width"), [("mxfp8", 8.25 / 8), ("w4a16_nvfp4", 0.5625)])
def test_formats_in_blocks_hold_their_scales(name: str, width: float) -> None:
    """MXFP8 has 8 bits of scale for 32 elements, NVFP4 8 for 16; only the first multiplies in 8 bits."""
    form = find_format(name)
    assert form.bytes == width and form.compute == ("fp8" if name == "mxfp8" else "")


def test_attention_that_is_narrow_in_its_output_alone_is_counted_so() -> None:
    """DeepSeek-V3.1-NVFP4 excludes q_a, q_b, kv_a and kv_b of every layer: o_proj takes 4.5 bits, not 16."""
    config = {key: value for key, value in catalogue()["deepseek-v3"]["config"].items() if key != "quantization_config"}
    kept = ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj", "q_b_proj")

    def stored(maps: tuple[str, ...]) -> sw.Model:
        names = ["lm_head", *(f"model.layers.{i}.self_attn.{name}" for i in range(61) for name in maps)]
        section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": [*names, "model.layers.61*"]}
        return model_from_config({**config, "quantization_config": section})

    own, whole = stored(kept), stored((*kept, "o_proj"))
    assert own.quantization == load_model("nvidia/DeepSeek-V3.1-NVFP4").quantization
    saved = 61 * 7168 * 16384 * (2 - 0.5625)
    assert 2 * (weights_bytes(whole) - weights_bytes(own)) == pytest.approx(saved, rel=1e-6)


@pytest.mark.parametrize("name", ["qwen3.5-27b", "qwen3.5-122b-a10b"])
def test_what_gptq_leaves_out_by_rules_stays_wide(name: str) -> None:
    """Qwen's own copies exclude attentions of both kinds, shared experts and predictions: a file and its name agree."""
    hub = catalogue()[name]["hub"][0]
    rules = {"lm_head": {}, **{f"-:.*{part}.*": {} for part in ("attn", "shared_expert", "mtp", "visual")}}
    section = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "dynamic": rules}
    model = model_from_config({**catalogue()[name]["config"], "quantization_config": section})
    assert model.quantization == load_model(f"{hub}-GPTQ-Int4").quantization
    plain = model_from_config(
        {**catalogue()[name]["config"], "quantization_config": {"quant_method": "gptq", "bits": 4}}
    )
    assert weights_bytes(model) > 1.1 * weights_bytes(plain)
