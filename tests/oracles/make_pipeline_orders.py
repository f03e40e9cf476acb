"""Store orders of torch.distributed.pipelining's schedules, and of V-Half and V-Min by their authors' scheduler.

Run as `python tests/oracles/make_pipeline_orders.py FORK` with torch 2.13 (CPU), FORK a checkout of
github.com/sail-sg/zero-bubble-pipeline-parallelism (39f2c18); nothing runs on devices: a fake process group
stands for them.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

SIZES: dict[str, list[tuple[int, int, int]]] = {
    "Interleaved1F1B": [(2, 4, 2), (4, 10, 2), (3, 6, 3)],
    "LoopedBFS": [(2, 4, 2), (3, 5, 3)],
    "InterleavedZeroBubble": [(2, 4, 2), (4, 8, 2), (4, 10, 2), (3, 6, 3)],
    "ZBVZeroBubble": [(2, 2, 2), (2, 6, 2), (4, 8, 2), (4, 5, 2), (3, 9, 2)],
    "DualPipeV": [(2, 4, 2), (2, 7, 2), (4, 8, 2), (3, 9, 2), (5, 11, 2)],
}
CONTROLLED: dict[str, list[tuple[int, int]]] = {
    "half": [(2, 5), (3, 6), (4, 8), (5, 12), (6, 12), (8, 17)],
    "min": [(2, 5), (3, 6), (4, 8), (5, 12), (6, 12), (8, 17)],
}
LETTERS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}


def orders(name: str, pp: int, micro_batches: int, vpp: int) -> list[str]:
    """Return the slots of every rank as words: stage, pass, micro-batch; the two of a pair joined by +."""
    import torch
    import torch.distributed as dist
    import torch.distributed.pipelining.schedules as schedules
    from torch.distributed.pipelining import PipelineStage
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=pp, store=FakeStore())
    x = torch.zeros(1, 4)

    def stage(index: int) -> Any:
        layer, where = torch.nn.Linear(4, 4), torch.device("cpu")
        return PipelineStage(layer, index, pp * vpp, where, input_args=(x,), output_args=(x,))

    own = [0, 2 * pp - 1] if name in ("ZBVZeroBubble", "DualPipeV") else [chunk * pp for chunk in range(vpp)]
    try:
        made = getattr(schedules, f"Schedule{name}")(list(map(stage, own)), n_microbatches=micro_batches)
        return [" ".join(_slot(action) for action in made.pipeline_order[rank] if action) for rank in range(pp)]
    finally:
        dist.destroy_process_group()


def _slot(action: Any) -> str:
    parts = action.sub_actions or (action,)
    return "+".join(f"{a.stage_index}{LETTERS[a.computation_type.name]}{a.microbatch_index}" for a in parts)


def controlled(memory: str, pp: int, micro_batches: int) -> list[str]:
    """Return the slots of every rank in the same words; a type of the scheduler is one of F, f, B, b, W, w."""
    scheduler = importlib.import_module("zbv_greedy").PipelineGraph(pp, micro_batches, memory, 1, 1, 1, 0)
    pattern = getattr(scheduler, f"stable_pattern_v_{memory}")(pp)
    _, _, order = scheduler.schedule_from_pattern(pattern, micro_batches, [1] * 6)

    def word(rank: int, kind: int, micro_batch: int) -> str:
        up = kind in (1, 2, 4)
        return f"{2 * pp - 1 - rank if up else rank}{'FFIIWW'[kind]}{micro_batch}"

    return [" ".join(word(rank, *task) for task in tasks) for rank, tasks in enumerate(order)]


def _scheduler(fork: str) -> None:
    """Make the scheduler's file importable without the rest of the fork, which needs CUDA."""
    folder = Path(fork) / "megatron" / "core" / "pipeline_parallel" / "zerobubble" / "scheduler"
    sys.path.insert(0, str(folder))
    sys.modules["megatron.core.pipeline_parallel.zerobubble.scheduler.graph"] = importlib.import_module("graph")


if __name__ == "__main__":
    _scheduler(sys.argv[1])
    found = [
        {"schedule": name, "pp": pp, "micro_batches": m, "vpp": vpp, "order": orders(name, pp, m, vpp)}
        for name, sizes in SIZES.items()
        for pp, m, vpp in sizes
    ]
    found += [
        {"schedule": f"V{memory}", "pp": pp, "micro_batches": m, "vpp": 2, "order": controlled(memory, pp, m)}
        for memory, sizes in CONTROLLED.items()
        for pp, m in sizes
    ]
    path = Path(__file__).parents[1] / "data" / "pipeline_orders.json"
    path.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
