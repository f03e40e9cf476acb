"""Megatron-LM: its arguments, launch scripts, namespaces and checkpoints in; arguments and a launch script out."""

from shardwise.formats._launch import Launch
from shardwise.formats.megatron._read import from_megatron_args, read, read_args, read_command, recognises
from shardwise.formats.megatron._write import export
