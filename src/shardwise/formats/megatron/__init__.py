"""Megatron-LM: its arguments, launch scripts, namespaces and checkpoints in; arguments and a launch script out."""

from shardwise.formats.megatron._read import from_megatron_args, read_args

__all__ = ["from_megatron_args", "read_args"]
