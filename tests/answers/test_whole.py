"""Bytes of memory in reports are whole numbers."""

from __future__ import annotations

from typing import Any

from shardwise import Cluster, Plan, Training, load_model, train
from shardwise.answers import Counting, count, count_tree, roofline, train_tree
from shardwise.answers._answer import whole_bytes
from shardwise.answers._comm_tree import comm_tree
from shardwise.answers._roofline import roofline_tree
from shardwise.training import comm


def _bytes(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [found for key, value in tree.items() for found in _bytes(value, f"{path}.{key}")]
    return [(path, tree)] if path.endswith("_bytes") and tree is not None else []


def _everywhere(tree: Any) -> list[tuple[str, Any]]:
    if isinstance(tree, list):
        return [found for value in tree for found in _everywhere(value)]
    if not isinstance(tree, dict):
        return []
    own = [(k, v) for k, v in tree.items() if k.endswith("_bytes") and isinstance(v, (int, float))]
    return own + [found for value in tree.values() for found in _everywhere(value)]


def test_memory_of_a_training_report_is_in_whole_bytes() -> None:
    """Tensors, what is reserved, what the device shows and every part of the peak are integers."""
    job = Training(seq_len=1024, global_batch=8)
    tree = train_tree(train(load_model("gpt2"), Cluster.parse("1xh100"), Plan(), job))
    assert all(isinstance(value, int) for _, value in _bytes(tree["memory"]))
    assert all(isinstance(value, int) for value in tree["memory"]["at_peak"].values())
    assert isinstance(tree["memory"]["reserved_bytes"], int)


def test_messages_and_operators_are_in_whole_bytes() -> None:
    """What operators move and keep, and what messages carry, are integers on every page, whatever the split."""
    model, job, plan = load_model("llama-3-8b"), Training(seq_len=1020, global_batch=2), Plan(tp=4, dp=0)
    found = comm(model, Cluster.parse("8xh100"), plan, job)
    sent = comm_tree(found)
    trees = [sent, roofline_tree(roofline(found.report)), count_tree(count(model, Counting(seq_len=1021)))]
    values = [value for tree in trees for _, value in _everywhere(tree)]
    assert values and all(isinstance(value, int) for value in values)
    assert isinstance(sent["total"]["cluster"]["bytes_per_step"], int)


def test_rates_and_seconds_stay_as_they_are() -> None:
    """Only bytes of memory are rounded, to the nearest."""
    tree = {"memory_bytes_per_second": 1.5, "kv_bytes_per_gpu": 2.6, "peak_bytes": {"low": 1.2}, "n": (0.5,)}
    whole = {"memory_bytes_per_second": 1.5, "kv_bytes_per_gpu": 3, "peak_bytes": {"low": 1}, "n": (0.5,)}
    assert whole_bytes(tree) == whole
    assert whole_bytes(None) is None
