"""Print errors by stack or engine and family of devices, as docs/accuracy.md shows them."""

from __future__ import annotations

from collections.abc import Iterator

from accuracy.score import stored

NAMES = {
    "step_seconds": "training, seconds of a step",
    "memory.peak_bytes": "training, peak memory",
    "request_seconds": "serving, fixed batches",
    "ttft_seconds": "serving, first token",
    "tpot_seconds": "serving, time per token",
}
"""Headlines in words."""


def table() -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| what | stack, or kernels of the engine | devices | runs | sources | bias | median | 90 % below | in band |"
    yield "|---|---|---|---:|---:|---:|---:|---:|---:|"
    for one in (row for row in stored()["groups"] if row["headline"] in NAMES):
        figures = " | ".join(f"{100 * one[name]:.1f} %" for name in ("median", "p90"))
        names = f"{NAMES[one['headline']]} | {one['stack']} | {one['family']}"
        counts = f"{one['runs']} | {one['sources']} | {100 * one['bias']:+.1f} %"
        yield f"| {names} | {counts} | {figures} | {one['inside']:.0%} |"


if __name__ == "__main__":
    print(*table(), sep="\n")
