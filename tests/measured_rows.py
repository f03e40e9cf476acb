"""Files of measurements that tests write, and the rows that validation makes of them."""

from __future__ import annotations

import csv
from pathlib import Path

from accuracy.published import measured
from shardwise.measured import Comparison, validate

TRAINING = {
    "case_id": "mine-1", "metric": "step_time", "value": "2.5", "model": "llama-3.1-8b", "device": "h100-sxm-80gb",
    "num_gpus": "8", "gpus_per_node": "8", "seq_len": "4096", "micro_batch": "1", "global_batch": "64", "tp": "1",
    "cp": "1", "pp": "1", "dp": "8", "sharding": "fsdp", "recompute": "none", "compute_dtype": "bf16",
    "framework": "torchtitan", "finetune": "pretrain", "notes": "",
}  # fmt: skip
INFERENCE = {
    "case_id": "mine-2", "metric": "tpot", "value": "0.01", "model": "llama-3.1-8b", "device": "h100-sxm-80gb",
    "num_gpus": "1", "tp": "1", "engine": "vllm", "engine_version": "0.10.0", "serving_mode": "static",
    "weight_dtype": "bf16", "kv_dtype": "bf16", "batch": "8", "input_tokens": "512", "output_tokens": "128",
    "notes": "",
}  # fmt: skip


def write(folder: Path, rows: list[dict[str, str]], name: str = "runs.csv") -> str:
    """Write rows as a CSV file and return its path."""
    path = folder / name
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def only(folder: Path, row: dict[str, str]) -> Comparison:
    """Return the one row of a file with its prediction."""
    (found,) = validate([write(folder, [row])]).rows
    return found


def published(folder: Path, row: dict[str, str]) -> Comparison:
    """Return the one row of a published table with its prediction."""
    (found,) = measured([write(folder, [row])]).rows
    return found
