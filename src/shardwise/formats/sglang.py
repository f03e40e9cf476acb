"""The launch line of an SGLang server: `python -m sglang.launch_server --model-path MODEL --flags`.

Sources: github.com/sgl-project/sglang 0.5.23 python/sglang/srt/server_args.py and srt/arg_groups/fields;
SGLANG_PP_LAYER_PARTITION of srt/distributed/utils.py. Its tp counts all devices of a stage: with attention data
parallelism the replicas of attention lie inside, and limits of steps and requests are those of all of them together.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from shardwise.errors import Problems
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
from shardwise.serving import InferReport, decode_rows

_CACHES = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "nvfp4": "nvfp4", "bf16": "bf16"}
_OF_FLAG = {flag: name for name, flag in reversed(_CACHES.items())} | {"bfloat16": "bf16"}
_CAPTURED, _UNCAPTURED = "--cuda-graph-max-bs-decode", "--disable-decode-cuda-graph"
_SIZES, _UNPADDED = "--cuda-graph-bs-decode", "--disable-cuda-graph-padding"
# Tokens of a batch of prompts that it takes without being told (--max-prefill-tokens), and its own chunk on a device of
# 60 to 160 GiB.
_USUAL_PREFILL, _USUAL_CHUNK = 16384, 8192


def _parallel(one: Deployment) -> Words:
    """Return how the model is split, and over which nodes."""
    p = one.plan
    ranks = p.tp * (p.dp if one.spread else 1)
    words: Words = {"--tp-size": ranks}
    if p.pp > 1:
        words["--pp-size"] = p.pp
    if one.together > 1:
        words["--dp-size"] = one.together
    if one.spread:
        words |= {"--enable-dp-attention": True, "--enable-dp-lm-head": True}
        if p.tp == 1:
            words["--moe-dense-tp-size"] = 1
    if p.ep > 1:
        words["--ep-size"] = p.ep
    if one.nodes > 1:
        address = "$MASTER_ADDR:20000"
        words |= {"--nnodes": one.nodes, "--node-rank": "$NODE_RANK", "--dist-init-addr": address}
    return words


def _limits(one: Deployment) -> Words:
    """Return lengths, steps, memory, the prefix cache and adapters."""
    groups = one.plan.dp if one.spread else 1
    words: Words = {
        "--context-length": one.context,
        # Which is captured too: fewer would be filled up to no size that the answer has.
        "--max-running-requests": max(one.sequences, 0 if one.job.max_sequences else decode_rows(one.report.case))
        * groups,
        "--chunked-prefill-size": one.step_tokens * groups,
        "--mem-fraction-static": one.share,
    }
    if one.job.max_total_tokens:
        words["--max-total-tokens"] = one.job.max_total_tokens
    if one.step_tokens > _USUAL_PREFILL:
        words["--max-prefill-tokens"] = one.step_tokens
    if not one.prefixes:
        words["--disable-radix-cache"] = True
    if rank := one.job.adapter_rank:
        words |= {"--enable-lora": True, "--max-loras-per-batch": one.job.adapters, "--max-lora-rank": rank}
        words["--lora-target-modules"] = "all"
    return words


def words_of(one: Deployment) -> Words:
    """Return the flags of a deployment; raises `InputError` naming every field that SGLang cannot be told."""
    launch_types = check(one, "sglang")
    words = _parallel(one) | _limits(one) | types(one, "SGLang", _CACHES, launch_types) | _proposed(one, launch_types)
    if one.report.case.engine.host.eager_decode:
        words["--disable-cuda-graph"] = True
    elif sizes := one.job.captured_sizes:
        words[_SIZES] = tuple(sorted({*sizes}))
    elif one.job.captured_sequences > 0:
        words[_CAPTURED] = one.job.captured_sequences
    elif one.job.captured_sequences == 0:
        words[_UNCAPTURED] = True
    if one.job.disable_cuda_graph_padding:
        words[_UNPADDED] = True
    if "synchronous" in one.report.case.engine.launched_with:
        words["--disable-overlap-schedule"] = True
    if "flashinfer_gemm" in one.report.case.engine.launched_with:
        words[_BLOCK_GEMMS] = _FLASHINFER
    if one.role:
        words["--disaggregation-mode"] = one.role
    refuse(launch_types)
    return words


def _proposed(one: Deployment, problems: Problems) -> Words:
    """Return what proposes tokens: a chain of them, as the answer has it, and the token that a step makes anyway."""
    method, draft = proposer(one, "SGLang", _PROPOSERS, problems)
    if not method:
        return {}
    depth = one.job.num_speculative_tokens
    chain: Words = {"--speculative-num-steps": depth, "--speculative-eagle-topk": 1}
    if method == "NGRAM":
        chain = {"--speculative-ngram-max-bfs-breadth": 1}
    words: Words = {"--speculative-algorithm": method, **chain, "--speculative-num-draft-tokens": depth + 1}
    return words | ({"--speculative-draft-model-path": draft} if draft else {})


_PROPOSERS = {"draft_model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN", "ngram": "NGRAM"}


def export(report: InferReport, asked: Asked = PLAIN, role: str = "") -> Exported:
    """Return the script that starts a server as an answer assumed it, or one of a pool that has a role."""
    one = Deployment(report=report, asked=asked, apart=bool(role), role=role)
    words = words_of(one)
    notes = [] if report.case.step_tokens else ["--chunked-prefill-size is the whole batch of prompts in one step"]
    variable = stage_variable(one, "SGLANG_PP_LAYER_PARTITION")
    start = f"{variable}python -m sglang.launch_server --model-path {shlex.quote(one.model)}"
    return written(one, "sglang", start, words, notes)


_BLOCK_GEMMS, _FLASHINFER = "--fp8-gemm-backend", "flashinfer_trtllm"
STARTS = r"(-m (sglang\.launch_server|dynamo\.sglang(\.[a-z_]+)*)|\bsglang serve)"
_WEIGHTS = {"fp8": "fp8", "w8a8_fp8": "fp8", "w8a8_int8": "int8-w8a8", "awq": "int4", "awq_marlin": "int4"}
_WEIGHTS |= {"gptq": "int4", "gptq_marlin": "int4", "mxfp4": "mxfp4", "modelopt": "fp8", "modelopt_fp4": "nvfp4"}
_WEIGHTS |= {"bitsandbytes": "nf4", "compressed-tensors": ""}
_SPECULATES = {"EAGLE": "eagle", "EAGLE3": "eagle", "NEXTN": "mtp", "MTP": "mtp", "NGRAM": "ngram"}
_SPECULATES |= {"STANDALONE": "draft_model"}


def _speculation(line: LaunchLine) -> dict[str, Any]:
    """Return what guesses tokens, and how many; how many are accepted no launch says."""
    method = line.named("--speculative-algorithm", _SPECULATES)
    if not method:
        return {}
    line.assumed.append("acceptance: no launch says it, give --acceptance-rate or --acceptance-length")
    depth, branches = _depth(line, method)
    if branches > 1:
        line.assumed.append("guesses of one branch: a tree of them is not modelled")
    draft = line.word("--speculative-draft-model-path") if method in ("eagle", "draft_model") else ""
    return {"speculative_method": method, "num_speculative_tokens": depth, "draft_model": draft}


def _depth(line: LaunchLine, method: str) -> tuple[int, int]:
    """Return how many tokens are guessed one after another, and how many at most beside each other."""
    rows, steps = line.whole("--speculative-num-draft-tokens"), line.whole("--speculative-num-steps")
    # sglang 0.5.23 kernels/jit/csrc/ngram_corpus/param.h get_draft_token_num: one row is the token before the guesses,
    # whatever the steps; srt/arg_groups/speculative_hook.py _handle_ngram, _auto_choose_speculative_params: if silent.
    if method == "ngram":
        defaults, depth = rows, max((rows or 12) - 1, 1)
        breadth = line.whole("--speculative-ngram-max-bfs-breadth") or 10
    else:
        tree = method == "eagle" and re.search(r"llama-?[23]", str(line.values.get("--model-path", "")).lower())
        defaults, depth = steps or rows, steps or max(rows - 1, 0) or (5 if tree else 3)
        breadth = line.whole("--speculative-eagle-topk") or (4 if tree and not defaults else 1)
    if not defaults:
        line.assumed.append(f"num_speculative_tokens {depth}: SGLang's own choice where a launch says none")
    return depth, breadth


def _engine(line: LaunchLine, model: str) -> str:
    """Return the engine by what a line switches off, of which one is told.

    Captured graphs, then steps that are scheduled ahead, then kernels of 8-bit blocks, then the prefix cache.
    """
    off = line.flag("--disable-radix-cache")
    if line.flag("--disable-cuda-graph") or (_no_graphs(line, _DECODING) and _no_graphs(line, _PROMPTS)):
        return line.eager("sglang", "" if off else model)
    if line.flag("--disable-overlap-schedule"):
        return line.with_option("sglang", "synchronous", "" if off else model, ("--disable-overlap-schedule",))
    if line.word(_BLOCK_GEMMS) == _FLASHINFER:
        return line.with_option("sglang", "flashinfer_gemm", "" if off else model, (_BLOCK_GEMMS,))
    return "sglang" if off else line.caching("sglang", model)


_DECODING = (_UNCAPTURED, "--cuda-graph-backend-decode")
_PROMPTS = ("--disable-prefill-cuda-graph", "--cuda-graph-backend-prefill")


def _no_graphs(line: LaunchLine, words: tuple[str, str]) -> bool:
    """Return whether a line captures nothing of a phase (0.5.23 srt/arg_groups/cuda_graph_hook.py).

    A backend that is named wins over a switch.
    """
    switch, backend = words
    off = line.word(backend) == "disabled" if line.word(backend) else line.flag(switch)
    if off:
        line.follow(words, "engine")
    return off


def _captured(line: LaunchLine) -> dict[str, Any]:
    """Return the steps of decoding that a line captures; none leaves them to the engine.

    0.5.23 srt/arg_groups/cuda_graph_hook.py: sizes that are listed, else the engine's own up to the largest that is
    said, every one of them where none is filled up.
    """
    if _no_graphs(line, _DECODING):
        return {"captured_sequences": 0}
    words = re.sub(r"[\[\],]", " ", line.word(_SIZES)).split()
    if any(not re.fullmatch("[1-9][0-9]{0,8}", word) for word in words):
        line.problems.add(_SIZES, " ".join(words), "must be whole numbers of sequences", "write for example 1 2 4 8")
        words = []
    captured: dict[str, Any] = {"disable_cuda_graph_padding": line.flag(_UNPADDED)}
    if words:
        return captured | {"captured_sizes": tuple(sorted({int(word) for word in words}))}
    return captured | ({"captured_sequences": most} if (most := line.whole(_CAPTURED)) else {})


def _step_tokens(line: LaunchLine, groups: int) -> int:
    """Return the tokens of a step of a group of attention, 0 for the engine's own.

    A step has a chunk at most, which groups share, and a batch of prompts at most, which each has to itself
    (sglang 0.5.23 srt/managers/schedule_policy.py, rem_chunk_tokens and rem_input_tokens; arg_groups/parallel_hook.py).
    """
    batch = line.whole("--max-prefill-tokens")
    if line.word("--chunked-prefill-size") == "-1":
        whole = batch or _USUAL_PREFILL
        line.assumed.append(f"prompts of more than {whole} tokens are cut, which SGLang runs whole without chunks")
        return whole
    chunk = line.whole("--chunked-prefill-size") // groups
    if chunk and batch:
        return min(chunk, batch)
    return chunk or (batch if batch < _USUAL_CHUNK else 0)


def _spans_experts(line: LaunchLine) -> bool:
    """Return whether tokens are sent to experts, which then lie on all ranks of tp whatever --ep-size says.

    sglang 0.5.23 srt/arg_groups/overrides.py, _a2a_ep_size: every backend of all-to-alls but none. 0.4 had a flag for
    DeepEP and one for experts on all ranks (srt/server_args.py, enable_deepep_moe and enable_ep_moe).
    """
    backend = line.word("--moe-a2a-backend")
    older = [line.flag(name) for name in ("--enable-deepep-moe", "--enable-ep-moe")]
    return backend not in ("", "none") or any(older)


def read_words(words: Sequence[str], source: str, files: LaunchFiles = HERE) -> Launched:
    """Return the server of a command line, by the words behind `-m sglang.launch_server`.

    >>> words = "--model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 --enable-dp-attention --ep 8".split()
    >>> one = read_words([*words, "--max-running-requests", "512"], "run.sh")
    >>> one.num_devices, one.values["dp"], one.values["ep"], one.values["max_sequences"], "tp" in one.values
    (8, 8, 8, 64, True)
    """
    line = LaunchLine([*flags_of_file(words, files), *words], "sglang.toml", source)
    model = line.model("--model-path")
    ranks, pp, dp, ep = (line.whole(f"--{axis}-size") or 1 for axis in ("tp", "pp", "dp", "ep"))
    # srt/arg_groups/fields/parallel.py: with a flag of their own, groups of attention are no replicas of the model.
    inside = line.flag("--enable-dp-attention")
    groups, copies = (dp, 1) if inside else (line.whole("--attn-dp-size") or 1, dp)
    tp, dp = ranks // groups, groups * copies
    if ranks % groups:
        rule = f"must divide tp {ranks}, whose ranks are the groups of attention"
        line.problems.add("--dp-size" if inside else "--attn-dp-size", groups, rule, f"use {ranks}")
    values: dict[str, Any] = {
        "model": model,
        "engine": _engine(line, model),
        "tp": tp,
        "pp": pp,
        "dp": dp if dp > 1 else 0,
    }
    if model and line.experts(model):
        ep = ranks if _spans_experts(line) else ep
        values |= {"ep": ep, "etp": max(ranks // ep, 1)}
    values |= {
        "weights": line.named("--quantization", _WEIGHTS) or line.wide(model),
        "kv_cache": line.named("--kv-cache-dtype", _OF_FLAG),
        "memory_fraction": line.share("--mem-fraction-static"),
        "max_total_tokens": line.whole("--max-total-tokens"),
        "max_sequences": line.whole("--max-running-requests") // groups,
        "max_batched_tokens": _step_tokens(line, groups),
        "max_context": line.whole("--context-length"),
    }
    values |= _captured(line)
    if line.flag("--enable-lora"):
        values |= {"adapter_rank": line.whole("--max-lora-rank"), "adapters": line.whole("--max-loras-per-batch") or 8}
    role = line.word("--disaggregation-mode")
    return line.launched(values | _speculation(line), ranks * pp * copies, role)
