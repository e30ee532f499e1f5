"""The peak memory of `parity.compare` on a language model of 255 million parameters (0.95 GiB in float32)."""

import resource

import numpy as np
import torch

import torch_ref.saving
from flax_tf.config import LanguageModelConfig
from flax_tf.parity import compare
from flax_tf.porting import torch_to_flax
from flax_tf.saving import abstract

CONFIG = LanguageModelConfig(vocab_size=32_000, max_seq_length=256, d_model=1024, num_heads=4, num_layers=15)
GIB = 2**30


def peak() -> float:
    """Resident memory of this process at its highest so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def main() -> None:
    torch.manual_seed(0)
    reference = torch_ref.saving.build(CONFIG).eval()
    model = torch_to_flax(reference.state_dict(), abstract(CONFIG))
    size = sum(parameter.nbytes for parameter in reference.parameters()) / GIB
    print(f"the model: {size:.2f} GiB; both of them, with the libraries: {peak():.1f} GiB")
    ids = np.random.default_rng(0).integers(CONFIG.token_count(), size=(2, 128))
    print(compare(reference, model, ids).summary())
    print(f"peak memory: {peak():.1f} GiB")


if __name__ == "__main__":
    main()
