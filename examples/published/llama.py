"""LLaMA: GPU-hours of four trainings, and latency under five quantisations."""

from __future__ import annotations

from dataclasses import replace

from tables import FAR, Page, Pair, Row, Table, show

import shardwise as sw

# Table 15 of the paper: model, tokens, GPU-hours. Last: the shards that its checkpoints were published in.
TRAINED = (
    ("llama-7b", 1.0e12, 82_432, 1),
    ("llama-13b", 1.0e12, 135_168, 2),
    ("llama-30b", 1.4e12, 530_432, 4),
    ("llama-65b", 1.4e12, 1_022_362, 8),
)
TOKENS_PER_SECOND_65B = 380

FORMATS = ("w16a16e16", "w4a4e16", "w4a8e16", "w4a16e16", "w8a8e16")
# Milliseconds that llm-analysis prints with every efficiency at one: prefill of 512 tokens, and one output token.
QUANTISED = {
    "llama-7b": ((22.41, 5.9, 11.4, 22.41, 11.4), (6.73, 1.78, 1.85, 1.99, 3.43)),
    "llama-13b": ((43.1, 11.2, 21.83, 43.1, 21.83), (12.94, 3.36, 3.47, 3.69, 6.55)),
    "llama-30b": ((107.74, 27.69, 54.38, 107.74, 54.38), (32.36, 8.25, 8.46, 8.89, 16.28)),
    "llama-65b": ((113.33, 55.2, 108.83, 216.08, 108.83), (33.85, 16.41, 16.76, 17.47, 32.56)),
}


def trained(name: str, tokens: float, plan: sw.Plan) -> sw.TrainReport:
    """Return the training of one model: 4 M tokens a step on 2,048 A100 of 80 GB."""
    job = sw.Training(seq_len=2048, global_batch=2048, token_budget=tokens)
    return sw.train(sw.Model.load(name), sw.Cluster.parse("2048xa100-sxm-80gb"), plan, job)


def hours(reported: float, report: sw.TrainReport) -> Pair:
    """Return GPU-hours beside those reported."""
    scale = report.device_hours / report.step_seconds
    low, high = (scale * seconds for seconds in report.interval["step_seconds"])
    return Pair(reported=reported, predicted=report.device_hours, interval=(low, high))


def row(case: str, pair: Pair, why: str) -> Row:
    """Return a row of one figure, with the letter of why where it is off by over a tenth."""
    return Row(case=case, pairs=(pair,), why=why if abs(pair.off) > FAR else "")


def training() -> tuple[Table, Table, Table]:
    """Return GPU-hours of all four with either choice of degrees, and tokens per second of the largest."""
    rows, others = [], []
    for name, tokens, reported, shards in TRAINED:
        plan = sw.Plan(tp=shards, dp=0, sharding="distributed-optimizer", recompute="selective")
        report = trained(name, tokens, plan)
        rows.append(row(f"{name}, tp {shards}", hours(reported, report), "a" if shards == 1 else "b"))
        if name != "llama-30b":
            other = trained(name, tokens, replace(plan, tp=8, pp=8))
            others.append(row(f"{name}, tp 8, pp 8", hours(reported, other), "c"))
    rate = Pair(
        reported=TOKENS_PER_SECOND_65B,
        predicted=report.tokens_per_second_per_gpu,
        interval=report.interval["tokens_per_second_per_gpu"],
    )
    last = row("llama-65b, tp 8", rate, "b")
    return (
        Table(title="Training on 2,048 A100", figures=("GPU-hours",), digits=(0,), rows=tuple(rows), intervals=True),
        Table(title="The same with the degrees of llm-analysis' example; 52 heads of llama-30b cannot be split over 8",
              figures=("GPU-hours",), digits=(0,), rows=tuple(others), intervals=True),
        Table(title="Rate of the largest", figures=("tokens/s/GPU",), digits=(0,), rows=(last,), intervals=True),
    )  # fmt: skip


def quantised() -> Table:
    """Return latency by quantisation with every efficiency at one, as llm-analysis has it."""
    rows = []
    ideal = sw.ServingOptions(efficiencies=sw.Efficiencies(ideal=True))
    for name, (prefills, decodes) in QUANTISED.items():
        for form, prefill, decode in zip(FORMATS, prefills, decodes, strict=True):
            tp = 2 if (name, form) == ("llama-65b", "w16a16e16") else 1
            job = sw.Serving(batch=1, input_tokens=512, output_tokens=32, weights=form)
            report = sw.infer(sw.Model.load(name), sw.Cluster.parse(f"{tp}xa100-sxm-80gb"), sw.Plan(tp=tp), job, ideal)
            pairs = (Pair(reported=prefill, predicted=1e3 * report.ttft_seconds),
                     Pair(reported=decode, predicted=1e3 * report.tpot_seconds))  # fmt: skip
            far = any(abs(pair.off) > FAR for pair in pairs)
            rows.append(Row(case=f"{name} {form}{' tp 2' * (tp - 1)}", pairs=pairs, why="d" if far else ""))
    return Table(
        title="Lower bounds by quantisation, one request of 512 tokens on A100 (that tool's figures, not measurements)",
        figures=("prefill ms", "decode ms"),
        digits=(2, 2),
        rows=tuple(rows),
        reporter="llm-analysis",
    )


def page() -> Page:
    """Return the example."""
    return Page(
        title="LLaMA",
        sources=(
            "GPU-hours: arXiv:2302.13971 Table 15, tokens/s: section 2.4, https://arxiv.org/abs/2302.13971",
            "lower bounds: https://github.com/cli99/llm-analysis examples/llama/README.md (2023)",
        ),
        assumed=(
            "the degrees, which the paper does not state: tensor parallelism over as many devices as the checkpoints"
            " have shards (1, 2, 4, 8), optimizer states sharded over the rest, micro-batch 1",
            "selective recomputation, for the paper keeps the outputs of linear layers",
            "4 million tokens a step are 2,048 sequences of 2,048; Megatron-Core's kernels",
        ),
        tables=(*training(), quantised()),
        why=WHY,
    )


WHY = {
    "a": "not known: one sequence for each device and step is all the work there is, and the paper does not say what"
    " besides steps is in its hours",
    "b": "all-reduces of tp 8 without a pipeline, four for each layer, are exposed in ours; the paper says that it"
    " overlaps them with compute as much as possible, and not how",
    "c": "64 micro-batches of one sequence in 8 stages and layers cut into eighths: small models pay for bubbles,"
    " messages and a host that launches kernels, which their trainers will not have chosen. That tool has none of them",
    "d": "norms, rotary embedding, residuals and attention stay in 16 bits here and are bound by memory, which does not"
    " shrink with the linear layers",
}


def main() -> None:
    """Print the example."""
    show(page())


if __name__ == "__main__":
    main()
