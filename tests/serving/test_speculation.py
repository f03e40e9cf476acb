"""Speculative decoding: seconds, tokens and memory of guesses and of the steps that verify them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import run
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.serving import InferReport, infer
from shardwise.serving._cost_model import engine_cost_model
from shardwise.serving._ledger import EngineStep
from shardwise.serving._sizes import sizes_of
from shardwise.serving._speculation import tokens_per_step, tokens_per_whole_step
from shardwise.serving._step import step_cost
from shardwise.serving.load import serve

ASKED = Serving(batch=8, input_tokens=1000, output_tokens=101)


@cache
def served(model: str = "llama-3.1-8b", **more: Any) -> InferReport:
    """Return one replica of a model with speculation, on one device or eight."""
    count = 8 if model == "deepseek-v3" else 1
    plan = Plan(tp=count, ep=count) if count > 1 else Plan()
    return infer(load_model(model), Cluster.parse(f"{count}xh200-sxm-141gb"), plan, replace(ASKED, **more))


def step(report: InferReport, tokens: int, context: float) -> float:
    """Return seconds of a decode step of so many tokens a sequence."""
    case = replace(report.case, job=replace(report.case.job, speculative_method="", num_speculative_tokens=0))
    sizes = sizes_of(case.model, case.plan, case.job, case.domains)
    costs = replace(engine_cost_model(case, sizes), decoding=True)
    one = EngineStep(phase="decode", sequences=8, tokens=tokens, context=context)
    return float(step_cost(case, sizes, one, costs).seconds)


@given(k=st.integers(1, 8), rate=st.floats(0.01, 1.0))
def test_a_rate_of_acceptance_is_a_length(k: int, rate: float) -> None:
    """Tokens of a step are the sum of the chances that the first, second, ... guess is accepted, and its own one."""
    job = Serving(speculative_method="ngram", num_speculative_tokens=k, acceptance_rate=rate)
    assert tokens_per_step(job) == pytest.approx(sum(rate**i for i in range(k + 1)), rel=1e-9)


def test_guesses_that_cost_nothing_and_fail_cost_their_verification() -> None:
    """With n-grams of which none is accepted a token takes a step of k + 1 tokens; with all accepted a share of it."""
    plain = served()
    none = served(speculative_method="ngram", num_speculative_tokens=3, acceptance_length=1.0)
    every = served(speculative_method="ngram", num_speculative_tokens=3, acceptance_length=4.0)
    assert every.tpot_seconds == pytest.approx(none.tpot_seconds / 4, rel=1e-12)
    assert none.tpot_seconds == pytest.approx(step(plain, 4, 1049.5), rel=0.01)
    assert none.ttft_seconds == plain.ttft_seconds
    assert none.weights_bytes_per_gpu == plain.weights_bytes_per_gpu
    assert none.kv_cache_tokens == plain.kv_cache_tokens


def test_a_draft_model_adds_its_steps_weights_and_cache() -> None:
    """A small model that guesses takes its own decode steps, by kernels of its own heads, and room for its weights."""
    said = {"num_speculative_tokens": 3, "acceptance_length": 2.5}
    alone, plain = served("llama-3.2-1b"), served()
    free = served(speculative_method="ngram", **said)
    drafted = served(speculative_method="draft_model", draft_model="llama-3.2-1b", **said)
    extra = (drafted.tpot_seconds - free.tpot_seconds) * 2.5
    guess = float(alone.evaluation.decode.seconds - alone.evaluation.decode.overhead)
    assert extra == pytest.approx(3 * guess, rel=1e-9)
    assert drafted.weights_bytes_per_gpu == plain.weights_bytes_per_gpu + alone.weights_bytes_per_gpu
    both = plain.kv_cache_bytes_per_gpu + alone.kv_cache_bytes_per_gpu
    assert drafted.kv_cache_bytes_per_gpu == pytest.approx(both, rel=1e-12)


def test_prediction_layers_are_loaded_to_guess() -> None:
    """DeepSeek-V3's prediction layer is a layer of the model and a projection of two streams, split over the ranks."""
    plain = served("deepseek-v3")
    mtp = served("deepseek-v3", speculative_method="mtp", num_speculative_tokens=1, acceptance_rate=0.8)
    more = mtp.weights_bytes_per_gpu - plain.weights_bytes_per_gpu
    assert 11.5e9 / 8 < more < 11.5e9 / 8 * 1.25
    assert any("not loaded" in note for note in plain.assumptions)
    assert not any("not loaded" in note for note in mtp.assumptions)
    assert mtp.tpot_seconds < plain.tpot_seconds


@settings(max_examples=6, deadline=None)
@given(low=st.floats(1.0, 4.0), high=st.floats(1.0, 4.0), method=st.sampled_from(("ngram", "eagle")))
def test_more_accepted_guesses_are_never_slower(low: float, high: float, method: str) -> None:
    """Seconds of a token never rise with the acceptance, nor does the first token depend on it."""
    low, high = sorted((low, high))
    few, many = (
        served(speculative_method=method, num_speculative_tokens=3, acceptance_length=length) for length in (low, high)
    )
    assert many.tpot_seconds <= few.tpot_seconds
    assert many.ttft_seconds == few.ttft_seconds


@pytest.mark.parametrize("output_tokens", [2, 3, 5, 9, 33])
@pytest.mark.parametrize("guesses", [1, 3, 5])
def test_a_short_answer_takes_whole_steps(output_tokens: int, guesses: int) -> None:
    """The last step of an answer may verify more than is left of it: in a batch as under load, where nobody waits."""
    more = {"speculative_method": "ngram", "num_speculative_tokens": guesses, "acceptance_rate": 0.7}
    one = served(batch=1, output_tokens=output_tokens, **more)
    asked = Workload(
        input_tokens=Length(mean=1000), output_tokens=Length(mean=output_tokens), arrivals=Arrivals(rate=0.01),
        count=20,
    )  # fmt: skip
    load = serve(load_model("llama-3.1-8b"), Cluster.parse("1xh200-sxm-141gb"), Plan(), asked, Serving(**more))
    assert one.tpot_seconds == pytest.approx(load.latencies["tpot"]["mean"], rel=0.002)
    step_seconds = one.tpot_seconds * tokens_per_whole_step(one.job)
    assert (one.request_seconds - one.ttft_seconds) / step_seconds == pytest.approx(
        math.ceil((output_tokens - 1) / tokens_per_step(one.job)), rel=1e-9
    )


def test_requests_under_load_make_what_a_static_batch_makes() -> None:
    """One request of `serve` takes what `infer` says with the same guesses; steps are as many fewer."""
    said = {"speculative_method": "eagle", "num_speculative_tokens": 3, "acceptance_length": 2.5}
    job = Serving(**said)
    asked = Workload(
        input_tokens=Length(mean=1000), output_tokens=Length(mean=101), arrivals=Arrivals(kind="burst"), count=1
    )
    model, cluster = load_model("llama-3.1-8b"), Cluster.parse("1xh200-sxm-141gb")
    found = serve(model, cluster, Plan(), asked, job)
    alone = served(batch=1, max_batched_tokens=8192, max_sequences=1, **said)
    assert found.requests[0].tpot_seconds == pytest.approx(alone.tpot_seconds, rel=0.02)
    assert found.traces[0].iterations == 1 + 100 / 2.5
    open_loop = replace(asked, arrivals=Arrivals(rate=10.0), count=400)
    busy = serve(model, cluster, Plan(), open_loop, job)
    assert busy.latencies["tpot"]["mean"] == pytest.approx(busy.steady.tpot_seconds, rel=0.05)
    assert busy.latencies["tpot"]["mean"] < serve(model, cluster, Plan(), open_loop).latencies["tpot"]["mean"]


BAD = (
    ("--speculative-method mtp --num-speculative-tokens 1 --acceptance-rate 0.7", "speculative_method"),
    ("--speculative-method eagle --num-speculative-tokens 3", "acceptance_length"),
    ("--speculative-method eagle --acceptance-rate 0.7", "num_speculative_tokens"),
    ("--speculative-method eagle --num-speculative-tokens 3 --acceptance-length 5", "acceptance_length"),
    ("--speculative-method draft_model --num-speculative-tokens 3 --acceptance-rate 0.7", "draft_model"),
    ("--speculative-method ngram --num-speculative-tokens 3 --acceptance-rate 0.7 --draft-model gpt2", "draft_model"),
    ("--num-speculative-tokens 3", "num_speculative_tokens"),
)


@pytest.mark.parametrize(("words", "field"), BAD)
@pytest.mark.parametrize("command", ["infer llama-3.1-8b --on 1xh100", "serve llama-3.1-8b --on 1xh100 --rate 1/s"])
def test_guesses_that_say_too_little_are_errors(command: str, words: str, field: str) -> None:
    """A depth without acceptance, an acceptance beyond it, or a draft that is missing is an error of its flag."""
    done = run(*f"{command} {words} --json".split())
    assert done.status == 2
    assert done.fields == [field]


def test_a_state_is_kept_after_every_token_that_is_verified() -> None:
    """Recurrent states cannot go back: of k guesses any may be the last that is accepted, so that k + 1 are kept."""
    plain = served("nemotron-3-nano-30b-a3b")
    guessing = served(
        "nemotron-3-nano-30b-a3b", speculative_method="ngram", num_speculative_tokens=3, acceptance_length=1.0
    )
    state = 4 * 64 * 64 * 128 + 2 * 3 * (64 * 64 + 2 * 8 * 128)
    kinds = plain.case.model.kinds.items()
    layers = sum(count for block, count in kinds if block.mixers and not block.mixers[0].attends)
    assert layers == 23
    more = guessing.kv_cache_bytes_per_gpu - plain.kv_cache_bytes_per_gpu
    assert more == ASKED.batch * 3 * layers * state
    assert guessing.kv_cache_tokens == plain.kv_cache_tokens  # as vLLM prints them, by blocks
    assert guessing.held_tokens(1101) < 0.35 * plain.held_tokens(1101)
