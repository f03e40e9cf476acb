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
# The images that the engines' own documents start, whose tags are their releases.
_IMAGE = re.compile(r"\b(?:vllm/vllm-openai|lmsysorg/sglang|nvidia/tensorrt-llm/release):v?(\d+\.\d+(?:\.\d+)?)")


def with_surroundings(one: Launched, text: str, variables: Mapping[str, str]) -> Launched:
    """Return a server with what its text, and the variables of its caller, say beside its words."""
    return _released(_staged(one, text, variables), text)


def _staged(one: Launched, text: str, variables: Mapping[str, str]) -> Launched:
    """Return a server with the layers of its stages where a variable of its launch or of its caller says them."""
    values = {match[1]: match[2] for match in _STAGES.finditer(text)} | dict(variables)
    name = f"{one.system.upper()}_PP_LAYER_PARTITION"
    if one.values.get("pp", 1) == 1 or not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", values.get(name, "")):
        return one
    layers = tuple(int(word) for word in values[name].split(","))
    read = ReadArgument(argument=name, value=values[name], meaning="stage_layers")
    return replace(one, values={**one.values, "stage_layers": layers}, understood=(*one.understood, read))


def _released(one: Launched, text: str) -> Launched:
    """Return a server that says so where its image is of another release than the words and defaults that are read."""
    match = _IMAGE.search(text)
    if not match or match[1].split(".")[:2] == one.version.split(".")[:2]:
        return one
    read = f"words and defaults are read as those of {one.version}"
    note = f"the image is of {match[1]}: {read}; --engine names an engine of another release (shardwise stacks)"
    return replace(one, assumed=(*one.assumed, note))
