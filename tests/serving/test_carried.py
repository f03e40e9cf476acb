"""What a deployment is said to carry: one number whatever is asked, and what simulations carry."""

from __future__ import annotations

import pytest
from steady import draw

from command_line import run
from shardwise.plans import Arrivals
from shardwise.records import replace
from shardwise.serving import ServingOptions
from shardwise.serving.load import LoadOptions, ServeReport, serve
from shardwise.serving.load._requests import queue_growth


@pytest.mark.parametrize(
    ("kind", "seed", "below", "above"),
    [
        # Full queues of eight groups are served at 53 requests/s by simulation, 76 by the form; 36 are carried.
        ("groups", 912, 0.95, 1.3),
        # Of equal answers through two stages, whose prompts crowd in the batch behind which others wait.
        ("stages", 105, 0.85, 1.5),
    ],
)
def test_equal_answers_that_come_one_by_one_do_not_go_on_in_step(
    kind: str, seed: int, below: float, above: float
) -> None:
    """Groups and stages carry what simulations carry: no queue grows at so much of it, and one does at so much."""
    drawn = draw(kind, seed)
    form, many = drawn.fleet.decode.form, drawn.fleet.decode.many
    carried = float(form.capacity[0]) * many
    count = 12 * int(form.prices.counts.max()) * drawn.queues

    def grows(rate: float) -> bool:
        asked = replace(drawn.workload, arrivals=Arrivals(rate=rate), count=count, seed=5)
        _, traces = drawn.fleet.run(asked, "round-robin")
        return queue_growth([r for trace in traces for r in trace.finished], rate) > 0

    assert not grows(below * carried)
    assert grows(above * carried)


def _asked(rate: float, count: int = 1600) -> ServeReport:
    """Return two groups of attention, of 64 sequences each, at a rate."""
    drawn = draw("groups", 714)
    case = drawn.fleet.decode.base.case
    asked = replace(drawn.workload, arrivals=Arrivals(rate=rate), count=count)
    options = LoadOptions(serving=ServingOptions(engine=case.engine))
    return serve(case.model, case.cluster, case.plan, asked, replace(case.job, max_batched_tokens=2048), options)


def test_what_is_carried_is_one_number_whatever_is_asked() -> None:
    """At a tenth of it, at most of it, and at ten times; not where twenty requests find room that thousands have not.

    Where the simulation of a rate shows a queue that grows, what is carried is as it has it.
    """
    most = _asked(3.0, 20).capacity_per_second
    rows = [_asked(rate * most, count).capacity_per_second for rate, count in ((0.85, 1600), (10, 20), (1.2, 20))]
    assert rows == pytest.approx([most] * 3)
    beyond = _asked(1.25 * most)
    assert not beyond.stable
    assert beyond.capacity_per_second == pytest.approx(most, rel=0.15)


@pytest.mark.parametrize(("engine", "most"), [("vllm", 206.0), ("tensorrt-llm", 292.0)])
def test_short_answers_of_a_pipeline_begin_no_faster_than_full_steps(engine: str, most: float) -> None:
    """Two tokens of Qwen3-30B on two L40S: 4,000 prompts at once are served at 204 and 286 a second (simulated)."""
    words = f"serve qwen3-30b-a3b --on 2xl40s --pp 2 --rate 1/s --requests 50 --input-tokens 130 --engine {engine}"
    carried = [
        run(*words.split(), "--output-tokens", tokens, "--json").tree["capacity"]["requests_per_second"]
        for tokens in ("1", "2", "3")
    ]
    assert carried == sorted(carried, reverse=True)
    assert carried[1] == pytest.approx(most, rel=0.04)
