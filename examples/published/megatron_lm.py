"""Megatron-LM: days to train 175 B and 530 B parameters, with tensor and pipeline parallelism and with ZeRO-3."""

from __future__ import annotations

from typing import NamedTuple

from tables import FAR, Page, Pair, Row, Table, show

import shardwise as sw

DAY = 86400.0


class Run(NamedTuple):
    """A row of Table 2 of the paper: what ran, and days for 300 billion tokens."""

    model: str
    gpus: int
    batch: int
    micro_batch: int
    days: float


# Model-parallel size 96 is tp 8 and pp 12, 280 is tp 8 and pp 35.
PIPELINED = (
    Run("megatron-175b", 384, 1536, 1, 84),
    Run("megatron-175b", 768, 1536, 1, 43),
    Run("megatron-175b", 1536, 1536, 1, 23),
    Run("megatron-530b", 560, 2240, 1, 156),
    Run("megatron-530b", 1120, 2240, 1, 80),
    Run("megatron-530b", 2240, 2240, 1, 42),
)
SHARDED = (
    Run("megatron-175b", 384, 1536, 4, 90),
    Run("megatron-175b", 768, 1536, 2, 74),
    Run("megatron-175b", 1536, 1536, 1, 74),
    Run("megatron-530b", 640, 2560, 4, 169),
    Run("megatron-530b", 1120, 2240, 2, 137),
    Run("megatron-530b", 2240, 2240, 1, 140),
)
STAGES = {"megatron-175b": 12, "megatron-530b": 35}


def pipelined(run: Run) -> sw.TrainReport:
    """Return a run with tensor and pipeline parallelism."""
    plan = sw.Plan(tp=8, pp=STAGES[run.model], dp=0, sequence_parallel=False, recompute="full")
    return trained(run, plan, sw.Cluster.parse(f"{run.gpus}xa100-sxm-80gb"), "megatron-scores")


def sharded(run: Run, **links: int) -> sw.TrainReport:
    """Return a run of ZeRO-3 without model parallelism."""
    plan = sw.Plan(dp=0, micro_batch=run.micro_batch, sharding="zero3", recompute="full")
    return trained(run, plan, sw.Cluster.parse(f"{run.gpus}xa100-sxm-80gb", dict(links)), "deepspeed")


def trained(run: Run, plan: sw.Plan, cluster: sw.Cluster, stack: str) -> sw.TrainReport:
    """Return a run of the table."""
    job = sw.Training(seq_len=2048, global_batch=run.batch, token_budget=300e9)
    return sw.train(sw.Model.load(run.model), cluster, plan, job, sw.TrainingOptions(stack=stack))


def row(run: Run, report: sw.TrainReport, why: str) -> Row:
    """Return days beside those reported; a second letter where the run would not fit."""
    scale = report.training_seconds / report.step_seconds / DAY
    low, high = (scale * seconds for seconds in report.interval["step_seconds"])
    pair = Pair(reported=run.days, predicted=report.training_seconds / DAY, interval=(low, high))
    letters = (why if abs(pair.off) > FAR else "") + ("" if report.fits else "m")
    return Row(case=f"{run.model}, {run.gpus} GPUs, batch {run.batch}", pairs=(pair,), why=letters)


def table(title: str, rows: list[Row]) -> Table:
    """Return days under a title."""
    return Table(title=title, figures=("days",), digits=(1,), rows=tuple(rows), intervals=True)


def page() -> Page:
    """Return the example."""
    return Page(
        title="Megatron-LM, 175 B and 530 B",
        sources=("arXiv:2104.04473 Table 2, https://arxiv.org/abs/2104.04473",),
        assumed=(
            "full recomputation and fp16, as the paper's other runs; sequences of 2,048; A100 of 80 GB with 8 links of"
            " 200 Gb/s a node, as its section 5 has them",
            "pipelines without interleaving, for this table does not say; Megatron-LM before flash attention",
            "ZeRO-3 as DeepSpeed has it today",
        ),
        tables=(
            table("Tensor parallelism 8, pipelines of 12 and 35, micro-batch 1",
                  [row(r, pipelined(r), "p") for r in PIPELINED]),
            table("ZeRO-3 without model parallelism", [row(r, sharded(r), "z") for r in SHARDED]),
            table("The same, had each node one link: a diagnosis, not a default",
                  [row(r, sharded(r, nics_per_node=1), "n") for r in SHARDED]),
        ),
        why={
            "z": "ours shares the gathering of weights over the 8 links of a node and hides it behind compute. A step"
            " has one micro-batch in every row, so the same bytes are gathered however many devices there are, and the"
            " reported days stop falling at 768: gathering decides them. At the rate of one link of a node it would:"
            " see the next table. The paper does not say how its DeepSpeed of 2021 gathered",
            "p": "not known",
            "n": "with one link for each node all six are near: this is probably where the difference lies",
            "m": "does not fit 80 GB in ours, by a few GB; the paper ran it, and does not say what it split or moved"
            " off the device",
        },
    )  # fmt: skip


def main() -> None:
    """Print the example."""
    show(page())


if __name__ == "__main__":
    main()
