"""Ask llm-analysis the settings on standard input, in the Python that it is installed in, beside nothing of ours."""

from __future__ import annotations

import json
import logging
import sys

from llm_analysis.analysis import infer, train
from llm_analysis.logger import logger

TRAIN = {
    "parameters": "num_params_total",
    "FLOPs of a micro-batch": "num_flops_total_per_micro_batch",
    "weights": "weight_memory_per_gpu",
    "gradients": "gradient_memory_per_gpu",
    "optimizer": "optimizer_state_memory_per_gpu",
    "step": "latency_per_iter",
}
LAYERS = ("activation_memory_attn_per_gpu", "activation_memory_mlp_per_gpu", "activation_memory_layernorm_per_gpu")
INFER = {
    "weights": "weight_memory_per_gpu",
    "key-value cache": "kv_cache_memory_per_gpu",
    "prefill": "prefill_latency",
    "decode": "decode_latency",
}


def trained(s: dict) -> dict:
    """Return its figures of a training setting."""
    found = train(
        model_name=s["model"], gpu_name=s["gpu"], batch_size_per_gpu=s["micro_batch"], seq_len=s["seq_len"],
        gradient_accumulation_steps=s["accumulation"], activation_recomputation=s["recompute"], ds_zero=s["zero"],
        dp_size=s["dp"], tp_size=s["tp"], pp_size=s["pp"], flops_efficiency=0.5, log_level="ERROR",
    )  # fmt: skip
    figures = {name: found[key] for name, key in TRAIN.items()}
    if s["recompute"] != 2:
        figures["activations of the layers"] = sum(found[key] for key in LAYERS)
    return figures


def served(s: dict) -> dict:
    """Return its figures of a serving setting."""
    found = infer(
        model_name=s["model"], gpu_name=s["gpu"], batch_size_per_gpu=s["batch"], seq_len=s["input"],
        num_tokens_to_generate=s["output"], tp_size=s["tp"], pp_size=s["pp"], flops_efficiency=1.0,
        hbm_memory_efficiency=1.0, log_level="ERROR",
    )  # fmt: skip
    return {name: found[key] for name, key in INFER.items()}


def answered(s: dict) -> dict:
    """Return its figures of a setting, or the error that it ends with."""
    try:
        return {"train": trained, "infer": served}[s["ask"]](s)
    except (AssertionError, TypeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer every setting, each by its place."""
    logger.setLevel(logging.CRITICAL)
    json.dump([answered(s) for s in json.load(sys.stdin)], sys.__stdout__)


if __name__ == "__main__":
    sys.stdout = sys.stderr
    main()
