"""Batches of a pipeline that take from one list: even up to a rate, beyond which one takes in most of who comes."""

from __future__ import annotations

import pytest

from command_line import run
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.serving import ServingOptions
from shardwise.serving.load import LoadOptions, ServeReport, even_share, serve
from shardwise.serving.load._even import gathering_rate


def _at(rate: float, stages: int, engine: str, lengths: tuple[int, int], count: int = 8000) -> ServeReport:
    """Return Llama-3.1-8B in stages of H100 at a rate, of prompts and answers of equal lengths."""
    prompt, answer = lengths
    asked = Workload(
        input_tokens=Length(mean=prompt), output_tokens=Length(mean=answer), arrivals=Arrivals(rate=rate), count=count
    )
    cluster, options = Cluster.parse(f"{stages}xh100-sxm-80gb"), LoadOptions(serving=ServingOptions(engine=engine))
    return serve(load_model("llama-3.1-8b"), cluster, Plan(pp=stages), asked, Serving(), options)


@pytest.mark.parametrize(
    ("stages", "engine", "lengths"),
    [(2, "sglang", (700, 300)), (4, "sglang", (1000, 200)), (4, "tensorrt-llm", (500, 300)), (8, "sglang", (700, 100))],
)
def test_batches_are_even_up_to_the_rate_at_which_one_gathers_who_comes(
    stages: int, engine: str, lengths: tuple[int, int]
) -> None:
    """Seconds a token are those of equal batches below it; beyond it they are a fifth more at least."""
    form = _at(0.01, stages, engine, lengths, 50).fleet.decode.form
    share, rate = float(even_share(form)[0]), float(gathering_rate(form)[0])
    below, beyond = (
        _at(share * float(form.capacity[0]), stages, engine, lengths),
        _at((1.3 if stages == 2 else 1.6) * rate, stages, engine, lengths),
    )
    assert below.latencies["tpot"]["mean"] == pytest.approx(float(below.steady.tpot_seconds), rel=0.12)
    assert beyond.latencies["tpot"]["mean"] > 1.2 * float(beyond.steady.tpot_seconds)


def test_more_stages_are_even_up_to_less_of_what_they_carry() -> None:
    """A batch of many stages gets the arrivals of all the time in which the others do not run."""
    shares = [float(even_share(_at(0.01, n, "sglang", (1000, 200), 50).fleet.decode.form)[0]) for n in (1, 2, 4, 8)]
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.2 < 0.25 < shares[1]


@pytest.mark.parametrize(("flags", "said"), [("--pp 4 --engine sglang", True), ("--tp 4 --engine sglang", False)])
def test_serve_says_where_its_capacity_is_that_of_equal_batches(flags: str, said: bool) -> None:
    """What one batch carries that has gathered all is less."""
    asked = "--input-tokens 1000 --output-tokens 200 --rate 5/s --requests 50"
    done = run(*f"serve llama-3.1-8b --on 4xh100 {flags} {asked}".split())
    assert ("the capacity is that of equal" in " ".join(done.out.split())) == said
