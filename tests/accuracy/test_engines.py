"""Which engine runs a row, and what engines do at once where nobody says it."""

from __future__ import annotations

import pytest

from accuracy.published import Published
from shardwise.hardware import find_device
from shardwise.measured._engines import engine_of
from shardwise.measured._record import Record
from shardwise.serving import engine_names
from shardwise.serving.load import limits_of


@pytest.mark.parametrize(
    ("cells", "device", "name"),
    [
        ({"engine": "vllm", "engine_version": "0.2.1"}, "a100-sxm-80gb", "vllm-0.2"),
        ({"engine": "vllm", "engine_version": "0.6.1"}, "a100-sxm-80gb", "vllm-v0"),
        ({"engine": "vllm", "engine_version": "0.6.1"}, "mi300x", "vllm-rocm"),
        ({"engine": "vllm", "engine_version": "0.6.6"}, "mi300x", "vllm-v0"),
        ({"engine": "vllm", "engine_version": "0.11.0"}, "mi300x", "vllm"),
        ({"engine": "vllm", "engine_version": "0.11.0", "notes": "sampler=flashinfer"}, "h100-sxm-80gb",
         "vllm-flashinfer"),
        ({"engine": "vllm", "serving_mode": "static"}, "h100-sxm-80gb", "vllm-v0"),
        ({"engine": "vllm", "serving_mode": "memory_log"}, "h100-sxm-80gb", "vllm"),
        ({"engine": "vllm", "serving_mode": "static"}, "gb200", "vllm"),
        ({"engine": "vllm", "serving_mode": "static", "engine_version": "0.7.3"}, "gb200", "vllm-v0"),
        ({"engine": "trtllm", "serving_mode": "static"}, "h100-sxm-80gb", "tensorrt-llm-0.11"),
        ({"engine": "trtllm", "serving_mode": "static"}, "b200-sxm-180gb", "tensorrt-llm"),
        ({"engine": "trtllm", "engine_version": "0.10.0"}, "h100-sxm-80gb", "tensorrt-llm-0.9"),
        ({"engine": "trtllm", "engine_version": "0.20.0"}, "h100-sxm-80gb", "tensorrt-llm-0.12"),
        ({"engine": "trtllm", "engine_version": "1.2.0"}, "h100-sxm-80gb", "tensorrt-llm"),
    ],
)  # fmt: skip
def test_the_release_tells_the_engine(cells: dict[str, str], device: str, name: str) -> None:
    """A word and a release name an engine of the package, and so do fixed batches of no release, by their device."""
    assert engine_of(Published.engines, Record(cells), find_device(device).device) == name


def test_every_engine_has_limits() -> None:
    """Whatever the engine, some sequences run at once, and no step holds fewer tokens than it is cut to."""
    device = find_device("h100-sxm-80gb").device
    for name in engine_names():
        limits = limits_of(name, device)
        assert limits.sequences > 0
        assert limits.tokens(100_000) == limits.step_tokens


@pytest.mark.parametrize(("name", "tokens"), [("h200-sxm-141gb", 8192), ("a100-sxm-80gb", 2048), ("l40s", 2048)])
def test_large_devices_set_aside_memory_for_larger_steps(name: str, tokens: int) -> None:
    """From 70 GiB of memory vLLM profiles a larger step, but not on A100."""
    assert limits_of("vllm", find_device(name).device).step_tokens == tokens


@pytest.mark.parametrize(("length", "tokens"), [(1024, 2048), (16384, 16384), (65536, 2048)])
def test_prompts_ran_whole_before_v1(length: int, tokens: int) -> None:
    """Before V1 a step held a whole prompt, but of contexts of more than 32,768 tokens."""
    assert limits_of("vllm-v0", find_device("a100-sxm-80gb").device).tokens(length) == tokens
