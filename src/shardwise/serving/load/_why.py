"""Where the seconds of requests around a percentile go, cause by cause: waits, prompts, other requests, own decode.

What a request would take alone is priced by the table of steps; the rest of each step is of those who share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from shardwise.errors import Problems, plain
from shardwise.ledger.number import quantile
from shardwise.plans import METRICS, QUANTILES, Metric
from shardwise.serving.load._requests import PERCENTILES, Request
from shardwise.serving.load._steps import StepTable

EXPLAINED: tuple[Metric, ...] = ("ttft", "tpot", "e2e")
WAITS = ("waiting for a sequence slot", "waiting for cache", "waiting for step tokens", "rest of a running step")
SERVER, OWN_PROMPT, OWN_DECODE = "API server", "own prompt", "own decode steps"
MATES, PROMPTS, OTHERS = "other requests in the steps of its prompt", "prompts of others", "other batches and groups"
BATCH, LOST = "other sequences in its decode steps", "preempted: waiting and recomputing"


def _near(requests: Sequence[Request], metric: Metric, name: str) -> list[tuple[Request, float]]:
    """Return the requests around a percentile and their weights, with which they took just so long in the mean.

    A hundredth of all on either side; of a mean all requests.
    """
    key = attrgetter(f"{'tpot' if metric == 'itl' else metric}_seconds")
    ordered = sorted((r for r in requests if key(r) is not None), key=key)
    if name not in PERCENTILES or len(ordered) < 2:
        return [(request, 1 / len(ordered)) for request in ordered]
    width = max(len(ordered) // 100, 5)
    middle = int(PERCENTILES[name] * (len(ordered) - 1))
    below, above = ordered[max(middle - width, 0) : middle + 1], ordered[middle + 1 : middle + width + 2]
    low, high = (sum(map(key, some)) / len(some) for some in (below, above))
    share = (high - quantile(map(key, ordered), PERCENTILES[name])) / (high - low) if high > low else 0.5
    return [(r, share / len(below)) for r in below] + [(r, (1 - share) / len(above)) for r in above]


def _prompt_alone_seconds(table: StepTable, request: Request) -> float:
    """Return seconds of the prompt of a request in steps of its own, less what was cached."""
    past, seconds = request.cached_tokens, 0.0
    while past < request.input_tokens:
        piece = min(request.input_tokens - past, table.step_tokens)
        seconds += table.mixed(0, 0.0, [(piece, past)])
        past += piece
    return seconds


def _decode_alone_seconds(table: StepTable, request: Request) -> float:
    """Return seconds of the decode steps of a request that nobody shares."""
    context = request.input_tokens + request.output_tokens / 2
    return (request.output_tokens - 1) / table.made * table.decode(1, context)


def _of_the_first_token(table: StepTable, request: Request) -> dict[str, float]:
    """Return seconds to the first token by cause."""
    ran, sent = request.prompt_seconds, request.transfer_seconds
    own = min(_prompt_alone_seconds(table, request), ran)
    joining = request.first - request.scheduled - ran - sent
    parts = dict(zip(WAITS, request.waits, strict=True))
    return {
        SERVER: request.server_seconds, **parts, OWN_PROMPT: own, MATES: ran - own,
        "transfer of the cache": sent, "joining the decode pool": joining,
    }  # fmt: skip


def _of_the_rest(table: StepTable, request: Request) -> dict[str, float]:
    """Return seconds from the first to the last token by cause."""
    whole = request.end - request.first
    steps = whole - request.prompts - request.others - request.lost
    own = min(_decode_alone_seconds(table, request), steps)
    return {OWN_DECODE: own, BATCH: steps - own, PROMPTS: request.prompts, OTHERS: request.others, LOST: request.lost}


def causes_of(
    requests: Sequence[Request], tables: tuple[StepTable, StepTable], metric: Metric, name: str
) -> list[tuple[str, float]]:
    """Return the parts of a latency around a percentile, in seconds, largest first; of TPOT those of one token.

    Weighted means over the requests nearest to it, which add up to the percentile. `tables` price the steps of the pool
    that computes prompts and of the one that decodes.
    """
    known = Problems()
    for field, value, words in (("metric", metric, METRICS), ("name", name, tuple(QUANTILES))):
        if not isinstance(value, str) or value not in words:
            known.add(field, plain(value), "is not a known choice", "use one of " + ", ".join(words))
    known.raise_if_any()
    prompts, decodes = tables
    total: dict[str, float] = {}
    for request, weight in _near(requests, metric, name):
        parts = _of_the_first_token(prompts, request) if metric in ("ttft", "e2e") else {}
        if metric != "ttft":
            parts |= _of_the_rest(decodes, request)
        each = max(request.output_tokens - 1, 1) if metric == "tpot" else 1
        for word, seconds in parts.items():
            total[word] = total.get(word, 0.0) + weight * seconds / each
    return sorted(((word, seconds) for word, seconds in total.items() if seconds > 1e-9), key=lambda part: -part[1])
