"""Run the examples of docs/cli.md and print each command with the first lines of its answer."""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
import tempfile
from typing import NamedTuple

from shardwise.cli import main as shardwise


class Example(NamedTuple):
    """What a command shows, the command, and how many lines of its answer stand in the document (0: all)."""

    title: str
    text: str
    command: str
    lines: int = 0


PLAN = "llama-3.1-70b --on 64xh100 --tp 8 --pp 4 --seq-len 8192 --global-batch 128"

EXAMPLES = (
    Example(
        "A training plan",
        "The verdict comes first: whether it fits, by how much, and what dominates at which moment on which stage.\n"
        "Then where the bytes of the fullest device and the seconds of a step go, exposed and overlapped messages\n"
        "apart, what was assumed, and the command that says it all again with every deduction written out.",
        f"shardwise train {PLAN} --tokens 2T",
    ),
    Example(
        "A plan that does not fit",
        "Exit status 1, the limit marked under the bar, and the nearest change that would fit.",
        "shardwise train llama-3.1-70b --on 64xh100 --tp 8 --pp 2 --seq-len 8192 --global-batch 128",
        14,
    ),
    Example(
        "What is wrong with the input",
        "Exit status 2 and one line for each problem, all of them at once: field, value, rule and remedy. With\n"
        '`--json` the same stands on standard output as `{"error": {"problems": [...]}}`.',
        "shardwise train llama-3.1-70b --on 64xh100 --tp 6 --micro-bach 2 --recompute some",
    ),
    Example(
        "A serving plan",
        "",
        "shardwise infer llama-3.1-70b --on 4xh100 --tp 4 --batch 32 --input-tokens 2000 --output-tokens 500",
        28,
    ),
    Example(
        "Counts",
        "Parameters by component, FLOPs by every published convention, and a table of operators for each kind of\n"
        "layer; with `--on` the seconds of each operator as well.",
        "shardwise count llama-3.1-8b --tokens 15T",
        24,
    ),
    Example(
        "Why a number is what it is",
        "Contributions add up to the number above them; a maximum shows what it chose and how far the others are;\n"
        "what is no sum shows the named numbers of its formula with their sources. `--path` goes further in, by names\n"
        "or by places counted from 1.\n"
        "Means of a load open with `serve ... --explain tpot`, down to step prices; percentiles are simulated:\n"
        "`why` says their seconds by cause.",
        f"shardwise explain {PLAN} --what memory --depth 3",
    ),
    Example("What is known", "", "shardwise devices h200"),
)


def shown(example: Example) -> str:
    """Return an example as Markdown, as a console that knows only ASCII shows it."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = shardwise(shlex.split(example.command)[1:])
    lines = out.buffer.getvalue().decode().splitlines()
    if example.lines and len(lines) > example.lines:
        lines = [*lines[: example.lines], "..."]
    said = f" exit={status}" if status else ""
    head = [f"## {example.title}", ""] if example.title else []
    text = [example.text, ""] if example.text else []
    return "\n".join([*head, *text, f"```sh{said}", example.command, "```", "", "```text", *lines, "```", ""])


def main() -> int:
    """Print every example."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        print("\n".join(shown(example) for example in EXAMPLES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
