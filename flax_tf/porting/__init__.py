"""Moving weights between PyTorch and Flax, both ways, bit for bit.

`rules` says how layers' tensors are named and laid out, and how to add a layer of your own.
"""

from flax_tf.porting.convert import StateDictError, flax_to_torch, torch_to_flax
from flax_tf.porting.files import read_weights, write_weights
from flax_tf.porting.optimizer import optax_to_torch, torch_to_optax

__all__ = [
    "StateDictError",
    "flax_to_torch",
    "optax_to_torch",
    "read_weights",
    "torch_to_flax",
    "torch_to_optax",
    "write_weights",
]
