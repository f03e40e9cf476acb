"""Whether the plans that a search proposes can be launched: the ten best of eleven questions, to the exporters.

`python benchmarks/launchable.py` prints and stores the table (launchable.json); `--check` fails where one is refused.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import shardwise as sw
from shardwise.errors import InputError
from shardwise.formats import ExportCase
from shardwise.plans import find_stack

STORED = Path(__file__).with_name("launchable.json")
_SHOWN = ("model", "on", "stack", "stage_layers", "sharding")
# Model, devices, stack, tokens of a sequence, sequences of a step, and what is tried beside the usual.
QUESTIONS: tuple[tuple[Any, ...], ...] = (
    ("qwen2.5-7b", "8xa100-sxm-80gb", "fsdp2", 4096, 64),
    ("llama-3.1-8b", "8xh100-sxm-80gb", "deepspeed", 8192, 128),
    ("llama-3.1-8b", "16xh100-sxm-80gb", "fsdp2", 8192, 128),
    ("llama-3.1-70b", "64xh100-sxm-80gb", "megatron", 8192, 256),
    ("mixtral-8x7b", "64xh100-sxm-80gb", "megatron", 4096, 1024),
    ("llama-3.1-405b", "512xh100-sxm-80gb", "megatron", 8192, 512),
    ("qwen3-30b-a3b", "32xh200-sxm-141gb", "megatron", 4096, 512),
    ("llama-3.1-8b", "8xh100-sxm-80gb", "transformers", 8192, 128),
    ("deepseek-v3", "2048xh800-sxm-80gb", "megatron", 4096, 15360),
    ("llama-3.1-70b", "64xh100-sxm-80gb", "megatron", 8192, 256, "stage_layers=usual,first-1,last-1,ends-1"),
    ("llama-3.1-8b", "64xh100-sxm-80gb", "fsdp2", 8192, 256, "sharding=hsdp"),
)


def refused(case: ExportCase) -> str:
    """Return what the exporter of a case's stack refuses of it; empty where it writes it."""
    exporter = import_module(f"shardwise.formats.{case.stack.runs.exporter}")
    try:
        exporter.export(case)
    except InputError as error:
        return "; ".join(map(str, error.problems))
    return ""


def row(question: tuple[Any, ...]) -> dict[str, Any]:
    """Return how many of the ten best plans of a question are accepted, and the seconds of the best."""
    name, on, stack, seq_len, batch, *tried = question
    space: dict[str, Any] = {key: tuple(words.split(",")) for key, _, words in (text.partition("=") for text in tried)}
    model, cluster = sw.load_model(name), sw.Cluster.parse(on)
    job = sw.Training(seq_len=seq_len, global_batch=batch)
    best = sw.plan_training(model, cluster, job, sw.SearchSpace(**space), sw.SearchOptions(stack=stack)).best
    said = [
        refused(ExportCase(model=model, cluster=cluster, plan=report.plan, job=job, stack=find_stack(stack)))
        for report in best
    ]
    accepted = sum(not text for text in said)
    asked = {"model": name, "on": on, "stack": stack, "seq_len": seq_len, "global_batch": batch} | space
    return {**asked, "accepted": accepted, "of": len(best), "step_seconds": round(best[0].step_seconds, 3)}


def main() -> int:
    """Print and store the table, or fail where a plan is refused."""
    rows = [row(question) for question in QUESTIONS]
    for one in rows:
        question = " ".join(",".join(v) if isinstance(v, tuple) else v for v in map(one.get, _SHOWN) if v)
        print(f"{one['accepted']:>3} of {one['of']}  {one['step_seconds']:>8.3f} s  {question}")
    if "--check" in sys.argv:
        return int(any(one["accepted"] < one["of"] for one in rows))
    STORED.write_text(json.dumps(rows, indent=1) + "\n", encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
