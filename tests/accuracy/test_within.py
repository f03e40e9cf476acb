"""What is found within the latencies of a served deployment, against what a row asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accuracy import within
from accuracy.published import Published
from shardwise import InferReport, infer
from shardwise.measured import Record

ROW = {
    "case_id": "one", "metric": "tpot", "value": "0.0235", "model": "llama-3.1-70b", "device": "h100-sxm-80gb",
    "num_gpus": "2", "tp": "2", "pp": "1", "dp": "1", "engine": "vllm", "serving_mode": "online", "weight_dtype": "fp8",
    "engine_version": "", "kv_dtype": "", "max_num_batched_tokens": "",
    "concurrency": "32", "input_tokens": "1024", "output_tokens": "1024", "quality": "medium",
    "citation": "aiconfigurator silicon_sample.csv id 1", "notes": "origin=2026-04-06; captured_tokens=2048",
}  # fmt: skip


def test_rows_are_asked_with_what_their_source_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 8-bit cache and the steps of its recipe, and the captured tokens of the row, are in the question."""
    asked: list[InferReport] = []

    def seen(*question: Any) -> InferReport:
        asked.append(infer(*question))
        return asked[-1]

    monkeypatch.setattr(within, "infer", seen)
    one = within.within(Record(ROW), Published(tmp_path), {"ttft": 0.3, "tpot": 0.0235})
    # Half as many and twice the requests are asked beside them.
    assert [each.case.job.batch for each in asked] == [16, 32, 64]
    case = asked[1].case
    assert (case.job.kv_cache, case.job.batch, case.engine.host.captured_tokens) == ("fp8", 32, 2048)
    # Lengths are drawn from 0.8 to 1 of the nominal ones (InferenceX utils/bench_serving).
    assert case.job.input_tokens == case.job.output_tokens == round(0.9 * 1024)
    assert case.job.max_batched_tokens == 8192
    assert one.predicted == asked[1].output_tokens_per_second
    assert one.tpot == pytest.approx(asked[1].request_tpot_seconds / 0.0235)
    assert one.elasticity > 0


def test_a_limit_of_its_own_latency_is_met_by_what_was_in_flight(tmp_path: Path) -> None:
    """At the TPOT that `infer` predicts for 4 requests, and a thousandth below, 4 are between requests; 3 are whole."""
    row = Record({**ROW, "concurrency": "4"})
    tpot = within.within(row, Published(tmp_path), {"ttft": 9.0, "tpot": 0.01}).tpot * 0.01
    one = within.within(row, Published(tmp_path), {"ttft": 9.0, "tpot": 0.999 * tpot})
    served = one.predicted
    assert one.found < 0.8 * served
    assert one.between == pytest.approx(served, rel=0.05)
    assert within.within(row, Published(tmp_path), {"ttft": 1e-4, "tpot": tpot}).between == 0


def test_lines_count_what_lies_near() -> None:
    """Of two rows one is found within 0.8 to 1.25, and both are as predicted at what was in flight."""
    near = within.Within(
        case_id="a", concurrency=4, served=100, found=110, between=100, predicted=95, tpot=1.05, elasticity=2
    )
    far = within.Within(
        case_id="b", concurrency=4, served=100, found=150, between=110, predicted=105, tpot=0.9, elasticity=4
    )
    first, second, third, fourth, *_ = within.lines([near, far])
    assert "0.8 to 1.25 in 50%" in first
    assert second.startswith("  between requests")
    assert "0.8 to 1.25 in 100%" in second
    assert "0.8 to 1.25 in 100%" in third
    assert fourth.endswith("throughput as its power 3.0")
