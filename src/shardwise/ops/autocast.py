"""What torch.autocast makes of fp32 weights and inputs for GEMMs of 16 bits, as far as autograd keeps it."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.ledger.number import X
from shardwise.ledger.op import Tensor


def casts(name: str, region: str, kept: Iterable[Tensor[X]], sizes: tuple[X, X], layers: int) -> tuple[Tensor[X], ...]:
    """Return what an operator of so many linear layers keeps of its input and weight, of `sizes` bytes in 16 bits.

    Of a fp32 stream each layer has a copy of its own, for copies of leaves alone are shared
    (pytorch aten/src/ATen/autocast_mode.cpp cached_cast); the input gradient reads that of the weight.

    >>> stream = Tensor(name="norm1.output", size_bytes=8, born="norm1", stream=True)
    >>> [one.size_bytes for one in casts("qkv", "attention", [stream], (4, 6), 3)]
    [4, 4, 4, 6]
    """
    inputs: list[Tensor[X]] = []
    for tensor in kept:
        one = [
            Tensor(name=f"{name}.input {at} in 16 bits", size_bytes=sizes[0], born=region, read_for="weight")
            for at in range(layers)
        ]
        inputs += one if tensor.stream else [tensor]
    weight = Tensor(name=f"{name}.weight in 16 bits", size_bytes=sizes[1], born=region, read_for="input")
    return (*inputs, weight)
