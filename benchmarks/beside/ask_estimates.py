"""Ask transformer-perf-estimates the settings on standard input.

Runs beside nothing of ours, in a Python with pandas below 3, with the checkout as its only argument.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

PRODUCTS = ("qkv", "vproj", "fc1", "fc2")
GIGA, TERA = 1e9, 1e12


def system(nvs: int) -> dict:
    """Return its A100 system with a domain of so many devices."""
    return {**json.loads(Path("systems/config-A100.json").read_text(encoding="utf-8")), "nvlink_size": nvs}


def blocks(s: dict) -> list:
    """Return its two tables of a layer."""
    from modules import mlp_1d, sa_1d

    where = {"parallelism": {"m": s["tp"]}, "topology": {"t": s["fast"]}, "system": system(s["nvs"])}
    mlp = mlp_1d(s["batch"], s["l"], s["e"], 4 * s["e"], **where)
    return [mlp, sa_1d(s["batch"], s["l"], s["e"], s["h"], flash_attention=True, **where)]


def layer(s: dict) -> dict:
    """Return its figures of a layer on a device."""
    import pandas

    every = pandas.concat(blocks(s))
    products, core = every[every["name"].isin(PRODUCTS)], every[every["name"] == "fusedla"]
    alone = products[["t_fwd", "t_bwd"]].to_numpy().sum() - products[["t_fwd_comm", "t_bwd_comm"]].to_numpy().sum()
    return {
        "weights of a layer": every["weights_mem"].sum() * GIGA,
        "activations of a layer": every["activation_buffer"].sum() * GIGA,
        "FLOPs of products, forward": products["flops_fwd"].sum() * TERA,
        "FLOPs of products, backward": products["flops_bwd"].sum() * TERA,
        "FLOPs of attention, forward": core["flops_fwd"].sum() * TERA,
        "seconds of products": alone,
        "bytes of messages": every[["comm_fwd", "comm_bwd"]].to_numpy().sum() * GIGA,
        "seconds of messages": every[["t_fwd_comm", "t_bwd_comm"]].to_numpy().sum(),
    }


def collective(s: dict) -> dict:
    """Return its seconds of a collective."""
    from estimates import Estimates

    found = Estimates(system(s["nvs"])).get_time_comm(s["bytes"] / GIGA, s["ranks"], s["verb"], s["fast"])
    return {f"seconds of {s['verb']}": found}


def seconds_of(stats: dict) -> dict:
    """Return a step and what it is made of."""
    return {
        "compute in a step": stats["t_comp"] + stats["t_mem"],
        "tensor-parallel messages in a step": stats["t_tp_comm"],
        "data-parallel messages in a step": stats["t_dp_comm"],
        "pipeline messages in a step": stats["t_pp_comm"],
        "bubble": stats["t_bubble"],
        "step": stats["t"],
    }


def stats_of(stats: dict) -> dict:
    """Return what is compared of a plan."""
    return {
        "weights": stats["wts_mem"] * GIGA,
        "gradients": stats["wts_grad_mem"] * GIGA,
        "optimizer": stats["wts_optimizer_states_mem"] * GIGA,
        "activations": stats["acts_mem"] * GIGA,
        **seconds_of(stats),
    }


def plan(s: dict) -> dict:
    """Return its figures of a training plan."""
    from execution import totals
    from modules import dataparallel, pipelineparallel

    mlp, attention = blocks({**s, "batch": s["micro_batch"]})
    where, modules, local = system(s["nvs"]), [mlp, attention], s["global_batch"] // s["dp"] // s["micro_batch"]
    dp = dataparallel(modules=modules, depth=s["depth"] // s["pp"], dp=s["dp"], t_dp=s["fast_dp"], overlap=True,
                      system=where)  # fmt: skip
    sent = float(mlp.loc[mlp["name"] == "ln1"]["activation_buffer"].iloc[0])
    pp = pipelineparallel(modules=modules, number_micro_batches=local, comm_vol=sent, pp=s["pp"], t_pp=1, overlap=False,
                          system=where)  # fmt: skip
    _, stats = totals(mlp, attention, dp, pp, s["depth"], pp=s["pp"], dp=s["dp"], number_micro_batches=local)
    return stats_of(stats)


def search(s: dict) -> dict:
    """Return the step of its best plan, which must be the one that the setting names."""
    from execution import execute_1d

    model = {**{k: s[k] for k in ("l", "e", "h", "depth")}, "f": 4 * s["e"]}
    best = execute_1d(model, [s["devices"]], global_batch_size=s["global_batch"], system=system(s["nvs"]))[0][0]
    plan = [best[2][name] for name in ("dp", "tp", "pp", "mbs")]
    if plan != s["theirs"]:
        raise SystemExit(f"the best plan is {plan}, the setting says {s['theirs']}")
    seconds = seconds_of(best[3])
    whole = seconds.pop("step")
    return {**seconds, "step of the best plan": whole}


def main() -> None:
    """Answer every setting, each by its place."""
    kinds = {"layer": layer, "collective": collective, "plan": plan, "search": search}
    with redirect_stdout(sys.stderr):
        answers = [kinds[s["ask"]](s) for s in json.load(sys.stdin)]
    print(json.dumps(answers, default=float))


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    sys.path.insert(0, sys.argv[1])
    main()
