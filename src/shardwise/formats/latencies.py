"""What benchmarks measured of each request: vLLM's, GuideLLM, inference-perf, genai-bench, AIPerf, and CSV files."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.errors import InputError, Problem
from shardwise.files import read_csv_text


def inside(value: Any, *keys: str) -> Any:
    """Return what lies under keys of JSON objects within each other, None where one is missing.

    >>> inside({"a": {"b": 3}}, "a", "b"), inside({"a": 1}, "a", "b")
    (3, None)
    """
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def document(text: str) -> Any:
    """Return the one JSON document that a text is, None where it is none or a line of a trace."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return None if isinstance(document, dict) and "timestamp" in document else document


def aiperf_requests(text: str) -> list[Any] | None:
    """Return the requests of AIPerf's profile_export.jsonl that were answered; None where a text is none.

    Those that warmed up are left out. github.com/ai-dynamo/aiperf db4f6397 aiperf/common/models/record_models.py.

    >>> aiperf_requests('{"metadata": {"request_start_ns": 5}, "metrics": {}, "error": null}')
    [{'metadata': {'request_start_ns': 5}, 'metrics': {}, 'error': None}]
    """
    begins = re.match(r'\s*\{"(metadata|metrics)"', text[:200])
    try:
        records = [json.loads(line) for line in text.splitlines() if line.strip()] if begins else []
    except (ValueError, RecursionError):
        return None
    if not records or any(inside(one, "metadata", "request_start_ns") is None for one in records):
        return None
    return [
        one
        for one in records
        if inside(one, "error") is None
        and not inside(one, "metadata", "was_cancelled")
        and inside(one, "metadata", "benchmark_phase") in (None, "profiling")
    ]


def aiperf_metric(one: Any, name: str) -> Any:
    """Return a metric of one of AIPerf's records, None where it has none."""
    return inside(one, "metrics", name, "value")


def read_latencies(path: str) -> dict[str, list[float]]:
    """Return the measured ttft, tpot and e2e of the requests of a run that succeeded, in seconds.

    Read are the results of vLLM's benchmark (--save-detailed), GuideLLM's benchmarks.json, inference-perf's
    per_request_lifecycle_metrics.json, genai-bench's requests, AIPerf's profile_export.jsonl, and CSV files with the
    columns ttft_seconds, request_seconds and output_tokens. What a request does not have, such as a second token, is
    left out.
    """
    text = read_csv_text(path, "against")
    data = document(text) if text.lstrip()[:1] in ("{", "[") else None
    try:
        rows = [tuple(map(_measured, row)) for row in _measured_rows(path, text, data)]
    except (AttributeError, KeyError, TypeError, ValueError, csv.Error):
        rows = []
    columns = dict(zip(("ttft", "tpot", "e2e"), zip(*rows, strict=True), strict=bool(rows)))
    finite = {name: [value for value in values if math.isfinite(value)] for name, values in columns.items()}
    if not any(finite.values()):
        rule = "has no latencies of single requests"
        remedy = (
            "give vLLM's --save-detailed result, JSON of GuideLLM, inference-perf, genai-bench or AIPerf, or "
            "ttft_seconds,request_seconds,..."
        )
        raise InputError([Problem("against", path, rule, remedy)])
    return finite


def _measured(value: Any) -> float:
    """Return a number of seconds, nan where a benchmark has none."""
    return math.nan if value is None else float(value)


def _measured_rows(path: str, text: str, data: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield ttft, tpot and e2e of the requests of a file."""
    if (requests := aiperf_requests(text)) is not None:
        for one in requests:
            names = ("time_to_first_token", "inter_token_latency", "request_latency")
            first, each, whole = (_measured(aiperf_metric(one, name)) * 1e-3 for name in names)
            yield first, each, whole
    elif data is None:
        for row in csv.DictReader(io.StringIO(text, newline="")):
            first, whole, made = (float(row[key]) for key in ("ttft_seconds", "request_seconds", "output_tokens"))
            yield first, _each(whole - first, made), whole
    elif isinstance(data, list):
        yield from _inference_perf_latencies(data)
    elif isinstance(data.get("benchmarks"), list):
        for one in (one for run in data["benchmarks"] for one in inside(run, "requests", "successful") or ()):
            first, gap = inside(one, "time_to_first_token_ms"), inside(one, "inter_token_latency_ms")
            yield _measured(first) * 1e-3, _measured(gap) * 1e-3, inside(one, "request_latency")
    elif isinstance(data.get("individual_request_metrics"), list):
        yield from genai_bench_latencies(data)
    elif isinstance(data.get("itls"), list):
        yield from _vllm_latencies(data)


def _each(seconds: float, made: float) -> float:
    """Return seconds of each token after the first, nan where there is none."""
    return seconds / (made - 1) if made > 1 else math.nan


def genai_bench_latencies(data: Mapping[str, Any]) -> Iterator[tuple[float, float, float]]:
    """Yield those of requests without an error, in the unit of time that the run was told to write."""
    unit = 1e-3 if data.get("_time_unit") == "ms" else 1.0
    for one in data["individual_request_metrics"]:
        if inside(one, "error_code") is None:
            first, each, whole = (_measured(inside(one, name)) * unit for name in ("ttft", "tpot", "e2e_latency"))
            yield first, each, whole


def _vllm_latencies(data: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield those of requests without an error, whose first tokens vLLM's benchmark puts at 0.

    Gaps are those between chunks, which hold several tokens where the server speculates: tokens count.
    """
    many = len(data["ttfts"])
    errors, lengths = data.get("errors") or [""] * many, data.get("output_lens")
    for first, gaps, error, made in zip(data["ttfts"], data["itls"], errors, lengths or [None] * many, strict=True):
        if not error and (made is None or made):
            yield first, _each(sum(gaps), len(gaps) + 1 if made is None else made), first + sum(gaps)


def _inference_perf_latencies(data: list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield those of requests without an error; who did not stream has no first token."""
    for one in data:
        if inside(one, "error") is None:
            info, start = inside(one, "info"), one["start_time"]
            answer = inside(info, "response_metrics") or info
            times, made = inside(answer, "output_token_times") or [], inside(answer, "output_tokens") or 0
            first = times[0] - start if times else None
            yield first, _each(times[-1] - times[0], made) if times else None, one["end_time"] - start
