"""Laws of ledgers: conservation over ranks, names, recompute, and numbers that are columns."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.helpers import ONE, layout
from shardwise.ledger.op import Op
from shardwise.ledger.saved import keep, tensor_bytes
from shardwise.models import Attention, Block, LatentAttention, Model, MoE, load_model
from shardwise.ops.block import block_ops
from shardwise.ops.head import embedding, final_norm, head, loss
from shardwise.ops.inputs import LayoutOptions, ParallelSizes, TokenBatch
from shardwise.ops.layout import Layout, lay_out
from shardwise.plans import find_stack, stack_names

# One model of every kind of mixer and feed-forward.
NAMES = (
    "llama-3.1-8b", "gemma-2-9b", "gemma-3n-e2b", "gpt2", "falcon-40b", "mixtral-8x7b", "gpt-oss-20b", "deepseek-v3.2",
    "deepseek-v4-flash", "qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "mamba-2.8b", "jamba-v0.1", "falcon-h1-0.5b",
    "zamba2-7b", "rwkv-4-169m", "xlstm-7b", "recurrentgemma-2b", "lfm2-350m",
)  # fmt: skip


def ledger(y: Layout[Any], model: Model) -> list[Op[Any]]:
    """Every operator of a model: what stands around its blocks and each distinct block."""
    around = (*embedding(y, model), *final_norm(y, model), *head(y, model), *loss(y, model))
    return [*around, *(op for block in model.kinds for op in block_ops(y, block, model.hidden))]


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_has_one_size_and_is_kept_once(name: str) -> None:
    """On every stack a saved tensor of a block has one name and one size, born in a region of the block or before."""
    model = load_model(name)
    for stack, block in product(stack_names(), model.kinds):
        ops = block_ops(layout({"dropout": True}, stack), block, model.hidden)
        sizes = {(t.name, t.size_bytes) for op in ops for t in op.saves}
        kept = keep(ops).kept
        assert len(sizes) == len(kept) == len({t.name for t in kept}), stack
        # A window that the sequence does not reach makes no mask.
        assert all(t.size_bytes > 0 or t.name == "attention.mask" for t in kept), stack
        regions = {op.region.split(".")[0] for op in ops} | {""}
        assert {t.born.split(".")[0] for t in kept} <= regions | {"norm1", "norm2", "attention", "mlp", "ssm"}, stack


@pytest.mark.parametrize("stack", ["megatron", "transformers"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tp", [2, 8])
def test_whole_parameters_do_not_depend_on_tp(name: str, stack: str, tp: int) -> None:
    """The weights of the model are the same whatever splits them, and a rank never has more than all of them."""
    model = load_model(name)
    one, split = ledger(layout({}, stack), model), ledger(layout({}, stack, tp=tp, sequence_parallel=True), model)
    for a, b in zip(one, split, strict=True):
        assert [(w.name, w.whole) for w in a.weights] == [(w.name, w.whole) for w in b.weights]
        assert all(w.elements <= v.elements for w, v in zip(b.weights, a.weights, strict=True))


@pytest.mark.parametrize("tp", [1, 2, 8, 16, 64])
def test_key_value_heads_are_never_below_one(tp: int) -> None:
    """Ranks beyond the key-value heads hold one head each: the cache read stops shrinking, queries go on."""
    m = Attention(heads=64, kv_heads=8, head_dim=128)
    y = layout({"S": 1, "context": 1000, "phase": "decode"}, tp=tp)
    ops = {op.name: op for op in block_ops(y, Block(mixers=(m,), feed_forward=None, norms=1), 8192)}
    heads, kv = 64 // tp, max(8 // tp, 1)
    assert ops["attention"].batch == heads
    assert ops["attention"].forward_bytes == 2 * 2 * (1001 * kv * 256 + heads * 256)
    assert ops["qkv"].columns == (heads + 2 * kv) * 128


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2", "gemma-2-9b"])
@pytest.mark.parametrize(("tp", "tp2"), [(2, 2), (4, 2), (2, 8)])
def test_tiles_of_matrices_add_up(name: str, tp: int, tp2: int) -> None:
    """Two-dimensional layouts hold each matrix exactly once over their grid."""
    model = load_model(name)
    y = layout({"S": 128}, tp=tp, tp2=tp2, layout="summa")
    for op in ledger(y, model):
        for weight in op.weights:
            if weight.kind == "matrix":
                assert weight.elements * tp * tp2 == weight.whole, weight


def test_tokens_of_a_tile_are_those_of_all_sequences() -> None:
    """A rank of a two-dimensional layout has its share of the tokens of every sequence of the micro-batch."""
    assert layout({"B": 3, "S": 128}, tp=2, tp2=4, layout="summa").tokens == 3 * 128 / 4


def test_a_router_reads_its_input_and_writes_scores_in_fp32() -> None:
    """Forward moves T x D elements of the input and four bytes a score."""
    model = load_model("mixtral-8x7b")
    y = layout({"S": 128})
    [router] = [op for op in block_ops(y, model.layers[0], model.hidden) if op.name.endswith("router")]
    assert router.forward_bytes == y.a * y.tokens * 4096 + 4 * y.tokens * 8


def test_a_router_in_fp32_keeps_a_copy_of_its_input() -> None:
    """DeepSeek's eager router casts its input, four bytes an element, where the stack keeps what transformers keeps."""
    model = load_model("deepseek-v2-lite")
    y = layout({"S": 128}, "deepspeed")
    kept = [t for op in block_ops(y, model.layers[1], model.hidden) for t in op.saves if t.name.endswith("fp32 input")]
    assert {tensor.size_bytes for tensor in kept} == {4 * y.tokens * 2048}


@pytest.mark.parametrize(
    ("name", "stack", "kept"),
    [
        ("mixtral-8x7b", "megatron", 4 * 8 + 8),
        ("deepseek-v3", "megatron", 4 * 256 + 256 + 4 * 8 + 4),
        ("mixtral-8x7b", "deepspeed", 4 * 8 + 8 * 2 + 4 * 2 + 4),
    ],
)
def test_weights_that_sum_to_one_keep_their_sum_where_they_are_divided_by_it(name: str, stack: str, kept: int) -> None:
    """Megatron-LM takes the softmax of the chosen logits, and divides sigmoid scores alone."""
    model = load_model(name)
    y = layout({"S": 128}, stack)
    [router] = [op for op in block_ops(y, model.layers[-1], model.hidden) if op.name.endswith("router")]
    assert sum(tensor.size_bytes for tensor in router.saves if ".router." in tensor.name) == kept * y.tokens


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "mamba2-2.7b"])
@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallelism_divides_what_is_kept(name: str, cp: int) -> None:
    """Ranks of a split sequence keep exactly their share."""
    model = load_model(name)
    for block in model.kinds:
        whole, part = (
            tensor_bytes(keep(block_ops(layout({"S": 512}, cp=c), block, model.hidden)).kept) for c in (1, cp)
        )
        assert part * cp == whole


@pytest.mark.parametrize("name", NAMES)
def test_flops_are_linear_in_the_batch(name: str) -> None:
    """Twice the sequences are twice the FLOPs of every operator but those of routed experts, whose rows are shared."""
    model = load_model(name)
    one, two = (ledger(layout({"B": b}), model) for b in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert b.flops == 2 * a.flops
        assert b.model_flops == 2 * a.model_flops


def columns_equal_scalars(build: Callable[[Layout[Any]], list[Op[Any]]], sizes: list[dict[str, float]]) -> None:
    """Check that ledgers of a column equal those of its entries."""
    keys = sizes[0]
    degree = {k: np.array([s[k] for s in sizes]) for k in keys if k in ONE}
    work = {k: np.array([s[k] for s in sizes]) for k in keys if k not in ONE}
    wide = build(layout(work, **degree))
    for i, size in enumerate(sizes):
        narrow = build(layout({k: v for k, v in size.items() if k not in ONE}, **{k: size[k] for k in degree}))
        for a, b in zip(wide, narrow, strict=True):
            for field in ("flops", "forward_bytes", "backward_flops", "backward_bytes", "weight_bytes", "output_bytes"):
                assert _entry(getattr(a, field), i) == getattr(b, field), (a.name, field)
            for s, t in zip((*a.saves, *a.reads), (*b.saves, *b.reads), strict=True):
                assert _entry(s.size_bytes, i) == t.size_bytes, s.name
            for v, w in zip(a.weights, b.weights, strict=True):
                assert (_entry(v.elements, i), _entry(v.whole, i)) == (w.elements, w.whole)
            for c, d in zip((*a.forward, *a.backward), (*b.forward, *b.backward), strict=True):
                assert (_entry(c.size_bytes, i), _entry(c.count, i)) == (d.size_bytes, d.count)


def _entry(value: Any, i: int) -> float:
    return float(np.broadcast_to(np.asarray(value, dtype=float), (2,))[i])


@pytest.mark.parametrize("phase", ["train", "prefill", "decode"])
@pytest.mark.parametrize("name", NAMES)
def test_columns_equal_scalars(name: str, phase: str) -> None:
    """A column of two layouts gives exactly the two ledgers, in every phase."""
    model = load_model(name)
    new = 1.0 if phase == "decode" else 512.0
    sizes = [
        {"B": 1.0, "S": new, "context": 0.0, "tp": 1.0, "cp": 1.0, "ep": 1.0},
        {"B": 4.0, "S": new, "context": 96.0, "tp": 2.0, "cp": 1.0, "ep": 2.0},
    ]

    def build(y: Layout[Any]) -> list[Op[Any]]:
        work = TokenBatch(B=y.work.B, S=y.work.S, context=y.work.context, phase=phase)  # type: ignore[arg-type]
        return ledger(lay_out(y.degrees, work, y.choices), model)

    columns_equal_scalars(build, sizes)


@given(st.sampled_from((1e3, 1e5, 1e7)), st.sampled_from((1, 64, 4096)))
@settings(max_examples=9, deadline=None)
def test_columns_hold_a_trillion_parameters(tokens: float, batch: int) -> None:
    """Ledgers of a trillion-parameter model on columns neither overflow nor turn negative."""
    m = LatentAttention(heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                        v_head_dim=128)  # fmt: skip
    block = Block(mixers=(m,), feed_forward=MoE(experts=512, top_k=8, ffn=2048))
    two = np.array([tokens, tokens * 2])
    degrees = ParallelSizes(**{k: np.array([1.0, 1.0]) for k in ONE})
    work = TokenBatch(B=np.array([batch, batch], dtype=float), S=two, context=two * 0, coverage="full")
    ops = block_ops(lay_out(degrees, work, LayoutOptions(stack=find_stack("megatron"))), block, 7168)
    parameters = sum(w.whole for op in ops for w in op.weights)
    assert (80 * parameters > 1e12).all()
    total = sum(op.flops + op.backward_flops + op.weight_flops for op in ops)
    assert np.isfinite(total).all()
    assert (total[1] > 2 * total[0]) and total[0] > 6 * tokens * batch * 1e8
