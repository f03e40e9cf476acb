"""What a training pass gives out beside its loss, and how long a loop holds it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.plans import Plan, Training, find_stack
from shardwise.training import TrainingOptions, train

LLAMA = Model.load("llama-2-7b")
TOKENS = 4 * 2048
LOGITS, CACHE = 4 * TOKENS * 32000, 2 * TOKENS * 2 * 4096 * 32
"""Bytes of fp32 logits, and of keys and values of 32 layers in 16 bits."""


def moments(answer: str, recompute: str = "full", loss: str = "eager-shifted") -> dict[str, float]:
    """Return the moments of Llama-2-7B with LoRA under FSDP1 on four devices, four sequences of 2048 tokens each."""
    stack = replace(find_stack("fsdp-2024"), answer=answer, loss=loss, attention="eager")
    plan = Plan(sharding="fsdp", recompute=recompute, micro_batch=4, dp=4)  # type: ignore[arg-type]
    job = Training(seq_len=2048, global_batch=16, adapter="lora", rank=8, targets=("q", "v"), dropout=True)
    report = train(LLAMA, Cluster.parse("4xa100-sxm-40gb"), plan, job, TrainingOptions(stack=stack))
    (stage,) = report.evaluation.memory
    return {name: float(held) for name, held in stage.moments.items()}


@pytest.mark.parametrize(
    ("answer", "recompute", "more"),
    [
        ("logits", "full", {"forward": LOGITS, "backward": LOGITS, "optimizer step": LOGITS}),
        ("cache", "full", {"forward": CACHE, "loss": CACHE}),
        ("cache", "none", {}),
        ("held", "full", {"forward": LOGITS + 2 * CACHE, "loss": 2 * CACHE, "backward": LOGITS + CACHE,
                          "optimizer step": LOGITS + CACHE}),
        ("held", "none", {"forward": LOGITS + CACHE, "loss": CACHE, "backward": LOGITS,
                          "optimizer step": LOGITS + CACHE}),
    ],
)  # fmt: skip
def test_an_answer_lasts_until_the_next(answer: str, recompute: str, more: dict[str, float]) -> None:
    """Keys and values of the last pass are beside those of the next, which layers that do not run again save anyway."""
    none, held = moments("", recompute), moments(answer, recompute)
    seen = {name: held[name] - none[name] for name in ("forward", "loss", "backward", "optimizer step")}
    assert {name: size for name, size in seen.items() if size} == pytest.approx(more)


def test_a_loop_that_holds_the_loss_alone_holds_less() -> None:
    """Llama's recipes went from 20.20 to 15.22 GiB as they let the answer go."""
    # github.com/meta-llama/llama-cookbook pull 41 (2023-07-25): peaks of four A100 with transformers 4.31.
    held, alone = moments("held"), moments("cache", loss="eager-copied")
    assert max(held.values()) - max(alone.values()) == pytest.approx(21689584844 - 16342350561, rel=2e-3)


def test_frameworks_say_what_their_loops_hold() -> None:
    """FSDP1's loops hold logits through backward; few others do, and none keys and values unless a row says so."""
    assert find_stack("fsdp-2024").answer == "logits"
    assert not any(find_stack(name).answer for name in ("transformers", "megatron", "fsdp2", "deepspeed"))
