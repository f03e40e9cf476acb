"""Claims about rows of whole latent-attention modules and of streaming kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from accuracy.files import read
from accuracy.kernels.modules import cached_share, module_of, operators, parts
from accuracy.kernels.streaming import cached_rate, memory_rate, streaming
from measured_rows import published as only
from shardwise.cost._kernels import DECODE_PARTS
from shardwise.hardware import find_device
from shardwise.measured._record import Record

MODULE = {
    "device": "b200-sxm-180gb", "engine": "trtllm", "engine_version": "1.3.0rc20", "op": "mla_context_module",
    "mla_dtype": "bf16", "kv_dtype": "bf16", "gemm_dtype": "bf16", "batch": "1", "query_tokens": "256",
    "prefix_tokens": "0", "num_heads": "16", "time_seconds": "1e-4",
}  # fmt: skip
STREAM = {
    "device": "h100-sxm-80gb", "engine": "vllm", "op": "quantize_bf16_to_fp8", "dtype": "fp8", "rows": "64",
    "bytes_total": "786432", "time_seconds": "2e-6",
}  # fmt: skip


def module(**changed: str) -> dict[str, float]:
    """Return the seconds of a module by operator."""
    row = {**MODULE, **changed}
    return parts(module_of(Record(row), find_device(row["device"]).device))


@pytest.mark.parametrize("engine", ["trtllm", "vllm", "sglang", ""])
@pytest.mark.parametrize("op", ["mla_context_module", "mla_generation_module"])
def test_a_module_is_predicted_for_every_engine(tmp_path: Path, engine: str, op: str) -> None:
    """Both phases have a prediction; an engine without modules of its own takes another's, and says so."""
    past = "4096" if op == "mla_generation_module" else "0"
    row = {**MODULE, "engine": engine, "op": op, "prefix_tokens": past, "query_tokens": "1" if past != "0" else "256"}
    found = only(tmp_path, row)
    assert found.status == "predicted", found.reason
    assert found.predicted > 1e-5
    assert any("modules of" in said for said in found.assumed) is (engine not in ("trtllm", "vllm"))


def test_the_operators_are_those_of_the_ledger() -> None:
    """A prompt expands keys and values, a decode step absorbs the up-projection; down-projections are one product."""
    device = find_device("b200-sxm-180gb").device
    prompt = {op.name: op for op in operators(module_of(Record(MODULE), device))}
    step = {**MODULE, "op": "mla_generation_module", "query_tokens": "1", "prefix_tokens": "64"}
    decode = {op.name: op for op in operators(module_of(Record(step), device))}
    assert prompt["down"].columns == 1536 + 512 + 64
    assert "kv_up" in prompt and "absorb" not in prompt
    assert "absorb" in decode and "kv_up" not in decode


@pytest.mark.parametrize(
    ("field", "small", "large"),
    [("num_heads", "4", "64"), ("batch", "2", "32"), ("query_tokens", "128", "4096")],
)
@pytest.mark.parametrize("engine", ["trtllm", "vllm"])
def test_more_work_takes_longer(engine: str, field: str, small: str, large: str) -> None:
    """Seconds of a module grow with heads, sequences and tokens."""
    assert sum(module(engine=engine, **{field: small}).values()) < sum(module(engine=engine, **{field: large}).values())


def test_a_prompt_of_one_token_is_a_decode_step_in_vllm() -> None:
    """VLLM counts a batch of single tokens as decodes, which absorb; TensorRT-LLM runs its prompt kernel."""
    assert "absorb" in module(engine="vllm", query_tokens="1")
    assert "absorb" not in module(engine="trtllm", query_tokens="1")


def test_norms_that_are_not_fused_cost_more() -> None:
    """VLLM's modules of devices that were measured step by step spend more on norms and rotation."""
    fused, steps = module(engine="vllm"), module(engine="vllm", device="b300")
    assert steps["q_norm"] > 2 * fused["q_norm"] and steps["rotary"] > 2 * fused["rotary"]


def test_a_small_module_is_read_from_the_last_cache() -> None:
    """What fits the last cache is read faster than memory; what is larger is not."""
    m = module_of(Record(MODULE), find_device("rtx-pro-6000-server").device)
    assert cached_share(m, 40e6) > 0.5
    assert cached_share(m, 400e6) == 0.0


def stream(**changed: str) -> float:
    """Return the seconds of a streaming kernel."""
    row = {**STREAM, **changed}
    return streaming(Record(row), find_device(row["device"]).device)


def test_a_kernel_that_runs_in_steps_moves_more() -> None:
    """SGLang's quantisation in four steps moves seven times the bytes of the fused one."""
    large = {"bytes_total": "3e9", "rows": "65536"}
    assert stream(engine="sglang", **large) > 6 * stream(engine="vllm", **large)


def test_a_kernel_is_served_by_the_last_cache_of_its_own_device() -> None:
    """Bytes that the 96 MB of L40S hold come from memory on L4, whose cache is half of that."""
    rates = {}
    for name in ("l4", "l40s"):
        device = find_device(name).device
        rates[name] = [cached_rate(device, walked) > 2 * memory_rate(device) for walked in (40e6, 80e6, 110e6)]
    assert rates == {"l4": [True, False, False], "l40s": [True, True, False]}


def test_few_long_rows_are_bound_by_their_cores() -> None:
    """One row of 64k values takes one core; TensorRT-LLM's kernel shares it out."""
    one = {"rows": "1", "bytes_total": str(3 * 65536)}
    assert stream(**one) > 2 * stream(engine="trtllm", **one)


@pytest.mark.parametrize(
    "name", ["a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb", "l40s", "mi300x", "v100-sxm-32gb"]
)
def test_the_cache_is_never_slower_than_memory(name: str) -> None:
    """Rates fall from that of the cache to that of memory as more is walked through."""
    device = find_device(name).device
    rates = [cached_rate(device, size) for size in (1e6, 30e6, 60e6, 1e8, 1e9)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(memory_rate(device))


@pytest.mark.parametrize("op", ["send_recv", "send"])
def test_messages_between_two_devices_are_predicted(tmp_path: Path, op: str) -> None:
    """Tables of point-to-point messages, in the names that sources use, never beat the links of a device."""
    row = {
        "device": "a100-sxm-80gb", "engine": "vidur", "op": op, "dtype": "fp16", "num_gpus": "2", "gpus_per_node": "2",
        "message_bytes": "268435456", "variant": "a100_dgx", "time_seconds": "1e-3",
    }  # fmt: skip
    found = only(tmp_path, row)
    assert found.status == "predicted", found.reason
    assert found.predicted > 268435456 / 300e9


@pytest.mark.parametrize("name", ["v100-sxm-32gb", "t4"])
def test_devices_without_bf16_run_attention_in_fp16(tmp_path: Path, name: str) -> None:
    """A device that has no bf16 rate has those of fp16."""
    row = {
        "device": name, "engine": "vllm", "attention_dtype": "fp16", "kv_dtype": "fp16", "batch": "8",
        "query_tokens": "1", "prefix_tokens": "1024", "num_heads": "32", "num_kv_heads": "8", "head_dim": "128",
        "sliding_window": "0", "time_seconds": "1e-4",
    }  # fmt: skip
    assert only(tmp_path, row).status == "predicted"


def test_products_that_a_table_calls_from_the_host_take_the_host(tmp_path: Path) -> None:
    """Short products of vLLM in fp8 blocks take the call's time whatever their size, long ones that of the kernel."""
    row = {
        "device": "h100-sxm-80gb", "engine": "vllm", "engine_version": "0.24.0", "dtype": "fp8_block", "m": "64",
        "n": "4096", "k": "4096", "time_seconds": "1e-4",
    }  # fmt: skip
    short, wider = only(tmp_path, row), only(tmp_path, {**row, "n": "6144"})
    assert short.predicted == wider.predicted
    assert any("called from the host" in said for said in short.assumed)
    assert only(tmp_path, {**row, "m": "32768"}).predicted > 5 * short.predicted
    assert only(tmp_path, {**row, "dtype": "fp8"}).predicted < short.predicted


def test_a_scale_of_a_whole_tensor_takes_its_rows_in_turn(tmp_path: Path) -> None:
    """Many narrow rows in fp8 take vLLM the time of their maxima, TensorRT-LLM not."""
    row = {
        "device": "h100-sxm-80gb", "engine": "vllm", "engine_version": "0.24.0", "dtype": "fp8", "m": "32768",
        "n": "64", "k": "128", "time_seconds": "1e-4",
    }  # fmt: skip
    found = only(tmp_path, row).predicted
    assert found > 32768 * 7e-9
    assert found > 5 * only(tmp_path, {**row, "engine": "trtllm"}).predicted


def test_costs_of_kernels_that_only_modules_have_name_parts_of_the_form() -> None:
    """Every cost that modules.toml states belongs to a part of attention over a cache."""
    own = read("kernels/modules.toml")["engines"]["vllm"]["own"]
    assert all(set(row["costs"]) <= set(DECODE_PARTS) for row in own.values())


@pytest.mark.parametrize("name", ["l40s", "rtx-pro-6000-server"])
def test_a_kernel_that_only_modules_have_grows_with_its_cache(name: str) -> None:
    """Longer contexts and larger batches take longer in vLLM's Triton kernel."""
    step = {"device": name, "engine": "vllm", "op": "mla_generation_module", "query_tokens": "1"}
    seconds = [module(**step, prefix_tokens=str(n), batch="16")["attention"] for n in (16, 512, 4096, 65536)]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]
    assert module(**step, prefix_tokens="512", batch="1")["attention"] < seconds[1]


def test_copies_of_small_weights_are_read_from_the_last_cache(tmp_path: Path) -> None:
    """Six copies of 8 MB lie in the last cache of L40S and are read faster than memory, six of 32 MB do not."""
    row = {
        "device": "l40s", "engine": "vllm", "engine_version": "0.24.0", "dtype": "bf16", "m": "1", "k": "4096",
        "time_seconds": "1e-4",
    }  # fmt: skip
    small, large = (only(tmp_path, {**row, "n": str(n)}).predicted for n in (1024, 4096))
    assert small < 2 * 4096 * 1024 / 864e9
    assert large > 2 * 4096 * 4096 / 864e9


@pytest.mark.parametrize("engine", ["vidur", "sglang"])
def test_attention_of_vidur_runs_the_kernels_of_its_library(tmp_path: Path, engine: str) -> None:
    """Vidur's rows take the kernels of SGLang, whose library on A100 is FlashInfer too, and say so."""
    row = {
        "device": "a100-sxm-80gb", "engine": engine, "engine_version": "", "attention_dtype": "bf16",
        "kv_dtype": "bf16", "batch": "8", "query_tokens": "1", "prefix_tokens": "1023", "num_heads": "32",
        "num_kv_heads": "8", "head_dim": "128", "sliding_window": "0", "time_seconds": "1e-4",
    }  # fmt: skip
    found = only(tmp_path, row)
    assert found.predicted == only(tmp_path, {**row, "engine": "sglang"}).predicted
    assert ("kernels of vidur: those of sglang" in found.assumed) == (engine == "vidur")
