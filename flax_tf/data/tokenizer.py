"""Tokenizers, all of them `tokenizers.Tokenizer`, so that one tokenizer.json describes any of them."""

import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt32
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from flax_tf.data.hub import is_hub_name, one_line, quiet
from flax_tf.errors import InputError

CHARACTERS_AT_ONCE = 1 << 20  # bounds the memory of encodings, 100 bytes and more a token
PIECE = 1 << 15  # long texts are cut into pieces of about so many characters, for threads to share

CHARACTERS = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # "." would pass over newlines
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)

# Where a text may be cut so that its pieces have the ids of the whole.
ANYWHERE = re.compile("")
# To a ByteLevel pre-tokenizer, a non-space before a space always ends a word, and a word depends on nothing before it.
AT_NEWLINE = re.compile(r"(?<=[!-~])(?=\n)")


def char_tokenizer(texts: Iterable[str], special_tokens: Sequence[str] = ()) -> Tokenizer:
    """The special tokens, then one token for each distinct character (code point) of the texts, in their order.

    Decoding what was encoded returns the same text.
    """
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    vocabulary = [*special_tokens, *sorted(characters)]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}))
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.pre_tokenizer = CHARACTERS
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def bpe_tokenizer(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (), *, sentences: bool = False
) -> Tokenizer:
    """Byte-level byte-pair encoding, trained on the texts: the special tokens, the 256 bytes, and the pairs.

    `vocab_size` is an upper bound, at least the special tokens and the bytes. With `sentences`, a text's first word has
    the tokens that it has after a space. Decoding what was encoded returns the same text, whatever characters it has
    (with `sentences`: if it doesn't start with a space). The pairs are those of Sennrich et al., 2016,
    https://arxiv.org/abs/1508.07909; the bytes and the splitting into words are GPT-2's.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True) if sentences else BYTES
    decoder = decoders.ByteLevel()
    tokenizer.decoder = decoders.Sequence([decoder, decoders.Strip(" ", 1, 0)]) if sentences else decoder
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for piece, _ in _pieces(texts, AT_NEWLINE)), trainer)
    return tokenizer


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """A saved tokenizer: the path of a tokenizer.json, a directory that holds one, or a name on the hub.

    Directories and names that have only a tokenizer of another format go through `transformers`. Padding and truncation
    that were saved with the tokenizer are switched off. Raises InputError.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        file = path / "tokenizer.json"
        tokenizer = _read_tokenizer(file) if file.exists() else _convert(str(path))
    elif path.exists():
        tokenizer = _read_tokenizer(path)
    elif is_hub_name(name_or_path):
        tokenizer = _hub_tokenizer(name_or_path)
    else:
        raise InputError(f"tokenizer {name_or_path}: no such file or directory")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _read_tokenizer(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{file}: not a tokenizer.json: {one_line(error)}") from error


def _hub_tokenizer(name: str) -> Tokenizer:
    # Through huggingface_hub, not Tokenizer.from_pretrained, for the errors that it tells apart.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        with quiet("huggingface_hub"):
            file = hf_hub_download(name, "tokenizer.json")
    except RemoteEntryNotFoundError:  # the name exists, and has a tokenizer of another format
        return _convert(name)
    except Exception as error:  # the hub's libraries raise dozens of kinds
        raise InputError(
            f"tokenizer {name}: no such file or directory, and not to be had from the hub: {one_line(error)}"
        ) from error
    return _read_tokenizer(Path(file))


def _convert(name_or_path: str) -> Tokenizer:
    """The fast tokenizer that `transformers` makes of other formats, such as a vocab.txt."""
    try:
        transformers = importlib.import_module("transformers")  # the extra `hf`
    except ImportError as error:
        raise InputError(
            f"tokenizer {name_or_path}: there is no tokenizer.json; to read other formats: pip install 'flax-tf[hf]'"
        ) from error
    try:
        with quiet("transformers", "huggingface_hub"):
            return transformers.AutoTokenizer.from_pretrained(name_or_path).backend_tokenizer
    except Exception as error:  # among them an AttributeError: a tokenizer written in Python has no backend
        raise InputError(
            f"tokenizer {name_or_path}: there is no tokenizer.json, and transformers can't make one: {one_line(error)}"
        ) from error


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """The rows that an embedding of this tokenizer's ids needs: the greatest id plus one (ids may have gaps)."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def encode(tokenizer: Tokenizer, text: str) -> UInt32[np.ndarray, "T"]:
    """The ids of a text, without special tokens.

    Raises InputError if it has characters that a tokenizer of characters doesn't know; the message names them.
    """
    return next(encode_all(tokenizer, [text]))


def encode_all(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[UInt32[np.ndarray, "T"]]:
    """As `encode`, for each text; many at a time, on all cores."""
    cut = _safe_cut(tokenizer)
    parts: list[np.ndarray] = []
    for group in _groups(_pieces(texts, cut)):
        pieces = [piece for piece, _ in group]
        try:
            encodings = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            if str(tokenizer.pre_tokenizer) != str(CHARACTERS):
                raise InputError(f"the tokenizer can't encode this text: {one_line(error)}") from error
            unknown = set().union(*pieces) - tokenizer.get_vocab().keys()
            names = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in sorted(unknown)[:10])
            more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
            raise InputError(f"the tokenizer of characters doesn't know {names}{more}: leave them out") from error
        for encoding, (_, is_last) in zip(encodings, group, strict=True):
            parts.append(np.array(encoding.ids, np.uint32))
            if is_last:
                yield np.concatenate(parts)
                parts = []


def _safe_cut(tokenizer: Tokenizer) -> re.Pattern | None:
    """The cut for a tokenizer of one of the two kinds made here, new or saved; None for others."""
    if tokenizer.normalizer is not None or tokenizer.get_added_tokens_decoder():
        return None
    return {str(CHARACTERS): ANYWHERE, str(BYTES): AT_NEWLINE}.get(str(tokenizer.pre_tokenizer))


def _pieces(texts: Iterable[str], cut: re.Pattern | None) -> Iterator[tuple[str, bool]]:
    """The texts in pieces, and whether a piece is the last of its text."""
    for text in texts:
        start = 0
        while cut and start + PIECE < len(text) and (safe := cut.search(text, start + PIECE)):
            yield text[start : safe.start()], False
            start = safe.start()
        yield text[start:], True


def _groups(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    group, size = [], 0
    for piece in pieces:
        group.append(piece)
        size += len(piece[0]) + 1  # so that empty texts fill a group too
        if size >= CHARACTERS_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group
