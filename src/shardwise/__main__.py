"""Runs the command line: `python -m shardwise`."""

import sys

from shardwise.cli import command

if __name__ == "__main__":
    sys.exit(command())
