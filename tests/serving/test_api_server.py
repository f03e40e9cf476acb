"""Requests that come together wait in vLLM's API server, which takes all of them before the engine has the first."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shardwise import InputError
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.serving import ServingOptions
from shardwise.serving.load import SERVER, LoadOptions, ServeReport, serve

EACH, TOKEN = 1.0e-3, 3.6e-6


def ran(engine: str = "vllm", dp: int = 1, seconds: float | None = None, pp: int = 1, **more: Any) -> ServeReport:
    """Return Llama-3.1-8B on H100 under 64 requests at once of 1,000 and 100 tokens, unless said otherwise."""
    fields: dict[str, Any] = {
        "input_tokens": Length(mean=1000), "output_tokens": Length(mean=100), "arrivals": Arrivals(kind="burst"),
        "count": 64,
    }  # fmt: skip
    options = LoadOptions(serving=ServingOptions(engine=engine), api_server_seconds=seconds)
    cluster = Cluster.parse(f"{dp * pp}xh100-sxm-80gb")
    return serve(load_model("llama-3.1-8b"), cluster, Plan(dp=dp, pp=pp), Workload(**fields | more), Serving(), options)


@pytest.mark.parametrize(
    ("engine", "rush"),
    [
        ("vllm", 63 * EACH),
        ("vllm-0.14", 63 * EACH + 31 * 1000 * TOKEN),
        ("vllm-0.6", 0.0),
        ("sglang", 0.0),
        ("tensorrt-llm", 0.0),
    ],
)
def test_a_burst_waits_until_the_server_has_taken_all_of_it(engine: str, rush: float) -> None:
    """First tokens, whole answers and the end of the run are later by it, and nothing else is."""
    found, at_once = ran(engine), ran(engine, seconds=0.0)
    for metric in ("ttft", "e2e"):
        for name, seconds in found.latencies[metric].items():
            assert seconds - at_once.latencies[metric][name] == pytest.approx(rush, abs=1e-9)
    for metric in ("tpot", "queue"):
        assert found.latencies[metric] == pytest.approx(at_once.latencies[metric], abs=1e-9)
    assert found.span_seconds - at_once.span_seconds == pytest.approx(rush, abs=1e-9)
    assert dict(found.why("ttft", "p50")).get(SERVER, 0.0) == pytest.approx(rush)
    assert sum(dict(found.why("e2e", "p90")).values()) == pytest.approx(found.latencies["e2e"]["p90"])
    assert any("API server" in one for one in found.assumptions) == bool(rush)


def test_every_replica_has_a_server_of_its_own() -> None:
    """Two replicas take half of the requests each."""
    assert dict(ran(dp=2).why("ttft", "mean"))[SERVER] == pytest.approx(31 * EACH)


@pytest.mark.parametrize(("finite", "rush"), [(True, 15 * EACH), (False, 0.0)])
def test_users_of_a_benchmark_start_together(finite: bool, rush: float) -> None:
    """Their first requests wait for each other, later ones for nobody; users of a server that runs on join in turn."""
    found = ran(arrivals=Arrivals(kind="closed", users=16), finite=finite)
    waited = sorted((one.server_seconds for one in found.requests), reverse=True)
    assert waited[:16] == pytest.approx([rush] * 16)
    assert not any(waited[16:])


def test_workers_of_pools_are_sent_prompts_that_were_read() -> None:
    """Of two pools no request waits for a server, unless it is said what one takes."""
    for seconds, first in ((None, 0.0), (0.01, 0.64)):
        options = LoadOptions(prefill=Plan(dp=1), api_server_seconds=seconds)
        tokens = Length(mean=100)
        asked = Workload(input_tokens=tokens, output_tokens=tokens, arrivals=Arrivals(kind="burst"), count=64)
        cluster = Cluster.parse("2xh100-sxm-80gb")
        report = serve(load_model("llama-3.1-8b"), cluster, Plan(), asked, Serving(), options)
        assert [one.server_seconds for one in report.requests] == pytest.approx([first] * 64)


@pytest.mark.parametrize("rate", [0.01, 5.0])
def test_requests_that_come_one_by_one_wait_for_nobody(rate: float) -> None:
    """An open loop has no part of the server, unless it is said what it takes for each."""
    arrivals = Arrivals(rate=rate, kind="constant")
    found, slow = ran(arrivals=arrivals), ran(arrivals=arrivals, seconds=0.011)
    assert SERVER not in dict(found.why("ttft", "p99"))
    assert slow.latencies["ttft"]["mean"] - found.latencies["ttft"]["mean"] == pytest.approx(0.011)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize("seconds", [0.001894, 0.01, 1 / 3])
def test_a_burst_is_run_alike_whenever_it_begins(seconds: float, engine: str, pp: int) -> None:
    """Seconds from when the engine has the requests are the same, to the last step, through stages too."""
    runs = (ran(engine, seconds=each, pp=pp).requests for each in (seconds, 0.0))
    found, at_once = (sorted(one.end - one.server_seconds for one in requests) for requests in runs)
    assert found == pytest.approx(at_once, abs=1e-9)


@pytest.mark.parametrize("seconds", [-0.001, math.inf, math.nan])
def test_a_server_takes_no_less_than_nothing(seconds: float) -> None:
    """Seconds that cannot be are refused by name."""
    with pytest.raises(InputError, match="api_server_seconds"):
        ran(seconds=seconds)
