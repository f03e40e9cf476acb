"""The bound that a search leaves plans out by: never above the time, and never falling as stages get slower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws.helpers import tried
from shardwise.plans.schedules import RULES
from shardwise.training.schedules import PipelineShape, StageRun, least_pipeline_seconds, pipeline_time

SCHEDULES = tuple(RULES)
SECONDS = st.floats(0.01, 3.0)


@st.composite
def pipelines(draw: st.DrawFn, schedule: Any) -> tuple[tuple[StageRun[float], ...], PipelineShape[float]]:
    """Draw runs of stages of any unequal cost, and a shape that the schedule can run."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    rules = RULES[schedule]
    if rules.even_stages and sum(counts) % 2:
        counts[0] += 1
    runs = tuple(
        StageRun(count=n, forward=draw(SECONDS), backward_input=draw(SECONDS), backward_weight=draw(SECONDS))
        for n in counts
    )
    p = sum(counts)
    chunks = draw(st.sampled_from(rules.chunks_of([1, 2, 3, 4])))
    micro = draw(st.integers(1, 24))
    if rules.rounds:
        micro = p * draw(st.integers(1, 6))
    micro = rules.next_count(p, micro) if p > 1 else micro
    shape = PipelineShape(
        num_stages=p,
        num_chunks=chunks,
        num_micro=micro,
        send=draw(st.sampled_from((0.0, 0.05, 0.4))),
        overlap_send=draw(st.booleans()),
    )
    return runs, shape


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(data=st.data())
@tried(40)
def test_no_pipeline_is_shorter_than_its_bound(schedule: Any, data: st.DataObject) -> None:
    """Whatever the stages and the messages, the time of a pipeline is at least its bound."""
    runs, shape = data.draw(pipelines(schedule))
    least = least_pipeline_seconds(schedule, runs, shape)
    assert least <= pipeline_time(schedule, runs, shape).total * (1 + 1e-12)
    assert least >= shape.num_micro * max(r.forward + r.backward_input + r.backward_weight for r in runs) * 0.49


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(data=st.data())
@tried(40)
def test_the_bound_never_falls_as_a_stage_gets_slower(schedule: Any, data: st.DataObject) -> None:
    """A longer forward or backward of any stage never makes the bound smaller."""
    runs, shape = data.draw(pipelines(schedule))
    which, by = data.draw(st.integers(0, len(runs) - 1)), data.draw(SECONDS)
    field = data.draw(st.sampled_from(("forward", "backward_input", "backward_weight")))
    slower = tuple(replace(r, **{field: getattr(r, field) + by}) if i == which else r for i, r in enumerate(runs))
    before, after = (least_pipeline_seconds(schedule, r, shape) for r in (runs, slower))
    assert after >= before * (1 - 1e-12)
