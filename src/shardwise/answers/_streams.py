"""Writing to the standard streams: the one place that does, and what an answer that nobody can read comes to."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Literal, TextIO

UNWRITTEN = 74
"""Exit status of an answer that could not be written: EX_IOERR of BSD's sysexits.h."""


def emit(text: str, status: int) -> int:
    """Return the exit status after writing an answer: `status`, also where the reader has gone, or 74.

    A stream that is closed or full says nothing about the answer, so its status is neither yes nor no.
    """
    return status if _write("stdout", text) else UNWRITTEN


def tell(text: str) -> None:
    """Write to standard error; where that cannot be, the exit status still says what was found."""
    _write("stderr", text)


def is_terminal(name: Literal["stdout", "stderr"]) -> bool:
    """Return whether a stream is a terminal."""
    stream: TextIO | None = getattr(sys, name)
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False


def is_unread() -> bool:
    """Return whether standard output is a pipe whose reader has gone."""
    import select

    with contextlib.suppress(OSError, ValueError, AttributeError):
        errors = select.poll()
        errors.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in errors.poll(0))
    return False


def _write(name: Literal["stdout", "stderr"], text: str) -> bool:
    """Return whether a text was written, or its reader has left on purpose."""
    stream: TextIO | None = getattr(sys, name)
    if stream is None:
        return False
    try:
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # What an encoding lacks, such as letters of a path, is printed as escapes.
            reconfigure(errors="backslashreplace")
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        _drop(stream)
        return True
    except (OSError, ValueError):
        # A full disk, a descriptor that is closed, and on Windows a pipe without a reader (EINVAL).
        _drop(stream)
        return False
    return True


def _drop(stream: TextIO) -> None:
    """Send what is still buffered nowhere, so that flushing it at exit does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
