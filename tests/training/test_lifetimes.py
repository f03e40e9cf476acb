"""What a stage holds over a step: its highest point is the reported peak, and pictures and files are made of it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.answers._trace import snapshot_tree, trace_tree
from shardwise.training._lifetimes import levels, lifetimes

CASES = (
    (sw.Plan(pp=4, dp=2, micro_batch=1), 16),
    (sw.Plan(pp=4, vpp=2, schedule="interleaved", dp=2, micro_batch=1, recompute="full"), 16),
    (sw.Plan(pp=4, dp=2, micro_batch=1, schedule="zb-h1"), 16),
    (sw.Plan(dp=8, sharding="fsdp"), 16),
    (sw.Plan(tp=8, recompute="full"), 4),
    (sw.Plan(pp=4, dp=2, micro_batch=1, schedule="dualpipe"), 32),
)


@pytest.mark.parametrize(("plan", "batch"), CASES)
def test_the_highest_point_of_a_step_is_the_reported_peak(plan: sw.Plan, batch: int) -> None:
    """On every stage the blocks add up to the peak of its moments somewhere, and nowhere to more."""
    job = sw.Training(seq_len=2048, global_batch=batch)
    report = sw.train(sw.load_model("llama-3.1-8b"), sw.Cluster.parse("8xh100"), plan, job)
    timeline = report.timeline()
    first = 0
    for run, memory in zip(report.evaluation.stages, report.evaluation.memory, strict=True):
        times, held = levels(lifetimes(report, timeline, first))
        whole = [sum(parts) for parts in zip(*held.values(), strict=True)]
        assert max(whole) == pytest.approx(memory.peak, rel=1e-9)
        assert times[0] == 0 and times[-1] == timeline.seconds
        first += int(run.count)


@pytest.mark.parametrize(("stack", "batch"), [("fsdp2-2024", 8), ("accelerate", 16), ("litgpt", 32)])
def test_the_reduction_of_a_large_table_is_the_highest_point(stack: str, batch: int) -> None:
    """Short sequences of a model with a large vocabulary under FSDP are fullest when its gradients are joined."""
    plan, job = sw.Plan(dp=8, sharding="fsdp", recompute="full"), sw.Training(seq_len=512, global_batch=batch)
    report = sw.train(
        sw.load_model("gemma-3-4b"), sw.Cluster.parse("8xh100"), plan, job, sw.TrainingOptions(stack=stack)
    )
    assert report.peak_moment == "ends reduced"
    _, held = levels(lifetimes(report, report.timeline(), 0))
    most = max(sum(parts) for parts in zip(*held.values(), strict=True))
    assert most == pytest.approx(report.evaluation.memory[0].peak, rel=1e-9)


def test_a_trace_counts_what_every_stage_holds() -> None:
    """Counters of a trace say bytes by category, the same sums as the drawing."""
    job = sw.Training(seq_len=1024, global_batch=8)
    report = sw.train(sw.load_model("gpt2"), sw.Cluster.parse("4xh100"), sw.Plan(pp=4, dp=1, micro_batch=1), job)
    tree = trace_tree(report, report.timeline())
    counters = [event for event in tree["traceEvents"] if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {f"stage {i}, tensors in bytes" for i in range(4)}
    most = max(sum(e["args"].values()) for e in counters if e["name"].startswith("stage 0"))
    assert most == pytest.approx(report.evaluation.memory[0].peak, rel=1e-6)
    json.dumps(tree, allow_nan=False)


def _snapshot(path: Path) -> dict[str, Any]:
    job = sw.Training(seq_len=1024, global_batch=8)
    report = sw.train(sw.load_model("gpt2"), sw.Cluster.parse("2xh100"), sw.Plan(pp=2, dp=1, micro_batch=1), job)
    sw.plot_timeline(report, str(path / "step.pickle"))
    tree: dict[str, Any] = pickle.loads((path / "step.pickle").read_bytes())
    assert tree == snapshot_tree(report, report.timeline())
    return tree


def test_a_snapshot_has_the_form_that_pytorch_draws(tmp_path: Path) -> None:
    """Every stage is a device; tensors lie in segments, are freed once, and what lasts is what segments hold."""
    tree = _snapshot(tmp_path)
    assert set(tree) == {"segments", "device_traces", "allocator_settings"} and len(tree["device_traces"]) == 2
    for device, trace in enumerate(tree["device_traces"]):
        alive: dict[str, dict[int, int]] = {"segment": {}, "block": {}}
        for event in trace:
            assert {"action", "addr", "size", "stream", "time_us", "frames"} <= event.keys()
            kind = "segment" if event["action"].startswith("segment") else "block"
            if event["action"].endswith("alloc"):
                assert event["addr"] not in alive[kind] and (kind == "segment" or event["addr"] in alive["segment"])
                alive[kind][event["addr"]] = event["size"]
            elif event["action"] == "free_requested":
                assert alive[kind][event["addr"]] == event["size"]
            else:
                assert alive[kind].pop(event["addr"]) == event["size"]
        left = {s["address"]: s["total_size"] for s in tree["segments"] if s["device"] == device}
        assert alive["block"] == alive["segment"] == left and len(left) >= 2
        assert [event["time_us"] for event in trace] == sorted(event["time_us"] for event in trace)


def test_pytorch_reads_a_snapshot(tmp_path: Path) -> None:
    """What torch.cuda prints of a snapshot counts the same bytes: its lists, its summary and its traces."""
    viz = pytest.importorskip("torch.cuda._memory_viz")
    tree = _snapshot(tmp_path)
    lasting = sum(segment["total_size"] for segment in tree["segments"])
    assert f"total_reserved: {viz.Bytes(lasting)}" in viz.segsum(tree)
    assert "weights: weights" in viz.memory(tree, format_flamegraph=str)
    begun = sum(event["action"] == "segment_alloc" for trace in tree["device_traces"] for event in trace)
    assert viz.trace(tree).count("cudaMalloc") == begun > 4
