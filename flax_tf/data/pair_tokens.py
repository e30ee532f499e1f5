"""Translation pairs as ids: tokenizers for two sides, special tokens, and the pairs that can be used."""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int
from rich.status import Status
from tokenizers import Tokenizer, normalizers

from flax_tf.data.cache import TokenizedText, cached
from flax_tf.data.pairs import Pair, PairDataConfig, PairTexts, Split, load_pairs
from flax_tf.data.progress import waiting
from flax_tf.data.tokenizer import bpe_tokenizer, char_tokenizer, load_tokenizer, vocabulary_size
from flax_tf.errors import InputError
from flax_tf.files import cache_directory

log = logging.getLogger(__name__)

Side = Literal["source", "target"]


class SpecialIds(NamedTuple):
    """The ids of a model's special tokens; a model may have one id for two of the purposes, but not for its end."""

    pad: int = 0
    start: int = 1
    end: int = 2

    def names(self) -> list[str]:
        """The tokens with these ids, for a vocabulary that is made here. Raises InputError if the ids leave gaps."""
        names: dict[int, str] = {}
        for number, name in ((self.pad, "<pad>"), (self.start, "<s>"), (self.end, "</s>")):
            names.setdefault(number, name)
        if sorted(names) != list(range(len(names))):
            raise InputError(
                f"model.pad_id, start_id and end_id are {self.pad}, {self.start} and {self.end}: a vocabulary that is "
                "made here begins with its special tokens, so number them from 0 without gaps"
            )
        return [names[number] for number in sorted(names)]


@dataclass(frozen=True)
class Pairs:
    """The tokenised pairs of a split, as many as are used."""

    texts: PairTexts
    source: TokenizedText
    """The sources of all lines, those left out included."""
    target: TokenizedText
    """The targets of all lines, without start and end tokens."""

    lines: Int[np.ndarray, "pairs"]
    """The line of each pair that is used, counted from 0."""
    empty: int
    """How many lines are left out because a side has no tokens."""
    too_long: int
    """How many more are left out because a side is longer than data.max_length."""

    special: SpecialIds

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def source_lengths(self) -> Int[np.ndarray, "pairs"]:
        """The tokens of each pair's source."""
        return _token_counts(self.source)[self.lines]

    @property
    def target_lengths(self) -> Int[np.ndarray, "pairs"]:
        """The tokens to predict of each pair: its target's and the end token."""
        return _token_counts(self.target)[self.lines] + 1

    def text(self) -> list[Pair]:
        """The text of each pair, read again from where it came from (in lower case if the data are)."""
        lines = list(self.texts)
        return [lines[line] for line in self.lines]


@dataclass(frozen=True)
class PairData:
    """Tokenised translation pairs."""

    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    """Has the same ids as the source's unless each side has its own vocabulary."""

    train: Pairs
    valid: Pairs
    test: Pairs | None

    def splits(self) -> dict[Split, Pairs]:
        """The splits by their names."""
        found: dict[Split, Pairs | None] = {"train": self.train, "valid": self.valid, "test": self.test}
        return {split: pairs for split, pairs in found.items() if pairs is not None}

    @property
    def key(self) -> str:
        """A hash of all that the ids of the training and validation pairs depend on."""
        return " ".join(text.key for pairs in (self.train, self.valid) for text in (pairs.source, pairs.target))

    @property
    def source_vocab_size(self) -> int:
        """The rows that an embedding of source ids needs."""
        return vocabulary_size(self.source_tokenizer)

    @property
    def target_vocab_size(self) -> int:
        """The rows that an embedding of target ids needs."""
        return vocabulary_size(self.target_tokenizer)


def prepare_pairs(config: PairDataConfig, special: SpecialIds, cache_dir: str | Path | None = None) -> PairData:
    """Reads and tokenises the pairs (or finds them in the cache: `files.cache_directory`).

    Pairs with an empty side and pairs longer than `config.max_length` are left out of every split, counted, and
    reported by a warning. Raises InputError if the pairs can't be had, if a split has none left, or if a special id
    stands for text.
    """
    with waiting(f"reading {config.source}") as status:
        splits = load_pairs(config)
        sides = _tokenize(config, splits, special, Path(cache_dir or cache_directory()), status)
        pairs = {split: _pairs(config, splits[split], *sides[split], special) for split in splits}
    source, target = sides["train"]
    return PairData(source.tokenizer, target.tokenizer, pairs["train"], pairs["valid"], pairs.get("test"))


def _tokenize(
    config: PairDataConfig, splits: dict[Split, PairTexts], special: SpecialIds, directory: Path, status: Status
) -> dict[Split, tuple[TokenizedText, TokenizedText]]:
    """Each split's source and target, an entry of the cache each."""
    contents = [f"{split} {texts.fingerprint}" for split, texts in splits.items()]

    def sentences(split: Split, side: Side) -> Iterator[str]:
        for number, pair in enumerate(splits[split]):
            if number % 1000 == 0:
                status.update(f"tokenising {splits[split].name}: {side} {number:,}")
            yield pair[side == "target"]

    def learn(side: Side) -> Tokenizer:
        match config.tokenizer:
            case "char":
                texts = itertools.chain.from_iterable(sentences(split, side) for split in splits)
                return char_tokenizer(texts, special.names())
            case "bpe":
                texts = itertools.chain(sentences("train", "source"), sentences("train", "target"))
            case _:
                texts = sentences("train", side)
        return bpe_tokenizer(texts, config.vocab_size, special.names(), sentences=True)

    def made(tokenizer: Tokenizer) -> Tokenizer:
        if config.lower:  # what is saved with the model has to do the same to what it is given later
            own = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
            tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        return tokenizer

    def learnt(side: Side) -> TokenizedText:
        parts = [*contents, "train", side, config.tokenizer, f"{config.vocab_size}", *special.names()]
        return cached(directory, parts, lambda: (made(learn(side)), sentences("train", side)))

    def encoded(split: Split, side: Side, tokenizer: Tokenizer) -> TokenizedText:
        parts = [*contents, split, side, tokenizer.to_str()]
        return cached(directory, parts, lambda: (tokenizer, sentences(split, side)))

    if config.tokenizer in ("char", "bpe-separate"):
        train = learnt("source"), learnt("target")
    elif config.tokenizer == "bpe":
        source = learnt("source")
        train = source, encoded("train", "target", source.tokenizer)
    else:
        tokenizer = made(load_tokenizer(config.tokenizer))
        train = encoded("train", "source", tokenizer), encoded("train", "target", tokenizer)
    held_out = {
        split: (encoded(split, "source", train[0].tokenizer), encoded(split, "target", train[1].tokenizer))
        for split in splits
        if split != "train"
    }
    return {"train": train, **held_out}


def _pairs(
    config: PairDataConfig, texts: PairTexts, source: TokenizedText, target: TokenizedText, special: SpecialIds
) -> Pairs:
    for text in (source, target):
        _check_special(texts.name, text, special)
    lengths = np.stack([_token_counts(source), _token_counts(target)])
    empty = (lengths == 0).any(axis=0)
    too_long = ~empty & ((lengths[0] > config.max_length) | (lengths[1] + 1 > config.max_length))
    pairs = Pairs(
        texts, source, target, np.flatnonzero(~empty & ~too_long), int(empty.sum()), int(too_long.sum()), special
    )
    left_out = (
        f"left out of {len(empty)} pairs: {pairs.empty} with an empty side, {pairs.too_long} longer than "
        f"{config.max_length} tokens (data.max_length)"
    )
    if not len(pairs):
        raise InputError(f"{texts.name}: no pairs left; {left_out}")
    if pairs.empty or pairs.too_long:
        log.warning("%s: %s", texts.name, left_out)
    return pairs


def _check_special(name: str, text: TokenizedText, special: SpecialIds) -> None:
    found = np.isin(text.tokens, list(set(special)))
    if found.any():
        number = int(text.tokens[found.argmax()])
        line = int(np.searchsorted(text.ends, found.argmax(), side="right")) + 1
        purpose = special._fields[special.index(number)]
        raise InputError(
            f"{name}: the text of pair {line} has token id {number} ({text.tokenizer.id_to_token(number)!r}), which is "
            f"model.{purpose}_id: leave that text out, or set model.{purpose}_id to an id that is no text"
        )


def _token_counts(text: TokenizedText) -> Int[np.ndarray, "lines"]:
    return np.diff(text.ends, prepend=0)
