"""The EleutherAI cookbook: each command line of the README of its calculators, and ours in its place."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

from tables import FAR, Page, Pair, Row, Table, show

from shardwise.cli import main as shardwise

GIB = 2.0**30
EXA, BILLION = 1e18, 1e9
TOKENS = 300e9


class Line(NamedTuple):
    """A command line of theirs, ours, the unit, and what theirs prints, with the keys of ours and of why it differs."""

    theirs: str
    ours: str
    unit: str
    figures: tuple[tuple[str, float, Callable[[dict[str, Any]], float], str], ...]


def number_at(tree: dict[str, Any], path: str) -> float:
    """Return the number at a path of keys; 0 where the answer has no such part."""
    *above, last = path.split(".")
    for key in above:
        tree = tree[key]
    return float(tree.get(last, 0.0))


def at(*paths: str, over: float = 1.0) -> Callable[[dict[str, Any]], float]:
    """Return a reader of the sum of some keys of an answer, over a unit."""

    def read(tree: dict[str, Any]) -> float:
        return sum(number_at(tree, path) for path in paths) / over

    return read


def forward(times: int, *parts: str) -> Callable[[dict[str, Any]], float]:
    """Return a reader of exaFLOPs of parts over 300 B tokens: so many forward passes' worth."""
    scale = times * TOKENS / EXA

    def read(tree: dict[str, Any]) -> float:
        one = tree["flops"]
        return scale * sum(number_at(one["forward_by_component"], part) for part in parts) / float(one["tokens"])

    return read


def in_all(tree: dict[str, Any]) -> float:
    """Return exaFLOPs of the training, with those computed again."""
    return float(tree["flops"]["train_per_token_with_recompute"]) * TOKENS / EXA


PARAMETERS = "params.by_component."
PEAK = "memory.at_peak."
SIZES = "-v 51200 -s 2048"
SHARDED = "--sharding zero1 --recompute full --precision bf16 --bucket-elements 5e8 --stack megatron"
SPLIT = "--no-sequence-parallel --partition-activations"
MEMORY = "python calc_transformer_mem.py"
TAIL = "--checkpoint-activations --zero-stage=1 --partition-activations --pipeline-parallel-size=1"


def flops(sizes: str, ours: str, printed: tuple[float, ...]) -> Line:
    """Return a line of its FLOPs calculator: attention's products, scores and values, feed-forward, head and all."""
    names = ("projections", "scores and values", "feed-forward", "head", "all")
    readers = (
        forward(4, "attention"),
        forward(4, "attention_core"),
        forward(4, "mlp", "experts"),
        forward(3, "head"),
        in_all,
    )
    figures = tuple(zip(names, printed, readers, "   hh", strict=True))
    command = f"shardwise count {ours} {SIZES} --tokens 300e9 --recompute full"
    return Line(f"python calc_transformer_flops.py {sizes}", command, "EFLOPs", figures)


def parameters(sizes: str, ours: str, printed: tuple[float, ...]) -> Line:
    """Return a line of its parameter calculator: tables, attention, feed-forward and all."""
    names = ("embedding and head", "attention", "feed-forward", "all")
    paths = (("embedding", "head"), ("attention",), ("mlp", "experts"), ("total",))
    readers = [at(*(PARAMETERS + key for key in path), over=BILLION) for path in paths[:-1]]
    figures = tuple(zip(names, printed, (*readers, at("params.total", over=BILLION)), "    ", strict=True))
    return Line(f"python calc_transformer_params.py {sizes}", f"shardwise count {ours} {SIZES}", "billions", figures)


def memory(theirs: str, ours: str, printed: tuple[float, ...]) -> Line:
    """Return a line of its memory calculator: on a device, in its order."""
    names = ("activations", "weights", "gradients", "optimizer", "communication", "in all")
    keys = ((PEAK + "activations",), (PEAK + "weights",), (PEAK + "gradients",), (PEAK + "optimizer",),
            (PEAK + "buffers",), ("memory.device_bytes",))  # fmt: skip
    figures = tuple(
        (name, value, at(*key, over=GIB), why)
        for name, value, key, why in zip(names, printed, keys, "a g bs", strict=True)
        if value
    )
    return Line(f"{MEMORY} {theirs}", f"shardwise train {ours} {SIZES} {SHARDED}", "GiB", figures)


LINES = (
    flops("-l 12 -hs 768 --moe -e 512", "-l 12 -hs 768 -e 512 -ei 2 -t 1", (67.95, 90.6, 135.9, 23.59, 323.7)),
    flops("-l 96 -hs 12288", "-l 96 -hs 12288", (139_160.0, 11_600.0, 278_310.0, 377.5, 429_440.0)),
    parameters("-l 12 -hs 768 --moe -e 512", "-l 12 -hs 768 -e 512 -ei 1 -t 1", (0.07864, 0.02831, 28.99, 29.1)),
    parameters("-l 96 -hs 12288", "-l 96 -hs 12288", (1.26, 57.98, 115.96, 175.24)),
    memory(
        f"--num-layers=32 --sequence-length=2048 --num-attention-heads=32 --hidden-size=4096 --batch-size-per-gpu=8"
        f" {TAIL} --tensor-parallel-size=2 --num-gpus=128",
        f"-l 32 -hs 4096 -a 32 --on 128xa100-sxm-80gb -tp 2 --micro-batch 8 {SPLIT}",
        (34.00, 6.40, 25.60, 0.60, 0.93, 67.53),
    ),
    memory(
        f"--num-layers=36 --sequence-length=2048 --num-attention-heads=40 --hidden-size=5120 --batch-size-per-gpu=8"
        f" {TAIL} --tensor-parallel-size=4 --num-gpus=256",
        f"-l 36 -hs 5120 -a 40 --on 256xa100-sxm-80gb -tp 4 --micro-batch 8 {SPLIT}",
        (23.91, 5.52, 44.19, 0.52, 0.93, 75.06),
    ),
    memory(
        f"--num-layers=44 --sequence-length=2048 --num-attention-heads=64 --hidden-size=6144 --batch-size-per-gpu=1"
        f" {TAIL} --tensor-parallel-size=1 --num-gpus=1",
        "-l 44 -hs 6144 -a 64 --on 1xa100-sxm-80gb --micro-batch 1",
        (17.53, 38.32, 76.65, 229.95, 0.0, 362.45),
    ),
)


def answered(command: str) -> dict[str, Any]:
    """Return the JSON that a command of ours prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = shardwise([*shlex.split(command)[1:], "--json"])
    if status > 1:
        raise SystemExit(f"{command}\n{printed.getvalue()}")
    tree: dict[str, Any] = json.loads(printed.getvalue())
    return tree


def table(line: Line) -> Table:
    """Return what both command lines print."""
    tree = answered(line.ours)
    rows = []
    for name, printed, read, why in line.figures:
        pair = Pair(reported=printed, predicted=read(tree))
        rows.append(Row(case=name, pairs=(pair,), why=why.strip() if abs(pair.off) > FAR else ""))
    digits = 3 if line.unit == "billions" else 2
    return Table(title=f"`{line.theirs}` is `{line.ours}`", figures=(line.unit,), digits=(digits,), rows=tuple(rows),
                 reporter="cookbook")  # fmt: skip


def page() -> Page:
    """Return the example."""
    return Page(
        title="The cookbook's command lines",
        sources=(
            "command lines: https://github.com/EleutherAI/cookbook calc/README.md; what they print: commit 827ee3b"
            " (2026-03), calculations and no measurements",
        ),
        assumed=(
            "its defaults: a vocabulary of 51,200, sequences of 2,048, 300 B tokens, activations computed again for"
            " FLOPs, experts in every second layer for FLOPs and in every layer for parameters, gradients of 4 bytes",
            "a device, for it asks for none: A100 of 80 GB; Megatron-LM's split of the tables, as GPT-NeoX has it",
        ),
        tables=tuple(map(table, LINES)),
        why=WHY,
    )


WHY = {
    "h": "the head is a product like all others, and runs backward too: three times its forward pass. It counts one",
    "a": "it keeps 34 bytes of every token and channel of a layer, which is what remains where attention's core alone"
    " is computed again; full checkpointing, which its example asks for, keeps 2",
    "g": "gradients are split by tensor parallelism, as the weights are; it keeps them whole on each device",
    "b": "it has one bucket of 2 bytes an element; ours has one of gradients, of 4 bytes, and one of gathered weights",
    "s": "the sum of the above; and ours has logits, their gradient and the loss, the context, communicators and what"
    " the allocator keeps, which it leaves out",
}


def main() -> None:
    """Print the example."""
    show(page())


if __name__ == "__main__":
    main()
