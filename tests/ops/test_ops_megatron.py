"""What Megatron-LM splits, norms and sends: its projections of further tokens and latent attention under its flags."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ops.helpers import layout
from shardwise.ledger.saved import keep, tensor_bytes
from shardwise.models import LatentAttention, Model
from shardwise.ops import count_parameters, parameters_by_component, prediction_parameters
from shardwise.ops.block import block_ops
from shardwise.ops.head import mtp_ops

TOKENS = 2 * 64


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_projection_of_further_tokens_is_split_by_columns(tp: int, sequence_parallel: bool) -> None:
    """A rank holds 2 D^2 / tp of it, and every rank gathers its output (core/transformer/multi_token_prediction.py)."""
    model = Model.load("deepseek-v3")
    D = model.hidden
    op = mtp_ops(layout(tp=tp, sequence_parallel=sequence_parallel), model)[-1]
    assert op.weights[0].elements == 2 * D * D / tp and op.weights[0].whole == 2 * D * D
    assert op.flops == 2 * TOKENS * 2 * D * D / tp
    out, entry = 2 * TOKENS * D, 2 * TOKENS * 2 * D
    sent = [(c.verb, c.size_bytes) for c in op.forward]
    back = [(c.verb, c.size_bytes) for c in op.backward]
    if sequence_parallel:
        assert sent == [("all_gather", entry), ("all_gather", out)]
        assert back == [("all_gather", out), ("all_gather", entry), ("reduce_scatter", entry)]
    else:
        assert sent == [("all_gather", out)] and back == [("all_reduce", entry)]


def test_latents_without_norms_keep_and_own_less() -> None:
    """Megatron-LM without --qk-layernorm leaves latents as they are: no weights, no kept inputs, no statistics."""
    model = Model.load("deepseek-v3")
    block = model.layers[0]
    (core,) = block.mixers
    assert isinstance(core, LatentAttention)
    bare = replace(block, mixers=(replace(core, latent_norm="none"),))
    y = layout()
    normed, plain = (block_ops(y, one, model.hidden) for one in (block, bare))
    weights = [sum(w.whole for op in ops for w in op.weights) for ops in (normed, plain)]
    assert weights[0] - weights[1] == 1536 + 512
    kept = [tensor_bytes(keep(ops).kept) for ops in (normed, plain)]
    assert kept[0] - kept[1] == 2 * TOKENS * (1536 + 512) + 2 * 4 * TOKENS


def test_latents_are_gathered_whether_normed_or_not() -> None:
    """Sequence parallelism sends the same latents, from the norm or from the projection before it."""
    model = Model.load("deepseek-v3")
    block = model.layers[0]
    (core,) = block.mixers
    assert isinstance(core, LatentAttention)
    y = layout(tp=4, sequence_parallel=True)

    def sent(latent_norm: str) -> list[tuple[str, float]]:
        mixer = replace(core, latent_norm=latent_norm)  # type: ignore[arg-type]
        ops = block_ops(y, replace(block, mixers=(mixer,)), model.hidden)
        return sorted((c.verb, c.size_bytes) for op in ops for c in (*op.forward, *op.backward))

    assert sent("rmsnorm") == sent("none")


def test_components_add_up_and_further_predictions_stand_apart() -> None:
    """The components sum to the count of the model, and the layers of further predictions are a number beside it."""
    model = Model.load("deepseek-v3")
    assert sum(parameters_by_component(model).values()) == count_parameters(model)
    D, block = model.hidden, model.mtp[0]
    one = replace(model, layers=(block,), mtp=())
    none = replace(model, layers=(), mtp=())
    assert prediction_parameters(model) == count_parameters(one) - count_parameters(none) + 2 * D * D + 3 * D


@pytest.mark.parametrize(
    ("stack", "dims", "kept"),
    [
        ("megatron", 256, False),
        ("megatron", 512, True),
        ("megatron-bridge", 512, True),
        ("pytorch", 512, False),
        ("transformers", 512, False),
        ("maxtext", 512, False),
    ],
)
def test_heads_that_no_kernel_trains_keep_their_scores(stack: str, dims: int, kept: bool) -> None:
    """Transformer Engine trains no heads of more than 256 values fused: Gemma 4's global layers keep scores."""
    model = Model.load("gemma-4-26b-a4b")
    block = next(b for b in model.layers if getattr(b.mixers[0], "head_dim", 0) == dims)
    y = layout(stack=stack)
    made = {t.name: t.size_bytes for t in keep(block_ops(y, block, model.hidden), ()).kept}
    assert ("attention.softmax" in made) is kept
    if kept:
        assert made["attention.softmax"] == y.a * TOKENS * 16 * 64
    served = layout({"phase": "prefill"}, stack)
    assert all(op.role != "softmax" for op in block_ops(served, block, model.hidden))
