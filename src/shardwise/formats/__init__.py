"""Other systems' files, in and out: trainers' settings and launch scripts, and launches of serving engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise._lazy import lazily
from shardwise.formats._systems import SERVERS, SYSTEMS

if TYPE_CHECKING:
    from shardwise.formats._exported import ExportCase, Exported, unsaid
    from shardwise.formats._files import import_file, import_server, starts_server
    from shardwise.formats._imported import ImportContext, Imported, ReadArgument, changes_nothing
    from shardwise.formats._launched import Launched
    from shardwise.formats._served import Asked, engine_for
    from shardwise.formats._trainer import processes
    from shardwise.formats._wrapped import wrapped
    from shardwise.formats.megatron import from_megatron_args

__getattr__ = lazily(
    __name__,
    {
        "_exported": "ExportCase Exported unsaid",
        "_files": "import_file import_server starts_server",
        "_imported": "ImportContext Imported ReadArgument changes_nothing",
        "_launched": "Launched",
        "_served": "Asked engine_for",
        "_trainer": "processes",
        "_wrapped": "wrapped",
        "megatron": "from_megatron_args",
    },
)
