"""Megatron-Turing NLG 530B: the time of a step on 280, 350 and 420 servers."""

from __future__ import annotations

from tables import Page, Pair, Row, Table, show

import shardwise as sw

# Servers of 8 A100, and seconds of a step of 1,920 sequences.
SERVERS = ((280, 60.1), (350, 50.2), (420, 44.4))


def trained(servers: int, stack: str = "deepspeed") -> sw.TrainReport:
    """Return the step on so many servers: 8-way tensor parallelism in a server, 35-way pipelines over servers."""
    plan = sw.Plan(tp=8, pp=35, dp=0, sequence_parallel=False, recompute="full")
    job = sw.Training(seq_len=2048, global_batch=1920)
    cluster = sw.Cluster.parse(f"{servers}x8xa100-sxm-80gb")
    return sw.train(sw.Model.load("mt-nlg-530b"), cluster, plan, job, sw.TrainingOptions(stack=stack))


def table(title: str, stack: str, why: str) -> Table:
    """Return the three steps on a framework."""
    rows = []
    for servers, seconds in SERVERS:
        report = trained(servers, stack)
        pair = Pair(reported=seconds, predicted=report.step_seconds, interval=report.interval["step_seconds"])
        rows.append(Row(case=f"{servers} servers, dp {report.plan.dp}", pairs=(pair,), why=why))
    return Table(title=title, figures=("seconds",), digits=(1,), rows=tuple(rows), intervals=True)


def page() -> Page:
    """Return the example."""
    return Page(
        title="Megatron-Turing NLG 530B",
        sources=("arXiv:2201.11990 sections 2.3 and 2.4, https://arxiv.org/abs/2201.11990",),
        assumed=(
            "micro-batch 1 and full recomputation",
            "the framework: the paper joins Megatron-LM's layers with DeepSpeed's pipelines, and there is no such stack"
            " here; the first table takes DeepSpeed for all, the second Megatron-LM of 2022",
        ),
        tables=(
            table("A step of 1,920 sequences of 2,048 tokens", "deepspeed", ""),
            table("The same with Megatron-LM's kernels of 2022", "megatron-scores", "a"),
        ),
        why={
            "a": "not known. Megatron-LM's own runs of a model of the same layers and degrees reached 159 to 171"
            " TFLOP/s (arXiv:2104.04473 Table 2), which ours follows; this paper reports 126, 121 and"
            " 113, and a smaller batch explains only the part of the difference that ours shows too"
        },
    )


def main() -> None:
    """Print the example."""
    show(page())


if __name__ == "__main__":
    main()
