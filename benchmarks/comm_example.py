"""Print the summary of docs/comm.md's worked example: the Megatron-LM analysis tool's own case, groups left out."""

from __future__ import annotations

import shardwise as sw
from shardwise.answers._comm import comm_page
from shardwise.models import MLP, Attention, Block


def example() -> sw.CommReport:
    """Return the report: 32 layers on 2 nodes of 8, tp 2, pp 2 (github.com/NVIDIA/Megatron-LM pull request 482)."""
    attention = Attention(heads=32, kv_heads=32, head_dim=128, qkv_bias=True, out_bias=True, rotary=False)
    block = Block(mixers=(attention,), feed_forward=MLP(ffn=10880, gated=True, bias=True), norm="layernorm")
    model = sw.Model(name="gpt", family="gpt", hidden=4096, vocab=50432, layers=(block,) * 32, tied=True,
                     norm="layernorm", positions=2048, dropout=True)  # fmt: skip
    plan = sw.Plan(tp=2, pp=2, dp=4, micro_batch=4, sharding="distributed-optimizer", sequence_parallel=False)
    cluster = sw.Cluster.parse("2x8xa100-sxm-80gb")
    job = sw.Training(seq_len=2048, global_batch=512)
    return sw.comm(model, cluster, plan, job, sw.TrainingOptions(stack="megatron-2023"))


if __name__ == "__main__":
    command = ["shardwise comm --from pretrain.sh", "--on 2x8xa100-sxm-80gb", "--stack megatron-2023"]
    print("```text")
    summary, _, _ = comm_page(example(), command, 100).plain().partition("\nTP  ")
    print(f"{summary.rstrip()}\n...")
    print("```")
