"""Models as a user of the library would bring them: plain `torch.nn` on one side, plain `flax.nnx` on the other."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn

from flax_tf.layers import BatchNorm


class TorchImageNet(nn.Module):
    """Convolutions with batch norm, attention over the places of the picture, and a class."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 10, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(10), nn.ReLU())
        self.depthwise = nn.Conv2d(10, 10, (3, 5), padding=(1, 2), groups=5)
        self.norm = nn.GroupNorm(2, 10)
        self.attn = nn.MultiheadAttention(10, 2, dropout=0.1, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.query = nn.Parameter(torch.randn(1, 1, 10))
        self.up = nn.ConvTranspose1d(10, 7, 4, stride=2)
        self.head = nn.Linear(7, 5)

    def forward(self, images, mask=None):
        x = self.norm(self.depthwise(self.stem(images)))
        x = F.gelu(x).flatten(2).transpose(1, 2)
        pooled, _ = self.attn(self.query.expand(len(x), -1, -1), x, x, key_padding_mask=mask)
        x = self.up((x + self.drop(pooled)).transpose(1, 2))
        return self.head(x.mean(-1))


class ImageNet(nnx.Module):
    """Its twin, which takes the pictures channels first too. NNX's names and layouts; `RENAME` says which are which."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 10, (3, 3), strides=2, padding=1, use_bias=False, rngs=rngs)
        self.norm = BatchNorm(10, rngs=rngs)  # NNX's own keeps other running statistics
        self.depthwise = nnx.Conv(10, 10, (3, 5), padding=((1, 1), (2, 2)), feature_group_count=5, rngs=rngs)
        self.group = nnx.GroupNorm(10, 2, epsilon=1e-5, rngs=rngs, use_fast_variance=False)
        self.attn = nnx.MultiHeadAttention(2, 10, decode=False, dropout_rate=0.1, broadcast_dropout=False, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.query = nnx.Param(rngs.normal((1, 1, 10)))
        self.up = nnx.ConvTranspose(10, 7, 4, strides=2, padding="VALID", rngs=rngs)
        self.head = nnx.Linear(7, 5, rngs=rngs)

    def __call__(self, images, mask=None):
        x = jnp.moveaxis(images, 1, -1)
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.gelu(self.group(self.depthwise(x)), approximate=False)
        x = x.reshape(x.shape[0], -1, 10)
        query = jnp.broadcast_to(self.query[...], (len(x), 1, 10))
        pooled = self.attn(query, x, x, mask=None if mask is None else ~mask[:, None, None, :])
        return self.head(self.up(x + self.drop(pooled)).mean(1))


RENAME = {"stem.0": "conv", "stem.1": "norm", "norm": "group"}
IMAGES = np.random.default_rng(0).standard_normal((2, 3, 9, 7)).astype(np.float32)
HIDDEN = np.arange(20)[None, :] >= np.array([[13], [20]])


class TorchRotary(nn.Module):
    """Causal attention with rotary positions that turn the two halves of a head, and RMS norms."""

    def __init__(self, width: int = 12, heads: int = 3):
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def rotate(self, x):
        half = x.size(-1) // 2
        angles = torch.arange(x.size(-2)).to(x)[:, None] / 10000 ** (torch.arange(half).to(x) / half)
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
        )

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Rotary(nnx.Module):
    """Its twin."""

    def __init__(self, width: int = 12, heads: int = 3, *, rngs: nnx.Rngs):
        self.heads = heads
        self.norm = nnx.RMSNorm(width, epsilon=float(np.finfo(np.float32).eps), rngs=rngs, use_fast_variance=False)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)

    def rotate(self, x):
        half = x.shape[-1] // 2
        angles = jnp.arange(x.shape[-2])[:, None] / 10000 ** (jnp.arange(half) / half)
        sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def __call__(self, x):
        B, T, D = x.shape
        qkv = self.qkv(self.norm(x)).reshape(B, T, 3, self.heads, -1)
        q, k, v = (jnp.swapaxes(qkv[:, :, i], 1, 2) for i in range(3))
        scores = self.rotate(q) @ jnp.swapaxes(self.rotate(k), -1, -2) / (D // self.heads) ** 0.5
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf), axis=-1)
        return x + self.out(jnp.swapaxes(weights @ v, 1, 2).reshape(B, T, D))
