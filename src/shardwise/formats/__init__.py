"""Other systems' files, in and out: trainers' settings and launch scripts, and launches of serving engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise._lazy import lazily

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

__getattr__ = lazily(
    __name__,
    {
        "_exported": "ExportCase Exported",
        "_files": "import_file import_server starts_server",
        "_imported": "ImportContext Imported ReadArgument",
        "_launched": "Launched",
        "megatron": "from_megatron_args",
    },
)
