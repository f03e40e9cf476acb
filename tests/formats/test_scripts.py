"""Launch scripts of public repositories, in other words with the source named in each, read to every field."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from shardwise.formats import ImportContext, Imported, import_file
from shardwise.formats._launch import started
from shardwise.models import MLP, Attention, Block, LatentAttention, Mamba2, MoE
from shardwise.plans import Plan, Training

SCRIPTS = Path(__file__).parent / "scripts"
PAI = (
    *("dsw", "8B", "1", "8", "1e-5", "1e-6", "4096", "4096", "bf16", "4", "1", "2"),
    *("true", "true", "true", "false", "sel", "false"),
)
LLAMA_8B = Attention(heads=32, kv_heads=8, head_dim=128)
GATED = MLP(ffn=14336)


def old(width: int, heads: int, gated: int = 0) -> Block:
    """Return a layer of GPT-3: LayerNorm, biases everywhere, no rotation."""
    core = Attention(heads=heads, kv_heads=heads, head_dim=width // heads, qkv_bias=True, out_bias=True, rotary=False)
    feed = MLP(ffn=gated or 4 * width, gated=bool(gated), bias=True, activation="silu" if gated else "gelu")
    return Block(mixers=(core,), feed_forward=feed, norm="layernorm")


def oss(window: int) -> Block:
    """Return a layer of gpt-oss."""
    core = Attention(heads=64, kv_heads=8, head_dim=64, qkv_bias=True, out_bias=True, sinks=True, window=window)
    experts = MoE(experts=32, top_k=4, ffn=2880, bias=True, router_bias=True, activation="gelu", clamped=True)
    return Block(mixers=(core,), feed_forward=experts)


def nemotron(letter: str) -> Block:
    """Return a layer of Nemotron 3 Nano by its letter."""
    one: dict[str, Any] = {"mixers": (), "feed_forward": None, "norms": 1}
    shared = MLP(ffn=3712, gated=False, activation="relu2")
    experts = MoE(experts=128, top_k=6, ffn=1856, gated=False, activation="relu2", correction_bias=True,
                  normalised=True, shared=shared)  # fmt: skip
    parts: dict[str, dict[str, Any]] = {
        "M": {"mixers": (Mamba2(heads=64, head_dim=64, groups=8, state=128, conv=4, chunk=128),)},
        "*": {"mixers": (Attention(heads=32, kv_heads=2, head_dim=128, rotary=False),)},
        "E": {"feed_forward": experts},
    }
    return Block(**(one | parts[letter]))


LATENT = LatentAttention(
    heads=16, q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
LITE = MoE(experts=64, top_k=6, ffn=1408, shared=MLP(ffn=2816))
LETTERS = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
FLAT = {"sequence_parallel": False}
ON = {"overlap_gradients": True, "overlap_parameters": True}
OFF = {"overlap_gradients": False, "overlap_parameters": False}

# file, around it, devices and devices of a node, the model, the plan, the job, the stack
CASES: dict[str, tuple[ImportContext, dict[str, str], tuple[int, int], dict[str, Any], Plan, Training, Any]] = {
    "gpt3_175b.sh": (
        ImportContext(), {}, (1024, 8),
        {"hidden": 12288, "vocab": 50257, "layers": (old(12288, 96),) * 96, "tied": True, "norm": "layernorm",
         "positions": 2048, "max_context": 2048, "dropout": True},
        Plan(tp=8, pp=16, dp=8, recompute="full", **FLAT),
        Training(seq_len=2048, global_batch=1536, token_budget=146484375 * 2048, precision="fp16-grads16"),
        {"name": "megatron-scores", "attention": "scores", "vocab_multiple": 128, **OFF},
    ),
    "llama3_8b_fp8.sh": (
        ImportContext(), {}, (8, 8),
        {"hidden": 4096, "vocab": 128256, "layers": (Block(mixers=(LLAMA_8B,), feed_forward=GATED),) * 32,
         "max_context": 8192},
        Plan(dp=8, sharding="distributed-optimizer", **FLAT),
        Training(seq_len=8192, global_batch=128, token_budget=1953125000 * 8192, precision="fp8-grads16"),
        {"name": "megatron", "attention": "flash", **ON},
    ),
    "mixtral_8x7b.sh": (
        ImportContext(), {}, (8, 8),
        {"hidden": 4096, "vocab": 32000, "max_context": 32768,
         "layers": (Block(mixers=(LLAMA_8B,), feed_forward=MoE(experts=8, top_k=2, ffn=14336)),) * 32},
        Plan(pp=4, dp=2, ep=8, sharding="distributed-optimizer", **FLAT),
        Training(seq_len=4096, global_batch=256, token_budget=500000 * 256 * 4096, precision="bf16"),
        {"name": "megatron", "dispatch": "all-to-all", **ON},
    ),
    "bloom_176b.slurm": (
        ImportContext(), {}, (384, 8),
        {"hidden": 14336, "vocab": 250880, "layers": (old(14336, 112),) * 70, "tied": True, "norm": "layernorm",
         "embedding_norm": True, "max_context": 2048, "dropout": True},
        Plan(tp=4, pp=12, dp=8, micro_batch=2, sharding="zero1", recompute="full",
             stage_layers=(5, *(6,) * 10, 5), **FLAT),
        Training(seq_len=2048, global_batch=2048, token_budget=220_000_000 * 2048, precision="bf16"),
        {"name": "megatron-scores", "vocab_multiple": 1, **OFF},
    ),
    "llama2_deepspeed.sh": (
        ImportContext(), {}, (8, 8),
        {"hidden": 2048, "vocab": 32000, "max_context": 2048,
         "layers": (Block(mixers=(Attention(heads=16, kv_heads=4, head_dim=128),), feed_forward=MLP(ffn=5504)),) * 24},
        Plan(tp=2, pp=2, dp=2, micro_batch=4, sharding="zero1", **FLAT),
        Training(seq_len=2048, global_batch=32, token_budget=250000 * 32 * 2048, precision="bf16"),
        {"name": "megatron-scores", "attention": "scores", **OFF},
    ),
    "llama31_pai.sh": (
        ImportContext(more=("--vocab-size", "128256"), skipped=("extra-vocab-size",)),
        {str(i): word for i, word in enumerate(PAI, 1)}, (8, 8),
        {"hidden": 4096, "vocab": 128256, "layers": (Block(mixers=(LLAMA_8B,), feed_forward=GATED),) * 32,
         "max_context": 131072},
        Plan(tp=4, cp=2, dp=1, sharding="distributed-optimizer", recompute="selective"),
        Training(seq_len=4096, global_batch=8, token_budget=30517 * 8 * 4096, precision="bf16"),
        {"name": "megatron", "overlap_tensor": True, **ON},
    ),
    "deepseek_v2_lite.sh": (
        ImportContext(num_devices=8, more=("--vocab-size", "102400")), {}, (8, 0),
        {"hidden": 2048, "vocab": 102400, "max_context": 1024,
         "layers": (Block(mixers=(LATENT,), feed_forward=MLP(ffn=10944)),)
         + (Block(mixers=(LATENT,), feed_forward=LITE),) * 26},
        Plan(dp=8, **FLAT),
        Training(seq_len=1024, global_batch=8, precision="bf16"),
        {"name": "megatron", "vocab_multiple": 3200, **OFF},
    ),
    "nemotron3_nano.sh": (
        ImportContext(num_devices=8, more=("--vocab-size", "131072")), {}, (8, 0),
        {"hidden": 2688, "vocab": 131072, "max_context": 8192, "layers": tuple(map(nemotron, LETTERS)),
         "dropout": True},
        Plan(dp=8, **FLAT),
        Training(seq_len=8192, global_batch=8, precision="bf16"),
        {"name": "megatron", "attention": "flash", **OFF},
    ),
    "gpt_oss_20b.sh": (
        ImportContext(num_devices=8), {}, (8, 0),
        {"hidden": 2880, "vocab": 201088, "max_context": 40960, "layers": (oss(128), oss(0)) * 12},
        Plan(dp=8, **FLAT),
        Training(seq_len=4096, global_batch=8, precision="bf16"),
        {"name": "megatron", "activation": "eager", "vocab_multiple": 1, **OFF},
    ),
    "analysis_tool.sh": (
        ImportContext(), {}, (16, 8),
        {"hidden": 4096, "vocab": 50257, "layers": (old(4096, 32, 10880),) * 24, "tied": True, "norm": "layernorm",
         "positions": 2048, "max_context": 2048, "dropout": True},
        Plan(tp=2, pp=2, dp=4, micro_batch=4, sharding="distributed-optimizer", **FLAT),
        Training(seq_len=2048, global_batch=512, token_budget=500000 * 512 * 2048, precision="bf16"),
        {"name": "megatron", "attention": "flash", "vocab_multiple": 128, **OFF},
    ),
}  # fmt: skip


def read(name: str) -> Imported:
    """Return the case of one of the scripts."""
    around, variables = CASES[name][:2]
    return import_file(SCRIPTS / name, variables, around)


def test_every_script_has_a_case_and_names_its_source() -> None:
    """Ten scripts stand beside this file, each with the address of the public one whose facts it has."""
    assert {path.name for path in SCRIPTS.iterdir()} == CASES.keys()
    assert len(CASES) == 10
    assert all("https://github.com/" in path.read_text() for path in SCRIPTS.iterdir())


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_misread(name: str) -> None:
    """Every field of the model, the plan, the job and the launch is as the script has it."""
    case, (_, _, launch, model, plan, job, stack) = read(name), CASES[name]
    assert (case.num_devices, case.devices_per_node) == launch
    assert case.model is not None
    assert case.plan == plan
    assert case.job == job
    plain = {"tied": False, "norm": "rmsnorm", "positions": 0, "dropout": False, "embedding_norm": False, "mtp": ()}
    for one in fields(case.model):
        if one.name in model or one.name in plain:
            assert getattr(case.model, one.name) == (plain | model)[one.name], one.name
    assert {key: getattr(case.stack, key) for key in stack} == stack


@pytest.mark.parametrize("name", CASES)
def test_no_word_is_lost(name: str) -> None:
    """Every argument of a script is listed once: understood, ignored with its reason, without effect, or unknown."""
    case = read(name)
    told = [r.argument for r in (*case.understood, *case.ignored, *case.unknown)] + list(case.silent)
    text = (SCRIPTS / name).read_text()
    assert len(told) == len(set(told))
    assert all(argument in text or argument in CASES[name][0].more for argument in told)
    assert all(r.meaning for r in (*case.understood, *case.ignored, *case.unknown))


# A launch -> devices in all, devices of a node, and the file that accelerate's launcher names.
LAUNCHES: dict[str, tuple[int, int, str]] = {
    "torchrun --nproc_per_node 8": (8, 8, ""),
    "torchrun --nproc-per-node=4 --nnodes 2": (8, 4, ""),
    "torchrun --nproc_per_node 8 --nnodes 1:4": (32, 8, ""),
    "torchrun --nproc_per_node 8 --nnodes 2 --nproc_per_node 4": (8, 4, ""),
    "torchrun --nnodes 2": (0, 0, ""),
    # pytorch/torchtitan multinode_trainer.slurm: what another command prints has words of its own
    'A=$(srun --nodes=1 --ntasks=1 hostname)\nsrun torchrun --nnodes 4 --nproc_per_node 8 --rdzv_endpoint "$A:1"': (
        32,
        8,
        "",
    ),
    "srun bash -c 'torchrun --nproc_per_node 8 --nnodes 2 --rdzv_endpoint $(srun -N 1 hostname):29500'": (16, 8, ""),
    "torchrun --nproc_per_node 8 --nnodes 2 --master_addr `scontrol show -N hostnames | head -n 1`": (16, 8, ""),
    "torchrun --nproc_per_node gpu": (0, 0, ""),
    "python -m torch.distributed.run --nproc_per_node 8 --nnodes=$NNODES": (0, 8, ""),
    "NNODES=4\ntorchrun --nproc_per_node 8 --nnodes $NNODES": (32, 8, ""),
    "GPUS_PER_NODE=4\nNNODES=2\ntorchrun": (8, 4, ""),
    "GPUS_PER_NODE=4\ntorchrun": (4, 4, ""),
    "deepspeed --num_gpus 4": (4, 4, ""),
    "deepspeed --num_gpus 4 --num_nodes 2": (8, 4, ""),
    "deepspeed": (0, 0, ""),
    "srun --nodes 2 --ntasks-per-node 8 python": (16, 8, ""),
    "srun -N 4 --gpus-per-node=8 python": (32, 8, ""),
    "srun --ntasks 32 python": (32, 0, ""),
    "#SBATCH --nodes=4 --ntasks-per-node=8\nsrun python": (32, 8, ""),
    "#SBATCH --nodes=4\n#SBATCH --gpus-per-node=2\nsrun torchrun --nproc_per_node 2": (8, 2, ""),
    "SLURM_NTASKS_PER_NODE=8\nSLURM_NNODES=2\nsrun python": (16, 8, ""),
    "mpirun -np 16 python": (16, 0, ""),
    "mpirun -np 16 --npernode 8 python": (16, 8, ""),
    "mpiexec -n 4 python": (4, 0, ""),
    "accelerate launch --num_processes 8": (8, 0, ""),
    "accelerate launch --config_file x.yaml": (0, 0, "x.yaml"),
    "python": (0, 0, ""),
}


@pytest.mark.parametrize("start", LAUNCHES)
def test_a_launcher_says_how_many_devices_there_are(start: str) -> None:
    """Processes of a node times nodes, or all of them, by the options of each launcher and by what stands for them."""
    one = started(f"{start} train.py --lr 1", {"--lr"}.__contains__, "run.sh", {})
    launch = one.launch
    assert (launch.num_devices, launch.devices_per_node, launch.config_file) == LAUNCHES[start]
    assert (one.arguments, launch.program) == (("--lr", "1"), "train.py")
