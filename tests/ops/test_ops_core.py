"""Who sees whom: pairs under every mask against counting them one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.helpers import layout
from shardwise.ops.core import (
    AttentionCore,
    AttentionMask,
    attended_pairs,
    cache_traffic,
    chunks_at_once,
    context_messages,
    exchange_copies,
    merged_outputs,
    read_tokens,
)
from shardwise.ops.core_scores import is_unaligned, unfused

sizes = st.integers(1, 40)
masks = st.one_of(
    st.just(AttentionMask()),
    st.builds(AttentionMask, window=st.integers(1, 50)),
    st.builds(AttentionMask, chunk=st.integers(1, 50)),
    st.just(AttentionMask(causal=False)),
)


def _sees(mask: AttentionMask, query: int, key: int) -> bool:
    if not mask.causal:
        return True
    near = not mask.window or query - key < mask.window
    own = not mask.chunk or query // mask.chunk == key // mask.chunk
    return key <= query and near and own


def _seen(mask: AttentionMask, new: int, past: int) -> list[tuple[int, int]]:
    positions = range(past + new)
    return [(q, k) for q in range(past, past + new) for k in positions if _sees(mask, q, k)]


@given(masks, sizes, st.integers(0, 60))
def test_pairs_are_those_that_the_mask_leaves(mask: AttentionMask, new: int, past: int) -> None:
    """Masked pairs equal a count of every query and key, for causal, window and chunk masks behind any context."""
    y = layout({"S": new, "context": past})
    assert attended_pairs(y, mask) == len(_seen(mask, new, past))


@given(masks, sizes, st.integers(0, 60))
def test_read_tokens_are_the_keys_that_any_query_sees(mask: AttentionMask, new: int, past: int) -> None:
    """What is read from the cache is every key that some new query sees, once."""
    y = layout({"S": new, "context": past})
    keys = {key for _, key in _seen(mask, new, past)}
    first = min(keys)
    assert read_tokens(y, mask) == past + new - first == len(keys)


@given(sizes, st.integers(0, 60), st.integers(1, 50))
def test_wider_windows_see_no_less(new: int, past: int, window: int) -> None:
    """Coverage grows with the window up to the causal triangle, and full coverage is above both."""
    y = layout({"S": new, "context": past})
    narrow, wide, all_past = (
        attended_pairs(y, mask)
        for mask in (AttentionMask(window=window), AttentionMask(window=window + 1), AttentionMask())
    )
    square = attended_pairs(layout({"S": new, "context": past, "coverage": "full"}), AttentionMask(window=window))
    assert new <= narrow <= wide <= all_past <= square == new * (new + past)


@given(masks, sizes, sizes)
def test_a_sequence_in_two_pieces_has_the_pairs_of_the_whole(mask: AttentionMask, first: int, second: int) -> None:
    """Prefilling in chunks computes the same pairs as at once, where the mask looks back only."""
    if not mask.causal:
        return
    whole = attended_pairs(layout({"S": first + second}), mask)
    one = attended_pairs(layout({"S": first}), mask)
    two = attended_pairs(layout({"S": second, "context": first}), mask)
    assert one + two == whole


@pytest.mark.parametrize("stack", ["megatron", "transformers", "transformers-eager", "megatron-scores"])
def test_context_ranks_share_the_core(stack: str) -> None:
    """The core's FLOPs divide exactly by the context-parallel ranks, fused or not."""
    from shardwise.models import load_model
    from shardwise.ops.block import block_ops

    model = load_model("llama-3.1-8b")

    def flops(**more: Any) -> float:
        ops = block_ops(layout({"S": 4096, "coverage": "full"}, stack, **more), model.layers[0], model.hidden)
        return float(sum(op.flops for op in ops if op.region == "attention.core"))

    assert flops(cp=4) * 4 == flops()


@pytest.mark.parametrize(
    ("stack", "dims", "expected"),
    [
        ("megatron-scores", 128, False),
        ("megatron-scores", 104, False),
        ("megatron-scores", 108, True),
        ("megatron-scores", 150, True),
        ("megatron", 108, False),
    ],
)
def test_heads_of_eight_values_are_aligned(stack: str, dims: int, expected: bool) -> None:
    """Whole scores of 16-bit heads are aligned where the head size is a multiple of 8; fused kernels pad any."""
    assert is_unaligned(layout(stack=stack), dims) is expected


@pytest.mark.parametrize(("more", "kv_heads"), [({}, 4), ({"tp": 2}, 2), ({"cp": 4}, 4)])
def test_training_reads_the_keys_and_values_of_its_tokens(more: dict[str, int], kv_heads: int) -> None:
    """Each rank reads 2 bytes of the keys and values of each head and token that it has."""
    y = layout({"B": 2, "S": 64}, **more)
    core = AttentionCore(heads=8, kv_heads=kv_heads, key_dim=8, value_dim=16)
    assert cache_traffic(y, core) == 2 * (2 * 64 // more.get("cp", 1)) * kv_heads * (8 + 16)


def _merged_on_last_rank(cp: int, out: int, queries: int, keys: int) -> tuple[int, int]:
    """Bytes that torch's two loops over chunks move on the last rank, kernel by kernel, of so many elements."""
    ahead, back = out * (2 + 4), 4 * (queries + keys)
    for step in range(cp):
        ahead += keys * (2 + 2)
        back += queries * (4 + 2 + 4)
        back += keys * (4 + 2 + 4) if step == 0 else keys // 2 * (4 + 2 + 4) + keys * (4 + 4)
        back += keys * (4 + 4) + (keys * (2 + 2) if step < cp - 1 else 0)
        if step:
            ahead += out * ((2 + 4) + (4 + 4 + 4) + (4 + 4) + (4 + 4 + 4))
    return ahead + out * (4 + 2), back + (queries + keys) * (4 + 2)


@pytest.mark.parametrize("kind", ["ring", "all-gather"])
@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize(("stack", "sent"), [("fsdp2", 8), ("accelerate", 2)])
def test_chunks_are_merged_as_torch_does(stack: str, sent: int, cp: int, kind: str) -> None:
    """Merging moves what torch's loops move on the last rank; torchtitan sends keys of all query heads."""
    y, core = layout(stack=stack, cp=cp, cp_kind=kind), AttentionCore(heads=8, kv_heads=2, key_dim=16, value_dim=16)
    (found,) = merged_outputs(y, core)
    elements = 2 * 64 // cp * 16
    moved = _merged_on_last_rank(cp, elements * 8, elements * 8, 2 * elements * sent)
    assert (found.forward_bytes, found.backward_bytes) == moved
    ahead, back = context_messages(y, core)
    keys = 2 * elements * sent
    assert sum(c.size_bytes * c.count for c in ahead) == 2 * keys * (cp if kind == "all-gather" else cp - 1)
    assert sum(c.size_bytes * c.count for c in back[1:]) == 4 * keys * cp


def _most_at_once(cp: int, gathers: bool, out: int, keys: int, expanded: int) -> int:
    """The most bytes that torch's two loops hold on the last rank, tensor by tensor, of so many elements."""
    held: dict[str, int] = {}
    most = []

    def make(**tensors: int) -> None:
        held.update(tensors)
        most.append(sum(held.values()))

    def send(step: int) -> None:
        if step < cp - 1:
            held["last"] = 0 if gathers else held.get("arriving", 0)
            make(joined=2 * keys)
            make(**{"gathered" if gathers else "arriving": 2 * keys * (cp if gathers else 1)})

    kept = 2 * out
    for step in range(cp):
        send(step)
        make(chunk=2 * out, wide=4 * out)
        if step:
            make(difference=4 * out, product=4 * out)
            del held["difference"]
            make(merged_anew=4 * out)
            held["merged"] = held.pop("merged_anew")
            del held["product"]
        else:
            held["merged"] = held.pop("wide")
    ahead, most = max(most) - kept, []
    held = {"gradient": 2 * out, "queries": 4 * out, "sums": 4 * keys}
    for step in range(cp):
        send(step)
        part = 2 if step else 1
        make(own=2 * out, accumulated=4 * out, keys=2 * keys // part, expanded=2 * expanded // part)
        del held["accumulated"], held["expanded"]
        if step:
            held["sums"] = 4 * keys
        make(sent=4 * keys, received=4 * keys)
        del held["own"], held["keys"]
    return max(ahead, *most)


@pytest.mark.parametrize("kind", ["ring", "all-gather"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("cp", [4, 8])
def test_rings_hold_what_torch_does(cp: int, kv_heads: int, kind: str) -> None:
    """Chunks, sums in fp32 and keys of all ranks stand beside each other as in torch's loops."""
    y, core = (
        layout(stack="accelerate", cp=cp, cp_kind=kind),
        AttentionCore(heads=8, kv_heads=kv_heads, key_dim=16, value_dim=16),
    )
    elements = 2 * 64 // cp * 16
    expanded = 2 * elements * 8 if kv_heads < 8 else 0
    expected = _most_at_once(cp, kind == "all-gather", elements * 8, 2 * elements * kv_heads, expanded)
    assert chunks_at_once(y, core) == expected
    (op,) = merged_outputs(y, core)
    assert op.late_bytes == expected


@pytest.mark.parametrize(("cp", "sent"), [(1, 2), (2, 2), (4, 4), (8, 8)])
def test_an_exchange_brings_every_rank_a_head_of_keys(cp: int, sent: int) -> None:
    """Ranks beyond the heads of keys and values get copies: two heads are sent as four to four ranks."""
    y, core = (
        layout(stack="deepspeed", cp=cp, cp_kind="all-to-all"),
        AttentionCore(heads=8, kv_heads=2, key_dim=16, value_dim=16),
    )
    (first, _), _ = context_messages(y, core)
    assert first.size_bytes == 2 * (2 * 64 // cp) * (8 * 16 + sent * (16 + 16))
    (copies,) = exchange_copies(y, core)
    assert copies.forward_bytes == (cp > 1) * 4 * 2 * (2 * 64 // cp) * (8 * 32 + sent * 32)


@pytest.mark.parametrize(("stack", "cp"), [("fsdp2", 1), ("megatron", 4)])
def test_whole_sequences_have_nothing_to_merge(stack: str, cp: int) -> None:
    """One rank merges nothing, and Transformer Engine merges in compiled kernels."""
    found = merged_outputs(layout(stack=stack, cp=cp), AttentionCore(heads=8, kv_heads=2, key_dim=16, value_dim=16))
    assert sum(op.forward_bytes + op.backward_bytes for op in found) == 0


@pytest.mark.parametrize(
    ("stack", "types", "expected"),
    [
        ("transformers-eager", ("fp16", 2), 14),
        ("transformers-eager", ("bf16", 2), 16),
        ("transformers-eager", ("fp32", 4), 16),
        ("megatron-scores", ("bf16", 2), 2),
    ],
)
def test_backward_of_an_eager_softmax_holds_its_fp32_steps(stack: str, types: tuple[str, int], expected: int) -> None:
    """The softmax, its gradient, their product and the gradient of the scores: 14 to 16 bytes a score at once."""
    dtype, width = types
    y = layout({"dtype": dtype, "activation_bytes": width}, stack)
    core = AttentionCore(heads=8, kv_heads=8, key_dim=64, value_dim=64)
    inputs = tuple(y.activation(name, 8 * 64, "attention") for name in ("q", "k", "v"))
    _, softmax, _ = unfused(y, core, inputs)
    scores = y.tokens * 8 * 64
    # The probabilities in 16 bits, which GEMMs read, are gone when the gradient of the softmax is made.
    narrow = width if stack.endswith("eager") and width < 4 else 0
    kept = sum(tensor.size_bytes for tensor in softmax.saves)
    assert kept + narrow * scores + softmax.transient_bytes == expected * scores


@pytest.mark.parametrize(
    ("stack", "types", "expected"),
    [
        ("transformers-eager", ("fp16", 2), ((2 + 2) + (2 + 2) + (2 + 4) + (4 + 2), (2 + 4) + 12 + (8 + 2) + (2 + 2))),
        ("transformers-eager", ("bf16", 2), (20, (2 + 4) + 12 + (8 + 4) + (4 + 2) + (2 + 2))),
        ("transformers-eager", ("fp32", 4), (3 * 8, 12 + (8 + 4) + 8)),
        ("megatron-scores", ("bf16", 2), (2 + 2, 2 + 2 + 2)),
    ],
)
def test_kernels_of_eager_attention_move_the_scores_one_by_one(
    stack: str, types: tuple[str, int], expected: tuple[int, int]
) -> None:
    """Scale, mask, softmax and copies read and write each score, forward and backward; a fused softmax once."""
    dtype, width = types
    y = layout({"dtype": dtype, "activation_bytes": width}, stack)
    core = AttentionCore(heads=8, kv_heads=8, key_dim=64, value_dim=64)
    _, softmax, _ = unfused(y, core, tuple(y.activation(name, 8 * 64, "attention") for name in ("q", "k", "v")))
    scores = y.tokens * 8 * 64
    assert (softmax.forward_bytes / scores, softmax.backward_bytes / scores) == expected
