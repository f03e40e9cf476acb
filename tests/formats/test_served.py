"""Launch lines of serving engines: what an answer assumed, in the engine's words, or what it cannot be told."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import run
from shardwise.errors import InputError
from shardwise.formats import _yaml
from shardwise.formats._imported import Keys, table
from shardwise.formats._launched import read_launch
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Plan, Serving
from shardwise.serving import ServingOptions, infer

BATCH = ("--batch", "64", "--input-tokens", "2000", "--output-tokens", "300")
LLAMA = ("llama-3.1-70b", "--on", "8xh100-sxm-80gb", "--tp", "4", *BATCH)


def line(system: str, *words: str) -> list[str]:
    """Return the words of the launch line that is written."""
    done = run("export", system, *words, "--json")
    assert done.status in (0, 1), done.err
    text: str = done.tree["files"][f"{system}.sh"]
    code = "\n".join(one for one in text.splitlines() if not one.startswith("#"))
    return code.replace("\\\n", " ").split()


CASES = (
    ("vllm", (*LLAMA, "--max-batched-tokens", "8192", "--weights", "fp8", "--kv-cache", "fp8"),
     "vllm serve meta-llama/Llama-3.1-70B --tensor-parallel-size 4 --data-parallel-size 2 --max-model-len 2300"
     " --max-num-seqs 1024 --max-num-batched-tokens 8192 --gpu-memory-utilization 0.92 --no-enable-prefix-caching"
     " --quantization fp8 --kv-cache-dtype fp8"),
    ("sglang", (*LLAMA, "--max-batched-tokens", "8192", "--prefix-tokens", "500", "--memory-fraction", "0.85"),
     "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-70B --tp-size 4 --dp-size 2"
     " --context-length 2300 --max-running-requests 64 --chunked-prefill-size 8192 --mem-fraction-static 0.85"),
    ("vllm", ("llama-3.1-8b", "--on", "2xh100", "--tp", "2", "--rate", "1/s", "--weights", "fp16"),
     "vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 2 --max-model-len 640 --max-num-seqs 1024"
     " --max-num-batched-tokens 8192 --gpu-memory-utilization 0.92 --no-enable-prefix-caching --dtype float16"),
    ("vllm", ("llama-3.1-8b", "--on", "1xh100", "--kv-cache-memory", "20GiB"),
     "vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 1 --max-model-len 544 --max-num-seqs 1024"
     " --max-num-batched-tokens 8192 --gpu-memory-utilization 0.92 --no-enable-prefix-caching"
     " --kv-cache-memory-bytes 21474836480"),
    ("vllm", ("gemma-3-4b", "--on", "1xh100", "--language-model-only"),
     "vllm serve google/gemma-3-4b-pt --tensor-parallel-size 1 --max-model-len 544 --max-num-seqs 1024"
     " --max-num-batched-tokens 8192 --gpu-memory-utilization 0.92 --no-enable-prefix-caching --language-model-only"),
)  # fmt: skip


@pytest.mark.parametrize(("system", "words", "expected"), CASES)
def test_a_launch_line_says_what_the_answer_assumed(system: str, words: tuple[str, ...], expected: str) -> None:
    """Degrees, lengths, limits of a step, the share of the memory, types and the prefix cache, and nothing else."""
    assert line(system, *words) == [*expected.split(), '"$@"']


READ_AS = (
    ("vllm==0.11.0", "vllm", "vllm.sh", "vllm-0.11"),
    ("vllm-prefix-cache", "dynamo", "", "vllm-prefix-cache"),
    ("sglang-0.5.11", "sglang", "sglang.sh", "sglang-0.5.11"),
    ("vllm-eager", "vllm", "vllm.sh", ""),
    ("tensorrt-llm", "trtllm", "trtllm.sh", ""),
)


@pytest.mark.parametrize(("engine", "target", "file", "named"), READ_AS)
def test_a_launch_that_is_read_as_another_engine_says_so(engine: str, target: str, file: str, named: str) -> None:
    """No flag states a release: the launch of one says which --engine reads it as it was computed."""
    tree = run("export", target, "qwen3-8b", "--on", "1xh100", "--engine", engine, "--json").tree
    said = [note for note in tree["notes"] if "unless --engine" in note]
    assert len(said) == bool(named) and all(f"--engine {named} is given" in note for note in said)
    assert not file or all(f"# {note}\n" in tree["files"][file] for note in said)


def test_attention_data_parallelism_lies_within_the_tp_of_sglang_and_beside_that_of_vllm() -> None:
    """SGLang's limits are those of all replicas of attention together, vLLM's of each."""
    words = ("deepseek-v3", "--on", "8xh200", "--dp", "8", "--ep", "8", *BATCH, "--max-batched-tokens", "4096")
    theirs = line("sglang", *words)
    for pair in (
        "--tp-size 8 --dp-size 8",
        "--ep-size 8",
        "--max-running-requests 512",
        "--chunked-prefill-size 32768",
    ):
        assert pair in " ".join(theirs)
    assert "--enable-dp-attention" in theirs
    theirs = line("vllm", *words)
    for pair in ("--tensor-parallel-size 1 --data-parallel-size 8", "--enable-expert-parallel", "--max-num-seqs 1024"):
        assert pair in " ".join(theirs)
    assert theirs[theirs.index("--max-num-batched-tokens") + 1] == "4096"


def test_what_a_load_says_of_prefixes_is_launched(tmp_path: Path) -> None:
    """A prefix of one class, and blocks that a trace asks twice, need the prefix cache, blocks of one do not."""
    classes, again, once = tmp_path / "classes.toml", tmp_path / "again.jsonl", tmp_path / "once.jsonl"
    rows = ('[[class]]\nname = "a"\nshare = 0.5\ninput_tokens = 900\noutput_tokens = 9\nprefix_tokens = 400\n',
            '[[class]]\nname = "b"\nshare = 0.5\ninput_tokens = 90\noutput_tokens = 9\n')  # fmt: skip
    classes.write_text("".join(rows), encoding="utf-8")
    for file, hashes in ((again, [[1, 2], [1, 3]]), (once, [[1, 2], [3, 4]])):
        requests = (
            {"timestamp": i, "input_length": 900, "output_length": 9, "hash_ids": ids} for i, ids in enumerate(hashes)
        )
        file.write_text("".join(json.dumps(row) + "\n" for row in requests), encoding="utf-8")
    one = ("llama-3.1-8b", "--on", "1xh100")
    asked = (("--rate", "3/s", "--classes", str(classes)), ("--trace", str(again)), ("--trace", str(once)))
    found = ["--enable-prefix-caching" in line("vllm", *one, *words) for words in asked]
    assert found == [True, True, False]
    assert "--disable-radix-cache" not in line("sglang", *one, *asked[0])


def test_replicas_with_experts_of_their_own_are_launched_apart_for_vllm() -> None:
    """Under one launch they would share them, which is another plan; a note says how many servers there are."""
    done = run("export", "vllm", "mixtral-8x7b", "--on", "8xh100", "--tp", "4", "--batch", "8", "--json")
    assert "--data-parallel-size" not in done.tree["files"]["vllm.sh"]
    assert any("2 such servers" in note for note in done.tree["notes"])


def test_nodes_find_each_other() -> None:
    """An engine on several nodes says how many there are; one of unequal stages says its layers."""
    words = ("llama-3.1-405b", "--on", "2x8xh100", "--tp", "8", "--pp", "2", "--stage-layers", "64,62", "--batch", "4")
    theirs = line("vllm", *words)
    assert theirs[0] == "VLLM_PP_LAYER_PARTITION=64,62"
    assert theirs[theirs.index("--nnodes") + 1] == "2"
    assert "--dist-init-addr" in line("sglang", *words)
    wide = run("export", "vllm", "deepseek-v3", "--on", "2x8xh200", "--dp", "16", "--ep", "16", "--json").tree
    assert "--data-parallel-size-local 8" in wide["files"]["vllm.sh"]


def test_options_of_tensorrt_llm_are_keys_of_its_release() -> None:
    """Everything stands in the YAML, attention data parallelism with single devices included."""
    words = ("mixtral-8x7b", "--on", "2x8xh200", "--dp", "16", "--ep", "8", "--etp", "2", *BATCH, "--kv-cache", "fp8")
    more = ("--max-batched-tokens", "4096", "--adapter-rank", "16")
    files = run("export", "trtllm", *words, *more, "--json").tree["files"]
    assert "srun --nodes 2 --ntasks-per-node 8" in files["trtllm.sh"]
    tree = _yaml.parse(files["trtllm.yaml"], "trtllm.yaml")
    assert tree["enable_attention_dp"] is True
    sizes = ("tensor_parallel_size", "moe_expert_parallel_size", "moe_tensor_parallel_size")
    assert [tree[name] for name in sizes] == [16, 8, 2]
    assert tree["kv_cache_config"] == {"free_gpu_memory_fraction": 0.9, "enable_block_reuse": False, "dtype": "fp8"}
    keys = Keys(tree, "trtllm.toml")
    assert {reading.argument for reading in keys.understood()} == keys.values.keys()


REFUSED = (
    ("sglang", (*LLAMA, "--kv-cache-memory", "20GiB"), ["kv_cache_memory"]),
    ("vllm", (*LLAMA, "--max-total-tokens", "65536"), ["max_total_tokens"]),
    ("sglang", ("gemma-3-4b", "--on", "1xh100", "--max-sequences", "64", "--language-model-only"),
     ["language_model_only"]),
    ("trtllm", (*LLAMA, "--weights", "fp8"), ["weights"]),
    ("trtllm", (*LLAMA, "--kv-cache", "int8", "--weights", "fp16"), ["kv_cache", "weights"]),
    ("trtllm", ("deepseek-v3", "--on", "16xh200", "--tp", "2", "--dp", "8", "--ep", "16", "--batch", "4"), ["tp"]),
    ("vllm", (*LLAMA, "--engine", "sglang"), ["engine"]),
    ("vllm", (*LLAMA, "--order", "dp,tp,cp,pp"), ["order"]),
    ("vllm", (*LLAMA, "--weights", "int4"), ["weights"]),
    ("sglang", ("deepseek-v3", "--on", "8xh200", "--tp", "8", "--weights", "bf16", "--batch", "4"), ["weights"]),
    ("vllm", (*LLAMA, "--kv-cache", "int8"), ["kv_cache"]),
    ("vllm", (*LLAMA, "--adapter-rank", "20"), ["adapter_rank"]),
    ("sglang", (*LLAMA, "--no-use-kv-cache", "--misc-memory", "1GB"), ["use_kv_cache"]),
    ("vllm", ("mixtral-8x7b", "--on", "8xh100", "--tp", "8", "--ep", "2", "--etp", "4", "--batch", "4"), ["ep"]),
    ("sglang", ("llama-2-7b", "--on", "1xh100", "--input-tokens", "5000"), ["input_tokens"]),
    ("vllm", ("bert-base", "--on", "1xh100"), ["model"]),
    ("vllm", (*LLAMA, "--max-batched-tokens", "32"), ["max_batched_tokens"]),
    ("trtllm", (*LLAMA, "--max-batched-tokens", "32"), ["max_batched_tokens"]),
    ("sglang", ("roberta-base", "--on", "1xh100", "--rate", "1/s", "--output-tokens", "5"), ["model"]),
)  # fmt: skip


@pytest.mark.parametrize("system", ["sglang", "llamacpp"])
def test_chunks_of_some_engines_may_be_smaller_than_their_batch(system: str) -> None:
    """Where a step of decoding is not bounded by the tokens of a chunk, less than one each is said as it is."""
    asked = ("llama-3.1-8b", "--on", "1xh100", "--batch", "64", "--input-tokens", "500", "--output-tokens", "50")
    weights = ("--weights", "q4_k_m") if system == "llamacpp" else ()
    done = run("export", system, *asked, *weights, "--max-batched-tokens", "32", "--json")
    assert done.status == 0, done.err
    assert "-size 32 " in json.dumps(done.tree["files"])


@pytest.mark.parametrize(("tokens", "batch"), [("512", False), ("4096", True)])
def test_a_ubatch_longer_than_a_logical_batch_is_said_with_it(tokens: str, batch: bool) -> None:
    """llama.cpp runs no ubatch longer than n_batch, 2,048 tokens unless `--batch-size` says more."""
    asked = ("llama-3.1-8b", "--on", "1xh100", "--weights", "q4_k_m", "--input-tokens", "8000", "--output-tokens", "50")
    done = run("export", "llamacpp", *asked, "--max-batched-tokens", tokens, "--json")
    script = json.dumps(done.tree["files"])
    assert f"--ubatch-size {tokens}" in script
    assert (f" --batch-size {tokens}" in script) == batch


@pytest.mark.parametrize(("system", "words", "named"), REFUSED)
def test_what_an_engine_cannot_be_told_is_named(system: str, words: tuple[str, ...], named: list[str]) -> None:
    """Exit status 2, with the field, and what to do instead."""
    done = run("export", system, *words, "--json")
    assert (done.status, done.fields) == (2, named)


@pytest.mark.parametrize("system", ["vllm", "sglang"])
def test_every_flag_that_is_written_is_one_of_the_release(system: str) -> None:
    """The table of the release has each of them, those of nodes, experts and adapters included."""
    every = [
        (*LLAMA, "--adapter-rank", "16", "--weights", "fp8", "--kv-cache", "fp8", "--max-batched-tokens", "20000"),
        ("deepseek-v3", "--on", "2x8xh200", "--dp", "16", "--ep", "16", "--prefix-tokens", "100"),
        ("llama-3.1-405b", "--on", "2x8xh100", "--tp", "8", "--pp", "2", "--batch", "4", "--weights", "fp16"),
    ]
    known = table(f"{system}.toml")["read"].keys()
    for words in every:
        assert {word for word in line(system, *words) if word.startswith("--")} <= known


def test_a_folder_named_as_an_engine_is_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first word that names a target says what is exported."""
    words = ("export", "megatron", "gpt2", "--on", "8xh100", "--global-batch", "64", "--seq-len", "512", "--json")
    monkeypatch.chdir(tmp_path)
    assert run(*words, "--write", "sglang").tree["system"] == "Megatron-LM"


def words_of(text: str) -> dict[str, str]:
    """Return the flags of a launch line with their values."""
    words = [w for line in text.splitlines() if not line.startswith("#") for w in line.rstrip("\\").split()]
    return {a: b for a, b in zip(words, [*words[1:], ""], strict=True) if a.startswith("--")}


def devices_and_requests(system: str, files: Mapping[str, str]) -> tuple[int, int]:
    """Return the devices that a launch takes and the sequences of a replica, as its engine reads its words."""
    said = words_of(files[f"{system}.sh"])
    if system == "trtllm":
        tree = _yaml.parse(files["trtllm.yaml"], "trtllm.yaml")
        return tree["tensor_parallel_size"] * tree["pipeline_parallel_size"], tree["max_batch_size"]
    if system == "vllm":
        axes = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
        return prod(int(said.get(axis, 1)) for axis in axes), int(said["--max-num-seqs"])
    within = "--enable-dp-attention" in said
    stage, replicas = int(said["--tp-size"]) * int(said.get("--pp-size", 1)), int(said.get("--dp-size", 1))
    requests = int(said["--max-running-requests"])
    return (stage, requests // replicas) if within else (stage * replicas, requests)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    system=st.sampled_from(["vllm", "sglang", "trtllm"]),
    model=st.sampled_from(["llama-3.1-8b", "mixtral-8x7b"]),
    sizes=st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 5),
    batch=st.integers(1, 300),
)
def test_a_launch_takes_the_devices_of_its_plan(
    system: str, model: str, sizes: tuple[int, int, int, int, int], batch: int
) -> None:
    """Servers times the devices of each are those of the plan, replicas hold batches, or a field is refused."""
    tp, pp, dp, ep, etp = sizes
    cluster = Cluster.parse(f"{tp * pp * dp}xh100-sxm-80gb")
    engine = {"trtllm": "tensorrt-llm"}.get(system, system)
    job = Serving(batch=batch, input_tokens=64, output_tokens=8)
    try:
        plan = Plan(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp)
        report = infer(load_model(model), cluster, plan, job, ServingOptions(engine=engine))
        found = import_module(f"shardwise.formats.{system}").export(report)
    except InputError as error:
        assert {problem.field for problem in error.problems} <= {"tp", "pp", "dp", "ep", "etp"}
        return
    devices, requests = devices_and_requests(system, found.files)
    servers = [int(note.split()[0]) for note in found.notes if "such servers" in note]
    assert devices * prod(servers) == tp * pp * dp
    # TensorRT-LLM is told those of a step, of which a pipeline has as many at once as it has stages.
    steps = pp if system == "trtllm" else 1
    assert requests == max(batch, -(-report.case.profiled.sequences // steps))


@pytest.mark.parametrize(
    ("system", "drafts"),
    [*((name, drafts) for name in ("vllm", "sglang", "trtllm") for drafts in (False, True)), ("transformers", False)],
)
def test_the_name_of_a_model_stays_a_name_in_a_script(tmp_path: Path, system: str, drafts: bool) -> None:
    """A folder of any name, of a model or of its draft, starts no program as the shell reads the script."""
    folder = tmp_path / "x'; touch made $(touch made)\ntouch made #"
    folder.mkdir()
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128256}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "intermediate_size": 512, **sizes}))
    words = ["--speculative-method", "draft_model", "--num-speculative-tokens", "3", "--acceptance-rate", "0.7"]
    words = ["llama-3.1-8b", *words, "--draft-model", str(folder)] if drafts else [str(folder)]
    asked = ["--sharding", "fsdp"] if system == "transformers" else ["--batch", "8"]
    done = run("export", system, *words, *asked, "--on", "1xh100", "--json")
    stubs = "".join(f"{name}() {{ :; }}\n" for name in ("vllm", "python", "trtllm-serve", "accelerate"))
    script = stubs + next(text for name, text in done.tree["files"].items() if name.endswith(".sh"))
    subprocess.run(["bash", "-c", script, "run.sh"], cwd=tmp_path, check=True, capture_output=True)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_what_a_case_does_not_set_is_not_written() -> None:
    """One node names no devices a node, and axolotl's feed-forward in one tile no tiles; read back, dp is open."""
    served = run("export", "trtllm", "llama-3.1-8b", "--on", "8xh100-sxm-80gb", "--tp", "4", "--json").tree["files"]
    assert "gpus_per_node" not in served["trtllm.yaml"]
    tuned = ("--sharding", "fsdp", "--adapter", "lora", "--micro-batch", "1")
    done = run("export", "axolotl", "llama-3.1-8b", "--on", "8xh100-sxm-80gb", *tuned, "--json")
    assert all("tiled_mlp" not in text for text in done.tree["files"].values())
    assert read_launch("trtllm-serve meta-llama/Llama-3.1-8B --tp_size 2", "run.sh", {}).values.get("dp", 0) == 0


# Fields of tensorrt_llm/llmapi/llm_args.py and lora_helper.py at 1.2, whose StrictBaseModel forbids any other: its
# wheel does not run without a GPU, so the source was read. What proposes tokens has fields of its own by its type.
_FIELDS = {
    "": "tensor_parallel_size pipeline_parallel_size gpus_per_node moe_tensor_parallel_size moe_expert_parallel_size "
    "enable_attention_dp pp_partition lora_config kv_cache_config enable_chunked_prefill max_batch_size max_num_tokens "
    "max_seq_len cuda_graph_config speculative_config moe_config",
    "moe_config": "backend max_num_tokens load_balancer disable_finalize_fusion use_low_precision_moe_combine",
    "kv_cache_config": "max_attention_window enable_block_reuse max_tokens free_gpu_memory_fraction dtype "
    "tokens_per_block",
    "cuda_graph_config": "batch_sizes max_batch_size enable_padding",
    "lora_config": "max_lora_rank max_loras lora_target_modules",
}
_DRAFTS = dict.fromkeys(("Draft_Target", "Eagle", "Eagle3"), "max_draft_len speculative_model")
_DRAFTS |= {"MTP": "num_nextn_predict_layers", "NGram": "max_draft_len max_matching_ngram_size"}
_TRTLLM = {
    "adapters": "llama-3.1-8b --on 1xh100 --adapters 4 --adapter-rank 16",
    "fp8 cache in pieces": "llama-3.1-70b --on 8xh100 --tp 4 --pp 2 --kv-cache fp8 --max-batched-tokens 512 "
    "--max-sequences 64",
    "adapters of GPT-like models": "mixtral-8x7b --on 4xh100 --tp 4 --adapters 2 --adapter-rank 8",
    "experts": "deepseek-v3 --on 8xh200 --dp 8 --ep 8",
    "generated kernels": "deepseek-v3 --on 8xb200 --tp 8 --ep 8 --engine tensorrt-llm-generated",
    "windows": "gpt-oss-20b --on 1xh100 --engine tensorrt-llm-windowed",
    "windows in pieces": "gpt-oss-20b --on 1xh100 --engine tensorrt-llm-windowed-chunked",
    "own layers": "deepseek-v3 --on 8xh200 --tp 8 --ep 8 --speculative-method mtp --num-speculative-tokens 2 "
    "--acceptance-rate 0.8",
    "a draft": "llama-3.1-70b --on 4xh100 --tp 4 --speculative-method draft_model --draft-model llama-3.2-1b "
    "--num-speculative-tokens 3 --acceptance-rate 0.7",
    "n-grams": "llama-3.1-8b --on 1xh100 --speculative-method ngram --num-speculative-tokens 4 --acceptance-rate 0.5",
}


@pytest.mark.parametrize("name", _TRTLLM)
def test_tensorrt_llm_knows_every_key_that_is_written(name: str, tmp_path: Path) -> None:
    """Its classes forbid any other key, and each kind of speculation has its own."""
    words = [*_TRTLLM[name].split(), "--batch", "8", "--input-tokens", "1000", "--output-tokens", "100"]
    assert run("export", "trtllm", *words, "--write", str(tmp_path)).status in (0, 1)
    tree = yaml.safe_load((tmp_path / "trtllm.yaml").read_text())
    kind = tree.get("speculative_config", {}).get("decoding_type", "")
    fields = {**_FIELDS, "speculative_config": f"decoding_type {_DRAFTS[kind]}" if kind else ""}
    assert set(tree) <= set(fields[""].split())
    for key, inner in tree.items():
        assert set(inner) <= set(fields[key].split()) if isinstance(inner, dict) else key not in fields


def test_a_stage_of_tensorrt_llm_has_its_part_of_the_sequences() -> None:
    """max_batch_size is of a step, of which a pipeline runs as many at once as it has stages (pyexecutor/_util.py)."""
    words = ("llama-3.1-70b", "--on", "8xh100", "--tp", "2", "--pp", "4", "--max-sequences", "250", "--json")
    more = ("--max-batched-tokens", "128", "--input-tokens", "100", "--output-tokens", "100")
    tree = _yaml.parse(run("export", "trtllm", *words, *more).tree["files"]["trtllm.yaml"], "trtllm.yaml")
    assert (tree["max_batch_size"], tree["cuda_graph_config"]["max_batch_size"]) == (63, 63)


@pytest.mark.parametrize(
    ("said", "graphs"),
    [
        ("16", {"max_batch_size": 16, "enable_padding": True}),
        ("4096", {"max_batch_size": 64, "enable_padding": True}),
        ("0", None),
    ],
)
def test_tensorrt_llm_is_told_what_it_captures(said: str, graphs: dict[str, Any] | None) -> None:
    """As many sequences as a job says, of those that may run, or no graph at all; the launch is read back as that."""
    words = ("llama-3.1-8b", "--on", "1xh100", "--max-sequences", "64", "--captured-sequences", said, "--json")
    done = run("export", "trtllm", *words)
    assert done.status == 0, done.err
    assert _yaml.parse(done.tree["files"]["trtllm.yaml"], "trtllm.yaml")["cuda_graph_config"] == graphs


@pytest.mark.parametrize("target", ["vllm", "sglang", "trtllm"])
def test_a_batch_between_captured_sizes_is_launched_as_it_was_priced(target: str, tmp_path: Path) -> None:
    """The launch lets so many run that the batch is filled up as it was, and a list of sizes is written whole."""
    words = ["llama-3.1-8b", "--on", "1xh100", "--batch", "9"]
    engine = ["--engine", {"trtllm": "tensorrt-llm"}.get(target, target)]
    steps = []
    for more in ([], ["--captured-sizes", "4,11,64"]):
        asked = run("infer", *words, *more, *engine, "--json")
        done = run("export", target, *words, *more, "--json")
        assert (asked.status, done.status) == (0, 0), done.err
        for file, text in done.tree["files"].items():
            (tmp_path / file).write_text(text)
        start = str(tmp_path / next(iter(done.tree["files"])))
        read = run("infer", "--from", start, "--on", "1xh100", "--batch", "9", "--output-tokens", "32", "--json")
        assert read.tree["tpot_seconds"] == pytest.approx(asked.tree["tpot_seconds"]), (target, more)
        steps.append(asked.tree["tpot_seconds"])
    assert steps[1] < steps[0]


def test_a_launch_of_tensorrt_llm_without_padding_pays_for_steps_that_it_does_not_capture(tmp_path: Path) -> None:
    """By itself trtllm-serve replays every size up to 32: 64 sequences take the launches of a step of null."""
    steps = {}
    for name, graphs in (("usual", ""), ("none", "null"), ("padded", "{enable_padding: true}")):
        (tmp_path / f"{name}.yaml").write_text(f"cuda_graph_config: {graphs}\n" if graphs else "max_beam_width: 1\n")
        (tmp_path / f"{name}.sh").write_text(f"trtllm-serve meta-llama/Llama-3.1-8B --config {name}.yaml\n")
        for batch in ("16", "64"):
            done = run("infer", "--from", str(tmp_path / f"{name}.sh"), "--on", "1xh100", "--batch", batch, "--json")
            steps[name, batch] = done.tree["tpot_seconds"]
    assert steps["usual", "16"] == steps["padded", "16"] < steps["none", "16"]
    assert steps["usual", "64"] == steps["none", "64"] > 1.2 * steps["padded", "64"]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("llama-3.1-8b --on 1xh100", "attn_q attn_k attn_v attn_dense mlp_h_to_4h mlp_4h_to_h mlp_gate"),
        ("mixtral-8x7b --on 4xh100 --tp 4", "attn_q attn_k attn_v attn_dense"),
        ("deepseek-v3 --on 16xh200 --tp 8 --pp 2", "mlp_h_to_4h mlp_4h_to_h mlp_gate"),
        ("deepseek-v4-flash --on 8xb200 --tp 8", ""),
    ],
)
def test_tensorrt_llm_is_told_which_layers_have_adapters(model: str, names: str) -> None:
    """A server with room for adapters that names none of its layers ends with an assertion (pyexecutor/_util.py)."""
    words = [*model.split(), "--batch", "4", "--input-tokens", "1000", "--adapters", "2", "--adapter-rank", "8"]
    done = run("export", "trtllm", *words, "--json")
    if not names:
        assert done.fields == ["adapter_rank"]
        return
    tree = _yaml.parse(done.tree["files"]["trtllm.yaml"], "trtllm.yaml")
    assert tree["lora_config"] == {"lora_target_modules": names.split(), "max_lora_rank": 8, "max_loras": 2}


@pytest.mark.parametrize(
    ("line", "off"),
    [
        ("vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct -tp 4 --enforce-eager", "--no-enable-prefix-caching"),
        (
            "python -m sglang.launch_server --model-path Qwen/Qwen3-Next-80B-A3B-Instruct --tp 4 --disable-cuda-graph",
            "--disable-radix-cache",
        ),
    ],
)
def test_a_prefix_cache_beside_eager_launches_is_left_out_aloud(line: str, off: str, tmp_path: Path) -> None:
    """No entry of an engine has both: what is not counted is said, unless the launch switches it off itself."""
    for words, count in ((line, 1), (f"{line} {off}", 0)):
        (tmp_path / "serve.sh").write_text(words + "\n")
        done = run("infer", "--from", str(tmp_path / "serve.sh"), "--on", "4xh100", "--json")
        assert done.status in (0, 1), done.err
        assert sum("no prefix cache beside" in one for one in done.tree["assumptions"]) == count


@pytest.mark.parametrize(
    ("target", "engine", "there", "gone"),
    [
        ("vllm", "vllm-prefix-cache", "--enable-prefix-caching", "--no-enable-prefix-caching"),
        ("sglang", "sglang-prefix-cache", "--tp-size", "--disable-radix-cache"),
        ("vllm", "vllm-eager", "--enforce-eager", "--disable"),
        ("sglang", "sglang-eager", "--disable-cuda-graph", "--enforce-eager"),
        ("vllm", "vllm-synchronous", "--no-async-scheduling", "--enforce-eager"),
        ("sglang", "sglang-synchronous", "--disable-overlap-schedule", "--disable-cuda-graph"),
    ],
)
def test_an_engine_that_is_told_what_it_does_not_do_by_itself(target: str, engine: str, there: str, gone: str) -> None:
    """The launch of a variant has its switches, and is read back as that variant."""
    done = run("export", target, "gpt-oss-20b", "--on", "1xh100", "--engine", engine)
    assert done.status == 0, done.err
    assert f"{there} " in done.out and f"{gone} " not in done.out


def test_experts_are_not_cut_within_a_block_of_their_scales() -> None:
    """Qwen3-235B-A22B-FP8 has experts of 1536 columns, which SGLang loads with ep 8 and not with etp 8.

    vLLM refines blocks, and 16-bit experts have none.
    """
    model, whole = "Qwen/Qwen3-235B-A22B-FP8", ("--on", "8xh200", "--tp", "8", "--json")
    refused = run("export", "sglang", model, *whole)
    assert refused.fields == ["etp"]
    assert (
        "experts of width 1536 are 192 on a rank; use ep 8 with etp 1"
        in run("export", "sglang", model, *whole[:-1]).err
    )
    assert any(
        "whole blocks of 128" in text for text in run("infer", model, *whole, "--engine", "sglang").tree["assumptions"]
    )
    for system, name, more in (
        ("sglang", model, ("--ep", "8")),
        ("vllm", model, ()),
        ("sglang", "qwen3-235b-a22b", ()),
    ):
        assert run("export", system, name, *whole, *more).status == 0
    space = ("--on", "8xh200", "--engine", "sglang", "--tp", "8", "--ep", "1", "--json")
    searched = run("plan", "infer", model, *space).tree
    assert not searched["best"]
    assert "whole blocks of 128" in str(searched["rejected"])


@pytest.mark.parametrize(("mode", "rest"), [("decode", "prompts"), ("prefill", "decode")])
@pytest.mark.parametrize("command", ["serve", "infer"])
def test_a_worker_of_one_pool_is_said_to_be_answered_for_both(
    mode: str, rest: str, command: str, tmp_path: Path
) -> None:
    """Half of a disaggregated deployment, of which an export writes each to a file, is not taken for a whole one."""
    (tmp_path / "a.sh").write_text(
        f"python -m sglang.launch_server --model-path Qwen/Qwen3-8B --disaggregation-mode {mode}\n", encoding="utf-8"
    )
    load = ["--rate", "1/s", "--requests", "20"] if command == "serve" else ["--batch", "4"]
    words = ["--from", str(tmp_path / "a.sh"), "--on", "1xh100", "--input-tokens", "64", "--output-tokens", "8", *load]
    done = run(command, *words, "--json")
    said = f"runs {mode} alone, and is answered as one that runs {rest} too"
    assert done.status == 0 and any(said in one for one in done.tree["assumptions"])
    if (command, mode) == ("serve", "decode"):
        both = run(command, *[word.replace("1xh100", "2xh100") for word in words], "--prefill-workers", "1", "--json")
        assert not any(said in one for one in both.tree["assumptions"])
