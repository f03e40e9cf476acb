"""The entry point: words in, an answer and an exit status out, never a traceback."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from shardwise._version import __version__
from shardwise.cli._run import answer
from shardwise.errors import InputError, Problem

BAD_INPUT = 2
FAULT = 70
INTERRUPTED = 130


def run(argv: Sequence[str] | None = None) -> int:
    """Return the exit status of a command line: 0 yes, 1 no, 2 bad input, 70 a fault of ours, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        _forgive(stream)
    try:
        return _run(words)
    except BrokenPipeError:
        # The reader has gone; what is still buffered must not be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _forgive(stream: TextIO) -> None:
    """Let a stream print what its encoding lacks as escapes."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def _run(words: list[str]) -> int:
    as_json = any(word in ("--json", "--json=true", "--json=yes") for word in words)
    try:
        text, status = _text(words, as_json)
    except InputError as error:
        return _refuse(error.problems, as_json)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except Exception as error:  # a fault of ours: said in one line, with the traceback on request
        if os.environ.get("SHARDWISE_DEBUG"):
            raise
        rule = f"fault in shardwise: {type(error).__name__}: {' '.join(str(error).split())}"
        remedy = "please report it with the command; SHARDWISE_DEBUG=1 shows where"
        _refuse((Problem("shardwise", __version__, rule, remedy),), as_json)
        return FAULT
    sys.stdout.write(text)
    sys.stdout.flush()
    return status


def _text(words: list[str], as_json: bool) -> tuple[str, int]:
    """Return what a command line prints and its exit status."""
    if words in (["--version"], ["-V"]):
        return f"shardwise {__version__}\n", 0
    result = answer(words)
    if as_json:
        return json.dumps(result.tree(), indent=2, allow_nan=False) + "\n", result.status
    from shardwise.report._page import text_of

    return text_of(result.page(), sys.stdout), result.status


def _refuse(problems: Sequence[Problem], as_json: bool) -> int:
    if as_json:
        sys.stdout.write(json.dumps({"error": {"problems": [p.as_dict() for p in problems]}}, indent=2) + "\n")
        sys.stdout.flush()
    else:
        for problem in problems:
            sys.stderr.write("error: " + " ".join(str(problem).split()) + "\n")
        sys.stderr.flush()
    return BAD_INPUT
