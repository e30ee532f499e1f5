"""Your PyTorch transformer, running and training in JAX, with proof that it is the same model.

`from_pretrained` and `save_pretrained` are found here; everything else in the module that it belongs to.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flax_tf.saving import from_pretrained, save_pretrained

__all__ = ["from_pretrained", "save_pretrained"]


def __getattr__(name: str) -> object:
    # Lazily, so that torch_ref shares flax_tf.config without importing JAX.
    if name in __all__:
        from flax_tf import saving

        return getattr(saving, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
