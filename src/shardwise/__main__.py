"""Runs the command line: `python -m shardwise`."""

import sys

if __name__ == "__main__":
    try:
        from shardwise.cli import command

        sys.exit(command())
    except KeyboardInterrupt:
        sys.exit(130)
