"""Cross entropies over whole logits: the bytes for each logit that one moves, keeps and has beside them in backward.

What compiled ones keep was seen with saved-tensor hooks of torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitLoss:
    """Bytes of one cross entropy for each logit."""

    traffic: tuple[float, float]
    """Read and written forward and backward."""
    kept: int = 4
    """Kept for backward; 0: the logits as the head made them, or their log-softmax in that type."""
    backward: int = 0
    """What backward starts with beside those."""
    gradient: bool = True
    """A gradient in the type of the logits is beside them as well."""
    shared: int = 0
    """Further bytes where ranks share the vocabulary."""
    in_place: bool = False
    """The gradient overwrites the logits; only that of the head's input stands beside it."""
    answer: int = 0
    """Of what backward starts with, those of the answer that the loop holds until the next pass's."""
    pieces: int = 1
    """Pieces of the logits that are taken one by one, each with its gradient."""


LOGIT_LOSSES: Mapping[str, LogitLoss] = MappingProxyType({
    # cross_entropy(logits.float()) of transformers: cast, log-softmax; backward a filled gradient, log-softmax, cast;
    # 12 in all, checked to the byte with torch 2.13.0's memory tracker. Where ranks share the vocabulary, zeros too, to
    # which the softmax is added (torchtitan/components/loss.py _LossParallelCrossEntropy.backward,
    # torch/distributed/tensor/parallel/loss.py).
    "eager": LogitLoss(traffic=(18, 22), backward=8, gradient=False, shared=4),
    # The same where the loop holds the fp32 logits through backward: torchtitan until commit of pull 391 (2024-06).
    "eager-kept": LogitLoss(traffic=(18, 22), backward=12, gradient=False, shared=4, answer=4),
    # transformers before 4.46 under its Trainer: of a shifted copy of the fp32 logits, held until backward.
    "eager-copied": LogitLoss(traffic=(30, 34), backward=8, gradient=False),
    # The same where the loop holds the answer through backward.
    "eager-shifted": LogitLoss(traffic=(30, 34), backward=12, gradient=False, answer=4),
    # transformers 4.46 to 4.48: forward ends with the 16-bit logits, their fp32 copy, a shifted copy of that and its
    # log-softmax, 14 in all, which backward never has again.
    "eager-held": LogitLoss(traffic=(30, 34), backward=10, gradient=False),
    # modeling_qwen.py under CUDA's autocast, which widens what the log-softmax of 16-bit logits gives out: that in 16
    # bits and its fp32 copy are kept.
    "eager-autocast": LogitLoss(traffic=(16, 16), kept=6, backward=6, gradient=False),
    # The 16-bit logits as they are.
    "eager-narrow": LogitLoss(traffic=(6, 8), kept=0, backward=4, gradient=False),
    # The same where the loop holds them through backward.
    "eager-narrow-kept": LogitLoss(traffic=(6, 8), kept=0, backward=6, gradient=False, answer=2),
    # modeling_qwen.py of 2023: a copy of them without the last token, which is gone before backward.
    "eager-narrow-shifted": LogitLoss(traffic=(10, 14), kept=0, backward=4, gradient=False),
    # Megatron's core/tensor_parallel/cross_entropy.py until 2022-09 and since commit 9634c0e (2024-06-13): the fp32
    # copy turns in place into softmax and gradient. Cast, maximum, subtract, exp, sum, divide; backward scale, cast.
    "vocab-parallel": LogitLoss(traffic=(38, 14)),
    # Between the two: subtracting the maximum makes a second fp32 copy while the caller holds the first.
    "vocab-parallel-copied": LogitLoss(traffic=(38, 14), backward=4),
    # --cross-entropy-loss-fusion (core/fusions/fused_cross_entropy.py): torch.compile scatters the targets into a copy
    # of the softmax, derived. It makes fewer passes, which no published profile shows apart: an upper end.
    "vocab-parallel-compiled": LogitLoss(traffic=(38, 14), backward=4),
    # --cross-entropy-fusion-impl te (Transformer Engine common/triton/cross_entropy.py): five passes in Triton programs
    # of one row each, 10 bytes, which took the time of 20 on B200 (SimuMax system file, ce_fusion 0.28).
    "vocab-parallel-in-place": LogitLoss(traffic=(12, 8), kept=0, in_place=True),
    # The same by fusion (XLA).
    "vocab-parallel-narrow": LogitLoss(traffic=(38, 14), kept=0, in_place=True),
    # torchtune: the log-softmax in pieces, 16-bit logits and a gradient beside it.
    "chunked": LogitLoss(traffic=(10, 8)),
    # litgpt: of fp32 logits that the trainer holds; the log-softmax turns in place of it into their gradient.
    "chunked-fp32": LogitLoss(traffic=(18, 22), backward=4, gradient=False),
    # torchtune with torch.compile: each piece is compiled, its gradient takes the place of its logits, and the weight
    # gradients that the head has of each are added up (modules/loss/ce_chunked_output_loss.py, num_output_chunks).
    "chunked-compiled": LogitLoss(traffic=(8, 8), kept=0, pieces=8),
    # torchtitan since 2025: forward reads the 16-bit logits in one reduction, backward reads them and writes theirs.
    # Where ranks share the vocabulary, the messages between its steps keep them from being one: forward ends with the
    # 16-bit logits, those less their maximum in fp32 and their log-softmax, 10 in all, of which backward has the last
    # and the gradient (torch/distributed/tensor/parallel/loss.py under torch.compile; allocations followed, 2.14.1).
    "compiled": LogitLoss(traffic=(8, 8), kept=0, shared=6),
    # torchtune with torch.compile: so the fp32 logits that the model returns.
    "compiled-fp32": LogitLoss(traffic=(10, 14), backward=4, gradient=False),
    # One fp32 copy, which turns into the gradient.
    "fused": LogitLoss(traffic=(8, 4), gradient=False),
    # The 16-bit logits turn into theirs, beside the fp32 copy of the answer by accelerate's ConvertOutputsToFp32.
    "fused-copied": LogitLoss(traffic=(14, 4), kept=0, backward=4, gradient=False),
    # verl's log-probabilities (flash_attn.ops.triton.cross_entropy): the 16-bit logits, divided by the temperature in
    # place, turn into their gradient, whose quotient stands beside it.
    "fused-in-place": LogitLoss(traffic=(6, 8), kept=0),
})  # fmt: skip
