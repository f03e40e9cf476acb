"""The framework that runs a plan: what its operators save, which buffers it holds, what it overlaps.

Two stacks with the same plan keep different bytes. Each stack is one table of `stacks.toml`, with the source of every
entry.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, TypeAlias

from shardwise.errors import known_name
from shardwise.field_types import kept_by_name
from shardwise.files import own_table
from shardwise.hardware import Device, context_bytes
from shardwise.plans._capabilities import Capabilities, capabilities_of
from shardwise.plans._jobs import Training
from shardwise.plans._settings import LossKernel, Settings
from shardwise.plans.partition import PartitionRule
from shardwise.records import dataclass

Kernel: TypeAlias = Literal["eager", "fused"]
NormKernel: TypeAlias = Literal["eager", "native", "widened", "fused"]
AttentionImplementation: TypeAlias = Literal["eager", "flash", "scores"]
Dispatch: TypeAlias = Literal["all-to-all", "all-gather", "deduplicated", "deepep-1", "in-turn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """One framework in one version; each field is a key of stacks.toml."""

    name: str
    title: str
    zero_by: str
    """The framework that a trainer hands its model to where ZeRO shards it ("": none)."""
    sources: tuple[tuple[str, str], ...]
    settings: Settings = Settings()
    """What its user set."""
    runs: Capabilities
    """Which plans it can run."""
    reported: tuple[tuple[str, Any], ...]
    """Flags of `train` that say what the report of its run states, with their values."""
    uncounted: tuple[str, ...]
    """What the report states and no flag says."""
    measured_as: str
    """The stack that published runs of it are counted under."""

    # Operators
    norm: NormKernel
    """With "widened" one kernel runs over fp32 copies of its rows."""
    attention: AttentionImplementation
    """The path "scores" keeps the matrix of scores as unfused Megatron-LM does, "eager" as transformers does."""
    widest_fused_head: int  # Values of a head beyond which training keeps the matrix of scores (0: none).
    calls_sdpa: bool  # As transformers does: a window is a mask over all pairs, sinks and capped scores run eager.
    loads_sinks_kernel: bool  # Models with sinks have a flash kernel that takes them, whatever calls SDPA.
    attention_kernel: str  # The fused kernel whose rates apply ("": the best of the device).
    activation: Kernel
    loss: LossKernel
    """The cross entropy, of `ops.logit_losses` or `ops.whole_losses`."""
    experts: Literal["grouped-mm", "indexed", "permuted", "permuted-compiled", "reordered"]
    experts_loop: bool  # Python launches the kernels of one expert, a module of linear layers, after another.
    pads_gemms: bool  # The compiler pads operands whose rows do not start at multiples of 16 bytes.
    adapts_experts: Literal["peft", "listed", "parameters", "none"]
    """Who finds experts that are parameters: peft by "all-linear" or names "listed" by it, the framework, or none."""
    leaves_expert_dropout: bool
    """Adapters of experts that peft finds by name have no dropout where others have, which peft itself refuses."""
    experts_kernel: str
    """The fused kernel of experts whose rates apply ("": grouped GEMMs of libraries)."""
    library: str
    """The release of the library whose rates of 16-bit GEMMs apply ("": one before CUDA 12.8)."""
    dispatch: Dispatch
    """With "deduplicated" a token is sent once to each node that has one of its experts, with "deepep-1" by the kernels
    of DeepEP's first version, with "in-turn" once in all, with "all-gather" every token to every rank."""
    latent_fusion: bool  # Queries and keys of latent attention are rotated, and their parts joined, in one kernel each.
    merges_chunks: bool
    """Attention over a split sequence is a kernel a chunk of keys; others merge outputs and gradients in fp32."""
    repeats_kv: bool
    """Keys and values are repeated to the query heads before attention, and a split sequence sends them so."""
    leaves_groups: Literal["", "narrow", "all"]
    """Heads that share keys are left to PyTorch's attention, fused there or not: those of up to 256 values, or all."""
    rotary_passes: tuple[int, int]
    """How often rotary embedding, kernel by kernel, moves what it turns, forward and backward."""
    bias_gradients_apart: bool  # The gradient of a bias is summed in a kernel of its own.
    projections_apart: Literal["none", "feed-forward", "all"]
    """Gate and up, with "all" queries, keys and values too, are GEMMs whose input gradients are added up."""
    gradients_apart: Literal["never", "always", "behind the first"]
    """In which micro-batches of a step the gradient of a weight is made before it is added to those before."""
    metric_logit_bytes: float  # Bytes that metrics of training read and write for each logit beside the loss.

    # What is saved
    precision: str
    """The recipe of precision where a job names none."""
    fsdp_precision: str
    """The same under FSDP ("": as elsewhere)."""
    whole_precision: str = ""
    """The one whose place that under FSDP has taken ("": none)."""
    usual_recompute: Literal["none", "full"]  # What it recomputes unless told.
    usual_narrow_recompute: Literal["none", "full"]
    """The same where the frozen weights have fewer than 16 bits."""
    usual_offload: tuple[str, ...]
    """What it keeps in the host's memory unless told, where it recomputes."""
    dropout_mask_bytes: int
    layernorm_statistics_bytes: int
    """Width of the mean and of the deviation that LayerNorm keeps for a row of 16-bit input."""
    merged_attention_copy: bool
    """The output of attention is copied when its heads are merged."""
    checkpoint_stops_early: bool
    """Recompute ends at the last saved tensor."""
    checkpoint_reenters: Literal["", "always", "sft", "but fsdp", "but replicas", "zero3 adapters"]
    """Where the whole unit of a checkpoint runs again all the same (`TrainingCase.reenters`)."""
    checkpoint_prunes: bool  # What no gradient reads is not run again, as compilers see.
    checkpoint_halves: bool  # Full recompute is of attention and of the feed-forward, each a unit of its own.
    answer: Literal["", "cache", "logits", "held"]
    """What a pass gives out beside a loss: keys and values of all layers until then, logits or both until the next."""
    checkpoint_predictions: bool
    """Layers of multi-token prediction run again as the model's do, where all of these do."""
    recompute_steps: tuple[tuple[str, ...], ...]
    """Modules that its recipes recompute before whole layers, the least first; none without recipes."""
    saves_quantised: bool
    """A GEMM of fewer than 16 bits saves the copy of its input that it multiplied, not the input."""
    copies_weights: bool  # Copies of weights that narrow GEMMs multiply last from a micro-batch to the next.
    gathers_quantised: Literal["", "tensorwise", "all"]  # Recipes of whose casts ranks gather parts of a sequence.
    keeps_gathered: bool  # The buffer of a gathered sequence is kept.
    regathers_inputs: bool
    """Sequence parallelism saves the shard of a column-parallel input and all-gathers it again in backward."""

    # Fine-tuning
    adapter_precision: str
    """The recipe of adapters where a job names none ("": that of the job)."""
    narrow_adapter_precision: str
    """The same beside weights of fewer than 16 bits ("": as beside others)."""
    narrow_precision: str
    """The recipe of a job beside those where it names none ("": as beside others); that of a trainer may autocast."""
    four_bits: Literal["nf4", "nf4-dq"]
    """The format of frozen weights of 4 bits where it is not named: scales of scales, or none."""
    loaded_base: Literal["bf16", "fp32"]
    """The type in which it loads frozen weights unless told; answers take 16 bits, and say so where these differ."""
    frozen_precision: str
    """The recipe of what trains beside frozen 16-bit weights where a job names none ("": that of the stack)."""
    reference: str
    """What objectives compare with beside adapters, one of `REFERENCES` ("": the base with its adapters off)."""
    autocasts: bool
    """Autocast makes the 16-bit copies of fp32 weights, where they are not sharded."""
    adapter_autocast: bool
    """Products of adapters take 16-bit copies of fp32 ones and of their input (torch.autocast)."""
    adapter_kernels: Literal["", "sft", "no dropout"]
    """Where LoRA runs in its own functions, which keep one 16-bit input for layers that share it, of GLUs theirs."""
    loss_brings_layers: bool
    """Its fused linear cross entropy is a switch of Liger's, which brings norms, activations and rotary embeddings."""
    adapter_joint: bool
    """Queries, keys and values, and gate and up, have one adapter where they are one GEMM of the framework."""
    fuses_operators: bool
    """Transformer Engine's operator fuser: activations make casts of products, adapters add within their own."""
    exchanges_adapters: bool
    """Sequence parallelism exchanges results of adapters behind row-parallel layers all to all, and gathers none."""
    keeps_narrow_inputs: bool
    """Products of bitsandbytes with narrow frozen weights keep their input."""
    holds_narrow_inputs: bool
    """Those inputs last as long as the graph: over checkpoints, and until the loss of the next micro-batch."""
    scales_apart: bool
    """Scales of bitsandbytes' 4 bits lie beside the parameter: what shards parameters leaves them whole."""
    decodes_by_branches: bool  # Kernels of bitsandbytes decode 4 bits by branches, not by a table.
    narrow_type: Literal["", "fp16"]
    """Type of what bitsandbytes makes of 4-bit weights, before a cast to that of the GEMMs ("": that one)."""
    narrow_head: bool
    """The head is stored in the format of narrow weights."""
    narrow_experts: bool
    """So are experts by bitsandbytes, which passes over parameters of three dimensions."""
    narrow_rest_bytes: float
    """Width in which embedding, head and norms are kept beside narrow weights (0: as they come)."""
    narrow_expert_bytes: float
    """Width of experts that it passes over where that is another (0), and no sharding of weights leaves them so."""
    scores_rollouts: bool
    """Log-probabilities of answers under the policy that generated them are a pass ahead of the update."""
    narrow_rest_as_loaded: bool  # They are as the recipe loads weights, so that one of 16 bits leaves them so.
    narrow_norm_bytes: float
    """That of norms alone, where the rest has another (0: as the rest)."""

    # Tables of words
    vocab_multiple: int
    """The vocabulary is padded to a multiple of this on each tensor-parallel rank."""
    vocabulary: Literal["split", "gathered", "whole"]
    """Tensor-parallel ranks split table and head of words, or the head, whose logits each rank gathers, or neither."""
    whole_table_gradient: bool
    """The gradient of a table that is split is made whole on each rank, which keeps a view of its rows."""

    # Gradients and optimizer
    gradients: Literal["persistent", "transient"]
    """A "persistent" buffer is contiguous and lives through the step; `zero_grad` frees "transient" tensors."""
    gradient_stand_ins: bool
    """An empty tensor stays for each shape of weight gradient where gradients are added up in the buffer."""
    micro_gradients: Literal["", "narrow", "all"]
    """Which gradients of a backward pass are added up when all are there: 16-bit ones to wider, or those of a graph."""
    widens_gradients: bool
    """16-bit gradients are kept in fp32 too from a step to the next."""
    step_gradients: Literal["", "flat", "wide"]
    """Of ZeRO, which copies 16-bit gradients into whole buckets: a shard's are made flat, then fp32, or fp32 alone."""
    accumulates_whole: Literal["", "trained", "units"]
    """What of sharded gradients stays whole between micro-batches (no_sync): of what trains, or flat parameters."""
    wide_embedding_moments: bool
    """Optimizers of bitsandbytes keep fp32 moments of the embedding."""
    optimizer_step: Literal["single", "foreach", "fused"]
    """Which temporaries the update makes: of one tensor, of all, or none."""
    buffer_passes: float
    """How often a step reads or writes the whole gradient buffer beside its GEMMs and its reduction."""
    update_copy_bytes: float
    """Bytes that an update moves for a parameter of the shard beside the optimizer itself."""

    # Messages between replicas
    overlap_gradients: bool
    overlap_parameters: bool
    reduces_whole: bool
    """Every replica gets the whole sum of the gradients though it updates a shard."""
    broadcasts_weights: bool
    """New weights are sent from each owner in turn, not gathered at once."""
    gathers_tensors: bool
    """Sharded weights are gathered one by one, not by layers."""
    bucket_elements: float
    """Size of a bucket of gradients, and of one of weights, where its user sets none."""
    scatter_bytes: float
    """Width in which sharded gradients are reduced (0: that of the gradients)."""
    gather_copy_bytes: float
    """Bytes for a parameter that gathering weights moves in device memory."""
    scatter_copy_bytes: float
    """Bytes for a parameter that scattering gradients moves in device memory."""
    fsdp_ends: Literal["root", "apart"]
    """Embedding, final norm and head are one root unit of FSDP, or embedding one and norm with head another."""
    fsdp_experts: Literal["units", "layer", "layer or none"]
    """Experts are units of their own, or parts of their layer where nothing splits them; or none, without shares."""
    fsdp_padding: Literal["flat", "rows", "rows-or-columns"]
    """Sharded are flat units, or first dimensions padded to the ranks, or second ones of experts fewer than those."""
    fsdp_adapters: bool
    """Each matrix of an adapter is a unit of FSDP, and the host is at most two units ahead of the device: a layer's
    weights are gathered once the layer before it ends."""
    pipeline_keeps_gathered: bool
    """Sharded weights of a stage stay gathered, and its gradients whole, between micro-batches."""

    # Messages of tensor, expert and pipeline parallelism
    overlap_tensor: bool
    overlap_input_gradients: bool
    """What reduces an input gradient runs beside the weight gradient."""
    copies_chunks: Literal["never", "where several", "always"]
    """Chunks of scattered sequences are copied, those of gathered ones where there are several or always."""
    reduces_apart: bool
    """Input gradients of q, k, v, gate and up are all-reduced one by one where a sequence is not split."""
    overlap_experts: Literal["never", "between nodes", "always"]
    overlap_sends: tuple[str, ...]
    """Schedules under which messages between stages run beside compute."""
    scattered_sends: bool
    """A message between stages is split over the tensor-parallel ranks."""
    partition: PartitionRule
    """How layers go to stages where a plan does not say."""
    stage_buffers: bool
    """The buffers of a stage's messages for all micro-batches of a step exist at once."""
    buffered_stages: float
    """Micro-batches a stage that each stage but the last holds, whatever the schedule needs (0: what it needs)."""

    # Host
    eager_launch_seconds: float
    module_launch_seconds: float
    """Seconds of the host for a kernel that Python modules launch in a forward pass (0: hidden behind kernels)."""
    gradient_launch_seconds: float
    """Seconds of the host for a kernel of a backward pass whose functions are Python's own (0: autograd's, in C++)."""
    launch_hosts: tuple[float, float]
    """What the fastest and the slowest hosts that are known take of those seconds."""
    zero3_hook_seconds: float
    """Seconds of the host for a pass of a module with weights, whose hooks fetch and release them under ZeRO-3."""
    host_update_bytes_per_second: float
    """What the update of one rank streams on the host (0: all ranks of a node share what its memory gives)."""
    step_overhead_seconds: float
    narrow_expert_seconds: float
    """Seconds of the host to quantise the rows of one expert in fewer than 16 bits and to launch one GEMM of it."""

    # Memory beside tensors
    rotary_families: str  # Families whose layers each hold cosines and sines of every position, as an expression.
    device_context: bool
    """A process has a context on its device, within the memory that can be used."""
    loaded_kernel_bytes: float  # Kernels that are loaded with their library, launched or not.
    communicator_bytes: float
    world_communicator: bool  # Beside groups of axes, all ranks together reduce or wait in one of their own.
    reserved_over_allocated: float
    expandable_segments: bool
    """The allocator can lengthen its segments."""
    apart_pools: bool
    """Gathered weights and sharded gradients lie in streams of their own, whose memory others cannot use."""
    blas_handles: int
    blas_workspace: tuple[tuple[str, float], ...]
    """Scratch of one cuBLAS handle, by family of devices ("other" for the rest)."""
    library_workspace: tuple[tuple[str, float], ...]
    """Scratch of the library's own GEMMs, by family of devices."""
    grouped_streams: int  # Streams that run grouped GEMMs, each with scratch of its own.

    def reduce_buckets(self, shards_weights: bool) -> int:
        """Return how many buckets of gradients ZeRO holds: two where one fills while the other is reduced.

        >>> find_stack("deepspeed").reduce_buckets(False), find_stack("deepspeed").reduce_buckets(True)
        (2, 1)
        """
        return 2 if self.overlap_gradients and not shards_weights else 1

    @property
    def whole_gradients(self) -> Literal["", "trained", "units"]:
        """What has whole gradients between micro-batches: nothing where the user has them reduced in each."""
        return "" if self.settings.sync_each_batch else self.accumulates_whole

    @property
    def loss_kernel(self) -> LossKernel:
        """The cross entropy that runs: what the user set, else the framework's own."""
        return self.settings.loss or self.loss

    @property
    def permutes_experts(self) -> bool:
        """Whether rows of tokens are permuted to their experts, compiled or not."""
        return self.experts.startswith("permuted")

    @property
    def head_in_tiles(self) -> bool:
        """Whether the cross entropy multiplies with tiles of the head's weight itself, past an adapter of it."""
        return self.loss_kernel == "fused-lm-head"

    def runs_lora(self, job: Training) -> bool:
        """Return whether a job's LoRA runs in functions of the framework's own.

        >>> find_stack("axolotl").runs_lora(Training(seq_len=1, global_batch=1, adapter="lora", method="dpo"))
        False
        """
        if job.adapter not in ("lora", "rslora", "lora-plus"):
            return False
        if self.adapter_kernels == "sft":
            return job.method == "sft" and job.base != "int8"
        return self.adapter_kernels == "no dropout" and not job.adapter_dropout

    def context_bytes(self, device: Device) -> float:
        """Return the bytes that a process takes of a device outside its allocator, but for communicators."""
        return context_bytes(device) + self.loaded_kernel_bytes if self.device_context else 0.0

    def workspace_bytes(self, family: str, grouped: bool = False, split: bool = False) -> float:
        """Return the bytes of scratch that GEMMs, grouped ones too, hold for the whole run on a device of a family.

        Where ranks split GEMMs and send beside them, each stream of user buffers has scratch of its own.
        Source: TransformerEngine pytorch/cpp_extensions/gemm.py _NUM_MAX_UB_STREAMS.

        >>> find_stack("megatron-2023").workspace_bytes("hopper") / 2**20
        64.0
        """
        blas, library = dict(self.blas_workspace), dict(self.library_workspace)
        one = self.settings.blas_workspace_bytes or blas.get(family, blas["other"])
        streams = 1 + (self.grouped_streams if grouped else 0) + (_USER_BUFFERS if split and self.overlap_tensor else 0)
        return self.blas_handles * one + streams * library.get(family, library["other"])


@cache
def stack_table() -> dict[str, dict[str, Any]]:
    """Return the table of every stack as it is written, without what it takes from another."""
    return own_table(__file__, "stacks.toml")


def stack_names() -> tuple[str, ...]:
    """Return the names of the stacks that are known.

    >>> "megatron" in stack_names()
    True
    """
    return tuple(stack_table())


def _extended(table: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the table of a stack with what it takes from the one it extends, sources too."""
    row = table[name]
    if "extends" not in row:
        return row
    base = _extended(table, row["extends"])
    runs = {**base["runs"], **row.get("runs", {})}
    return {**base, **row, "sources": {**base["sources"], **row.get("sources", {})}, "runs": runs}


# What a table says of the choice of a stack, and what is read apart; any other key that is no field is an error.
_CHOSEN_BY = ("fine_tunes", "proposed_for", "written_with", "vendors",
              "brought", "brought_adapters", "brought_replicas", "brought_schedules")  # fmt: skip
_USER_BUFFERS = 3
_TUPLES = ("overlap_sends", "usual_offload", "uncounted", "rotary_passes", "launch_hosts")
_NOT_OF_IT = ("also", "extends", "sources", "runs", *_CHOSEN_BY)


@kept_by_name
def find_stack(word: str) -> Stack:
    """Return the stack of a name, or of another word that people have for it; raises `InputError` with known ones.

    >>> find_stack("transformers").norm, find_stack("torchtitan").name
    ('eager', 'fsdp2')
    """
    table = stack_table()
    name = known_name("stack", word, "framework", {name: row.get("also", ()) for name, row in table.items()})
    row = _extended(table, name)
    values = {key: value for key, value in row.items() if key not in _NOT_OF_IT}
    values |= {name: tuple(values[name]) for name in _TUPLES}
    values |= {name: tuple(row[name].items()) for name in ("blas_workspace", "library_workspace")}
    values["reported"] = tuple((flag, tuple(v) if isinstance(v, list) else v) for flag, v in row["reported"].items())
    values |= {"measured_as": row["measured_as"] or name, "recompute_steps": tuple(map(tuple, row["recompute_steps"]))}
    return Stack(name=name, sources=tuple(row["sources"].items()), runs=capabilities_of(row["runs"]), **values)
