"""Messages of the communication report, against those that torch's dispatcher saw in whole training steps.

Recorded with a TorchDispatchMode over the fake process group of torch 2.13.0 and transformers 5.23.0: calls, and bytes
of the largest tensor of each call, on one rank and in one step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.hardware import Cluster
from shardwise.models import model_from_config
from shardwise.plans import Plan, Training
from shardwise.training import CommReport, Options, comm

DATA = json.loads((Path(__file__).parents[1] / "data/training/step_memory.json").read_text(encoding="utf-8"))
# (layers, world, sequence) -> collective -> (calls, bytes), one micro-batch of one sequence.
FSDP = [
    (2, 8, 4096, {"all_gather": (5, 1_011_912_704), "reduce_scatter": (3, 1_537_253_376)}),
    (16, 8, 4096, {"all_gather": (33, 4_417_916_928), "reduce_scatter": (17, 4_943_257_600)}),
]
TENSOR = [
    (2, 8, 4096, {"all_reduce": (14, 234_881_024)}),
    (16, 8, 4096, {"all_reduce": (112, 1_879_048_192)}),
    (2, 4, 2048, {"all_reduce": (14, 117_440_512)}),
]


def predicted(layers: int, seq_len: int, plan: Plan, options: tuple[str, str]) -> CommReport:
    """Return the report of Llama 3.2 1B with so many layers, one sequence on each replica."""
    model = model_from_config(DATA["configs"][f"llama3.2-1b-{layers}"], name="llama-3.2-1b")
    stack, precision = options
    job = Training(seq_len=seq_len, global_batch=plan.dp, precision=precision)
    cluster = Cluster.parse(f"{plan.num_devices}xa100-sxm-80gb")
    return comm(model, cluster, plan, job, Options(stack=stack))


def by_verb(found: CommReport, axis: str) -> dict[str, tuple[float, float]]:
    """Return calls and bytes of each collective of an axis on one rank."""
    seen: dict[str, Any] = {}
    for flow in found.on(axis, 0):
        calls, size = seen.get(flow.message.verb, (0, 0))
        seen[flow.message.verb] = calls + flow.per_step, size + flow.bytes_per_step
    return seen


@pytest.mark.parametrize(("layers", "world", "seq_len", "seen"), FSDP)
def test_fsdp_messages_are_those_recorded(layers: int, world: int, seq_len: int, seen: dict[str, Any]) -> None:
    """FSDP2, a unit a layer and the root: gathers in bf16 (the root once), gradients scattered in fp32."""
    plan = Plan(dp=world, micro_batch=1, sharding="fsdp")
    found = predicted(layers, seq_len, plan, ("fsdp2", "amp-bf16"))
    assert by_verb(found, "dp") == seen
    assert set(found.axes) == {"dp"}
    assert found.axes["dp"].messages_per_step == sum(calls for calls, _ in seen.values())
    assert found.axes["dp"].bytes_per_step == sum(size for _, size in seen.values())


@pytest.mark.parametrize(("layers", "world", "seq_len", "seen"), TENSOR)
def test_tensor_parallel_messages_are_those_recorded(
    layers: int, world: int, seq_len: int, seen: dict[str, Any]
) -> None:
    """DTensor's column and row plan: two all-reduces forward, five backward: q, k, v, gate and up reduce apart."""
    plan = Plan(tp=world, micro_batch=1, sequence_parallel=False)
    found = predicted(layers, seq_len, plan, ("transformers", "bf16-pure"))
    assert by_verb(found, "tp") == seen
    assert found.axes["tp"].messages_per_step == seen["all_reduce"][0]
    assert found.axes["tp"].bytes_per_step == seen["all_reduce"][1]
    assert {f.message.shape for f in found.on("tp", 0)} == {(1, seq_len, 2048)}
