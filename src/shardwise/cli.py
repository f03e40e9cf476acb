"""The command line."""

from collections.abc import Sequence

INTERRUPTED = 130

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status of a command line: 0 yes, 1 does not fit, 2 bad input, 70 a fault of ours.

    Loaded inside, so that an interrupt while loading is no traceback either.
    """
    try:
        from shardwise.answers._main import run

        return run(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
