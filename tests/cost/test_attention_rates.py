"""Rates of attention in training: what kernels reach on devices, against tables of kernels that print them."""

from __future__ import annotations

import pytest

from shardwise.cost import Efficiencies, rates_of
from shardwise.cost._tables import constants
from shardwise.cost._tiles import blocked_flops
from shardwise.hardware import find_device
from shardwise.plans import find_stack, stack_names


@pytest.mark.parametrize(
    ("device", "keys", "forward", "backward"),
    [("b200-sxm-180gb", 131072, 428, 356), ("gb200", 131072, 444, 363), ("gb300", 8192, 418, 343),
     ("gb300", 131072, 448, 369)],
)  # fmt: skip
def test_flash_attention_2_runs_old_instructions_on_blackwell(
    device: str, keys: int, forward: float, backward: float
) -> None:
    """TFLOP/s of FlashAttention-2 over long causal sequences, as cuDNN's own tables beside it have it."""
    rates = rates_of(find_device(device).device, "bf16", 0.0, Efficiencies(), ("flash-2", "", ""))
    charged = blocked_flops(rates.attention_blocks, 1.0, (keys, (keys + 1) / 2), False)
    assert rates.attention_forward_flops / charged / 1e12 == pytest.approx(forward, rel=0.08)
    assert rates.attention_backward_flops / charged / 1e12 == pytest.approx(backward, rel=0.08)


@pytest.mark.parametrize("stack", stack_names())
def test_every_attention_kernel_of_a_stack_is_known_where_it_differs(stack: str) -> None:
    """A kernel that a stack names has rates of its own on Hopper and Blackwell, else the best one's are taken."""
    kernel = find_stack(stack).attention_kernel
    for family in ("hopper", "blackwell") if kernel and kernel != "flash-1" else ():
        assert kernel in constants().families[family].attention.kernels, (kernel, family)


def test_h20_reaches_nearly_all_of_its_peak() -> None:
    """Products and attention of a device with a seventh of H100's arithmetic wait neither for loads nor for power."""
    h20 = find_device("h20").device
    for dtype, low in (("bf16", 0.94), ("fp8", 0.87)):
        rates = rates_of(h20, dtype, 0.0, Efficiencies(), ("", "", "cuda-12.8"), node_busy=True)
        assert low < rates.matmul_flops / h20.peak_flops(dtype) < 0.96, dtype
    for kernel, reached in (("", 108e12), ("flash-2", 71e12)):
        rates = rates_of(h20, "bf16", 0.0, Efficiencies(), (kernel, "", ""))
        charged = blocked_flops(rates.attention_blocks, 1.0, (2048, 1024.5), False)
        assert rates.attention_forward_flops / charged == pytest.approx(reached, rel=0.2)
