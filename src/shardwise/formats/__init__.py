"""Other systems' files, in and out: trainers' settings and launch scripts, and launches of serving engines."""

from shardwise.formats._exported import ExportCase, Exported
from shardwise.formats._files import import_file, import_server, starts_server
from shardwise.formats._imported import ImportContext, Imported, ReadArgument
from shardwise.formats._launched import Launched
from shardwise.formats.megatron import from_megatron_args

__all__ = [
    "ExportCase",
    "Exported",
    "ImportContext",
    "Imported",
    "Launched",
    "ReadArgument",
    "from_megatron_args",
    "import_file",
    "import_server",
    "starts_server",
]
