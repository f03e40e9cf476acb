"""Print predicted beside published step times: Korthikanti et al. 2022 (arXiv:2205.05198), Table 5."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from statistics import mean
from typing import Any

from accuracy.files import RESULTS
from shardwise import Cluster, Model, Plan, Training, TrainingOptions, train
from shardwise.models import MLP, Attention, Block

DATA = RESULTS / "korthikanti_table5.toml"
# Column of the table -> (recompute, sequence parallelism), as the paper pairs them.
SETTINGS = {"full": ("full", False), "selective": ("selective", True)}


def gpt(row: dict[str, Any], data: dict[str, Any]) -> Model:
    """Return the paper's GPT: multi-head attention, GELU of four times the width, biases, dropout, positions."""
    D, N = row["hidden"], row["heads"]
    block = Block(
        mixers=(Attention(heads=N, kv_heads=N, head_dim=D // N, qkv_bias=True, out_bias=True, rotary=False),),
        feed_forward=MLP(ffn=4 * D, gated=False, bias=True, activation="gelu"),
        norm="layernorm",
    )
    return Model(
        name=row["name"],
        family="gpt",
        hidden=D,
        vocab=data["vocab"],
        layers=(block,) * row["layers"],
        tied=True,
        norm="layernorm",
        positions=data["seq_len"],
        dropout=True,
    )


def predicted_seconds(row: dict[str, Any], data: dict[str, Any], setting: str) -> float:
    """Return the seconds of one step of a row."""
    recompute, sequence_parallel = SETTINGS[setting]
    plan = Plan(
        tp=row["tp"],
        pp=row["pp"],
        vpp=row["vpp"],
        dp=1,
        micro_batch=row["micro_batch"],
        schedule="interleaved" if row["vpp"] > 1 else "1f1b",
        recompute=recompute,  # type: ignore[arg-type]
        sequence_parallel=sequence_parallel,
    )
    cluster = Cluster.parse(f"{plan.num_devices}x{data['device']}")
    job = Training(seq_len=data["seq_len"], global_batch=row["global_batch"], precision="fp16")
    return train(gpt(row, data), cluster, plan, job, TrainingOptions(stack="megatron-scores")).step_seconds


def table() -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    errors = []
    yield "| model | devices | recompute | measured s | predicted s | error |"
    yield "|---|---:|---|---:|---:|---:|"
    for row in data["model"]:
        for setting in SETTINGS:
            measured, predicted = row[f"{setting}_seconds"], predicted_seconds(row, data, setting)
            error = predicted / measured - 1
            errors.append(error)
            case = f"{row['name']} | {row['tp'] * row['pp']} | {setting}"
            yield f"| {case} | {measured:.2f} | {predicted:.2f} | {error * 100:+.1f} % |"
    yield ""
    yield f"Mean error {mean(errors) * 100:+.1f} %, largest {max(errors, key=abs) * 100:+.1f} %."


if __name__ == "__main__":
    print(*table(), sep="\n")
