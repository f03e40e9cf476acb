"""Which value a switch of another system means, where here a word says what it switches on."""

from __future__ import annotations

from shardwise.answers._flags import Flag

_VALUES = {
    "use_distributed_optimizer": "distributed-optimizer",
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing", "checkpoint_activations"), "full"),
    **dict.fromkeys(("cpu_offload", "optimizer_offload", "offload_optimizer", "optimizer_cpu_offload"), "optimizer"),
    **dict.fromkeys(("offload_param", "offload_params"), "parameters"),
    **dict.fromkeys(("activation_offload", "activation_offloading", "enable_activation_offloading"), "activations"),
    "load_in_4bit": "nf4",
    "load_in_8bit": "int8",
}
_FORMATS = ("fp8", "fp16", "bf16", "fp32", "int4", "int8")


def meant_value(key: str, value: object, flag: Flag) -> str:
    """Return a blank and the value of a flag that a switch of another name means, "" where none is known.

    >>> from shardwise.answers._commands import command
    >>> sharding = command("train").flags["sharding"]
    >>> meant_value("fsdp", None, sharding), meant_value("zero", "3", sharding), meant_value("mbs", "2", sharding)
    (' fsdp', ' zero3', '')
    """
    choices = flag.kind.schema.get("enum", ())
    words = (key, f"zero{value}" if key in ("zero", "zero_stage") else "")
    meant = next((word for word in words if word in choices or word in _FORMATS), _VALUES.get(key, ""))
    return f" {meant}" if meant else ""
