"""Small Llama-like, GPT and mixture models in plain PyTorch, by configurations in the style of Hugging Face."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Config = dict[str, Any]


class RMSNorm(nn.Module):
    """Root-mean-square norm written out in fp32 (arXiv:1910.07467), as Llama's reference code does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        """Return the normalised and scaled input in its own data type."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * scaled.to(x.dtype)


def rotary_tables(S: int, H: int, like: Any, start: int = 0) -> tuple[Any, Any]:
    """Return cosines and sines of S positions for heads of H elements (arXiv:2104.09864)."""
    rates = 1.0 / 10000 ** (torch.arange(0, H, 2, device=like.device).float() / H)
    angles = torch.outer(torch.arange(start, start + S, device=like.device).float(), rates)
    both = torch.cat((angles, angles), -1)
    return both.cos().to(like.dtype), both.sin().to(like.dtype)


def rotated(x: Any, tables: tuple[Any, Any]) -> Any:
    """Return heads with their halves rotated by the tables."""
    first, second = x.chunk(2, -1)
    return x * tables[0] + torch.cat((-second, first), -1) * tables[1]


class Attention(nn.Module):
    """Causal attention with shared key-value heads; joint projection and biases for GPT."""

    def __init__(self, D: int, heads: int, kv_heads: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.H, self.joint = heads, kv_heads, D // heads, bias
        wide = kv_heads * self.H
        if bias:
            self.qkv = nn.Linear(D, D + 2 * wide)
        else:
            self.q, self.k, self.v = (nn.Linear(D, w, bias=False) for w in (D, wide, wide))
        self.out = nn.Linear(D, D, bias=bias)

    def forward(self, x: Any, tables: Any, cache: tuple[Any, Any, int] | None = None) -> Any:
        """Return the output; a cache holds keys, values and how many tokens it has."""
        B, S, D = x.shape
        q, k, v = self.qkv(x).split((D, D, D), -1) if self.joint else (self.q(x), self.k(x), self.v(x))
        q = q.view(B, S, self.heads, self.H).transpose(1, 2)
        k, v = (t.view(B, S, self.kv_heads, self.H).transpose(1, 2) for t in (k, v))
        if tables is not None:
            q, k = rotated(q, tables), rotated(k, tables)
        causal = S > 1
        if cache is not None:
            keys, values, past = cache
            keys[:, :, past : past + S], values[:, :, past : past + S] = k, v
            k, v = keys[:, :, : past + S], values[:, :, : past + S]
        shared = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)
        return self.out(y.transpose(1, 2).reshape(B, S, D))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(self, D: int, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(D, width, bias=False), nn.Linear(D, width, bias=False)
        self.down = nn.Linear(width, D, bias=False)

    def forward(self, x: Any) -> Any:
        """Return the output."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GeluMLP(nn.Module):
    """down(gelu(up(x))) with biases."""

    def __init__(self, D: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, width), nn.Linear(width, D)

    def forward(self, x: Any) -> Any:
        """Return the output."""
        return self.down(F.gelu(self.up(x)))


def run_experts(x: Any, chosen: Any, share: Any, up: Any, down: Any) -> Any:
    """Return the weighted sum of the chosen gated experts of each row: rows sorted by expert, a product an expert."""
    T, D = x.shape
    k = chosen.shape[-1]
    order = torch.argsort(chosen.reshape(-1), stable=True)
    counts = torch.bincount(chosen.reshape(-1), minlength=up.shape[0]).tolist()
    rows = x.index_select(0, order // k)
    made = []
    # Unbound, so that the gradients of all experts are joined once; an index would make whole ones for each.
    for part, first, last in zip(rows.split(counts), up.unbind(0), down.unbind(0), strict=True):
        if len(part):
            gate, value = F.linear(part, first).chunk(2, -1)
            made.append(F.linear(F.silu(gate) * value, last))
    scaled = torch.cat(made) * share.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros(T, D, dtype=scaled.dtype, device=x.device).index_add(0, order // k, scaled)


class Experts(nn.Module):
    """A router and gated experts of which each token takes k (arXiv:2101.03961, arXiv:2401.04088)."""

    def __init__(self, D: int, width: int, experts: int, k: int) -> None:
        super().__init__()
        self.router, self.k = nn.Linear(D, experts, bias=False), k
        self.up = nn.Parameter(torch.empty(experts, 2 * width, D).normal_(std=0.02))
        self.down = nn.Parameter(torch.empty(experts, D, width).normal_(std=0.02))

    def forward(self, x: Any) -> Any:
        """Return the output."""
        flat = x.reshape(-1, x.shape[-1])
        chances = F.softmax(self.router(flat).float(), -1)
        best, chosen = chances.topk(self.k, -1)
        share = (best / best.sum(-1, keepdim=True)).to(x.dtype)
        return run_experts(flat, chosen, share, self.up, self.down).view_as(x)


class Block(nn.Module):
    """Norm, attention, norm, feed-forward, each added to the stream."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        if c["model_type"] == "gpt2":
            D, heads = c["n_embd"], c["n_head"]
            self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
            self.attention: nn.Module = Attention(D, heads, heads, bias=True)
            self.mlp: nn.Module = GeluMLP(D, 4 * D)
            return
        D = c["hidden_size"]
        self.norm1, self.norm2 = RMSNorm(D), RMSNorm(D)
        self.attention = Attention(D, c["num_attention_heads"], c["num_key_value_heads"], bias=False)
        width = c["intermediate_size"]
        experts = c.get("num_local_experts")
        self.mlp = Experts(D, width, experts, c["num_experts_per_tok"]) if experts else GatedMLP(D, width)

    def forward(self, x: Any, tables: Any, cache: Any = None) -> Any:
        """Return the stream after the block."""
        x = x + self.attention(self.norm1(x), tables, cache)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A decoder by its configuration: embedding, blocks, norm, head."""

    def __init__(self, c: Config, recompute: bool = False) -> None:
        super().__init__()
        self.gpt, self.recompute = c["model_type"] == "gpt2", recompute
        D = c["n_embd"] if self.gpt else c["hidden_size"]
        layers = c["n_layer"] if self.gpt else c["num_hidden_layers"]
        self.width = D // (c["n_head"] if self.gpt else c["num_attention_heads"])
        self.kv_heads = c["n_head"] if self.gpt else c["num_key_value_heads"]
        self.embedding = nn.Embedding(c["vocab_size"], D)
        self.positions = nn.Embedding(c["n_positions"], D) if self.gpt else None
        self.blocks = nn.ModuleList(Block(c) for _ in range(layers))
        self.norm = nn.LayerNorm(D) if self.gpt else RMSNorm(D)
        self.head = nn.Linear(D, c["vocab_size"], bias=False)
        if c.get("tie_word_embeddings", self.gpt):
            self.head.weight = self.embedding.weight

    def forward(self, ids: Any, caches: Any = None, past: int = 0) -> Any:
        """Return logits: of all tokens, or with caches of the last one of each sequence."""
        S = ids.shape[1]
        x = self.embedding(ids)
        tables = None
        if self.positions is not None:
            x = x + self.positions(torch.arange(past, past + S, device=ids.device))
        else:
            tables = rotary_tables(S, self.width, x, past)
        for i, block in enumerate(self.blocks):
            if self.recompute:
                x = checkpoint(block, x, tables, use_reentrant=False)
            else:
                x = block(x, tables, None if caches is None else (*caches[i], past))
        if caches is not None:
            x = x[:, -1:]
        return self.head(self.norm(x))

    def new_caches(self, B: int, tokens: int) -> list[tuple[Any, Any]]:
        """Return empty keys and values of every block for so many tokens."""
        like = self.head.weight
        shape = (B, self.kv_heads, tokens, self.width)
        return [(torch.zeros(shape, dtype=like.dtype, device=like.device),
                 torch.zeros(shape, dtype=like.dtype, device=like.device)) for _ in self.blocks]  # fmt: skip


def loss_of(model: nn.Module, ids: Any, targets: Any) -> Any:
    """Return the mean cross entropy in fp32."""
    logits = model(ids)
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))
