"""What a model is."""

from shardwise.models._fields import FIELDS, SIZE_FIELDS, ConfigField
from shardwise.models._importer import model_from_config
from shardwise.models._load import load_model, model_names
from shardwise.models._mixers import (
    Attention,
    CompressedAttention,
    CoreSizes,
    Indexer,
    LatentAttention,
    Mixer,
    NormKind,
    State,
    TokenCache,
)
from shardwise.models._model import MLP, Block, FeedForward, Model, MoE, Projection
from shardwise.models._recurrent import (
    GatedDelta,
    LightningAttention,
    Mamba1,
    Mamba2,
    Mlstm,
    RecurrentGate,
    Rwkv,
    ShortConv,
)
from shardwise.models._sizes import model_from_sizes

__all__ = [
    "FIELDS",
    "MLP",
    "SIZE_FIELDS",
    "Attention",
    "Block",
    "CompressedAttention",
    "ConfigField",
    "CoreSizes",
    "FeedForward",
    "GatedDelta",
    "Indexer",
    "LatentAttention",
    "LightningAttention",
    "Mamba1",
    "Mamba2",
    "Mixer",
    "Mlstm",
    "MoE",
    "Model",
    "NormKind",
    "Projection",
    "RecurrentGate",
    "Rwkv",
    "ShortConv",
    "State",
    "TokenCache",
    "load_model",
    "model_from_config",
    "model_from_sizes",
    "model_names",
]
