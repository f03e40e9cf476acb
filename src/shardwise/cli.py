"""The command line."""

from __future__ import annotations

import gc
import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130
# Objects made between two looks for dead cycles: a command's records live as long as it does, and looking for cycles
# among them every 700 objects takes a tenth of a small search, every 50,000 four hundredths.
_BETWEEN = 500_000


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status of a command line: 0 yes, 1 does not fit, 2 bad input, 70 a fault of ours.

    Loaded inside, so that an interrupt while loading is no traceback either.
    """
    before = gc.get_threshold()
    gc.set_threshold(_BETWEEN, *before[1:])
    try:
        from shardwise.answers import run

        return run(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        gc.set_threshold(*before)


def command() -> int:
    """Return the exit status of the command line of this process.

    What is left ends with it: to look for dead cycles among all objects once more takes a tenth of a short command.
    Threads for products of matrices, of which there are none but in what is measured, take 25 ms to wait for one.
    """
    try:
        import os

        if sys.argv[1:2] != ["measure"]:
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        gc.set_threshold(_BETWEEN, *gc.get_threshold()[1:])
        status = main()
        gc.freeze()
    except KeyboardInterrupt:
        # Between two lines of ours.
        return INTERRUPTED
    return status
