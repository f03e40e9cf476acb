"""The launch line of a TensorRT-LLM server: `trtllm-serve MODEL` and the YAML of options that wins over its flags.

Sources: github.com/NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/llm_args.py (TorchLlmArgs, KvCacheConfig) of release 1.2 and
commands/serve.py. Its tensor parallelism counts all devices of a stage: with attention data parallelism each of them
runs attention alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.errors import Problems
from shardwise.formats import _yaml
from shardwise.formats._exported import Exported
from shardwise.formats._served import Deployment, check, hub_name, refuse, written
from shardwise.serving import InferReport

_CACHES = {"fp8": "fp8", "fp8_e4m3": "fp8", "nvfp4": "nvfp4"}


def _parallel(one: Deployment, found: Problems) -> dict[str, Any]:
    """Return how the model is split, and over which nodes."""
    p, case = one.plan, one.report.case
    ranks = p.tp * (p.dp if one.spread else 1)
    tree: dict[str, Any] = {"tensor_parallel_size": ranks, "pipeline_parallel_size": p.pp}
    if len(set(p.stage_layers)) > 1:
        tree["pp_partition"] = list(p.stage_layers)
    if one.nodes > 1:
        tree["gpus_per_node"] = one.node
    if one.spread:
        tree["enable_attention_dp"] = True
        if p.tp > 1:
            rule = "with attention data parallelism TensorRT-LLM runs attention on single devices"
            found.add("tp", p.tp, rule, f"use tp 1 with dp {ranks}")
    if case.model.has_experts and p.ep * p.etp != ranks:
        rule = f"TensorRT-LLM splits experts over all {ranks} devices of a stage, and ep x etp is {p.ep * p.etp}"
        found.add("ep", p.ep, rule, f"use etp {ranks // p.ep}" if ranks % p.ep == 0 else f"use ep {ranks} with etp 1")
    elif case.model.has_experts:
        tree |= {"moe_expert_parallel_size": p.ep, "moe_tensor_parallel_size": p.etp}
    return tree


def _cache(one: Deployment, found: Problems) -> dict[str, Any]:
    """Return the share of the memory, the type of the cache, and whether its blocks are found again."""
    tree: dict[str, Any] = {"free_gpu_memory_fraction": one.share, "enable_block_reuse": one.prefixes}
    if cache := one.job.kv_cache:
        if cache not in _CACHES:
            rule = "is no type of a cache of TensorRT-LLM"
            found.add("kv_cache", cache, rule, "leave it out, or use one of " + ", ".join(_CACHES))
        tree["dtype"] = _CACHES.get(cache, cache)
    return tree


def tree_of(one: Deployment) -> dict[str, Any]:
    """Return the options of a deployment; raises `InputError` naming every field that cannot be told."""
    found = check(one, "TensorRT-LLM", ("tensorrt-llm",), ())
    tree = _parallel(one, found) | {
        "max_batch_size": one.sequences,
        "max_num_tokens": one.step_tokens,
        "max_seq_len": one.job.total_tokens,
        "kv_cache_config": _cache(one, found),
        "cuda_graph_config": {"max_batch_size": one.sequences, "enable_padding": True},
    }
    if one.step_tokens < one.report.case.new_input_tokens:
        tree["enable_chunked_prefill"] = True
    if one.wide and one.wide != "bf16":
        found.add("weights", one.job.weights, "is the checkpoint's to say to TensorRT-LLM", "leave it out, or use bf16")
    if rank := one.job.adapter_rank:
        tree["lora_config"] = {"max_lora_rank": rank, "max_loras": one.job.adapters}
    refuse(found)
    return tree


def export(report: InferReport, prefixes: bool = False) -> Exported:
    """Return the script that starts a server as an answer assumed it, and its YAML."""
    one = Deployment(report=report, prefixes=prefixes, apart=True)
    tree = tree_of(one)
    notes = [] if report.case.step_tokens else ["max_num_tokens is the whole batch of prompts in one step"]
    start = f"trtllm-serve {hub_name(report.case.model.name)}"
    if one.nodes > 1:
        start = f"srun --nodes {one.nodes} --ntasks-per-node {one.node} --mpi=pmix trtllm-llmapi-launch {start}"
    found = written(one, "trtllm", start, {"--extra_llm_api_options": '$(dirname "$0")/trtllm.yaml'}, notes)
    return replace(found, files={**found.files, "trtllm.yaml": _yaml.dump(tree)})
