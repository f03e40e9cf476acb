"""Print what validation assumes for fields that a source leaves blank, and what it knows of frameworks."""

from __future__ import annotations

from collections.abc import Iterator

from accuracy.published import Published
from shardwise.measured import frameworks, rules


def page() -> Iterator[str]:
    """Yield the lines of two Markdown tables."""
    yield "| field | where a row is silent | because |"
    yield "|---|---|---|"
    yield from (f"| `{one.field}` | {one.says.removeprefix('not stated: ')} | {one.because} |" for one in rules())
    yield ""
    yield "| framework, by its name in the file | stack | sharding | sequence parallel with tp | source |"
    yield "|---|---|---|---|---|"
    for one in frameworks(Published.frameworks):
        name = ", ".join(f"`{word}`" for word in one.pattern.split("|")) if one.pattern else "any other"
        name += "".join(f", where `{cell}` is `{pattern.replace('|', ' or ')}`" for cell, pattern in one.where.items())
        yes = "yes" if one.sequence_parallel else "no"
        yield f"| {name} | {one.stack or 'of the sharding'} | {one.sharding} | {yes} | {one.source} |"


if __name__ == "__main__":
    print(*page(), sep="\n")
