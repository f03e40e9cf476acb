"""Know before you launch."""

from shardwise._version import __version__

__all__ = ["__version__"]
