"""Print how far off published runs are that no constant or factor rests on, by source; bands do.

`python -m accuracy.unseen` prints the table, `python -m accuracy rows accuracy/data/unseen/*.csv` every row with its
prediction. notes/unseen.md says what each file is of, how it was predicted before anyone looked, and which few rows
have suggested a constant since. Collectives of several laboratories lie beside them (collectives_unseen.csv), and in no
line of the table.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from accuracy.files import HERE
from accuracy.published import rows_of
from shardwise.measured import Comparison, errors_of

FILES = tuple(
    sorted(
        (path for path in (HERE / "data" / "unseen").glob("*.csv") if not path.name.startswith("collectives")),
        key=lambda path: (path.name.startswith("inference"), path.name),
    )
)
_SERVED = {
    "output_tokens_per_second": ", output tokens",
    "output_tokens_per_second_per_gpu": ", output tokens",
    "decode_tokens_per_second": ", output tokens",
    "prefill_tokens_per_second": ", prompt tokens",
    "tpot": ", time per token",
    "tpot_p50": ", time per token",
    "ttft": ", first tokens",
    "ttft_p50": ", first tokens",
    "batch_latency": ", whole batches",
}
COLUMNS = ("source", "runs", "bias", "median error", "90 % below", "inside the band")


def runs(files: Sequence[Path] = FILES) -> tuple[Comparison, ...]:
    """Return every run with its prediction."""
    return tuple(row for file in files for row in rows_of(str(file)))


def shares(rows: Iterable[Comparison]) -> tuple[float, float, float, float]:
    """Return bias, median and 90 % of the errors of some runs, and the share that lies inside its band."""
    some = [row for row in rows if row.status == "predicted"]
    one = errors_of((), some)
    return one.bias, one.median_abs_error, one.p90_abs_error, sum(map(bool, (row.inside for row in some))) / len(some)


def table(rows: Iterable[Comparison]) -> Iterator[str]:
    """Yield the lines of a Markdown table, one row a source and one of all; verdicts alone have no error."""
    every = [row for row in rows if row.relative_error is not None]
    by_source: dict[str, list[Comparison]] = defaultdict(list)
    for row in every:
        what = {"peak_memory": ", memory", **_SERVED}.get(row.metric, "")
        by_source[row.source + what].append(row)
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|---|{'---:|' * (len(COLUMNS) - 1)}"
    for name, some in (*by_source.items(), ("all", every)):
        bias, median, most, inside = shares(some)
        yield f"| {name} | {len(some)} | {bias:+.1%} | {median:.1%} | {most:.1%} | {inside:.0%} |"


def main() -> int:
    """Print the table."""
    print(*table(runs()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
