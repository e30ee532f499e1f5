"""Which source tokens a model attends to for each target token: the weights, and a picture of them."""

import math
import os
from collections.abc import Container, Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

from flax_tf.decoding import Model
from flax_tf.errors import InputError
from flax_tf.files import check_file, replacing
from flax_tf.parity.events import OUTPUT, call_of, kind_of
from flax_tf.parity.flax_side import recorded_calls
from flax_tf.recurrent import AttnSeq2Seq, shift_right
from flax_tf.transformer import Transformer

_DPI = 150
_MOST_PIXELS = 40_000_000  # of a picture; a larger one gets fewer to the inch


def attention_weights(
    model: Model, src: Int[Array, "B S"] | np.ndarray, target: Int[Array, "B T"] | np.ndarray
) -> Float[Array, "L B N T S"]:
    """The weights of attention over the source while the model reads the target, as in evaluation mode.

    L layers of the decoder with N heads each, both 1 for the recurrent model. Row t has the weights with which target
    token t is predicted: they sum to 1, and are 0 where the model passes over padding.

    Args:
        src: source ids.
        target: target ids without the start id, perhaps with the end id.

    Raises InputError for a model without attention over a source, and for ids or lengths outside its tables.
    """
    if not isinstance(model, Transformer | AttnSeq2Seq):
        raise InputError(f"a {type(model).__name__} has no attention over a source")
    src, target = jnp.asarray(src), jnp.asarray(target)
    model = nnx.clone(model)
    model.eval()
    if isinstance(model, AttnSeq2Seq):
        return model(src, target)[2][None, :, None]
    tgt = shift_right(target, model.config.start_id)
    outputs = submodule_outputs(model, src, tgt)
    src_mask, _ = model.generate_mask(src, tgt)
    memory = outputs[f"encoder_layers.{model.config.num_layers - 1}"]  # (B, S, D)
    weights = []
    for number, layer in enumerate(model.decoder_layers):
        k, _ = layer.cross_attn.keys_values(memory, memory)  # (B, N, S, H)
        weights.append(layer.cross_attn.weights(outputs[f"decoder_layers.{number}.norm1"], k, src_mask))
    return jnp.stack(weights)


def submodule_outputs(model: nnx.Module, *inputs: Array) -> dict[str, Array]:
    """What every submodule returns, of its last call and its last array, by its PyTorch path."""
    outputs: dict[str, Array] = {}

    def keep(name: str, array: np.ndarray) -> None:
        if kind_of(name) == OUTPUT:
            outputs[call_of(name)[0].path] = jnp.asarray(array)

    with recorded_calls(model, keep):
        model(*inputs)
    return outputs


def draw_attention(
    weights: Float[np.ndarray, "L N T S"],
    source: Sequence[str],
    target: Sequence[str],
    path: str | os.PathLike,
    *,
    heads: bool = False,
) -> None:
    """Draws the weights of one sentence into a PNG file: source tokens along x, target tokens along y, dark for much.

    A panel for each layer, of the mean of its heads; with `heads`, a row for each layer and a panel for each head.

    Args:
        weights: those of `attention_weights`, of one row of the batch.
        source: the labels of the S source tokens (`token_labels`).
        target: the labels of the T target tokens.

    Raises InputError if `path` is a directory or can't be written.
    """
    from matplotlib.cm import ScalarMappable  # seconds to import
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    check_file(path)
    L, N, T, S = weights.shape
    panels = weights if heads else weights.mean(axis=1)[None]  # (rows, columns, T, S)
    rows, columns = panels.shape[:2]
    width, height = columns * (1.2 + 0.22 * max(S, 8)) + 1, rows * (1.2 + 0.22 * max(T, 6))  # inches
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    shades = ScalarMappable(Normalize(0, panels.max()), "Blues")
    for row, column in np.ndindex(rows, columns):
        axes = grid[row, column]
        axes.imshow(panels[row, column], norm=shades.norm, cmap=shades.cmap, aspect="auto")
        axes.set_xticks(range(S), source, rotation=90 if max(map(len, source)) > 2 else 0, parse_math=False)
        axes.set_yticks(range(T), target, parse_math=False)
        axes.tick_params(length=0, labelsize=9)
        axes.set(xlabel="source", ylabel="target")
        axes.label_outer()
        layer, head = (row, f", head {column + 1}") if heads else (column, ", mean of the heads" if N > 1 else "")
        if L * N > 1:
            axes.set_title(f"layer {layer + 1}{head}", fontsize=10)
    figure.colorbar(shades, ax=grid, label="weight of attention", fraction=0.05)
    dpi = min(_DPI, math.sqrt(_MOST_PIXELS / (width * height)))
    with replacing(path) as fresh:
        figure.savefig(fresh, format="png", dpi=dpi)


def token_labels(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """What to call tokens in a picture.

    Spaces are drawn as `␣`. Byte-level tokens are given as the text that their bytes are, and bytes that are but a part
    of a character as `\\xc3`. Characters that the font of the picture lacks are given as `U+65E5`.
    """
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = get_font(findfont(FontProperties())).get_charmap()
    byte_level = "ByteLevel" in str(tokenizer.decoder)
    labels = []
    for number in ids:
        token = tokenizer.id_to_token(number)
        text = str(number) if token is None else _bytes_as_text(token) if byte_level else token
        labels.append("".join(_drawn(character, known) for character in text))
    return labels


def _drawn(character: str, known: Container[int]) -> str:
    if character == " ":
        return "␣"
    if character.isprintable() and ord(character) in known:
        return character
    return f"U+{ord(character):04X}"


# GPT-2's byte-level alphabet: printable characters of Latin-1 stand for themselves, the others follow from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(byte for byte in range(0x100) if byte not in _PRINTABLE)
}


def _bytes_as_text(token: str) -> str:
    if not _BYTES.keys() >= set(token):  # a token that was added, and is text already
        return token
    return bytes(_BYTES[character] for character in token).decode("utf-8", "backslashreplace")
