"""What the host does between steps, where the next one is not scheduled while one runs, is of every step's time."""

from __future__ import annotations

import pytest

from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.serving import InferReport, ServingOptions, find_engine, infer, launched_engine
from shardwise.serving.load import LoadOptions, policy_for, serve

MODEL, CLUSTER = load_model("llama-3.1-8b"), Cluster.parse("1xh100-sxm-80gb")
SECONDS = find_engine("vllm").host.between_seconds
ONE = Workload(input_tokens=Length(mean=128), output_tokens=Length(mean=64), arrivals=Arrivals(kind="closed", users=4))


def test_releases_that_schedule_after_each_step_take_as_much_longer() -> None:
    """A token of vLLM 0.13 takes longer than one of the same engine with its steps scheduled ahead by just that."""
    job = Serving(input_tokens=128, output_tokens=64)
    after = find_engine("vllm-0.13")
    assert after.host.scheduled_between and not find_engine("vllm-2025").host.scheduled_between
    late, ahead = (_of(job, engine).tpot_seconds for engine in ("vllm-0.13", "vllm-2025"))
    assert late - ahead == pytest.approx(SECONDS, rel=1e-6)


def test_a_server_that_is_told_not_to_schedule_ahead_takes_them_too() -> None:
    """--no-async-scheduling under load: each token takes longer by what lies between steps; asking for it adds none."""
    asked = Workload(
        input_tokens=Length(mean=128),
        output_tokens=Length(mean=64),
        arrivals=Arrivals(kind="closed", users=4),
        count=40,
    )
    usual, ahead, late = (
        serve(MODEL, CLUSTER, Plan(), asked, None, LoadOptions(async_scheduling=how)).latencies["tpot"]["mean"]
        for how in (None, True, False)
    )
    assert ahead == usual
    assert late - usual == pytest.approx(SECONDS, rel=0.1)


@pytest.mark.parametrize(("engine", "seconds"), [("vllm", 0.43e-3), ("sglang", 0.74e-3)])
def test_a_launch_that_does_not_schedule_ahead_is_an_engine_of_its_own(engine: str, seconds: float) -> None:
    """--no-async-scheduling and --disable-overlap-schedule: each token takes what lies between two steps longer."""
    one = launched_engine(engine, "synchronous")
    assert one == f"{engine}-synchronous"
    job = Serving(input_tokens=128, output_tokens=64)
    late, ahead = (_of(job, name).tpot_seconds for name in (one, engine))
    assert late - ahead == pytest.approx(seconds, rel=1e-6)
    policies = [
        policy_for(infer(MODEL, CLUSTER, Plan(), job, ServingOptions(engine=name)).case, job, ONE, LoadOptions())
        for name in (one, engine)
    ]
    assert [policy.async_scheduling for policy in policies] == [False, True]


def test_guesses_that_a_release_does_not_schedule_ahead_of_take_them() -> None:
    """Up to 0.28 vLLM schedules after each step beside n-grams, to 0.27 beside drafts, and never so beside heads."""
    methods = ("", "mtp", "eagle", "ngram", "draft_model")
    between = {
        name: [method for method in methods if find_engine(name).host.schedules_between(method)]
        for name in ("vllm", "vllm-0.28", "vllm-0.24", "vllm-2025")
    }
    assert between == {
        "vllm": [], "vllm-0.28": ["ngram"], "vllm-0.24": ["ngram", "draft_model"], "vllm-2025": ["ngram", "draft_model"]
    }  # fmt: skip
    job = Serving(
        input_tokens=128, output_tokens=64, speculative_method="ngram", num_speculative_tokens=3, acceptance_rate=0.5
    )
    late, ahead = (_of(job, engine).tpot_seconds for engine in ("vllm-0.28", "vllm-0.32"))
    # A step makes 1.875 tokens: the 63 behind the first take 34 steps.
    assert 63 / 34 * (late - ahead) == pytest.approx(SECONDS, rel=1e-6)


def _of(job: Serving, engine: str) -> InferReport:
    return infer(MODEL, CLUSTER, Plan(), job, ServingOptions(engine=engine))
