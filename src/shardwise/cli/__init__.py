"""The command line."""

from shardwise.cli._main import main

__all__ = ["main"]
