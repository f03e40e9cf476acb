"""Print how far tables disagree about one attention kernel or one collective: what no form can go below.

`python -m accuracy.noise.attention FOLDER` reads kernels_attention_*.csv, kernels_mla_*.csv and
kernels_collective_*.csv and pairs rows of the same work by one engine on two devices of one chip (b200 and gb200, b300
and gb300), by two engines on one device whose kernels come from one library (FlashAttention 3 in vLLM and SGLang on
Hopper), and of collectives on devices with the same links (h100 and h200; b200 and b300). Figures as in
accuracy.noise.kernels: one prediction for both rows misses by half of a disagreement at least.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from accuracy.calibration.tables import pick, read
from accuracy.noise.kernels import RELATIVES, gathered, timed

KINDS = {
    "attention_decode": ("kv_dtype", "batch", "query_tokens", "prefix_tokens", "num_heads", "num_kv_heads", "head_dim",
                         "sliding_window"),
    "attention_prefill": ("attention_dtype", "kv_dtype", "batch", "query_tokens", "prefix_tokens", "num_heads",
                          "num_kv_heads", "head_dim", "sliding_window"),
    "mla": ("op", "kv_dtype", "gemm_dtype", "batch", "query_tokens", "prefix_tokens", "num_heads"),
}  # fmt: skip
COLLECTIVE = ("op", "dtype", "num_gpus", "gpus_per_node", "message_bytes", "variant")
SAME_LINKS = (("h100-sxm-80gb", "h200-sxm-141gb"), ("b200-sxm-180gb", "b300"), ("gb200", "gb300"))
SAME_LIBRARY = (("h100-sxm-80gb", ("vllm", "sglang")), ("h200-sxm-141gb", ("vllm", "sglang")))


def lines(folder: Path) -> Iterator[str]:
    """Yield the table: kernel, pair, rows, ratio, disagreement, and what is left without the ratio."""
    yield "| kernel | pair | rows | ratio | disagreement | without the ratio |"
    yield "|---|---|---:|---:|---:|---:|"
    for kind, work in KINDS.items():
        table = read(folder, kind)
        if not table:
            continue
        found = timed(table, ("device",), ("engine", *work))
        yield from gathered(kind, "same chip", found, [((a,), (b,)) for a, b in RELATIVES])
        for device, (a, b) in SAME_LIBRARY if kind != "mla" else ():
            own = timed(pick(table, device=device), ("engine",), work)
            yield from gathered(kind, f"same library, {device}", own, [((a,), (b,))])
    table = read(folder, "collective")
    if table:
        found = timed(table, ("device",), ("engine", *COLLECTIVE))
        yield from gathered("collective", "same links", found, [((a,), (b,)) for a, b in SAME_LINKS])


def main() -> None:
    """Print the table of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with kernels_*.csv")
    print(*lines(parser.parse_args().folder), sep="\n")


if __name__ == "__main__":
    main()
