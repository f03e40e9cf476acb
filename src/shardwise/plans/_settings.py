"""What a user sets of a framework: widths of what is kept, buffers, and memory beside it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardwise.errors import Problems


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a training keeps in other widths, splits or sets aside; 0 and false leave it as the framework has it.

    `norm_bytes` is the width of the input that a norm keeps. `*_bits` quantise what a feed-forward keeps: the input of
    its first product, the input of its activation, the input of its last product. `partition_activations` splits the
    checkpoints of full recompute over the tensor-parallel ranks (ZeRO-R, arXiv:1910.02054 section 6.1).
    `bucket_elements` is a bucket of gradients and one of weights, `max_live_parameters` what ZeRO-3 keeps gathered
    (DeepSpeed's reduce_bucket_size, allgather_bucket_size and stage3_max_live_parameters). `misc_bytes` are beside
    all else on every device. `blas_workspace_bytes` is the scratch of a cuBLAS handle (CUBLAS_WORKSPACE_CONFIG).
    `separate_weight_gradients` makes the gradient of a weight before it is added to the buffer. `attention_mask` brings
    a mask of one byte a pair of tokens with each micro-batch. `optimizer_instances` shards optimizer state over so many
    groups of replicas apart. `updates_in_backward` updates each tensor as soon as its gradient is made, and frees that.
    `keeps_products` lets recompute keep attention and every second product, as torchtitan's
    selective checkpointing by operator does.

    >>> Settings(norm_bytes=4).problems().items
    []
    """

    norm_bytes: int = 0
    mlp_input_bits: int = 0
    activation_input_bits: int = 0
    mlp_product_bits: int = 0
    partition_activations: bool = False
    bucket_elements: float = 0.0
    max_live_parameters: float = 0.0
    misc_bytes: float = 0.0
    blas_workspace_bytes: float = 0.0
    separate_weight_gradients: bool = False
    attention_mask: bool = False
    optimizer_instances: int = 1
    keeps_products: bool = False
    updates_in_backward: bool = False

    @property
    def quantises(self) -> bool:
        """Whether any tensor of the feed-forward is kept in other bits."""
        return bool(self.mlp_input_bits or self.activation_input_bits or self.mlp_product_bits)

    def problems(self) -> Problems:
        """Return what is wrong with single settings."""
        found = Problems()
        if self.norm_bytes not in (0, 1, 2, 4, 8):
            found.add("norm_bytes", self.norm_bytes, "is the width of a number in bytes", "use 2 or 4")
        for name in ("mlp_input_bits", "activation_input_bits", "mlp_product_bits"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not (value == 0 or 1 <= value <= 32):
                found.add(name, value, "must be a whole number of bits from 1 to 32", "use 8, or 0 to leave it out")
        if isinstance(self.optimizer_instances, bool) or not self.optimizer_instances >= 1:
            found.add("optimizer_instances", self.optimizer_instances, "must be at least 1", "use 1")
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type == "float" and (isinstance(value, bool) or not 0 <= value < float("inf")):
                found.add(one.name, value, "must be a number of at least 0", "use 0 to leave it out")
        for one in fields(self):
            name = one.name
            if one.type == "bool" and not isinstance(getattr(self, name), bool):
                found.add(name, getattr(self, name), "must be true or false", "use true or false")
        return found
