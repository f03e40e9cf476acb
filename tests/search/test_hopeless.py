"""Plans whose state alone is too large are counted as such, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwise import plan_training
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Training
from shardwise.search import SearchOptions, SearchSpace, TrainingResult, upto, work_of
from shardwise.search._batch import PlanSelection
from shardwise.search._evaluator import Evaluator
from shardwise.search._jobs import Job

EVERY = SearchSpace(
    schedule=("gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe"),
    sharding=("none", "zero1", "zero2", "zero3", "fsdp", "shard-grad-op"),
)
JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eight bits": {"precision": "fp8"},
    "adapters on few bits": {"adapter": "lora", "base": "nf4"},
    "paged optimizer": {"optimizer": "paged-adam8bit"},
    "update in backward": {"optimizer": "adafactor"},
}
STACKS = ("megatron", "torchtitan", "deepspeed", "torch", "transformers")


# Every job on two stacks and every stack with two jobs, one of both with a dense model and one with experts.
PAIRS = [
    (model, job, STACKS[(i + k) % len(STACKS)])
    for i, job in enumerate(JOBS)
    for k, model in enumerate(("llama-3.1-8b", "mixtral-8x7b"))
]


@pytest.mark.parametrize(("model", "job", "stack"), PAIRS)
def test_no_plan_takes_less_than_its_state(model: str, job: str, stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a set of plans is at most the bytes of each of them, whatever the schedule and what is kept."""
    judged = 0

    def compared(self: Job, rows: Any, cells: PlanSelection, at: Any = None) -> Any:
        nonlocal judged
        state = self.state(PlanSelection(cells.rows, np.arange(len(self.columns["set"]))))
        program, modes = self.composition.memory, self.evaluator.num_modes
        outputs = program.run(self._given(program, cells, self.part.keys), cells.shape(modes))
        for sharding in self.shardings:
            device_bytes = np.broadcast_to(outputs[f"required {sharding}"], (modes, len(cells.rows)))
            assert (state <= device_bytes * (1 + 1e-12)).all(), sharding
            judged += device_bytes.size
        # Nothing is said to fit: what plans take in seconds is nothing to their bytes.
        yield from ()

    monkeypatch.setattr(Job, "fitting", compared)
    training = Training(seq_len=2048, global_batch=32, **JOBS[job])
    cluster = Cluster.parse("16xh100-sxm-80gb")
    options = SearchOptions(stack=stack, explore=True)
    grid = work_of(load_model(model), cluster, training, EVERY, options).grid
    for start, end in grid.chunks(2_000)[:3]:
        for _ in Evaluator(grid, np.inf).batches(start, end):
            pass
    assert judged > 1_000


def _answer(model: str, devices: int) -> TrainingResult:
    job = Training(seq_len=2048, global_batch=64)
    space = SearchSpace(micro_batch=upto(8))
    return plan_training(load_model(model), Cluster.parse(f"{devices}xa100-sxm-80gb"), job, space)


def _told(result: TrainingResult) -> tuple[Any, ...]:
    nearest, counts = result.nearest, result.counts
    top = [(one.plan, one.step_seconds, one.device_bytes) for one in result.best]
    missed = None if nearest is None else (nearest.plan, nearest.device_bytes)
    return counts.legal, counts.fitting, counts.too_large, top, missed, result.rejected


@pytest.mark.parametrize(("model", "devices", "fits"), [("llama-3.1-70b", 64, True), ("llama-3.1-405b", 16, False)])
def test_an_answer_does_not_change(model: str, devices: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, the best, and the plan that is short of the least memory are as where every plan is evaluated."""
    settled: list[int] = []
    count = Job.count_too_large

    def counted(self: Job, rows: Any) -> None:
        settled.append(len(rows))
        count(self, rows)

    monkeypatch.setattr(Job, "count_too_large", counted)
    whole = _told(_answer(model, devices))
    assert not settled
    monkeypatch.setattr("shardwise.search._evaluator.CELLS", 64)
    assert _told(_answer(model, devices)) == whole
    assert sum(settled) > 100
    assert bool(whole[1]) is fits
