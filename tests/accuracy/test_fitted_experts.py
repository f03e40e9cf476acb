"""The calibration of experts finds constants that measurements were made from."""

from __future__ import annotations

import numpy as np

from accuracy.calibration import experts
from accuracy.kernels.products import Fused, fused_seconds
from shardwise.cost import Datasheet, ExpertsFit

TRUE = {"memory": 0.8, "compute": 0.5, "start_seconds": 2e-5, "sharpness": 2.0, "pad_rows": 30.0, "walk_seconds": 1e-8,
        "expert_seconds": 2e-7, "chain_share": 0.3, "row_traffic": 1.5, "others_traffic": 0.6,
        "mapped_seconds": 2e-6}  # fmt: skip


def _kernel(**own: float) -> experts.Kernel:
    """Return a kernel with six shapes whose seconds are those of some constants."""
    shapes = [(D, F, hit) for D, F in ((2048, 1024), (4096, 1536), (7168, 2048)) for hit in (8, 64)]
    made = [(D, F, hit, rows, fold) for fold, (D, F, hit) in enumerate(shapes) for rows in (8, 64, 512, 4096, 32768)]
    D, F, hit, rows, folds = np.array(made, float).T
    hit = np.minimum(hit, rows)
    ran = Fused(ranks=2 + 0 * D, held=2 * hit, hit=hit, rows=rows, others=rows, tile=16 + 0 * D, tiles=hit, hidden=D,
                up=2 * F, down=F, weight_bytes=2 + 0 * D)  # fmt: skip
    chip = Datasheet(flops=1e15 + 0 * D, bytes_per_second=3e12 + 0 * D, cores=132 + 0 * D, cached_bytes=0 * D)
    seconds = fused_seconds(ExpertsFit(**{**TRUE, **own}), chip, ran)
    return experts.Kernel(
        place=("hopper", "experts", "vllm", "bf16", "one"), devices=np.full(len(D), "one"), chip=chip, ran=ran,
        seconds=seconds, folds=folds, weights=np.full(len(D), 1 / len(D)),
    )  # fmt: skip


def test_what_kernels_share_is_found() -> None:
    """Kernels that differ in rate and start alone leave next to no error, and nothing else is their own."""
    every = [_kernel(), _kernel(compute=0.3), _kernel(start_seconds=5e-5)]
    shared, names, rows = experts.fitted(every)
    assert [sorted(own) for own in names] == [["compute", "start_seconds"]] * 3
    for kernel, row in zip(every, rows, strict=True):
        assert np.median(np.abs(kernel.logs(row))) < 0.02
        assert row["memory"] == shared["memory"]


def test_what_a_kernel_has_of_its_own_is_found() -> None:
    """A kernel that moves its rows four times as often states that itself."""
    every = [_kernel(), _kernel(), _kernel(), _kernel(row_traffic=6.0)]
    _, names, rows = experts.fitted(every)
    assert "row_traffic" in names[3] and all("row_traffic" not in own for own in names[:3])
    assert rows[3]["row_traffic"] > 2 * rows[0]["row_traffic"]
