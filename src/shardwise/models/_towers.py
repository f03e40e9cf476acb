"""Parameters of towers of images and sound and their projectors, which stand beside a language model in a file.

Only how many there are is known: an engine holds them beside the weights of the language model, whether or not a
request has images. Source: the model classes of transformers 5.23.0 named at each form, norms and biases counted;
5.24.0 for the audio tower of Gemma 4 and for Llama 3.2 Vision.
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

    def pair(self, name: str) -> tuple[int, int]:
        """Return two sizes."""
        match self.keys.get(name):
            case [int(first), int(second)] if min(first, second) > 0:
                return first, second
            case _:
                raise _Unknown

    def entries(self, name: str, default: int) -> int:
        """Return the number of entries of a list."""
        value = self.keys.get(name)
        return len(value) if isinstance(value, list) else default


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


def _gemma4_audio(a: _Section, text: int) -> int:
    """Gemma4AudioModel: two convolutions, then conformers without biases, and a map into the text."""
    D, out = a.size("hidden_size"), a.size("output_proj_dims")
    first, second = a.pair("subsampling_conv_channels")
    stem = 9 * first + first + 9 * first * second + second + (first // 4) * second * D
    feed_forwards = 2 * (8 * D * D + 2 * D)
    attention = 5 * D * D + D // a.size("num_attention_heads", default=8) + 3 * D
    convolution = 3 * D * D + a.size("conv_kernel_size", default=5) * D + 2 * D
    layers = a.size("num_hidden_layers") * (feed_forwards + attention + convolution)
    return stem + layers + _linear(D, out) + out * text


def _mllama(v: _Section, text: int) -> int:
    """MllamaVisionModel: learned positions of patches, of tiles and of both together by the shape of an image."""
    D, F, tiles = v.size("hidden_size"), v.size("intermediate_size"), v.size("max_num_tiles", default=4)
    side, shapes = v.size("patch_size", default=14), 1 + v.entries("supported_aspect_ratios", 8)
    patches = (v.size("image_size") // side) ** 2 + 1
    positions = 3 + patches * D + shapes * tiles * patches * D + 2 * shapes * tiles * D
    stem = v.size("num_channels", default=3) * side**2 * D + D + positions + 4 * D
    block = 4 * D + 4 * D * D + _linear(D, F) + _linear(F, D)
    deep = v.size("num_global_layers", default=8)
    wide = v.size("vision_output_dim", default=(1 + v.entries("intermediate_layers_indices", 5)) * D)
    return stem + (v.size("num_hidden_layers") + deep) * block + 2 * deep + _linear(wide, text)


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
    "qwen4_exp": _qwen3,
    "gemma3": _siglip,
    "mistral3": _pixtral,
    "llama4": _llama4,
    "mllama": _mllama,
}
_AUDIO: dict[str, Callable[[_Section, int], int]] = {"gemma4": _gemma4_audio}


def tower_parameters(raw: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    """Return the parameters of the towers of a file and of their projectors, 0 where they are not known.

    A tower of sound without a form leaves what both take unknown.

    >>> vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14}
    >>> file = {"model_type": "gemma3", "vision_config": vision | {"image_size": 896}}
    >>> tower_parameters(file, {"hidden_size": 2560})
    419816304
    """
    family, images, sound = str(raw.get("model_type")), raw.get("vision_config"), raw.get("audio_config")
    forms = [(_FORMS.get(family), images), *([(_AUDIO.get(family), sound)] if isinstance(sound, Mapping) else [])]
    total = 0
    for form, section in forms:
        if form is None or not isinstance(section, Mapping):
            return 0
        try:
            total += form(_Section(section), _Section(text).size("hidden_size"))
        except _Unknown:
            return 0
    return total
