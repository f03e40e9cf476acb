"""Encoders and vision transformers run once over their input; generation without a cache runs everything again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.errors import InputError
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.ops import forward_flops
from shardwise.plans import Plan, Serving
from shardwise.serving import InferReport, infer

ONE = Cluster.parse("1xa100-sxm-80gb")


def ask(name: str, **job: Any) -> InferReport:
    """Return the report of a model on one device."""
    return infer(load_model(name), ONE, Plan(), Serving(**job))


@pytest.mark.parametrize("name", ["bert-base", "bert-base-masked-lm", "all-minilm-l6-v2", "roberta-large", "vit-base"])
def test_an_encoder_generates_nothing_and_caches_nothing(name: str) -> None:
    """Whatever output is asked for, an encoder takes one pass: no decode step, no cache, whole batches a second."""
    report = ask(name, batch=32, input_tokens=128, output_tokens=77)
    assert report.job.output_tokens == 0
    assert report.tpot_seconds == report.kv_cache_bytes_per_gpu == report.kv_cache_tokens == 0
    assert report.request_seconds == report.ttft_seconds > 0
    assert report.samples_per_second == pytest.approx(32 / report.ttft_seconds)
    assert report.prefill_tokens_per_second == pytest.approx(128 * report.samples_per_second)
    record = report.to_dict()
    assert record["tpot_seconds"] is record["usd_per_million_output_tokens"] is None
    assert record["samples_per_second"] == report.samples_per_second


def test_the_head_of_an_encoder_runs_on_every_token() -> None:
    """Masked words have logits at every position: the pass has the forward FLOPs of the whole model."""
    for name in ("bert-base", "bert-base-masked-lm"):
        work = forward_flops(load_model(name), 256)
        assert ask(name, batch=4, input_tokens=256).evaluation.prefill.flops == 4 * (work.linear + work.full)


def test_the_largest_batch_of_an_encoder_just_fits() -> None:
    """Activations alone bound the batch: the largest one fits and one more does not."""
    most = ask("bert-large", input_tokens=512).max_concurrency
    assert ask("bert-large", batch=most, input_tokens=512).fits
    assert not ask("bert-large", batch=most + 1, input_tokens=512).fits


@pytest.mark.parametrize(
    ("name", "job", "fields"),
    [
        ("bert-base", {"input_tokens": 64, "prefix_tokens": 8, "kv_cache": "fp8"}, {"prefix_tokens", "kv_cache"}),
        ("bert-base", {"input_tokens": 64, "max_batched_tokens": 32}, {"max_batched_tokens"}),
        ("bert-base", {"input_tokens": 513}, {"input_tokens"}),
        ("vit-base", {"input_tokens": 198}, {"input_tokens"}),
        ("gpt2", {"prefix_tokens": 8, "use_kv_cache": False}, {"prefix_tokens"}),
        ("gpt2", {"use_kv_cache": "no"}, {"use_kv_cache"}),
        ("gpt2", {"output_tokens": -1}, {"output_tokens"}),
    ],
)
def test_what_needs_a_cache_is_refused_without_one(name: str, job: dict[str, Any], fields: set[str]) -> None:
    """Prefixes, pieces of a sequence and formats of a cache name their field where there is no cache."""
    with pytest.raises(InputError) as caught:
        ask(name, **job)
    assert {p.field for p in caught.value.problems} == fields


def test_no_output_is_the_prefill_alone() -> None:
    """Asked for no output, a decoder takes its prefill, and is cached no further than its input."""
    some, none = (ask("gpt2", batch=8, input_tokens=512, output_tokens=n) for n in (64, 0))
    assert none.request_seconds == none.ttft_seconds == some.ttft_seconds
    assert none.kv_cache_bytes_per_gpu == some.kv_cache_bytes_per_gpu * 512 / 576


def test_without_a_cache_each_token_runs_all_before_it() -> None:
    """Each of n output tokens after the first costs the pass over the input and the tokens before it."""
    job = Serving(batch=4, input_tokens=100, output_tokens=9, use_kv_cache=False)
    model = load_model("gpt2-large")
    steps = [infer(model, ONE, Plan(), replace(job, input_tokens=100 + k, output_tokens=0)) for k in range(9)]
    report = infer(model, ONE, Plan(), job)
    assert report.kv_cache_bytes_per_gpu == 0
    assert report.request_seconds == pytest.approx(sum(step.ttft_seconds for step in steps), rel=1e-4)
    assert report.evaluation.decode.flops * 8 == pytest.approx(sum(s.evaluation.prefill.flops for s in steps[1:]))


def test_a_cache_never_slows_a_generation() -> None:
    """Keeping keys and values is faster, costs their bytes, and leaves the first token but for the write."""
    kept, again = (
        ask("llama-3.1-8b", batch=2, input_tokens=512, output_tokens=64, use_kv_cache=on) for on in (True, False)
    )
    assert kept.request_seconds < again.request_seconds
    assert kept.kv_cache_bytes_per_gpu > again.kv_cache_bytes_per_gpu == 0
    assert again.ttft_seconds == pytest.approx(kept.ttft_seconds, rel=0.02)
    assert float(again.explain("tpot")) == again.tpot_seconds


def test_sharded_weights_are_a_share_and_two_parts() -> None:
    """ZeRO-Inference holds 1 / dp of the weights and two gathered parts, and waits for what its work does not cover."""
    model, eight = load_model("llama-3.1-8b"), Cluster.parse("8xh100-sxm-80gb")
    job = Serving(batch=4, input_tokens=512, output_tokens=16)
    whole, shared = (infer(model, eight, Plan(dp=8), replace(job, shard_weights=on)) for on in (False, True))
    unit, angles = 2 * model.vocab * model.hidden, 2 * 131072 * 128
    split = (whole.weights_bytes_per_gpu - angles) / 8 + 2 * unit
    assert shared.weights_bytes_per_gpu == pytest.approx(split + angles, rel=1e-4)
    assert shared.tpot_seconds > whole.tpot_seconds
    exposed = shared.evaluation.decode.exposed["dp"]
    assert shared.tpot_seconds - whole.tpot_seconds == pytest.approx(exposed)
    assert shared.kv_cache_bytes_per_gpu == whole.kv_cache_bytes_per_gpu
    assert float(shared.explain("memory")) == shared.memory.needed


def test_one_replica_shards_nothing() -> None:
    """Without replicas sharded weights are the weights, and the answer says so."""
    plain, shared = (ask("gpt2", shard_weights=on) for on in (False, True))
    assert (plain.weights_bytes_per_gpu, plain.tpot_seconds) == (shared.weights_bytes_per_gpu, shared.tpot_seconds)
    assert any(line.startswith("shard_weights: no effect") for line in shared.assumptions)


def test_memory_beside_takes_room_from_the_cache() -> None:
    """Miscellaneous bytes are needed beside the rest, and leave so much less to the cache."""
    plain, other = (ask("gpt2", misc_bytes=size) for size in (0.0, 5e9))
    assert other.memory.needed - plain.memory.needed == pytest.approx(5e9)
    assert plain.memory.cache_budget - other.memory.cache_budget == pytest.approx(5e9)
    assert (plain.ttft_seconds, plain.weights_bytes_per_gpu) == (other.ttft_seconds, other.weights_bytes_per_gpu)
