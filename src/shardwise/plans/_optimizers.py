"""Optimizers as libraries have them: what each keeps of a parameter, tensor by tensor."""

from __future__ import annotations

from shardwise.errors import InputError, Problem
from shardwise.records import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """What an optimizer keeps of one tensor: `count` moments of its shape, unless it factors or projects them.

    A `width` of 0 is the recipe's state width. In blocks of `block` elements an fp32 scale stands for each, and tensors
    of fewer than `least` elements keep `small_width` an element (0: the recipe's). `factored` keeps a number a row and
    one a column of what has two dimensions. With a `rank` two moments of the gradient projected onto its smaller side,
    and the projector, stand for those of a matrix.
    """

    count: int
    width: float = 0.0
    block: int = 0
    least: int = 0
    small_width: float = 0.0
    whole_blocks: bool = False
    """Tensors that are no multiple of a block are kept as small ones."""
    table_bytes: float = 0.0
    """Bytes of the table of codes of each moment of each tensor."""
    factored: bool = False
    rank: int = 0

    @property
    def by_tensor(self) -> bool:
        """Whether the bytes depend on the sizes of single tensors."""
        return bool(self.block or self.factored or self.rank)

    def element_bytes(self, recipe_width: float) -> float:
        """Return bytes an element of a large tensor; 0 where what is kept does not grow with the elements.

        >>> Moments(count=2, width=1, block=256).element_bytes(4), Moments(count=2).element_bytes(4)
        (2.03125, 8.0)
        """
        if self.factored or self.rank:
            return 0.0
        scale = 4 / self.block if self.block else 0.0
        return self.count * ((self.width or recipe_width) + scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """What an optimizer keeps of a matrix of a linear layer, and of any other tensor: vectors, tables and the head.

    `temporaries` counts fp32 copies of the largest tensor that an update makes, whatever the framework. States of a
    `paged` one lie in memory that the driver moves between device and host, those of small tensors left out.
    """

    name: str
    matrix: Moments
    other: Moments
    temporaries: int = 0
    paged: bool = False
    orthogonalises: bool = False
    """Whether the update of a matrix is made orthogonal, by GEMMs of its own."""

    @property
    def by_tensor(self) -> bool:
        """Whether the bytes depend on the sizes of single tensors."""
        return self.matrix.by_tensor or self.other.by_tensor

    @property
    def eight_bits(self) -> bool:
        """Whether states are of 8 bits in blocks, which bitsandbytes updates by kernels of its own.

        >>> [name for name in ("adam", "adam4bit", "paged-lion8bit") if OPTIMIZERS[name].eight_bits]
        ['paged-lion8bit']
        """
        return self.matrix.width == 1 and self.matrix.block > 0

    @property
    def own_kernel(self) -> bool:
        """Whether a kernel of its library updates each tensor in one pass, whatever the framework."""
        return self.by_tensor or self.paged


def _alike(name: str, moments: Moments) -> Optimizer:
    return Optimizer(name=name, matrix=moments, other=moments)


_ADAM = Moments(count=2)
# bitsandbytes/functional.py create_dynamic_map and optim/optimizer.py init_state: blocks of 256 elements with an fp32
# scale each, and fp32 states of tensors below min_8bit_size = 4096 elements. The two maps of 1,024 bytes are shared.
_EIGHT = Moments(count=2, width=1, block=256, least=4096, small_width=4)
# torchao/optim/adam.py _AdamBase._new_buffer and subclass_4bit.py: codes of half a byte in blocks of 128, 16 fp32 codes
# of each moment, and moments of the parameter's own type for tensors below 4,096 elements or that blocks do not divide.
_FOUR = Moments(count=2, width=0.5, block=128, least=4096, whole_blocks=True, table_bytes=64)
# torch/optim/_adafactor.py: row_var and col_var of what has two dimensions, variance of what has one; no first moment.
_FACTORED = Moments(count=1, factored=True)


def _projected(name: str, rank: int) -> Optimizer:
    """Return Adam on projected gradients of the linear layers, on whole ones of all else.

    galore_torch/adamw.py and galore_projector.py ("std", arXiv:2403.03507), apollo_torch/apollo.py and
    random_projector.py (arXiv:2412.05270): exp_avg and exp_avg_sq of (larger side, rank), and ortho_matrix.
    """
    return Optimizer(name=name, matrix=Moments(count=2, rank=rank), other=_ADAM, temporaries=1)


# Sources: Adam arXiv:1412.6980, Lion arXiv:2302.06675 (one moment), 8-bit Adam arXiv:2110.02861, AdEMAMix
# arXiv:2409.03137 (three moments), Muon (one momentum for matrices, Adam for the rest; github.com/KellerJordan/Muon),
# SGD with momentum (torch.optim.SGD keeps momentum_buffer) and without. GaLore's usual rank is 128, APOLLO's 256, and
# APOLLO-Mini's 1 (their READMEs).
OPTIMIZERS: dict[str, Optimizer] = {
    one.name: one
    for one in (
        _alike("adam", _ADAM),
        _alike("adam8bit", _EIGHT),
        _alike("adam4bit", _FOUR),
        _alike("ademamix8bit", replace(_EIGHT, count=3)),
        replace(_alike("adafactor", _FACTORED), temporaries=2),
        _projected("galore", 128),
        _projected("apollo", 256),
        _projected("apollo-mini", 1),
        _alike("lion", Moments(count=1)),
        _alike("lion8bit", replace(_EIGHT, count=1)),
        replace(_alike("muon", _ADAM), matrix=Moments(count=1), orthogonalises=True),
        _alike("sgd", Moments(count=1)),
        _alike("sgd-plain", Moments(count=0)),
    )
}


# bitsandbytes/optim/optimizer.py get_state_buffer: torch's own memory below 1e5 elements, else functional.py get_paged.
PAGED_ELEMENTS = 100_000
# Its optimizers of 32 bits keep fp32 states of 16-bit parameters too (optimizer.py init_state: dtype of optim_bits 32).
_WIDE = {"adam": replace(_ADAM, width=4), "lion": Moments(count=1, width=4)}
OPTIMIZERS |= {
    f"paged-{name}": replace(_alike(f"paged-{name}", _WIDE.get(name, OPTIMIZERS[name].matrix)), paged=True)
    for name in ("adam", "adam8bit", "ademamix8bit", "lion", "lion8bit")
}


def find_optimizer(name: str, rank: int = 0) -> Optimizer:
    """Return the named optimizer, gradients projected to a `rank` where one is given; raises `InputError`.

    >>> find_optimizer("lion").matrix.count, find_optimizer("galore", 64).matrix.rank
    (1, 64)
    """
    if name not in OPTIMIZERS:
        rule = "is not a known optimizer"
        raise InputError([Problem("optimizer", name, rule, "use one of " + ", ".join(OPTIMIZERS))])
    optimizer = OPTIMIZERS[name]
    if not rank:
        return optimizer
    if not optimizer.matrix.rank:
        able = ", ".join(n for n, one in OPTIMIZERS.items() if one.matrix.rank)
        raise InputError([Problem("optimizer_rank", rank, f"is not of {name}", f"leave it out, or use {able}")])
    return replace(optimizer, matrix=replace(optimizer.matrix, rank=rank))
