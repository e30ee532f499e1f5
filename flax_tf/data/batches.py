"""Examples for training and validation, in an order that is a function of the seed and the step alone."""

import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grain
import numpy as np
from jaxtyping import Int, Integer
from rich.status import Status
from tokenizers import Tokenizer

from flax_tf.data.cache import TokenizedText, cached
from flax_tf.data.config import TextDataConfig
from flax_tf.data.progress import waiting
from flax_tf.data.text import Documents, load_documents
from flax_tf.data.tokenizer import bpe_tokenizer, char_tokenizer, load_tokenizer, vocabulary_size
from flax_tf.errors import InputError
from flax_tf.files import cache_directory

log = logging.getLogger(__name__)

DOCUMENT_SEPARATOR = "\n\n"  # between the documents of a stream


@dataclass(frozen=True)
class TextData:
    """Tokenised text, and where its training and validation windows start. T is `seq_length`."""

    tokenizer: Tokenizer

    tokens: Integer[np.ndarray, "tokens"]
    """All ids, memory-mapped and read-only, uint16 or uint32."""

    max_id: int
    """The greatest id in `tokens`."""

    key: str
    """A hash of all that the ids depend on."""

    seq_length: int

    shuffle: bool

    train_starts: range | Int[np.ndarray, "train_windows"]
    """Where training windows of T + 1 tokens start: anywhere in a range for a stream, else an entry for each window."""

    valid_starts: Int[np.ndarray, "valid_windows"]
    """Where validation windows start; they don't share labels. A stream's last window may be shorter than T + 1."""

    @property
    def vocab_size(self) -> int:
        """The rows that an embedding of the tokenizer's ids needs."""
        return vocabulary_size(self.tokenizer)

    @property
    def train_tokens(self) -> int:
        """How many tokens there are to predict in the training split."""
        if isinstance(self.train_starts, range):
            return len(self.train_starts) + self.seq_length - 1
        return len(self.train_starts) * self.seq_length

    @property
    def valid_tokens(self) -> int:
        """How many tokens there are to predict in the validation split."""
        return int(self.valid_lengths.sum())

    @property
    def valid_lengths(self) -> Int[np.ndarray, "valid_windows"]:
        """How many tokens there are to predict in each validation window: T, or fewer in a stream's last."""
        return np.minimum(self.seq_length, len(self.tokens) - 1 - self.valid_starts)


def prepare(config: TextDataConfig, seq_length: int, cache_dir: str | Path | None = None) -> TextData:
    """Reads and tokenises the text (or finds it in the cache: `files.cache_directory`), splits it and cuts it.

    Raises InputError if the text can't be had, or if a split is too short for a window of T + 1 tokens.
    """
    with waiting(f"reading {config.path}") as status:
        documents = load_documents(config)
        text = _tokenize(config, documents, Path(cache_dir or cache_directory()), status)
    if documents.skipped:
        log.warning("%s: left out %d rows that have no text", config.path, documents.skipped)
    cut = _cut_stream if config.chunking == "stream" else _cut_windows
    train, valid = cut(config, text, seq_length)
    return TextData(text.tokenizer, text.tokens, text.max_id, text.key, seq_length, config.shuffle, train, valid)


def _tokenize(config: TextDataConfig, documents: Documents, directory: Path, status: Status) -> TokenizedText:
    separator = DOCUMENT_SEPARATOR if config.chunking == "stream" else ""

    def texts() -> Iterator[str]:
        for number, document in enumerate(documents):
            status.update(f"tokenising {config.path}: document {number + 1:,}")
            yield separator + document if number else document

    match config.tokenizer:
        case "char":
            parts = [documents.fingerprint, separator, "char"]
            return cached(directory, parts, lambda: (char_tokenizer(texts()), texts()))
        case "bpe":
            parts = [documents.fingerprint, separator, f"bpe {config.vocab_size}"]
            return cached(directory, parts, lambda: (bpe_tokenizer(texts(), config.vocab_size), texts()))
        case _:
            tokenizer = load_tokenizer(config.tokenizer)
            parts = [documents.fingerprint, separator, tokenizer.to_str()]
            return cached(directory, parts, lambda: (tokenizer, texts()))


def _cut_stream(config: TextDataConfig, text: TokenizedText, seq_length: int) -> tuple[range, np.ndarray]:
    """The first part of the stream is for training (as many tokens as nanoGPT takes), the rest for validation."""
    total = len(text.tokens)
    train = int(total * (1 - config.valid_fraction))
    for split, length in (("training", train), ("validation", total - train)):
        if length < seq_length + 1:
            raise InputError(
                f"{config.path}: {length} of its {total} tokens are for {split}, and a window takes {seq_length + 1}: "
                "give more text, lower model.max_seq_length, or change data.valid_fraction"
            )
    return range(train - seq_length), np.arange(train, total - 1, seq_length)


def _cut_windows(config: TextDataConfig, text: TokenizedText, seq_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Each document in consecutive windows, short rests dropped; the first windows for training, the last to validate.

    The chunking of the basic transformer notes that the language model follows.
    """
    lengths = np.diff(text.ends, prepend=0)
    counts = lengths // (seq_length + 1)
    number_in_document = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(text.ends - lengths, counts) + number_in_document * (seq_length + 1)
    train = int(len(starts) * (1 - config.valid_fraction))
    for split, windows in (("training", train), ("validation", len(starts) - train)):
        if not windows:
            raise InputError(
                f"{config.path}: its {len(lengths)} documents (the longest has {lengths.max()} tokens) make "
                f"{len(starts)} windows of {seq_length + 1} tokens, and none is left for {split}: give more text, "
                "lower model.max_seq_length, change data.valid_fraction, or set data.chunking to stream"
            )
    return starts[:train], starts[train:]


def steps_per_epoch(data: TextData, batch_size: int) -> int:
    """The steps that take each training window once (in a stream: as many tokens as the split has), rounded up."""
    return math.ceil(data.train_tokens / (batch_size * data.seq_length))


def train_batches(data: TextData, batch_size: int, seed: int) -> grain.MapDataset:
    """An endless data set whose k-th element depends on `seed` and k alone, so a run's data position is k.

    An element is {"inputs": int32 [B, T], "labels": int32 [B, T]}, labels one token ahead of inputs. Windows of a
    stream are drawn with replacement, uniformly over all starts. Other windows come once each epoch, in an order of
    its own (or always in the documents' order, without `shuffle`); a batch that an epoch doesn't fill is
    filled from the next.

    Raises InputError for a seed outside 0 to 2**32 - 1.
    """
    check_seed(seed)
    starts = data.train_starts
    if isinstance(starts, range):
        steps = grain.MapDataset.range(sys.maxsize).seed(seed)
        return steps.random_map(lambda _, rng: _examples(data, rng.integers(len(starts), size=batch_size)))
    # `.seed` hashes the seed; given it directly, `shuffle` uses seed + epoch, and neighbouring seeds share epochs.
    order = grain.MapDataset.range(len(starts)).seed(seed)
    if data.shuffle:
        order = order.shuffle()
    return order.repeat().batch(batch_size).map(lambda windows: _examples(data, starts[windows]))


def valid_batches(data: TextData, batch_size: int) -> grain.MapDataset:
    """The whole validation split once, in order, as elements of one shape.

    An element is as in `train_batches`, with "weights": float32 [B, T], 1 for each label that counts and 0 for
    padding, so that the loss of the split is sum(weights * loss) / sum(weights) over all elements.
    """
    rows = math.ceil(len(data.valid_starts) / batch_size) * batch_size
    padding = rows - len(data.valid_starts)
    starts = np.pad(data.valid_starts, (0, padding), mode="edge").reshape(-1, batch_size)
    lengths = np.pad(data.valid_lengths, (0, padding)).reshape(-1, batch_size)

    def batch(index: int) -> dict[str, np.ndarray]:
        weights = (np.arange(data.seq_length) < lengths[index][:, None]).astype(np.float32)
        return {**_examples(data, starts[index]), "weights": weights}

    return grain.MapDataset.range(len(starts)).map(batch)


def _examples(data: TextData, starts: Int[np.ndarray, "B"]) -> dict[str, np.ndarray]:
    positions = starts[:, None] + np.arange(data.seq_length + 1)
    windows = np.take(data.tokens, positions, mode="clip").astype(np.int32)  # a last window may point past the end
    return {"inputs": windows[:, :-1], "labels": windows[:, 1:]}


def check_seed(seed: int) -> None:
    """Raises InputError for a seed that the order of the data can't be made from."""
    if not 0 <= seed < 1 << 32:
        raise InputError(f"seed is {seed}: it must be at least 0 and less than {1 << 32}")


def check_ids(max_id: int, vocab_size: int, setting: str = "model.vocab_size") -> None:
    """Raises InputError if the greatest id of a text is outside a model's vocabulary: in JAX nothing else would."""
    if max_id >= vocab_size:
        raise InputError(
            f"token id {max_id} is outside the model's vocabulary of {vocab_size} (ids 0 to {vocab_size - 1}): "
            f"set {setting} to at least {max_id + 1}, or use the tokenizer that the model was made for"
        )
