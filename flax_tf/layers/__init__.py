"""PyTorch's leaf layers in NNX: same defaults, same initial distributions, same arithmetic. The twin is `torch.nn`."""

from flax_tf.layers.attention import MultiHeadAttention, attend
from flax_tf.layers.basic import GELU, Buffer, Embedding, Linear, ReLU, TiedLinear, check_ids
from flax_tf.layers.convolution import Conv, ConvTranspose
from flax_tf.layers.dropout import Dropout
from flax_tf.layers.normalization import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from flax_tf.layers.recurrent import GRU, LSTM

__all__ = [
    "GELU",
    "GRU",
    "LSTM",
    "BatchNorm",
    "Buffer",
    "Conv",
    "ConvTranspose",
    "Dropout",
    "Embedding",
    "GroupNorm",
    "LayerNorm",
    "Linear",
    "MultiHeadAttention",
    "RMSNorm",
    "ReLU",
    "TiedLinear",
    "attend",
    "check_ids",
]
