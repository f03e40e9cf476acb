"""Kernels that the host launches one by one: experts of a rank, and modules of Python."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Plan, Training, find_stack
from shardwise.training import TrainingOptions, train


def seconds(precision: str, stack: str = "megatron-bridge", micro_batch: int = 1, each: float | None = None) -> float:
    """Return seconds of a step of Qwen3-30B on eight B200, 16 experts a rank, with so many for a launch."""
    plan = Plan(ep=8, dp=0, micro_batch=micro_batch, sharding="distributed-optimizer")
    job = Training(seq_len=4096, global_batch=64, precision=precision)
    chosen = find_stack(stack)
    if each is not None:
        chosen = replace(chosen, narrow_expert_seconds=each)
    report = train(
        load_model("qwen3-30b-a3b"), Cluster.parse("8xb200-sxm-180gb"), plan, job, TrainingOptions(stack=chosen)
    )
    return report.step_seconds


def test_few_bits_gain_little_where_the_host_launches_each_expert() -> None:
    """With one sequence a micro-batch the host decides, and one graph of the whole step is much faster."""
    wide, launched, graph = seconds("bf16-grads16"), seconds("fp8-grads16"), seconds("fp8-grads16", each=0.0)
    assert graph < 0.8 * launched
    assert launched > 0.8 * wide


def test_long_kernels_hide_the_host() -> None:
    """Four sequences a micro-batch keep the device as long as the host needs: less is lost to launches."""
    lost = [seconds("fp8-grads16", micro_batch=n) - seconds("fp8-grads16", micro_batch=n, each=0.0) for n in (1, 4)]
    assert 0 <= lost[1] < 0.25 * lost[0]


@pytest.mark.parametrize("precision", ["bf16-grads16", "fp8-grads16"])
def test_a_slower_host_never_makes_a_step_shorter(precision: str) -> None:
    """Steps grow with the seconds of a launch in fewer than 16 bits, and do not know them in 16."""
    times = [seconds(precision, each=each) for each in (0.0, 2e-5, 1e-4)]
    assert times == sorted(times)
    assert (times[-1] > times[0]) is (precision == "fp8-grads16")


@pytest.mark.parametrize(("tokens", "bound"), [(64, True), (16384, False)])
def test_few_tokens_wait_for_the_modules_of_python(tokens: int, bound: bool) -> None:
    """A step of few tokens takes as long as the host needs to launch it; a long one hides the host."""
    job = Training(seq_len=tokens, global_batch=1, adapter="lora")
    model, cluster = load_model("llama-3.2-1b"), Cluster.parse("1xh100-sxm-80gb")
    stack = find_stack("transformers")
    slow, none = (
        train(
            model,
            cluster,
            Plan(dp=0, micro_batch=1),
            job,
            TrainingOptions(stack=replace(stack, module_launch_seconds=each)),
        )
        for each in (stack.module_launch_seconds, 0.0)
    )
    assert (slow.step_seconds > 1.2 * none.step_seconds) is bound
    assert bound or slow.step_seconds == pytest.approx(none.step_seconds, rel=0.01)
