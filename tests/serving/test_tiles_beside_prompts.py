"""What a sequence that decodes takes of FlashAttention 2 in a step with prompts: a tile for each of its query heads."""

import pytest

import shardwise as sw
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.serving import ServingOptions
from shardwise.serving.load import LoadOptions, StepTable, serve
from shardwise.serving.load._steps import runs_as_prompts


def table(model: str, cluster: str, job: Serving | None = None) -> tuple[StepTable, bool]:
    """Return the steps of vLLM for a model, and whether sequences that decode run the kernel of prompts there."""
    asked = job or Serving(input_tokens=512, output_tokens=64)
    case = sw.infer(sw.load_model(model), sw.Cluster.parse(cluster), Plan(), asked, ServingOptions(engine="vllm")).case
    return StepTable(case, 256, 2048, 4096), runs_as_prompts(case)


def test_every_query_head_has_a_tile_of_its_own_beside_a_prompt() -> None:
    """Heads that share keys and values read them together in a decode step, and multiply a tile each beside a prompt.

    512 keys more are four blocks, which 24 heads of 256 sequences and 28 layers multiply for 64 rows, 512 FLOPs a pair;
    no tile does that faster than the 362 TFLOP/s of the device.
    """
    steps, _ = table("llama-3.2-3b", "1xl40s")
    alone = steps.decode(256, 1024.0) - steps.decode(256, 512.0)
    beside = steps.mixed(256, 1024.0, [(64, 0)]) - steps.mixed(256, 512.0, [(64, 0)])
    assert beside > alone + 28 * 256 * 24 * 64 * 512 * 512 / 362e12


@pytest.mark.parametrize(
    ("model", "cluster", "kv_cache", "prompts"),
    [
        ("llama-3.1-8b", "1xl40s", "bf16", True),
        ("llama-3.1-8b", "1xa100", "bf16", True),
        ("llama-3.1-8b", "1xl40s", "fp8", False),  # FlashAttention 2 reads no cache of 8 bits: FlashInfer
        ("gpt-oss-20b", "1xa100", "bf16", False),  # nor has it sinks: Triton
        ("gemma-4-26b-a4b", "2xl40s", "bf16", False),  # nor heads of 512: Triton
        ("llama-3.1-8b", "1xh100", "bf16", False),  # FlashAttention 3
    ],
)
def test_only_flash_attention_2_runs_tokens_as_prompts(model: str, cluster: str, kv_cache: str, prompts: bool) -> None:
    """Other kernels split a step into prompts and sequences that decode, or let the heads of a group share."""
    devices = int(cluster[0])
    job = Serving(input_tokens=512, output_tokens=64, kv_cache=kv_cache)
    plan, where = Plan(tp=devices), sw.Cluster.parse(cluster)
    case = sw.infer(sw.load_model(model), where, plan, job, ServingOptions(engine="vllm")).case
    assert runs_as_prompts(case) is prompts


def test_a_full_batch_serves_what_was_measured() -> None:
    """Qwen3-4B on one RTX PRO 4500 serves 4,600 tokens/s to 96 users and to 256 (akamaslabs, vllm-benchmark)."""
    model, where = sw.load_model("qwen3-4b-2507"), sw.Cluster.parse("1xrtx-pro-4500")
    job = Serving(weights="fp8-block", max_sequences=256, max_batched_tokens=2048, memory_fraction=0.9)

    def rate(users: int) -> float:
        asked = Workload(
            input_tokens=Length(kind="lognormal", mean=68, cv=1.0),
            output_tokens=Length(kind="lognormal", mean=263, cv=0.8, high=1237),
            arrivals=Arrivals(kind="closed", users=users),
            count=20 * users,
            finite=True,
        )
        options = LoadOptions(serving=ServingOptions(engine="vllm-0.32"))
        return serve(model, where, Plan(), asked, job, options).output_tokens_per_second

    assert [rate(96), rate(256)] == pytest.approx([4600, 4602], rel=0.15)
