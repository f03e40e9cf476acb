"""What stands around the words of a launch: variables of its environment, and the image that it starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardwise.formats._imported import ReadArgument
from shardwise.records import replace

if TYPE_CHECKING:
    from shardwise.formats._launched import Launched

# vllm/envs.py and sglang/srt/distributed/utils.py: layers of every stage of a pipeline, as a variable.
_STAGES = re.compile(r"(?m)^[^#\n]*?\b((?:VLLM|SGLANG)_PP_LAYER_PARTITION)=[\"']?([0-9]{1,4}(?:,[0-9]{1,4})*)")
# Images that engines' own documents start, whose tags have their releases, and packages as pip is told them.
_IMAGES = {
    "vllm": r"(?:vllm/vllm-openai|rocm/vllm)[\w-]*",
    "sglang": r"lmsysorg/sglang[\w-]*",
    "trtllm": r"nvidia/tensorrt-llm/release",
}
_PACKAGES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt[-_]llm"}
_SYSTEMS = {"vLLM": "vllm", "SGLang": "sglang", "TensorRT-LLM": "trtllm"}
_RELEASE = r"v?(\d{1,2}\.\d{1,3}(?:\.\d{1,3})?(?:rc\d{1,3})?)(?!\d)"


def with_surroundings(one: Launched, text: str, variables: Mapping[str, str]) -> Launched:
    """Return a server with what its text, and the variables of its caller, say beside its words."""
    return with_image(_staged(one, text, variables), text)


def with_image(one: Launched, text: str) -> Launched:
    """Return a server with the release of its image, or of what its script installs, where one is stated."""
    return one if one.release else replace(one, release=release_of(_SYSTEMS.get(one.system, ""), text))


def release_of(engine: str, text: str) -> str:
    """Return the release of an engine that a text states, empty where it states none.

    Tags of ROCm's images name the engine before its release.

    >>> release_of("vllm", "docker run vllm/vllm-openai:v0.11.0"), release_of("vllm", "pip install vllm==0.9.2")
    ('0.11.0', '0.9.2')
    >>> release_of("vllm", "rocm/vllm:rocm6.3.1_vllm_0.8.5_20250513"), release_of("sglang", "lmsysorg/sglang:dev")
    ('0.8.5', '')
    """
    if engine not in _IMAGES:
        return ""
    image, package = _IMAGES[engine], _PACKAGES[engine]
    code = re.sub(r"(?m)(^|\s)#.*$", "", text)
    patterns = (
        rf"\b{image}:(?:[\w.-]{{0,80}}?{package}_)?{_RELEASE}",
        rf"(?<![\w/.-]){package}(?:\[[\w,-]{{1,80}}\])?=={_RELEASE}",
    )
    return next((match[1] for one in patterns if (match := re.search(one, code))), "")


def _staged(one: Launched, text: str, variables: Mapping[str, str]) -> Launched:
    """Return a server with the layers of its stages where a variable of its launch or of its caller says them."""
    values = {match[1]: match[2] for match in _STAGES.finditer(text)} | dict(variables)
    name = f"{one.system.upper()}_PP_LAYER_PARTITION"
    if one.values.get("pp", 1) == 1 or not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", values.get(name, "")):
        return one
    layers = tuple(int(word) for word in values[name].split(","))
    read = ReadArgument(argument=name, value=values[name], meaning="stage_layers")
    return replace(one, values={**one.values, "stage_layers": layers}, understood=(*one.understood, read))
