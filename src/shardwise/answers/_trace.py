"""A timeline as a trace that Perfetto and chrome://tracing open (Trace Event Format, catapult project)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from shardwise.answers._described import describe
from shardwise.answers._train_tree import step_tree
from shardwise.training import MemoryBlock, Span, StepTimeline, TrainReport, levels, lifetimes

STAGES, BESIDE = 1, 2
_NAMES = {
    "forward": "F",
    "backward": "B",
    "backward_input": "B input",
    "backward_weight": "W",
    "pair": "F and B, overlapped",
    "tied": "dp: gradients of the tied table",
    "overhead": "host work of the step",
    "optimizer": "optimizer step",
}
_MESSAGES = {
    "tp": "tp messages",
    "tp2": "tp2 messages",
    "cp": "cp messages",
    "ep": "ep messages",
    "etp": "etp messages",
    "pp": "pp messages",
    "send": "pp send",
}
# Colours of chrome://tracing; Perfetto takes its own from the names.
_COLOURS = {
    "forward": "thread_state_running",
    "backward": "rail_response",
    "backward_input": "rail_response",
    "backward_weight": "rail_animation",
    "weight gradients": "rail_animation",
    "recompute": "yellow",
    "bubble": "white",
    "optimizer": "thread_state_uninterruptible",
}


def name_of(span: Span) -> str:
    """Return the name under which a span is shown.

    >>> name_of(Span(stage=0, lane="stage", kind="forward", start=0.0, end=1.0, micro_batch=3, chunk=0))
    'F3'
    """
    if span.kind == "dp":
        return "dp messages, overlapped" if span.hidden else "dp messages"
    name = _NAMES.get(span.kind, _MESSAGES.get(span.kind, span.kind))
    if span.micro_batch is None:
        return name
    return f"{name}{'' if len(name) == 1 else ' '}{span.micro_batch}" + (f".{span.chunk}" if span.chunk else "")


def _us(seconds: float) -> float:
    """Return microseconds to the picosecond, which the format counts in."""
    return round(seconds * 1e6, 6)


def _category(span: Span) -> str:
    if span.kind in ("bubble", "optimizer", "overhead"):
        return span.kind
    if span.kind in _MESSAGES or span.kind in ("dp", "tied"):
        return "overlapped communication" if span.hidden else "exposed communication"
    return "compute"


def _complete(span: Span, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    start = _us(span.start)
    row: dict[str, Any] = {
        "name": name_of(span),
        "cat": _category(span),
        "ph": "X",
        "ts": start,
        "dur": round(_us(span.end) - start, 6),
        "pid": pid,
        "tid": tid,
    }
    if span.kind in _COLOURS:
        row["cname"] = _COLOURS[span.kind]
    if span.micro_batch is not None:
        row["args"] = {"micro_batch": span.micro_batch, "chunk": span.chunk}
    yield row
    for part in span.parts:
        yield from _complete(part, pid, tid)


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Return spans in as few rows as keep them apart, in order of their start."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        free = next((row for row in rows if row[-1].end <= span.start), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def _label(pid: int, tid: int, text: str, place: int) -> list[dict[str, Any]]:
    base = {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "cat": "__metadata"}
    return [
        {**base, "name": "thread_name", "args": {"name": text}},
        {**base, "name": "thread_sort_index", "args": {"sort_index": place}},
    ]


def _process(pid: int, text: str) -> list[dict[str, Any]]:
    base = {"ph": "M", "pid": pid, "tid": 0, "ts": 0, "cat": "__metadata"}
    return [
        {**base, "name": "process_name", "args": {"name": text}},
        {**base, "name": "process_sort_index", "args": {"sort_index": pid}},
    ]


def _rows(timeline: StepTimeline) -> Iterator[tuple[str, int, Sequence[Span]]]:
    """Yield the name, the process and the spans of every row: the stages, then what runs beside them."""
    of_stage = {
        key: list(own) for key, own in groupby(sorted(timeline.spans, key=_key), key=lambda s: (s.stage, s.lane))
    }
    for stage in range(timeline.plan.pp):
        yield f"stage {stage}", STAGES, of_stage.get((stage, "stage"), [])
    for stage in range(timeline.plan.pp):
        for lane in ("sends", "data parallel"):
            for i, own in enumerate(lanes(of_stage.get((stage, lane), []))):
                yield f"stage {stage}, {lane}" + (f" {i + 1}" if i else ""), BESIDE, own


def _key(span: Span) -> tuple[int, str, float]:
    return span.stage, span.lane, span.start


def _flows(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    """Yield an arrow for every message, from the end of the chunk that sends to the start of the one that waits."""
    for i, message in enumerate(timeline.messages):
        common = {"name": "boundary", "cat": "pp", "id": i, "pid": STAGES}
        # An arrow leaves from within its chunk: the end itself belongs to what follows.
        yield {**common, "ph": "s", "tid": message.stage, "ts": round(_us(message.sent) - 0.001, 6)}
        yield {**common, "ph": "f", "bp": "e", "tid": message.to_stage, "ts": _us(message.used)}


def _memory(report: TrainReport, timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    """Yield what every stage holds as counters, by category in bytes, where its chunks are drawn in detail."""
    for stage in range(timeline.plan.pp if timeline.detailed else 0):
        times, levels_of = levels(lifetimes(report, timeline, stage))
        name = f"stage {stage}, tensors in bytes"
        for i, time in enumerate(times):
            args = {category: round(row[i]) for category, row in levels_of.items() if max(row) > 0}
            yield {"name": name, "cat": "memory", "ph": "C", "ts": _us(time), "pid": STAGES, "tid": stage, "args": args}


def snapshot_tree(report: TrainReport, timeline: StepTimeline) -> dict[str, Any]:
    """Return the tensors of every stage as PyTorch's memory snapshot, which pytorch.org/memory_viz draws over time.

    One device a stage, in the form of torch.cuda.memory._snapshot (torch 2.13 torch/cuda/_memory_viz.py): a trace of
    allocations and frees with a frame that names what each is for. Each tensor has a segment of its own, as no
    allocator is simulated; what lasts beyond the step stays allocated.
    """
    traces, segments = [], []
    for stage in range(timeline.plan.pp):
        trace, left = _allocations(lifetimes(report, timeline, stage), timeline.seconds)
        traces.append(trace)
        segments += [_segment(event, stage) for event in left]
    return {"segments": segments, "device_traces": traces, "allocator_settings": {}}


# What the allocator does as a tensor begins, and as it ends, in order.
_BEGINS, _ENDS = ("segment_alloc", "alloc"), ("free_requested", "free_completed", "segment_free")


def _allocations(blocks: Sequence[MemoryBlock], end: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the events of a stage in order of time, and of what it holds at the end the allocations."""
    events: list[tuple[float, bool, int]] = []
    for i, block in enumerate(blocks):
        # What is freed at a time makes room for what begins then.
        events += [(block.start, True, i), *([(block.end, False, i)] if block.end < end else [])]
    entries, address, top = [], [0] * len(blocks), 1 << 32
    for i, block in enumerate(blocks):
        address[i], top = top, top + round(block.bytes) + 512
    for time, begins, i in sorted(events):
        frame = {"name": f"{blocks[i].category}: {blocks[i].name}", "filename": "shardwise", "line": 0}
        size = {"addr": address[i], "size": round(blocks[i].bytes), "stream": 0, "time_us": round(time * 1e6)}
        entries += [{"action": action, **size, "frames": [frame]} for action in (_BEGINS if begins else _ENDS)]
    freed = {event["addr"] for event in entries if event["action"] == "free_completed"}
    return entries, [event for event in entries if event["action"] == "alloc" and event["addr"] not in freed]


def _segment(event: dict[str, Any], stage: int) -> dict[str, Any]:
    """Return the segment of a tensor that is still allocated when the snapshot is taken."""
    address, size = event["addr"], event["size"]
    block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated"}
    sizes = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), size)
    place = {"device": stage, "address": address, "stream": 0, "segment_type": "large", "is_expandable": False}
    return {**place, **sizes, "frames": [], "blocks": [{**block, "frames": event["frames"]}]}


def compared(timeline: StepTimeline) -> dict[str, float]:
    """Return the length of a timeline in seconds, that of the reported step, and their difference as a share."""
    return {
        "seconds": timeline.seconds,
        "step_seconds": timeline.step_seconds,
        "difference": timeline.difference,
        "tolerance": timeline.tolerance,
    }


def trace_tree(report: TrainReport, timeline: StepTimeline) -> dict[str, Any]:
    """Return a timeline in the JSON object form of the Trace Event Format: complete events, times in microseconds.

    >>> from shardwise import Cluster, Plan, Training, load_model, train
    >>> report = train(load_model("gpt2"), Cluster.parse("1xh100"), Plan(), Training(seq_len=1024, global_batch=2))
    >>> [e["name"] for e in trace_tree(report, report.timeline())["traceEvents"] if e["ph"] == "X"][:2]
    ['F0', 'compute']
    """
    events = [*_process(STAGES, "pipeline stages"), *_process(BESIDE, "messages beside compute")]
    drawn: list[dict[str, Any]] = []
    for tid, (text, pid, spans) in enumerate(_rows(timeline)):
        if spans:
            events += _label(pid, tid, text, tid)
            drawn += [row for span in spans for row in _complete(span, pid, tid)]
    drawn += _flows(timeline)
    drawn += _memory(report, timeline)
    cluster, step = report.case.cluster, step_tree(report)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "model": report.case.model.name,
            "cluster": f"{cluster.num_devices} x {cluster.device.name}",
            "plan": describe(report.plan),
            "schedule": report.plan.schedule,
            "micro_batches": step["micro_batches"],
            **compared(timeline),
            "parts": "sums over the layers of a chunk, one after another"
            if timeline.detailed
            else "left out: too many",
            "hidden_seconds": step["hidden_seconds"],
        },
        # Of events that start together the longest comes first, so that parts nest within their chunk.
        "traceEvents": [*events, *sorted(drawn, key=lambda e: (e["ts"], -e.get("dur", 0.0)))],
    }
