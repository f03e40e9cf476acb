"""Other systems' files: Megatron-LM, DeepSpeed, accelerate with FSDP, in and out."""

from shardwise.formats._exported import ExportCase, Exported
from shardwise.formats._files import import_file, import_server
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
]
