"""The cross entropy: what a stack keeps and makes for every logit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ops.helpers import layout
from shardwise.hardware import Cluster
from shardwise.models import Attention, Block, Model, model_from_config
from shardwise.ops.head import head, local_vocab, loss, tables
from shardwise.ops.layout import Layout, lay_out
from shardwise.plans import Plan, Recompute, Settings, Training, find_stack, tuning_of
from shardwise.training import TrainingOptions, train
from shardwise.training._blocks import BlockCost


@pytest.mark.parametrize(
    ("stack", "kernel", "bytes_per_logit"),
    [
        ("megatron", "", 6),
        ("megatron-2023", "", 10),
        ("megatron-scores", "", 6),
        ("megatron", "vocab-parallel-compiled", 10),
        ("megatron", "fused", 4),
        ("unsloth-2024", "", 6),
        ("transformers", "", 12),
        ("transformers-4-48", "", 14),
        ("transformers-2024", "", 12),
        ("fsdp-2024", "", 16),
        ("deepspeed-2023", "", 6),
        ("trainer-2023", "", 12),
        ("torchtune-compiled", "compiled-fp32", 8),
        ("verl", "", 4),
    ],
)
def test_a_logit_takes_the_bytes_of_its_kernel(stack: str, kernel: str, bytes_per_logit: int) -> None:
    """Megatron holds 6 bytes a logit where the maximum is subtracted in place, 10 where it or fusion makes a copy."""
    model, found = Model.load("gpt2"), find_stack(stack)
    base = layout({"B": 1}, stack)
    y = lay_out(base.degrees, base.work, replace(base.choices, stack=replace(found, loss=kernel or found.loss)))
    (op,) = loss(y, model)
    held = sum(tensor.size_bytes for tensor in op.saves) + op.transient_bytes
    assert held == bytes_per_logit * 64 * local_vocab(y, model)


@pytest.mark.parametrize(("tokens", "chunk"), [(64, 1), (4096, 64), (5000, 128), (131072, 2048)])
def test_a_fused_linear_loss_holds_one_chunk_of_logits(tokens: int, chunk: int) -> None:
    """A chunk has next_power_of_2(ceil(T / ceil(V / D))) tokens, and forward keeps both gradients of the head."""
    model = Model.load("gpt2")
    y = _with_loss(tokens, "fused-linear")
    (op,), (before,) = loss(y, model), head(y, model)
    assert op.transient_bytes == 2 * chunk * model.vocab
    assert sum(t.size_bytes for t in before.saves) == 2 * tokens * 768 + 2 * 768 * model.vocab
    assert not op.saves


@pytest.mark.parametrize(("tokens", "chunks"), [(64, 64), (4096, 64), (5000, 40)])
@pytest.mark.parametrize("trains", [(), ("none",)])
def test_each_chunk_of_a_fused_linear_loss_casts_a_wide_weight(tokens: int, chunks: int, trains: tuple[str]) -> None:
    """Autocast makes 16 bits of the weight for each chunk's logits, and again for its gradient where it is frozen.

    A custom function on torch 2.14.1 casts a frozen weight twice a chunk, one that trains once more than it has chunks;
    the head has one of these casts.
    """
    model, base = Model.load("gpt2"), _with_loss(tokens, "fused-linear")
    tuning = tuning_of(Training(seq_len=tokens, global_batch=1, trains=trains), find_stack("trl")) if trains else None
    y = lay_out(base.degrees, base.work, replace(base.choices, autocast=True, tuning=tuning))
    (op,), (narrow,) = loss(y, model), loss(base, model)
    copy = 2 * model.hidden * model.vocab
    casts = 2 * chunks - 1 if trains else chunks
    assert op.forward_bytes - narrow.forward_bytes == 3 * copy * casts
    assert op.transient_bytes - narrow.transient_bytes == copy


def test_cut_cross_entropy_computes_logits_again() -> None:
    """CCE keeps the head's input and the log-sum of each token, and backward has the head's FLOPs once more."""
    model, y, plain = Model.load("gpt2"), _with_loss(512, "cce"), _with_loss(512, "")
    (op,), (cut,), (whole,) = loss(y, model), head(y, model), head(plain, model)
    assert sum(t.size_bytes for t in op.saves) == 4 * 512 + 4 * model.vocab
    assert cut.backward_flops == whole.backward_flops + whole.flops
    assert cut.saves == whole.saves


@pytest.mark.parametrize(
    ("name", "tokens", "rows"), [("gpt2", 512, 512), ("gpt2", 8192, 1335.3), ("llama-2-7b", 4096, 2097.2)]
)
def test_fused_log_probabilities_hold_one_tile(name: str, tokens: int, rows: float) -> None:
    """AgileRL sizes a tile of fp32 logits to 256 MiB, and its product gives it out in 16 bits beside."""
    model = Model.load(name)
    (op,) = loss(_with_loss(tokens, "fused-logprobs"), model)
    assert not op.saves
    assert op.transient_bytes == pytest.approx(6 * rows * model.vocab, rel=1e-4)


@pytest.mark.parametrize("tokens", [16384, 65536])
def test_log_probabilities_by_entries_hold_all_tokens_of_a_chunk(tokens: int) -> None:
    """prime-rl takes 2,048 entries at a time of all tokens: 22 bytes each at most, and the gradient of the input."""
    model = Model.load("qwen3-0.6b")
    (op,), (cut,), (whole,) = (
        loss(_with_loss(tokens, "chunked-entries"), model),
        head(_with_loss(tokens, "chunked-entries"), model),
        head(_with_loss(tokens, ""), model),
    )
    assert op.transient_bytes == tokens * (22 * 2048 + 2 * model.hidden)
    assert sum(t.size_bytes for t in op.saves) == 8 * tokens
    assert (cut.backward_flops, cut.output_bytes) == (whole.backward_flops + whole.flops, 0)


# (tokens, width of the head's input, vocabulary, bytes a value) -> bytes above what is kept, with and without the
# gradient of the weight: a storage tracker of torch 2.13.0 on ChunkedLogProbFunction of trl 1.16.0, its Triton kernels,
# which allocate nothing, left out.
TRL = {
    (5000, 64, 70000, "bf16-pure"): (297_255_464, 270_375_464),
    (3000, 128, 20000, "fp32"): (405_004_008, 394_764_008),
}


@pytest.mark.parametrize("case", TRL)
@pytest.mark.parametrize("trains", [True, False])
def test_the_fused_head_of_trl_holds_a_tile_and_sums_in_fp32(case: tuple[int, int, int, str], trains: bool) -> None:
    """TRL keeps two values a token, and backward has one tile, fp32 gradients of input and weight and their casts."""
    tokens, width, vocab, precision = case
    config = {"model_type": "llama", "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2,
              "intermediate_size": 64, "vocab_size": vocab, "max_position_embeddings": 8192}  # fmt: skip
    model = model_from_config(config | {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False})
    job = Training(seq_len=tokens, global_batch=1, precision=precision, trains=() if trains else ("layers:0",))
    plan = Plan(micro_batch=1, sequence_parallel=False)
    report = train(model, Cluster.parse("h100-sxm-80gb"), plan, job, TrainingOptions(stack="trl"))
    part = report.evaluation.parts.loss
    assert part.transient_bytes == pytest.approx(TRL[case][not trains], rel=2e-4)
    assert part.kept_bytes == 8 * tokens


# (tokens, width, vocabulary, recipe, whether the head trains) -> bytes above the head's input and weight at the peak of
# trl 1.14.0's _chunked_cross_entropy_loss and its backward pass, all storages counted with torch 2.13.0, under a CPU's
# autocast where the recipe has it.
CHUNKED = {
    (1024, 64, 8192, "amp-bf16", True): 37_283_096, (1024, 512, 2048, "amp-bf16", True): 19_162_392,
    (768, 2048, 2048, "amp-bf16", True): 65_030_156, (1024, 64, 8192, "amp-bf16", False): 35_152_816,
    (1024, 64, 8192, "bf16-pure", True): 34_891_032, (1024, 1024, 256, "amp-bf16", False): 16_801_804,
}  # fmt: skip


@pytest.mark.parametrize("case", CHUNKED)
def test_chunks_of_trl_hold_one_chunk_and_sums_of_whole_gradients(case: tuple[int, int, int, str, bool]) -> None:
    """A chunk of 256 tokens has logits; gradients of the whole weight and input are added into new tensors."""
    tokens, width, vocab, precision, trains = case
    config = {"model_type": "llama", "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2,
              "intermediate_size": 64, "vocab_size": vocab, "max_position_embeddings": 8192}  # fmt: skip
    model = model_from_config(config | {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False})
    job = Training(seq_len=tokens, global_batch=1, precision=precision, trains=() if trains else ("layers:0",))
    job = job if trains else replace(job, base="fp32")
    plan = Plan(micro_batch=1, sequence_parallel=False)
    report = train(model, Cluster.parse("h100-sxm-80gb"), plan, job, TrainingOptions(stack="trl-2026"))
    part = report.evaluation.parts.loss
    assert part.transient_bytes + part.kept_bytes == pytest.approx(CHUNKED[case], rel=0.05)
    assert part.kept_bytes == (4 if precision == "amp-bf16" else 2) * tokens * width


# (sequences, their tokens, width, vocabulary) -> bytes above the head's input and its gathered weight at the peak of
# torchtitan 0.3.0's ChunkedLossWrapper: every storage counted with torch 2.13.0, the head under fully_shard with bf16
# parameters and a reduction in fp32; labels and their losses are among it.
TITAN = {(1, 4096, 256, 8192): 71_335_952, (4, 1024, 256, 8192): 73_465_872, (1, 1024, 512, 16384): 73_539_600}


@pytest.mark.parametrize("case", TITAN)
def test_pieces_of_head_and_loss_hold_one_piece_and_a_wide_gradient_of_the_weight(
    case: tuple[int, int, int, int],
) -> None:
    """Of eight pieces one has logits, beside fp32 gradients of the head's input and weight, or their copy to send."""
    batch, tokens, width, vocab = case
    model = replace(Model.load("gpt2"), hidden=width, vocab=vocab)
    y = layout({"B": batch, "S": tokens}, "torchtitan-2026")
    (op,), (before,) = loss(y, model), head(y, model)
    assert op.transient_bytes == pytest.approx(TITAN[case], rel=2e-3)
    assert sum(t.size_bytes for t in before.saves) == 2 * batch * tokens * width
    assert not op.saves


def test_pieces_of_head_and_loss_run_over_a_split_vocabulary() -> None:
    """Tensor parallelism splits what the pieces hold, and sums maxima, targets and sums as whole losses do."""
    model = Model.load("llama-3.1-8b")
    one, two = (layout({"B": 1, "S": 8192}, "torchtitan-2026", tp=tp) for tp in (1, 2))
    (whole,), (half,) = loss(one, model), loss(two, model)
    assert half.transient_bytes - 4 * 8192 * 4096 == pytest.approx(
        (14 + 4) * 1024 * model.vocab / 2 + 4 * model.vocab * 4096 / 2
    )
    assert half.forward[0].count == 3
    assert whole.transient_bytes > half.transient_bytes


@pytest.mark.parametrize("kernel", ["fused-linear", "cce", "fused-logprobs", "chunked-entries"])
@pytest.mark.parametrize("tokens", [512, 8192, 65536])
def test_losses_without_logits_hold_less(kernel: str, tokens: int) -> None:
    """What loss and head hold together is below that of whole logits at any length from 512 tokens on."""
    model = Model.load("llama-3.1-8b")

    def held(which: str) -> float:
        y = _with_loss(tokens, which)
        return sum(
            op.transient_bytes + op.output_bytes + sum(t.size_bytes for t in op.saves)
            for op in (*head(y, model), *loss(y, model))
        )

    gradient = 2 * model.hidden * model.vocab if kernel == "fused-linear" else 0
    assert held(kernel) - gradient < held("")


def _with_loss(tokens: int, kernel: str) -> Layout[float]:
    found, base = find_stack("transformers"), layout({"B": 1, "S": tokens}, "transformers")
    settings = replace(found.settings, loss=kernel)
    return lay_out(base.degrees, base.work, replace(base.choices, stack=replace(found, settings=settings)))


@pytest.mark.parametrize(("trains", "gradients"), [((), 2), (("none",), 0), (("none", "head"), 2)])
def test_a_compiled_piece_gives_its_logits_room_to_their_gradient(trains: tuple[str, ...], gradients: int) -> None:
    """Pieces of torchtune hold 16-bit logits and an eighth more, beside two weight gradients of a head that trains.

    torch.compile keeps the 16-bit logits of a piece and two numbers a token (hooks of torch 2.13.0); autograd runs the
    pieces of the loss before those of the head, whose gradients it adds up.
    """
    model, job = Model.load("llama-3.1-8b"), Training(seq_len=512, global_batch=1, trains=trains)
    base, stack = layout({"B": 1, "S": 512}, "torchtune-compiled"), find_stack("torchtune-compiled")
    tuning = tuning_of(job, stack) if trains else None
    (op,) = loss(lay_out(base.degrees, base.work, replace(base.choices, tuning=tuning)), model)
    logits = 2 * 512 * model.vocab
    assert op.saves[0].size_bytes == logits
    assert op.transient_bytes == logits / 8 + gradients * 2 * model.hidden * model.vocab


def test_a_loss_in_its_logits_holds_them_and_the_gradient_behind_the_head() -> None:
    """Transformer Engine's cross entropy writes the gradient over the 16-bit logits."""
    model, base = Model.load("gpt2"), layout({"B": 1}, "megatron")
    found = replace(find_stack("megatron"), loss="vocab-parallel-in-place")
    y = lay_out(base.degrees, base.work, replace(base.choices, stack=found))
    (op,) = loss(y, model)
    assert op.saves[0].size_bytes == 2 * 64 * local_vocab(y, model)
    assert op.transient_bytes == 2 * 64 * model.hidden


def test_a_tiled_feed_forward_holds_one_piece() -> None:
    """Of 8 pieces the layer keeps the feed-forward's input, holds an eighth of the rest, and runs it once more."""
    model, cluster = Model.load("llama-3.1-8b"), Cluster.parse("1xh100-sxm-80gb")
    job, plan = Training(seq_len=8192, global_batch=1), Plan(micro_batch=1)

    def layer(recompute: Recompute, pieces: int) -> BlockCost[float]:
        stack = replace(find_stack("transformers"), settings=Settings(tile_mlp=pieces))
        return (
            train(model, cluster, replace(plan, recompute=recompute), job, TrainingOptions(stack=stack))
            .evaluation.parts.kinds[0]
        )  # fmt: skip

    whole, tiled = layer("none", 1), layer("none", 8)
    internals = 8 * 8192 * 14336
    assert whole.kept_bytes - tiled.kept_bytes == internals
    assert tiled.dropped_bytes == internals / 8
    again, both = layer("full", 1), layer("full", 8)
    assert again.dropped_bytes - both.dropped_bytes == internals * 7 / 8
    assert both.kept_bytes == again.kept_bytes
    assert both.replay > again.replay


@pytest.mark.parametrize(
    ("stack", "split", "gathered", "counted"),
    [("fsdp2", (True, True), 0, 1 / 4), ("transformers", (False, True), 1, 1), ("deepspeed", (False, False), 0, 1)],
)
def test_tensor_parallel_ranks_split_the_words_as_their_framework_does(
    stack: str, split: tuple[bool, bool], gathered: int, counted: float
) -> None:
    """Table and head are split, or the head alone, whose logits each rank gathers for its loss, or neither."""
    core = Attention(heads=8, kv_heads=8, head_dim=12)
    block = Block(mixers=(core,), feed_forward=None)
    model = Model(name="m", family="llama", hidden=96, vocab=8192, layers=(block,))
    y, T = layout(stack=stack, tp=4), 2 * 64
    (table,), (row,), (cost,) = tables(y, model), head(y, model), loss(y, model)
    (weight,) = row.weights
    assert (table.elements, weight.elements) == tuple(8192 * 96 / (4 if one else 1) for one in split)
    assert [m.size_bytes for m in row.forward if m.tensor == "logits"] == [2 * T * 8192] * gathered
    assert cost.saves[0].size_bytes == 4 * T * 8192 * counted
    assert bool(cost.forward) is (counted < 1)
