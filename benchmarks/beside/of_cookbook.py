"""Our answers to what the calculators of EleutherAI's cookbook are asked, and the amounts that laws put between."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import shardwise as sw
from beside.answers import Answer, Setting, Tool
from shardwise.answers._compare import tree_of
from shardwise.models import MLP, Attention, Block, MoE
from shardwise.serving import ServingOptions

HEAD_DIM, NODE = 128, 8
_SIZES = {
    "410m": "-l 24 -hs 1024", "1b": "-l 16 -hs 2048", "2.8b": "-l 32 -hs 2560", "6.9b": "-l 32 -hs 4096",
    "12b": "-l 36 -hs 5120", "20b": "-l 44 -hs 6144", "66b": "-l 64 -hs 9216", "175b": "-l 96 -hs 12288",
}  # fmt: skip
_PARAMETERS = (
    *(f"{size} -v 50304 -s 2048" for size in _SIZES.values()), "-l 24 -hs 2048 -v 50304 -s 2048 --tied-embeddings",
    "-l 80 -hs 8192 -v 128256 -s 4096 -kv 0.125 -ff 4 -nl 3", "-l 32 -hs 4096 -v 32000 -s 4096 -ff 3 -nl 3 -kv 0.25",
    "-l 12 -hs 768 -v 50304 -s 2048 --moe -e 512 -ei 2", "-l 32 -hs 4096 -v 32000 -s 4096 --moe -e 8 -t 2 -nl 3 -ff 4",
)  # fmt: skip
_FLOPS = (
    *(f"{_SIZES[n]} -v 50304 -s 2048 --tokens 3e11 -ei 1" for n in ("410m", "6.9b", "20b", "175b")),
    *(f"{_SIZES[n]} -v 50304 -s 2048 --tokens 3e11 -ei 1 -ca" for n in ("410m", "6.9b", "20b", "175b")),
    "-l 32 -hs 4096 -v 50304 -s 2048 --tokens 4096 -ei 1 --infer",
    "-l 16 -hs 1024 -v 256000 -s 2048 --tokens 1e10 -ei 1 -ca",
    "-l 80 -hs 8192 -v 128256 -s 4096 -kv 0.125 -nl 3 --tokens 1e12 -ei 1 -ca",
    "-l 32 -hs 4096 -v 32000 -s 4096 --moe -e 8 -t 2 -ei 1 -nl 3 --tokens 1e12 -ca",
    "-l 32 -hs 4096 -v 32000 -s 4096 --moe -e 8 -t 2 -ei 2 --tokens 1e12 -ca",
    "-l 24 -hs 2048 -v 50304 -s 2048 --moe -e 64 -t 1 -ei 2 --tokens 1e12 -ca",
)  # fmt: skip
_MEMORY = (
    ("410m", "--num-gpus 1 -z 0 -b 4"), ("410m", "--num-gpus 8 -z 1 -b 4"), ("1b", "--num-gpus 8 -z 2 -b 2 -ca"),
    ("1b", "--num-gpus 8 -z 3 -b 2"), ("2.8b", "--num-gpus 8 -z 1 -tp 2 -b 2"),
    ("2.8b", "--num-gpus 8 -z 0 -tp 4 -b 2"),
    ("6.9b", "--num-gpus 64 -z 1 -tp 2 -b 8 -ca"), ("6.9b", "--num-gpus 16 -z 0 -tp 4 -pp 2 -b 2"),
    ("12b", "--num-gpus 64 -z 1 -tp 4 -b 8 -ca"), ("12b", "--num-gpus 16 -z 0 -tp 4 -pp 4 -b 2 -ca"),
    ("20b", "--num-gpus 64 -z 1 -tp 4 -pp 4 -b 2"), ("20b", "--num-gpus 64 -z 3 -b 1 -ca"),
    ("66b", "--num-gpus 64 -z 1 -tp 8 -pp 8 -b 1 -ca"), ("175b", "--num-gpus 128 -z 0 -tp 8 -pp 16 -b 1 -ca"),
    ("20b", "--num-gpus 64 -z 3 -tp 4 -b 1 -ca"),
)  # fmt: skip
_SERVING = (
    ("6.9b", "--num-gpus 1 -b 8 -o 128"), ("6.9b", "--num-gpus 2 -tp 2 -b 8 -o 128"),
    ("12b", "--num-gpus 2 -tp 2 -b 16 -o 256 -kv 0.25"), ("6.9b", "--num-gpus 4 -tp 4 -b 32 -o 128 -kv 0.125"),
)  # fmt: skip


def settings() -> Iterator[Setting]:
    """Yield what is asked of both."""
    yield from ({"ask": "params", "arguments": words} for words in _PARAMETERS)
    yield from ({"ask": "flops", "arguments": words} for words in _FLOPS)
    for size, words in _MEMORY:
        yield {"ask": "mem", "arguments": f"{_SIZES[size]} -a {heads(size)} -v 50304 -s 2048 {words}"}
    for size, words in _SERVING:
        yield {"ask": "mem", "arguments": f"{_SIZES[size]} -a {heads(size)} -v 50304 -s 1024 -z 0 {words} --infer"}


def heads(size: str) -> int:
    """Return the heads of a model, of 128 each."""
    return int(_SIZES[size].split()[-1]) // HEAD_DIM


def words_of(setting: Setting) -> Namespace:
    """Return the arguments of a setting; `-ca` turns recompute off for FLOPs, and on for memory."""
    parser = ArgumentParser()
    for short, name, kind, default in (
        ("-l", "layers", int, 0), ("-hs", "hidden", int, 0), ("-v", "vocab", int, 0), ("-s", "seq", int, 0),
        ("-kv", "kv", float, 1.0), ("-ff", "ffn", int, 4), ("-nl", "matrices", int, 2), ("-e", "experts", int, 0),
        ("-ei", "interval", int, 1), ("-t", "top_k", int, 1), ("-tp", "tp", int, 1), ("-pp", "pp", int, 1),
        ("-z", "zero", int, 1), ("-b", "batch", int, 1), ("-o", "output", int, 1), ("-a", "heads", int, 0),
        ("--num-gpus", "devices", int, 1), ("--tokens", "tokens", float, 0.0),
    ):  # fmt: skip
        parser.add_argument(short, dest=name, type=kind, default=default)
    for flag in ("--moe", "--infer", "-ca", "--tied-embeddings"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_args(setting["arguments"].split())


def model_of(a: Namespace) -> sw.Model:
    """Return the model that its arguments mean: no biases; LayerNorm and learned positions, or none where gated."""
    gated, count = a.matrices == 3, a.hidden // HEAD_DIM
    mixer = Attention(heads=count, kv_heads=round(count * a.kv), head_dim=HEAD_DIM, rotary=gated)
    dense: Any = MLP(ffn=a.ffn * a.hidden, gated=gated, bias=False)
    mixture: Any = MoE(experts=a.experts, top_k=a.top_k, ffn=a.ffn * a.hidden, gated=gated) if a.moe else dense
    norm: Any = "rmsnorm" if gated else "layernorm"
    layers = tuple(
        Block(mixers=(mixer,), feed_forward=dense if (i + 1) % a.interval else mixture, norm=norm)
        for i in range(a.layers)
    )
    return sw.Model(name="gpt", family="gpt", hidden=a.hidden, vocab=a.vocab, layers=layers,
                    tied=a.tied_embeddings, norm=norm, dropout=True,
                    positions=0 if gated else a.seq + a.output * a.infer)  # fmt: skip


def beyond(a: Namespace) -> dict[str, float]:
    """Return the parameters that it counts beyond the model's."""
    gated = a.matrices == 3
    return {
        "a norm has a scale and at most a shift": a.hidden * a.layers * (8 - (2 if gated else 4)) + a.hidden * gated,
        "learned positions only where a model has them": a.hidden * (a.seq * gated - a.output * a.infer),
    }


def counted(setting: Setting) -> dict[str, Answer]:
    """Return our parameters."""
    a = words_of(setting)
    found = sw.count(model_of(a))
    parts = found.components
    ffn = parts.get("mlp", 0) + parts.get("experts", 0) + parts.get("moe", 0)
    table = parts["embedding"] + parts.get("head", 0) - a.hidden * model_of(a).positions
    return {
        "total_params": Answer(value=found.parameters, unit="", apart=beyond(a)),
        "embedding_params": Answer(value=table, unit=""),
        "attention_params": Answer(value=parts["attention"], unit=""),
        "ffn_params": Answer(value=ffn, unit=""),
    }


def worked(setting: Setting) -> dict[str, Answer]:
    """Return our FLOPs: all tokens, attention over the square."""
    a = words_of(setting)
    again = not a.ca and not a.infer
    found = sw.count(model_of(a), sw.Counting(seq_len=a.seq, recompute="full" if again else "none"))
    passes = 1 if a.infer else 3 + again
    ours = found.per_token["model-full"] / 3 if a.infer else found.hardware_per_token
    dense = a.layers - a.layers // a.interval if a.moe else 0
    one = 2.0 * a.matrices * a.ffn * a.hidden**2
    lost = {
        "the head works backward too": 2.0 * a.hidden * a.vocab * (1 - (1 if a.infer else 3)),
        "looking up a table is no product": 4.0 * a.hidden,
        "every layer is counted once": -passes * dense * one * (a.top_k > 1),
    }
    return {"total_flops": Answer(value=ours * a.tokens, unit="FLOP", apart={k: v * a.tokens for k, v in lost.items()})}


def held(setting: Setting) -> dict[str, Answer]:
    """Return our bytes on the first stage's devices."""
    a = words_of(setting)
    return served(a) if a.infer else trained(a)


def plan_of(a: Namespace) -> sw.Plan:
    """Return the plan of its arguments."""
    sharding: Any = ("none", "zero1", "zero2", "zero3")[a.zero]
    recompute: Any = "selective" if a.ca else "none"
    dp = a.devices // (a.tp * a.pp)
    return sw.Plan(tp=a.tp, pp=a.pp, dp=dp, micro_batch=a.batch, sharding=sharding, recompute=recompute)


def cluster_of(a: Namespace) -> sw.Cluster:
    """Return A100s of 8 to a node."""
    shape = f"{a.devices // NODE}x{NODE}" if a.devices > NODE else f"{a.devices}"
    return sw.Cluster.parse(f"{shape}xa100-sxm-80gb")


def stage_of(model: sw.Model, a: Namespace) -> dict[str, float]:
    """Return categories of the first stage, attention without flash kernels, as its formula has it."""
    plan = plan_of(a)
    job = sw.Training(seq_len=a.seq, global_batch=a.batch * 2 * a.pp * plan.dp, precision="bf16", hidden_dropout=True,
                      attention_dropout=True, softmax_dropout=True)  # fmt: skip
    found = sw.train(model, cluster_of(a), plan, job, sw.TrainingOptions(stack="megatron-scores"))
    stage: dict[str, float] = tree_of(found)["memory"]["stages"][0]["categories"]
    return stage


def trained(a: Namespace) -> dict[str, Answer]:
    """Return our bytes of training."""
    model, split, dp = model_of(a), a.tp * a.pp, a.devices // (a.tp * a.pp)
    stage, twice = (stage_of(m, a) for m in (model, replace(model, layers=model.layers * 2)))
    ours, more = sw.count(model).parameters, beyond(a)
    theirs = ours + sum(more.values())

    def states(category: str, size: int, sharded: int, law: str, wrong: float) -> Answer:
        share = size / split / sharded
        return Answer(value=stage[category], unit="B", apart={
            **{k: v * share for k, v in more.items()},
            "a stage holds its own layers": ours * share - stage[category],
            law: wrong - theirs * share,
        })  # fmt: skip

    ways = {stage: dp if a.zero >= stage else 1 for stage in (1, 2, 3)}
    kept = twice["activations"] - stage["activations"]
    return {
        "per_gpu_model_mem": states("weights", 2, ways[3], "ZeRO-3 divides by the replicas, once",
                                    theirs * 2 / split / (a.devices if a.zero == 3 else 1)),
        "per_gpu_gradient_mem": states("gradients", 4, ways[2], "gradients and states are split like their weights",
                                       theirs * 4 / (a.devices if a.zero >= 2 else 1)),
        "per_gpu_optimizer_mem": states("optimizer", 12, ways[1], "gradients and states are split like their weights",
                                        theirs * 12 / (a.devices if a.zero >= 1 else 1)),
        "per_gpu_activation_mem": Answer(value=kept, unit="B", apart={
            "activations are split by tensor and sequence parallelism": kept * (a.tp - 1)}),
    }  # fmt: skip


def served(a: Namespace) -> dict[str, Answer]:
    """Return our bytes of serving."""
    model = model_of(a)
    job = sw.Serving(batch=a.batch, input_tokens=a.seq, output_tokens=a.output)
    machine = ServingOptions(engine="vllm", efficiencies=sw.Efficiencies(ideal=True))
    found = sw.infer(model, cluster_of(a), sw.Plan(tp=a.tp, pp=a.pp), job, machine)
    weights, cache = found.weights_bytes_per_gpu, found.kv_cache_bytes_per_gpu
    whole = cache * a.tp / a.kv
    share = 2 / a.tp
    copied = sw.count(model).parameters * share - weights
    return {
        "per_gpu_model_mem": Answer(value=weights, unit="B", apart={
            **{k: v * share for k, v in beyond(a).items()}, "what is not split is whole on every device": copied}),
        "per_gpu_kv_cache_mem": Answer(value=cache, unit="B", apart={
            "a cache is split over tensor-parallel ranks": cache * (a.tp - 1),
            "keys and values have their own heads": whole - cache * a.tp,
            "a cache holds keys and values": -whole / 2}),
    }  # fmt: skip


def tool() -> Tool:
    """Return the comparison."""
    return Tool(
        name="EleutherAI cookbook, calc",
        version="commit 827ee3b (2026-03)",
        settings=tuple(settings()),
        asks="ask_cookbook.py",
        answers=lambda setting: {"params": counted, "flops": worked, "mem": held}[setting["ask"]](setting),
    )
