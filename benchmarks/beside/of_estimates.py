"""Our answers to what transformer-perf-estimates is asked, and the amounts that laws put between the two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import shardwise as sw
from beside.answers import Answer, Setting, Tool
from shardwise.answers._compare import tree_of
from shardwise.cost import collective_seconds, network_of
from shardwise.models import MLP, Attention, Block

# Its A100 system: 0.8 of the peak, all of 1555 GB/s, 0.7 of either link.
MACHINE = sw.Efficiencies(compute=0.8, memory_bytes_per_second=1.555e12, fast_link=0.7, slow_link=0.7, ideal=True)
FAST, SLOW, FAST_START, SLOW_START, FREE = 0.7 * 300e9, 0.7 * 25e9, 2.5e-6, 5e-6, 20e-6
PRODUCTS = ("qkv", "out", "mlp.up", "mlp.down")
_MODELS = {"gpt3": (2048, 12288, 96, 96), "gpt3-1T": (2048, 25600, 160, 128), "13b": (2048, 5120, 40, 40)}
_LAYERS = (("gpt3", 1, 1), ("gpt3", 1, 2), ("gpt3", 1, 4), ("gpt3", 2, 4), ("gpt3", 1, 8), ("gpt3-1T", 1, 8),
           ("13b", 4, 1), ("13b", 2, 4))  # fmt: skip
_VERBS = ("allgather", "reducescatter", "allreduce")
_GROUPS = ((4, 4), (8, 8), (8, 1), (16, 4), (32, 8), (64, 8))
_PLANS = (
    ("gpt3", 4, 16, 2, 1, 64, 4, 1), ("gpt3", 8, 8, 2, 1, 64, 8, 1), ("gpt3", 8, 16, 1, 1, 32, 8, 1),
    ("gpt3-1T", 8, 32, 1, 1, 64, 8, 1), ("13b", 4, 1, 4, 1, 64, 4, 1), ("13b", 1, 4, 4, 1, 64, 1, 4),
    ("13b", 2, 2, 4, 2, 64, 2, 2),
)  # fmt: skip
_SEARCHES = (("13b", 16, 64, 4, [16, 1, 1, 1]), ("13b", 32, 128, 4, [32, 1, 1, 1]), ("gpt3", 64, 64, 8, [1, 8, 8, 1]),
             ("gpt3", 128, 128, 8, [1, 8, 16, 1]))  # fmt: skip


def settings() -> Iterator[Setting]:
    """Yield what is asked of both."""
    for name, batch, tp in _LAYERS:
        yield {"ask": "layer", **sizes(name), "batch": batch, "tp": tp, "nvs": 8, "fast": tp}
    for verb in _VERBS:
        for ranks, fast in _GROUPS:
            for size in (1e6, 1e9):
                yield {"ask": "collective", "verb": verb, "bytes": size, "ranks": ranks, "fast": fast, "nvs": 8}
    for name, tp, pp, dp, micro, batch, fast, fast_dp in _PLANS:
        yield {
            "ask": "plan", **sizes(name), "tp": tp, "pp": pp, "dp": dp, "micro_batch": micro, "global_batch": batch,
            "nvs": fast * fast_dp, "fast": fast, "fast_dp": fast_dp,
        }  # fmt: skip
    for name, devices, batch, nvs, theirs in _SEARCHES:
        yield {"ask": "search", **sizes(name), "devices": devices, "global_batch": batch, "nvs": nvs, "theirs": theirs}


def sizes(name: str) -> Setting:
    """Return a model of its script, or its like."""
    return dict(zip(("l", "e", "h", "depth"), _MODELS[name], strict=True))


def model_of(s: Setting) -> sw.Model:
    """Return its model: GPT without vocabulary, without biases of q, k and v."""
    mixer = Attention(heads=s["h"], kv_heads=s["h"], head_dim=s["e"] // s["h"], out_bias=True, rotary=False)
    block = Block(mixers=(mixer,), feed_forward=MLP(ffn=4 * s["e"], gated=False, bias=True), norm="layernorm")
    return sw.Model(name="gpt", family="gpt", hidden=s["e"], vocab=128, layers=(block,) * s["depth"], tied=False,
                    norm="layernorm", dropout=True)  # fmt: skip


def cluster_of(devices: int, nvs: int) -> sw.Cluster:
    """Return its A100s, `nvs` to a fast domain."""
    shape = f"{devices // nvs}x{nvs}" if devices > nvs > 1 else f"{devices}x1" if nvs == 1 < devices else f"{devices}"
    return sw.Cluster.parse(f"{shape}xa100-sxm-80gb")


def of_layer(s: Setting) -> dict[str, Answer]:
    """Return our figures of a layer on a device."""
    tp = s["tp"]
    counting = sw.Counting(batch=s["batch"], seq_len=s["l"], precision="bf16", stack="megatron")
    found = sw.count(model_of(s), counting, sw.Plan(tp=tp), cluster_of(tp, tp), MACHINE)
    rows = next(part for part in found.parts if part.name == "layer").rows
    products = [row for row in rows if row.name in PRODUCTS]
    core = next(row.forward_flops for row in rows if row.name == "attention")
    stream = 2 * s["batch"] * s["l"] * s["e"]
    square = 4 * s["batch"] * s["l"] ** 2 * s["e"] / tp
    sent = sum(row.messages for row in products) if tp > 1 else 0
    bytes_sent, again = sent * stream, -2.0 * stream * (tp > 1)
    wire = (tp - 1) / tp / FAST
    took = {name: sum(getattr(row.seconds, name) for row in part if row.seconds)
            for name, part in (("compute", products), ("communication", rows))}  # fmt: skip
    return {
        "weights of a layer": Answer(value=2 * sum(row.parameters for row in rows), unit="B"),
        "activations of a layer": Answer(value=sum(row.activation_bytes for row in rows), unit="B", apart=kept(s, 1)),
        "FLOPs of products, forward": Answer(value=sum(row.forward_flops for row in products), unit="FLOP"),
        "FLOPs of products, backward": Answer(value=sum(row.backward_flops for row in products), unit="FLOP"),
        "FLOPs of attention, forward": Answer(value=core, unit="FLOP", apart={
            "attention is over the square or half of it": square - core,
            "vector work is not matrix work": square * 4 * s["h"] / s["e"]}),
        "seconds of products": Answer(value=took["compute"], unit="s", apart={
            "a free operator costs nothing": 2 * len(PRODUCTS) * FREE}),
        "bytes of messages": Answer(value=bytes_sent, unit="B", apart={
            "sequence parallelism splits every kept tensor": again}),
        "seconds of messages": Answer(value=took["communication"], unit="s", apart={
            "sequence parallelism splits every kept tensor": again * wire,
            "every step of a ring starts anew": (sent - 2) * (tp - 1) * FAST_START * (tp > 1)}),
    }  # fmt: skip


def kept(s: Setting, layers: float) -> dict[str, float]:
    """Return what it keeps beyond ours in layers, by law."""
    stream = layers * s["batch"] * s["l"] * s["e"]
    return {
        "sequence parallelism splits every kept tensor": stream * 4 * (1 - 1 / s["tp"]),
        "flash attention adds no copy": stream * 2 / s["tp"],
        "dropout is where the model has it": stream * 4 / s["tp"],
    }


def of_collective(s: Setting) -> dict[str, Answer]:
    """Return our seconds of a collective, without starts."""
    ranks, fast, size = s["ranks"], s["fast"], s["bytes"]
    verb: Any = {"allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce"}[s["verb"]]
    cluster = cluster_of(ranks * s["nvs"], s["nvs"])
    taken = collective_seconds(network_of(cluster, MACHINE), verb, size, (float(fast), float(ranks)))
    nodes = ranks // fast
    start = SLOW_START * (ranks - 1) if fast == 1 else FAST_START * (ranks - nodes) + SLOW_START * (nodes - 1)
    once = verb == "all_reduce" and (fast == 1 or nodes == 1)
    wire = (ranks - 1) / ranks * size / (SLOW if fast == 1 else FAST)
    return {
        f"seconds of {s['verb']}": Answer(value=taken, unit="s", apart={
            "an all-reduce is two passes on every topology": -wire * once,
            "every step of a ring starts anew": start}),
    }  # fmt: skip


def report(s: Setting) -> sw.TrainReport:
    """Return our report of a plan."""
    dp, tp, pp = s["dp"], s["tp"], s["pp"]
    plan = sw.Plan(tp=tp, pp=pp, dp=dp, micro_batch=s["micro_batch"], sharding="zero1")
    job = sw.Training(seq_len=s["l"], global_batch=s["global_batch"], precision="bf16-grads16")
    options = sw.TrainingOptions(stack="megatron", efficiencies=MACHINE)
    return sw.train(model_of(s), cluster_of(dp * tp * pp, s["nvs"]), plan, job, options)


def of_plan(s: Setting) -> dict[str, Answer]:
    """Return our figures of a plan."""
    found = report(s)
    tree = tree_of(found)
    stage = tree["memory"]["stages"][-1 if s["pp"] > 1 else 0]["categories"]
    first = tree["memory"]["stages"][0]["categories"]
    micro = {**s, "batch": s["micro_batch"]}
    in_flight = min(s["pp"], s["global_batch"] // s["dp"] // s["micro_batch"])
    return {
        "weights": Answer(value=stage["weights"], unit="B"),
        "gradients": Answer(value=stage["gradients"], unit="B"),
        "optimizer": Answer(value=stage["optimizer"], unit="B"),
        "activations": Answer(
            value=first["activations"], unit="B", apart=kept(micro, s["depth"] / s["pp"] * in_flight)
        ),
        **seconds(tree),
        "step": step(tree),
    }


def seconds(tree: dict[str, Any]) -> dict[str, Answer]:
    """Return what a step of ours is made of."""
    part = tree["step"]
    exposed = part["exposed_seconds"]
    return {
        "compute in a step": Answer(value=part["compute_seconds"], unit="s", whole="a free operator costs nothing"),
        "tensor-parallel messages in a step": Answer(
            value=exposed.get("tp", 0.0) + part["hidden_seconds"].get("tp", 0.0), unit="s",
            whole="a gather for the backward pass is hidden behind it"),
        "data-parallel messages in a step": Answer(
            value=exposed.get("dp", 0.0), unit="s", whole="replicas exchange behind the passes they belong to"),
        "pipeline messages in a step": Answer(
            value=exposed.get("pp", 0.0), unit="s", whole="a send waits for a stage, not for each micro-batch"),
        "bubble": Answer(value=part["bubble_seconds"], unit="s", whole="a bubble grows with the work of a micro-batch"),
    }  # fmt: skip


def step(tree: dict[str, Any]) -> Answer:
    """Return the step, apart by its parts."""
    parts = seconds(tree)
    hidden = tree["step"]["hidden_seconds"].get("tp", 0.0)
    known = sum(one.value for one in parts.values()) - hidden + tree["step"]["optimizer_seconds"]
    return Answer(
        value=tree["step_seconds"],
        unit="s",
        apart={
            "the optimizer reads and writes its states": -tree["step"]["optimizer_seconds"],
            "a gather for the backward pass is hidden behind it": hidden,
            "bytes bind, and the slowest stage sets the pace": known - tree["step_seconds"],
        },
        by={one.whole: figure for figure, one in parts.items()},
    )


def of_search(s: Setting) -> dict[str, Answer]:
    """Return the step of our best plan in its space, and what the step of its best plan is made of."""
    one = sw.IntRanges.parse("1")
    space = sw.SearchSpace(layout=("1d",), cp=one, vpp=one, ep=one, tp2=one, sequence_parallel=(True,),
                           sharding=("zero1",), recompute=("none",), schedule=("1f1b",))  # fmt: skip
    job = sw.Training(seq_len=s["l"], global_batch=s["global_batch"], precision="bf16-grads16")
    options = sw.SearchOptions(efficiencies=MACHINE, stack="megatron", explore=True)
    found = sw.plan_training(model_of(s), cluster_of(s["devices"], s["nvs"]), job, space, options)
    dp, tp, pp, micro = s["theirs"]
    tree = tree_of(report({**s, "dp": dp, "tp": tp, "pp": pp, "micro_batch": micro}))
    same = step(tree)
    winner = same.value - found.best[0].step_seconds
    apart = {**same.apart, "the best plan is the best of one price": winner}
    return {**seconds(tree), "step of the best plan": replace(same, value=same.value - winner, apart=apart)}


def tool() -> Tool:
    """Return the comparison."""
    kinds = {"layer": of_layer, "collective": of_collective, "plan": of_plan, "search": of_search}
    return Tool(
        name="transformer-perf-estimates",
        version="commit 54278b0",
        settings=tuple(settings()),
        asks="ask_estimates.py",
        answers=lambda setting: kinds[setting["ask"]](setting),
    )
