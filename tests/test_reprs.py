"""What a notebook shows of an answer: one line with the verdict."""

from __future__ import annotations

import shardwise as sw

MODEL, CLUSTER = sw.Model.load("gpt2"), sw.Cluster.parse("2xh100-sxm-80gb")
PLAN, JOB = sw.Plan(dp=0), sw.Training(seq_len=1024, global_batch=8)
SERVED = sw.Serving(batch=2, input_tokens=64, output_tokens=8)


def test_answers_show_their_verdict_in_one_line() -> None:
    """An answer at a prompt is a line, not the whole of its model and its tables."""
    trained, served = sw.train(MODEL, CLUSTER, PLAN, JOB), sw.infer(MODEL, CLUSTER, sw.Plan(dp=0), SERVED)
    assert repr(trained).startswith("<TrainReport gpt2 on 2 x h100-sxm-80gb: fits, ")
    assert repr(served).startswith("<InferReport gpt2 on 2 x h100-sxm-80gb: fits, ")
    found = [sw.plan_training(MODEL, CLUSTER, JOB), sw.plan_serving(MODEL, CLUSTER, SERVED)]
    lines = [repr(trained), repr(served), *map(repr, found)]
    assert all(len(line) < 200 and "\n" not in line for line in lines)
    assert all("Report gpt2" in line for line in lines)


def test_what_is_asked_of_shows_in_one_line() -> None:
    """A model, a cluster and a device at a prompt are a line each, not their layers and sources."""
    assert repr(sw.load_model("llama-3.1-8b")) == "<Model llama-3.1-8b: 32 layers of 4096, vocabulary of 128256>"
    assert repr(CLUSTER) == "<Cluster of 2 x h100-sxm-80gb, 2 a node>"
    assert repr(CLUSTER.device).startswith("<Device h100-sxm-80gb: ")
