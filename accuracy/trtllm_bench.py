"""What trtllm-bench sets of an engine by the lengths of its data set: sequences at once, and tokens of a step.

The pages of its performance overviews leave both to the tool: github.com/NVIDIA/TensorRT-LLM
tensorrt_llm/bench/build/tuning.py and bench/benchmark/utils/general.py, 0.16 to 1.2, alike in these numbers.
"""

from __future__ import annotations

import math

from shardwise import count
from shardwise.hardware import Device
from shardwise.measured import Record
from shardwise.models import Attention, Model

NOTE = "trtllm-bench"
# tuning.py: requests and tokens at most, the share of the memory, and the bytes of an element by the weights' type.
_MOST, _MOST_TOKENS, _FRACTION = 4096, 32768, 0.95
_BYTES = {"nvfp4": 0.5, "fp8": 1.0, "fp8_block": 1.0, "bf16": 2.0, "fp16": 2.0}
# It counts the elements of the checkpoint's tensors: those of NVFP4 are pairs, and scales of sixteen.
_STORED = {"nvfp4": 1 / 2 + 1 / 16}


def tuned(record: Record, model: Model, device: Device) -> Record:
    """Return a row with the sequences and the tokens of a step that trtllm-bench chooses, where its notes say so."""
    word = record.text("weight_dtype").lower()
    mixers = [mixer for layer in model.layers for mixer in layer.mixers if isinstance(mixer, Attention)]
    if record.notes.get("limits") != NOTE or word not in _BYTES or not mixers:
        return record
    groups, pp = record.count("attention_dp"), record.count("pp")
    ranks = record.count("tp") * groups
    cache = 1.0 if word in ("fp8", "nvfp4") or record.text("kv_dtype") == "fp8" else 2.0
    each = 2 * len(mixers) * max(ranks, mixers[0].kv_heads) * mixers[0].head_dim * cache
    weights = int(count(model).parameters) * _STORED.get(word, 1.0) * _BYTES[word]
    room = (device.usable_memory_bytes * ranks * pp - weights) * _FRACTION
    prompt, made = record.number("input_tokens"), record.number("output_tokens")
    sequences, tokens = limits(room / each / (prompt + made), prompt, made, pp)
    # A whole prompt runs beside all others (get_settings); built engines cut it, which runs it as well.
    tokens = max(tokens, round(prompt) + sequences)
    return record.with_cells({"batch": str(sequences * pp * groups), "max_num_batched_tokens": str(tokens)})


def limits(requests: float, prompt: float, made: float, pp: int) -> tuple[int, int]:
    """Return the sequences at once of a stage and the tokens of a step where the cache holds so many requests.

    `finetune_setting` of tuning.py.

    >>> limits(1000.0, 1000.0, 1000.0, 1), limits(100.0, 128.0, 2048.0, 1), limits(5000.0, 2048.0, 128.0, 2)
    ((1024, 2048), (128, 2048), (2048, 32768))
    """
    most = min(requests, _MOST) / pp
    steps = min(most * (1 + prompt / made), _MOST_TOKENS)
    by = 32 if most < 256 else 128 if most < 1024 else 256
    of = 256 if steps < 4096 else 512 if steps < 8192 else 1024
    return max(by * math.ceil(most / by), 64), max(of * math.ceil(steps / of), 2048)
