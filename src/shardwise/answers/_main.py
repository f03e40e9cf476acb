"""The entry point: words in, an answer and an exit status out, never a traceback."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from shardwise._version import __version__
from shardwise.answers._answer import INTERRUPTED, UNWRITTEN, OutputClosed, emit, print_error, stop_when_closed
from shardwise.answers._run import answer, asks_for_json
from shardwise.errors import InputError, Problem, bounded

BAD_INPUT = 2
FAULT = 70
MOST_PROBLEMS = 100
SCHEMA = 1


def run(argv: Sequence[str] | None = None) -> int:
    """Return the exit status of a command line.

    0 yes, 1 no, 2 bad input, 70 a fault of ours, 74 the answer could not be written, 130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except OutputClosed:
        return UNWRITTEN
    except KeyboardInterrupt:
        print_error("interrupted\n")
        return INTERRUPTED


def _run(words: list[str]) -> int:
    as_json = False
    try:
        with stop_when_closed(), bounded("command", " ".join(words)):
            as_json = asks_for_json(words)
            text, status = _text(words, as_json)
    except InputError as error:
        from shardwise.answers._stacks import of_other_kind

        return _refuse(tuple(map(of_other_kind, error.problems)), as_json, BAD_INPUT)
    except ImportError as error:
        from shardwise.libraries import missing

        debugs = os.environ.get("SHARDWISE_DEBUG") or _interrupt_behind(error)
        problem = None if debugs else missing(error, words[0])
        return _fault(error, as_json) if problem is None else _refuse((problem,), as_json, BAD_INPUT)
    except Exception as error:
        return _fault(error, as_json)
    return emit(text, status)


def _fault(error: Exception, as_json: bool) -> int:
    """Return the exit status of a fault of ours: said in one line, with the traceback on request.

    What an interrupt broke on its way, a module that was being loaded for example, is no fault but the interrupt.
    """
    interrupt = _interrupt_behind(error)
    if interrupt is not None:
        raise interrupt
    if os.environ.get("SHARDWISE_DEBUG"):
        raise error
    rule = f"fault in shardwise: {type(error).__name__}: {' '.join(str(error).split())}"
    remedy = "please report it with the command; SHARDWISE_DEBUG=1 shows where"
    return _refuse((Problem("shardwise", __version__, rule, remedy),), as_json, FAULT)


def _interrupt_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interrupt that an error comes of, None where it comes of none."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _text(words: list[str], as_json: bool) -> tuple[str, int]:
    """Return what a command line prints and its exit status."""
    if words in (["--version"], ["-V"]):
        return f"shardwise {__version__}\n", 0
    result = answer(words)
    if as_json:
        return _json(result.tree()), result.status
    from shardwise.answers._page import text_of

    return text_of(result.page(), sys.stdout), result.status


def _json(tree: dict[str, Any]) -> str:
    """Return an answer as JSON; the first key is the version of the keys (docs/json.md)."""
    return json.dumps({"schema": SCHEMA, **tree}, indent=2, allow_nan=False) + "\n"


def _refuse(problems: Sequence[Problem], as_json: bool, status: int) -> int:
    """Return the exit status after saying what is wrong: as JSON on standard output, else a line each on the other."""
    rest = len(problems) - MOST_PROBLEMS
    if rest > 0:
        more = Problem("command", None, f"has {rest} problems more", "correct those above first")
        problems = [*problems[:MOST_PROBLEMS], more]
    if as_json:
        return emit(_json({"error": {"problems": [problem.as_dict() for problem in problems]}}), status)
    print_error("".join("error: " + " ".join(str(problem).split()) + "\n" for problem in problems))
    return status
