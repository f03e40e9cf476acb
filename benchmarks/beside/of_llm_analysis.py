"""Our answers to what llm-analysis is asked, and the amounts that its laws put between the two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import shardwise as sw
from beside.answers import Answer, Setting, Tool
from shardwise.answers._compare import tree_of
from shardwise.models import Attention
from shardwise.serving import ServingOptions

GPU = "a100-sxm-80gb"
NODE, EFFICIENCY = 8, 0.5
LEVELS = {0: "none", 1: "selective", 2: "full"}
# Asked of both, with the same bytes of each copy of a parameter: bf16 weights, fp32 gradients, 12 bytes of Adam.
GRADIENTS, ADAM, WEIGHTS = 4, 12, 2
MASK, NORM_INPUT, START = 1, 4, 8e-6

_TRAIN = (
    ("gpt2", 1, 1, 1, 0, 8, 1024, 0), ("gpt2-medium", 1, 1, 8, 1, 4, 1024, 0), ("gpt2-large", 1, 1, 8, 2, 2, 1024, 0),
    ("gpt2-xl", 1, 1, 8, 3, 2, 1024, 0), ("gpt2-xl", 5, 1, 1, 0, 4, 1000, 1),
    ("facebook_opt-125m", 1, 1, 4, 0, 8, 2048, 0),
    ("facebook_opt-1.3b", 1, 1, 8, 1, 2, 2048, 0), ("facebook_opt-1.3b", 2, 2, 2, 0, 2, 2048, 0),
    ("facebook_opt-1.3b", 4, 1, 2, 1, 4, 2048, 2), ("facebook_opt-6.7b", 8, 1, 1, 0, 2, 2048, 0),
    ("facebook_opt-6.7b", 4, 2, 2, 1, 2, 2048, 1), ("facebook_opt-13b", 8, 1, 2, 1, 2, 2048, 0),
    ("facebook_opt-66b", 8, 8, 2, 1, 2, 2048, 1), ("facebook_opt-175b", 8, 16, 1, 0, 2, 2048, 1),
    ("bigscience_bloom-560m", 1, 1, 8, 3, 2, 2048, 0),
    ("bloom-175b", 8, 10, 1, 0, 2, 2048, 2), ("EleutherAI_gpt-neo-1.3B", 1, 1, 8, 2, 2, 2048, 0),
    ("EleutherAI_gpt-j-6b", 4, 1, 2, 1, 2, 2048, 0), ("megatron-lm-175b", 8, 16, 1, 0, 2, 2048, 1),
    ("megatron-lm-530b", 8, 35, 1, 0, 2, 2048, 2), ("decapoda-research_llama-7b-hf", 1, 1, 8, 3, 2, 2048, 0),
    ("decapoda-research_llama-65b-hf", 8, 4, 2, 1, 2, 2048, 0), ("NousResearch_Llama-2-7b-hf", 4, 1, 2, 2, 2, 4096, 0),
    ("upstage_Llama-2-70b-instruct-v2", 8, 4, 2, 1, 2, 4096, 0),
)  # fmt: skip
_INFER = (
    ("gpt2-xl", 1, 1, 1, 512, 32), ("facebook_opt-1.3b", 1, 1, 1, 512, 32), ("facebook_opt-1.3b", 2, 1, 4, 512, 32),
    ("facebook_opt-6.7b", 1, 1, 8, 1024, 128), ("facebook_opt-13b", 2, 1, 8, 1024, 128),
    ("facebook_opt-66b", 8, 1, 16, 1024, 64), ("bigscience_bloom-7b1", 1, 1, 4, 1024, 64),
    ("decapoda-research_llama-7b-hf", 1, 1, 1, 512, 32), ("decapoda-research_llama-7b-hf", 1, 2, 1, 512, 32),
    ("decapoda-research_llama-7b-hf", 1, 4, 1, 512, 32), ("NousResearch_Llama-2-7b-hf", 4, 1, 32, 2048, 256),
    ("upstage_Llama-2-70b-instruct-v2", 8, 1, 1, 512, 32), ("upstage_Llama-2-70b-instruct-v2", 8, 1, 32, 2048, 256),
)  # fmt: skip


def settings() -> Iterator[Setting]:
    """Yield what is asked of both."""
    for model, tp, pp, dp, zero, micro, seq, recompute in _TRAIN:
        yield {
            "ask": "train", "model": model, "gpu": GPU, "tp": tp, "pp": pp, "dp": dp, "zero": zero,
            "micro_batch": micro, "accumulation": 2 * pp, "seq_len": seq, "recompute": recompute,
        }  # fmt: skip
    for model, tp, pp, batch, tokens_in, tokens_out in _INFER:
        yield {
            "ask": "infer", "model": model, "gpu": GPU, "tp": tp, "pp": pp, "batch": batch, "input": tokens_in,
            "output": tokens_out,
        }  # fmt: skip


class Sizes(NamedTuple):
    """What its formulas are written in, and what its models lack, per layer where not said otherwise."""

    hidden: int
    layers: int
    vocab: int
    heads: int
    kv_share: float
    ffn: int
    mlp_matrices: int
    small: int
    ends: int
    untied: bool


def sizes_of(model: sw.Model) -> Sizes:
    """Return the sizes of a model."""
    mixer, mlp = model.layers[0].mixers[0], model.layers[0].feed_forward
    assert isinstance(mixer, Attention)
    matrices = (3 if mlp.gated else 2) * model.hidden * mlp.ffn
    attention = 2 * model.hidden * (mixer.heads + mixer.kv_heads) * mixer.head_dim
    counted = dict(sw.count(model).components)
    layers = len(model.layers)
    in_layers = sum(counted.get(part, 0) for part in ("attention", "mlp", "norms")) - layers * (attention + matrices)
    untied = not model.tied
    ends = (
        counted["embedding"]
        - model.vocab * model.hidden
        + untied * (counted.get("head", 0) - model.vocab * model.hidden)
    )
    # It has a scale for each of two norms a layer, and the last.
    small = in_layers - (2 * layers + 1) * model.hidden
    return Sizes(
        model.hidden, layers, model.vocab, mixer.heads, mixer.kv_heads / mixer.heads, mlp.ffn, matrices,
        small, ends, untied,
    )  # fmt: skip


def missing(s: Sizes) -> dict[str, float]:
    """Return what it counts beyond every parameter of a whole model, by law."""
    return {
        "every small parameter counts": -float(s.small + s.ends),
        "an untied head is counted": -float(s.untied * s.vocab * s.hidden),
        "the width of the feed-forward is an input": float(s.layers * (8 * s.hidden**2 - s.mlp_matrices)),
    }


def missing_on_a_device(s: Sizes, setting: Setting) -> dict[str, float]:
    """Return the same of the first stage of a plan, whose head is on the last."""
    tp, pp = setting["tp"], setting["pp"]
    whole = missing(s)
    # Scales and, where there are shifts and biases, those of both norms and of both products that end a block.
    copied = s.layers / pp * s.hidden * (2 + 4 * (s.small > 0)) + s.ends
    return {
        "every small parameter counts": -(s.small / pp + s.ends) / tp,
        "what is not split is whole on every device": copied * (1 / tp - 1),
        "an untied head is counted": whole["an untied head is counted"] / tp * (pp == 1),
        "the width of the feed-forward is an input": whole["the width of the feed-forward is an input"] / tp / pp,
    }


def scaled(amounts: dict[str, float], factor: float) -> dict[str, float]:
    """Return amounts times a factor."""
    return {law: amount * factor for law, amount in amounts.items()}


def trained(setting: Setting) -> dict[str, Answer]:
    """Return our figures of a training setting."""
    model = sw.load_model(setting["model"])
    s = sizes_of(model)
    tree = tree_of(report(model, setting))
    stage = tree["memory"]["stages"][0]["categories"]
    zero, dp = setting["zero"], setting["dp"]
    on_device = missing_on_a_device(s, setting)
    flops, apart = micro_batch_flops(model, setting)
    counted = Answer(value=flops, unit="FLOP", apart=apart)
    figures = {
        "parameters": Answer(value=sum(dict(sw.count(model).components).values()), unit="", apart=missing(s)),
        "FLOPs of a micro-batch": counted,
        "weights": Answer(
            value=stage["weights"], unit="B", apart=scaled(on_device, WEIGHTS / (dp if zero == 3 else 1))
        ),
        "gradients": Answer(
            value=stage["gradients"], unit="B", apart=scaled(on_device, GRADIENTS / (dp if zero >= 2 else 1))
        ),
        "optimizer": Answer(
            value=stage["optimizer"], unit="B", apart=scaled(on_device, ADAM / (dp if zero >= 1 else 1))
        ),
        "step": step(model, tree, setting, counted),
    }
    if setting["recompute"] != 2:
        figures["activations of the layers"] = activations(model, s, setting)
    return figures


def report(model: sw.Model, setting: Setting, stack: str = "") -> sw.TrainReport:
    """Return our report at its efficiencies: half of the peak, full bandwidths, no starts."""
    plan = sw.Plan(
        tp=setting["tp"], pp=setting["pp"], dp=setting["dp"], micro_batch=setting["micro_batch"],
        sharding=("none", "zero1", "zero2", "zero3")[setting["zero"]] if not stack else "none",
        recompute=LEVELS[setting["recompute"]],
    )  # fmt: skip
    batch = setting["micro_batch"] * setting["accumulation"] * setting["dp"]
    job = sw.Training(
        seq_len=setting["seq_len"], global_batch=batch, precision="bf16", attention_dropout=True, hidden_dropout=False
    )
    devices = plan.tp * plan.pp * plan.dp
    nodes = f"{devices}x{GPU}" if devices < NODE else f"{devices // NODE}x{NODE}x{GPU}"
    machine = sw.Efficiencies(compute=EFFICIENCY, memory=1.0, fast_link=1.0, slow_link=1.0, ideal=True)
    runs: Any = sw.find_stack(stack or ("megatron" if setting["zero"] == 0 or setting["tp"] > 1 else "deepspeed"))
    runs = replace(runs, settings=sw.Settings(norm_bytes=NORM_INPUT)) if stack else runs
    return sw.train(model, sw.Cluster.parse(nodes), plan, job, sw.TrainingOptions(stack=runs, efficiencies=machine))


def micro_batch_flops(model: sw.Model, setting: Setting) -> tuple[float, dict[str, float]]:
    """Return FLOPs of a micro-batch with attention over the square, and the amounts to its count."""
    s, tokens, again = sizes_of(model), setting["micro_batch"] * setting["seq_len"], setting["recompute"]
    found = sw.count(model, sw.Counting(seq_len=setting["seq_len"], recompute=LEVELS[again]))
    passes = 4 if again == 2 else 3
    apart = {"the width of the feed-forward is an input": 2.0 * passes * s.layers * (8 * s.hidden**2 - s.mlp_matrices)}
    if again == 2:
        apart["only layers are recomputed"] = 2.0 * s.vocab * s.hidden
    return found.hardware_per_token * tokens, scaled(apart, tokens)


def step(model: sw.Model, tree: dict[str, Any], setting: Setting, counted: Answer) -> Answer:
    """Return the seconds of a step, and what its step lacks: it is FLOPs over the rate."""
    per_token = sw.count(model, sw.Counting(seq_len=setting["seq_len"])).per_token
    share = (per_token["model-full"] - per_token["model-causal"]) / per_token["model-full"]
    rate = setting["tp"] * setting["pp"] * EFFICIENCY * tree["model_flops_per_second_per_gpu"] / tree["mfu"]
    seconds = setting["accumulation"] / rate
    square = share * counted.value * seconds
    part = tree["step"]
    known = {
        **scaled(counted.apart, seconds),
        "attention is over the square or half of it": square,
        "a pipeline has a bubble": -part["bubble_seconds"],
        "messages of layers and stages take time": -sum(part["exposed_seconds"].get(a, 0) for a in ("tp", "pp")),
        "gradients and weights are exchanged": -part["exposed_seconds"].get("dp", 0),
        "the optimizer reads and writes its states": -part["optimizer_seconds"],
    }
    ours = sum(v for k, v in known.items() if k not in counted.apart)
    # What is left of our step: operators that bytes bind, and the stage with the head, which the others wait for.
    known["bytes bind, and the slowest stage sets the pace"] = counted.value * seconds - tree["step_seconds"] - ours
    return Answer(value=tree["step_seconds"], unit="s", apart=known)


def activations(model: sw.Model, s: Sizes, setting: Setting) -> Answer:
    """Return what the layers of the first stage keep: of twice the layers, less of the layers."""
    twice = replace(model, layers=model.layers * 2)
    kept = [tree_of(report(m, setting, "megatron"))["memory"]["stages"][0]["categories"]["activations"]
            for m in (model, twice)]  # fmt: skip
    elements = s.layers * setting["micro_batch"] * setting["seq_len"] / setting["tp"]
    gated = s.mlp_matrices == 3 * s.hidden * s.ffn
    return Answer(
        value=kept[1] - kept[0],
        unit="B",
        apart={
            "flash attention adds no copy": (setting["recompute"] == 0) * elements * 4 * (s.hidden + s.heads),
            "keys and values have their own heads": elements * 4 * s.hidden * (1 - s.kv_share),
            "a parallel block has one norm, one input and one mask": model.layers[0].parallel * elements * 7 * s.hidden,
            "a gated feed-forward keeps what it reads": gated * elements * (16 * s.hidden - 6 * s.ffn),
        },
    )


def served(setting: Setting) -> dict[str, Answer]:
    """Return our figures of a serving setting: efficiencies one, no starts."""
    model = sw.load_model(setting["model"])
    s = sizes_of(model)
    devices = setting["tp"] * setting["pp"]
    job = sw.Serving(batch=setting["batch"], input_tokens=setting["input"], output_tokens=setting["output"])
    machine = sw.Efficiencies(ideal=True)
    plan = sw.Plan(tp=setting["tp"], pp=setting["pp"])
    found = sw.infer(
        model, sw.Cluster.parse(f"{devices}x{GPU}"), plan, job, ServingOptions(engine="vllm", efficiencies=machine)
    )
    tree = tree_of(found)
    setting = {**setting, "cache": tree["kv_cache_bytes_per_gpu"]}
    whole = {**setting, "pp": 1}
    weights = tree["memory"]["stages"][0]["weights"]
    all_layers = WEIGHTS * sum(dict(sw.count(model).components).values()) / setting["tp"] - weights
    return {
        "weights": Answer(value=weights, unit="B", apart={
            **scaled(missing_on_a_device(s, whole), WEIGHTS),
            "a stage holds its own layers": (setting["pp"] > 1) * all_layers}),
        "key-value cache": Answer(value=tree["kv_cache_bytes_per_gpu"], unit="B"),
        "prefill": passed(s, setting, tree["time"]["prefill"], setting["input"]),
        "decode": passed(s, setting, tree["time"]["decode"], 1),
    }  # fmt: skip


PEAK, BANDWIDTH, LINK = 312e12, 2.039e12, 3e11
_ATTENTION = ("attention", "cache_write")
_ENDS = ("embedding", "final_norm", "head", "sampling")


def their_blocks(s: Sizes, setting: Setting, t: int, span: int) -> dict[str, float]:
    """Return seconds that its layers take for t tokens: products of attention, its core, feed-forward, norms."""
    tp = setting["tp"]
    projections, mlp = 2 * s.hidden**2 * (1 + s.kv_share), 8 * s.hidden**2
    core = 4 * t * span * s.hidden / tp / PEAK
    kept = max(6 * s.hidden / tp, (2 * s.hidden + 4 * s.heads) * 2 / tp) * t
    attention = max(2 * t * projections / tp / PEAK + core, (WEIGHTS * projections / tp + kept) / BANDWIDTH)
    message = max(4 * t * s.hidden * (tp - 1) / tp / LINK, START) if tp > 1 else 0.0
    return {
        "projections": s.layers * (attention - core),
        "core": s.layers * core,
        "mlp": s.layers * max(2 * t * mlp / tp / PEAK, (WEIGHTS * mlp + 8 * t * s.hidden) / tp / BANDWIDTH),
        "norms": s.layers * 2 * NORM_INPUT * t * s.hidden / tp / BANDWIDTH,
        "messages": s.layers * 2 * message,
        "first message": message,
    }


def passed(s: Sizes, setting: Setting, ours: dict[str, Any], tokens: int) -> Answer:
    """Return the seconds of one pass over `tokens` a request, and what its pass charges and lacks by operator."""
    pp, t, decode = setting["pp"], setting["batch"] * tokens, tokens == 1
    theirs = their_blocks(s, setting, t, tokens)
    op, axes = ours["operators"], ours["axes"]
    exposed = {axis: axes[axis]["exposed"] if axis in axes else 0.0 for axis in ("tp", "pp")}
    mlp = sum(v for k, v in op.items() if k.startswith("mlp."))
    others = ours["seconds"] - sum(exposed.values()) - mlp - sum(op[k] for k in (*_ATTENTION, *_ENDS) if k in op)
    width = theirs["mlp"] * (1 - s.mlp_matrices / (8 * s.hidden**2))
    cache = 2 * setting["cache"] / BANDWIDTH if decode else 0.0
    layers = sum(theirs[k] for k in ("projections", "core", "mlp", "norms", "messages"))
    head = 2 * t * s.vocab * s.hidden / setting["tp"] / PEAK
    core = "a step reads the cache once" if decode else "attention is over the square or half of it"
    return Answer(
        value=ours["seconds"],
        unit="s",
        apart={
            "the embedding table is not read whole": WEIGHTS * s.vocab * s.hidden / BANDWIDTH - op["embedding"],
            "the head's weights are read, for the last token": head - sum(op.get(k, 0) for k in _ENDS[1:]),
            core: theirs["core"] + cache - sum(op.get(k, 0) for k in _ATTENTION),
            "a message takes no less than its start": theirs["messages"] + theirs["first message"] - exposed["tp"],
            "the width of the feed-forward is an input": width,
            "operators run one by one, each at its own bound": theirs["mlp"] - width - mlp
            + theirs["projections"] + theirs["norms"] - others,
            "stages do not shorten a token": -(1 - 1 / pp) * layers - exposed["pp"],
        },
    )  # fmt: skip


def tool() -> Tool:
    """Return the comparison."""
    return Tool(
        name="llm-analysis",
        version="0.2.2 (package index)",
        settings=tuple(settings()),
        asks="ask_llm_analysis.py",
        answers=lambda setting: {"train": trained, "infer": served}[setting["ask"]](setting),
    )
