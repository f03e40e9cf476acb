"""What the study asks: the models and their runs, the systems, the layouts, and the figures published before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import shardwise as sw
from shardwise.search import IntRanges, SearchSpace, upto

STACK = "megatron"
NETWORK = 16384
COUNTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DOMAINS = (4, 8, 64)

# Rates of systems/config-*.json of github.com/ShashankSubramanian/transformer-perf-estimates (2024-09): decimal GB.
# What they leave out (latencies, efficiencies, vector rates of the devices) is the catalogue's.
SYSTEMS: dict[str, tuple[str, dict[str, float]]] = {
    "A100": ("a100-sxm-80gb", {"memory": 80e9, "memory_bandwidth": 1555e9, "peak_flops": 312e12,
                               "fast_bandwidth": 300e9, "slow_bandwidth": 25e9}),
    "H200": ("h200-sxm-141gb", {"memory": 141e9, "memory_bandwidth": 4800e9, "peak_flops": 989.4e12,
                                "fast_bandwidth": 450e9, "slow_bandwidth": 50e9}),
    "B200": ("b200-sxm-180gb", {"memory": 192e9, "memory_bandwidth": 8000e9, "peak_flops": 2500e12,
                                "fast_bandwidth": 900e9, "slow_bandwidth": 100e9}),
}  # fmt: skip
# Capacity, bandwidth, matrix and vector FLOP/s (16 bit) of the generations that the second map runs through.
GENERATIONS = {
    "A100": (80e9, 1555e9, 312e12, 78e12),
    "H200": (141e9, 4800e9, 989.4e12, 133.8e12),
    "B200": (192e9, 8000e9, 2500e12, 339e12),
    "next": (384e9, 16000e9, 3750e12, 508.5e12),
}
CATALOGUE = {"B200 of the catalogue": ("b200-sxm-180gb", dict[str, float]())}

# One trillion tokens; 80 epochs of 350,000 fields (arXiv:2410.00273).
JOBS = {
    "gpt3-1t": sw.Training(seq_len=2048, global_batch=4096, token_budget=1e12),
    "vit-era5": sw.Training(seq_len=64800, global_batch=4096, sample_budget=350_000, epochs=80),
}
TITLES = {"gpt3-1t": "GPT3-1T, 2,048 tokens", "vit-era5": "ViT-ERA5, 64,800 tokens"}
LAYOUTS = {"1d": "1D: tp", "cp": "2D: tp x context", "summa": "2D: SUMMA, tp x tp2"}

_CHOICES: dict[str, Any] = {
    "vpp": upto(1),
    "ep": upto(1),
    "etp": upto(1),
    "panels": IntRanges(((1, 2), (4, 4), (8, 8), (16, 16), (32, 32))),
    "micro_batch": upto(64),
    "sequence_parallel": (True,),
    "cp_kind": ("all-gather",),
    "schedule": ("1f1b",),
    "sharding": ("zero1",),
    "recompute": ("none",),
}
_OF_LAYOUT: dict[str, dict[str, Any]] = {
    "1d": {"layout": ("1d",), "tp2": upto(1), "cp": upto(1)},
    "cp": {"layout": ("1d",), "tp2": upto(1)},
    "summa": {"layout": ("summa",), "cp": upto(1)},
}
# What the published space leaves out: schedules, sharding and recomputation.
WIDER: dict[str, Any] = {
    "vpp": IntRanges(),
    "schedule": ("1f1b", "interleaved", "zb-h1"),
    "sharding": ("zero1", "zero2", "zero3"),
    "recompute": ("none", "selective", "full"),
}


def space_of(layout: str, **changes: Any) -> SearchSpace:
    """Return the published space of a layout, with fields changed."""
    return SearchSpace(**{**_CHOICES, **_OF_LAYOUT[layout], **changes})


@cache
def model_of(name: str) -> sw.Model:
    """Return a model of the catalogue."""
    return sw.Model.load(name)


def cluster_of(system: str, domain: int, devices: int = NETWORK) -> sw.Cluster:
    """Return so many devices of a system in fast domains of a size."""
    device, rates = {**SYSTEMS, **CATALOGUE}[system]
    return sw.Cluster.parse(f"{devices}x{device}", {"fast_domain": domain, "devices_per_node": domain, **rates})


def with_rates(cluster: sw.Cluster, **values: float) -> sw.Cluster:
    """Return the cluster with other fields of its device."""
    return replace(cluster, device=cluster.device.with_values(values, "swept by this study", "2026"))


@dataclass(frozen=True)
class Published:
    """A best plan as published: its layout, degrees, ranks in the fast domain, seconds of a step and decimal GB."""

    model: str
    layout: str
    domain: int
    degrees: tuple[int, int, int, int, int]  # first and second degree of the layout, pp, dp, micro-batch
    fast: tuple[int, int, int, int]  # ranks of the first two, dp and pp in the fast domain
    panels: int
    seconds: float
    gigabytes: float

    def plan(self) -> sw.Plan:
        """Return it as a plan."""
        tp, second, pp, dp, micro_batch = self.degrees
        one, two, fast_dp, fast_pp = self.fast
        summa = self.layout == "summa"
        return sw.Plan(
            tp=tp,
            tp2=second if summa else 1,
            cp=1 if summa else second,
            pp=pp,
            dp=dp,
            micro_batch=micro_batch,
            panels=self.panels,
            layout="summa" if summa else "1d",
            sequence_parallel=not summa and tp > 1,
            cp_kind="all-gather",
            sharding="zero1",
            recompute="none",
            fast=(one, two if summa else 1, 1 if summa else two, fast_dp, fast_pp),
        )


# The best plans on 16,384 B200 in outputs/exec_*.npy of the repository above (commit 54278b0 has the same models).
# There is none of ViT-ERA5 with the layout 1d: nothing fitted.
PUBLISHED = (
    Published("gpt3-1t", "1d", 4, (8, 1, 64, 32, 1), (4, 1, 1, 1), 1, 3.796, 65.7),
    Published("gpt3-1t", "1d", 8, (8, 1, 64, 32, 1), (8, 1, 1, 1), 1, 3.233, 65.7),
    Published("gpt3-1t", "1d", 64, (8, 1, 4, 512, 1), (8, 1, 8, 1), 1, 2.893, 183.7),
    Published("gpt3-1t", "summa", 4, (4, 1, 128, 32, 1), (4, 1, 1, 1), 16, 3.499, 69.6),
    Published("gpt3-1t", "summa", 8, (8, 1, 128, 16, 1), (8, 1, 1, 1), 8, 3.192, 35.2),
    Published("gpt3-1t", "summa", 64, (8, 4, 1, 512, 8), (8, 4, 2, 1), 8, 2.902, 187.6),
    Published("gpt3-1t", "cp", 4, (4, 2, 128, 16, 1), (4, 1, 1, 1), 1, 3.473, 52.2),
    Published("gpt3-1t", "cp", 8, (2, 4, 64, 32, 1), (2, 4, 1, 1), 1, 2.961, 69.1),
    Published("gpt3-1t", "cp", 64, (4, 4, 128, 8, 1), (4, 4, 2, 2), 1, 2.673, 30.4),
    Published("vit-era5", "summa", 4, (1, 16, 1, 1024, 1), (1, 4, 1, 1), 16, 20.690, 158.3),
    Published("vit-era5", "summa", 8, (1, 16, 1, 1024, 1), (1, 8, 1, 1), 16, 13.460, 158.3),
    Published("vit-era5", "summa", 64, (4, 4, 1, 1024, 1), (4, 4, 4, 1), 16, 10.554, 158.3),
    Published("vit-era5", "cp", 4, (8, 2, 2, 512, 1), (4, 1, 1, 1), 1, 16.283, 184.3),
    Published("vit-era5", "cp", 8, (4, 4, 2, 512, 1), (4, 2, 1, 1), 1, 13.710, 167.8),
    Published("vit-era5", "cp", 64, (4, 8, 1, 512, 1), (4, 8, 2, 1), 1, 11.207, 149.2),
)
