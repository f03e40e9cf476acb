"""Print the table of docs/fine-tuning.md: bytes, tokens/s and longest sequence by model, method and card."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Plan, Settings, Training, find_stack
from shardwise.search import longest_sequence
from shardwise.training import TrainingOptions, TrainReport, train

MODELS = ("llama-3.2-1b", "qwen3-4b", "llama-3.1-8b", "qwen3-14b", "gemma-3-27b", "qwen3-32b", "llama-3.1-70b")
CARDS = ("rtx-4090", "l40s", "a100-sxm-80gb", "h100-sxm-80gb")
SEQ_LEN = 2048


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to fine-tune: its name in the table, what it adds to a job, and the framework that runs it."""

    name: str
    job: dict[str, Any]
    stack: str = "llama-factory"
    loss: str = "fused-linear"


METHODS = (
    Method(name="full, AdamW", job={}),
    Method(name="full, 16-bit, 8-bit AdamW", job={"precision": "bf16-pure", "optimizer": "adam8bit"}),
    Method(name="LoRA", job={"adapter": "lora", "rank": 16}),
    Method(name="QLoRA", job={"adapter": "lora", "rank": 16, "base": "nf4"}),
)


def answer(model: str, method: Method, card: str) -> TrainReport:
    """Return the report of one sequence on one card, every layer recomputed."""
    stack = replace(find_stack(method.stack), settings=Settings(loss=method.loss))  # type: ignore[arg-type]
    job = Training(seq_len=SEQ_LEN, global_batch=1, **method.job)
    plan = Plan(micro_batch=1, recompute="full")
    return train(load_model(model), Cluster.parse(f"1x{card}"), plan, job, TrainingOptions(stack=stack))


def cell(report: TrainReport) -> str:
    """Return tokens/s and the longest sequence, or a dash where the card does not hold it."""
    if not report.fits:
        return "-"
    return f"{report.tokens_per_second_per_gpu:,.0f} / {longest_sequence(report):,}"


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| model | method | GB (8 of 10 runs) | {' | '.join(CARDS)} |"
    yield "|---|---|---|" + "---|" * len(CARDS)
    for model in MODELS:
        for method in METHODS:
            reports = [answer(model, method, card) for card in CARDS]
            low, high = (value / 1e9 for value in reports[-1].interval["device_bytes"])
            memory = f"{reports[-1].device_bytes / 1e9:.1f} ({low:.1f} to {high:.1f})"
            yield f"| {model} | {method.name} | {memory} | {' | '.join(map(cell, reports))} |"


def main() -> int:
    """Print the table."""
    sys.stdout.write("\n".join(rows()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
