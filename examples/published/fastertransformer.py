"""FasterTransformer: the latency of a model of 13 B parameters on one and two A100."""

from __future__ import annotations

from tables import FAR, Page, Pair, Row, Table, show

import shardwise as sw

# GPUs; milliseconds of the prompt of 512 tokens, of a token, and of the prompt and 10 tokens.
MEASURED = ((1, 63.17, 22.0, 283.6), (2, 45.45, 13.5, 180.86))
TOKENS = 10


def served(gpus: int) -> sw.InferReport:
    """Return one request on so many A100 of 40 GB."""
    job = sw.Serving(batch=1, input_tokens=512, output_tokens=TOKENS)
    cluster = sw.Cluster.parse(f"{gpus}xa100-sxm-40gb")
    engine = sw.ServingOptions(engine="fastertransformer")
    return sw.infer(sw.Model.load("gpt3-13b"), cluster, sw.Plan(tp=gpus), job, engine)


def table() -> Table:
    """Return both runs."""
    rows = []
    for gpus, prompt, token, total in MEASURED:
        report = served(gpus)
        first, each = 1e3 * report.ttft_seconds, 1e3 * report.tpot_seconds
        figures = ((prompt, first), (token, each), (total, first + TOKENS * each))
        pairs = tuple(Pair(reported=reported, predicted=predicted) for reported, predicted in figures)
        why = ("a" if gpus == 1 else "ab") if any(abs(pair.off) > FAR for pair in pairs) else ""
        rows.append(Row(case=f"tp {gpus}", pairs=pairs, why=why))
    return Table(title="Milliseconds, one request of 512 tokens", figures=("prompt", "token", "all"), digits=(1, 1, 1),
                 rows=tuple(rows), reporter="measured")  # fmt: skip


def page() -> Page:
    """Return the example."""
    return Page(
        title="FasterTransformer, 13 B",
        sources=(
            "https://kipp.ly/transformer-inference-arithmetic/, comparing against real benchmarks (2022),"
            " as https://github.com/cli99/llm-analysis examples/fastertransformer reads it",
        ),
        assumed=(
            "the model, which the source gives as 13 B parameters: GPT-3 of 40 layers of 5,120",
            "the whole is the prompt and ten more tokens, as the source's figures add up",
        ),
        tables=(table(),),
        why={
            "a": "a token reads 25 GB of weights, and the source's A100 of 40 GB reads them at 0.93 of its bandwidth,"
            " ours at 0.84, as the tables of A100 of 80 GB say",
            "b": "on two devices the source gains less from the second than the bytes and FLOPs that are halved; its"
            " all-reduces of a few kB to 5 MB went through NCCL of 2022, ours are fitted to later ones",
        },
    )


def main() -> None:
    """Print the example."""
    show(page())


if __name__ == "__main__":
    main()
