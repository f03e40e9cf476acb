"""Static inference in plain PyTorch: seconds of a prompt and of a later token of a fixed batch, over a cache."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accuracy.measuring.models import Config, Decoder
from accuracy.measuring.products import DTYPES
from accuracy.measuring.steps import gpt, llama, models, parameters
from accuracy.measuring.tables import Tables
from shardwise.measuring import BackgroundLoad, Clock, Machine, Timing


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One fixed batch: prompts of so many tokens, then so many more tokens each."""

    name: str
    config: Config
    B: int
    prompt: int
    output: int
    precision: str

    @property
    def case(self) -> str:
        """A name for the rows."""
        return f"{self.name}-b{self.B}-i{self.prompt}-o{self.output}-{self.precision}"


def batches(device: str, quick: bool) -> Iterator[Batch]:
    """Yield the batches of a kind of device."""
    if quick:
        yield Batch(name="own-tiny", config=llama(64, 2, 2, 1, 128, 256), B=1, prompt=16, output=4, precision="fp32")
        yield Batch(name="own-tiny-gpt", config=gpt(64, 2, 2, 256), B=2, prompt=16, output=4, precision="bf16")
        return
    sizes = ((1, 128), (1, 512), (1, 1024), (4, 128), (4, 512), (16, 64), (16, 128))
    if device == "cuda":
        sizes = ((1, 128), (1, 2048), (8, 512), (8, 2048), (64, 512))
    for name, config in models(device).items():
        for B, prompt in sizes:
            for precision in ("fp32", "bf16") if device == "cpu" else ("bf16",):
                if precision == "bf16" and device == "cpu" and (B, prompt) not in sizes[1::2]:
                    continue
                yield Batch(name=name, config=config, B=B, prompt=prompt, output=16, precision=precision)


class Server:
    """A model with room for one batch."""

    def __init__(self, batch: Batch, device: str) -> None:
        torch.manual_seed(0)
        torch.set_default_dtype(DTYPES[batch.precision])
        try:
            with torch.device(device):
                self.model = Decoder(batch.config).eval()
        finally:
            torch.set_default_dtype(torch.float32)
        self.batch = batch
        self.ids = torch.randint(batch.config["vocab_size"], (batch.B, batch.prompt), device=device)
        self.caches = self.model.new_caches(batch.B, batch.prompt + batch.output)
        self.last: Any = None

    def prefill(self, i: int = 0) -> None:
        """Run the prompts and choose the first token of each."""
        with torch.inference_mode():
            self.last = self.model(self.ids, self.caches, 0).argmax(-1)

    def decode(self, i: int = 0) -> None:
        """Run all tokens after the first."""
        with torch.inference_mode():
            last = self.last
            for past in range(self.batch.prompt, self.batch.prompt + self.batch.output - 1):
                last = self.model(last, self.caches, past).argmax(-1)


def time_batches(clock: Clock, wanted: Sequence[Batch], rounds: int, each: int) -> dict[str, tuple[Timing, Timing]]:
    """Return timings of (prompt, one later token) by case."""
    found = {batch.case: (Timing(), Timing()) for batch in wanted}

    def one_round(some: Sequence[Batch]) -> None:
        for batch in some:
            server = Server(batch, clock.device)
            clock.warmed(server.prefill, each)
            count = clock.warmed(server.decode, each)
            others, first, later = BackgroundLoad(), [], []
            for _ in range(count):
                first.append(clock.elapsed(server.prefill, 1))
                later.append(clock.elapsed(server.decode, 1) / (batch.output - 1))
            for timing, samples in zip(found[batch.case], (first, later), strict=True):
                timing.keep(samples, others.share())
            del server
            gc.collect()

    for _ in range(rounds):
        one_round(wanted)
    noisy = [b for b in wanted if any(t.noisy for t in found[b.case])]
    for _ in range(rounds if noisy else 0):
        one_round(noisy)
    return found


def record(machine: Machine, tables: Tables, batch: Batch, timings: tuple[Timing, Timing]) -> None:
    """Add the two rows of a batch."""
    tables.models[batch.name] = {
        "config": batch.config, "params": parameters(batch.config), "params_from": "counted by PyTorch",
        "source": "accuracy/measuring/steps.py",
    }  # fmt: skip
    for metric, timing in zip(("ttft", "tpot"), timings, strict=True):
        noise = f"threads={machine.threads}; samples={len(timing.samples)}; spread={timing.spread:.3f}"
        tables.add(
            "inference", case_id=f"{machine.key}-{batch.case}", metric=metric, value=timing.seconds, unit="s",
            model=batch.name, device=machine.key, num_gpus=1, tp=1, pp=1, ep=1, dp=1, attention_dp=1,
            engine=machine.engine, engine_version=machine.torch_version, serving_mode="static",
            weight_dtype=batch.precision, activation_dtype=batch.precision, kv_dtype=batch.precision, batch=batch.B,
            input_tokens=batch.prompt, output_tokens=batch.output, prefix_tokens=0, quality="high",
            source=f"own_{machine.key}", citation=machine.citation,
            notes=noise + ("; noisy" if timing.noisy else ""),
        )  # fmt: skip
