"""Encoders of images: the vision transformer, DeiT, BEiT, DINOv2 and DINOv3, patches in and features or classes out.

Source: the model classes of transformers 5.23.0; arXiv:2010.11929, arXiv:2012.12877, arXiv:2106.08254,
arXiv:2304.07193, arXiv:2508.10104. All are pre-norm with LayerNorm, and attend both ways.
"""

from __future__ import annotations

from shardwise.models._architecture import MLP, Architecture, Block, Projection
from shardwise.models._config import Config
from shardwise.models._mixers import Attention
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.records import replace

_CLASSIFIER = "ForImageClassification"


def _attention(
    config: Config, biases: tuple[bool, bool, bool], *, out: bool = True, rotary: bool = False
) -> tuple[Attention, int]:
    """Attention both ways, and biases of queries, keys or values beside it where it does not have all three."""
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    config.expect(hidden % heads == 0, "hidden_size", f"must be a multiple of the {heads} heads", "use a multiple")
    core = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=max(hidden // heads, 1),
        qkv_bias=all(biases),
        out_bias=out,
        causal=False,
        rotary=rotary,
    )
    return core, 0 if all(biases) else sum(biases) * hidden


def _block(config: Config, core: Attention, ffn: MLP | None = None, vectors: int = 0) -> Block:
    """A layer, of one feed-forward with a GELU unless said; `vectors` are further learned values."""
    if ffn is None:
        width = config.size("ffn", "hidden_dim")
        ffn = MLP(ffn=width, gated=False, bias=True, activation=parts.activation(config, "gelu"))
    return Block(mixers=(core,), feed_forward=ffn, norm="layernorm", extra_vectors=vectors)


def _layers(config: Config, block: Block) -> Architecture:
    """The layers alone."""
    return Architecture(
        name=config.model_type,
        family=config.model_type,
        hidden=config.size("hidden_size"),
        vocab=1,
        layers=(block,) * config.layers(),
        norm="layernorm",
        final_norm=False,
        head=False,
        embedding=False,
        max_context=config.count("max_context"),
        dropout=parts.drops(config),
    )


def _grid(config: Config) -> int:
    """Patches along one side of an image."""
    side, image = config.size("patch_size", default=16), config.size("image_size", default=224)
    config.expect(image % side == 0, "image_size", f"must be a multiple of the patch size {side}", "use a multiple")
    return max(image // side, 1)


def _with_patches(config: Config, layers: Architecture, besides: int, learned: int) -> Architecture:
    """Add the map of patches, `besides` tokens beside them, `learned` vectors of the stream, and the last norm."""
    side = config.size("patch_size", default=16)
    inputs = config.size("num_channels", default=3) * side**2
    patches = Projection(name="patches", inputs=inputs, outputs=layers.hidden, bias=True, besides=besides,
                         linear=False)  # fmt: skip
    tokens, vectors = _grid(config) ** 2 + besides, learned * layers.hidden
    return replace(layers, final_norm=True, extras=(patches,), extra_vectors=vectors, max_context=tokens)


def _with_task(config: Config, model: Architecture, default: str, pooler: int = 0, inputs: int = 0) -> Architecture:
    """Add the head of the class that the file names: a pooler so wide (0: none), or classifiers of one token."""
    name = " ".join(config.words("architectures"))
    if not name:
        name = default
        config.note(f"the file names no class (architectures): counted as one that ends in {default}")
    first = Projection(name="pooler", inputs=inputs or model.hidden, outputs=pooler, bias=True, of_sequence=True)
    if name.endswith("Model"):
        return replace(model, extras=(*model.extras, first)) if pooler else model
    heads = {"ForImageClassification": ("classifier",), "WithTeacher": ("classifier", "distillation_classifier")}
    heads_of_task = next((heads[end] for end in heads if name.endswith(end)), ())
    rule, remedy = "has a head that is not understood", "name the class that ends in Model or ForImageClassification"
    config.expect(heads_of_task != (), "architectures", rule, remedy)
    classes = parts.labels(config)
    return replace(model, extras=(*model.extras, *(replace(first, name=one, outputs=classes) for one in heads_of_task)))


def vit(config: Config) -> Architecture:
    """Return a vision transformer (arXiv:2010.11929 equations 1 to 4); without an image size its layers alone."""
    core, _ = _attention(config, (config.flag("qkv_bias", default=True),) * 3)
    model = _layers(config, _block(config, core))
    if "image_size" not in config.raw:
        config.note("a vision transformer is its layers alone: no patch embedding, no positions, no head")
        return model
    return _with_task(config, _with_patches(config, model, 1, _grid(config) ** 2 + 2), _CLASSIFIER, pooler=model.hidden)


def deit(config: Config) -> Architecture:
    """Return DeiT: a distillation token beside the class token, and a classifier of each (arXiv:2012.12877)."""
    core, _ = _attention(config, (config.flag("qkv_bias", default=True),) * 3)
    model = _with_patches(config, _layers(config, _block(config, core)), 2, _grid(config) ** 2 + 4)
    return _with_task(config, model, _CLASSIFIER, pooler=config.size("pooler_output_size", default=model.hidden))


def beit(config: Config) -> Architecture:
    """Return BEiT: keys without biases, LayerScale, relative positions in a table a layer or one for all."""
    core, biases = _attention(config, (True, False, True))
    scaled = config.probability("layer_scale_init_value") > 0
    side = _grid(config)
    table = ((2 * side - 1) ** 2 + 3) * core.heads
    own, shared = (config.flag(f"use_{kind}relative_position_bias") for kind in ("", "shared_"))
    if own or shared:
        config.note("relative positions are counted as parameters, their addition to scores is not")
    block = replace(_block(config, core, vectors=biases + (table if own else 0)), branch_scale=scaled)
    positions = side**2 + 1 if config.flag("use_absolute_position_embeddings") else 0
    pooled = config.flag("use_mean_pooling", default=True)
    learned = 1 + config.flag("use_mask_token") + positions + (2 if pooled else 0)
    model = _with_patches(config, _layers(config, block), 1, learned)
    model = replace(model, final_norm=not pooled, extra_vectors=model.extra_vectors + (table if shared else 0))
    config.accept("vocab_size")
    return _with_task(config, model, _CLASSIFIER)


def dinov2(config: Config) -> Architecture:
    """Return DINOv2, with or without registers: LayerScale, feed-forwards by a ratio, a class of token and mean."""
    hidden = config.size("hidden_size")
    core, _ = _attention(config, (config.flag("qkv_bias", default=True),) * 3)
    wide = int(config.scaled("mlp_ratio", hidden, default=4))
    config.accept("ffn")
    ffn = MLP(ffn=wide, gated=False, bias=True, activation=parts.activation(config, "gelu"))
    if config.flag("use_swiglu_ffn"):
        ffn = MLP(ffn=(2 * wide // 3 + 7) // 8 * 8, bias=True)
    registers = config.count("num_register_tokens") if config.model_type == "dinov2_with_registers" else 0
    masks = config.flag("use_mask_token", default=True)
    patches = _grid(config) ** 2
    block = replace(_block(config, core, ffn), branch_scale=True)
    model = _with_patches(config, _layers(config, block), 1 + registers, patches + 2 + masks + registers)
    return _with_task(config, model, "Model", inputs=2 * hidden)


def dinov3(config: Config) -> Architecture:
    """Return DINOv3: rotary positions, registers, LayerScale, biases by key and value, no table of positions."""
    gated = config.flag("use_gated_mlp")
    each = tuple(config.flag(f"{name}_bias", default=name != "key") for name in ("query", "key", "value"))
    core, biases = _attention(
        config, (each[0], each[1], each[2]), out=config.flag("proj_bias", default=True), rotary=True
    )
    act = parts.activation(config, "gelu")
    ffn = MLP(ffn=config.size("ffn"), gated=gated, bias=config.flag("mlp_bias", default=True), activation=act)
    registers = config.count("num_register_tokens", default=0)
    block = replace(_block(config, core, ffn, vectors=biases), branch_scale=True)
    return _with_task(config, _with_patches(config, _layers(config, block), 1 + registers, 2 + registers), "Model")


ROWS: dict[str, FamilyRow] = {
    "vit": FamilyRow(vit),
    "deit": FamilyRow(deit),
    "beit": FamilyRow(beit),
    "dinov2": FamilyRow(dinov2),
    "dinov2_with_registers": FamilyRow(dinov2),
    "dinov3_vit": FamilyRow(dinov3),
}
