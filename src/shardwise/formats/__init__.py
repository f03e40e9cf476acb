"""Other systems' files, in and out: trainers' settings and launch scripts, and launches of serving engines."""

from shardwise.formats._exported import ExportCase, Exported
from shardwise.formats._files import import_file, import_server, starts_server
from shardwise.formats._imported import Around, Imported, Reading
from shardwise.formats._launched import Launched
from shardwise.formats.megatron import from_megatron_args

__all__ = [
    "Around",
    "ExportCase",
    "Exported",
    "Imported",
    "Launched",
    "Reading",
    "from_megatron_args",
    "import_file",
    "import_server",
    "starts_server",
]
