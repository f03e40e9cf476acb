"""Timelines: valid traces for every schedule, as long as the step that they show, with every second of it in place."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from command_line import run
from shardwise import Cluster, InputError, Plan, Training, TrainingOptions, TrainReport, load_model, train
from shardwise.answers._trace import lanes, trace_tree
from shardwise.training._timeline import Span

REQUIRED = {
    "C": {"name", "ph", "ts", "pid", "tid", "args"},
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "s": {"name", "cat", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ts", "pid", "tid", "id", "bp"},
}
NESTED = 1e-5  # microseconds; the format counts picoseconds


def walk(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield spans and their parts, each before its parts."""
    for span in spans:
        yield span
        yield from walk(span.parts)


def check_trace(trace: dict[str, Any]) -> None:
    """Hold a trace to the Trace Event Format: keys of each phase, order, names of rows, nesting, arrows in pairs."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    rows: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    named: set[tuple[int, int]] = set()
    arrows: dict[int, list[str]] = defaultdict(list)
    last = 0.0
    for event in trace["traceEvents"]:
        assert event.keys() >= REQUIRED[event["ph"]], event
        assert isinstance(event["name"], str) and event["name"]
        place = (event["pid"], event["tid"])
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int) and value >= 0 for value in event["args"].values())
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            named |= {place} if event["name"] == "thread_name" else set()
            continue
        assert event["ts"] >= last, "events are in order of time"
        last = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows[place].append(event)
        elif event["ph"] != "C":
            arrows[event["id"]].append(event["ph"])
    assert rows.keys() == named
    assert all(sorted(pair) == ["f", "s"] for pair in arrows.values())
    for events in rows.values():
        open_until: list[float] = []
        for event in events:
            start, end = event["ts"], event["ts"] + event["dur"]
            while open_until and open_until[-1] <= start + NESTED:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + NESTED, f"{event['name']} crosses the end of its parent"
            open_until.append(end)


def num_micro(pp: int) -> int:
    """Return micro-batches that every schedule takes: whole rounds of the interleaved one."""
    return 32 if 32 % pp == 0 else 30


def report_of(schedule: Any, pp: int, vpp: int = 1, **more: Any) -> TrainReport:
    """Return a report of a model whose stages differ: embedding first, head last."""
    plan = Plan(tp=2, pp=pp, vpp=vpp, dp=2, sequence_parallel=True, schedule=schedule, micro_batch=1, **more)
    cluster = Cluster.parse(f"{4 * pp}xh100")
    job = Training(seq_len=2048, global_batch=2 * num_micro(pp))
    return train(load_model("llama-3.1-70b", {"num_layers": 48}), cluster, plan, job)


CASES = [
    (schedule, pp, vpp)
    for pp in (1, 2, 4, 8)
    for schedule, vpp in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("dualpipe", 1))
    if pp > 1 or schedule not in ("interleaved", "dualpipe")
] + [("1f1b", 3, 1), ("1f1b", 6, 1), ("interleaved", 3, 2), ("interleaved", 6, 4), ("zb-h1", 6, 1), ("dualpipe", 6, 1)]


@pytest.mark.parametrize(("schedule", "pp", "vpp"), CASES)
def test_every_schedule_gives_a_valid_trace_as_long_as_the_step(schedule: Any, pp: int, vpp: int) -> None:
    """The trace follows the format, and its length is the reported step's within what the schedule's form allows."""
    report = report_of(schedule, pp, vpp)
    timeline = report.timeline()
    trace = trace_tree(report, timeline)
    check_trace(json.loads(json.dumps(trace, allow_nan=False)))
    assert abs(timeline.difference) <= timeline.tolerance
    ends = [e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert max(ends) == pytest.approx(timeline.seconds * 1e6)
    assert trace["otherData"]["difference"] == timeline.difference
    assert sum(e["name"].startswith("F") and "args" in e for e in trace["traceEvents"]) == num_micro(pp) * pp * vpp


def test_eight_stages_of_two_chunks_and_32_micro_batches() -> None:
    """The steady case of Megatron: 1024 chunks, every forward before its backward, and a bubble at both ends."""
    report = report_of("interleaved", 8, 2)
    timeline = report.timeline()
    chunks = [s for s in timeline.spans if s.kind in ("forward", "backward")]
    assert len(chunks) == 2 * 8 * 2 * 32
    made = {(s.stage, s.micro_batch, s.chunk): s.end for s in chunks if s.kind == "forward"}
    assert all(s.start >= made[s.stage, s.micro_batch, s.chunk] for s in chunks if s.kind == "backward")
    bubbles = sum(s.seconds for s in timeline.spans if s.kind == "bubble" and s.stage == 7)
    assert bubbles > 0
    assert len(timeline.messages) == 2 * 32 * (8 * 2 - 1)
    assert all(m.used >= m.sent for m in timeline.messages)


def test_messages_of_a_timeline_are_those_of_the_step() -> None:
    """Exposed seconds by axis on a stage add up to what the step says of it, recompute and sharding included."""
    plan = Plan(tp=4, pp=2, dp=0, sequence_parallel=True, sharding="zero2", recompute="full", micro_batch=1)
    report = train(load_model("mixtral-8x7b"), Cluster.parse("64xh100"), plan, Training(seq_len=4096, global_batch=64))
    step, timeline = report.evaluation.step, report.timeline()
    runs = [i for i, s in enumerate(report.evaluation.stages) for _ in range(int(s.count))]
    for stage, run_of_stage in enumerate(runs):
        found: dict[str, float] = defaultdict(float)
        chunks = [s for s in timeline.spans if s.stage == stage and s.micro_batch is not None]
        for span in walk([part for chunk in chunks for part in chunk.parts]):
            found[span.kind] += span.seconds
        timed, num_micro = step.stages[run_of_stage], report.evaluation.sizes.num_micro
        # What a stage waits for once a step is drawn before its first chunk and behind its last.
        once = timed.first + timed.last
        for axis, seconds in timed.exposed.items():
            wanted = 0.0 if axis == "dp" and once else seconds * num_micro
            assert found[axis] == pytest.approx(wanted, abs=1e-12), axis
        assert sum(found.values()) == pytest.approx((timed.busy - once) * num_micro)
        around = [s for s in timeline.spans if s.stage == stage and s.kind == "dp" and s.lane == "stage"]
        assert sum(s.seconds for s in around) >= once * num_micro * (1 - 1e-12)


def test_every_moment_of_a_stage_is_accounted_for() -> None:
    """On each stage compute, messages, bubbles and the update follow one another without a gap to the step's end."""
    for report in (report_of("zb-h1", 4), report_of("dualpipe", 4), report_of("interleaved", 4, 2)):
        timeline = report.timeline()
        for stage in range(4):
            spans = [s for s in timeline.spans if s.stage == stage and s.lane == "stage"]
            pipeline = [s for s in spans if s.kind not in ("dp", "tied", "optimizer", "overhead")]
            for before, after in pairwise(pipeline):
                assert after.start == pytest.approx(before.end, abs=1e-12)


def test_messages_that_do_not_overlap_hold_their_stage() -> None:
    """Without overlap a send stands on the row of its stage; with it, beside the stage."""
    plan = Plan(tp=8, pp=4, vpp=2, dp=0, schedule="interleaved", sequence_parallel=True, micro_batch=1)
    job = Training(seq_len=4096, global_batch=32)
    for overlap, lane in ((False, "stage"), (True, "sends")):
        options = TrainingOptions(stack="megatron", overlap=overlap)
        timeline = train(load_model("llama-3.1-8b"), Cluster.parse("32xh100"), plan, job, options).timeline()
        assert {s.lane for s in timeline.spans if s.kind == "send"} == {lane}


def test_spans_that_overlap_take_rows_of_their_own() -> None:
    """Sends that are under way together are drawn one above the other."""
    spans = [Span(stage=0, lane="sends", kind="send", start=a, end=a + 2) for a in (0.0, 1.0, 2.0, 3.5)]
    assert [[s.start for s in row] for row in lanes(spans)] == [[0.0, 2.0], [1.0, 3.5]]


def test_too_many_chunks_are_refused() -> None:
    """A trace that no viewer opens is refused with what would do."""
    report = train(
        load_model("gpt2"),
        Cluster.parse("4xa100"),
        Plan(pp=4, dp=1, micro_batch=1),
        Training(seq_len=1024, global_batch=100_000),
    )
    with pytest.raises(InputError, match="chunks"):
        report.timeline()


WORDS = ("train", "llama-3.1-8b", "--on", "16xh100", "--tp", "2", "--pp", "4", "--global-batch", "64")


def test_the_command_writes_a_trace_and_says_how_long_it_is(tmp_path: Path) -> None:
    """The command prints the difference from the step, the JSON answer holds it, and the file is a valid trace."""
    path = tmp_path / "step.json"
    done = run(*WORDS, "--timeline", str(path))
    assert done.status == 0
    assert "by simulation" in done.out and "--timeline" not in done.out
    check_trace(json.loads(path.read_text(encoding="utf-8")))
    tree = run(*WORDS, "--timeline", str(path), "--json").tree
    assert tree["timeline"]["step_seconds"] == tree["step_seconds"]


@pytest.mark.parametrize("name", ["step.txt", "missing/step.json"])
def test_files_that_cannot_be_written_are_refused(tmp_path: Path, name: str) -> None:
    """An ending that says nothing and a folder that is not there are bad input."""
    done = run(*WORDS, "--timeline", str(tmp_path / name), "--json")
    assert done.status == 2
    assert done.fields == ["timeline"]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "dualpipe"])
def test_a_drawing_numbers_chunks_that_have_room(schedule: Any) -> None:
    """Stages are rows, chunks wide enough have their micro-batch's number, and the legend names what is drawn alone."""
    import matplotlib.collections
    import matplotlib.text

    from shardwise.answers._canvas import styled
    from shardwise.answers._plots_timeline import timeline_figure

    report = report_of(schedule, 4, 2 if schedule == "interleaved" else 1)
    timeline = report.timeline()
    with styled():
        figure = timeline_figure(report, timeline)
    said = [t.get_text() for t in figure.findobj(matplotlib.text.Text)]
    tasks = sum(s.micro_batch is not None for s in walk(timeline.spans))
    outlines = [c for c in figure.axes[1].collections if isinstance(c, matplotlib.collections.PathCollection)]
    assert sum(len(c.get_offsets()) for c in outlines) >= 0.65 * tasks, "a page ends at 20 inches"
    legend = figure.axes[1].get_legend()
    assert legend is not None
    names = " ".join(t.get_text() for t in legend.get_texts())
    assert [f"stage {i}" in said for i in range(4)] == [True] * 4
    assert ("weight gradients" in names) == (schedule in ("zb-h1", "dualpipe"))
    assert ("chunk 1" in names) == (schedule == "interleaved")
    assert ("entering at stage 3" in names) == (schedule == "dualpipe")
    assert "bubble" in names


@pytest.mark.parametrize("kind", ["svg", "png", "pdf", "html"])
def test_the_command_draws_by_suffix(kind: str, tmp_path: Path) -> None:
    """A drawing is written as its suffix says, with the same line about its length."""
    path = tmp_path / f"step.{kind}"
    done = run(*WORDS, "--timeline", str(path))
    assert done.status == 0
    assert "by simulation" in done.out
    assert path.stat().st_size > 1000
