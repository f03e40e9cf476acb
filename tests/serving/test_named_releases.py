"""An engine may be named with its release wherever it is asked for, in Python as on the command line."""

from __future__ import annotations

import pytest

import shardwise
from shardwise.errors import InputError
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.search import SearchOptions, ServingSpace
from shardwise.serving import ServingOptions, find_engine
from shardwise.serving.load import LoadOptions, serve

_MODEL, _JOB = load_model("llama-3.1-8b"), Serving(batch=8, input_tokens=512, output_tokens=64)


@pytest.mark.parametrize(
    ("asked", "device", "engine"),
    [
        ("vllm==0.12.0", "h100-sxm-80gb", "vllm-0.13"),
        ("vLLM 0.11.0", "h100-sxm-80gb", "vllm-0.11"),
        ("vllm==0.11.0", "mi300x", "vllm-0.13"),
        ("vllm-0.3.2", "h100-sxm-80gb", "vllm-v0"),
        ("trtllm-1.1.0rc5", "h100-sxm-80gb", "tensorrt-llm"),
        ("vllm-0.2", "h100-sxm-80gb", "vllm-0.2"),
        ("vllm==0.11.0.post1", "h100-sxm-80gb", "vllm-0.11"),
        ("vllm==0.11.0+cu129", "h100-sxm-80gb", "vllm-0.11"),
        ("sglang==0.5.4.post1", "h100-sxm-80gb", "sglang-0.5.7"),
        ("vllm==0.11.0.dev7", "h100-sxm-80gb", "vllm-0.11"),
        ("trtllm", "h100-sxm-80gb", "tensorrt-llm"),
    ],
)
def test_options_take_a_release(asked: str, device: str, engine: str) -> None:
    """What pip installs is the entry that covers it on the device, which the report says; its figures are those."""
    cluster = Cluster.parse(f"1x{device}")
    report = shardwise.infer(_MODEL, cluster, Plan(), _JOB, ServingOptions(engine=asked))
    assert report.case.engine.name == engine
    covered = any("its entry covers" in note for note in report.assumptions)
    assert covered is (asked not in (engine, "trtllm"))
    named = shardwise.infer(_MODEL, cluster, Plan(), _JOB, ServingOptions(engine=find_engine(engine)))
    assert report.request_seconds == named.request_seconds and report.memory == named.memory


def test_loads_and_searches_take_a_release() -> None:
    """So do a server under load, pools of prompts, and both searches; no note is lost on the way."""
    cluster, two = (Cluster.parse(f"{n}xh100-sxm-80gb") for n in (1, 2))
    load = Workload(input_tokens=Length(mean=256), output_tokens=Length(mean=64), arrivals=Arrivals(rate=4.0), count=50)
    options = LoadOptions(serving=ServingOptions(engine="vllm==0.12.0"))
    one = serve(_MODEL, cluster, Plan(), load, options=options)
    assert one.base.case.engine.name == "vllm-0.13"
    assert any(note.endswith("its entry covers vLLM 0.12.0") for note in one.base.assumptions)
    space = ServingSpace(engine=("vllm==0.12.0",))
    result = shardwise.plan_serving(_MODEL, two, _JOB, space, SearchOptions())
    assert {report.case.engine.name for report in result.best} == {"vllm-0.13"}


@pytest.mark.parametrize("asked", ["vlm==0.12.0", "nothing-1.2", ""])
def test_what_no_engine_is_called_is_told_as_it_stands(asked: str) -> None:
    """A word that names no engine is refused whole, beside what else is wrong."""
    with pytest.raises(InputError) as told:
        shardwise.infer(_MODEL, Cluster.parse("1xh100-sxm-80gb"), Plan(tp=3), _JOB, ServingOptions(engine=asked))
    assert {"engine"} <= {problem.field for problem in told.value.problems}
    assert next(p for p in told.value.problems if p.field == "engine").value == asked


@pytest.mark.parametrize("asked", ["vllm>=0.12.0", "vllm~=0.12", "vllm!=0.12.0", "vllm<0.12", "vllm==0.12.*"])
def test_a_range_of_releases_is_no_release(asked: str) -> None:
    """What pip takes for many releases is refused, with the engine's own way to write one."""
    with pytest.raises(InputError) as told:
        shardwise.infer(_MODEL, Cluster.parse("1xh100-sxm-80gb"), Plan(), _JOB, ServingOptions(engine=asked))
    (problem,) = told.value.problems
    assert (problem.field, problem.value, problem.rule) == ("engine", asked, "names many releases, or none")
    assert "vllm==0.12" in problem.remedy
