"""What a checkpoint's quantization_config says: the format of its experts or linear layers, and which parts differ.

Sources: huggingface.co/docs/transformers quantization, github.com/NVIDIA/Model-Optimizer hf_quant_config.json
(quant_algo, exclude_modules, quantized_layers), github.com/vllm-project/compressed-tensors (config_groups, ignore).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardwise.models._architecture import MLP, Architecture, Block, MoE
from shardwise.models._config import Config
from shardwise.models._mixers import Attention, CompressedAttention, LatentAttention

# The part of a model that a module's name belongs to, the first that is found; "" is wide in every format, or no part.
_NAMES = (
    (r"lm_head|output_layer", "head"),
    (r"vision|visual|audio|projector|merge|embed|norm|router|conv1d|correction_bias|eh_proj", ""),
    # Weights of the indexer's heads, a value a head of the indexer (zai-org/GLM-5-FP8 config.json, 2026).
    (r"indexers?[._](weights_)?proj|indexers_proj", ""),
    (r"(^|[._])gate\W*$", ""),
    # Steps and decays of delta attention, a value a head: Qwen3.5 keeps them wide (its config.json in FP8, 2026).
    (r"in_proj_(a|b|ba)\W*$", ""),
    (r"mtp|nextn", "mtp"),
    (r"latent", "latent"),
    (r"shared_expert", "shared"),
    (r"experts", "experts"),
    (r"linear_attn|mamba|ssm|mixer\W+(in|out)_proj", "recurrent"),
    (r"attn|attention|(q|k|v|o|qkv)_proj", "attention"),
    (r"mlp|ffn|feed_forward|(up|down|gate)_proj", "feed-forward"),
)
_LAYER = re.compile(r"layers\W{1,3}(\d{1,4})(?!\d)")
# All of a layer: model.layers.0*, as ModelOpt writes what it keeps.
_WHOLE = re.compile(r"layers\W{1,3}(\d{1,4})\W*$")
# One linear layer of several in a module, and those without which a module is not kept whole.
_LINEAR = re.compile(r"[._](\w{1,24})_proj\W*$")
_LAST = frozenset(("o", "out", "down"))
# The maps of an attention in front of its core, as its class names them; those of latents beside the last are smaller.
_IN_FRONT = tuple(map(frozenset, (("qkv",), ("q", "k", "v"), ("q", "kv_b"), ("q_b", "kv_b"))))
# linear_attn and self_attn alike, as Qwen's files in GPTQ have it.
_ATTENTION_OF_ANY_KIND = re.compile(r"(^|\W)attn\b")
# Sizes of groups that have a format of their own; another is read as 128.
_GROUPS = (32, 64)
# Families that call the mixers of all layers self_attn or attention, those that keep a state too.
_ATTENTIONS = ("kimi_linear", "bailing_hybrid", "bailing_moe_linear", "minimax")
_KEPT = ("ignore", "exclude", "exclude_modules", "modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")


def quantization_of(config: Config, model: Architecture) -> str:
    """Return how a checkpoint is quantised, such as fp8, awq-int4 or modelopt-nvfp4+attention=bf16; "" where it is not.

    A part that is so in some layers says in how many; one that differs otherwise is "different", which no format is.
    """
    # Files of MLX call the section quantization, at first that alone (mlx_lm 0.32.2 utils.py, save_config).
    mlx = isinstance(config.raw.get("quantization"), Mapping)
    config.accept("quantization_config", *(("quantization",) if mlx else ()))
    if config.raw.get("quantization_config") is None and not mlx:
        return ""
    section = config.section("quantization" if mlx else "quantization_config")
    method = section.text("quant_method", default="mlx" if mlx else "")
    # EXL2 and EXL3 state a mean, such as 4.25, of which no format has a name.
    bits = 0 if isinstance(section.raw.get("bits"), float) else section.count("bits")
    algo, groups = section.text("quant_algo").lower(), section.raw.get("config_groups")
    names = [name for key in _KEPT if key in section.raw for name in section.words(key)]
    formats = dict.fromkeys(names, "bf16")
    layers, own, unnamed = section.raw.get("quantized_layers"), f"int{bits}" if bits else _own_bits(section), ""
    if isinstance(extra := section.raw.get("extra_config"), Mapping):
        formats |= _by_bits(extra)
    if isinstance(rules := section.raw.get("dynamic"), Mapping):
        formats |= _by_rules(rules, own)
    if isinstance(layers, Mapping):
        formats |= {str(name): _algo(scheme) for name, scheme in layers.items()}
        own, unnamed = _of_experts(formats), "bf16"
    elif algo:
        own = algo
    elif isinstance(groups, Mapping):
        own, targets = _grouped(groups)
        formats |= targets
    if model.has_experts and "fp4" in (config.text("expert_dtype"), section.text("expert_dtype")):
        return _narrow_experts(model, section.text("moe_quant_algo").lower() or "mxfp4")
    wide = _parts(formats, model, own, unnamed)
    size = section.raw.get("group_size")
    group = f"-g{size}" if own == "int4" and not mlx and size in _GROUPS else ""
    return "-".join(filter(None, (method, own))) + group + wide + (_linear(model, own, wide) if own == "mxfp4" else "")


def _own_bits(section: Config) -> str:
    """The format of methods that name it otherwise: a switch of bitsandbytes, or Quark's type of all weights.

    8 bits without blocks have one scale a tensor, as scales of inputs that are known beforehand are.

    Sources: transformers 5.24.0 utils/quantization_config.py, BitsAndBytesConfig; quark.docs.amd.com, Config;
    github.com/vllm-project/vllm v0.33.0 vllm/model_executor/layers/quantization/fp8.py, Fp8Config.
    """
    if section.flag("load_in_8bit"):
        return "int8"
    if section.text("quant_method") == "torchao":
        return _of_torchao(section.raw.get("quant_type"))
    blocks = section.raw.get("weight_block_size", section.raw.get("activation_scheme") != "static")
    if section.text("quant_method") == "fp8" and not blocks:
        return "tensor"
    everywhere = section.raw.get("global_quant_config")
    weight = everywhere.get("weight") if isinstance(everywhere, Mapping) else None
    word = str(weight.get("dtype")) if isinstance(weight, Mapping) else ""
    if isinstance(layers := section.raw.get("layer_quant_config"), Mapping) and layers:
        return "different"
    return {"fp4": "mxfp4", "fp8_e4m3": "fp8", "int8": "int8", "int4": "int4"}.get(word, "")


# Configurations of torchao 0.18.0 (quantization/quant_api.py) whose weights have a format here.
_TORCHAO = {
    "Int4WeightOnlyConfig": "int4",
    "Int8WeightOnlyConfig": "int8",
    "Int8DynamicActivationInt8WeightConfig": "int8-w8a8",
    "Float8WeightOnlyConfig": "fp8",
    "Float8DynamicActivationFloat8WeightConfig": "fp8",
}


def _of_torchao(stated: Any) -> str:
    """Return the format of a configuration for all linear layers, "" for those that differ by module or are others.

    Source: github.com/vllm-project/vllm v0.33.0 vllm/model_executor/layers/quantization/torchao.py, from_config.
    """
    one = stated.get("default") if isinstance(stated, Mapping) and len(stated) == 1 else None
    own = _TORCHAO.get(str(one.get("_type")), "") if isinstance(one, Mapping) else ""
    data = one.get("_data") if isinstance(one, Mapping) else None
    size = data.get("group_size") if isinstance(data, Mapping) else None
    return f"{own}-g{size}" if own == "int4" and size in _GROUPS else own


def _by_bits(layers: Mapping[str, Any]) -> dict[str, str]:
    """Return the format of each layer that AutoRound quantises otherwise (its extra_config), by bits."""
    bits = {name: one.get("bits") for name, one in layers.items() if isinstance(one, Mapping)}
    return {str(name): "bf16" if one == 16 else f"int{one}" for name, one in bits.items()}


def _by_rules(rules: Mapping[str, Any], own: str) -> dict[str, str]:
    """Return the format of each module that GPTQModel quantises otherwise or, behind "-:", not at all (its dynamic).

    Expressions over numbers of layers are none of a part's. An entry that states no bits changes none.

    Source: github.com/vllm-project/vllm v0.33.0 vllm/model_executor/layers/quantization/utils/gptq_utils.py,
    get_dynamic_override.
    """
    formats = {}
    for rule, stated in rules.items():
        name, bits = str(rule).removeprefix("-:").removeprefix("+:"), _bits_of(stated)
        form = "bf16" if str(rule).startswith("-:") else f"int{bits}" if bits else own
        if form != own:
            formats["layers.0.some" if re.search(r"\d", name) else name] = form
    return formats


def _bits_of(stated: Any) -> int:
    bits = stated.get("bits") if isinstance(stated, Mapping) else None
    return bits if type(bits) is int else 0


def _narrow_experts(model: Architecture, own: str) -> str:
    """Return the format of DeepSeek-V4: experts in FP4 in blocks of 32, other linear layers in FP8 in blocks of 128.

    Tables of n-grams are in FP8 with a scale of 8 bits for 32 (DeepSeek-V4.1). ModelOpt's copies have experts of their
    own algorithm (moe_quant_algo NVFP4) over the rest as it was.

    Sources: deepseek-ai/DeepSeek-V4-Flash config.json and inference/model.py (expert_dtype);
    nvidia/DeepSeek-V4-Flash-NVFP4 config.json; transformers' main branch of 2026-09 models/deepseek_v41,
    DeepseekV41EngramEmbedding.
    """
    tables = "+tables=mxfp8" if model.extra_embedding else ""
    return own + "".join(f"+{part}=fp8-block" for part in _layers(model) if part != "mtp") + tables


def _linear(model: Architecture, own: str, stated: str) -> str:
    """The parts that a format meant for experts alone has too, where all linear layers are in it."""
    return "".join(f"+{part}={own}" for part in _layers(model) if part != "mtp" and f"+{part}=" not in stated)


def _algo(algorithm: Any) -> str:
    """Return the format of a layer that ModelOpt lists."""
    word = algorithm.get("quant_algo") if isinstance(algorithm, Mapping) else algorithm
    return str(word).lower()[:24]


def _of_experts(formats: Mapping[str, str]) -> str:
    """Return the format of the experts among named modules, of feed-forwards where there are none, or of the first."""
    named = [(_part(name, 0), form) for name, form in formats.items()]
    own = [form for kind in ("experts", "feed-forward") for part, form in named if part == kind]
    return next(iter((*own, *formats.values())), "")


def _grouped(groups: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the format of the group that holds all linear layers or the experts, and those of the others' targets."""
    formats: dict[str, str] = {}
    for group in groups.values():
        targets = group.get("targets") if isinstance(group, Mapping) else None
        if isinstance(targets, list):
            formats |= dict.fromkeys((str(name) for name in targets), _scheme(group))
    own = formats.get("Linear") or _of_experts(formats)
    return own, {name: form for name, form in formats.items() if name != "Linear" and form != own}


def _scheme(group: Mapping[str, Any]) -> str:
    """Return the format of a group of compressed-tensors."""
    weights, inputs = (group.get(key) for key in ("weights", "input_activations"))
    weight_scheme = weights if isinstance(weights, Mapping) else {}
    bits, kind = weight_scheme.get("num_bits"), weight_scheme.get("type")
    size = weight_scheme.get("group_size")
    if kind == "float" and bits == 4:
        # Without inputs of 4 bits the weights are widened (vllm v0.33.0 compressed_tensors.py, _is_fp4a16_nvfp4).
        wide = "input_activations" in group and inputs is None
        return "mxfp4" if size != 16 else "nvfp4-w4a16" if wide else "nvfp4"
    if kind == "float":
        return "mxfp8" if size == 32 else "fp8-block" if weight_scheme.get("strategy") == "block" else "fp8"
    grouped = f"-g{size}" if bits == 4 and size in _GROUPS else ""
    return f"int{bits}" + ("-w8a8" if bits == 8 and inputs else grouped)


def _part(name: str, layers: int) -> str:
    """Return the part that a module belongs to, "" for one that is wide in every format."""
    index, named = _LAYER.search(name), next((part for pattern, part in _NAMES if re.search(pattern, name[:200])), "?")
    return "mtp" if named and layers and index and int(index[1]) >= layers else named


def _any_attention(name: str, layers: int) -> str:
    """Return the part of a name that means attentions of every kind (.*attn.*), "" for others."""
    return _part(name, layers) if _ATTENTION_OF_ANY_KIND.search(name) else ""


def _parts(formats: Mapping[str, str], model: Architecture, own: str, unnamed: str) -> str:
    """Return the parts with a format of their own as formats are written; `unnamed` is that of modules not named."""
    layers, parts = _layers(model), []
    number, experts = len(model.layers), {i for i, block in enumerate(model.layers) if block.experts is not None}
    rest = {name: form for name, form in formats.items() if _LAYER.search(name) and _part(name, number) == "?"}
    whole = {int(layer[1]): form for name, form in rest.items() if (layer := _WHOLE.search(name))}
    if any(not _WHOLE.search(name) for name in rest) or any(i in experts and f != own for i, f in whole.items()):
        parts.append("+layers=different")
    for part, indices in layers.items():
        named = {name: form for name, form in formats.items() if _part(name, number) == part}
        named |= {f"layers.{i}": form for i, form in whole.items() if i in indices}
        if part == "recurrent":
            alike = _part if model.family in _ATTENTIONS else _any_attention
            named |= {name: form for name, form in formats.items() if alike(name, number) == "attention"}
        if not named and unnamed and part != "mtp":
            parts.append(f"+{part}={unnamed}")
        others = set(named.values()) - {own}
        if part == "attention" and len(others) == 1 and _all_but_out(named, own, indices):
            parts.append(f"+attention={others.pop()}+attention-out=own")
        if part == "attention" and len(others) == 1 and _out_alone(named, own, indices):
            parts.append(f"+attention-out={others.pop()}")
        if others:
            named_layers = len(_layers_named((name for name, form in named.items() if form != own), indices))
            of = "" if named_layers == len(indices) else f"*{named_layers}/{len(indices)}"
            parts.append(
                f"+{part}={others.pop()}{of}" if len(others) == 1 and (named_layers or not of) else f"+{part}=different"
            )
    head = {form for name, form in formats.items() if _part(name, number) == "head"} - {"bf16"}
    return "".join(parts) + "".join(f"+head={form}" for form in head)


def _layers_named(names: Iterable[str], indices: frozenset[int]) -> frozenset[int]:
    """Return the layers of a part that named modules are, by their last linear layer or as a whole."""
    layers: set[int] = set()
    for name in names:
        layer, linear = _LAYER.search(name), _LINEAR.search(name)
        if linear is None or linear[1] in _LAST:
            layers |= {int(layer[1])} if layer else indices
    return indices & layers


def _all_but_out(formats: Mapping[str, str], own: str, indices: frozenset[int]) -> bool:
    """Return whether all attentions have another format but for their output projections (DeepSeek-V3.1-NVFP4)."""
    maps: dict[int, set[str]] = {i: set() for i in indices}
    for name in (name for name, form in formats.items() if form != own and "indexer" not in name):
        layer, linear = _LAYER.search(name), _LINEAR.search(name.replace("_with_mqa", ""))
        if linear is None or linear[1] in _LAST:
            return False
        for i in indices & {int(layer[1])} if layer else indices:
            maps[i].add(linear[1])
    return all(any(maps[i] >= front for front in _IN_FRONT) for i in indices)


def _out_alone(formats: Mapping[str, str], own: str, indices: frozenset[int]) -> bool:
    """Return whether of all attentions the output projections alone have another format (MiMo-V2.5-Pro)."""
    others = [name for name, form in formats.items() if form != own]
    linear = [_LINEAR.search(name) for name in others]
    return all(one and one[1] == "o" for one in linear) and _layers_named(others, indices) == indices


def _layers(model: Architecture) -> dict[str, frozenset[int]]:
    """Return the layers that have each part beside the experts, where some have it."""
    attends = (Attention, LatentAttention, CompressedAttention)
    tests: dict[str, Callable[[Block], bool]] = {
        "attention": lambda block: any(isinstance(m, attends) for m in block.mixers),
        "recurrent": lambda block: any(not isinstance(m, attends) for m in block.mixers),
        "feed-forward": lambda block: isinstance(block.feed_forward, MLP),
        "shared": lambda block: isinstance(block.feed_forward, MoE) and block.feed_forward.shared is not None,
        "latent": lambda block: isinstance(block.feed_forward, MoE) and bool(block.feed_forward.latent),
    }
    layers = {part: frozenset(i for i, block in enumerate(model.layers) if test(block)) for part, test in tests.items()}
    return {part: indices for part, indices in layers.items() if indices} | ({"mtp": frozenset()} if model.mtp else {})
