"""Which engine, batch and model a row of an inference file means where it does not say so itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from accuracy.published import completed, documented, padded, with_limit
from accuracy.trtllm_bench import tuned
from measured_rows import INFERENCE
from measured_rows import published as only
from shardwise.errors import InputError
from shardwise.hardware import find_device
from shardwise.measured import Comparison, Record
from shardwise.measured._load import workload_of
from shardwise.models import Model
from shardwise.serving.load import limits_of

BATCH = {**INFERENCE, "metric": "batch_latency", "engine_version": ""}


def said(row: Comparison) -> str:
    """Return everything that was assumed for a row."""
    return "; ".join(row.assumed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"engine": "vllm"}, "before V1"),
        ({"engine": "vllm", "device": "mi300x"}, "before V1"),
        (
            {"engine": "vllm", "citation": "github:mlc-ai/llm-perf-bench@d401356f README.md line 59"},
            "0.2, as documented",
        ),
        ({"engine": "trtllm"}, "examples/run.py up to 0.11"),
    ],
)
def test_fixed_batches_without_a_version_are_of_their_time(tmp_path: Path, changed: dict[str, str], words: str) -> None:
    """A fixed batch of an engine whose version is not stated is one of 2024, and the row says so."""
    found = only(tmp_path, {**BATCH, **changed})
    assert found.status == "predicted", found.reason
    assert words in said(found)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"engine": "", "weight_dtype": ""}, "neither is the precision"),
        ({"engine": "megatron-lm"}, "is not an engine that is modelled"),
        ({"device": "intel-max-1550"}, "oneAPI"),
        ({"engine": "llama.cpp", "device": "mi300x"}, "were not measured"),
        ({"metric": "ttft_min"}, "one prompt alone"),
        ({"metric": "tpot", "serving_mode": "online", "concurrency": "4096"}, "are more than its cache holds"),
    ],
)
def test_what_is_not_stated_or_not_modelled_is_refused(tmp_path: Path, changed: dict[str, str], reason: str) -> None:
    """Nothing is guessed of an engine nobody names or that others build, of other metrics, or of queues not stated."""
    found = only(tmp_path, {**BATCH, **changed})
    assert (found.status, reason in found.reason) == ("refused", True), found.reason


def test_a_full_cache_bounds_the_tokens_of_users_that_it_does_not_hold(tmp_path: Path) -> None:
    """Four times as many users as find room are served as fast as twice as many: the others wait their turn."""
    online = {**BATCH, "metric": "output_tokens_per_second", "value": "3000", "serving_mode": "online", "batch": "",
              "device": "rtx-4090", "input_tokens": "2048", "output_tokens": "256"}  # fmt: skip
    many, most = (only(tmp_path, {**online, "concurrency": users}) for users in ("48", "96"))
    assert (many.status, most.status) == ("predicted", "predicted"), (many.reason, most.reason)
    assert most.predicted == pytest.approx(many.predicted, rel=0.05)
    waiting = only(tmp_path, {**online, "metric": "tpot", "value": "0.05", "concurrency": "96"})
    assert "are more than its cache holds" in waiting.reason


def test_users_beyond_the_requests_of_a_run_never_ask() -> None:
    """A client with 1,024 places and 400 prompts has 400 requests in flight, not 1,024."""
    cells = {"concurrency": "1024", "input_tokens": "2048", "output_tokens": "512", "serving_mode": "online"}
    asked = workload_of(Record({**cells, "notes": "num_requests=400; lengths=fixed"}), 1, 8192)
    assert (asked.arrivals.users, asked.count) == (400, 400)


def test_the_engine_alone_or_the_precision_alone_is_enough(tmp_path: Path) -> None:
    """A row that says one of both is predicted with what is taken for the other."""
    for silent in ({"engine": ""}, {"weight_dtype": ""}):
        assert only(tmp_path, {**BATCH, **silent}).status == "predicted"


def test_a_batch_of_requests_beyond_the_model_s_context_ran(tmp_path: Path) -> None:
    """What was measured ran, whatever context the model states, and the row says so; who is sent away runs again."""
    long = {**BATCH, "model": "llama-2-70b", "device": "a100-sxm-40gb", "num_gpus": "4", "tp": "4", "batch": "24",
            "input_tokens": "2048", "output_tokens": "2560"}  # fmt: skip
    found = only(tmp_path, long)
    assert found.status == "predicted", found.reason
    assert "beyond the 4096 that the model states" in said(found)


def test_a_stated_version_decides(tmp_path: Path) -> None:
    """TensorRT-LLM 0.9 is slower than 1.0 for grouped heads at long context."""
    row = {**BATCH, "engine": "trtllm", "batch": "64", "input_tokens": "4096"}
    old, new = (only(tmp_path, {**row, "engine_version": version}).predicted for version in ("0.9", "1.0"))
    assert old > 1.05 * new


@pytest.mark.parametrize(
    ("version", "untuned"), [("", False), ("0.6.0", True), ("rocm6.3.1_py3.12_vllm_0.6.6", False), ("0.7.3", False)]
)
def test_products_of_the_first_image_for_rocm_are_those_of_its_release(
    tmp_path: Path, version: str, untuned: bool
) -> None:
    """Only vLLM up to 0.6.1, which its repository builds without tuned products, runs at a twentieth of an MI300X."""
    row = {**BATCH, "device": "mi300x", "input_tokens": "2048", "output_tokens": "1", "batch": "16"}
    found = only(tmp_path, {**row, "engine_version": version})
    tuned = only(tmp_path, {**row, "engine_version": "0.6.6"})
    assert (found.predicted > 3 * tuned.predicted) == untuned
    assert found.predicted >= tuned.predicted


def test_a_source_may_document_the_release_of_some_of_its_rows(tmp_path: Path) -> None:
    """LLM-Inference-Bench names vLLM 0.6.1 for AMD devices, and its other rows stay without a version."""
    row = {**BATCH, "citation": "github:argonne-lcf/LLM-Inference-Bench@4211f5d4 Plots/All_results.csv row 1"}
    assert "engine_version: 0.6.1, as documented" in said(only(tmp_path, {**row, "device": "mi300x"}))
    assert "as documented" not in said(only(tmp_path, row))


def test_recipes_say_what_a_table_of_runs_leaves_out() -> None:
    """What holds for all runs of a collection is read beside what the recipe of a model says."""
    row = {
        "citation": "aiconfigurator silicon_sample.csv id x", "notes": "origin=db-dump", "engine": "sglang",
        "model": "qwen3.5-397b-a17b", "device": "b300", "weight_dtype": "nvfp4", "concurrency": "16",
    }  # fmt: skip
    few, many = (documented(row["citation"], {**row, "concurrency": users})[0] for users in ("8", "16"))
    assert "scheduler_recv_interval=10" in few["notes"]
    assert "scheduler_recv_interval=30" in many["notes"]
    assert few["kv_dtype"] == "fp8"
    assert "lengths=0.8 to 1" in few["notes"]
    assert documented(row["citation"], {**row, "notes": "origin=sweep"}) == ({}, "")


@pytest.mark.parametrize(
    ("cells", "citation", "layout"),
    [
        ({"device": "h100-sxm-80gb"}, "c4_tp4_ep4_1357", ("4", "4", "1")),
        ({"device": "b300", "ep": "2", "attention_dp": "2"}, "fp8_agg_1024x1024_c512_cfg735", ("2", "2", "1")),
        ({"device": "b300"}, "minimaxm2_5_b300_vllm_fp4_agg_1024x1024_c64_cfg729", ("4", "4", "1")),
        ({"device": "b300"}, "minimaxm2_5_b300_vllm_fp4_agg_1024x1024_c512_cfg727", ("1", "4", "4")),
        ({"device": "h200-sxm-141gb", "tp": "8", "ep": "1", "attention_dp": "1"}, "c4_tp8_ep1", ("8", "8", "1")),
    ],
)
def test_layouts_of_a_benchmark_are_those_that_its_scripts_launch(
    cells: dict[str, str], citation: str, layout: tuple[str, ...]
) -> None:
    """MiniMax-M2.5 ran in tensor and expert parallelism, with data-parallel attention where a script has it alone."""
    row = {
        "citation": f"aiconfigurator silicon_sample.csv id {citation}", "engine": "vllm", "engine_version": "0.18.0",
        "serving_mode": "online", "model": "minimax-m2.5", "tp": "1", "ep": "4", "attention_dp": "4",
        "weight_dtype": "nvfp4" if "fp4" in citation else "fp8_block", "notes": "",
    } | cells  # fmt: skip
    record = completed(Record(row))
    assert tuple(record.text(name) for name in ("tp", "ep", "attention_dp")) == layout


def test_a_quantity_that_its_source_says_is_another_one_is_refused() -> None:
    """What inference-perf prints a token is of chunks, which hold several."""
    row = {"citation": "kubernetes-sigs/inference-perf demos/kubecon-na-2025", "metric": "tpot", "notes": ""}
    with pytest.raises(InputError, match="hold several tokens each"):
        completed(Record(row))
    assert completed(Record({**row, "metric": "ttft"})).text("metric") == "ttft"


@pytest.mark.parametrize(
    ("engine", "device", "length", "batch"),
    [
        ("vllm", "h100-sxm-80gb", 4096, (8192, 1024)),
        ("vllm", "a100-sxm-80gb", 4096, (2048, 256)),
        ("vllm-v0", "h100-sxm-80gb", 1024, (2048, 256)),
        ("vllm-v0", "h100-sxm-80gb", 8192, (8192, 256)),
        ("vllm-v0", "h100-sxm-80gb", 131072, (2048, 256)),
        ("sglang", "h100-sxm-80gb", 4096, (0, 256)),
    ],
)
def test_engines_set_memory_aside_for_a_batch_of_their_time(
    engine: str, device: str, length: int, batch: tuple[int, int]
) -> None:
    """Tokens and sequences of the run that vLLM measures its memory with are those of its version and device."""
    limits = limits_of(engine, find_device(device).device)
    assert (limits.tokens(length), limits.set_aside) == batch


def test_logs_whose_notebook_states_a_rank_hold_its_adapters(tmp_path: Path) -> None:
    """The rank of the adapters stands in the notebook that the log is from, not in the log."""
    row = {**INFERENCE, "metric": "weights_bytes_per_gpu", "serving_mode": "memory_log", "notes": "lora_possible=1"}
    without = only(tmp_path, row)
    found = only(tmp_path, {**row, "citation": "github:unslothai/notebooks@bdda2efc nb/Llama3.1_(8B)-GRPO.ipynb"})
    assert "lora_rank=32" in said(found)
    assert found.predicted > 1.005 * without.predicted


def test_a_batch_that_the_cache_does_not_hold_waits(tmp_path: Path) -> None:
    """A batch twice as large as what the cache holds takes about twice as long, and the row says how many run."""
    row = {**BATCH, "engine_version": "0.10.0", "input_tokens": "2048", "output_tokens": "2048"}
    some, twice = (only(tmp_path, {**row, "batch": batch}) for batch in ("400", "800"))
    assert "the cache does not hold the batch" in said(some)
    assert twice.predicted / some.predicted == pytest.approx(2, rel=0.1)


def test_a_batch_that_waits_ran(tmp_path: Path) -> None:
    """A batch that was measured fits where there is room for one request; asked whether it fits, all must."""
    large = {**BATCH, "batch": "4096"}
    assert only(tmp_path, large).fits is True
    asked = only(tmp_path, {**large, "metric": "fits", "value": "0"})
    assert (asked.fits, asked.predicted) == (False, 0.0)


def test_first_tokens_wait_for_room(tmp_path: Path) -> None:
    """In a batch twice as large as the cache holds half wait a batch, for the mean first token half of it."""
    row = {**BATCH, "engine_version": "0.10.0", "input_tokens": "2048", "output_tokens": "2048"}
    held = int(said(only(tmp_path, {**row, "batch": "900"})).split("up to ")[1].split(" ")[0])
    first, whole = (
        only(tmp_path, {**row, "batch": str(2 * held), "metric": metric}).predicted
        for metric in ("ttft", "batch_latency")
    )
    alone = only(tmp_path, {**row, "batch": str(held // 2), "metric": "ttft"}).predicted
    assert whole / 4 < first < whole / 4 + 3 * alone
    rate = only(tmp_path, {**row, "batch": str(2 * held), "metric": "output_tokens_per_second"}).predicted
    assert rate == pytest.approx(2 * held * 2048 / whole)


def test_full_queues_run_on_small_replicas_where_no_layout_is_stated(tmp_path: Path) -> None:
    """Eight devices that are all a source names run eight replicas of a small model, and one of a large one."""
    row = {**INFERENCE, "metric": "output_tokens_per_second", "serving_mode": "offline_throughput", "batch": ""}
    row |= {"engine": "trtllm", "engine_version": "1.0", "output_tokens": "512", "num_gpus": "8", "tp": "", "dp": ""}
    small = only(tmp_path, row)
    assert "replicas of tp 1" in said(small)
    assert small.predicted > 1.5 * only(tmp_path, {**row, "tp": "8"}).predicted
    assert "replicas" not in said(only(tmp_path, {**row, "model": "llama-3.1-405b"}))


def test_turbomind_has_an_engine_of_its_own(tmp_path: Path) -> None:
    """LMDeploy's batches are not those of TensorRT-LLM's examples of 2024."""
    found = only(tmp_path, {**BATCH, "engine": "lmdeploy", "device": "a100-sxm-80gb"})
    assert "examples/run.py" not in said(found)


def test_a_full_queue_keeps_every_stage_at_work(tmp_path: Path) -> None:
    """Four stages of a pipeline generate nearly four times what one device does, from a full queue."""
    row = {**INFERENCE, "metric": "output_tokens_per_second", "serving_mode": "offline_throughput", "batch": "",
           "engine": "trtllm", "engine_version": "1.0", "output_tokens": "1024"}  # fmt: skip
    one = only(tmp_path, {**row, "batch": "64"}).predicted
    four = only(tmp_path, {**row, "batch": "256", "num_gpus": "4", "pp": "4"}).predicted
    assert four / one == pytest.approx(4, rel=0.25)


def test_nothing_generated_has_no_time_per_token(tmp_path: Path) -> None:
    """A row that asks for the time of tokens that are not generated is refused."""
    found = only(tmp_path, {**INFERENCE, "output_tokens": ""})
    assert (found.status, "nothing is generated" in found.reason) == ("refused", True)


@pytest.mark.parametrize(
    ("model", "ranks", "heads", "kv_heads"),
    [("llama-2-13b", 24, 48, 48), ("llama-3.1-70b", 24, 72, 8), ("llama-3.1-8b", 8, 32, 8)],
)
def test_heads_are_filled_up_to_the_ranks(model: str, ranks: int, heads: int, kv_heads: int) -> None:
    """Heads grow to the next multiple of the ranks; key-value heads only where ranks cannot share them."""
    mixer = padded(Model.load(model), ranks).layers[0].mixers[0]
    assert (mixer.heads, mixer.kv_heads) == (heads, kv_heads)


def test_neuron_cores_that_do_not_divide_the_heads_are_predicted(tmp_path: Path) -> None:
    """Neuron pads heads, so 24 cores serve a model of 40."""
    found = only(
        tmp_path,
        {**INFERENCE, "engine": "neuronx", "engine_version": "", "model": "llama-2-13b", "device": "inferentia2-core",
         "num_gpus": "24", "tp": "24"},
    )  # fmt: skip
    assert found.status == "predicted", found.reason
    assert "pads heads" in said(found)


def test_prompts_share_the_steps_of_tokens_where_engines_mix_them(tmp_path: Path) -> None:
    """In a closed loop a step of a prompt decodes too under vLLM, and stops decoding in SGLang."""
    row = {**INFERENCE, "metric": "tpot", "serving_mode": "online", "batch": "", "concurrency": "64",
           "input_tokens": "1024", "output_tokens": "128", "engine_version": "0.15"}  # fmt: skip
    mixed, apart = (only(tmp_path, {**row, "engine": engine}).predicted for engine in ("vllm", "sglang"))
    assert mixed < 0.95 * apart
    one = {**row, "concurrency": "1"}
    alone = [only(tmp_path, {**one, "engine": engine}).predicted for engine in ("vllm", "sglang")]
    assert alone[0] == pytest.approx(alone[1], rel=0.1)


def test_attention_groups_are_replicas_that_share_experts(tmp_path: Path) -> None:
    """Four groups of attention with experts over all of them keep a quarter of the experts and of the requests each."""
    row = {**INFERENCE, "model": "qwen3-30b-a3b", "num_gpus": "4", "tp": "1", "ep": "4", "attention_dp": "4",
           "batch": "32"}  # fmt: skip
    found = only(tmp_path, row)
    assert found.status == "predicted", found.reason
    assert "4 groups of attention" in said(found)
    shared = only(tmp_path, {**row, "metric": "weights_bytes_per_gpu"}).predicted
    alone = only(
        tmp_path, {**row, "metric": "weights_bytes_per_gpu", "attention_dp": "1", "ep": "1", "dp": "4"}
    ).predicted
    assert shared < 0.4 * alone


def test_attention_groups_that_are_not_counted_are_refused(tmp_path: Path) -> None:
    """A source that says attention is grouped but not how many groups share experts is refused, but with one rank."""
    row = {**INFERENCE, "model": "qwen3-30b-a3b"}
    grouped = {"notes": "attention_dp_enabled=1"}
    found = only(tmp_path, {**row, **grouped, "num_gpus": "4", "tp": "4"})
    assert (found.status, "attention_dp" in found.reason) == ("refused", True)
    for one in ({"num_gpus": "1", "tp": "1"}, {"num_gpus": "1", "tp": ""}, {"num_gpus": "4", "tp": "1", "pp": "4"}):
        assert only(tmp_path, {**row, **grouped, **one}).predicted == only(tmp_path, {**row, **one}).predicted


@pytest.mark.parametrize(("engine", "most"), [("trtllm", 4 * 2048), ("vllm", 1024)])
def test_a_pipeline_of_tensorrt_llm_runs_its_most_sequences_in_each_stage(
    engine: str, most: int, tmp_path: Path
) -> None:
    """A queue of short requests fills max_batch_size in every batch that four stages have at once."""
    row = {**INFERENCE, "engine": engine, "serving_mode": "offline_throughput", "metric": "output_tokens_per_second",
           "num_gpus": "4", "tp": "1", "pp": "4", "input_tokens": "64", "output_tokens": "32", "batch": "",
           "concurrency": ""}  # fmt: skip
    assert f"offline: {most} requests at once" in said(only(tmp_path, row))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"engine": "my-engine"}, "not an engine that is modelled: "),
        ({"serving_mode": "offline"}, "not a known mode: static"),
        ({"serving_mode": ""}, "serving_mode: is not stated"),
    ],
)
def test_a_word_that_is_not_known_is_answered_with_those_that_are(
    tmp_path: Path, changed: dict[str, str], says: str
) -> None:
    """A refused engine or mode lists what would have been read, and a blank cell is said to be blank."""
    assert says in only(tmp_path, {**INFERENCE, **changed}).reason


@pytest.mark.parametrize(("users", "sequences"), [("24", 4), ("84", 16), ("25", 0)])
def test_what_a_published_recipe_runs_at_once_is_known(users: str, sequences: int) -> None:
    """Decode workers of a recipe run as many sequences as it sets; of loads that no recipe has nothing is known."""
    row = {
        "serving_mode": "disaggregated", "engine": "trtllm", "model": "deepseek-v3", "device": "gb300", "tp": "8",
        "weight_dtype": "fp8_block", "input_tokens": "1024", "output_tokens": "1024", "attention_dp": "1",
        "num_prefill_workers": "1", "num_decode_workers": "4", "concurrency": users, "notes": "gemm_quant=fp8",
    }  # fmt: skip
    found = with_limit(Record(row))
    assert found.noted("max_num_seqs") == sequences
    assert any("srt-slurm" in note for note in found.assumed) == (sequences > 0)
    assert not with_limit(Record({**row, "serving_mode": "online"})).noted("max_num_seqs")


@pytest.mark.parametrize(
    ("changed", "sequences", "tokens"),
    [
        ({}, "640", "2048"),
        ({"output_tokens": "100"}, "1024", "11264"),
        ({"tp": "4", "num_gpus": "4", "pp": "2"}, "4096", "4096"),
        ({"notes": ""}, "", ""),
        ({"weight_dtype": "mxfp4"}, "", ""),
    ],
)
def test_trtllm_bench_sets_limits_by_the_lengths_of_its_requests(
    changed: dict[str, str], sequences: str, tokens: str
) -> None:
    """8 GB of fp8 weights leave 0.95 of 77 GB, 65,536 bytes a token: 557 requests of 2,000 tokens are 640 by 128s."""
    row = {
        "engine": "trtllm", "engine_version": "1.0", "weight_dtype": "fp8", "tp": "1", "pp": "1", "attention_dp": "",
        "input_tokens": "1000", "output_tokens": "1000", "notes": "limits=trtllm-bench",
    }  # fmt: skip
    device = find_device("h100-sxm-80gb").device
    found = tuned(Record({**row, **changed}), Model.load("llama-3.1-8b"), device)
    assert (found.text("batch"), found.text("max_num_batched_tokens")) == (sequences, tokens)
