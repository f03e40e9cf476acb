"""Parameters of image towers and their projectors, which stand beside a language model in a file.

Only how many there are is known: an engine holds them beside the weights of the language model, whether or not a
request has images. Source: the model classes of transformers 5.23.0 named at each form, norms and biases counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class _Unknown(Exception):
    """A size that a file leaves to its class."""


class _Section:
    """The sizes of a part by their names in its section."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self.keys = keys

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a size by the first name that is there; a square's side where a pair is stated."""
        for name in names:
            value = self.keys.get(name)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        if default is None:
            raise _Unknown
        return default


def _linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + bias * outputs


def _merger(width: int, outputs: int, norm: int) -> int:
    """Patches that are joined, normed and mapped twice."""
    return norm + _linear(width, width) + _linear(width, outputs)


def _qwen2_5(v: _Section, text: int) -> int:
    """Qwen2_5_VisionTransformerPretrainedModel: RMSNorm, gated feed-forwards."""
    D, F = v.size("hidden_size"), v.size("intermediate_size")
    wide = D * v.size("spatial_merge_size", default=2) ** 2
    block = 2 * D + _linear(D, 3 * D) + _linear(D, D) + 2 * _linear(D, F) + _linear(F, D)
    return _patches(v, D) + v.size("depth") * block + _merger(wide, v.size("out_hidden_size", default=text), D)


def _qwen2(v: _Section, text: int) -> int:
    """Qwen2VisionTransformerPretrainedModel: LayerNorm, feed-forwards by a ratio; `hidden_size` is what it gives."""
    D, outputs = v.size("embed_dim"), v.size("hidden_size", default=text)
    F, wide = v.size("mlp_ratio", default=4) * D, D * v.size("spatial_merge_size", default=2) ** 2
    block = 4 * D + _linear(D, 3 * D) + _linear(D, D) + _linear(D, F) + _linear(F, D)
    return _patches(v, D) + v.size("depth") * block + _merger(wide, outputs, 2 * D)


def _glm4v(v: _Section, text: int) -> int:
    """Glm4vVisionModel: RMSNorm, no biases; patches are joined by a convolution, then pass a gated feed-forward."""
    D, F, outputs = v.size("hidden_size"), v.size("intermediate_size"), v.size("out_hidden_size", default=text)
    positions = (v.size("image_size") // v.size("patch_size", default=14)) ** 2
    block = 2 * D + 4 * D * D + 3 * D * outputs
    joined = D * v.size("spatial_merge_size", default=2) ** 2
    stem = _patches(v, D) + D + positions * D + 2 * D + _linear(joined, outputs)
    return stem + v.size("depth") * block + outputs * outputs + 2 * outputs + 3 * outputs * F


def _gemma4(v: _Section, text: int) -> int:
    """Gemma4VisionModel: norms of queries and keys, gated feed-forwards, positions by row and column."""
    D, F = v.size("hidden_size"), v.size("intermediate_size")
    heads, head = v.size("num_attention_heads"), v.size("head_dim")
    keys = v.size("num_key_value_heads", default=heads)
    block = 4 * D + 2 * head + 2 * D * head * (heads + keys) + 3 * D * F
    stem = 2 * v.size("position_embedding_size", default=10240) * D + 3 * v.size("patch_size", default=16) ** 2 * D
    return stem + v.size("num_hidden_layers") * block + D * text


def _qwen3(v: _Section, text: int) -> int:
    """Qwen3VLVisionModel: LayerNorm, learned positions, a merger for each layer of the text that is fed (deepstack)."""
    D, F = v.size("hidden_size"), v.size("intermediate_size")
    wide, outputs = D * v.size("spatial_merge_size", default=2) ** 2, v.size("out_hidden_size", default=text)
    block = 4 * D + _linear(D, 3 * D) + _linear(D, D) + _linear(D, F) + _linear(F, D)
    stem = _patches(v, D) + D + v.size("num_position_embeddings", default=2304) * D
    fed = v.keys.get("deepstack_visual_indexes") or ()
    mergers = _merger(wide, outputs, 2 * D) + len(fed) * _merger(wide, outputs, 2 * wide)
    return stem + v.size("depth") * block + mergers


def _patches(v: _Section, width: int) -> int:
    """A convolution over patches of two frames, without a bias."""
    inputs = v.size("in_channels", "in_chans", default=3) * v.size("temporal_patch_size", default=2)
    return inputs * v.size("patch_size", "spatial_patch_size") ** 2 * width


def _siglip(v: _Section, text: int) -> int:
    """Gemma3's SiglipVisionModel without its pooling head, a norm and a map into the text."""
    D, F = v.size("hidden_size"), v.size("intermediate_size")
    side = v.size("patch_size")
    tokens = (v.size("image_size") // side) ** 2
    block = 4 * D + 4 * _linear(D, D) + _linear(D, F) + _linear(F, D)
    stem = _linear(v.size("num_channels", default=3) * side**2, D) + tokens * D
    return stem + v.size("num_hidden_layers") * block + 2 * D + D * text + D


def _pixtral(v: _Section, text: int) -> int:
    """Mistral3's PixtralVisionModel: RMSNorm, no biases; four patches are merged, then mapped twice."""
    D, F = v.size("hidden_size"), v.size("intermediate_size")
    stem = v.size("num_channels", default=3) * v.size("patch_size") ** 2 * D + D
    projector = D + 4 * D * D + D * text + text * text
    return stem + v.size("num_hidden_layers") * (2 * D + 4 * D * D + 3 * D * F) + projector


def _llama4(v: _Section, text: int) -> int:
    """Llama4VisionModel with its adapter, and the projector behind it."""
    D, F = v.size("hidden_size"), v.size("intermediate_size")
    side = v.size("patch_size", default=14)
    tokens = (v.size("image_size") // side) ** 2 + 1
    block = 4 * D + 4 * _linear(D, D) + _linear(D, F) + _linear(F, D)
    stem = v.size("num_channels", default=3) * side**2 * D + D + tokens * D + 4 * D
    wide = v.size("projector_input_dim", default=4096)
    outputs = v.size("projector_output_dim", default=4096)
    adapter = F * wide + wide * outputs
    return stem + v.size("num_hidden_layers") * block + adapter + v.size("vision_output_dim", default=4096) * text


_FORMS: dict[str, Callable[[_Section, int], int]] = {
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen2_5,
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v,
    "glm46v": _glm4v,
    "gemma4": _gemma4,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "qwen3_5": _qwen3,
    "qwen3_5_moe": _qwen3,
    "gemma3": _siglip,
    "mistral3": _pixtral,
    "llama4": _llama4,
}


def tower_parameters(raw: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    """Return the parameters of the image tower of a file and of its projector, 0 where they are not known.

    A tower of sound beside it has no form, so that what both take is not known.

    >>> vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14}
    >>> file = {"model_type": "gemma3", "vision_config": vision | {"image_size": 896}}
    >>> tower_parameters(file, {"hidden_size": 2560})
    419816304
    """
    form, section = _FORMS.get(str(raw.get("model_type"))), raw.get("vision_config")
    if form is None or not isinstance(section, Mapping) or isinstance(raw.get("audio_config"), Mapping):
        return 0
    try:
        return form(_Section(section), _Section(text).size("hidden_size"))
    except _Unknown:
        return 0
