"""Which architecture a state dict is, and its config, from nothing but keys and shapes."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from flax_tf.config import Config, check_fields, config_class
from flax_tf.errors import InputError

Shapes = Mapping[str, tuple[int, ...]]


def _count(shapes: Shapes, pattern: str) -> int:
    """How many different numbers stand where the pattern's group is."""
    return len({match[1] for key in shapes if (match := re.match(pattern, key))})


def _backbone_fields(shapes: Shapes, prefix: str) -> dict[str, Any]:
    vocab_size, d_model = shapes[f"{prefix}embeddings.token_embd.weight"]
    layers = rf"{re.escape(prefix)}transformer_layers\."
    fields = {
        "vocab_size": vocab_size,
        "d_model": d_model,
        "num_layers": _count(shapes, layers + r"(\d+)\."),
        "num_heads": _count(shapes, layers + r"0\.mha\.attention_heads\.(\d+)\."),
    }
    positions = shapes.get(f"{prefix}embeddings.pos_embd.weight", ())
    if len(positions) == 2:
        fields["max_seq_length"] = positions[0]
    return fields


def _block_fields(shapes: Shapes) -> dict[str, Any]:
    return {"d_model": shapes["kqv_projection.weight"][-1]}


# One parameter where they are tied, so any one of them may stand for all.
_TABLES = ("encoder_embedding.weight", "decoder_embedding.weight", "fc.weight")


def _transformer_fields(shapes: Shapes) -> dict[str, Any]:
    tables = [shapes[name] for name in _TABLES if name in shapes]
    fields = {
        "d_model": shapes["decoder_layers.0.cross_attn.W_q.weight"][0],
        "num_layers": _count(shapes, r"decoder_layers\.(\d+)\."),
    }
    if tables:
        fields |= {"src_vocab_size": tables[0][0], "tgt_vocab_size": tables[-1][0]}
        if len(tables) < len(_TABLES):
            fields["shared_embeddings"] = True
    if "positional_encoding.pe" in shapes:
        fields["max_seq_length"] = shapes["positional_encoding.pe"][-2]
    if "decoder_layers.0.feed_forward.fc1.weight" in shapes:
        fields["d_ff"] = shapes["decoder_layers.0.feed_forward.fc1.weight"][0]
    return fields


def _rnn_fields(shapes: Shapes) -> dict[str, Any]:
    fields = {"hidden_size": shapes["decoder.gru.weight_hh_l0"][-1]}
    for name, key in (("src_vocab_size", "encoder.embedding.weight"), ("tgt_vocab_size", "decoder.embedding.weight")):
        if key in shapes:
            fields[name] = shapes[key][0]
    return fields


# arch: (a key that only it has, the fields that shapes tell, the fields that the user must give)
_ARCHITECTURES: dict[str, tuple[str, Callable[[Shapes], dict[str, Any]], tuple[str, ...]]] = {
    "block": ("kqv_projection.weight", _block_fields, ("num_heads",)),
    "backbone": ("embeddings.token_embd.weight", lambda shapes: _backbone_fields(shapes, ""), ("mask",)),
    # The reference's language model is always causal, so its mask is not asked for.
    "language_model": (
        "transformer.embeddings.token_embd.weight",
        lambda shapes: _backbone_fields(shapes, "transformer."),
        (),
    ),
    "transformer": ("decoder_layers.0.cross_attn.W_q.weight", _transformer_fields, ("num_heads",)),
    # Before the plain one, whose signature it has too.
    "attn_rnn": ("decoder.attention.Wa.weight", _rnn_fields, ()),
    "rnn": ("decoder.gru.weight_hh_l0", _rnn_fields, ()),
}

_EXAMPLES = {"num_heads": "`num_heads: N`", "mask": "`mask: true` (causal) or `mask: false` (encoder)"}


class UnknownArchitectureError(InputError):
    """The keys of a state dict are those of no architecture that is known."""


def recognise_arch(shapes: Shapes) -> str:
    """The architecture's name. Raises UnknownArchitectureError if the keys are of none that is known."""
    for arch, (signature, _, _) in _ARCHITECTURES.items():
        if signature in shapes and len(shapes[signature]) == 2:
            return arch
    if "gru.weight_hh_l0" in shapes:
        raise UnknownArchitectureError(
            "this is one half of a recurrent model: save both halves in one file, as "
            "{'encoder': encoder.state_dict(), 'decoder': decoder.state_dict()}"
        )
    known = "; ".join(f"{arch} has {signature}" for arch, (signature, _, _) in _ARCHITECTURES.items())
    first = ", ".join(sorted(shapes)[:3]) or "none"
    raise UnknownArchitectureError(f"no known architecture has these keys (the first: {first}); {known}")


def told_fields(shapes: Shapes) -> dict[str, Any]:
    """The config fields that shapes tell, with the `arch`. Raises UnknownArchitectureError."""
    arch = recognise_arch(shapes)
    return {"arch": arch, **_ARCHITECTURES[arch][1](shapes)}


def recognise(shapes: Shapes, given: Mapping[str, Any]) -> Config:
    """The config of the model that a state dict belongs to.

    Args:
        shapes: {PyTorch key without wrapper prefixes: shape}.
        given: config fields from the user, for what shapes do not tell (the number of heads of a fused projection,
            whether a bare backbone is causal) or what they need not repeat. May name the `arch`.

    Raises InputError for unknown keys, fields that are needed and not given (by name), and given fields that the
    shapes contradict.
    """
    told = told_fields(shapes)
    arch = told.pop("arch")
    needed = _ARCHITECTURES[arch][2]
    fields = dict(given)
    if fields.pop("arch", arch) != arch:
        raise InputError(f"the config says arch {given['arch']!r}, but the keys are those of a {arch}")
    cls = config_class(arch)
    check_fields(cls, fields)
    absent = [name for name in needed if name not in fields]
    if absent:
        raise InputError(
            f"this is a {arch}, and its shapes do not tell {' and '.join(absent)}: write "
            f"{' and '.join(_EXAMPLES[name] for name in absent)} into a YAML file, and pass it to port or check as "
            "--config FILE"
        )
    for name, value in told.items():
        if fields.setdefault(name, value) != value:
            raise InputError(f"the config says {name} {fields[name]!r}, but the checkpoint has {value}")
    return cls(**fields)
