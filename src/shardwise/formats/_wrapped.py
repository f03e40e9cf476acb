"""A scheduler's script around the command that starts an exported training, one task on each node.

Sources: slurm.schedmd.com/sbatch.html and srun.html; torch 2.13 distributed/argparse_util.py, by which torchrun takes
PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT where no argument says them; LLaMA-Factory reads the plain names.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

from shardwise.errors import InputError, Problem
from shardwise.formats._exported import ExportCase, Exported
from shardwise.formats._trainer import processes

_PORT = 29500
_SLURM = """#!/bin/bash
#SBATCH --job-name={job}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={each}
# The account, the partition and the time limit are yours to add, here or as arguments of sbatch.
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT={port}
export PET_MASTER_ADDR=$MASTER_ADDR PET_MASTER_PORT=$MASTER_PORT
srun bash -c {inner}
"""


def slurm(case: ExportCase, found: Exported) -> Exported:
    """Return an export with job.sbatch, which starts it on the plan's nodes; raises `InputError` without a launch."""
    if not found.launch:
        rule = f"needs a command that starts the training on several nodes, which {found.system}'s files do not have"
        remedy = "export megatron, torchtitan, axolotl, llamafactory, torchtune or nanotron"
        raise InputError([Problem("wrap", "slurm", rule, remedy)])
    nodes, each = processes(case)
    inner = f"export NODE_RANK=$SLURM_NODEID PET_NODE_RANK=$SLURM_NODEID; {found.launch}"
    job = re.sub(r"[^A-Za-z0-9._-]", "-", case.model.name)
    text = _SLURM.format(job=job, nodes=nodes, each=each, port=_PORT, inner=shlex.quote(inner))
    return replace(
        found, files={**found.files, "job.sbatch": text}, notes=(*found.notes, "submit it: sbatch job.sbatch")
    )
