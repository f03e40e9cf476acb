"""An answer to a command: its exit status, the tree that `--json` prints, the page that people read, and writing it."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TextIO

from shardwise.errors import close_to
from shardwise.records import dataclass

if TYPE_CHECKING:
    from shardwise.answers._page import Page


@dataclass(frozen=True, slots=True)
class Answer:
    """An exit status, and how to make the tree or the page; only the one that is printed is made."""

    status: int
    tree: Callable[[], Any]
    page: Callable[[], Page]


def nothing_found(what: str, search: str, names: tuple[str, ...]) -> Answer:
    """Return the answer of a search without results: status 1 and the nearest names, if any is near."""
    near = close_to(search, names)
    rest = f"near it: {' or '.join(near)}" if near else f"shardwise {what} lists all {len(names)}"

    def page() -> Page:
        from shardwise.answers._page import Page

        made = Page(80)
        made.add((f"no {what} match {search!r}; {rest}", ""))
        return made

    return Answer(1, lambda: {what: [], "near": near}, page)


# Parts of a report in which every number is bytes.
_BYTES = ("categories", "moments", "at_peak")
_ENDS = ("_bytes", "_bytes_per_gpu", "bytes_per_step", "sent_per_step")


def whole_bytes(tree: Any, inside: bool = False) -> Any:
    """Return a report's tree with bytes rounded to whole ones.

    Bytes are values whose key ends with "_bytes", "_bytes_per_gpu" or "_per_step" of bytes, what lies below such a key,
    and the parts of a peak. Rates a second stay as they are.

    >>> whole_bytes({"peak_bytes": 10.4, "seconds": 0.5, "at_peak": {"weights": 6.6}})
    {'peak_bytes': 10, 'seconds': 0.5, 'at_peak': {'weights': 7}}
    """
    if isinstance(tree, dict):
        return {key: whole_bytes(value, inside or key in _BYTES or key.endswith(_ENDS)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(whole_bytes(value, inside) for value in tree)
    return round(tree) if inside and isinstance(tree, float) else tree


UNWRITTEN = 74
"""Exit status of an answer that could not be written: EX_IOERR of BSD's sysexits.h."""
INTERRUPTED = 130
"""Exit status of a search or a command that was interrupted: 128 and the number of SIGINT, as shells say it."""


def emit(text: str, status: int) -> int:
    """Return the exit status after writing an answer: `status`, also where the reader has gone, or 74.

    A stream that is closed or full says nothing about the answer, so its status is neither yes nor no.
    """
    return status if _write("stdout", text) else UNWRITTEN


def print_error(text: str) -> None:
    """Write to standard error; where that cannot be, the exit status still says what was found."""
    _write("stderr", text)


def is_terminal(name: Literal["stdout", "stderr"]) -> bool:
    """Return whether a stream is a terminal."""
    stream: TextIO | None = getattr(sys, name)
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False


class OutputClosed(BaseException):
    """Standard output is a pipe whose reader has gone: nobody wants the answer that is being worked out."""


# Seconds after which it is looked whether anybody reads.
_MOMENT = 0.25


@contextlib.contextmanager
def stop_when_closed() -> Iterator[None]:
    """Raise `OutputClosed` in what runs within, soon after the reader of standard output has gone, if a timer can."""
    import signal
    import threading

    timed = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    # A timer that somebody else has set stays theirs.
    if not (timed and _is_pipe() and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL):
        yield
        return

    def look(number: int = 0, frame: object = None) -> None:
        if _is_closed():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise OutputClosed

    signal.signal(signal.SIGALRM, look)
    # Calls that a signal interrupts go on, also those of libraries.
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, _MOMENT, _MOMENT)
    try:
        look()
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _is_pipe() -> bool:
    import stat

    with contextlib.suppress(OSError, ValueError, AttributeError):
        kind = os.fstat(sys.stdout.fileno()).st_mode
        return stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)
    return False


def _is_closed() -> bool:
    """Return whether standard output is a pipe whose reader has gone."""
    import select

    with contextlib.suppress(OSError, ValueError, AttributeError):
        errors = select.poll()
        errors.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in errors.poll(0))
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


def whole_shares(shares: Mapping[str, float], digits: int) -> dict[str, str]:
    """Return shares in percent with so many digits, rounded by largest remainder: they add up as the exact ones do.

    >>> whole_shares({"a": 0.505, "b": 0.495}, 0)
    {'a': '51%', 'b': '49%'}
    """
    scale = 10**digits
    exact = {name: 100 * scale * share for name, share in shares.items()}
    floors = {name: math.floor(value) for name, value in exact.items()}
    left = round(sum(exact.values())) - sum(floors.values())
    for name in sorted(exact, key=lambda name: floors[name] - exact[name])[:left]:
        floors[name] += 1
    return {name: f"{value / scale:.{digits}f}%" for name, value in floors.items()}
