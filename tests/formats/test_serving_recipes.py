"""Settings without a launch line: what an orchestrator, a chart or an operator makes of them is what is served."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from command_line import run
from shardwise.errors import InputError
from shardwise.formats import import_server

POD = "{containers: [{name: main, command: [%s], args: [%s]}]}"
# Facts of files in public repositories -> what they start, and on how many devices.
RECIPES: dict[str, tuple[str, dict[str, Any], int]] = {
    # SemiAnalysisAI/InferenceX benchmarks/multi_node/srt-slurm-recipes/sglang/dsr1/b200-fp4/1k1k/disagg/mtp
    "srt-slurm, flags of SGLang": (
        "name: a\nmodel: {path: dsr1, container: c, precision: fp4}\n"
        "resources: {gpu_type: b200, prefill_nodes: 1, prefill_workers: 1, decode_nodes: 5, decode_workers: 5}\n"
        "backend:\n  prefill_environment: {A: '1'}\n  sglang_config:\n    prefill:\n"
        "      served-model-name: deepseek-ai/DeepSeek-R1\n      quantization: modelopt_fp4\n"
        "      disaggregation-mode: prefill\n      tensor-parallel-size: 4\n      data-parallel-size: 4\n"
        "      expert-parallel-size: 4\n      enable-dp-attention: true\n      disable-radix-cache: true\n"
        "    decode:\n      served-model-name: deepseek-ai/DeepSeek-R1\n      quantization: modelopt_fp4\n"
        "      tensor_parallel_size: 8\n      expert-parallel-size: 8\n      enable-dp-attention: false\n"
        "      kv-cache-dtype: fp8_e4m3\n      max-running-requests: 512\n",
        {"engine": "sglang", "model": "deepseek-r1", "weights": "nvfp4", "tp": 8, "dp": 5, "ep": 8, "prefill_tp": 1,
         "prefill_ep": 4, "prefill_workers": 1, "kv_cache": "fp8", "max_sequences": 512},
        44,
    ),
    # the same repository, .../vllm/deepseek-v4/agentic/disagg-gb200-2p1d-dep8-dep12-c576-mtp2-agentic.yaml
    "srt-slurm, flags of vLLM": (
        "name: a\nmodel: {path: pro, precision: fp4}\nidentity: {model: {repo: deepseek-ai/DeepSeek-V4-Pro}}\n"
        "resources: {prefill_nodes: 4, prefill_workers: 2, decode_nodes: 3, decode_workers: 1, gpus_per_node: 4}\n"
        "backend:\n  type: vllm\n  vllm_config:\n    prefill: {tensor-parallel-size: 1, data-parallel-size: 8, "
        "enable-expert-parallel: true}\n    decode: {data-parallel-size: 12, enable-expert-parallel: true, "
        "max-num-seqs: 64, speculative-config: '{\"method\":\"mtp\",\"num_speculative_tokens\":3}'}\n",
        {"model": "deepseek-ai/DeepSeek-V4-Pro", "dp": 12, "ep": 12, "max_sequences": 64, "prefill_ep": 8,
         "speculative_method": "mtp", "num_speculative_tokens": 3, "prefill_workers": 2},
        28,
    ),
    # the same repository, .../trtllm/deepseek-v4, whose options are a file that srt-slurm writes
    "srt-slurm, options of TensorRT-LLM": (
        "model: {path: nvidia/DeepSeek-R1-FP4, precision: fp4}\nresources: {agg_nodes: 1, agg_workers: 1}\n"
        "backend:\n  type: trtllm\n  trtllm_config:\n    aggregated:\n      tensor_parallel_size: 8\n"
        "      moe_expert_parallel_size: 8\n      max_batch_size: 64\n      cuda_graph_config: null\n"
        "      kv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.8}\n",
        {"model": "nvidia/DeepSeek-R1-FP4", "tp": 8, "ep": 8, "captured_sequences": 0, "memory_fraction": 0.8},
        8,
    ),
    # vllm-project/production-stack tutorials/assets/values-16-disagg-prefill.yaml, with degrees
    "values of vLLM production-stack": (
        "servingEngineSpec:\n  modelSpec:\n  - name: p\n    modelURL: meta-llama/Llama-3.1-8B-Instruct\n"
        "    replicaCount: 3\n    vllmConfig: {enablePrefixCaching: false, maxModelLen: 32000}\n"
        "    lmcacheConfig: {enabled: true, enablePD: true, kvRole: kv_producer}\n"
        "  - name: d\n    modelURL: meta-llama/Llama-3.1-8B-Instruct\n    replicaCount: 2\n"
        "    vllmConfig: {maxModelLen: 32000, tensorParallelSize: 2, gpuMemoryUtilization: 0.8, "
        "extraArgs: [--quantization, fp8]}\n    lmcacheConfig: {enablePD: true, kvRole: kv_consumer}\n",
        {"tp": 2, "dp": 2, "prefill_workers": 3, "prefill_tp": 1, "max_context": 32000, "memory_fraction": 0.8,
         "weights": "fp8", "engine": "vllm"},
        7,
    ),
    # vllm-project/aibrix samples/disaggregation/vllm/replica.yaml: roles of a set, as often as the set
    "roles of an operator of its own": (
        "kind: StormService\nspec:\n  replicas: 2\n  template:\n    spec:\n      roles:\n"
        + "".join(
            f"      - name: {role}\n        replicas: {copies}\n        template: {{spec: {POD % started}}}\n"
            for role, copies, started in (
                ("prefill", 3, ("sh, -c", "'vllm serve Qwen/Qwen3-8B'")),
                ("decode", 1, ("sh, -c", "'vllm serve Qwen/Qwen3-8B -tp 2'")),
            )
        ),
        {"model": "Qwen/Qwen3-8B", "tp": 2, "dp": 2, "prefill_workers": 6},
        10,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_settings_start_what_their_orchestrator_makes_of_them(name: str, tmp_path: Path) -> None:
    """Each pool has the flags, the variables and the copies that its orchestrator gives to the engine."""
    text, expected, devices = RECIPES[name]
    (tmp_path / "a.yaml").write_text(text)
    found = import_server(str(tmp_path / "a.yaml"))
    assert {key: found.values.get(key) for key in expected} == expected
    assert found.num_devices == devices and not found.unknown


def test_a_recipe_says_its_lengths_and_the_type_of_its_checkpoint(tmp_path: Path) -> None:
    """Weights have the recipe's type where the model is stored otherwise; its benchmark is left to the question."""
    recipe = "model: {path: deepseek-ai/DeepSeek-R1, precision: %s}\nresources: {agg_workers: 1}\n"
    recipe += "backend:\n  type: vllm\n  vllm_config:\n    aggregated: {tensor-parallel-size: 8}\n"
    for precision, weights in (("fp4", "nvfp4"), ("fp8", None), ("bf16", "bf16")):
        (tmp_path / "a.yaml").write_text(recipe % precision + "benchmark: {isl: 1024, osl: 8}\n")
        found = import_server(str(tmp_path / "a.yaml"))
        assert found.values.get("weights") == weights
        assert any("--input-tokens 1024 --output-tokens 8" in note for note in found.assumed)


def test_variables_of_kubernetes_are_the_container_s(tmp_path: Path) -> None:
    """$(NAME) is a variable of the container, and one that is filled elsewhere is asked for by its name."""
    head = "kind: ClusterServingRuntime\nspec:\n  containers:\n  - name: a\n    env: [{name: TP, value: '4'}]\n"
    line = "    command: [python3, -m, sglang.launch_server]\n    args: [--model-path, $(MODEL_PATH), --tp, $(TP)]\n"
    shell = (
        "    command: [sh, -c]\n    args: ['python3 -m sglang.launch_server --model-path $(MODEL_PATH) --tp $(TP)']\n"
    )
    for started in (line, shell):
        (tmp_path / "a.yaml").write_text(head + started)
        found = import_server(str(tmp_path / "a.yaml"))
        assert found.values["tp"] == 4 and "--set MODEL_PATH=VALUE" in found.assumed[0]
        told = import_server(str(tmp_path / "a.yaml"), {"MODEL_PATH": "meta-llama/Llama-3.1-8B"})
        assert told.values["model"] == "meta-llama/Llama-3.1-8B"


def test_servers_beside_the_first_are_said(tmp_path: Path) -> None:
    """A file that starts several deployments is read as the first, and names the others."""
    one = "kind: Deployment\nspec: {template: {spec: %s}}\n"
    started = [one % (POD % ("vllm, serve", name)) for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B")]
    (tmp_path / "a.yaml").write_text("---\n".join(started))
    found = import_server(str(tmp_path / "a.yaml"))
    assert found.values["model"] == "Qwen/Qwen3-8B"
    assert found.assumed == ("the first of 2 servers that the file starts; 1 left out: Qwen/Qwen3-32B",)


def test_a_batch_is_asked_of_the_pool_that_decodes(tmp_path: Path) -> None:
    """`infer` has one pool: that which decodes, on its own devices; `import` goes on with what answers for both."""
    text, _, _ = RECIPES["values of vLLM production-stack"]
    (tmp_path / "a.yaml").write_text(text)
    asked = ("--from", str(tmp_path / "a.yaml"), "--on", "h100", "--input-tokens", "500", "--output-tokens", "20")
    told = run("infer", *asked, "--json").tree
    assert told["cluster"]["num_devices"] == 4 and (told["plan"]["tp"], told["plan"]["dp"]) == (2, 2)
    assert any("the 4 of its 7 devices that decode" in note for note in told["assumptions"])
    assert "on 7 x h100" in run("serve", *asked, "--rate", "2/s", "--requests", "50").out
    assert "shardwise serve" in run("import", str(tmp_path / "a.yaml")).out


def test_a_file_of_which_nothing_is_followed_is_refused(tmp_path: Path) -> None:
    """Words without effect make no file of a trainer: values of a chart were read as settings of accelerate."""
    silent = "".join(f"  SERVER_{i}: x\n" for i in range(16))
    (tmp_path / "values.yaml").write_text(f"environment:\n{silent}ngcApiKeySecretName: a\n")
    done = run("import", str(tmp_path / "values.yaml"))
    assert done.status == 2 and "has no setting of a system that is read" in done.err


# Words of a prefill worker behind its model -> the workers, their degrees, and the devices of two such servers.
PREFILL: tuple[tuple[str, tuple[int, int, int | None], int], ...] = (
    ("vllm serve Qwen/Qwen3-8B -tp 2", (2, 2, None), 4),
    ("vllm serve Qwen/Qwen3-8B -tp 2 -dp 3", (6, 2, None), 12),
    ("vllm serve Qwen/Qwen3-30B-A3B -dp 4 -ep", (2, 1, 4), 8),
    ("vllm serve Qwen/Qwen3-30B-A3B -dp 4", (2, 1, 4), 8),
    ("vllm serve Qwen/Qwen3-30B-A3B -tp 4", (2, 4, 1), 8),
    (
        "python3 -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B --tp 4 --dp 4 --enable-dp-attention",
        (2, 1, 4),
        8,
    ),
    ("python3 -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B --tp 4 --dp 2", (4, 4, 1), 16),
)


@pytest.mark.parametrize(("words", "expected", "devices"), PREFILL)
def test_a_worker_for_prompts_has_all_its_devices(
    words: str, expected: tuple[int, int, int | None], devices: int, tmp_path: Path
) -> None:
    """Replicas are workers of their own, groups of attention that share experts are one: none of them is lost."""
    pods = ((words, "prefill", 2), (words.split(" -")[0] if "vllm" in words else words, "decode", 1))
    roles = "".join(
        f"  - name: {role}\n    replicas: {copies}\n    template: {{spec: {POD % ('sh, -c', repr(line))}}}\n"
        for line, role, copies in pods
    )
    (tmp_path / "a.yaml").write_text(f"kind: RoleBasedGroup\nspec:\n  roles:\n{roles}")
    found = import_server(str(tmp_path / "a.yaml"))
    assert tuple(found.values.get(f"prefill_{name}") for name in ("workers", "tp", "ep")) == expected
    decode = found.values["tp"] * found.values["pp"] * found.values.get("dp", 1)
    assert found.num_devices - decode == devices
    asked = ("--from", str(tmp_path / "a.yaml"), "--on", "h200", "--rate", "1/s", "--requests", "20", "--json")
    assert run("serve", *asked, "--output-tokens", "5").status in (0, 1)


def test_prompts_have_the_steps_of_their_own_pool(tmp_path: Path) -> None:
    """A pool that decodes has steps of few tokens, in which prompts would take many times as long."""
    recipe = "model: {path: Qwen/Qwen3-8B}\nresources: {prefill_workers: 1, decode_workers: 1}\n"
    recipe += "backend:\n  type: vllm\n  vllm_config:\n    prefill: {%s}\n    decode: {max-num-batched-tokens: 256}\n"
    (tmp_path / "a.yaml").write_text(recipe % "max-num-batched-tokens: 8192, kv-cache-dtype: fp8")
    found = import_server(str(tmp_path / "a.yaml"))
    assert found.values["max_batched_tokens"] == 8192 and "kv_cache" not in found.values
    assert any("of the pool for prompts kv_cache fp8: not taken" in note for note in found.assumed)
    (tmp_path / "a.yaml").write_text(recipe % "kv-cache-dtype: auto")
    assert "max_batched_tokens" not in import_server(str(tmp_path / "a.yaml")).values


ODD = ("null", "[]", "{}", "-1", "1e400", "nan", '""', "[[1]]", "{a: {b: 1}}", "$(X)", "9" * 20)


@pytest.mark.parametrize("name", RECIPES)
def test_mistakes_in_a_recipe_are_bad_input(name: str, tmp_path: Path) -> None:
    """Any word of a recipe in place of another, or gone, gives a server or an error with its remedy."""
    text, drawn = RECIPES[name][0], random.Random(name)
    words = list(re.finditer(r"[\w./-]+", text))
    for _ in range(120):
        word, odd = drawn.choice(words), drawn.choice(ODD)
        (tmp_path / "a.yaml").write_text(text[: word.start()] + odd + text[word.end() :])
        try:
            import_server(str(tmp_path / "a.yaml"))
        except InputError as error:
            assert all(problem.remedy for problem in error.problems)


_PAGE = """
model:
  model_id: "meta-llama/Llama-3.1-70B-Instruct"
  min_vllm_version: "0.18.0"
  base_args: ["--max-model-len", "32768"]
features:
  reasoning: {args: ["--reasoning-parser", "x"]}
  long: {args: ["--max-num-seqs", "64"]}
opt_in_features: [long]
variants:
  default: {precision: bf16, vram_minimum_gb: 160}
  fp8: {model_id: "RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8", tp: {h200: 1, default: 2}, extra_args: ["--kv-cache-dtype", "fp8"]}
compatible_strategies: [single_node_tp, single_node_dep, pd_cluster]
strategy_overrides: {single_node_dep: {extra_args: ["--max-num-batched-tokens", "16384"]}}
hardware_overrides:
  blackwell: {extra_args: ["--max-num-seqs", "512"]}
guide: |
  ## Overview

  model_id: none of this is read
"""  # noqa: E501


@pytest.mark.parametrize(
    ("chosen", "asked", "values", "devices"),
    [
        ({}, 8, {"tp": 8, "max_context": 32768, "max_sequences": None}, 8),
        ({}, 0, {"tp": 1}, 0),
        ({"STRATEGY": "single_node_dep"}, 4, {"tp": 1, "dp": 4, "max_batched_tokens": 16384}, 4),
        ({"VARIANT": "fp8"}, 8, {"tp": 2, "kv_cache": "fp8"}, 2),
        ({"VARIANT": "fp8", "HARDWARE": "h200"}, 8, {"tp": 1}, 1),
        ({"HARDWARE": "blackwell"}, 8, {"tp": 8, "max_sequences": 512}, 8),
    ],
)
def test_recipes_of_vllm_are_the_command_of_their_page(
    chosen: dict[str, str], asked: int, values: dict[str, object], devices: int, tmp_path: Path
) -> None:
    """Arguments of model, variant, strategy and hardware, spread over the devices that are asked for."""
    (tmp_path / "a.yaml").write_text(_PAGE)
    one = import_server(tmp_path / "a.yaml", chosen, asked)
    assert {key: one.values.get(key) for key in values} == values
    assert one.num_devices == devices


def test_what_a_recipe_of_vllm_does_not_have_is_refused(tmp_path: Path) -> None:
    """Variants and strategies are the recipe's own; a cluster of two pools is no strategy of one degree."""
    (tmp_path / "a.yaml").write_text(_PAGE)
    with pytest.raises(InputError) as error:
        import_server(tmp_path / "a.yaml", {"VARIANT": "int4", "STRATEGY": "pd_cluster"})
    assert [problem.value for problem in error.value.problems] == ["VARIANT=int4", "STRATEGY=pd_cluster"]
    (tmp_path / "b.yaml").write_text(_PAGE.replace("[single_node_tp, single_node_dep, pd_cluster]", "[]"))
    with pytest.raises(InputError, match="strategy"):
        import_server(tmp_path / "b.yaml")


def test_images_for_rocm_start_vllm_too(tmp_path: Path) -> None:
    """AMD's own image has the same entry point."""
    (tmp_path / "run.sh").write_text("docker run vllm/vllm-openai-rocm:v0.20.2 meta-llama/Llama-3.1-8B -tp 2\n")
    one = import_server(tmp_path / "run.sh")
    assert (one.values["tp"], one.release) == (2, "0.20.2")


_RAY = """applications:
- name: llms
  import_path: ray.serve.llm:build_openai_app
  args:
    llm_configs:
    - model_loading_config: {model_id: qwen, model_source: Qwen/Qwen3-30B-A3B}
      accelerator_type: H100
      engine_kwargs: {tensor_parallel_size: 2, enable_expert_parallel: true, enable_prefix_caching: false, max_model_len: 8192}
      deployment_config:
        autoscaling_config: {min_replicas: 1, max_replicas: 4}
"""  # noqa: E501
_POOLS = """applications:
- args:
    prefill_config: &one
      model_loading_config: {model_id: meta-llama/Llama-3.1-8B}
      engine_kwargs: {tensor_parallel_size: 2, kv_transfer_config: {kv_connector: NixlConnector, kv_role: kv_both}}
    decode_config:
      model_loading_config: {model_id: meta-llama/Llama-3.1-8B}
      deployment_config: {num_replicas: 3}
"""
_SERVICE = """apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: a}
spec:
  predictor:
    minReplicas: 2
    model:
      modelFormat: {name: huggingface}
      args: [--model_name=llama3, --model_id=meta-llama/Llama-3.1-8B, --backend=vllm, --max-model-len=4096, --dtype, bfloat16]
"""  # noqa: E501


@pytest.mark.parametrize(
    ("text", "values", "devices"),
    [
        (_RAY, {"model": "Qwen/Qwen3-30B-A3B", "tp": 2, "dp": 4, "ep": 2, "engine": "vllm", "max_context": 8192}, 8),
        ("kind: RayService\nspec:\n  serveConfigV2: |\n" + re.sub("(?m)^", "    ", _RAY), {"tp": 2, "dp": 4}, 8),
        (_RAY.replace("accelerator_type", "server_cls: sglang:build_app\n      accelerator_type").replace(
            ", enable_expert_parallel: true, enable_prefix_caching: false, max_model_len: 8192", ", ep_size: 2"
        ), {"engine": "sglang", "tp": 2, "ep": 2}, 8),
        (_POOLS, {"tp": 1, "dp": 3, "prefill_workers": 1, "prefill_tp": 2}, 5),
        (_SERVICE, {"model": "meta-llama/Llama-3.1-8B", "tp": 1, "dp": 2, "max_context": 4096, "weights": "bf16"}, 2),
        (_SERVICE.replace("    model:\n", "    workerSpec: {tensorParallelSize: 4, pipelineParallelSize: 2}\n    model:\n"),  # noqa: E501
         {"tp": 4, "pp": 2, "dp": 2}, 16),
        (_SERVICE.replace("--model_id=meta-llama/Llama-3.1-8B, ", "").replace(
            "modelFormat", "storageUri: hf://meta-llama/Llama-3.1-8B\n      modelFormat"
        ), {"model": "meta-llama/Llama-3.1-8B"}, 2),
    ],
)  # fmt: skip
def test_what_operators_start_is_what_their_settings_say(
    text: str, values: dict[str, Any], devices: int, tmp_path: Path
) -> None:
    """Ray Serve's configurations, alone and in a RayService, and KServe's services of Hugging Face's models."""
    (tmp_path / "a.yaml").write_text(text)
    one = import_server(tmp_path / "a.yaml")
    assert {key: one.values.get(key, 1) for key in values} == values
    assert one.num_devices == devices


def test_a_service_of_transformers_own_generation_is_refused(tmp_path: Path) -> None:
    """Hugging Face's backend of KServe is no engine that is known."""
    (tmp_path / "a.yaml").write_text(_SERVICE.replace("backend=vllm", "backend=huggingface"))
    with pytest.raises(InputError, match="starts no engine that is known"):
        import_server(tmp_path / "a.yaml")


def test_an_image_beside_kserve_s_own_command_is_a_release(tmp_path: Path) -> None:
    """A container that names an image alone is started by the template's command."""
    spec = "spec:\n  model: {uri: 'hf://meta-llama/Llama-3.1-8B'}\n  parallelism: {tensor: 2}\n  template:\n"
    pod = "    containers: [{name: main, image: 'vllm/vllm-openai:v0.11.0'}]\n"
    (tmp_path / "a.yaml").write_text("kind: LLMInferenceService\n" + spec + pod)
    one = import_server(tmp_path / "a.yaml")
    assert (one.values["model"], one.values["tp"], one.release) == ("meta-llama/Llama-3.1-8B", 2, "0.11.0")
