"""What a pair of a query and a key costs beside its products, and rows gathered for experts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cost import Efficiencies, rates_of
from shardwise.cost._operators import head_share, kernel_seconds
from shardwise.cost._tiles import BandwidthShares, kind_of
from shardwise.hardware import find_device
from shardwise.models import load_model
from shardwise.ops.block import block_ops
from shardwise.ops.count import whole_layout


@given(st.floats(16, 512), st.floats(1, 400))
def test_narrow_heads_run_below_the_rate_of_wide_ones(dims: float, pair_dims: float) -> None:
    """Heads of 128 values or more have the whole rate; below, fewer values never run at a higher one."""
    share = head_share(dims, pair_dims)
    assert 0 < share <= 1
    assert share <= head_share(2 * dims, pair_dims)
    assert (share == 1) is (dims >= 128)


@pytest.mark.parametrize(("device", "share"), [("h100-sxm-80gb", 0.81), ("b200-sxm-180gb", 0.63)])
def test_heads_of_64_reach_the_measured_share(device: str, share: float) -> None:
    """In prompts without windows engines reach 0.75 to 0.83 of the rate on H100, 0.57 to 0.67 on B200."""
    rates = rates_of(find_device(device).device, "bf16", 0.0, Efficiencies())
    assert head_share(64.0, rates.pair_dims) == pytest.approx(share, abs=0.01)


def test_rows_gathered_for_experts_move_below_the_streaming_rate() -> None:
    """Dispatch and combine reach 0.69 of it on B200; what is bound to a kind of CPU kernel keeps its own."""
    y, model = whole_layout(1, 4096, stack="megatron"), load_model("qwen3-30b-a3b")
    ops = {op.name: op for op in block_ops(y, model.layers[0], model.hidden)}
    rates = rates_of(find_device("b200-sxm-180gb").device, "bf16", 0.0, Efficiencies())
    dispatch = ops["mlp.dispatch"]
    assert kind_of(dispatch) == "permute"
    started = kernel_seconds(rates, dispatch, "forward") - dispatch.kernels * rates.memory_start
    assert started == pytest.approx(dispatch.forward_bytes / (0.69 * rates.memory_bytes))
    assert BandwidthShares((("other", 0.5, 0.25),)).share("permute") == 0.5


def test_tokens_that_are_sent_once_are_gathered_once() -> None:
    """Kernels of DeepEP read tokens where they are: half of the passes over rows that all-to-all needs."""
    model = load_model("qwen3-30b-a3b")
    moved = [
        next(op.forward_bytes for op in block_ops(y, model.layers[0], model.hidden) if op.name == "mlp.dispatch")
        for y in (whole_layout(1, 4096, stack=name) for name in ("megatron", "megatron-deepep"))
    ]
    assert moved[0] == 2 * moved[1]


@pytest.mark.parametrize(("device", "terabytes"), [("b200-sxm-180gb", 2.6), ("h100-sxm-80gb", 2.2)])
def test_kernels_of_several_types_hold_on_instructions(device: str, terabytes: float) -> None:
    """Biases of experts, added one expert at a time, move about 9 bytes a clock and core, whatever the memory."""
    y, model = whole_layout(1, 4096, stack="megatron-bridge"), load_model("gpt-oss-120b")
    (bias,) = (op for op in block_ops(y, model.layers[0], model.hidden) if op.name == "mlp.experts.bias")
    rates = rates_of(find_device(device).device, "bf16", 0.0, Efficiencies())
    seconds = kernel_seconds(rates, bias, "forward") - bias.kernels * rates.memory_start
    assert bias.forward_bytes / seconds == pytest.approx(terabytes * 1e12, rel=0.02)


def test_rotary_embedding_in_steps_has_the_share_that_was_measured_of_it() -> None:
    """A table that has it measured it kernel by kernel (the CPU's); where none has it it runs as casts do."""
    measured = BandwidthShares((("rotary", 0.1, 0.2), ("eager", 0.5, 0.5)))
    assert (measured.share("rotary in steps"), measured.share("rotary in steps", backward=True)) == (0.1, 0.2)
    assert BandwidthShares((("eager", 0.5, 0.5), ("other", 0.9, 0.9))).share("rotary in steps") == 0.5
