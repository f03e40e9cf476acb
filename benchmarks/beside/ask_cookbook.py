"""Ask the calculators of EleutherAI's cookbook the settings on standard input.

Runs beside nothing of ours, with the folder of the calculators as its only argument. They print to two digits; the full
figures are the local names of the function that computes them, read when it returns.
"""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace

KEPT = {
    "params": ("total_params", "embedding_params", "attention_params", "ffn_params"),
    "flops": ("total_flops",),
    "mem": (
        "per_gpu_model_mem", "per_gpu_gradient_mem", "per_gpu_optimizer_mem", "per_gpu_activation_mem",
    ),
}  # fmt: skip
SERVED = ("per_gpu_model_mem", "per_gpu_kv_cache_mem")


def kept(function: object, args: Namespace, names: tuple) -> dict:
    """Return local names of a function when it returns."""
    seen: dict = {}

    def watch(frame: object, event: str, _: object) -> None:
        if event == "return" and frame.f_code is function.__code__:
            seen.update({name: float(frame.f_locals[name]) for name in names if name in frame.f_locals})

    sys.setprofile(watch)
    try:
        function(args)
    finally:
        sys.setprofile(None)
    return seen


def main() -> None:
    """Answer every setting, each by its place."""
    answers = []
    for setting in json.load(sys.stdin):
        ask = setting["ask"]
        module = importlib.import_module(f"calc_transformer_{ask}")
        args = module.config_parser().parse_args(setting["arguments"].split())
        names = SERVED if ask == "mem" and args.infer else KEPT[ask]
        answers.append(kept(getattr(module, f"calc_{ask}"), args, names))
    json.dump(answers, sys.__stdout__)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    sys.stdout = sys.stderr
    main()
