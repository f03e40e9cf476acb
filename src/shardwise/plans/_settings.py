"""What a user sets of a framework: widths of what is kept, buffers, and memory beside it."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal, TypeAlias, get_args

from shardwise.errors import Problems
from shardwise.plans._laws import one_of
from shardwise.plans._precision import SCALINGS
from shardwise.records import dataclass

LossKernel: TypeAlias = Literal[
    "eager",
    "eager-copied",
    "eager-held",
    "eager-kept",
    "eager-narrow",
    "eager-narrow-kept",
    "eager-narrow-shifted",
    "eager-shifted",
    "chunked",
    "chunked-compiled",
    "chunked-fp32",
    "chunked-linear",
    "chunked-linear-compiled",
    "chunked-nll",
    "eager-autocast",
    "compiled",
    "compiled-fp32",
    "fused",
    "fused-copied",
    "fused-in-place",
    "fused-linear",
    "cce",
    "fused-logprobs",
    "fused-lm-head",
    "chunked-entries",
    "vocab-parallel",
    "vocab-parallel-copied",
    "vocab-parallel-compiled",
    "vocab-parallel-in-place",
    "vocab-parallel-narrow",
]

CheckpointPolicy: TypeAlias = Literal[
    "second-matmuls", "matmuls", "matmuls-and-attention", "attention-matmuls", "qkv-matmuls"
]

LOSSES: tuple[LossKernel, ...] = get_args(LossKernel)
CHECKPOINT_POLICIES: tuple[CheckpointPolicy, ...] = get_args(CheckpointPolicy)
ROLLOUTS = ("asleep", "awake", "apart")
"""Places of the engine of rollouts: on the trainer's devices asleep or awake, or on devices of its own."""
SLEEPING_BYTES = 700 * 2.0**20  # github.com/AgileRL/AgileRL agilerl/memory, vLLM asleep at level 1 (2026-08)
UNSPLIT_LOSSES: tuple[LossKernel, ...] = (
    *("fused-linear", "cce", "fused-logprobs", "fused-lm-head", "chunked-entries", "chunked-nll"),
)
"""Those that take the head with them, over a whole vocabulary."""
PIECED_LOSSES: tuple[LossKernel, ...] = ("chunked-linear", "chunked-linear-compiled")
"""Those that run head and loss piece by piece, forward and backward, whether ranks share the vocabulary or not."""
WHOLE_LOSSES = (*UNSPLIT_LOSSES, *PIECED_LOSSES)
"""Those that take the head with them."""
WIDENED_LOSSES: tuple[LossKernel, ...] = ("eager", "eager-copied", "eager-kept", "eager-shifted")
"""Those whose every step from the fp32 copy of 16-bit logits on is a kernel of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the user of a framework keeps in other widths, splits or sets aside; 0 and false leave it as it comes.

    >>> Settings(norm_bytes=4).problems().items
    []
    """

    norm_bytes: int = 0
    """Width of the input that a norm keeps."""
    mlp_input_bits: int = 0
    """Bits of the kept input of a feed-forward's first GEMM."""
    activation_input_bits: int = 0
    """Bits of the kept input of its activation."""
    mlp_down_input_bits: int = 0
    """Bits of the kept input of its last GEMM."""
    fp8_recipe: str = ""
    """How GEMMs of 8 bits are scaled, one of `SCALINGS`; empty: one scale a tensor, found anew."""
    bf16_first_layers: int = 0
    """First layers whose products stay in 16 bits where others have fewer (Megatron's num_layers_at_start_in_bf16)."""
    bf16_last_layers: int = 0
    """Last layers whose products do so (Megatron's num_layers_at_end_in_bf16)."""
    bf16_mtp_layers: bool = False
    """So do those of multi-token predictions (Megatron's keep_mtp_spec_in_bf16)."""
    fp8_param_gather: bool = False
    """Weights of GEMMs of fewer than 16 bits are stored, and gathered, in those bits."""
    partition_activations: bool = False
    """Checkpoints of full recompute are split over the tensor-parallel ranks (ZeRO-R, arXiv:1910.02054 section 6.1)."""
    bucket_elements: float = 0.0
    """Size of a bucket of gradients and of one of weights (DeepSpeed's reduce_ and allgather_bucket_size)."""
    max_live_parameters: float = 0.0
    """Parameters that ZeRO-3 keeps gathered (DeepSpeed's stage3_max_live_parameters)."""
    loss: LossKernel | Literal[""] = ""
    """The cross entropy; empty: the framework's own."""
    tile_mlp: int = 1
    """Pieces of the tokens in which a feed-forward runs, each again in backward (ALST, arXiv:2506.13996)."""
    misc_bytes: float = 0.0
    """Bytes beside all else on every device."""
    rollout: str = ""
    """Where the engine of rollouts is while the policy trains, one of `ROLLOUTS`; empty: elsewhere, or nowhere."""
    rollout_bytes: float = 0.0
    """What it takes of every device when awake."""
    rollout_prompt_tokens: int = 0
    """Tokens of a prompt, whose answers an engine generates; 0: rollouts are not timed."""
    rollout_tp: int = 1
    rollout_devices: int = 0
    """Devices of an engine apart; 0: as many as the trainer's."""
    rollout_samples: int = 0
    """Samples that it generates at once, for as many steps as train on them; 0: those of one step."""
    blas_workspace_bytes: float = 0.0
    """Scratch of a cuBLAS handle (CUBLAS_WORKSPACE_CONFIG)."""
    separate_weight_gradients: bool = False
    """The gradient of a weight is made before it is added to the buffer."""
    attention_mask: bool = False
    """A mask of one byte for each pair of tokens comes with every micro-batch."""
    optimizer_instances: int = 1
    """Groups of replicas that each shard a whole optimizer state."""
    checkpoint_policy: CheckpointPolicy | Literal[""] = ""
    """What full recompute keeps beside its input: outputs of every second GEMM and attention (torchtitan's op), of
    every GEMM (MaxText's minimal) and of attention (minimal_with_context), of attention's GEMMs
    (save_dot_except_mlp), of those of queries, keys and values (save_qkv_proj)."""
    pipeline_runs: int = 1
    """Runs of a pipeline in a step, each of which fills and drains it (gradients add up over torch's schedules)."""
    sync_each_batch: bool = False
    """Gradients are reduced every micro-batch where the framework keeps them whole until the last (accelerate)."""
    updates_in_backward: bool = False
    """Each tensor is updated as soon as its gradient is made, which is then freed."""
    quantize_moe_experts: bool = False
    """Experts that are parameters are stored as the narrow weights beside them (axolotl's word)."""

    @property
    def rollout_beside_bytes(self) -> float:
        """Bytes of an engine beside the trainer: all that it has when awake, its context when it sleeps."""
        return {"awake": self.rollout_bytes, "asleep": SLEEPING_BYTES}.get(self.rollout, 0.0)

    @property
    def times_rollouts(self) -> bool:
        """Whether anything is said of the engine that rollouts are timed on."""
        return bool(self.rollout_prompt_tokens or self.rollout_devices or self.rollout_samples or self.rollout_tp != 1)

    @property
    def quantises(self) -> bool:
        """Whether any tensor of the feed-forward is kept in other bits."""
        return bool(self.mlp_input_bits or self.activation_input_bits or self.mlp_down_input_bits)

    def _rollout_problems(self, problems: Problems) -> None:
        if self.rollout and self.rollout not in ROLLOUTS:
            problems.add("rollout", self.rollout, "is no place of an engine", "use one of " + ", ".join(ROLLOUTS))
        if self.rollout == "awake" and not self.rollout_bytes:
            problems.add("rollout", self.rollout, "takes memory that is not stated", "add --rollout-memory 24GiB")
        if self.rollout_bytes and self.rollout != "awake":
            rule = "is what an engine takes that is awake beside the trainer"
            problems.add("rollout_memory", f"{self.rollout_bytes:.0f}", rule, "add --rollout awake, or leave it out")

    def problems(self) -> Problems:
        """Return what is wrong with single settings."""
        problems = Problems()
        if self.norm_bytes not in (0, 1, 2, 4, 8):
            problems.add("norm_bytes", self.norm_bytes, "is the width of a number in bytes", "use 2 or 4")
        for name in ("mlp_input_bits", "activation_input_bits", "mlp_down_input_bits"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not (value == 0 or 1 <= value <= 32):
                problems.add(name, value, "must be a whole number of bits from 1 to 32", "use 8, or 0 to leave it out")
        self._rollout_problems(problems)
        for name, known, rule in (
            ("fp8_recipe", SCALINGS, "is not a known recipe of 8 bits"),
            ("loss", LOSSES, "is not a known cross entropy"),
            ("checkpoint_policy", CHECKPOINT_POLICIES, "is not a known policy of checkpoints"),
        ):
            if getattr(self, name) and getattr(self, name) not in known:
                problems.add(name, getattr(self, name), rule, one_of(known))
        counts = {
            "tile_mlp": 1,
            "optimizer_instances": 1,
            "pipeline_runs": 1,
            "bf16_first_layers": 0,
            "bf16_last_layers": 0,
        }
        for name, least in counts.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                problems.add(name, value, f"must be a whole number of at least {least}", f"use {least}")
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type == "float" and (isinstance(value, bool) or not 0 <= value < float("inf")):
                problems.add(one.name, value, "must be a number of at least 0", "use 0 to leave it out")
        for one in fields(self):
            name = one.name
            if one.type == "bool" and not isinstance(getattr(self, name), bool):
                problems.add(name, getattr(self, name), "must be true or false", "use true or false")
        return problems
