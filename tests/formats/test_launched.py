"""Launch lines of serving engines, read: what each word sets, what is not followed and why, what is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import run
from shardwise.errors import InputError
from shardwise.formats import import_server
from shardwise.formats._launched import read_launch
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Plan, Serving
from shardwise.serving import ServingOptions, decode_rows, infer

VLLM = "vllm serve meta-llama/Llama-3.1-70B "
SGLANG = "python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 "
LINES = {
    "short names, equals signs and thousands": (
        VLLM + "-tp 4 -pp=2 --max-model-len 8k --gpu_memory_utilization=0.9 --kv-cache-dtype fp8_e4m3",
        {"tp": 4, "pp": 2, "max_context": 8000, "memory_fraction": 0.9, "kv_cache": "fp8_e4m3"}, 8,
    ),
    "replicas share experts": (
        "vllm serve deepseek-ai/DeepSeek-V3 -dp 8 --enable-expert-parallel", {"dp": 8, "ep": 8, "etp": 1}, 8,
    ),
    "without expert parallelism experts are cut": (
        "vllm serve deepseek-ai/DeepSeek-V3 -tp 8", {"tp": 8, "ep": 1, "etp": 8}, 8,
    ),
    "what guesses tokens": (
        VLLM + """-tp 4 --speculative-config '{"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3}'""",
        {"speculative_method": "eagle", "num_speculative_tokens": 3, "draft_model": "a/b"}, 4,
    ),
    # vllm-project/recipes GLM/GLM-OCR.md, Ernie/Ernie4.5.md and CONTRIBUTING.md
    "an object of flags is said with dots": (
        "vllm serve zai-org/GLM-4.5-Air --speculative-config.method mtp --speculative-config.num_speculative_tokens 2 "
        "--compilation-config.pass_config.fuse_allreduce_rms=true",
        {"speculative_method": "mtp", "num_speculative_tokens": 2}, 1,
    ),
    "heads of a family have its name": (
        """vllm serve baidu/ERNIE-4.5-21B-A3B-PT --speculative-config '{"method": "ernie_mtp"}'""",
        {"speculative_method": "mtp", "num_speculative_tokens": 1}, 1,
    ),
    "switches take no word behind them, and have a negative": (
        "vllm serve --enable-sleep-mode --no-enable-expert-parallel deepseek-ai/DeepSeek-V3 -tp 8 --runner generate "
        "--spec-method ngram --spec-tokens 4", {"ep": 1, "speculative_method": "ngram", "num_speculative_tokens": 4}, 8,
    ),
    "groups of attention have a flag of their own": (
        SGLANG + "--tp 8 --attn-dp-size 4 --dp-size 2 --ep 8 --enable-metrics --max-running-requests 512",
        {"tp": 2, "dp": 8, "ep": 8, "max_sequences": 128}, 16,
    ),
    "attention data parallelism lies within tp": (
        SGLANG + "--tp 8 --dp 8 --enable-dp-attention --ep 8 --chunked-prefill-size 32768 --max-running-requests 512",
        {"tp": 1, "dp": 8, "ep": 8, "etp": 1, "max_batched_tokens": 4096, "max_sequences": 64}, 8,
    ),
    "replicas of SGLang multiply": (SGLANG + "--tp 8 --dp 2 --mem-fraction-static 0.8", {"tp": 8, "dp": 2}, 16),
    "TensorRT-LLM's flags": (
        "trtllm-serve meta-llama/Llama-3.1-8B --tp_size 2 --max_num_tokens 8192",
        {"tp": 2, "max_batched_tokens": 8192, "engine": "tensorrt-llm"}, 2,
    ),
    "TensorRT-LLM's kernels of experts": (
        "cat > own.yml <<EOF\nmoe_config:\n  backend: TRTLLM\nEOF\n"
        "trtllm-serve deepseek-ai/DeepSeek-V3 --tp_size 8 --ep_size 8 --extra_llm_api_options own.yml",
        {"tp": 8, "ep": 8, "engine": "tensorrt-llm-generated"}, 8,
    ),
    "slots share a context": (
        "./llama-server -m Llama-3.1-8B-Q4_K_M.gguf -c 32768 -np 4 -ts 1,1 -ctk q8_0 -ctv q8_0 -ngl 99",
        {"pp": 2, "max_context": 8192, "max_sequences": 4, "weights": "q4_k_m", "kv_cache": "int8", "gpu_layers": 99},
        2,
    ),
    "an image of vLLM's takes the flags": (
        "docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.11.0 --model NousResearch/Meta-Llama-3.1-8B-Instruct "
        "--tensor-parallel-size 2", {"model": "llama-3.1-8b", "tp": 2}, 2,
    ),
    "a default has a default that has one": (
        "TP=${A:-${B:-${C:-4}}}\nvllm serve meta-llama/Llama-3.1-70B -tp $TP", {"tp": 4}, 4,
    ),
    "a folder is named as its model": (
        "vllm serve /data/models/Llama-3.1-70B-Instruct -tp 4", {"model": "llama-3.1-70b"}, 4,
    ),
    "a checkpoint is named after its model and how it is stored": (
        "vllm serve /cache/models--RedHatAI--Llama-3.3-70B-Instruct-FP8-dynamic/snapshots/dd --max-num-seqs 8",
        {"model": "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "weights": None}, 1,
    ),
    "one whose file is not known too": (
        "vllm serve /cache/models--me--Llama-3.3-70B-Instruct-FP8-dynamic/snapshots/dd --max-num-seqs 8",
        {"model": "llama-3.3-70b", "weights": "fp8"}, 1,
    ),
    "Qwen stores 8 bits in blocks": (
        "vllm serve Qwen/Qwen3-235B-A22B-FP8 -tp 8 --dtype bfloat16",
        {"model": "Qwen/Qwen3-235B-A22B-FP8", "weights": None}, 8,
    ),
    "sparse latents are packed in 8 bits": (
        "vllm serve deepseek-ai/DeepSeek-V3.2 -tp 8 --kv-cache-dtype fp8_ds_mla", {"kv_cache": "fp8"}, 8,
    ),
    "a type of activations widens no stored weights": (
        "vllm serve openai/gpt-oss-20b --dtype bfloat16", {"weights": None}, 1,
    ),
    "nor those that a name says": (
        "python -m sglang.launch_server --model-path x/Llama-3.1-8B-Instruct-AWQ --dtype half",
        {"model": "llama-3.1-8b", "weights": "int4"}, 1,
    ),
    "it is that of weights that are stored wide": (
        "vllm serve meta-llama/Llama-3.1-8B --dtype half", {"weights": "fp16"}, 1,
    ),
    "a served name stands for a folder": (
        "sglang serve --model-path /models/x --served-model-name deepseek-ai/DeepSeek-R1 --tp 8",
        {"model": "deepseek-r1"}, 8,
    ),
    "a file of weights is named as its model": (
        "llama-server -m /models/Meta-Llama-3.1-8B-Instruct-Q5_K_M.gguf -c 8192",
        {"model": "llama-3.1-8b", "weights": "q5_k_m", "max_context": 8192}, 0,
    ),
    "a checkpoint that is stored narrow": (
        "llama-server -hf ggml-org/gpt-oss-20b-GGUF", {"model": "gpt-oss-20b", "weights": None}, 0,
    ),
    "layers and experts stay on the host": (
        "llama-server -m gpt-oss-120b-mxfp4.gguf -ngl 0 --n-cpu-moe 20", {"gpu_layers": 0, "cpu_experts": 20}, 0,
    ),
    "other names of a flag, and a switch with a dot": (
        "llama-server --hf-repo bartowski/Llama-3.1-8B-GGUF -hff Llama-3.1-8B-Q6_K.gguf --fim-qwen-1.5b-default "
        "--gpu-layers 20 --no-kv-offload --rope-scaling yarn", {"weights": "q6_k", "gpu_layers": 20}, 0,
    ),
    "a prefix cache divides what layers of two kinds keep": (
        "sglang serve --model-path openai/gpt-oss-20b", {"engine": "sglang-prefix-cache"}, 1,
    ),
    "tokens sent to experts put them on all ranks": (
        "sglang serve --model-path deepseek-ai/DeepSeek-V3 --tp 16 --dp 16 --enable-dp-attention "
        "--moe-a2a-backend deepep --ep 2", {"ep": 16, "etp": 1}, 16,
    ),
    "by a flag of older releases too": (
        "sglang serve --model-path deepseek-ai/DeepSeek-V3 --tp 16 --enable-deepep-moe", {"ep": 16, "etp": 1}, 16,
    ),
    "not where nothing sends them": (
        "sglang serve --model-path deepseek-ai/DeepSeek-V3 --tp 8 --moe-a2a-backend none", {"ep": 1, "etp": 8}, 8,
    ),
    "the command of TensorRT-LLM's server by its name": (
        "trtllm-serve serve Qwen/Qwen3-30B-A3B --tp_size 8 --ep_size 8", {"model": "Qwen/Qwen3-30B-A3B", "ep": 8}, 8,
    ),
    "it is switched off": (
        "sglang serve --model-path openai/gpt-oss-20b --disable-radix-cache", {"engine": "sglang"}, 1,
    ),
    "nor does it divide what layers of one kind keep": (
        "sglang serve --model-path meta-llama/Llama-3.1-8B", {"engine": "sglang"}, 1,
    ),
    "a state at the end of a block is another": (
        "vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct -tp 4", {"engine": "vllm-prefix-cache"}, 4,
    ),
    "unless prefixes are not cached": (
        "vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct -tp 4 --no-enable-prefix-caching", {"engine": "vllm"}, 4,
    ),
    "bytes of the cache": (
        "vllm serve meta-llama/Llama-3.1-8B --kv-cache-memory-bytes 20G", {"kv_cache_memory": 20 * 2.0**30}, 1,
    ),
    "tokens of the cache": (
        "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B --max-total-tokens 65536",
        {"max_total_tokens": 65536}, 1,
    ),
    "a model's towers left out": (
        "vllm serve google/gemma-3-4b-it --language-model-only", {"language_model_only": True}, 1,
    ),
    "no images, in JSON": (
        """vllm serve google/gemma-3-4b-it --limit-mm-per-prompt '{"image": 0}'""", {"language_model_only": True}, 1,
    ),
    "no images, as a part": (
        "vllm serve google/gemma-3-4b-it --limit-mm-per-prompt.image 0", {"language_model_only": True}, 1,
    ),
    "no images, as releases of 2024 read it": (
        "vllm serve google/gemma-3-4b-it --limit-mm-per-prompt image=0", {"language_model_only": True}, 1,
    ),
    "no video but images": (
        """vllm serve google/gemma-3-4b-it --limit-mm-per-prompt '{"image": 2, "video": 0}'""",
        {"language_model_only": None}, 1,
    ),
    "windows are no more for it in vLLM": ("vllm serve openai/gpt-oss-20b", {"engine": "vllm"}, 1),
    "a pattern that sends all experts to the host": (
        "llama-server -m gpt-oss-120b-mxfp4.gguf -ot '.ffn_.*_exps.=CPU'", {"cpu_experts": 10_000}, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_a_launch_line_says_fields(name: str) -> None:
    """Each word sets the field that it means, and the devices are those that the launch takes."""
    line, expected, devices = LINES[name]
    found = read_launch(line, "run.sh", {})
    assert {key: found.values.get(key) for key in expected} == expected
    assert found.num_devices == devices
    assert not found.unknown


def test_every_word_is_accounted_for() -> None:
    """What sets nothing is named: with the reason, as without effect on bytes and seconds, or as not known."""
    text = (
        'TP=2\nexec vllm serve "$MODEL" -tp $TP --port 8000 --attention-backend FLASHINFER --frob 3 --max-num-seqs 64\n'
    )
    found = read_launch(text, "run.sh", {"MODEL": "meta-llama/Llama-3.1-8B"})
    assert found.values["model"] == "meta-llama/Llama-3.1-8B" and found.values["tp"] == 2
    assert found.silent == ("--port",)
    assert [(one.argument, bool(one.meaning)) for one in found.ignored] == [("--attention-backend", True)]
    assert [(one.argument, one.value) for one in found.unknown] == [("--frob", "3")]
    assert {one.argument for one in found.understood} == {"--tensor-parallel-size", "--max-num-seqs"}


@pytest.mark.parametrize("word", ["--tensor-paralel-size", "--tensr-parallel-size", "--shared-experts-size"])
def test_a_flag_that_may_change_the_answer_is_refused(word: str) -> None:
    """The engine would not start with it, and what was meant by it would not be counted."""
    with pytest.raises(InputError, match=word):
        read_launch(f"vllm serve meta-llama/Llama-3.1-8B {word} 4", "run.sh", {})


def test_a_flag_may_be_begun_alone() -> None:
    """What begins one flag alone is that flag where the engine's parser is argparse, and none where two begin so."""
    found = read_launch("vllm serve meta-llama/Llama-3.1-8B --max-num-seq 64 --max-model 4096 --max 3", "run.sh", {})
    assert (found.values["max_sequences"], found.values["max_context"]) == (64, 4096)
    assert [one.argument for one in found.unknown] == ["--max"]


OPEN = {
    "$TP": "vllm serve a/b --tensor-parallel-size $TP",
    "$ISL": "OSL=32\nvllm serve a/b --max-model-len $((ISL + OSL))",
    "$N": "L=$((8 * (N + (2))))\nvllm serve a/b --max-num-seqs $L",
    "$(nvidia-smi": "vllm serve a/b --tensor-parallel-size $(nvidia-smi -L | wc -l)",
}


@pytest.mark.parametrize("name", OPEN)
def test_what_a_script_leaves_open_is_asked_for_by_name(name: str) -> None:
    """A flag whose value hangs on what the caller sets says on which, and a command that would print it is not run."""
    with pytest.raises(InputError) as caught:
        read_launch(OPEN[name], "run.sh", {})
    (problem,) = caught.value.problems
    assert name in f"{problem.value} {problem.rule}" and problem.rule.startswith(("depends on $", "is what a command"))


def test_a_model_that_a_script_leaves_open_may_be_named_beside_it() -> None:
    """A launch without its model is read, and says which variable names it."""
    found = read_launch("vllm serve $MODEL -tp 2", "run.sh", {})
    assert "model" not in found.values
    assert "give --set MODEL=VALUE, or name a model" in found.assumed[0]


WRONG = {
    "--tensor-parallel-size": VLLM + "-tp four",
    "--gpu-memory-utilization": VLLM + "--gpu-memory-utilization 1.5",
    "--kv-cache-dtype": VLLM + "--kv-cache-dtype int3",
    "--speculative-config": VLLM + "--speculative-config mtp",
    "--dp-size": SGLANG + "--tp 4 --dp 3 --enable-dp-attention",
    "--max-num-seqs": VLLM + "--max-num-seqs",
    "--prefill-context-parallel-size": VLLM + "-tp 4 -pcp 2",
    "--cp-size": "trtllm-serve meta-llama/Llama-3.1-8B --tp_size 4 --cp_size 2",
    "from": "python -m atom.entrypoints.openai_server --log ./server.log",
}


@pytest.mark.parametrize("field", WRONG)
def test_wrong_values_are_refused(field: str) -> None:
    """A value that the engine would not take, or that nothing here stands for, is a problem of its flag."""
    with pytest.raises(InputError) as caught:
        read_launch(WRONG[field], "run.sh", {})
    assert [problem.field for problem in caught.value.problems] == [field]


SYSTEMS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt-llm", "dynamo": "vllm"}


@given(
    st.sampled_from(sorted(SYSTEMS)), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2)),
    st.sampled_from(("", "fp8")), st.integers(1, 512), st.sampled_from((0, 2048, 8192)), st.booleans(),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_what_is_exported_is_read_back(system, tp, dp, cache, batch, chunk, moe) -> None:  # type: ignore[no-untyped-def]
    """Degrees, the cache, limits of a step and the share of the memory of a deployment survive its launch line."""
    from importlib import import_module
    from tempfile import TemporaryDirectory

    model = load_model("mixtral-8x7b" if moe else "llama-3.1-8b")
    one = system == "sglang" or not moe
    plan = Plan(tp=tp, dp=dp, ep=1, etp=tp if moe else 1)
    job = Serving(
        batch=batch,
        input_tokens=500,
        output_tokens=50,
        kv_cache=cache,
        max_batched_tokens=max(chunk, batch) * bool(chunk),
    )
    report = infer(model, Cluster.parse(f"{tp * dp}xh100-sxm-80gb"), plan, job, ServingOptions(engine=SYSTEMS[system]))
    made = import_module(f"shardwise.formats.{system}").export(report)
    with TemporaryDirectory() as folder:
        for name, text in made.files.items():
            (Path(folder) / name).write_text(text)
        found = import_server(str(Path(folder) / next(iter(made.files))))
    values = found.values
    assert (values["tp"], values["pp"]) == (tp, 1)
    assert values.get("kv_cache", "") == cache
    filled = decode_rows(report.case) if system == "sglang" else 0  # which the launch captures
    assert values["max_sequences"] == max(batch, report.case.profiled.sequences, filled)
    assert values["max_batched_tokens"] == report.case.step_tokens
    assert values["memory_fraction"] == pytest.approx(report.memory_share, abs=1e-3)
    if one and system != "trtllm":
        assert values.get("dp", 1) == dp
    if moe:
        assert (values["ep"], values["etp"]) == (1, tp)


PROPOSED = (
    ("llama-3.1-8b", "--on", "1xh100", "--speculative-method", "ngram"),
    ("llama-3.1-8b", "--on", "1xh100", "--speculative-method", "draft_model", "--draft-model", "llama-3.2-1b"),
    ("deepseek-v3", "--on", "8xh200", "--tp", "8", "--ep", "8", "--speculative-method", "mtp"),
)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("words", PROPOSED)
def test_what_proposes_tokens_is_said_to_every_engine(system: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """The method, its depth and the draft model are written in the engine's words, and read from them again."""
    more = ("--num-speculative-tokens", "3", "--acceptance-rate", "0.6", "--batch", "4", "--json")
    made = run("export", system, *words, *more).tree["files"]
    for name, text in made.items():
        (tmp_path / name).write_text(text)
    values = import_server(str(tmp_path / next(iter(made)))).values
    assert (values["speculative_method"], values["num_speculative_tokens"]) == (
        words[words.index("--speculative-method") + 1],
        3,
    )
    draft = "meta-llama/Llama-3.2-1B" if "--draft-model" in words else ""
    assert values.get("draft_model", "") == draft


@pytest.mark.parametrize(
    ("words", "depth", "tree"),
    [
        ("NGRAM", 11, True),
        ("NGRAM --speculative-num-draft-tokens 4 --speculative-num-steps 2", 3, True),
        ("NGRAM --speculative-num-draft-tokens 4 --speculative-ngram-max-bfs-breadth 1", 3, False),
        ("NEXTN", 3, False),
        ("EAGLE3 --speculative-num-draft-tokens 6", 5, False),
        ("EAGLE --speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8", 5, True),
    ],
)
def test_guesses_of_sglang_are_as_deep_as_it_makes_them(words: str, depth: int, tree: bool, tmp_path: Path) -> None:
    """N-grams fill all rows but the last token's, in a tree unless its breadth is one; silence has SGLang's depth."""
    (tmp_path / "run.sh").write_text(f"{SGLANG} --speculative-algorithm {words}")
    found = import_server(str(tmp_path / "run.sh"))
    assert found.values["num_speculative_tokens"] == depth
    assert any("one branch" in note for note in found.assumed) == tree
    silent = "--speculative-num-" not in words
    assert any(note.startswith(f"num_speculative_tokens {depth}") for note in found.assumed) == silent


def test_a_head_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """An engine loads EAGLE's head from a checkpoint, so an answer that made its own up has none to name."""
    words = ("--speculative-method", "eagle", "--num-speculative-tokens", "3", "--acceptance-rate", "0.6", "--json")
    done = run("export", "vllm", "llama-3.1-8b", "--on", "1xh100", *words)
    assert done.status == 2 and done.fields == ["draft_model"]


POOLS = ("llama-3.1-8b", "--on", "4xh100", "--tp", "1", "--rate", "2/s", "--requests", "50", "--prefill-workers", "3",
         "--input-tokens", "500", "--output-tokens", "20", "--json")  # fmt: skip


def test_both_pools_are_written(tmp_path: Path) -> None:
    """Workers that compute prompts and those that decode are servers with a role, or two services of a graph."""
    (tmp_path / "dynamo.yaml").write_text(run("export", "dynamo", *POOLS).tree["files"]["dynamo.yaml"])
    found = import_server(str(tmp_path / "dynamo.yaml"))
    assert (found.values["prefill_workers"], found.num_devices) == (3, 4) and not found.unknown
    for system in ("vllm", "sglang"):
        for name, text in run("export", system, *POOLS).tree["files"].items():
            (tmp_path / name).write_text(text)
        roles = {role: import_server(str(tmp_path / f"{system}-{role}.sh")).role for role in ("prefill", "decode")}
        assert roles == {"prefill": "prefill", "decode": "decode"}
    assert run("export", "trtllm", *POOLS).fields == ["prefill_workers"]


def test_two_pools_are_read_from_a_graph(tmp_path: Path) -> None:
    """A worker that computes prompts and one that decodes become a deployment with both pools."""
    worker = (
        "    {}Worker:\n      replicas: {}\n      extraPodSpec:\n        mainContainer:\n          command: [python3]\n"
    )
    worker += "          args: [-m, dynamo.vllm, --model, Qwen/Qwen3-0.6B{}]\n"
    head = "apiVersion: nvidia.com/v1alpha1\nkind: DynamoGraphDeployment\nspec:\n  services:\n"
    file = tmp_path / "disagg.yaml"
    file.write_text(head + worker.format("Decode", 2, "") + worker.format("Prefill", 3, ", --is-prefill-worker"))
    found = import_server(str(file))
    assert {key: found.values[key] for key in ("dp", "prefill_workers", "prefill_tp")} == {
        "dp": 2, "prefill_workers": 3, "prefill_tp": 1,
    }  # fmt: skip
    assert found.num_devices == 5


# Facts of files in the systems' own repositories -> what they start, and on how many devices.
OBJECTS: dict[str, tuple[str, dict[str, object], int]] = {
    # ai-dynamo/dynamo recipes/llama-3-70b/vllm/disagg-single-node/deploy.yaml
    "variables of a container": (
        "kind: DynamoGraphDeployment\nspec:\n  services:\n    Prefill:\n      subComponentType: prefill\n"
        "      replicas: 2\n      extraPodSpec:\n        mainContainer:\n"
        "          env:\n          - name: MODEL_PATH\n"
        "            value: /m/models--RedHatAI--Llama-3.3-70B-Instruct-FP8-dynamic/snapshots/d\n"
        "          args: ['python3 -m dynamo.vllm --model $MODEL_PATH --tensor-parallel-size 2 --is-prefill-worker']\n"
        "          command: [/bin/sh, -c]\n    Decode:\n      subComponentType: decode\n      replicas: 1\n"
        "      envs: [{name: MODEL_PATH, value: RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic}]\n"
        "      extraPodSpec:\n        mainContainer:\n"
        "          args: ['python3 -m dynamo.vllm --model $MODEL_PATH --tensor-parallel-size 4']\n"
        "          command: [/bin/sh, -c]\n",
        {"model": "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "tp": 4, "prefill_workers": 2, "prefill_tp": 2}, 8,
    ),
    # ai-dynamo/dynamo recipes/deepseek-r1/trtllm/disagg/wide_ep/gb200/deploy.yaml
    "options in a ConfigMap": (
        "kind: ConfigMap\ndata:\n  p.yaml: |\n    tensor_parallel_size: 4\n    enable_attention_dp: true\n"
        "    moe_expert_parallel_size: 4\n---\nkind: ConfigMap\ndata:\n  d.yaml: |\n    tensor_parallel_size: 32\n"
        "    moe_expert_parallel_size: 32\n    enable_attention_dp: true\n    max_batch_size: 32\n---\n"
        "kind: DynamoGraphDeployment\nspec:\n  services:\n    prefill:\n      subComponentType: prefill\n"
        "      replicas: 1\n      extraPodSpec: {mainContainer: {command: [/bin/sh, -c], args: ['python3 -m "
        "dynamo.trtllm --model-path /cache/deepseek-r1-fp4 --extra-engine-args /config/p.yaml "
        "--disaggregation-mode prefill']}}\n"
        "    decode:\n      subComponentType: decode\n      replicas: 1\n"
        "      extraPodSpec: {mainContainer: {command: [/bin/sh, -c], args: ['python3 -m dynamo.trtllm "
        "--model-path /cache/deepseek-r1-fp4 --extra-engine-args /config/d.yaml --disaggregation-mode decode']}}\n",
        {"model": "deepseek-r1", "weights": "nvfp4", "dp": 32, "ep": 32, "max_sequences": 32, "prefill_ep": 4}, 36,
    ),
    # ai-dynamo/dynamo examples/backends/vllm/deploy/v1beta1/disagg.yaml, with more copies
    "components of a graph": (
        "kind: DynamoGraphDeployment\nspec:\n  components:\n  - name: Frontend\n    type: frontend\n    replicas: 1\n"
        + "".join(
            f"  - name: {name}\n    type: {name}\n    replicas: {copies}\n    podTemplate:\n      spec:\n"
            "        containers:\n        - name: main\n          command: [python3, -m, dynamo.vllm]\n"
            f"          args: [--model, Qwen/Qwen3-0.6B, --disaggregation-mode, {name}]\n"
            for name, copies in (("decode", 2), ("prefill", 3))
        ),
        {"model": "Qwen/Qwen3-0.6B", "dp": 2, "prefill_workers": 3}, 5,
    ),
    # llm-d/llm-d guides/wide-ep-lws/manifests/modelserver/base/decode.yaml
    "ranks of a group of pods": (
        "kind: LeaderWorkerSet\nspec:\n  replicas: 1\n  leaderWorkerTemplate:\n    size: 2\n    workerTemplate:\n"
        "      spec:\n        containers:\n        - command: [/bin/bash, -c]\n          args:\n          - |-\n"
        "            exec vllm serve deepseek-ai/DeepSeek-R1-0528 --enable-expert-parallel \\\n"
        "              --data-parallel-size $((LWS_GROUP_SIZE * DP_SIZE_LOCAL))\n"
        "          env: [{name: DP_SIZE_LOCAL, value: '8'}, {name: IP, valueFrom: {fieldRef: {fieldPath: a}}}]\n",
        {"dp": 16, "ep": 16, "tp": 1}, 16,
    ),
    # kserve/kserve docs/samples/llmisvc/single-node-gpu/llm-inference-service-pd-qwen2-7b-gpu.yaml, with degrees
    "what KServe adds to a template": (
        "kind: LLMInferenceService\nspec:\n  replicas: 1\n  model: {uri: 'hf://mistralai/Mixtral-8x7B-v0.1', name: a}\n"
        "  parallelism: {tensor: 4, expert: true}\n"
        "  template: {containers: [{name: main, env: [{name: VLLM_ADDITIONAL_ARGS, value: '--max-num-seqs 64'}]}]}\n"
        "  prefill:\n    replicas: 2\n    parallelism: {tensor: 2}\n"
        "    template: {containers: [{name: main, args: [--max-model-len, '8192']}]}\n",
        {"model": "mistralai/Mixtral-8x7B-v0.1", "tp": 4, "ep": 4, "max_sequences": 64, "prefill_tp": 2}, 8,
    ),
    # docs.vllm.ai deployment/k8s.html: the image's own entry point takes the arguments
    "arguments of an image": (
        "kind: Deployment\nspec:\n  replicas: 3\n  template: {spec: {containers: [{image: 'vllm/vllm-openai:latest', "
        "args: [--model, mistralai/Mistral-7B-v0.3, --tensor-parallel-size, '2']}]}}\n",
        {"model": "mistralai/Mistral-7B-v0.3", "tp": 2, "dp": 3}, 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_of_kubernetes_start_what_their_operator_would(name: str, tmp_path: Path) -> None:
    """Variables, files and sizes that the objects themselves hold are what the launch lines in them see."""
    text, expected, devices = OBJECTS[name]
    (tmp_path / "a.yaml").write_text(text)
    found = import_server(str(tmp_path / "a.yaml"))
    assert {key: found.values.get(key) for key in expected} == expected
    assert found.num_devices == devices and not found.unknown


def test_the_launch_fills_what_flags_leave_open(tmp_path: Path) -> None:
    """A flag wins over the file, a device named alone is taken as often as the launch does, and words are noted."""
    file = tmp_path / "run.sh"
    file.write_text(VLLM + "-tp 4 --quantization fp8 --max-num-seqs 64 --attention-backend FLASHINFER\n")
    words = ("--from", str(file), "--on", "h100", "--input-tokens", "1000", "--output-tokens", "50", "--json")
    done = run("infer", *words, "--max-sequences", "32")
    assert done.status == 0, done.err
    assert done.tree["cluster"]["num_devices"] == 4
    assert done.tree["job"]["max_sequences"] == 32 and done.tree["job"]["weights"] == "fp8"
    assert any("--attention-backend not followed" in note for note in done.tree["assumptions"])
    assert run("serve", *words, "--rate", "1/s", "--requests", "50").tree["plan"]["tp"] == 4


def test_a_search_takes_what_is_served_from_a_launch_and_finds_the_layout(tmp_path: Path) -> None:
    """Model, format and share of the memory are the launch's; degrees and limits of a step are what is searched."""
    file = tmp_path / "run.sh"
    file.write_text("vllm serve meta-llama/Llama-3.1-8B -tp 4 --quantization fp8 --gpu-memory-utilization 0.8\n")
    asked = ("--from", str(file), "--input-tokens", "500", "--output-tokens", "50")
    best = run("plan", "infer", *asked, "--json", "--on", "h100", "--batch", "8", "--top", "1").tree["best"][0]
    assert best["plan"]["tp"] < 4 and best["weights"] == "fp8"
    assert best["cluster"]["num_devices"] == 4
    found = " ".join(run("plan", "serve", *asked, "--on", "2xh100", "--rate", "1/s", "--top", "1").out.split())
    assert "1.00 requests/s: 1 x h100" in found and "tp, pp are searched, not taken from it" in found


def test_import_shows_what_became_of_the_words_of_a_server(tmp_path: Path) -> None:
    """A launch of a server is imported as one of a training is: its fields, and every word of it."""
    file = tmp_path / "run.sh"
    file.write_text(VLLM + "-tp 4 --enforce-eager --port 8000\n")
    told = run("import", str(file), "--json").tree
    assert told["serving"]["tp"] == 4 and told["num_devices"] == 4 and told["silent"] == ["--port"]
    assert "--enforce-eager" in run("import", str(file)).out


def test_rows_take_what_they_leave_blank_from_a_launch(tmp_path: Path) -> None:
    """A row that says what was measured alone is predicted as the launch of the server, or of the training, ran it."""
    file, rows = tmp_path / "run.sh", tmp_path / "runs.csv"
    file.write_text(VLLM + "-tp 4 --quantization fp8\n")
    rows.write_text("metric,value,device,serving_mode,batch,input_tokens,output_tokens\n"
                    "tpot,0.02,h100-sxm-80gb,static,8,500,50\n")  # fmt: skip
    told = run("validate", str(rows), "--from", str(file), "--rows", str(tmp_path / "found.csv"), "--json").tree
    assert told["rows"]["predicted"] == 1 and not told["unread"]
    rows.write_text("metric,value,device,tp\nstep_time,9.0,h100-sxm-80gb,2\n")
    words = "torchrun --nproc_per_node 8 run_recipe.py --recipe llama3_8b_pretrain_config train.global_batch_size=64 "
    file.write_text(words + "dataset.seq_length=4096 train.micro_batch_size=1 model.tensor_model_parallel_size=4\n")
    assert run("validate", str(rows), "--from", str(file), "--json").tree["rows"]["predicted"] == 1
    assert run("validate", str(rows), "--json").status == 2


def test_a_line_without_a_model_asks_for_one(tmp_path: Path) -> None:
    """A file of weights has no name of a catalogue: the model is to be named."""
    file = tmp_path / "run.sh"
    file.write_text("llama-server -m x-Q8_0.gguf -c 4096 -np 2\n")
    assert "model" in run("infer", "--from", str(file), "--on", "1xl40s").err
    assert run("infer", "llama-3.1-8b", "--from", str(file), "--on", "1xl40s", "--json").tree["weights"] == "q8_0"


# docker compose as people write it -> what it serves.
COMPOSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("services:\n  vllm:\n    image: vllm/vllm-openai:latest\n    ports: ['8000:8000']\n    ipc: host\n"
     "    command: >\n      --model ${MODEL:-meta-llama/Llama-3.3-70B-Instruct} --host 0.0.0.0\n"
     "      --tensor-parallel-size ${TP:-2} --max-model-len ${LEN:-8000} --gpu-memory-utilization 0.95\n",
     {"engine": "vllm", "tp": 4, "max_context": 8000, "memory_fraction": 0.95, "num_devices": 4}),
    ("x-vllm: &vllm\n  image: vllm/vllm-openai:latest\nservices:\n  vllm:\n    <<: *vllm\n"
     "    command: --model meta-llama/Llama-3.3-70B-Instruct --tensor-parallel-size 4\n",
     {"engine": "vllm", "tp": 4, "num_devices": 4}),
    ("services:\n  sglang:\n    image: lmsysorg/sglang:latest\n    environment: {HF_TOKEN: x, TP: 2}\n"
     "    entrypoint: python3 -m sglang.launch_server\n    deploy: {replicas: 2}\n"
     "    command:\n      --model-path meta-llama/Llama-3.1-8B-Instruct\n      --tp ${TP}\n",
     {"engine": "sglang", "tp": 4, "dp": 2, "num_devices": 8}),
    ("services:\n  llama:\n    image: ghcr.io/ggml-org/llama.cpp:server-cuda\n  # the web page beside it\n"
     "    command: -m /models/Qwen2.5-7B-Instruct-Q4_K_M.gguf -c 16384 -ngl 99 -np 2\n  web: {image: open-webui}\n",
     {"engine": "llama.cpp", "model": "qwen2.5-7b", "weights": "q4_k_m", "max_context": 8192}),
    ("services:\n  v:\n    image: vllm/vllm-openai:v0.3.2\n    environment:\n    - LEN=4096\n"
     "    entrypoint: [python3, -m,\n      vllm.entrypoints.openai.api_server, --model,\n"
     "      mistralai/Mistral-7B-v0.1, --max-model-len, '${LEN}']\n",
     {"engine": "vllm", "tp": 1, "max_context": 4096, "model": "mistralai/Mistral-7B-v0.1"}),
)  # fmt: skip


@pytest.mark.parametrize(("text", "facts"), COMPOSED)
def test_services_of_docker_compose_are_servers(text: str, facts: dict[str, Any], tmp_path: Path) -> None:
    """An image or its entry point takes the command; what nobody sets has the value beside it, what is set wins."""
    (tmp_path / "compose.yml").write_text(text, encoding="utf-8")
    found = import_server(tmp_path / "compose.yml", {"TP": "4"})
    assert {key: {**found.values, "num_devices": found.num_devices}[key] for key in facts} == facts


def test_yaml_that_starts_no_server_is_refused(tmp_path: Path) -> None:
    """A file of settings that only names an engine is no launch of it, with nothing understood."""
    (tmp_path / "a.yaml").write_text("image: vllm/vllm-openai\nvalues: {tp: 8}\n", encoding="utf-8")
    with pytest.raises(InputError, match="starts no server"):
        import_server(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("start", "longest"), [("vllm serve", "max-model-len"), ("python -m sglang.launch_server", "context-length")]
)
def test_flags_of_an_engine_s_own_yaml_are_those_of_its_line(start: str, longest: str, tmp_path: Path) -> None:
    """What `--config` names holds flags without their dashes; what the line says itself wins."""
    text = "model: meta-llama/Llama-3.1-8B\ntensor-parallel-size: 2\n" + longest + ": 4096\n"
    (tmp_path / "conf.yaml").write_text(text + "skip-tokenizer-init: true\n", encoding="utf-8")
    (tmp_path / "run.sh").write_text(f"{start} --config conf.yaml --{longest} 8192\n", encoding="utf-8")
    found = import_server(tmp_path / "run.sh")
    assert (found.values["model"], found.values["max_context"]) == ("meta-llama/Llama-3.1-8B", 8192)
    assert found.num_devices == 2 and not found.unknown
    (tmp_path / "conf.yaml").unlink()
    with pytest.raises(InputError):
        import_server(tmp_path / "run.sh")


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("docker run --gpus all vllm/vllm-openai:v0.11.0 --model meta-llama/Llama-3.1-8B", "0.11.0"),
        ("docker run --gpus all vllm/vllm-openai:latest --model meta-llama/Llama-3.1-8B", ""),
        ("# vllm/vllm-openai:v0.9.0\nvllm serve meta-llama/Llama-3.1-8B", ""),
        ("uv pip install 'vllm[audio]==0.12.0'\nvllm serve meta-llama/Llama-3.1-8B", "0.12.0"),
        ("pip install my-vllm==3.0\nvllm serve meta-llama/Llama-3.1-8B", ""),
        ("docker run rocm/vllm:rocm6.3.1_vllm_0.8.5_20250513 vllm serve meta-llama/Llama-3.1-8B", "0.8.5"),
        ("IMAGE=lmsysorg/sglang:v0.5.4.post1-cu130\npython3 -m sglang.launch_server --model-path m/a", "0.5.4"),
        ("BASE=vllm/vllm-openai:v0.9.0\npython3 -m sglang.launch_server --model-path m/a", ""),
        ("docker run nvcr.io/nvidia/tensorrt-llm/release:1.1.0rc5 trtllm-serve m/a", "1.1.0rc5"),
    ],
)
def test_a_launch_states_its_release(text: str, release: str) -> None:
    """The tag of the engine's image, or what its script installs, is the release that runs; other engines' is not."""
    assert read_launch(text, "run.sh", {}).release == release


@pytest.mark.parametrize(
    ("text", "release"),
    [
        (
            "kind: Deployment\nspec:\n  containers:\n"
            "  - image: vllm/vllm-openai:v0.10.2\n    command: [vllm, serve, m/a]",
            "0.10.2",
        ),
        ("services:\n  a:\n    image: vllm/vllm-openai:${TAG:-v0.11.0}\n    command: --model m/a", "0.11.0"),
        (
            "backend:\n  type: vllm\n  vllm_config:\n    aggregated:\n      max-num-seqs: 8\n"
            "resources:\n  agg_workers: 1\nmodel:\n  path: m/a\n"
            "identity:\n  frameworks:\n    dynamo: 1.2.0\n    vllm: 0.20.0\n",
            "0.20.0",
        ),
        (
            "backend:\n  type: sglang\n  sglang_config:\n    aggregated:\n      tp-size: 8\n"
            "resources:\n  agg_workers: 1\nmodel:\n  path: m/a\n  container: lmsysorg/sglang:v0.5.8-cu130\n",
            "0.5.8",
        ),
        (
            "servingEngineSpec:\n  modelSpec:\n  - repository: vllm/vllm-openai\n    tag: v0.10.1\n    modelURL: m/a\n",
            "0.10.1",
        ),
    ],
)
def test_containers_and_recipes_state_their_release(text: str, release: str, tmp_path: Path) -> None:
    """An image stands beside the command of a container, and a recipe names what it was made with."""
    (tmp_path / "a.yaml").write_text(text)
    assert import_server(tmp_path / "a.yaml").release == release


def test_workers_that_a_loop_starts_are_read() -> None:
    """github.com/ai-dynamo/aiconfigurator generator/config/backend_templates/vllm/run.sh.j2, filled in."""
    text = (
        'export MODEL_PATH=${MODEL_PATH:-"meta-llama/Llama-3.1-70B"}\nAGG_GPU=4\nAGG_WORKERS=2\n'
        "for ((w=0; w<AGG_WORKERS; w++)); do\n  BASE=$(( w * AGG_GPU ))\n"
        "  GPU_LIST=$(seq -s, $BASE $((BASE+AGG_GPU-1)))\n  (\n"
        "    CUDA_VISIBLE_DEVICES=$GPU_LIST python3 -m dynamo.vllm \\\n"
        '    --model "$MODEL_PATH" --tensor-parallel-size 4 --max-num-seqs 64 2>&1 | sed "s/^/[Worker $w] /" ) &\n'
        "done\nwait\n"
    )
    one = read_launch(text, "run.sh", {})
    assert (one.values["model"], one.values["tp"], one.values["max_sequences"]) == ("meta-llama/Llama-3.1-70B", 4, 64)
    assert "the first of 2 servers that the script starts" in one.assumed


def test_workers_of_two_pools_in_one_script_are_both_pools(tmp_path: Path) -> None:
    """A script that starts workers for prompts and workers that decode is one deployment of both."""
    (tmp_path / "run.sh").write_text(
        "export MODEL_PATH=meta-llama/Llama-3.1-70B\n"
        'for ((w=0; w<3; w++)); do\n  python3 -m dynamo.vllm --model "$MODEL_PATH" --tensor-parallel-size 2 '
        "--disaggregation-mode prefill --max-num-batched-tokens 8192 &\ndone\n"
        'for ((w=0; w<2; w++)); do\n  python3 -m dynamo.vllm --model "$MODEL_PATH" --tensor-parallel-size 4 '
        "--disaggregation-mode decode --max-num-seqs 256 &\ndone\nwait\n"
    )
    one = import_server(tmp_path / "run.sh")
    pools = {key: one.values[key] for key in ("tp", "dp", "prefill_workers", "prefill_tp", "max_batched_tokens")}
    assert pools == {"tp": 4, "dp": 2, "prefill_workers": 3, "prefill_tp": 2, "max_batched_tokens": 8192}
    assert one.num_devices == 14
