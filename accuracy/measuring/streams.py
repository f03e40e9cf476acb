"""Kernels that move bytes: norms, activations, rotation, additions, loss, embedding, optimizers, copies.

Bytes are those that the package's ledger charges for the operator, so that seconds over bytes are its rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accuracy.measuring.models import RMSNorm, rotary_tables, rotated
from accuracy.measuring.products import DTYPES, WIDTHS
from accuracy.measuring.tables import Tables
from shardwise.measuring import Machine, TimedCase, Timing, copy_of, ring, values

_SIZES = {"cpu": ((64, 256), (256, 256), (256, 512), (512, 512), (512, 1408), (1024, 512), (1024, 1024), (1024, 2816),
                  (2048, 1024), (4096, 1024)),
          "cuda": ((256, 4096), (1024, 4096), (4096, 4096), (4096, 14336), (16384, 4096))}  # fmt: skip
_VOCAB = {"cpu": ((64, 8192), (256, 8192), (512, 8192), (1024, 8192), (512, 32000)),
          "cuda": ((1024, 32000), (4096, 32000), (4096, 128256))}  # fmt: skip
_PARAMETERS = {"cpu": (10**5, 10**6, 4 * 10**6, 16 * 10**6), "cuda": (10**6, 10**7, 10**8, 10**9)}
_COPIES = {"cpu": (2**16, 2**20, 2**22, 2**24, 2**26, 2**28), "cuda": (2**20, 2**24, 2**28, 2**31)}


@dataclass(frozen=True, slots=True)
class Kernel:
    """An operator on a tensor of rows by width: what it computes, and streams of that tensor it is charged each way."""

    name: str
    run: Callable[..., Any]
    inputs: int
    forward: float
    backward: float
    weights: Callable[[int], list[Any]] = lambda width: []


def _gated(gate: Any, up: Any) -> Any:
    return F.silu(gate) * up


KERNELS = (
    Kernel("rms_norm", lambda x, w: RMSNorm.forward(_Held(w), x), 1, 8, 9, lambda width: [torch.ones(width)]),
    Kernel("layer_norm", lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b), 1, 2, 3,
           lambda width: [torch.ones(width), torch.zeros(width)]),
    Kernel("swiglu", _gated, 2, 5, 8),
    Kernel("gelu", F.gelu, 1, 2, 3),
    Kernel("add", lambda x, y: x + y, 2, 3, 0),
)  # fmt: skip


class _Held:
    """A weight where a module would have it."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight


def _passes(make_inputs: Callable[[], list[Any]], run: Callable[..., Any], size: float, backward: bool) -> Any:
    """Return what makes the call of one pass; inputs, and the results that a model would keep, leave the caches."""

    def make() -> Callable[[int], Any]:
        inputs = ring(make_inputs, size)
        results: list[Any] = [None] * len(inputs)
        if not backward:

            def call(i: int) -> None:
                results[i % len(results)] = run(*inputs[i % len(inputs)])

            return call
        outputs = [run(*one) for one in inputs]
        gradients = ring(lambda: torch.ones_like(outputs[0]), size)
        wanted = [[t for t in one if t.is_floating_point() and t.requires_grad] for one in inputs]

        def back(i: int) -> None:
            j = i % len(inputs)
            gradient = gradients[i % len(gradients)]
            results[j] = torch.autograd.grad(outputs[j], wanted[j], gradient, retain_graph=True)

        return back

    return make


class Streams:
    """Cases of kernels that move bytes on one machine."""

    def __init__(self, machine: Machine, tables: Tables, quick: bool) -> None:
        self.machine, self.tables, self.quick = machine, tables, quick

    def _tensor(self, rows: int, width: int, dtype: str) -> Any:
        return values(rows, width, dtype=DTYPES[dtype], device=self.machine.device).requires_grad_()

    def _row(self, op: str, dtype: str, size: tuple[int, int], moved: float) -> Callable[[Timing], None]:
        def row(timing: Timing) -> None:
            self.tables.add(
                "kernels_memory", device=self.machine.key, engine=self.machine.engine,
                engine_version=self.machine.torch_version,
                citation=self.machine.citation, op=op, dtype=dtype, rows=size[0], width=size[1],
                bytes_total=float(moved), time_seconds=timing.seconds, spread=timing.spread,
            )  # fmt: skip

        return row

    def _both(
        self, op: str, dtype: str, size: tuple[int, int], make: Callable[[], list[Any]], run: Callable[..., Any],
        moved: tuple[float, float],
    ) -> Iterator[TimedCase]:  # fmt: skip
        one = WIDTHS[dtype] * size[0] * size[1]
        for backward, bytes_total in zip((False, True), moved, strict=True):
            if bytes_total:
                name = f"{op}_{'backward' if backward else 'forward'}"
                yield TimedCase(
                    f"{name} {dtype} {size}",
                    _passes(make, run, one, backward),
                    self._row(name, dtype, size, bytes_total),
                )

    def elementwise(self) -> Iterator[TimedCase]:
        """Yield norms, activations and additions."""
        for dtype, width in WIDTHS.items():
            for k in KERNELS:
                for size in _SIZES[self.machine.device][: 1 if self.quick else None]:

                    def make(k: Kernel = k, size: tuple[int, int] = size, dtype: str = dtype) -> list[Any]:
                        learned = [
                            w.to(self.machine.device, DTYPES[dtype]).requires_grad_() for w in k.weights(size[1])
                        ]
                        return [*(self._tensor(*size, dtype) for _ in range(k.inputs)), *learned]

                    one = float(width * size[0] * size[1])
                    yield from self._both(k.name, dtype, size, make, k.run, (k.forward * one, k.backward * one))

    def rotation(self) -> Iterator[TimedCase]:
        """Yield the rotation of queries (arXiv:2104.09864) with heads of 64: two streams each way."""
        for dtype, width in WIDTHS.items():
            for rows, D in _SIZES[self.machine.device][: 1 if self.quick else None]:
                heads = D // 64

                def make(rows: int = rows, heads: int = heads, dtype: str = dtype) -> list[Any]:
                    x = self._tensor(rows, heads * 64, dtype).detach().view(1, rows, heads, 64).transpose(1, 2)
                    return [x.requires_grad_(), *rotary_tables(rows, 64, x)]

                moved = float(2 * width * rows * heads * 64)
                run = lambda x, cos, sin: rotated(x, (cos, sin))  # noqa: E731
                yield from self._both("rotary", dtype, (rows, heads * 64), make, run, (moved, moved))

    def losses(self) -> Iterator[TimedCase]:
        """Yield the cross entropy in fp32: 18 and 22 bytes a logit; and lookups in a table of 512 columns."""
        for dtype, width in WIDTHS.items():
            for rows, V in _VOCAB[self.machine.device][: 1 if self.quick else None]:

                def make(rows: int = rows, V: int = V, dtype: str = dtype) -> list[Any]:
                    targets = torch.randint(V, (rows,), device=self.machine.device)
                    return [self._tensor(rows, V, dtype), targets]

                run = lambda x, targets: F.cross_entropy(x.float(), targets)  # noqa: E731
                moved = (18.0 * rows * V, 22.0 * rows * V)
                yield from self._both("cross_entropy", dtype, (rows, V), make, run, moved)

                ids = torch.arange(rows, device=self.machine.device) * 97 % V
                table = self._tensor(V, 512, dtype)

                def look(ids: Any = ids, table: Any = table) -> list[Any]:
                    return [ids, table]

                one = float(2 * width * rows * 512)
                yield from self._both("embedding", dtype, (rows, 512), look, F.embedding, (one, 0.0))

    def _updates(self, kind: Any, given: dict[str, Any], what: tuple[int, str], size: int) -> Callable[[int], Any]:
        count, dtype = what

        def one() -> Any:
            p = nn.Parameter(values(count, dtype=DTYPES[dtype], device=self.machine.device))
            p.grad = values(count, dtype=DTYPES[dtype], device=self.machine.device)
            return kind([p], **given)

        made = ring(one, size)
        for optimizer in made:
            optimizer.step()
        return lambda i: made[i % len(made)].step()

    def optimizers(self) -> Iterator[TimedCase]:
        """Yield updates of fp32 and bf16 parameters: what AdamW and SGD with momentum stream by the ledger."""
        kinds: tuple[tuple[str, Any, dict[str, Any], int], ...] = (
            ("adamw_fused", torch.optim.AdamW, {"fused": True}, 2),
            ("adamw_foreach", torch.optim.AdamW, {"foreach": True}, 2),
            ("sgd_fused", torch.optim.SGD, {"fused": True, "momentum": 0.9, "lr": 1e-3}, 1),
        )
        for dtype, width in WIDTHS.items():
            for name, kind, given, moments in kinds:
                for count in _PARAMETERS[self.machine.device][: 1 if self.quick else None]:
                    make = partial(self._updates, kind, given, (count, dtype), (2 + moments) * width * count)
                    # As the ledger counts it (training/_update.py): what the loop without fusion adds included.
                    passes = 4 + 2 * moments + (2 if "foreach" in name else 0)
                    moved = float(passes * width * count)
                    yield TimedCase(f"{name} {dtype} {count}", make, self._row(name, dtype, (count, 1), moved))

    def copies(self) -> Iterator[TimedCase]:
        """Yield copies within the memory of the device (read and written), and on a GPU from and to the host."""
        pairs = [("copy_d2d", self.machine.device, self.machine.device)]
        if self.machine.device == "cuda":
            pairs += [("copy_h2d", "cpu", "cuda"), ("copy_d2h", "cuda", "cpu")]
        for op, source, target in pairs:
            for size in _COPIES[self.machine.device][: 1 if self.quick else None]:
                both = 2 if op == "copy_d2d" else 1
                yield TimedCase(
                    f"{op} {size}",
                    copy_of(size, source, target),
                    self._row(op, "fp32", (size // 4, 1), float(both * size)),
                )

    def cases(self) -> Iterator[TimedCase]:
        """Yield every case."""
        for part in (self.elementwise, self.rotation, self.losses, self.optimizers, self.copies):
            yield from part()
