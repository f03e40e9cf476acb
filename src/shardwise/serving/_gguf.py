"""Bits of the tensors of a GGUF file, which llama.cpp's quantize chooses one by one: the `[mixtures]` of a format.

Source: github.com/ggml-org/llama.cpp src/llama-quant.cpp of 2026, llama_tensor_get_type_impl, tensor_type_fallback and
tensor_allows_quantization. A tied table has the type of the head; norms, biases and routers stay in 32 bits; rows that
are no multiple of a type's block take a wider type. Rules that ask for a matrix of importance are those with one
where a file cannot be made without. Falcon, whose feed-forwards have rules of their own, is taken as the others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from shardwise.ledger.op import Weight
from shardwise.models import Block, Model, attending_heads, tensor_shares
from shardwise.ops.count import lines, whole_layout
from shardwise.records import replace
from shardwise.serving._formats import WIDE_ROLES, WeightFormat, format_tables, tensor_key


def mixed(form: WeightFormat, model: Model) -> WeightFormat:
    """Return a format with the bits of each tensor of a model where it is a mixture of GGUF, others as they are.

    >>> from shardwise.models import Model
    >>> from shardwise.serving import find_format
    >>> [round(mixed(find_format("q4_k_m"), Model.load(name)).bits, 2) for name in ("llama-3.1-8b", "qwen2.5-0.5b")]
    [4.89, 6.34]
    """
    return _mixed(form, model) if form.base in format_tables()["mixtures"] else form


@lru_cache(maxsize=256)
def _mixed(form: WeightFormat, model: Model) -> WeightFormat:
    """Return the mean bits of what each key of a model's tensors stands for, and of all of them."""
    sums: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for line in lines(model, whole_layout()):
        if line.part == "mtp":
            continue
        for op in line.ops:
            for weight in op.weights:
                for bits, elements in _bits(form.base, model, line.block, weight):
                    both = sums[tensor_key(weight)]
                    both[0] += bits * elements * line.copies
                    both[1] += elements * line.copies
    kinds = tuple((key, bits / elements) for key, (bits, elements) in sums.items() if elements)
    matrices = [both for key, both in sums.items() if key[0] != "vector"]
    mean = sum(bits for bits, _ in matrices) / sum(elements for _, elements in matrices)
    return replace(form, bits=mean, group=0, scale_bits=0.0, tensor_bits=kinds)


def _bits(name: str, model: Model, block: Block | None, weight: Weight[Any]) -> Iterator[tuple[float, float]]:
    """Yield the bits of parts of a weight, and the elements of each."""
    table = format_tables()
    types, mixture = table["tensor_types"], table["mixtures"][name]
    wide = 16.0 if re.fullmatch(table["wide_tensors"]["names"], weight.name) else 32.0
    positions = weight.kind == "embedding" and weight.role != "embedding" and weight.shape
    if weight.kind == "vector" or weight.role in WIDE_ROLES or positions or wide == 16.0:
        yield wide, float(weight.whole)
        return
    trained = table["trained_experts"]
    if weight.expert and model.family in trained["families"]:
        yield trained["bits"], float(weight.whole)
        return
    if weight.kind in ("embedding", "head"):
        word = mixture.get("head", mixture["type"])
        if weight.kind == "embedding" and not model.tied:
            word = mixture.get("table", mixture["type"])
        elif model.hidden % types[mixture["type"]]["block"]:
            word = "q8_0"
        yield _fitting(word, model.hidden), float(weight.whole)
        return
    *_, outer, inner = weight.shape
    for one in tensor_shares(block, weight.role, float(outer), int(inner)):
        number = _numbered(model, one.part)
        rules = [rule for rule in mixture.get(one.part, ()) if _applies(rule[0], model)]
        words = [_chosen(rules, layer, number) or mixture["type"] for layer in range(number)]
        for word in dict.fromkeys(words):
            yield _fitting(word, one.inner), float(weight.whole) * one.share * words.count(word) / number


def _fitting(word: str, inner: int) -> float:
    """Return the bits of a type, or of what stands in for it where rows are no multiple of its block."""
    types = format_tables()["tensor_types"]
    own = types[word]
    if inner % own["block"] == 0:
        return float(own["bits"])
    return _fitting(own["instead"], inner) if "instead" in own else 16.0


def _numbered(model: Model, part: str) -> int:
    """Return how many layers the tensors of a part are numbered through: of values those that attend."""
    return (len(attending_heads(model)) if part in ("q", "k", "v") else 0) or model.num_layers


def _applies(condition: str, model: Model) -> bool:
    """Return whether the words of a condition that are of the whole model hold."""
    heads = attending_heads(model)
    groups = heads[0].query_heads / heads[0].heads if heads else 1
    experts = model.most_experts
    holds = {
        "gqa4": groups >= 4,
        "experts4": experts >= 4,
        "experts8": experts == 8,
        # What the engine calls 70B: Llama's and Qwen2's of 80 layers with grouped heads.
        "70b": model.family in ("llama", "qwen2") and model.num_layers == 80 and groups > 1,
    }
    return all(holds.get(word, True) for word in condition.split())


def _chosen(rules: list[list[str]], layer: int, number: int) -> str:
    """Return the type of the first rule that holds in one of so many layers, empty where none does."""
    ahead, behind = number // 8, 7 * number // 8
    holds = {
        "more": layer < ahead or layer >= behind or (layer - ahead) % 3 == 2,
        "eighth": layer < ahead,
        "sixteenth": layer < number // 16,
        "middle": ahead <= layer < behind,
        "first2": layer < 2,
        "first4": layer < 4,
    }
    return next((word for condition, word in rules if all(holds.get(one, True) for one in condition.split())), "")
