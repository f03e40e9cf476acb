"""The launch line of a vLLM server: `vllm serve MODEL --flags`.

Sources: github.com/vllm-project/vllm v0.33.0 vllm/engine/arg_utils.py and vllm/config (parallel.py, cache.py,
scheduler.py); VLLM_PP_LAYER_PARTITION of vllm/envs.py. Experts of one engine lie on tp x data parallel devices.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from typing import Any

from shardwise.cost import constants, family_of
from shardwise.errors import InputError, Problems
from shardwise.formats._exported import Exported
from shardwise.formats._launched import HERE, Launched, LaunchFiles, LaunchLine, flags_of_file
from shardwise.formats._served import (
    PLAIN,
    Asked,
    Deployment,
    Words,
    check,
    proposer,
    refuse,
    stage_variable,
    types,
    written,
)
from shardwise.models import load_model
from shardwise.records import replace
from shardwise.serving import InferReport

_CACHES = {name: name for name in ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")} | {"bf16": "bfloat16", "fp16": "float16"}
_OF_FLAG = {flag: name for name, flag in reversed(_CACHES.items())} | {"fp8_ds_mla": "fp8"}
_PROPOSERS = {"draft_model": "draft_model", "eagle": "eagle", "eagle3": "eagle3", "mtp": "mtp", "ngram": "ngram"}
_CAPTURED, _SIZES = "--max-cudagraph-capture-size", "--cudagraph-capture-sizes"
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that --max-lora-rank takes (vllm/config/lora.py, MaxLoRARanks)."""


def _parallel(one: Deployment, problems: Problems) -> Words:
    """Return how the model is split, and over which nodes."""
    p, each = one.plan, one.plan.tp * one.plan.pp
    words: Words = {"--tensor-parallel-size": p.tp}
    if p.pp > 1:
        words["--pipeline-parallel-size"] = p.pp
    if one.together > 1:
        words["--data-parallel-size"] = one.together
    if p.ep > 1:
        words["--enable-expert-parallel"] = True
    if one.nodes > 1 and one.together == 1:
        words |= {"--nnodes": one.nodes, "--node-rank": "$NODE_RANK", "--master-addr": "$MASTER_ADDR"}
    elif one.nodes > 1 and one.node % each:
        rule = f"tp x pp = {each} must divide the {one.node} devices of a node where replicas share experts"
        problems.add("tp", p.tp, rule, f"use tp {one.node}")
    elif one.nodes > 1:
        local = one.node // each
        words |= {"--data-parallel-size-local": local, "--data-parallel-address": "$MASTER_ADDR"}
    return words


def _limits(one: Deployment, problems: Problems) -> Words:
    """Return lengths, steps, memory, the prefix cache and adapters."""
    words: Words = {
        "--max-model-len": one.context,
        "--max-num-seqs": one.sequences,
        "--max-num-batched-tokens": one.step_tokens,
        "--gpu-memory-utilization": one.share,
        "--enable-prefix-caching" if one.prefixes else "--no-enable-prefix-caching": True,
    }
    if rank := one.job.adapter_rank:
        if rank not in _RANKS:
            near = next((r for r in _RANKS if r >= rank), _RANKS[-1])
            problems.add("adapter_rank", rank, "vLLM has room for ranks " + ", ".join(map(str, _RANKS)), f"use {near}")
        words |= {"--enable-lora": True, "--max-loras": one.job.adapters, "--max-lora-rank": rank}
    return words


def words_of(one: Deployment) -> Words:
    """Return the flags of a deployment; raises `InputError` naming every field that vLLM cannot be told."""
    launch_types = check(one, "vllm")
    words = _parallel(one, launch_types) | _limits(one, launch_types) | types(one, "vLLM", _CACHES, launch_types)
    method, draft = proposer(one, "vLLM", _PROPOSERS, launch_types)
    if method:
        speculation = {"method": method, "num_speculative_tokens": one.job.num_speculative_tokens}
        words["--speculative-config"] = json.dumps(speculation | ({"model": draft} if draft else {}))
    if one.report.case.engine.host.eager_decode:
        words["--enforce-eager"] = True
    if "synchronous" in one.report.case.engine.launched_with:
        words["--no-async-scheduling"] = True
    each = 1 + one.job.num_speculative_tokens
    if sizes := one.job.captured_sizes:
        words[_SIZES] = tuple(size * each for size in sorted({*sizes}))
    elif one.job.captured_sequences > 0:
        words[_CAPTURED] = one.job.captured_sequences * each
    if one.job.kv_cache_memory:
        words["--kv-cache-memory-bytes"] = math.ceil(one.job.kv_cache_memory)
    if one.job.language_model_only:
        words["--language-model-only"] = True
    if one.role:
        words["--kv-transfer-config"] = json.dumps({"kv_connector": "NixlConnector", "kv_role": _ROLES[one.role]})
    refuse(launch_types)
    return words


def _kernels(report: InferReport) -> str:
    """Return the assignment that switches on AITER, whose kernels an answer assumes on Instinct (vllm/envs.py)."""
    case = report.case
    family = constants().families.get(family_of(case.cluster.device))
    timed = family.experts.get("vllm", {}).values() if family else ()
    assumed = any("aiter" in kernels for kernels in timed) and not case.engine.operators.library_shares
    return "VLLM_ROCM_USE_AITER=1 " if assumed else ""


def export(report: InferReport, asked: Asked = PLAIN, role: str = "") -> Exported:
    """Return the script that starts a server as an answer assumed it, or one of a pool that has a role."""
    case = report.case
    one = Deployment(report=report, asked=asked, apart=case.model.has_experts or bool(role), role=role)
    words = words_of(one)
    notes = ["--max-num-batched-tokens is the whole batch of prompts in one step"] if not case.step_tokens else []
    start = f"{_kernels(report)}{stage_variable(one, 'VLLM_PP_LAYER_PARTITION')}vllm serve {shlex.quote(one.model)}"
    if one.nodes == 1:
        return written(one, "vllm", start, words, notes)
    # docs/serving/parallelism_scaling.md and data_parallel_deployment.md: one node answers, the others have no server.
    local = words.get("--data-parallel-size-local")
    more = "--headless" + (f" --data-parallel-start-rank $((NODE_RANK * {local}))" if local else "")
    made = written(one, "vllm", start, words, [*notes, f"on every node but the first add {more}"])
    return replace(made, launch=f'{made.launch} $([ "$NODE_RANK" = 0 ] || echo {more})')


_MODULES = r"-m vllm\.entrypoints\.(openai\.api_server|cli\.main serve)|-m dynamo\.vllm"
STARTS = rf"(\bvllm serve|\bvllm/vllm-openai(-rocm)?(?![\w-])(:\S+)?|{_MODULES})"
_WEIGHTS = {"fp8": "fp8", "awq": "int4", "awq_marlin": "int4", "gptq": "int4", "gptq_marlin": "int4"}
_WEIGHTS |= {"bitsandbytes": "nf4", "mxfp4": "mxfp4", "gpt_oss_mxfp4": "mxfp4", "modelopt": "fp8"}
_WEIGHTS |= {"modelopt_fp4": "nvfp4", "compressed-tensors": ""}
_SPECULATES = {"eagle": "eagle", "eagle3": "eagle", "mtp": "mtp", "ngram": "ngram"}
_SPECULATES |= {"draft_model": "draft_model"}


def _speculation(line: LaunchLine) -> dict[str, Any]:
    """Return what guesses tokens, and how many; how many are accepted no launch says."""
    apart: dict[str, Any] = {"method": line.word("--spec-method"), "model": line.word("--spec-model")}
    apart["num_speculative_tokens"] = line.whole("--spec-tokens")
    tree = line.tree("--speculative-config") | {name: value for name, value in apart.items() if value}
    if not tree:
        return {}
    method_word = str(tree.get("method", "draft_model"))
    # vllm/config/speculative.py MTPModelTypes: the heads of one model's family, all of them its own.
    method = "mtp" if method_word.endswith("_mtp") else _SPECULATES.get(method_word, "")
    if not method:
        line.problems.add("--speculative-config", tree.get("method"), "is not modelled", "use one of eagle, mtp, ngram")
    line.assumed.append("acceptance: no launch says it, give --acceptance-rate or --acceptance-length")
    draft = str(tree.get("model", "")) if method in ("eagle", "draft_model") else ""
    depth = str(tree.get("num_speculative_tokens", 1))
    if not re.fullmatch("[1-9][0-9]{0,5}", depth):
        line.problems.add("--speculative-config", depth, "must guess a whole number of tokens", "write for example 3")
        return {}
    return {"speculative_method": method, "num_speculative_tokens": int(depth), "draft_model": draft}


def _text_alone(line: LaunchLine) -> bool:
    """Return whether a line leaves out all towers (vllm/config/multimodal.py, get_limit_per_prompt)."""
    key = "--limit-mm-per-prompt"
    pairs = re.fullmatch(r"\w+=\d+(,\w+=\d+)*", str(line.values.get(key, "")))
    stated = dict(one.split("=") for one in pairs[0].split(",")) if pairs else line.tree(key)
    none = "image" in stated and not any(map(_items_of, stated.values()))
    return line.flag("--language-model-only") or none


def _items_of(stated: Any) -> bool:
    """Return whether a limit of a modality, a number or an object with a count, lets items in."""
    return str(stated.get("count", 1) if isinstance(stated, dict) else stated) != "0"


def _engine(line: LaunchLine, model: str) -> str:
    """Return the engine by what a line switches off, of which one is told.

    Captured graphs, then steps that are scheduled ahead, then the prefix cache.
    """
    off = line.flag("--no-enable-prefix-caching") or line.values.get("--enable-prefix-caching") == "false"
    if line.flag("--enforce-eager") or _captures_nothing(line):
        return line.eager("vllm", "" if off else model)
    if line.flag("--no-async-scheduling") or line.values.get("--async-scheduling") == "false":
        keys = ("--no-async-scheduling", "--async-scheduling")
        return line.with_option("vllm", "synchronous", "" if off else model, keys)
    return "vllm" if off else line.caching("vllm", model)


def _captures_nothing(line: LaunchLine) -> bool:
    """Return whether a line switches captured graphs off otherwise than by --enforce-eager, which does the same.

    Level 0 neither compiles nor captures (v0.33.0 vllm/config/vllm.py, OPTIMIZATION_LEVEL_00), as --enforce-eager does
    (VllmConfig.__post_init__); what is compiled and not captured is launched from Python too.
    """
    level = str(line.values.get("--optimization-level", line.values.get("-O")))
    if level == "0" or "-O0" in line.values:
        line.follow(("--optimization-level", "-O", "-O0"), "engine")
        return True
    stated = str(line.values.get("--compilation-config", ""))
    config = line.tree("--compilation-config") if stated.startswith("{") else {}
    modes = {key: str(value).upper() for key, value in config.items() if value is not None}
    if modes.get("cudagraph_mode") not in ("NONE", "0"):
        return False
    if config.keys() <= {"cudagraph_mode", "mode", "level"}:
        line.follow(("--compilation-config",), "engine")
    if modes.get("mode", modes.get("level")) not in ("NONE", "0"):
        line.assumed.append("cudagraph_mode NONE: compiled kernels are launched one by one as those of --enforce-eager")
    return True


def _captured(line: LaunchLine, each: int) -> dict[str, Any]:
    """Return the steps of decoding that a line captures, of so many tokens a sequence; none leaves them to it.

    v0.33.0 vllm/config/vllm.py, _set_cudagraph_sizes: sizes of tokens that are listed, else all up to the largest that
    is said; vllm/config/compilation.py, adjust_cudagraph_sizes_for_spec_decode: rounded up to whole sequences, but for
    those beyond the largest. What the graphs take, and prompts in them, stay the release's own.
    """
    config = str(line.values.get("--compilation-config", ""))
    tree = line.tree("--compilation-config") if config.startswith("{") else {}
    listed, most = tree.get("cudagraph_capture_sizes"), tree.get("max_cudagraph_capture_size")
    sizes = [one for one in listed if type(one) is int and one > 0] if isinstance(listed, list) else []
    most = most if type(most) is int and most > 0 else 0
    if tree.keys() <= {"cudagraph_mode", "mode", "level", "cudagraph_capture_sizes", "max_cudagraph_capture_size"}:
        line.follow(("--compilation-config",) if sizes else (), "captured_sizes")
        line.follow(("--compilation-config",) if most and not sizes else (), "captured_sequences")
    words = re.sub(r"[\[\],]", " ", line.word(_SIZES)).split()  # a list where --config has it
    if any(not re.fullmatch("[1-9][0-9]{0,8}", word) for word in words):
        line.problems.add(_SIZES, " ".join(words), "must be whole numbers of tokens", "write for example 1 2 4 8")
        words = []
    if sizes := sizes or list(map(int, words)):
        whole = {-(-size // each) for size in sizes}
        return {"captured_sizes": tuple(sorted(n for n in whole if n * each <= max(sizes))) or (1,)}
    tokens = most or line.whole(_CAPTURED)
    return {"captured_sequences": max(tokens // each, 1)} if tokens else {}


def _tokens_of_blocks(line: LaunchLine, model: str) -> int:
    """Return the tokens of the cache where a line says its blocks, which all layers of one kind fill alike, else 0.

    github.com/vllm-project/vllm v0.33.0 vllm/v1/core/kv_cache_planning.py, may_override_num_blocks; a block has 16
    tokens (vllm/config/cache.py, DEFAULT_BLOCK_SIZE). Latents are in larger ones, by their kernel.
    """
    blocks, each = line.whole("--num-gpu-blocks-override"), line.whole("--block-size")
    try:
        known = load_model(model) if blocks and model else None
    except InputError:
        known = None
    if known is None or known.has_windows or line.caching("vllm", model) != "vllm":
        return 0
    if not each and any(mixer.latent for block in known.kinds for mixer in block.mixers):
        return 0
    line.follow(("--num-gpu-blocks-override", "--block-size"), "max_total_tokens")
    return blocks * (each or 16)


def read_words(words: Sequence[str], source: str, files: LaunchFiles = HERE) -> Launched:
    """Return the server of a command line, by the words behind `vllm serve`.

    >>> one = read_words(["deepseek-ai/DeepSeek-V3", "-tp", "1", "-dp", "8", "-ep", "--dtype", "auto"], "run.sh")
    >>> one.num_devices, one.values["ep"], one.values["dp"]
    (8, 8, 8)
    """
    line = LaunchLine([*flags_of_file(words, files), *words], "vllm.toml", source)
    model = line.model("--model")
    tp, pp, dp = (line.whole(f"--{axis}-parallel-size") or 1 for axis in ("tensor", "pipeline", "data"))
    if (split := line.whole("--prefill-context-parallel-size")) > 1:
        rule = "multiplies the devices by ranks of the context, which servers do not have here"
        line.problems.add("--prefill-context-parallel-size", split, rule, "leave it out")
    values: dict[str, Any] = {
        "model": model,
        "engine": _engine(line, model),
        "tp": tp,
        "pp": pp,
        "dp": dp if dp > 1 else 0,
    }
    if model and line.experts(model):
        whole = line.flag("--enable-expert-parallel")
        values |= {"ep": tp * dp if whole else 1, "etp": 1 if whole else tp * dp}
    weights = line.named("--quantization", _WEIGHTS)
    wide = line.wide(model)
    values |= {
        "weights": weights or wide,
        "kv_cache": line.named("--kv-cache-dtype", _OF_FLAG),
        "memory_fraction": line.share("--gpu-memory-utilization"),
        "kv_cache_memory": float(line.whole("--kv-cache-memory-bytes")),
        "max_total_tokens": _tokens_of_blocks(line, model),
        "max_sequences": line.whole("--max-num-seqs"),
        "max_batched_tokens": line.whole("--max-num-batched-tokens"),
        "max_context": line.auto("--max-model-len"),
        "language_model_only": _text_alone(line),
    }
    if line.flag("--enable-lora"):
        values |= {"adapter_rank": line.whole("--max-lora-rank") or 16, "adapters": line.whole("--max-loras") or 1}
    role = "prefill" if line.flag("--is-prefill-worker") else "decode" if line.flag("--is-decode-worker") else ""
    sends = {theirs: ours for ours, theirs in _ROLES.items()}
    role = (
        line.word("--disaggregation-mode")
        or role
        or sends.get(str(line.tree("--kv-transfer-config").get("kv_role")), "")
    )
    values |= _speculation(line)
    captured = _captured(line, 1 + values.get("num_speculative_tokens", 0))
    if "eager" not in values["engine"]:
        values |= captured
    return line.launched(values, tp * pp * dp, role)
