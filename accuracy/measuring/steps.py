"""Whole training steps: seconds and peaks of memory of small models over sizes, recompute, optimizers, precision."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from accuracy.measuring.memory import cpu_peak, cuda_peak
from accuracy.measuring.models import Config, Decoder, loss_of
from accuracy.measuring.products import DTYPES
from accuracy.measuring.tables import Tables
from shardwise.measuring import BackgroundLoad, Clock, Machine, Timing

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, fused=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One configuration of a training step."""

    name: str
    config: Config
    B: int
    S: int
    precision: str = "fp32"
    optimizer: str = "adamw"
    recompute: str = "none"
    micro: int = 1

    @property
    def case(self) -> str:
        """A name for the rows."""
        words = (self.name, f"b{self.B}", f"s{self.S}", self.precision, self.optimizer, self.recompute)
        return "-".join((*words, *((f"x{self.micro}",) if self.micro > 1 else ())))


def llama(D: int, layers: int, heads: int, kv: int, width: int, V: int) -> Config:
    """Return a configuration with RMSNorm, rotation, shared key-value heads and a gated feed-forward."""
    return {
        "model_type": "llama", "hidden_size": D, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "intermediate_size": width, "vocab_size": V, "hidden_act": "silu",
        "tie_word_embeddings": False, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    }  # fmt: skip


def gpt(D: int, layers: int, heads: int, V: int) -> Config:
    """Return a configuration with LayerNorm, learned positions, biases, GELU and a tied head."""
    return {
        "model_type": "gpt2", "n_embd": D, "n_layer": layers, "n_head": heads, "vocab_size": V, "n_positions": 4096,
        "activation_function": "gelu", "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    }  # fmt: skip


def mixture(like: Config, experts: int, k: int) -> Config:
    """Return a Llama-like configuration whose feed-forwards are experts, k of them for a token."""
    return {**like, "model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": k}


_CPU_MODELS = {
    "own-llama-5m": llama(256, 4, 4, 2, 704, 4096),
    "own-llama-16m": llama(512, 4, 8, 4, 1408, 4096),
    "own-llama-34m": llama(512, 8, 8, 8, 1408, 8192),
    "own-llama-63m": llama(768, 8, 12, 4, 2048, 8192),
    "own-gpt-6m": gpt(256, 4, 4, 8192),
    "own-gpt-19m": gpt(512, 4, 8, 8192),
    "own-gpt-38m": gpt(768, 4, 12, 8192),
    "own-moe-15m": mixture(llama(256, 4, 4, 2, 512, 4096), 8, 2),
    "own-moe-24m": mixture(llama(384, 4, 6, 6, 512, 4096), 8, 2),
}
_CUDA_MODELS = {
    "own-llama-1b": llama(2048, 16, 32, 8, 8192, 32000),
    "own-llama-3b": llama(3072, 28, 24, 8, 8192, 32000),
    "own-gpt-355m": gpt(1024, 24, 16, 50304),
    "own-gpt-1b": gpt(1536, 48, 16, 50304),
    "own-moe-1b": mixture(llama(1024, 12, 16, 4, 1024, 32000), 16, 2),
}


def models(device: str) -> dict[str, Config]:
    """Return the models of a kind of device by name."""
    return _CPU_MODELS if device == "cpu" else _CUDA_MODELS


def runs(device: str, quick: bool) -> Iterator[Run]:
    """Yield the configurations of a kind of device."""
    if quick:
        yield Run(name="own-tiny", config=llama(64, 2, 2, 1, 128, 256), B=1, S=32)
        yield Run(name="own-tiny-gpt", config=gpt(64, 2, 2, 256), B=1, S=32, precision="bf16", optimizer="sgd")
        yield Run(name="own-tiny-moe", config=mixture(llama(64, 2, 2, 1, 64, 256), 4, 2), B=1, S=32, recompute="full")
        return
    sizes = ((1, 1024), (4, 1024), (2, 4096))
    if device == "cpu":
        sizes = ((1, 128), (4, 128), (1, 512), (2, 512), (1, 1024))
    for name, config in models(device).items():
        for B, S in sizes:
            large = name.endswith(("63m", "38m", "24m"))
            one = Run(name=name, config=config, B=B, S=S, precision="fp32" if device == "cpu" else "bf16")
            if not (device == "cpu" and B * S > 512 and large):
                yield one
            if sizes[2] == (B, S):
                yield replace(one, recompute="full")
                yield replace(one, optimizer="sgd")
                yield replace(one, precision="bf16" if device == "cpu" else "amp")
            if sizes[1] == (B, S) and not large:
                yield replace(one, precision="bf16" if device == "cpu" else "amp")
                yield replace(one, micro=2)


class Stepper:
    """A model, its optimizer and a batch: one optimizer step a call."""

    def __init__(self, run: Run, device: str) -> None:
        self.run, self.device = run, device
        torch.manual_seed(0)
        dtype = torch.float32 if run.precision == "amp" else DTYPES[run.precision]
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                self.model = Decoder(run.config, run.recompute == "full")
        finally:
            torch.set_default_dtype(torch.float32)
        self.optimizer = OPTIMIZERS[run.optimizer](self.model.parameters())
        shape = (run.B, run.S + 1)
        ids = [torch.randint(run.config["vocab_size"], shape, device=device) for _ in range(run.micro)]
        self.batches = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]

    def __call__(self, i: int = 0) -> None:
        """Run one optimizer step over all micro-batches."""
        self.optimizer.zero_grad(set_to_none=True)
        for ids, targets in self.batches:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.run.precision == "amp"):
                loss = loss_of(self.model, ids, targets)
            (loss / len(self.batches)).backward()
        self.optimizer.step()


def parameters(config: Config) -> int:
    """Return how many parameters the model has; nothing is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(config).parameters())


def time_steps(clock: Clock, wanted: Sequence[Run], rounds: int, each: int) -> dict[str, Timing]:
    """Return timings by case: every round makes each model anew, warms it and times some steps."""
    found = {run.case: Timing() for run in wanted}

    def one_round(some: Sequence[Run]) -> None:
        for run in some:
            step = Stepper(run, clock.device)
            count = clock.warmed(step, each)
            others = BackgroundLoad()
            samples = [clock.elapsed(step, 1) for _ in range(count)]
            found[run.case].keep(samples, others.share())
            del step
            gc.collect()

    for _ in range(rounds):
        one_round(wanted)
    noisy = [run for run in wanted if found[run.case].noisy]
    for _ in range(rounds if noisy else 0):
        one_round(noisy)
    return found


def peak_of(run: Run, device: str) -> dict[str, int]:
    """Return the peaks of two steps by kind of memory, model and optimizer included."""

    def two() -> None:
        step = Stepper(run, device)
        step()
        step()

    if device == "cuda":
        allocated, reserved = cuda_peak(two)
        return {"allocated": allocated, "reserved": reserved}
    return {"allocated": cpu_peak(two)}


def cells_of(machine: Machine, run: Run) -> dict[str, Any]:
    """Return the columns that all rows of a run share."""
    narrow = run.precision == "bf16"
    settings = "freed memory kept (mallopt)" if machine.keeps_memory and machine.device == "cpu" else ""
    return {
        "case_id": f"{machine.key}-{run.case}", "model": run.name, "device": machine.key, "num_gpus": 1,
        "gpus_per_node": 1, "seq_len": run.S, "micro_batch": run.B, "global_batch": run.B * run.micro, "tp": 1,
        "sp": 0, "cp": 1, "pp": 1, "vpp": 1, "dp": 1, "ep": 1, "etp": 1, "sharding": "none",
        "recompute": run.recompute, "compute_dtype": "bf16" if run.precision == "amp" else run.precision,
        "param_dtype": "bf16" if narrow else "fp32", "grad_dtype": "bf16" if narrow else "fp32",
        "attention_kernel": "flash", "optimizer": run.optimizer, "master_weights": 0, "finetune": "pretrain",
        "framework": machine.framework, "quality": "A", "source": f"own_{machine.key}", "citation": machine.citation,
        "notes": f"threads={machine.threads}; {settings}".rstrip("; "),
    }  # fmt: skip


def record(machine: Machine, tables: Tables, run: Run, timing: Timing | None, peaks: dict[str, int]) -> None:
    """Add the rows of a run."""
    cells = cells_of(machine, run)
    tables.models[run.name] = {
        "config": run.config,
        "params": parameters(run.config),
        "params_from": "counted by PyTorch",
        "source": "accuracy/measuring/steps.py",
    }
    if timing:
        noise = f"{cells['notes']}; steps={len(timing.samples)}; spread={timing.spread:.3f}"
        if timing.noisy:
            noise += "; noisy"
        added = {"metric": "step_time", "value": timing.seconds, "unit": "seconds", "notes": noise}
        tables.add("training", **(cells | added))
    for kind, peak in peaks.items():
        added = {"metric": "peak_memory", "value": peak, "unit": "bytes", "memory_kind": kind, "rank_scope": "rank0"}
        tables.add("training", **(cells | added))


def summary(found: dict[str, Timing]) -> str:
    """Return the noise of step times in a line."""
    spreads = [t.spread for t in found.values()]
    return f"{len(spreads)} runs, spread: median {statistics.median(spreads):.1%}, largest {max(spreads):.1%}"
