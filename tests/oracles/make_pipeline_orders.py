"""Store orders of torch.distributed.pipelining's schedules; needs torch 2.13 (CPU), numpy is not needed.

Run as `python tests/oracles/make_pipeline_orders.py`; nothing runs on devices: a fake process group stands for them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIZES: dict[str, list[tuple[int, int, int]]] = {
    "Interleaved1F1B": [(2, 4, 2), (4, 10, 2), (3, 6, 3)],
    "LoopedBFS": [(2, 4, 2), (3, 5, 3)],
    "InterleavedZeroBubble": [(2, 4, 2), (4, 8, 2), (4, 10, 2), (3, 6, 3)],
    "ZBVZeroBubble": [(2, 2, 2), (2, 6, 2), (4, 8, 2), (4, 5, 2), (3, 9, 2)],
    "DualPipeV": [(2, 4, 2), (2, 7, 2), (4, 8, 2), (3, 9, 2), (5, 11, 2)],
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


if __name__ == "__main__":
    found = [
        {"schedule": name, "pp": pp, "micro_batches": m, "vpp": vpp, "order": orders(name, pp, m, vpp)}
        for name, sizes in SIZES.items()
        for pp, m, vpp in sizes
    ]
    path = Path(__file__).parents[1] / "data" / "pipeline_orders.json"
    path.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
