"""The worked example of the Megatron-LM analysis tool, figure by figure: where it is right we are equal.

GPTModel of 32 layers on 2 nodes of 8, tp 2, pp 2, micro-batch 4, global batch 512, distributed optimizer
(github.com/NVIDIA/Megatron-LM pull request 482, September 2023). Where it is not, the test says what is right, and
tests/data/coming-from.md why.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from math import prod

import pytest

from shardwise.hardware import Cluster
from shardwise.models import MLP, Attention, Block, Model
from shardwise.ops import count_parameters
from shardwise.plans import Plan, Training
from shardwise.training import CommReport, TrainingOptions, comm
from shardwise.training._layer_tables import LayerRow, LayerTable

MIB, GIB = 2.0**20, 2.0**30
STREAM = (4, 2048, 4096)


def seed_model() -> Model:
    """The model that its tables show: 32 layers, gated feed-forward with biases, tied and learned positions."""
    attention = Attention(heads=32, kv_heads=32, head_dim=128, qkv_bias=True, out_bias=True, rotary=False)
    block = Block(mixers=(attention,), feed_forward=MLP(ffn=10880, gated=True, bias=True), norm="layernorm")
    return Model(name="GPTModel", family="gpt", hidden=4096, vocab=50432, layers=(block,) * 32, tied=True,
                 norm="layernorm", positions=2048, dropout=True)  # fmt: skip


@cache
def seed() -> CommReport:
    """The report of its example, on Megatron-LM of the time."""
    plan = Plan(tp=2, pp=2, dp=4, micro_batch=4, sharding="distributed-optimizer", sequence_parallel=False)
    job = Training(seq_len=2048, global_batch=512)
    return comm(seed_model(), Cluster.parse("2x8xa100-sxm-80gb"), plan, job, TrainingOptions(stack="megatron-2023"))


def row(tables: tuple[LayerTable, ...], name: str) -> LayerRow:
    """Return the operator of a name."""
    return next(r for t in tables for r in t.rows if r.name == name)


def matrix(tables: tuple[LayerTable, ...], name: str, index: int = 0) -> tuple[float, ...]:
    """Return the shape of a weight of an operator."""
    return row(tables, name).weights[index][1]


def mib(elements: float) -> float:
    """Return MiB of 16-bit elements, as it prints them: to one digit."""
    return round(2 * elements / MIB, 1)


# What it calls a layer -> (our operator, which of its weights); shapes and MB of the full model and on a GPU.
FULL_SHAPES = [
    ("word_embeddings", "embedding", 0, (50432, 4096), 394.0),
    ("position_embeddings", "embedding", 1, (2048, 4096), 16.0),
    ("query_key_value", "qkv", 0, (12288, 4096), 96.0),
    ("dense", "out", 0, (4096, 4096), 32.0),
    ("dense, bias", "out", 1, (4096,), 0.0),
    ("dense_h_to_4h", "mlp.up", 0, (21760, 4096), 170.0),
    ("dense_h_to_4h, bias", "mlp.up", 1, (21760,), 0.0),
    ("dense_4h_to_h", "mlp.down", 0, (4096, 10880), 85.0),
    ("dense_4h_to_h, bias", "mlp.down", 1, (4096,), 0.0),
]
RANK_SHAPES = [
    ("position_embeddings", "embedding", 1, (2048, 4096), 16.0),
    ("query_key_value", "qkv", 0, (6144, 4096), 48.0),
    ("dense_h_to_4h", "mlp.up", 0, (10880, 4096), 85.0),
    ("dense_h_to_4h, bias", "mlp.up", 1, (10880,), 0.0),
    ("dense, bias", "out", 1, (4096,), 0.0),
    ("dense_4h_to_h, bias", "mlp.down", 1, (4096,), 0.0),
]


@pytest.mark.parametrize(("theirs", "ours", "index", "shape", "size"), FULL_SHAPES, ids=lambda v: str(v))
def test_shapes_of_the_full_model(theirs: str, ours: str, index: int, shape: tuple[int, ...], size: float) -> None:
    """Shapes and megabytes of every weight of the whole model are equal, but for the bias of the attention input."""
    assert matrix(seed().whole_layers, ours, index) == shape, theirs
    assert round(mib(prod(shape)), 1) == size


@pytest.mark.parametrize(("theirs", "ours", "index", "shape", "size"), RANK_SHAPES, ids=lambda v: str(v))
def test_shapes_on_a_gpu(theirs: str, ours: str, index: int, shape: tuple[int, ...], size: float) -> None:
    """Shapes and megabytes on a GPU are equal where its megabytes follow its shapes."""
    assert matrix(seed().layers(0), ours, index) == shape, theirs
    assert mib(prod(shape)) == size


def test_layer_norms_have_a_scale_and_a_shift() -> None:
    """It prints w=[4096], b=[4096] and 0.0 MB for both norms; ours are those 8,192 values."""
    for name in ("norm1", "norm2"):
        for tables in (seed().whole_layers, seed().layers(0)):
            assert row(tables, name).parameters == 2 * 4096
            assert round(row(tables, name).parameter_bytes / MIB, 1) == 0.0


def test_the_bias_of_the_attention_input_is_as_long_as_its_outputs() -> None:
    """It prints b=[4096] beside w=[12288,4096] and w=[6144,4096]: a bias has an entry an output."""
    assert matrix(seed().whole_layers, "qkv", 1) == (12288,)
    assert matrix(seed().layers(0), "qkv", 1) == (6144,)


def test_megabytes_on_a_gpu_follow_the_split_shapes() -> None:
    """It prints w=[25216] with 394.0 MB and w=[4096,5440] with 85.0 MB: the sizes before the split."""
    rank = seed().layers(0)
    assert matrix(rank, "embedding", 0) == (25216, 4096)
    assert mib(25216 * 4096) == 197.0
    assert matrix(rank, "mlp.down", 0) == (4096, 5440)
    assert mib(4096 * 5440) == 42.5
    # Its w=[2048,4096] of dense is this matrix, its sides the other way round.
    assert matrix(rank, "out", 0) == (4096, 2048)
    assert mib(4096 * 2048) == 16.0


def test_parameters_of_the_full_model() -> None:
    """Its 6,642,245,632 lack two thirds of the attention input's biases and the final norm."""
    missing = 32 * (12288 - 4096) + 2 * 4096
    assert count_parameters(seed_model()) == seed().whole_parameters == 6_642_515_968 == 6_642_245_632 + missing


def test_parameters_on_a_gpu() -> None:
    """Its 1,718,898,688 keep the bias of dense_h_to_4h whole, and 4,096 of the 6,144 biases of the attention input."""
    kept, lost = 16 * (21760 - 10880), 16 * (6144 - 4096)
    assert seed().parameters(0) == 1_718_757_376 == 1_718_898_688 - kept + lost


def test_memory_of_the_full_model() -> None:
    """12.4, 24.7 and 74.2 GB are equal to its digit, 156.2 GB in all to 0.5 %, activations to 1.5 %."""
    memory = seed().whole.evaluation.memory[0]
    states = (memory.weights, memory.gradients, memory.optimizer)
    assert [round(value / GIB, 1) for value in states] == [12.4, 24.7, 74.2]
    assert (memory.activations + memory.logits) / GIB == pytest.approx(44.8, rel=0.015)
    assert memory.peak / GIB == pytest.approx(156.2, rel=0.005)


def test_memory_on_a_gpu() -> None:
    """3.2, 6.4 and 4.8 GB are equal to its digit; 25.8 GB of activations and 40.2 GB in all to 0.5 %."""
    memory = seed().report.evaluation.memory[0]
    states = (memory.weights, memory.gradients, memory.optimizer)
    assert [round(value / GIB, 1) for value in states] == [3.2, 6.4, 4.8]
    assert memory.activations / GIB == pytest.approx(25.8, rel=0.005)
    assert memory.peak / GIB == pytest.approx(40.2, rel=0.005)
    assert memory.in_flight == 2


def saved(tables: tuple[LayerTable, ...], *names: str) -> float:
    """Return the MiB that operators keep."""
    return sum(row(tables, name).activation_bytes for name in names) / MIB


# What it prints -> MB of the full model and on a GPU, and the operators of ours that keep the same tensors.
SAVED = [
    ("input_layernorm", 64.0, 64.0, ("norm1",)),
    ("rearrange, flash attention", 192.0 + 64.0, 96.0 + 32.0, ("attention",)),
    ("rearrange of the output", 64.0, 32.0, ("out",)),
    ("dense", 64.0, 64.0, ("qkv",)),
    ("post_attention_layernorm", 64.0, 64.0, ("norm2",)),
    ("dense_4h_to_h", 64.0, 64.0, ("mlp.up",)),
]
STATISTICS = 1.25  # MiB a layer at most: logsumexp of attention, mean and deviation of the norms.


@pytest.mark.parametrize(("theirs", "full", "gpu", "ours"), SAVED, ids=lambda v: str(v))
def test_activations_row_by_row(theirs: str, full: float, gpu: float, ours: tuple[str, ...]) -> None:
    """Each tensor of the size of the stream or of the heads has its row; ours stands with the product that keeps it."""
    assert saved(seed().whole_layers, *ours) == pytest.approx(full, abs=STATISTICS)
    assert saved(seed().layers(0), *ours) == pytest.approx(gpu, abs=STATISTICS)


def test_the_activation_function_is_split() -> None:
    """680 MB of bias_glue for the full model; it prints the same on a GPU, where tp 2 leaves half."""
    assert saved(seed().whole_layers, "mlp.activation") == 680.0
    assert saved(seed().layers(0), "mlp.activation") == 340.0


def test_dropout_keeps_two_masks() -> None:
    """It gives drop_add_fusion 96 MB a layer; two masks of a byte an element are 64."""
    for tables in (seed().whole_layers, seed().layers(0)):
        assert saved(tables, "add1", "add2") == 64.0


def test_a_layer_keeps_what_it_says_and_not_what_its_rows_add_up_to() -> None:
    """1320.0 MB a layer of the full model is right, its rows add up to 1,352; on a GPU 820, where it prints 1320.0."""
    theirs = 64.0 + 384.0 + 64.0 + 744.0 + 96.0
    assert theirs == 1352.0
    full, rank = (next(t for t in x if t.name == "layer") for x in (seed().whole_layers, seed().layers(0)))
    assert full.activation_bytes / MIB == pytest.approx(1320.0, abs=STATISTICS)
    assert rank.activation_bytes / MIB == pytest.approx(820.0, abs=STATISTICS)
    # Its 25.8 GB on a GPU are two micro-batches of sixteen layers of 820 MB with 96 MB of the embedding each.
    assert round(2 * (16 * 820 + 96) / 1024, 1) == 25.8


def test_the_embedding_keeps_its_mask() -> None:
    """It gives the embedding 96 MB: a mask of 32, and its output, which is the first norm's input and counted there."""
    for tables in (seed().whole_layers, seed().layers(0)):
        assert saved(tables, "embedding") == pytest.approx(32.0, abs=0.5)


MESSAGES = [
    ("word_embeddings", "embedding", "forward"),
    ("query_key_value", "qkv", "backward"),
    ("dense", "out", "forward"),
    ("dense_h_to_4h", "mlp.up", "backward"),
    ("dense_4h_to_h", "mlp.down", "forward"),
]


@pytest.mark.parametrize(("theirs", "ours", "phase"), MESSAGES, ids=lambda v: str(v))
def test_each_tensor_parallel_message(theirs: str, ours: str, phase: str) -> None:
    """[4,2048,4096], 64.0 MB, allreduce: the same five messages, in the same pass."""
    (sent,) = row(seed().layers(0), ours).messages
    message, count = sent
    assert (message.phase, message.verb, message.shape, count) == (phase, "all_reduce", STREAM, 1), theirs
    assert message.size_bytes == 64.0 * MIB


def named(*texts: str) -> list[tuple[str, ...]]:
    """Return groups from lines such as "n0_g0 n0_g1"."""
    return [tuple(text.split()) for text in texts]


GROUPS = {
    "pp": named(*(f"n0_g{i} n1_g{i}" for i in range(8))),
    "dp": named(*(f"n{n}_g{i} n{n}_g{i + 2} n{n}_g{i + 4} n{n}_g{i + 6}" for n in (0, 1) for i in (0, 1))),
    "tp": named(*(f"n{n}_g{i} n{n}_g{i + 1}" for n in (0, 1) for i in (0, 2, 4, 6))),
}


@pytest.mark.parametrize("axis", GROUPS)
def test_groups_have_the_members_that_it_prints(axis: str) -> None:
    """8 groups of the pipeline, 4 of data and 8 of tensor parallelism, rank by rank."""
    assert [tuple(map(seed().place, group)) for group in seed().groups(axis)] == GROUPS[axis]


def test_stages_have_the_devices_and_the_layers_that_it_prints() -> None:
    """Stage 0 is node 0 with layers 0 to 15, stage 1 node 1 with layers 16 to 31."""
    first, last = seed().report.evaluation.stages
    assert (sum(first.layers), sum(last.layers)) == (16, 16)
    assert [seed().place(group[0]) for group in seed().groups("pp")] == [f"n0_g{i}" for i in range(8)]
    for node, stage in enumerate(zip(*seed().groups("pp"), strict=True)):
        assert {seed().place(rank).partition("_")[0] for rank in stage} == {f"n{node}"}


def test_pipeline_messages() -> None:
    """One message is its [4,2048,4096] of 64.0 MB; a device sends 32 of them, not 128, and the cluster 512, not 2,048.

    It counts isend and irecv of one message, forward and backward, on each device: four times what is sent.
    """
    (flow,) = seed().on("pp", 0)
    assert (flow.message.verb, flow.message.shape) == ("send", STREAM)
    assert flow.message.size_bytes == 64.0 * MIB
    assert flow.per_step == 32 == 128 / 4
    assert flow.bytes_per_step == 2048.0 * MIB == 8192.0 * MIB / 4
    axis = seed().axes["pp"]
    assert axis.cluster_messages == 512 == 2048 / 4
    assert axis.cluster_bytes == 32.0 * GIB == 128.0 * GIB / 4


def test_data_parallel_messages() -> None:
    """One reduce-scatter of 6.4 GB after 32 micro-batches and one all-gather, of 3.2 GB in bf16 and not of 6.4."""
    scatter, gather = seed().on("dp", 0)
    assert (scatter.message.verb, scatter.per_step) == ("reduce_scatter", 1)
    assert round(scatter.message.size_bytes / GIB, 1) == 6.4
    assert (gather.message.verb, gather.per_step) == ("all_gather", 1)
    assert round(gather.message.size_bytes / GIB, 1) == 3.2
    assert seed().report.evaluation.sizes.num_micro == 32
    axis = seed().axes["dp"]
    # Its 2 messages and 12.8 GB of the cluster are those of one device.
    assert axis.messages_per_step == 2
    assert axis.cluster_messages == 2 * 16


def layers_alone(index: int) -> tuple[float, float, float]:
    """Return messages of a device in its layers: of a micro-batch, of a step, and bytes of the step."""
    flows = [f for f in seed().on("tp", index) if f.message.part == "layer"]
    return (
        sum(f.per_micro_batch for f in flows),
        sum(f.per_step for f in flows),
        sum(f.bytes_per_step for f in flows),
    )


def test_tensor_parallel_counts_of_the_layers() -> None:
    """4 a layer, 64 a micro-batch, 2,048 and 128.0 GB a step of a device; 32,768 and 2,048 GB of the cluster."""
    for index in (0, 1):
        micro, step, size = layers_alone(index)
        assert (micro, micro / 16, step) == (64, 4, 2048)
        assert (size / GIB, size / GIB / 32, size / GIB / 32 / 16) == (128.0, 4.0, 0.25)
    devices = seed().plan.num_devices
    assert (64 * devices, 4.0 * devices) == (1024, 64.0)
    assert (layers_alone(0)[1] * devices, layers_alone(0)[2] / GIB * devices) == (32768, 2048.0)


def test_tensor_parallel_counts_of_the_ends() -> None:
    """It leaves out the embedding's all-reduce, which it lists, the head's, and the three small ones of the loss."""
    ends = [[f for f in seed().on("tp", i) if f.message.part != "layer"] for i in (0, 1)]
    assert [(f.message.where, f.per_step) for f in ends[0]] == [("embedding", 32)]
    assert [(f.message.where, f.per_step) for f in ends[1]] == [("head", 32), ("loss", 96)]
    axis = seed().axes["tp"]
    assert axis.cluster_messages == 32768 + 8 * (32 + 32 + 96)
    big, small = 8 * 2 * 32 * 64 * MIB, 8 * 96 * 4 * 4 * 2048
    assert axis.cluster_bytes == 2048.0 * GIB + big + small


def test_the_table_is_shared_by_the_ends() -> None:
    """It has no message for the tied table, whose gradients the two ends add up: 25,216 x 4,096 in fp32."""
    axis = seed().axes["embedding"]
    assert (axis.size, axis.num_groups, axis.messages_per_step) == (2, 8, 1)
    assert axis.bytes_per_step == 25216 * 4096 * 4


def test_totals_have_one_scope() -> None:
    """Its 34,818 messages and 2,188.8 GB add one device's data parallelism to the cluster's others; ours do not mix."""
    assert 2048 + 2 + 32768 == 34818
    assert round(128.0 + 12.8 + 2048.0, 1) == 2188.8
    axes = list(seed().axes.values())
    devices = [sum(f.per_step for f in flows) for flows in seed().flows]
    assert sum(a.messages_per_step for a in axes) == devices[seed().reference]
    assert sum(a.cluster_messages for a in axes) == 8 * sum(devices)


def test_splitting_is_shown_by_product() -> None:
    """Each product before and after a split, and its use of the GPU: short kernels keep the clock a percent higher."""
    products = {p.name: p for p in seed().gemms}
    assert products["qkv"].before == (8192, 4096, 12288)
    assert products["qkv"].after == (8192, 4096, 6144)
    assert products["mlp.down"].after == (8192, 5440, 4096)
    for product in products.values():
        assert 0 < product.efficiency_after <= 1.01 * product.efficiency_before < 1
    names = [p.name for p in seed().gemms]
    assert all(a != b for a, b in pairwise(names))
