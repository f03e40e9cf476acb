"""The launch line of a TensorRT-LLM server: `trtllm-serve MODEL` and the YAML of options that wins over its flags.

Sources: github.com/NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/llm_args.py (TorchLlmArgs, KvCacheConfig) of release 1.2 and
commands/serve.py. Its tensor parallelism counts all devices of a stage: with attention data parallelism each of them
runs attention alone.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise import files
from shardwise.errors import InputError, Problems
from shardwise.formats import _yaml
from shardwise.formats._exported import Exported
from shardwise.formats._imported import flat_keys
from shardwise.formats._launched import HERE, Launched, LaunchFiles, LaunchLine
from shardwise.formats._served import PLAIN, Asked, Deployment, Words, check, proposer, refuse, written
from shardwise.models import Architecture, Attention, load_model
from shardwise.records import replace
from shardwise.serving import InferReport, launched_engine
from shardwise.shell import left_open

_PROPOSERS = {"draft_model": "Draft_Target", "eagle": "Eagle", "eagle3": "Eagle3", "mtp": "MTP", "ngram": "NGram"}
_GENERATED = "TRTLLM"
_CHUNKED = "chunked"
_GRAPHS = "cuda_graph_config"
_ROLES = {"context": "prefill", "CONTEXT": "prefill", "generation": "decode", "GENERATION": "decode"}
_UNPADDED = 32  # llm_args.py, _generate_cuda_graph_batch_sizes: every size up to it without padding, few beyond
_SEQUENCES = 2048  # llm_args.py, max_batch_size where nothing is said
_WINDOW = "kv_cache_config.max_attention_window"
_CACHES = {"fp8": "fp8", "fp8_e4m3": "fp8", "nvfp4": "nvfp4"}


def _parallel(one: Deployment) -> dict[str, Any]:
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
    if case.model.has_experts:
        tree |= {"moe_expert_parallel_size": p.ep, "moe_tensor_parallel_size": p.etp}
    return tree


def _cache(one: Deployment, problems: Problems) -> dict[str, Any]:
    """Return the share of the memory, the type of the cache, and whether its blocks are found again."""
    tree: dict[str, Any] = {"free_gpu_memory_fraction": one.share, "enable_block_reuse": one.asked.prefixes}
    if one.job.max_total_tokens:
        tree["max_tokens"] = one.job.max_total_tokens
    if windows := _windows(one):
        tree["max_attention_window"] = windows
    if cache := one.job.kv_cache:
        if cache not in _CACHES:
            rule = "is no type of a cache of TensorRT-LLM"
            problems.add("kv_cache", cache, rule, "leave it out, or use one of " + ", ".join(_CACHES))
        tree["dtype"] = _CACHES.get(cache, cache)
    return tree


def _layers_windows(model: Architecture) -> list[int]:
    """Return the window of each layer of a model, 0 where it reads every token."""
    return [max((cache.limit for m in layer.mixers for cache in m.caches()), default=0) for layer in model.layers]


def _windows(one: Deployment) -> list[int]:
    """Return the tokens that layers keep, as many as repeat over all of them; none where each keeps what it reads."""
    case = one.report.case
    if "windows" not in case.engine.launched_with or not case.model.has_windows:
        return []
    kept = [window or one.context for window in _layers_windows(case.model)]
    return next(kept[:n] for n in range(1, len(kept) + 1) if all(x == kept[i % n] for i, x in enumerate(kept)))


def _adapted(model: Architecture, rank: int, problems: Problems) -> list[str]:
    """Return the linear layers that have adapters, by their names here; a server that names none does not start.

    Sources: tensorrt_llm/_torch/peft/lora/config.py, get_default_trtllm_modules_to_hf_modules, and pyexecutor/_util.py.
    """
    mixers = [mixer for block in model.kinds for mixer in block.mixers]
    dense = [block.dense for block in model.kinds if block.dense is not None]
    names = ["attn_q", "attn_k", "attn_v", "attn_dense"] if any(isinstance(one, Attention) for one in mixers) else []
    names += ["mlp_h_to_4h", "mlp_4h_to_h"] if dense else []
    names += ["mlp_gate"] if any(one.gated for one in dense) else []
    if not names:
        rule = f"has no layer of {model.name} that TensorRT-LLM knows adapters of: no plain attention, no dense MLP"
        problems.add("adapter_rank", rank, rule, "leave it out")
    return names


def _graphs(one: Deployment) -> dict[str, Any] | None:
    """Return the decode steps that are captured: all that may run, or those that a job says."""
    job, most, padded = one.job, one.stage_sequences, not one.job.disable_cuda_graph_padding
    if job.captured_sizes:
        return {"batch_sizes": sorted({min(size, most) for size in job.captured_sizes}), "enable_padding": padded}
    captured = min(job.captured_sequences, most) if job.captured_sequences >= 0 else most
    if captured > _UNPADDED and not padded:
        return {"batch_sizes": list(range(1, captured + 1)), "enable_padding": False}
    return {"max_batch_size": captured, "enable_padding": padded} if captured else None


def tree_of(one: Deployment) -> dict[str, Any]:
    """Return the options of a deployment; raises `InputError` naming every field that cannot be told."""
    words, case = check(one, "trtllm", ()), one.report.case
    tree = _parallel(one) | {
        "max_batch_size": one.stage_sequences,
        "max_num_tokens": one.step_tokens,
        "max_seq_len": one.context,
        "kv_cache_config": _cache(one, words),
        _GRAPHS: _graphs(one),
    }
    if case.engine.operators.experts_as:
        tree["moe_config"] = {"backend": _GENERATED}
    if _CHUNKED in case.engine.launched_with or one.step_tokens < case.new_input_tokens:
        tree["enable_chunked_prefill"] = True
    if one.wide and one.wide != "bf16":
        words.add("weights", one.job.weights, "is the checkpoint's to say to TensorRT-LLM", "leave it out, or use bf16")
    method, draft = proposer(one, "TensorRT-LLM", _PROPOSERS, words)
    if method:
        depth = "num_nextn_predict_layers" if method == "MTP" else "max_draft_len"
        tree["speculative_config"] = {"decoding_type": method, depth: one.job.num_speculative_tokens}
        tree["speculative_config"] |= {"speculative_model": draft} if draft else {}
    if rank := one.job.adapter_rank:
        tree["lora_config"] = {"lora_target_modules": _adapted(case.model, rank, words)}
        tree["lora_config"] |= {"max_lora_rank": rank, "max_loras": one.job.adapters}
    refuse(words)
    return tree


def export(report: InferReport, asked: Asked = PLAIN) -> Exported:
    """Return the script that starts a server as an answer assumed it, and its YAML."""
    one = Deployment(report=report, asked=asked, apart=True)
    tree = tree_of(one)
    notes = [] if report.case.step_tokens else ["max_num_tokens is the whole batch of prompts in one step"]
    start = f"trtllm-serve {shlex.quote(one.model)}"
    if one.nodes > 1:
        start = f"srun --nodes {one.nodes} --ntasks-per-node {one.node} --mpi=pmix trtllm-llmapi-launch {start}"
    words: Words = {"--extra_llm_api_options": '$(dirname "$0")/trtllm.yaml'}
    exported = written(one, "trtllm", start, words, notes, {"trtllm.yaml": _yaml.dump(tree)})
    # On several nodes srun starts its ranks, which no other scheduler's file can stand around.
    launch = exported.launch if one.nodes == 1 else ""
    return replace(exported, launch=launch)


STARTS = r"(\btrtllm-serve( serve)?|-m dynamo\.trtllm)"
_OPTIONS = ("--extra-llm-api-options", "--config", "--extra-engine-args")
_OVERRIDES = ("--override-engine-args", "--trtllm")  # of Dynamo's worker, over the YAML
_KEYS = {
    "tensor_parallel_size": "--tp-size", "pipeline_parallel_size": "--pp-size", "max_batch_size": "--max-batch-size",
    "moe_expert_parallel_size": "--ep-size", "max_num_tokens": "--max-num-tokens", "max_seq_len": "--max-seq-len",
    "kv_cache_config.free_gpu_memory_fraction": "--kv-cache-free-gpu-memory-fraction",
    "kv_cache_config.dtype": "--kv-cache-dtype",
    "enable_chunked_prefill": "--enable-chunked-prefill", "context_parallel_size": "--cp-size",
}  # fmt: skip


def _options(line: LaunchLine, around: LaunchFiles) -> dict[str, Any]:
    """Return the settings of the YAML that a line names: a file beside its script, or one that the script writes."""
    named = next((str(line.values[flag]) for flag in _OPTIONS if flag in line.values), "")
    if not named:
        return {}
    file = os.path.basename(named.strip("\"'"))
    path = os.path.join(around.folder, file)
    if file in around.named:
        text = around.named[file]
    elif os.path.isfile(path):
        text = files.read_text(path, files.YAML_BYTES, "from")
    elif around.documents:
        text = around.documents[0]
    else:
        line.problems.add("from", named, f"is named by {line.source} and does not lie beside it", f"put it at {path}")
        return {}
    try:
        tree = _yaml.parse(text, named)
    except InputError:
        if (why := left_open(text)) is None:
            raise
        line.problems.add(named, None, *why)  # what is open breaks the YAML around it
        return {}
    return _settings(tree)


def _settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a tree of options, by their flags where they have some."""
    options = {_KEYS.get(key, key): value for key, value in flat_keys(tree)}
    if options.get(_GRAPHS, "") is None:
        options[_GRAPHS] = False  # of a null alone that is no default: no graph is captured
    return {key: value for key, value in options.items() if value is not None}


def _speculation(line: LaunchLine) -> dict[str, Any]:
    """Return what proposes tokens, and how many; how many are accepted no launch says."""
    known = {theirs: "eagle" if ours == "eagle3" else ours for ours, theirs in _PROPOSERS.items()}
    method = line.named("speculative_config.decoding_type", known | {"DraftTarget": "draft_model"})
    if not method:
        return {}
    line.assumed.append("acceptance: no launch says it, give --acceptance-rate or --acceptance-length")
    keys = [f"speculative_config.{name}" for name in ("speculative_model", "speculative_model_dir")]
    draft = next((line.word(key) for key in keys if line.word(key)), "")
    depths = ("max_draft_len", "num_nextn_predict_layers")
    depth = next((n for name in depths if (n := line.whole(f"speculative_config.{name}"))), 1)
    named = {"draft_model": draft} if method in ("eagle", "draft_model") else {}
    return {"speculative_method": method, "num_speculative_tokens": depth, **named}


def _adapters(line: LaunchLine) -> dict[str, Any]:
    """Return the rank of adapters and how many lie in memory (tensorrt_llm/_torch/peft/lora/config.py LoraConfig)."""
    if not any(key.startswith("lora_config.") for key in line.values):
        return {}
    count = line.whole("lora_config.max_loras")
    if not count:
        line.assumed.append("adapters 1: lora_config has no max_loras, by which a share of the memory is theirs")
    return {"adapter_rank": line.whole("lora_config.max_lora_rank") or 64, "adapters": count or 1}


def _captured(line: LaunchLine) -> dict[str, Any]:
    """Return which decode steps a launch replays: sizes that it lists, or up to how many sequences, if not all it runs.

    Sources: tensorrt_llm/llmapi/llm_args.py CudaGraphConfig, 1.0 to 1.3.0rc27 (up to 128 sequences, without padding,
    unless it is told: every size up to 32 and few beyond), and _torch/pyexecutor/cuda_graph_runner.py, which replays no
    graph of another size.
    """
    if line.values.get(_GRAPHS) is False:
        line.assumed.append(f"decode launched kernel by kernel: {_GRAPHS} is null, leave it out")
        return {"captured_sequences": 0}
    listed = line.values.get(f"{_GRAPHS}.batch_sizes")
    sizes = {one for one in listed if type(one) is int and one > 0} if isinstance(listed, list) else set()
    padded, most = line.flag(f"{_GRAPHS}.enable_padding"), line.whole("--max-batch-size") or _SEQUENCES
    captured: dict[str, Any] = {} if padded else {"disable_cuda_graph_padding": True}
    largest = max(sizes, default=line.whole(f"{_GRAPHS}.max_batch_size") or 128)
    if sizes and (padded or sizes != set(range(1, largest + 1))):
        captured["captured_sizes"] = tuple(sorted(sizes))
    elif not (sizes or padded):
        largest = min(largest, _UNPADDED)
    if largest < most and "captured_sizes" not in captured:
        captured["captured_sequences"] = largest
    if largest < most or (not padded and "captured_sizes" in captured):
        alone = f" but of {', '.join(map(str, sorted(sizes)))} sequences" if not padded and sizes else ""
        rest = f"of which {_GRAPHS} captures single sizes at most: set its max_batch_size, and enable_padding"
        line.assumed.append(f"decode launched kernel by kernel{alone or f' beyond {largest} sequences'}, {rest}")
    return captured


def _engine(line: LaunchLine, model: str) -> str:
    """Return the engine by the kernels of experts that the options ask for, the tokens that layers keep, and pieces."""
    says = {
        "generated": line.word("moe_config.backend").upper() == _GENERATED,
        "windows": _keeps_windows(line, model),
        _CHUNKED: line.flag("--enable-chunked-prefill"),
    }
    return launched_engine("tensorrt-llm", *(word for word, meant in says.items() if meant))


def _keeps_windows(line: LaunchLine, model: str) -> bool:
    """Return whether layers with a window keep that alone, which max_attention_window says; others must keep all."""
    listed = line.values.get(_WINDOW)
    if listed is None:
        return False
    listed = listed if isinstance(listed, list) else [listed]
    if not listed or not all(type(one) is int and one > 0 for one in listed):
        line.problems.add(_WINDOW, str(listed), "must be whole numbers of tokens", "write for example [128, 131072]")
        return False
    try:
        known = load_model(model)
    except InputError:
        line.assumed.append(f"{_WINDOW} {listed}: which layers of the model read a window is not known")
        return False
    longest = line.whole("--max-seq-len") or known.max_context
    pairs = [(window, listed[i % len(listed)]) for i, window in enumerate(_layers_windows(known))]
    short = [kept for window, kept in pairs if kept < longest]
    if all(kept == window for window, kept in pairs if kept < longest):
        return bool(short)
    rule = f"is not what the layers of {known.name} read, whose other tokens are lost"
    line.problems.add(_WINDOW, str(listed), rule, f"write the windows of its layers, and {longest} for those without")
    return False


def read_words(words: Sequence[str], source: str, files: LaunchFiles = HERE) -> Launched:
    """Return the server of a command line, by the words behind `trtllm-serve`; its YAML wins over its flags.

    >>> one = read_words("meta-llama/Llama-3.1-8B --tp_size 2 --max_batch_size 256".split(), "run.sh")
    >>> one.num_devices, one.values["max_sequences"]
    (2, 256)
    """
    # The command of `trtllm-serve` that is meant where none is named (tensorrt_llm/commands/serve.py).
    line = LaunchLine(words[1:] if words[:1] == ["serve"] else words, "trtllm.toml", source)
    line.add(_options(line, files))
    for flag in _OVERRIDES:
        line.add(_settings(line.tree(flag)))
    model = line.model("--model")
    ranks, pp = line.whole("--tp-size") or 1, line.whole("--pp-size") or 1
    if (split := line.whole("--cp-size")) > 1:
        rule = "multiplies the devices by ranks of the context, which servers do not have here"
        line.problems.add("--cp-size", split, rule, "leave it out")
    alone = line.flag("enable_attention_dp")
    values: dict[str, Any] = {
        "model": model, "engine": _engine(line, model),
        "tp": 1 if alone else ranks, "pp": pp, "dp": ranks if alone else 0,
        "kv_cache": line.named("--kv-cache-dtype", {flag: name for name, flag in reversed(_CACHES.items())}),
        "memory_fraction": line.share("--kv-cache-free-gpu-memory-fraction"),
        "max_total_tokens": line.whole("kv_cache_config.max_tokens"),
        # Of a step of one stage (_torch/pyexecutor/_util.py, max_num_sequences), as many of which run as stages.
        "max_sequences": line.whole("--max-batch-size") * pp,
        "max_batched_tokens": line.whole("--max-num-tokens"),
        "max_context": line.whole("--max-seq-len"), "language_model_only": line.flag("disable_mm_encoder"),
    }  # fmt: skip
    values |= _speculation(line) | _adapters(line)
    role = line.word("--disaggregation-mode") or line.named("--server-role", _ROLES)
    if role != "prefill":
        values |= _captured(line)
    if model and line.experts(model):
        ep = line.whole("--ep-size") or 1
        values |= {"ep": ep, "etp": line.whole("moe_tensor_parallel_size") or max(ranks // ep, 1)}
    if stages := line.values.get("pp_partition"):
        values["stage_layers"] = tuple(stages)
    return line.launched(values, ranks * pp, role)
