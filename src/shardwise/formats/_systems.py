"""The systems whose files are read and written; each is the module of its name."""

SYSTEMS = (
    "deepspeed", "maxtext", "axolotl", "llamafactory", "llamafactory_v1", "nanotron", "torchtune", "verl", "nemo",
    "trl", "transformers", "fsdp", "torchtitan", "megatron",
)  # fmt: skip
"""Trainers whose files are read and written, in the order in which they are asked; the last takes any script."""
READ_ONLY = ("unsloth", "peft", "primus", "swift", "openrlhf", "slime", "roll")
"""What is read, and written by none: asked before the others."""
SERVERS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "trtllm": "tensorrt-llm",
    "llamacpp": "llama.cpp",
    "dynamo": "vllm",
}
"""What an export writes the launch of -> its engine, of which the devices may run a variant."""
