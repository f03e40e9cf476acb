"""Writes the class defaults of the configuration classes of transformers: src/shardwise/models/class_defaults.json.

Beside them the classes of several parts (a language model with a vision tower, an encoder with a decoder): the keys of
their parts, and whether the class ties the embedding and the head where the file does not say.

Needs transformers (pinned below), no network. A default that moves when another size is changed is not a default but a
derivation (head_dim from hidden_size, per-layer lists from num_hidden_layers); those are left out, and the importer
derives them itself.

    python tests/oracles/make_class_defaults.py
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "num_key_value_heads")
PINNED = "5.23.0"
ROOT = pathlib.Path(__file__).parents[2]
_TYPES = """
afmoe apertus arcee bamba bert bitnet bloom codegen cohere cohere2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
distilbert dots1 ernie4_5 ernie4_5_moe exaone4 falcon falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3_text
gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj
granite granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jamba kimi_linear lfm2
lfm2_moe llama llama4_text longcat_flash mamba mamba2 mimo_v2_flash minimax_m2 ministral ministral3 mistral mistral4
mixtral mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma roberta rwkv seed_oss smollm3 solar_open stablelm
starcoder2 step3p5 xlm-roberta xlstm zamba2 dbrx qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text qwen3_vl_text
qwen3_vl_moe_text qwen3_omni_moe_text glm4v_text glm4v_moe_text paddleocr_vl_text mllama_text_model aria_text
ernie4_5_vl_moe_text hy_v3 minimax olmo_hybrid bailing_hybrid
modernbert clip_text_model siglip_text_model siglip2_text_model vit deit beit dinov2 dinov2_with_registers dinov3_vit
"""
TYPES = _TYPES.split()
sys.path.insert(0, str(ROOT / "src"))

from shardwise.models._fields import NO_EFFECT  # noqa: E402  (the package need not be installed here)


def scalars(config: object) -> dict[str, object]:
    """The scalar fields of a configuration that say something about sizes."""
    everything = json.loads(config.to_json_string(use_diff=False))  # type: ignore[attr-defined]
    return {
        key: value
        for key, value in everything.items()
        if isinstance(value, (int, float, str, type(None))) and key not in NO_EFFECT and not key.startswith("_")
    }


def defaults(model_type: str) -> dict[str, object]:
    """The scalar class defaults that do not move with another size."""
    config = AutoConfig.for_model(model_type)
    base, names = scalars(config), dict(getattr(config, "attribute_map", {}))
    moved: set[str] = set()
    for canonical in SIZES:
        key = names.get(canonical, canonical)
        value = base.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        try:
            other = scalars(AutoConfig.for_model(model_type, **{key: 2 * value}))
        except Exception:  # a class may refuse the pair; then nothing is learned about it
            continue
        moved |= {name for name, default in base.items() if other.get(name) != default and name != key}
    return {key: value for key, value in base.items() if key not in moved}


# Sections of one model, which are no parts of their own.
SECTIONS = {"attn_config", "ffn_config"}


def wrappers() -> dict[str, dict[str, object]]:
    """The parts of every class that has some, and whether it ties embedding and head: null where it does not say."""
    found: dict[str, dict[str, object]] = {}
    for model_type in sorted(CONFIG_MAPPING_NAMES):
        try:
            config = AutoConfig.for_model(model_type)
        except Exception:  # a class that cannot be made without arguments has no defaults to read
            continue
        parts = sorted(set(type(config).sub_configs) - SECTIONS)
        if parts:
            found[model_type] = {"parts": parts, "tied": getattr(config, "tie_word_embeddings", None)}
    return found


if __name__ == "__main__":
    if transformers.__version__ != PINNED:
        raise SystemExit(f"transformers {PINNED} is pinned, found {transformers.__version__}")
    lines = []
    for model_type in sorted(TYPES):
        lines.append(f"  {json.dumps(model_type)}: {json.dumps(defaults(model_type))}")
    head = json.dumps(f"class defaults of the configuration classes of transformers {PINNED}, read 2026-11-21")
    whole = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in wrappers().items()]
    text = f'{{\n "source": {head},\n "defaults": {{\n' + ",\n".join(lines) + "\n },\n"
    text += ' "wrappers": {\n' + ",\n".join(whole) + "\n }\n}\n"
    (ROOT / "src/shardwise/models/class_defaults.json").write_text(text)
