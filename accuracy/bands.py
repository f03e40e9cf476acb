"""Print what bands rest on: runs and sources by headline, the scale, and how much each condition widens it."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.cost import spreads


def table() -> Iterator[str]:
    """Yield the lines of a Markdown table, and below it the sources of its rows."""
    yield "| headline | runs | sources | ends, in scales | scale | wider by |"
    yield "|---|---:|---:|---|---:|---|"
    for quantity, one in spreads().items():
        wider = ", ".join(f"{word} {factor:.2f}" for word, factor in sorted(one.wider.items(), key=lambda kv: -kv[1]))
        ends = f"{one.low:.2f} to {one.high:.2f}"
        yield f"| `{quantity}` | {one.rows} | {one.sources} | {ends} | {one.scale:.3f} | {wider} |"
    yield ""
    yield "Sources:"
    yield ""
    yield from (f"- `{quantity}`: {one.source}" for quantity, one in spreads().items())


if __name__ == "__main__":
    print(*table(), sep="\n")
