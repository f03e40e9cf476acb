"""Clients that wait for answers: what they take to ask again decides who is answered together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Plan, Workload
from shardwise.serving import ServingOptions
from shardwise.serving.load import LoadOptions, ServeReport, client_seconds, serve

# github.com/vllm-project/vllm pull 23151, 2025-08: Qwen3-30B-A3B on one H100, 10 users, 100 requests; means of its run.
ASKED = Workload(
    input_tokens=Length(mean=2048),
    output_tokens=Length(mean=1024),
    arrivals=Arrivals(kind="closed", users=10),
    count=100,
    finite=True,
)
MEASURED = 0.26722, 0.01318


def answer(think: float | None) -> ServeReport:
    """Return the report of that benchmark where users think so long."""
    asked = replace(ASKED, arrivals=replace(ASKED.arrivals, think_seconds=think))
    options = LoadOptions(serving=ServingOptions(engine="vllm-0.10"))
    return serve(load_model("qwen3-30b-a3b"), Cluster.parse("1xh100-sxm-80gb"), Plan(), asked, None, options)


def test_users_of_equal_requests_stay_in_step_where_steps_are_mixed_too() -> None:
    """A request that comes back at once would join the next step alone: its first token comes in half of the time.

    Tokens are 17 % slow where ten rows are filled up to sixteen whose experts are as others', 2 without.
    """
    usual, at_once = answer(None), answer(0.0)
    first, token = usual.latencies["ttft"]["mean"], usual.latencies["tpot"]["mean"]
    assert first + client_seconds(2048) == pytest.approx(MEASURED[0], rel=0.1)
    assert token == pytest.approx(MEASURED[1], rel=0.18)
    assert at_once.latencies["ttft"]["mean"] < 0.55 * first
    assert usual.latencies == answer(client_seconds(2048)).latencies


@pytest.mark.parametrize(("tp", "measured"), [(4, 2233.44), (8, 2704.56)])
def test_mixtures_reach_more_of_h20_than_of_h100(tp: int, measured: float) -> None:
    """Tokens a second of Qwen3-Next in SGLang (pull 10467, 2025-09), 32 users: experts took a share of H100's peak."""
    lengths = {"input_tokens": Length(mean=1000), "output_tokens": Length(mean=2000)}
    asked = replace(ASKED, **lengths, arrivals=Arrivals(kind="closed", users=32))
    options = LoadOptions(serving=ServingOptions(engine="sglang"))
    report = serve(load_model("qwen3-next-80b-a3b"), Cluster.parse(f"{tp}xh20"), Plan(tp=tp), asked, None, options)
    assert report.output_tokens_per_second == pytest.approx(measured, rel=0.2)


def test_what_clients_are_taken_to_need_is_said() -> None:
    """It is an assumption where nobody states it, and none where somebody does."""
    left_out, stated = (any("users ask again after" in note for note in answer(t).assumptions) for t in (None, 0.5))
    assert left_out and not stated
