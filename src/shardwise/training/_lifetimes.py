"""What a stage holds over a step: blocks of memory with the seconds from which and until which they are there.

State lasts, activations of a micro-batch lie from its forward pass to the end of its backward pass, and what an
operator makes is there while its pass runs. The bytes are those of the reported moments: as many chunks as the
simulation has in flight at once share the reported activations, so that the highest point is the reported peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.records import dataclass
from shardwise.training._parts import MemoryMoment, StageMemory
from shardwise.training._report import TrainReport
from shardwise.training._timeline import Span, StepTimeline

CATEGORIES = ("weights", "optimizer", "framework", "gradients", "activations", "working")
"""What blocks are of, the longest-lived first; `working` is what the operators of a pass make."""
_MOMENTS: dict[str, MemoryMoment] = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "backward",
    "optimizer": "optimizer step",
}
_AT_LAST: tuple[MemoryMoment, ...] = ("gradients complete", "ends reduced")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBlock:
    """Bytes of a category on a stage, in seconds from the start of a step; what lasts ends with the step."""

    category: str
    name: str
    bytes: float
    start: float
    end: float


def passes(timeline: StepTimeline, stage: int) -> list[Span]:
    """Return the passes of a stage in order, those of a pair one after the other, and its update."""
    own = [span for span in timeline.spans if span.stage == stage and span.lane == "stage"]
    flat = [part for span in own for part in (span.parts if span.kind == "pair" else (span,))]
    return sorted((span for span in flat if span.kind in _MOMENTS), key=lambda span: (span.start, span.end))


def lifetimes(report: TrainReport, timeline: StepTimeline, stage: int) -> list[MemoryBlock]:
    """Return what a stage holds over a timeline of the step: bytes with the seconds for which they are there.

    Their highest point is the peak of the stage's memory, before what the allocator and the context add.

    >>> from shardwise import Cluster, Plan, Training, load_model, train
    >>> plan, job = Plan(pp=4, dp=0), Training(seq_len=1024, global_batch=16)
    >>> report = train(load_model("gpt2"), Cluster.parse("4xa100-sxm-80gb"), plan, job)
    >>> [block.name for block in lifetimes(report, report.timeline(), 0)][:2]
    ['weights', 'optimizer state']
    """
    runs = [i for i, s in enumerate(report.evaluation.stages) for _ in range(int(s.count))]
    persistent = report.case.stack.gradients == "persistent"
    return _blocks(timeline, stage, report.evaluation.memory[runs[stage]], persistent)


def _blocks(timeline: StepTimeline, stage: int, memory: StageMemory[float], persistent: bool) -> list[MemoryBlock]:
    """Return what a stage holds over a step; `persistent` gradients are there before the first backward pass."""
    spans, end = passes(timeline, stage), timeline.seconds
    backward = [span.start for span in spans if span.kind.startswith("backward")]
    first = 0.0 if persistent or not backward else min(backward)
    update = end if persistent else max((span.end for span in spans if span.kind == "optimizer"), default=end)
    blocks = [
        MemoryBlock(category="weights", name="weights", bytes=memory.weights, start=0.0, end=end),
        MemoryBlock(category="optimizer", name="optimizer state", bytes=memory.optimizer, start=0.0, end=end),
        MemoryBlock(category="framework", name="kept by the framework", bytes=memory.framework, start=0.0, end=end),
        MemoryBlock(category="gradients", name="gradients", bytes=memory.gradients, start=first, end=update),
    ]
    kept = _kept(spans, memory.activations)
    whole_step = memory.weights + memory.optimizer + memory.framework
    blocks += kept
    blocks += _working(spans, memory, whole_step, kept[0].bytes if kept else 0.0)
    return [block for block in blocks if block.bytes > 0 and block.end > block.start]


def _kept(spans: Sequence[Span], activations: float) -> list[MemoryBlock]:
    """Return the activations of every micro-batch and chunk, from its forward pass to the end of its last backward."""
    begun: dict[tuple[int | None, int | None], float] = {}
    ended: dict[tuple[int | None, int | None], float] = {}
    for span in spans:
        key = (span.micro_batch, span.chunk)
        if span.kind == "forward":
            begun[key] = span.start
        elif span.kind != "optimizer":
            ended[key] = max(span.end, ended.get(key, 0.0))
    lives = [(start, ended.get(key, start), key) for key, start in begun.items()]
    deepest = _deepest([(start, end) for start, end, _ in lives])
    each = activations / deepest if deepest else 0.0
    return [
        MemoryBlock(
            category="activations", name=f"micro-batch {micro}, chunk {chunk}", bytes=each, start=start, end=end
        )
        for start, end, (micro, chunk) in lives
    ]


def _deepest(lives: Sequence[tuple[float, float]]) -> int:
    """Return the most that are there at once; what ends as another begins is gone."""
    changes = sorted([(start, 1) for start, _ in lives] + [(end, -1) for _, end in lives])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _working(spans: Sequence[Span], memory: StageMemory[float], lasting: float, each: float) -> Iterator[MemoryBlock]:
    """Yield what the operators of each pass make: the moment's bytes beyond state, gradients and activations.

    `each` are the activations of one micro-batch and chunk.
    """
    moments = dict(memory.moments)
    moments["forward"] = max(moments.get("forward", 0.0), moments.get("loss", 0.0))
    last = max((span.start for span in spans if span.kind != "optimizer"), default=0.0)
    for span in spans:
        in_flight_bytes = lasting + memory.gradients + (memory.activations if span.kind != "optimizer" else 0.0)
        made = moments.get(_MOMENTS[span.kind], 0.0) - in_flight_bytes
        if span.kind != "optimizer" and span.start == last:
            # Behind the last layer all gradients are there, and its activations are still held.
            behind = max(moments.get(name, 0.0) for name in _AT_LAST)
            made = max(made, behind - lasting - memory.gradients - each)
        yield MemoryBlock(category="working", name=span.kind, bytes=max(made, 0.0), start=span.start, end=span.end)


def levels(blocks: Sequence[MemoryBlock]) -> tuple[list[float], dict[str, list[float]]]:
    """Return the seconds at which anything changes, and the bytes of each category from each of them on.

    >>> one = MemoryBlock(category="weights", name="w", bytes=2.0, start=0.0, end=4.0)
    >>> two = MemoryBlock(category="working", name="forward", bytes=1.0, start=1.0, end=2.0)
    >>> levels([one, two])[1]["working"]
    [0.0, 1.0, 0.0, 0.0]
    """
    times = sorted({time for block in blocks for time in (block.start, block.end)})
    place = {time: i for i, time in enumerate(times)}
    levels = {category: [0.0] * len(times) for category in CATEGORIES}
    for block in blocks:
        levels[block.category][place[block.start]] += block.bytes
        levels[block.category][place[block.end]] -= block.bytes
    for row in levels.values():
        for i in range(1, len(row)):
            row[i] += row[i - 1]
    return times, {category: [max(value, 0.0) for value in row] for category, row in levels.items()}
