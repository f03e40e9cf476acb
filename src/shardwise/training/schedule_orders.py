"""The fixed order in which each device of a pipeline runs its tasks, one function per schedule.

A device runs slots one after another; a slot is one task, or a forward and a backward that run overlapped. Letters:
p devices, v chunks of the model on each, m micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shardwise.errors import Problems

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe"]
Kind = Literal["forward", "backward", "backward_input", "backward_weight"]

F: Kind = "forward"
FULL: Kind = "backward"
B: Kind = "backward_input"
W: Kind = "backward_weight"


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work on one device: a micro-batch through one chunk of the model, forward or backward.

    With DualPipe the chunk is the direction: 0 enters at the first device, 1 at the last.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0


Slot = tuple[Task, ...]
Order = list[Slot]


def schedule_problems(schedule: ScheduleName, num_stages: int, num_micro: int, num_chunks: int) -> Problems:
    """Return what forbids running the schedule on these whole numbers; empty when it is legal.

    Micro-batches that do not fill the last round of the interleaved schedule are not a problem here: they cost their
    bubble, although Megatron-Core refuses them (megatron/core/pipeline_parallel/schedules.py). DualPipe's rule is that
    of deepseek-ai/DualPipe, dualpipe/dualpipe.py.

    >>> for problem in schedule_problems("dualpipe", 4, 6, 1).items:
    ...     print(problem)
    num_micro = 6: must be even and at least twice the 4 stages for dualpipe; use at least 8, or another schedule
    """
    found = Problems()
    for field, value in (("num_stages", num_stages), ("num_micro", num_micro), ("num_chunks", num_chunks)):
        if value < 1:
            found.add(field, value, "must be at least 1", "use 1 or more")
    if schedule != "interleaved" and num_chunks != 1:
        found.add("num_chunks", num_chunks, f"must be 1 for {schedule}", "use 1, or the interleaved schedule")
    if schedule == "dualpipe" and num_stages > 1:
        if num_stages % 2:
            found.add("num_stages", num_stages, "must be even for dualpipe", f"use {num_stages + 1}")
        if num_micro % 2 or num_micro < 2 * num_stages:
            rule = f"must be even and at least twice the {num_stages} stages for dualpipe"
            found.add("num_micro", num_micro, rule, f"use at least {2 * num_stages}, or another schedule")
    return found


def _gpipe(p: int, m: int, i: int) -> Order:
    """All forwards, then all backwards in reverse (arXiv:1811.06965, figure 2c)."""
    forwards: Order = [(Task(F, k),) for k in range(m)]
    return forwards + [(Task(FULL, k),) for k in reversed(range(m))]


def _one_f_one_b(p: int, m: int, i: int) -> Order:
    """Device i runs p-1-i forwards ahead, then one forward, one backward (arXiv:2104.04473, section 2.2.1)."""
    return _alternate([Task(F, k) for k in range(m)], [Task(FULL, k) for k in range(m)], p - 1 - i)


def _alternate(forwards: list[Task], backwards: list[Task], warm_up: int) -> Order:
    order: Order = [(task,) for task in forwards[:warm_up]]
    ahead = len(order)
    for k, task in enumerate(backwards):
        order += [(f,) for f in forwards[ahead + k : ahead + k + 1]] + [(task,)]
    return order


def first_round(p: int, m: int) -> int:
    """Return how many micro-batches the first round takes; every later round takes p.

    >>> first_round(4, 8), first_round(4, 10), first_round(4, 3)
    (4, 6, 3)
    """
    return m - p * max(m // p - 1, 0)


def _rounds(p: int, v: int, m: int, *, backward: bool) -> list[Task]:
    """Each round of micro-batches goes through one chunk after the other."""
    chunks = range(v - 1, -1, -1) if backward else range(v)
    head = first_round(p, m)
    rounds = [range(head), *(range(start, start + p) for start in range(head, m, p))]
    return [Task(FULL if backward else F, k, chunk) for members in rounds for chunk in chunks for k in members]


def _interleaved(p: int, v: int, m: int, i: int) -> Order:
    """Warm-up of 2(p-1-i) + (v-1)p chunks, then one forward, one backward chunk (arXiv:2104.04473, section 2.2.2)."""
    ahead = p - 1 - i if v == 1 else 2 * (p - 1 - i) + (v - 1) * first_round(p, m)
    return _alternate(_rounds(p, v, m, backward=False), _rounds(p, v, m, backward=True), ahead)


def _zb_h1(p: int, m: int, i: int) -> Order:
    """1F1B with the weight gradients of device i running i micro-batches late (arXiv:2401.10241, section 2.1)."""
    order: Order = [(Task(F, k),) for k in range(min(p - 1 - i, m))]
    ahead = len(order)
    for k in range(m):
        order += [(Task(F, f),) for f in range(ahead + k, min(ahead + k + 1, m))] + [(Task(B, k),)]
        order += [(Task(W, k - i),)] if k >= i else []
    return order + [(Task(W, k),) for k in range(max(0, m - i), m)]


class _DualPipeRank:
    """Emits the slots of one DualPipe device, counting micro-batches per direction."""

    def __init__(self, p: int, m: int, i: int) -> None:
        self.order: Order = []
        self.flip = int(i >= p // 2)
        self.first = (0, m // 2)
        self.next = {F: [0, 0], FULL: [0, 0]}
        self.late: list[Task] = []

    def task(self, kind: Kind, phase: int) -> Task:
        """Return the next task of a phase; phase 0 is the direction that enters at this half of the devices."""
        chunk = phase ^ self.flip
        counts = self.next[F if kind == F else FULL]
        counts[chunk] += 1
        return Task(kind, self.first[chunk] + counts[chunk] - 1, chunk)

    def forward(self, phase: int) -> None:
        self.order.append((self.task(F, phase),))

    def backward(self, phase: int, *, split: bool = False) -> None:
        task = self.task(B if split else FULL, phase)
        self.order.append((task,))
        if split:
            self.late.append(Task(W, task.micro_batch, task.chunk))

    def weight(self) -> None:
        self.order.append((self.late.pop(0),))

    def pair(self, forward_phase: int, backward_phase: int) -> None:
        self.order.append((self.task(F, forward_phase), self.task(FULL, backward_phase)))


def _dualpipe(p: int, m: int, i: int) -> Order:
    """The eight steps of DualPipe (arXiv:2412.19437, figure 5; deepseek-ai/DualPipe, dualpipe/dualpipe.py)."""
    if p == 1:
        return _one_f_one_b(p, m, i)
    rank, half = _DualPipeRank(p, m, i), min(i, p - 1 - i)
    outer = p // 2 - 1 - half
    for _ in range(2 * outer):
        rank.forward(0)
    for _ in range(half + 1):
        rank.forward(0)
        rank.forward(1)
    for _ in range(outer):
        rank.backward(1, split=True)
        rank.weight()
        rank.forward(1)
    for k in range(m // 2 - p + half + 1):
        if k == 0 and outer == 0:
            rank.forward(0)
            rank.backward(1)
        else:
            rank.pair(0, 1)
        rank.pair(1, 0)
    for _ in range(outer):
        rank.backward(1)
        rank.pair(1, 0)
    _drain_dualpipe(rank, half, outer)
    return rank.order


def _drain_dualpipe(rank: _DualPipeRank, half: int, outer: int) -> None:
    """The last backwards, the second half of them with their weight gradients put off."""
    for k in range(half + 1):
        rank.backward(1, split=k >= (half + 2) // 2)
        rank.backward(0, split=k >= (half + 1) // 2)
    for _ in range(outer):
        rank.weight()
        rank.backward(0, split=True)
    while rank.late:
        rank.weight()


_PLAIN: dict[str, Callable[[int, int, int], Order]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "zb-h1": _zb_h1,
    "dualpipe": _dualpipe,
}


def device_order(schedule: ScheduleName, shape: tuple[int, int, int], device: int) -> Order:
    """Return the slots of one device of (p, v, m), in the order in which it runs them.

    >>> [f"{task.kind} {task.micro_batch}" for slot in device_order("1f1b", (2, 1, 2), 0) for task in slot]
    ['forward 0', 'forward 1', 'backward 0', 'backward 1']
    """
    p, v, m = shape
    return _interleaved(p, v, m, device) if schedule == "interleaved" else _PLAIN[schedule](p, m, device)
