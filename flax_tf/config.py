"""One frozen dataclass per system, shared by both frameworks (this module imports neither).

The defaults are the numbers of the documents that specify the systems. A config checks itself when it is made, and
goes to and from the `config.json` of a saved directory.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flax_tf.errors import InputError

# Of sampling: numbers much smaller would underflow in float32.
LEAST_TEMPERATURE = LEAST_TOP_P = 1e-6


def _check_sizes(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1, not {value!r}")


def _check_heads(d_model: int, num_heads: int) -> None:
    if d_model % num_heads:
        divisors = ", ".join(str(n) for n in range(1, d_model + 1) if d_model % n == 0)
        raise InputError(f"num_heads {num_heads} does not divide d_model {d_model}: choose num_heads from {divisors}")


def _check_rate(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise InputError(f"{name} must be at least 0 and below 1, not {value!r}")


def _check_flag(config: object, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(config, name), bool):
            raise InputError(f"{name} must be true or false, not {getattr(config, name)!r}")


def _known(name: str, size: int | None) -> int:
    if size is None:
        raise InputError(f"{name} is null: set it to the number of token ids before a model is built")
    return size


def _check_epsilon(value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise InputError(f"layer_norm_eps must be above 0 and below 1, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Seed 000: a causal pre-norm block with one fused key, query and value projection."""

    arch: ClassVar[str] = "block"

    d_model: int = 512
    """Width D of the residual stream."""
    num_heads: int = 8
    """Number of attention heads N; divides d_model."""
    layer_norm_eps: float = 1e-5
    """Epsilon of every LayerNorm (PyTorch's default)."""

    def __post_init__(self) -> None:
        _check_sizes(self, "d_model", "num_heads")
        _check_heads(self.d_model, self.num_heads)
        _check_epsilon(self.layer_norm_eps)

    @property
    def head_dim(self) -> int:
        """Width H of one head."""
        return self.d_model // self.num_heads


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Seed 001: embeddings and transformer layers, without the classifier."""

    arch: ClassVar[str] = "backbone"

    vocab_size: int | None = 30_522
    """Number of token ids V. null: the tokenizer's, filled in when training starts."""
    max_seq_length: int = 128
    """Number of learned positions, the longest sequence that the model takes (T)."""
    d_model: int = 64
    """Width D of the residual stream."""
    num_heads: int = 4
    """Number of attention heads N; divides d_model."""
    num_layers: int = 4
    """Number of transformer layers."""
    dropout: float = 0.0
    """Probability with which dropout zeroes a value in training."""
    layer_norm_eps: float = 1e-5
    """Epsilon of every LayerNorm (PyTorch's default)."""
    mask: bool = True
    """True: causal, a position attends to itself and to earlier ones. False: encoder mode, to all."""

    def __post_init__(self) -> None:
        if self.vocab_size is not None:
            _check_sizes(self, "vocab_size")
        _check_sizes(self, "max_seq_length", "d_model", "num_heads", "num_layers")
        _check_heads(self.d_model, self.num_heads)
        _check_rate("dropout", self.dropout)
        _check_epsilon(self.layer_norm_eps)
        _check_flag(self, "mask")

    @property
    def head_dim(self) -> int:
        """Width H of one head."""
        return self.d_model // self.num_heads

    def token_count(self) -> int:
        """`vocab_size` as the number that a model needs; raises InputError while it is null."""
        return _known("vocab_size", self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(BackboneConfig):
    """Seed 001: the backbone with a classifier over the vocabulary."""

    arch: ClassVar[str] = "language_model"


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig:
    """What the systems of seed 002 have in common: two vocabularies and their special ids."""

    arch: ClassVar[str]

    src_vocab_size: int | None = 5000
    """Number of source token ids. null: the tokenizer's, filled in when training starts."""
    tgt_vocab_size: int | None = 5000
    """Number of target token ids V. null: the tokenizer's, filled in when training starts."""
    pad_id: int = 0
    """Token id that fills rows up to one length, in both vocabularies."""
    start_id: int = 1
    """Target token id that decoding starts from."""
    end_id: int = 2
    """Target token id that ends a sequence."""

    def __post_init__(self) -> None:
        for name in ("src_vocab_size", "tgt_vocab_size"):
            if getattr(self, name) is not None:
                _check_sizes(self, name)
        for name in ("pad_id", "start_id", "end_id"):
            value, size = getattr(self, name), self.tgt_vocab_size
            if type(value) is not int or value < 0 or (size is not None and value >= size):
                raise InputError(f"{name} must be a token id from 0 to tgt_vocab_size - 1, not {value!r}")
        if self.src_vocab_size is not None and self.pad_id >= self.src_vocab_size:
            raise InputError(f"pad_id {self.pad_id} is outside the source vocabulary of {self.src_vocab_size}")
        if self.end_id in (self.start_id, self.pad_id):
            raise InputError(f"end_id {self.end_id} must differ from start_id and pad_id: it alone ends a sequence")

    def src_token_count(self) -> int:
        """`src_vocab_size` as the number that a model needs; raises InputError while it is null."""
        return _known("src_vocab_size", self.src_vocab_size)

    def tgt_token_count(self) -> int:
        """`tgt_vocab_size` as the number that a model needs; raises InputError while it is null."""
        return _known("tgt_vocab_size", self.tgt_vocab_size)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Seq2SeqConfig):
    """Seed 002: the encoder-decoder Transformer."""

    arch: ClassVar[str] = "transformer"

    d_model: int = 512
    """Width D of the residual stream."""
    num_heads: int = 8
    """Number of attention heads N; divides d_model."""
    num_layers: int = 6
    """Number of encoder layers, and of decoder layers."""
    d_ff: int = 2048
    """Width F of the feed-forward networks."""
    max_seq_length: int = 100
    """Number of positions in the sinusoidal table, the longest source or target that the model takes."""
    dropout: float = 0.1
    """Probability with which dropout zeroes a value in training."""
    layer_norm_eps: float = 1e-5
    """Epsilon of every LayerNorm (PyTorch's default)."""
    shared_embeddings: bool = False
    """One matrix for both embeddings and the output projection (Vaswani et al. 2017, section 3.4)."""
    scale_embeddings: bool = False
    """Multiplies embeddings by the square root of d_model (same section); the seed does not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_sizes(self, "d_model", "num_heads", "num_layers", "d_ff", "max_seq_length")
        _check_heads(self.d_model, self.num_heads)
        _check_rate("dropout", self.dropout)
        _check_epsilon(self.layer_norm_eps)
        _check_flag(self, "shared_embeddings", "scale_embeddings")
        if self.shared_embeddings and self.src_vocab_size != self.tgt_vocab_size:
            raise InputError(
                f"shared_embeddings needs one vocabulary, but src_vocab_size is {self.src_vocab_size} "
                f"and tgt_vocab_size {self.tgt_vocab_size}"
            )

    @property
    def head_dim(self) -> int:
        """Width H of one head."""
        return self.d_model // self.num_heads


@dataclass(frozen=True, kw_only=True)
class RNNConfig(Seq2SeqConfig):
    """Seed 002: the recurrent encoder and decoder, which share one vector."""

    arch: ClassVar[str] = "rnn"

    hidden_size: int = 128
    """Width H of embeddings and hidden states."""
    dropout: float = 0.1
    """Probability with which dropout zeroes an embedded value in training."""
    max_length: int = 10
    """Number of tokens that the decoder makes when it runs free of a target."""
    mask_source: bool = False
    """Padding in the source is passed over: the encoder's last state is that after the last token, and attention sees
    tokens alone. False: padding is read as any token, as in the seed, and the result depends on how much there is."""
    start_id: int = 0
    """Target token id that decoding starts from."""
    end_id: int = 1
    """Target token id that ends a sequence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_sizes(self, "hidden_size", "max_length")
        _check_rate("dropout", self.dropout)
        _check_flag(self, "mask_source")


@dataclass(frozen=True, kw_only=True)
class AttnRNNConfig(RNNConfig):
    """Seed 002: the recurrent encoder, and a decoder with Bahdanau attention over its outputs."""

    arch: ClassVar[str] = "attn_rnn"


Config = BlockConfig | BackboneConfig | LanguageModelConfig | TransformerConfig | RNNConfig | AttnRNNConfig

CONFIGS: dict[str, type[Config]] = {
    cls.arch: cls
    for cls in (BlockConfig, BackboneConfig, LanguageModelConfig, TransformerConfig, RNNConfig, AttnRNNConfig)
}


def config_class(arch: object) -> type[Config]:
    """The config class of an architecture's name; raises InputError for a name that is not known."""
    if not isinstance(arch, str) or arch not in CONFIGS:
        raise InputError(f"unknown architecture {arch!r}: known are {', '.join(sorted(CONFIGS))}")
    return CONFIGS[arch]


def check_fields(cls: type[Config], fields: Mapping[str, Any]) -> None:
    """Raises InputError if `fields` names something that the config class does not have."""
    known = [field.name for field in dataclasses.fields(cls)]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise InputError(f"unknown field {name!r} in the config of a {cls.arch}: {hint}")


def config_from_dict(fields: Mapping[str, Any]) -> Config:
    """The config that `config_to_dict` wrote. Raises InputError for an unknown `arch`, field or an impossible value."""
    rest = dict(fields)
    cls = config_class(rest.pop("arch", None))
    check_fields(cls, rest)
    return cls(**rest)


def config_to_dict(config: Config) -> dict[str, Any]:
    """The fields and the architecture's name under `arch`, ready for JSON."""
    return {"arch": config.arch, **dataclasses.asdict(config)}
