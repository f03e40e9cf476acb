"""Print predicted beside traced peaks of whole training steps of transformers: one device, FSDP2 and TP."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from accuracy.files import RESULTS
from shardwise import Cluster, Model, Plan, Training, TrainingOptions, find_stack, train

DATA = RESULTS / "transformers_steps.toml"
# The traced programs call torch.optim.AdamW on tensors of the CPU, which it updates one by one.
STACK = replace(find_stack("transformers"), optimizer_step="single")


def predicted_bytes(row: dict[str, Any]) -> float:
    """Return the peak bytes of tensors of one row."""
    devices, kind = row["devices"], row["kind"]
    plan = Plan(
        tp=devices if kind == "tp" else 1,
        dp=devices if kind == "fsdp" else 1,
        micro_batch=row["micro_batch"],
        sharding="fsdp" if kind == "fsdp" else "none",
        recompute=row["recompute"],
        sequence_parallel=False,
    )
    model = Model.load(row["model"], {"num_layers": row["layers"]})
    job = Training(
        seq_len=row["seq_len"],
        global_batch=plan.dp * plan.micro_batch,
        precision=row["precision"],
        dropout=False,
    )
    # The device plays no part in the bytes of tensors.
    cluster = Cluster.parse(f"{devices}xa100-sxm-80gb")
    return train(model, cluster, plan, job, TrainingOptions(stack=STACK)).evaluation.peak


def table() -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    rows = tomllib.loads(DATA.read_text(encoding="utf-8"))["run"]
    differences = []
    yield "| model | layers | B x S | kind | precision | recompute | traced bytes | predicted bytes | difference |"
    yield "|---|---:|---|---|---|---|---:|---:|---:|"
    for row in rows:
        traced, predicted = row["peak_bytes"], predicted_bytes(row)
        differences.append(predicted - traced)
        kind = row["kind"] if row["devices"] == 1 else f"{row['kind']} {row['devices']}"
        size = f"{row['layers']} | {row['micro_batch']} x {row['seq_len']}"
        case = f"{row['model']} | {size} | {kind} | {row['precision']} | {row['recompute']}"
        yield f"| {case} | {traced:,} | {predicted:,.0f} | {differences[-1]:+,.0f} |"
    yield ""
    yield f"Largest difference {max(differences, key=abs):+,.0f} bytes."


if __name__ == "__main__":
    print(*table(), sep="\n")
