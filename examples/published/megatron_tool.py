"""The Megatron-LM analysis tool: the figures of its own example, and ours."""

from __future__ import annotations

from tables import FAR, Page, Pair, Row, Table, show

import shardwise as sw
from shardwise.models import MLP, Attention, Block

GIB, MIB = 2.0**30, 2.0**20
# Its tables: memory of the whole model and of a GPU, GB of 1024**3.
WHOLE = {"weights": 12.4, "gradients": 24.7, "optimizer states": 74.2, "activations": 44.8, "in all": 156.2}
DEVICE = {"weights": 3.2, "gradients": 6.4, "optimizer states": 4.8, "activations": 25.8, "in all": 40.2}
PARAMETERS = {"whole model": 6_642_245_632, "a GPU": 1_718_898_688}
# Messages and GB of a step, of the cluster unless the name says other.
TRAFFIC = {
    "pipeline, messages": 2048, "pipeline, GB": 128.0,
    "data, messages of a GPU": 2, "data, GB of a GPU": 12.8,
    "tensor, messages in layers": 32768, "tensor, GB in layers": 2048.0,
}  # fmt: skip
GROUPS = {"pp": 8, "dp": 4, "tp": 8}


def model() -> sw.Model:
    """Return the model that its tables show: 32 layers, gated feed-forward with biases, tied and learned positions."""
    attention = Attention(heads=32, kv_heads=32, head_dim=128, qkv_bias=True, out_bias=True, rotary=False)
    block = Block(mixers=(attention,), feed_forward=MLP(ffn=10880, gated=True, bias=True), norm="layernorm")
    return sw.Model(name="gpt", family="gpt", hidden=4096, vocab=50432, layers=(block,) * 32, tied=True,
                    norm="layernorm", positions=2048, dropout=True)  # fmt: skip


def analysed() -> sw.CommReport:
    """Return its example: 2 nodes of 8, tp 2, pp 2, micro-batch 4, global batch 512, distributed optimizer."""
    plan = sw.Plan(tp=2, pp=2, dp=4, micro_batch=4, sharding="distributed-optimizer", sequence_parallel=False)
    job = sw.Training(seq_len=2048, global_batch=512)
    return sw.comm(model(), sw.Cluster.parse("2x8xa100-sxm-80gb"), plan, job, sw.TrainingOptions(stack="megatron-2023"))


def rows(printed: dict[str, float], ours: dict[str, float], why: dict[str, str]) -> tuple[Row, ...]:
    """Return figures beside ours, with a letter where they are far."""
    found = []
    for name, value in printed.items():
        pair = Pair(reported=value, predicted=ours[name])
        found.append(Row(case=name, pairs=(pair,), why=why.get(name, "") if abs(pair.off) > FAR else ""))
    return tuple(found)


def memory(report: sw.TrainReport) -> dict[str, float]:
    """Return GB of the first stage as its table splits them."""
    first = report.evaluation.memory[0]
    return {
        "weights": first.weights / GIB,
        "gradients": first.gradients / GIB,
        "optimizer states": first.optimizer / GIB,
        "activations": (first.activations + first.logits) / GIB,
        "in all": first.peak / GIB,
    }


def traffic(report: sw.CommReport) -> dict[str, float]:
    """Return messages and GB of a step as its summary counts them."""
    axes, devices = report.axes, report.plan.num_devices
    layers = [flow for flow in report.on("tp", 0) if flow.message.part == "layer"]
    return {
        "pipeline, messages": axes["pp"].cluster_messages,
        "pipeline, GB": axes["pp"].cluster_bytes / GIB,
        "data, messages of a GPU": axes["dp"].messages_per_step,
        "data, GB of a GPU": axes["dp"].bytes_per_step / GIB,
        "tensor, messages in layers": devices * sum(flow.per_step for flow in layers),
        "tensor, GB in layers": devices * sum(flow.bytes_per_step for flow in layers) / GIB,
    }


def page() -> Page:
    """Return the example."""
    report = analysed()
    counts = {"whole model": report.whole_parameters / 1e9, "a GPU": report.parameters(0) / 1e9}
    billions = {name: value / 1e9 for name, value in PARAMETERS.items()}
    groups = {axis: float(len(report.groups(axis))) for axis in GROUPS}
    parts = (
        ("Parameters", "billions", 4, rows(billions, counts, {})),
        ("Memory of the whole model", "GB", 1, rows(WHOLE, memory(report.whole), {})),
        ("Memory of a GPU", "GB", 1, rows(DEVICE, memory(report.report), {})),
        ("Groups", "groups", 0, rows({axis: float(n) for axis, n in GROUPS.items()}, groups, {})),
        ("Messages and bytes of a step", "in all", 1, rows(TRAFFIC, traffic(report), OFF)),
    )
    return Page(
        title="The example of the Megatron-LM analysis tool",
        sources=("https://github.com/NVIDIA/Megatron-LM/pull/482 (September 2023), calculations; figure by figure in"
                 " tests/data/coming-from.md",),
        assumed=("nothing but a device, for it has none: A100 of 80 GB",),
        tables=tuple(Table(title=title, figures=(figure,), digits=(digits,), rows=found, reporter="the tool")
                     for title, figure, digits, found in parts),
        why=WHY,
    )  # fmt: skip


OFF = {"pipeline, messages": "p", "pipeline, GB": "p", "data, GB of a GPU": "d"}
WHY = {
    "p": "it counts each message at both ends and in both directions on every stage: four times what is sent",
    "d": "it has gathered parameters travel in fp32; they do in bf16",
}


def main() -> None:
    """Print the example."""
    show(page())


if __name__ == "__main__":
    main()
