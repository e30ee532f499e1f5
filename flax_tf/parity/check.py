"""Checking a checkpoint of one of our architectures: the reference and its twin, side by side on random inputs."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from flax_tf.config import BlockConfig, Config, RNNConfig, Seq2SeqConfig
from flax_tf.errors import InputError
from flax_tf.parity.compare import compare
from flax_tf.parity.report import Report
from flax_tf.porting import torch_to_flax
from flax_tf.porting.files import numpy_to_torch
from flax_tf.saving import abstract

# Prime, and so unlike any width that a swapped axis could be mistaken for it.
BLOCK_LENGTH = 131
# Fewer numbers than this, such as attention's scores of one key each, and a float32 error would be luck.
SINGLE_ROWS = 31


def check(
    torch_tensors: Mapping[str, np.ndarray],
    flax_tensors: Mapping[str, np.ndarray],
    config: Config,
    seed: int = 0,
    precisions: Sequence[str] = ("float32",),
) -> Report:
    """Loads the first tensors into `torch_ref`, ports the second to Flax, and compares the models.

    Both dicts are in PyTorch's names without wrapper prefixes, and usually one and the same. Two runs are merged:
    sequences of the full trained length (with one row of nothing but id 0), and sequences of a single token. The
    tensors themselves are compared too: they must be equal, and hold no NaN or infinity. `precisions` are as of
    `compare`.
    float64 tensors need `jax_enable_x64`. Raises InputError if torch is not installed or the tensors do not fit.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise InputError("a check runs both frameworks and needs PyTorch: pip install 'flax-tf[torch]'") from None
    from torch_ref.saving import build, load

    flax_module = torch_to_flax(flax_tensors, abstract(config))
    with torch.device("meta"):
        torch_module = build(config)
    torch_to_flax(torch_tensors, abstract(config))  # the reference's tensors fit as well, or one error lists all
    parameters = dict(torch_module.named_parameters(remove_duplicate=False))
    for name, array in torch_tensors.items():  # of a tied parameter there may be one name or more
        if name in parameters and not jnp.issubdtype(array.dtype, jnp.floating):
            raise InputError(f"{name} is {array.dtype}: a model computes with floating-point parameters")
    load(torch_module, {name: numpy_to_torch(array) for name, array in torch_tensors.items()})
    long, single = (
        compare(torch_module, flax_module, *inputs, precisions=precisions) for inputs in _random_inputs(config, seed)
    )
    return long.merged(single)


def _random_inputs(config: Config, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """A batch of long sequences, one of which is all padding, and a batch of single positions."""
    rng = np.random.default_rng(seed)
    if isinstance(config, BlockConfig):
        length, pad_id = BLOCK_LENGTH, None
    elif isinstance(config, Seq2SeqConfig):
        length, pad_id = config.max_length if isinstance(config, RNNConfig) else config.max_seq_length, config.pad_id
    else:
        length, pad_id = config.max_seq_length, 0
    long = _arrays(config, rng, 3, length)
    if pad_id is not None:
        for ids in long:
            ids[1] = pad_id
    return long, _arrays(config, rng, SINGLE_ROWS, 1)


def _arrays(config: Config, rng: np.random.Generator, rows: int, length: int) -> list[np.ndarray]:
    """What the model takes: ids [rows, length], of source and target for sequence to sequence; a block, a stream."""
    if isinstance(config, BlockConfig):
        return [rng.standard_normal((rows, length, config.d_model))]
    if isinstance(config, Seq2SeqConfig):
        vocabularies = config.src_token_count(), config.tgt_token_count()
    else:
        vocabularies = (config.token_count(),)
    return [rng.integers(size, size=(rows, length)) for size in vocabularies]
