"""What a model is."""

from shardwise.models._architecture import (
    MLP,
    MOST_PREDICTIONS,
    STATE_TYPES,
    Activation,
    Architecture,
    Block,
    FeedForward,
    MoE,
    Projection,
)
from shardwise.models._config import MOST_LAYERS
from shardwise.models._fields import FIELDS, SIZE_FIELDS, ConfigField
from shardwise.models._importer import unwrap
from shardwise.models._kept import State, TokenCache
from shardwise.models._layer_names import EXPERT_NAMES, layer_name, layer_names
from shardwise.models._limits import attention_limits
from shardwise.models._mixers import (
    Attention,
    CompressedAttention,
    CoreSizes,
    Indexer,
    KeyHeads,
    LatentAttention,
    Mixer,
    NormKind,
)
from shardwise.models._model import (
    Model,
    all_models,
    catalogue,
    find_model,
    load_model,
    model_from_config,
    model_from_sizes,
    model_names,
    namesake,
    published_copy,
    quantised_copy,
)
from shardwise.models._recurrent import (
    GatedDelta,
    LightningAttention,
    Mamba1,
    Mamba2,
    Mlstm,
    RecurrentGate,
    Rwkv,
    ShortConv,
    StreamConvs,
)
from shardwise.models._tensors import TensorShare, attending_heads, tensor_shares
