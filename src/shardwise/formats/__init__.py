"""Other systems' files, in and out: trainers' settings and launch scripts, and launches of serving engines."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.formats._exported import ExportCase, Exported
    from shardwise.formats._files import import_file, import_server, starts_server
    from shardwise.formats._imported import ImportContext, Imported, ReadArgument
    from shardwise.formats._launched import Launched
    from shardwise.formats.megatron import from_megatron_args

SYSTEMS = (
    "deepspeed", "axolotl", "llamafactory", "nanotron", "torchtune", "verl", "nemo", "trl", "transformers", "fsdp",
    "torchtitan", "megatron",
)  # fmt: skip
"""Trainers whose files are read and written, in the order in which they are asked; the last takes any script."""
SERVERS = ("vllm", "sglang", "trtllm", "llamacpp", "dynamo")
"""Engines that an export writes the launch line of."""
_HOMES = {
    **dict.fromkeys(("ExportCase", "Exported"), "_exported"),
    **dict.fromkeys(("import_file", "import_server", "starts_server"), "_files"),
    **dict.fromkeys(("ImportContext", "Imported", "ReadArgument"), "_imported"),
    "Launched": "_launched",
    "from_megatron_args": "megatron",
}

__all__ = [
    "SERVERS",
    "SYSTEMS",
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
