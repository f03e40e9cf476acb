"""What the names of quantised copies say: the model that is copied, and how its weights are stored."""

from __future__ import annotations

import os
import re
import tomllib
from functools import cache

# What names of quantised copies end with, and the weight format that the first of these in an ending means.
_ENDING = re.compile(
    r"(?i)([-_.](fp8|nvfp4|fp4|mxfp4|mxfp8|awq|gptq|int4|int8|w4a16|w8a8|bnb|4bit|8bit|kv|dynamic|block|quantized|gguf"
    r"|unsloth|mlx|autoround|preview|q[2-8]_[k\d](_[sml])?|qat|v2|w8a16|nvfp4a16|q4|q8|tensorwise|hqq))+$"
)
_STORED = (
    ("gguf", "q4_k_m"), ("bnb.*8bit", "int8-w8a8"), ("bnb", "nf4"), ("w8a8", "int8-w8a8"),
    ("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("nvfp4a16", "nvfp4-w4a16"), ("fp4", "nvfp4"), ("fp8", "fp8"),
    ("int8|8bit|w8a16", "int8"), ("awq|gptq|w4a16|int4|4bit|autoround", "int4"),
)  # fmt: skip


def split_copy(name: str) -> tuple[str, str]:
    """Return a name without what says that it is a quantised copy, and the weight format that this means; "" for none.

    >>> split_copy("Qwen2.5-72B-Instruct-GPTQ-Int8"), split_copy("Qwen2.5-72B")
    (('Qwen2.5-72B-Instruct', 'int8'), ('Qwen2.5-72B', ''))
    """
    ending = _ENDING.search(name)
    if ending is None:
        return name, ""
    words = ending[0].lower()
    mixture = re.search(r"q[3-5]_k_[sm]|q6_k|q[48]_0", words)
    stored = mixture[0] if mixture else next((form for pattern, form in _STORED if re.search(pattern, words)), "")
    return name[: ending.start()], stored


def stored_by(hub: str) -> str:
    """Return how a copy on the hub stores its weights, in the words of a checkpoint's own file; "" where unknown.

    >>> stored_by("Qwen/Qwen3-32B-FP8"), stored_by("nvidia/Kimi-K2.5-NVFP4"), stored_by("someone/Qwen3-32B-FP8")
    ('fp8', 'modelopt-nvfp4+attention=bf16', '')
    """
    name = hub.lower()
    return next((stored for pattern, stored in _known() if pattern.fullmatch(name)), "")


@cache
def _known() -> tuple[tuple[re.Pattern[str], str], ...]:
    with open(os.path.join(os.path.dirname(__file__), "catalogue", "copies.toml"), "rb") as file:
        entries = tomllib.load(file)["copies"]
    return tuple((re.compile(name), entry["stored"]) for entry in entries for name in entry["names"])
