"""Traces of requests as workloads: when each arrived, and how many tokens it had in and out.

Read are CSV files of Azure's LLM inference dataset (TIMESTAMP, ContextTokens, GeneratedTokens;
github.com/Azure/AzurePublicDataset, 2023 and 2024), of BurstGPT (Timestamp, Request tokens, Response tokens;
github.com/HPMLL/BurstGPT) and of this project's own columns (arrival_seconds, input_tokens, output_tokens), and JSON
lines of Mooncake (timestamp in ms, input_length, output_length, and hash_ids: which 512 tokens of a prompt are those of
another where all before them are; github.com/kvcache-ai/Mooncake).
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
from shardwise.plans import HASH_BLOCK_TOKENS, MOST_REQUESTS, Arrivals, Length, Workload

# Columns of each system: when, tokens in, tokens out, and seconds of one unit of time (0: a date).
_CSV = {
    "Azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens", 0.0),
    "BurstGPT": ("Timestamp", "Request tokens", "Response tokens", 1.0),
    "own columns": ("arrival_seconds", "input_tokens", "output_tokens", 1.0),
}
_JSON = ("timestamp", "input_length", "output_length", 1e-3)


def _fail(path: str, row: int, rule: str) -> InputError:
    remedy = "give a trace of Azure, BurstGPT or Mooncake, or a CSV of arrival_seconds, input_tokens, output_tokens"
    return InputError([Problem("trace", f"{path}, row {row}" if row else path, rule, remedy)])


def _seconds(text: object, unit: float) -> float:
    """Return a time in seconds from a number, or from a date with up to seven digits of a second."""
    if unit:
        return float(str(text)) * unit
    whole, _, part = str(text).strip().partition(".")
    found = datetime.fromisoformat(whole.replace("T", " ").split("+")[0])
    digits = part.split("+")[0].rstrip("Z")
    return (found - datetime(1970, 1, 1)).total_seconds() + (float(f"0.{digits}") if digits else 0.0)


def _rows(path: str, text: str) -> Iterator[tuple[Mapping[str, Any], tuple[str, str, str, float]]]:
    """Yield each row with the columns of its system."""
    if text.lstrip().startswith("{"):
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    raise _fail(path, number, "is no JSON") from None
                if not isinstance(row, dict):
                    raise _fail(path, number, "is not a JSON object")
                yield row, _JSON
        return
    reader = csv.DictReader(io.StringIO(text))
    heads = reader.fieldnames or ()
    columns = next((columns for columns in _CSV.values() if set(columns[:3]) <= set(heads)), None)
    if columns is None:
        raise _fail(path, 0, f"has the columns {', '.join(heads)[:120] or 'of nothing'}, which are of no known trace")
    for row in reader:
        yield row, columns


def _blocks(row: Mapping[str, Any], tokens: int, at: tuple[str, int]) -> tuple[int, ...]:
    """Return the hash blocks of a prompt of so many tokens, none where the trace has none."""
    found = row.get("hash_ids", ())
    if not isinstance(found, list | tuple) or any(type(one) is not int or not 0 <= one < 2**63 for one in found):
        raise _fail(*at, "has hash_ids that are no list of whole numbers")
    most = -(-tokens // HASH_BLOCK_TOKENS)
    if len(found) > most:
        rule = f"has {len(found)} hash blocks, where a prompt of {tokens} tokens has {most} of {HASH_BLOCK_TOKENS}"
        raise _fail(*at, rule)
    return tuple(found)


def read_trace(path: str, speed: float = 1.0) -> Workload:
    """Return the requests of a file as a workload, `speed` times as fast; raises `InputError` naming the row.

    Requests without a prompt or an answer are left out, as engines refuse them; times start at 0.
    """
    times: list[float] = []
    pairs: list[tuple[int, int]] = []
    blocks: list[tuple[int, ...]] = []
    for number, (row, (when, asked, made, unit)) in enumerate(_rows(path, read_csv_text(path, "trace")), 1):
        try:
            at, tokens, out = _seconds(row[when], unit), int(float(row[asked])), int(float(row[made]))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise _fail(path, number, f"has no number in {when}, {asked} or {made}") from None
        if not math.isfinite(at) or not 0 <= tokens <= 10**8 or not 0 <= out <= 10**8:
            raise _fail(path, number, "has a number that no request has")
        if times and at < times[-1]:
            raise _fail(path, number, "comes before the row above it: a trace must be sorted by time")
        if tokens and out:
            times.append(at)
            pairs.append((tokens, out))
            blocks.append(_blocks(row, tokens, (path, number)))
        if len(times) > MOST_REQUESTS:
            raise _fail(path, number, f"is beyond the {MOST_REQUESTS:,} requests that are read")
    if not times:
        raise _fail(path, 0, "holds no request")
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
