"""`torch.nn`'s convolutions, channels last."""

import math
from collections.abc import Sequence

from flax import nnx

from flax_tf.layers.basic import uniform


class Conv(nnx.Conv):
    """`torch.nn.Conv1d`, `2d` and `3d`, by the number of kernel sizes, channels last.

    Weight and bias start from U(±1/√fan_in). Padding, the same on both sides of an axis, is 0 (NNX: "SAME").
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        init = uniform(1 / math.sqrt(in_channels // groups * math.prod(kernel_size)))
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding=padding, kernel_dilation=dilation,
            feature_group_count=groups, use_bias=bias, kernel_init=init, bias_init=init, rngs=rngs,
        )  # fmt: skip


class ConvTranspose(nnx.ConvTranspose):
    """`torch.nn.ConvTranspose1d`, `2d` and `3d`, by the number of kernel sizes, channels last, without groups.

    `padding` and `output_padding` mean what they do in PyTorch. Weight and bias start from U(±1/√fan), where the fan is
    that of PyTorch: out_channels times the kernel's size.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sequence[int],
        *,
        stride: int = 1,
        padding: int = 0,
        output_padding: int = 0,
        dilation: int = 1,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        init = uniform(1 / math.sqrt(out_channels * math.prod(kernel_size)))
        # Of the convolution over the input with zeros between its values, which is what JAX takes.
        edges = [dilation * (size - 1) - padding for size in kernel_size]
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding=[(edge, edge + output_padding) for edge in edges],
            kernel_dilation=dilation, use_bias=bias, transpose_kernel=True, kernel_init=init, bias_init=init, rngs=rngs,
        )  # fmt: skip
