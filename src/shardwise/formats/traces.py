"""Traces of requests as workloads: when each arrived, and how many tokens it had in and out.

Read are CSV files of Azure's LLM inference dataset (TIMESTAMP, ContextTokens, GeneratedTokens;
github.com/Azure/AzurePublicDataset, 2023 and 2024), of BurstGPT (Timestamp, Request tokens, Response tokens;
github.com/HPMLL/BurstGPT) and of this project's own columns (arrival_seconds, input_tokens, output_tokens, and, if
there, conversation: a word of requests whose prompts begin with all that was said before in it), and JSON lines of
Mooncake (timestamp in ms, input_length, output_length, and hash_ids: which 512 tokens of a prompt are those of
another where all before them are; github.com/kvcache-ai/Mooncake). What benchmarks write is read too, their requests
that succeeded by the time they were sent: vLLM (bench serve --save-result --save-detailed: input_lens, output_lens,
start_times; vllm/benchmarks/serve.py), GuideLLM (benchmarks.json: request_start_time, prompt_tokens, output_tokens;
guidellm/schemas/request_stats.py), inference-perf (per_request_lifecycle_metrics.json: start_time, info;
inference_perf/apis/base.py) and AIPerf (profile_export.jsonl: request_start_ns, input_sequence_length). Lengths
without times are those of genai-bench (genai_bench/metrics/metrics.py), which says how many requests are in flight or
come, and of ShareGPT's conversations, of which vLLM's benchmark sends the first question.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from shardwise.errors import InputError, Problem
from shardwise.files import read_csv_text
from shardwise.formats.latencies import aiperf_metric, aiperf_requests, document, genai_bench_latencies, inside
from shardwise.plans import MOST_REQUESTS, Arrivals, Length, Workload

# Columns of each system: when, tokens in, tokens out, and seconds of one unit of time (0: a date).
_CSV = {
    "Azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens", 0.0),
    "BurstGPT": ("Timestamp", "Request tokens", "Response tokens", 1.0),
    "own columns": ("arrival_seconds", "input_tokens", "output_tokens", 1.0),
}
# github.com/kvcache-ai/Mooncake FAST25-release/README.md: each hash is of 512 tokens.
_HASH_TOKENS = 512
_MOST_BLOCKS = 10_000_000
# Clocks count from 1970 in nanoseconds at the finest.
_MOST_SECONDS = 1e19
_JSON = ("timestamp", "input_length", "output_length", 1e-3)


_REMEDY = (
    "give a trace of Azure, BurstGPT or Mooncake, requests of vLLM's benchmark, GuideLLM, inference-perf or AIPerf, or "
    "a CSV of arrival_seconds, input_tokens, output_tokens"
)


def _fail(path: str, row: int, rule: str, remedy: str = _REMEDY) -> InputError:
    return InputError([Problem("trace", f"{path}, row {row}" if row else path, rule, remedy)])


def _seconds(text: object, unit: float) -> float:
    """Return a time in seconds from a number, or from a date with up to seven digits of a second."""
    if unit:
        return float(str(text)) * unit
    whole, _, part = str(text).strip().partition(".")
    moment = datetime.fromisoformat(whole.replace("T", " ").split("+")[0])
    digits = part.split("+")[0].rstrip("Z")
    return (moment - datetime(1970, 1, 1)).total_seconds() + (float(f"0.{digits}") if digits else 0.0)


def _of_vllm(path: str, data: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    if "input_lens" not in data:
        rule = "is a result of vLLM's benchmark with sums alone, without input_lens and output_lens"
        raise _fail(path, 0, rule, "run vllm bench serve with --save-result --save-detailed")
    if data.get("start_times") is None:
        rule = "has lengths but no start_times: its release of the benchmark does not write when requests were sent"
        raise _fail(path, 0, rule, "use a release that does, or say --rate with --input-tokens and --output-tokens")
    lists = [data.get(key) for key in ("start_times", "input_lens", "output_lens")]
    columns = [one for one in lists if isinstance(one, list)]
    if len(columns) < len(lists) or len({len(one) for one in columns}) > 1:
        raise _fail(path, 0, "must have as many start_times as input_lens and output_lens")
    yield from zip(*columns, strict=True)


def _of_guidellm(path: str, data: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    for number, run in enumerate(data["benchmarks"], 1):
        requests = inside(run, "requests", "successful")
        if not isinstance(requests, list):
            raise _fail(path, 0, f"lists no requests of benchmark {number}", "write GuideLLM's whole benchmarks.json")
        count = inside(run, "metrics", "request_totals", "successful")
        if isinstance(count, int) and count > len(requests):
            rule = f"lists {len(requests)} of the {count} requests of benchmark {number}"
            raise _fail(path, 0, rule, "run GuideLLM without --sample-requests")
        for one in requests:
            sent = inside(one, "request_start_time")
            yield (
                inside(one, "start_time") if sent is None else sent,
                inside(one, "prompt_tokens"),
                inside(one, "output_tokens"),
            )


def _of_inference_perf(path: str, data: list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    for one in data:
        if inside(one, "error") is None:
            asked, made = inside(one, "info", "input_tokens"), inside(one, "info", "output_tokens")
            asked = inside(one, "info", "request_metrics", "text", "input_tokens") if asked is None else asked
            made = inside(one, "info", "response_metrics", "output_tokens") if made is None else made
            yield inside(one, "start_time"), asked, made


def _of_aiperf(requests: list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    for one in requests:
        began, asked = inside(one, "metadata", "request_start_ns"), aiperf_metric(one, "input_sequence_length")
        yield began * 1e-9 if type(began) is int else None, asked, aiperf_metric(one, "output_sequence_length")


def _of_benchmark(path: str, data: Any) -> list[tuple[Any, Any, Any]]:
    """Return when each request of a benchmark was sent, its tokens in and out; sorted, as results are by their end."""
    if isinstance(data, list):
        if data and inside(data[0], "conversations") is not None:
            rule = "holds texts, as ShareGPT does, without times"
            raise _fail(path, 0, rule, "add --rate or --users")
        benchmark_rows = _of_inference_perf(path, data)
    elif isinstance(data.get("benchmarks"), list):
        benchmark_rows = _of_guidellm(path, data)
    elif "input_lens" in data or {"total_input_tokens", "request_throughput"} <= data.keys():
        benchmark_rows = _of_vllm(path, data)
    elif "individual_request_metrics" in data or "aggregated_metrics" in data:
        rule = "is a result of genai-bench, which does not write when requests were sent"
        raise _fail(path, 0, rule, "add --rate or --users")
    elif "load_summary" in data:
        rule = "is a summary of inference-perf, without its requests"
        raise _fail(path, 0, rule, "give its per_request_lifecycle_metrics.json")
    else:
        raise _fail(path, 0, f"is JSON with {', '.join(map(str, data))[:120] or 'nothing'}, which is of no known trace")
    return _sorted(path, benchmark_rows)


def _sorted(path: str, benchmark_rows: Iterator[tuple[Any, Any, Any]]) -> list[tuple[Any, Any, Any]]:
    rows = list(benchmark_rows)
    for number, row in enumerate(rows, 1):
        if any(isinstance(one, bool) or not isinstance(one, int | float) for one in row):
            raise _fail(path, number, "has no number for when it was sent, its tokens in or out")
    return sorted(rows)


def _requests(path: str, text: str) -> list[tuple[Any, Any, Any]] | None:
    """Return the requests of a benchmark; None where a text is a trace."""
    if (answered := aiperf_requests(text)) is not None:
        return _sorted(path, _of_aiperf(answered))
    data = document(text) if text.lstrip()[:1] in ("{", "[") else None
    return None if data is None else _of_benchmark(path, data)


def _rows(path: str, text: str) -> Iterator[tuple[Mapping[str, Any], tuple[str, str, str, float]]]:
    """Yield each row with the columns of its system."""
    if (requests := _requests(path, text)) is not None:
        own = _CSV["own columns"]
        for sent, asked, made in requests:
            yield {own[0]: sent, own[1]: asked, own[2]: made}, own
        return
    if text.lstrip().startswith("{"):
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    raise _fail(path, number, "is no JSON") from None
                if not isinstance(row, dict):
                    raise _fail(path, number, "is not a JSON object")
                if "input_lens" in row or "request_throughput" in row:
                    rule = "is one of several results of vLLM's benchmark (--append-result)"
                    raise _fail(path, number, rule, "give one of them, a line of its own, as a file")
                yield row, _JSON
        return
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        heads = reader.fieldnames or ()
        columns = next((columns for columns in _CSV.values() if set(columns[:3]) <= set(heads)), None)
        if columns is None:
            rule = f"has the columns {', '.join(heads)[:120] or 'of nothing'}, which are of no known trace"
            raise _fail(path, 0, rule)
        for row in reader:
            yield row, columns
    except csv.Error as error:
        raise _fail(path, 0, f"cannot be read ({error})") from None


class _SharedPrompts:
    """What prompts of a trace share: hash blocks as they are read, or all that was said before in a conversation."""

    def __init__(self, path: str) -> None:
        self.path, self.names, self.blocks = path, 0, 0
        self.talks: dict[str, tuple[tuple[tuple[int, int], ...], int]] = {}

    def before(self, row: Mapping[str, Any], number: int, asked: int, made: int) -> tuple[tuple[int, int], ...]:
        """Return the blocks of a row, none where it says nothing; raises `InputError` with what is wrong."""
        talk = row.get("conversation")
        shared = self._resent(str(talk), number, asked, made) if talk else self._hashed(row, number, asked)
        self.blocks += len(shared)
        if self.blocks > _MOST_BLOCKS:
            raise _fail(self.path, number, f"is beyond the {_MOST_BLOCKS:,} blocks of prompts that are read")
        return shared

    def _resent(self, talk: str, number: int, asked: int, made: int) -> tuple[tuple[int, int], ...]:
        blocks, tokens = self.talks.get(talk, ((), 0))
        if asked <= tokens:
            rule = f"has {asked} input tokens, not more than the {tokens} that its conversation has before it"
            remedy = "count what is sent again within input_tokens, or leave its conversation empty"
            raise _fail(self.path, number, rule, remedy)
        self.names += 2
        blocks_sent = (*blocks, (self.names - 2, asked - tokens), (self.names - 1, made))
        self.talks[talk] = blocks_sent, asked + made
        return blocks_sent

    def _hashed(self, row: Mapping[str, Any], number: int, asked: int) -> tuple[tuple[int, int], ...]:
        hashes = row.get("hash_ids", ())
        if not isinstance(hashes, list | tuple) or any(type(one) is not int or not 0 <= one < 2**63 for one in hashes):
            raise _fail(self.path, number, "has hash_ids that are no list of whole numbers")
        most = -(-asked // _HASH_TOKENS)
        if len(hashes) > most:
            rule = f"has {len(hashes)} hash blocks, where a prompt of {asked} tokens has {most} of {_HASH_TOKENS}"
            raise _fail(self.path, number, rule)
        return tuple((name, min(_HASH_TOKENS, asked - _HASH_TOKENS * i)) for i, name in enumerate(hashes))


def read_trace(path: str, speed: float = 1.0, last: float = math.inf) -> Workload:
    """Return the requests of a file as a workload, `speed` times as fast; raises `InputError` naming the row.

    Of a longer trace the `last` seconds are taken.

    Requests without a prompt or an answer are left out, as engines refuse them; times start at 0.
    """
    times: list[float] = []
    pairs: list[tuple[int, int]] = []
    blocks: list[tuple[tuple[int, int], ...]] = []
    prompts, early = _SharedPrompts(path), 0
    for number, (row, (when, asked, made, unit)) in enumerate(_rows(path, read_csv_text(path, "trace")), 1):
        try:
            at, tokens, out = _seconds(row[when], unit), int(float(row[asked])), int(float(row[made]))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise _fail(path, number, f"has no number in {when}, {asked} or {made}") from None
        if not abs(at) <= _MOST_SECONDS or not 0 <= tokens <= 10**8 or not 0 <= out <= 10**8:
            raise _fail(path, number, "has a number that no request has")
        if times and at < times[-1]:
            raise _fail(path, number, "comes before the row above it: a trace must be sorted by time")
        if tokens and out:
            times.append(at)
            pairs.append((tokens, out))
            blocks.append(prompts.before(row, number, tokens, out))
            while times[early] < at - last:
                early += 1
        if len(times) - early > MOST_REQUESTS:
            raise _fail(path, number, f"is beyond the {MOST_REQUESTS:,} requests that are read")
    if not times:
        raise _fail(path, 0, "holds no request")
    times, pairs, blocks = times[early:], pairs[early:], blocks[early:]
    first = times[0]
    rising = tuple((at - first) / speed for at in times)
    mean_in, mean_out = (sum(pair[i] for pair in pairs) / len(pairs) for i in (0, 1))
    return Workload(
        input_tokens=Length(mean=mean_in),
        output_tokens=Length(mean=mean_out),
        arrivals=Arrivals(kind="trace", times=rising),
        pairs=tuple(pairs),
        blocks=tuple(blocks) if any(blocks) else (),
        count=len(pairs),
    )


# platform.openai.com/tokenizer (2026-11): a token is about four characters of English text.
_CHARACTERS = 4.0
# vllm 5c92be249 vllm/benchmarks/dataset_utils.py is_valid_sequence: what ShareGPT's conversations are left out for.
_LEAST, _MOST_IN, _MOST_ALL = 4, 1024, 2048


def read_lengths(path: str, arrivals: Arrivals | None = None) -> Workload | None:
    """Return the lengths of a file that holds no times, as requests that arrive as is said; None where it has times.

    A run of genai-bench itself says how many requests are in flight. Tokens of texts are their characters over four.
    """
    text = read_csv_text(path, "trace")
    data = document(text) if text.lstrip()[:1] in ("{", "[") else None
    if isinstance(data, dict) and isinstance(data.get("individual_request_metrics"), list):
        done = [one for one in data["individual_request_metrics"] if inside(one, "error_code") is None]
        pairs = [(inside(one, "num_input_tokens"), inside(one, "num_output_tokens")) for one in done]
        arrivals = arrivals or _genai_bench_arrivals(data, len(done))
    elif isinstance(data, list) and data and inside(data[0], "conversations") is not None:
        pairs = [pair for one in data if (pair := _first_turns(one)) is not None]
    else:
        return None
    whole = [(int(a), int(b)) for a, b in pairs if _count(a) and _count(b)]
    if not whole or arrivals is None:
        rule = "says no arrivals" if whole else "holds no request with its tokens"
        raise _fail(path, 0, rule, "add --rate or --users" if whole else _REMEDY)
    means = [sum(pair[i] for pair in whole) / len(whole) for i in (0, 1)]
    return Workload(
        input_tokens=Length(mean=means[0]), output_tokens=Length(mean=means[1]), arrivals=arrivals,
        pairs=tuple(whole[:MOST_REQUESTS]), count=len(whole[:MOST_REQUESTS]),
    )  # fmt: skip


def _genai_bench_arrivals(data: Mapping[str, Any], done: int) -> Arrivals | None:
    """Return the arrivals of a run of genai-bench, None where it does not say them.

    Its open loop writes requests a second in the place of those in flight (genai_bench/cli/cli.py): what is in flight
    on average tells which they are.
    """
    run = {name: inside(data, "aggregated_metrics", name) for name in (
        "num_concurrency", "request_rate", "arrival_requests_per_second", "run_duration", "iteration_type",
    )}  # fmt: skip
    rate, users = run["request_rate"], run["num_concurrency"]
    arrived, seconds = run["arrival_requests_per_second"], run["run_duration"]
    if run["iteration_type"] == "request_rate" and isinstance(rate, int | float) and 0 < rate < math.inf:
        return Arrivals(rate=float(rate))
    if not isinstance(users, int | float) or isinstance(users, bool) or not 0 < users < math.inf:
        return None
    if isinstance(arrived, int | float) and isinstance(seconds, int | float) and arrived > 0 and seconds > 0:
        waits = [row[2] for row in genai_bench_latencies(data)]
        in_flight = arrived * sum(waits) / max(done, 1)
        if in_flight <= 0 or abs(math.log(arrived / users)) < abs(math.log(in_flight / users)):
            return Arrivals(rate=float(arrived))
    return Arrivals(kind="closed", users=int(users)) if users == int(users) else None


def _count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= 10**8


def _first_turns(one: Any) -> tuple[int, int] | None:
    """Return the tokens of a conversation's first question and answer, None where it is left out."""
    turns = inside(one, "conversations")
    texts = [inside(turn, "value") for turn in turns[:2]] if isinstance(turns, list) else []
    if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        return None
    asked, made = (round(len(text) / _CHARACTERS) for text in texts)
    short = min(asked, made) < _LEAST
    return None if short or asked > _MOST_IN or asked + made > _MOST_ALL else (asked, made)
