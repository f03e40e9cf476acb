"""The figures that the Megatron-LM analysis tool prints for its example, and ours of the same case.

The tool is an open pull request (github.com/NVIDIA/Megatron-LM pull request 482, 2023-09) whose text shows one worked
example, whose figures are constants here: nothing is run. tests/training/test_comm_seed.py says of each why.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import NamedTuple

from comm_example import example

import shardwise as sw
from beside.answers import Answer, Setting, Tool

MIB, GIB = 2.0**20, 2.0**30


class Printed(NamedTuple):
    """One figure that it prints, what gives ours, and the law between them where there is one."""

    figure: str
    unit: str
    theirs: float
    ours: Callable[[sw.CommReport], float]
    law: str = ""


def matrix(whole: bool, name: str, index: int = 0) -> Callable[[sw.CommReport], float]:
    """Return what gives MiB of a weight in 16 bits, of the whole model or of a device."""
    return lambda r: 2 * prod(_row(r, whole, name).weights[index][1]) / MIB


def kept(whole: bool, *names: str) -> Callable[[sw.CommReport], float]:
    """Return what gives MiB that operators keep."""
    return lambda r: sum(_row(r, whole, name).activation_bytes for name in names) / MIB


def stage(whole: bool, category: str) -> Callable[[sw.CommReport], float]:
    """Return what gives GiB of a category on the first stage."""
    return lambda r: getattr((r.whole if whole else r.report).evaluation.memory[0], category) / GIB


def message(name: str) -> Callable[[sw.CommReport], float]:
    """Return what gives MiB of the one tensor-parallel message of an operator."""
    return lambda r: next(m.size_bytes for m, _ in _row(r, False, name).messages) / MIB


def _row(report: sw.CommReport, whole: bool, name: str) -> object:
    tables = report.whole_layers if whole else report.layers(0)
    return next(row for table in tables for row in table.rows if row.name == name)


def _in_layers(report: sw.CommReport, what: str) -> float:
    flows = [f for f in report.on("tp", 0) if f.message.part == "layer"]
    return float(sum(getattr(f, what) for f in flows))


SPLIT = "megabytes on a device follow the split shapes"
MASKS = "two dropout masks of a byte are two bytes an element"
BIAS = "a bias is as long as the outputs, and split with them"
SENT = "a message is counted once, by who sends it"
WEIGHTS = (
    ("word_embeddings", "embedding", 0, 394.0, 394.0), ("position_embeddings", "embedding", 1, 16.0, 16.0),
    ("query_key_value", "qkv", 0, 96.0, 48.0), ("dense", "out", 0, 32.0, 16.0),
    ("dense_h_to_4h", "mlp.up", 0, 170.0, 85.0), ("dense_4h_to_h", "mlp.down", 0, 85.0, 85.0),
)  # fmt: skip
KEPT = (
    ("input_layernorm", 64.0, 64.0, ("norm1",), ""), ("flash attention", 256.0, 128.0, ("attention",), ""),
    ("rearrange of the output", 64.0, 32.0, ("out",), ""), ("dense", 64.0, 64.0, ("qkv",), ""),
    ("post_attention_layernorm", 64.0, 64.0, ("norm2",), ""), ("dense_4h_to_h", 64.0, 64.0, ("mlp.up",), ""),
    ("bias_glue", 680.0, 680.0, ("mlp.activation",), SPLIT), ("drop_add_fusion", 96.0, 96.0, ("add1", "add2"), MASKS),
)  # fmt: skip
MESSAGES = (("word_embeddings", "embedding"), ("query_key_value", "qkv"), ("dense", "out"), ("dense_h_to_4h", "mlp.up"),
            ("dense_4h_to_h", "mlp.down"))  # fmt: skip


def figures() -> list[Printed]:
    """Return every figure that is compared."""
    weights = [
        Printed(f"weight of {theirs}, {where}", "MiB", size, matrix(whole, ours, index), "" if whole else SPLIT)
        for theirs, ours, index, full, rank in WEIGHTS
        for where, whole, size in (("model", True, full), ("GPU", False, rank))
    ]
    saved = [
        Printed(f"kept by {theirs}, {where}", "MiB", size, kept(whole, *ours), law)
        for theirs, full, rank, ours, law in KEPT
        for where, whole, size in (("model", True, full), ("GPU", False, rank))
    ]
    sent = [Printed(f"all-reduce of {theirs}", "MiB", 64.0, message(ours)) for theirs, ours in MESSAGES]
    memory = [
        Printed(f"{name}, {where}", "GiB", size, stage(whole, category))
        for name, category, full, rank in (
            ("weights", "weights", 12.4, 3.2), ("gradients", "gradients", 24.7, 6.4),
            ("optimizer", "optimizer", 74.2, 4.8), ("all memory", "peak", 156.2, 40.2),
        )
        for where, whole, size in (("model", True, full), ("GPU", False, rank))
    ]  # fmt: skip
    return [*weights, *saved, *sent, *memory, *_counts()]


def _counts() -> list[Printed]:
    return [
        Printed("parameters, model", "", 6_642_245_632, lambda r: r.whole_parameters, BIAS),
        Printed("parameters, GPU", "", 1_718_898_688, lambda r: r.parameters(0), BIAS),
        Printed("activations, GPU", "GiB", 25.8, stage(False, "activations")),
        Printed("messages of layers in a step, GPU", "", 2048, lambda r: _in_layers(r, "per_step")),
        Printed("bytes of layers in a step, GPU", "GiB", 128.0, lambda r: _in_layers(r, "bytes_per_step") / GIB),
        Printed("pipeline messages in a step, GPU", "", 128, lambda r: r.on("pp", 0)[0].per_step, SENT),
        Printed("pipeline bytes in a step, GPU", "MiB", 8192, lambda r: r.on("pp", 0)[0].bytes_per_step / MIB, SENT),
        Printed("pipeline messages in a step, cluster", "", 2048, lambda r: r.axes["pp"].cluster_messages, SENT),
        Printed("reduce-scatter of gradients", "GiB", 6.4, lambda r: r.on("dp", 0)[0].message.size_bytes / GIB),
        Printed("all-gather of weights", "GiB", 6.4, lambda r: r.on("dp", 0)[1].message.size_bytes / GIB,
                "weights are gathered in their own bytes"),
        Printed("data-parallel messages, cluster", "", 2, lambda r: r.axes["dp"].cluster_messages,
                "a total has one scope"),
        Printed("tensor-parallel messages, cluster", "", 32768, lambda r: r.axes["tp"].cluster_messages,
                "embedding, head and loss send too"),
    ]  # fmt: skip


@cache
def answers() -> dict[str, Answer]:
    """Return our figures; where a law stands between, it takes the whole difference."""
    report = example()
    found = {}
    for p in figures():
        value = float(p.ours(report))
        found[p.figure] = Answer(value=value, unit=p.unit, whole=p.law)
    return found


def printed(_: Setting) -> dict[str, float]:
    """Return what it prints."""
    return {p.figure: p.theirs for p in figures()}


def tool() -> Tool:
    """Return the comparison."""
    return Tool(
        name="Megatron-LM analysis tool",
        version="pull request 482 (2023-09), figures as its text prints them",
        settings=({"ask": "its example of 32 layers on 2 nodes of 8", "tp": 2, "pp": 2, "dp": 4},),
        asks="",
        answers=lambda _: answers(),
    )
