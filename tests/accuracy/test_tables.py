"""Tables of measured kernels as the calibration reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from accuracy.calibration.tables import read


@pytest.mark.parametrize(("kind", "left"), [("gemm", ["gb300"]), ("moe", ["gb300", "b300"])])
def test_a_measurement_that_stands_under_two_devices_counts_once(tmp_path: Path, kind: str, left: list[str]) -> None:
    """Copied rows are left out of the kinds that are copied, and kept in the others."""
    rows = [f"{device},sglang,1e-5" for device in ("gb300", "b300")]
    text = "\n".join(["device,engine,time_seconds", *rows])
    (tmp_path / f"kernels_{kind}_mine.csv").write_text(text + "\n", encoding="utf-8")
    assert list(read(tmp_path, kind)["device"]) == left
