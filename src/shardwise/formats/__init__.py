"""Other systems' files: Megatron-LM, DeepSpeed, accelerate with FSDP, in and out."""

from shardwise.formats._imported import Imported, Reading

__all__ = ["Imported", "Reading"]
