"""What text a language model is trained on, and how it is cut into examples."""

from dataclasses import dataclass
from typing import Literal

from flax_tf.errors import InputError

LARGEST = 10_000_000  # vocabularies of BPE; the trainer sets memory aside for as many as it is told


@dataclass(frozen=True)
class TextDataConfig:
    """The text, the tokenizer and the chunking of language-model training."""

    path: str = "docs"
    """"docs" for Python's own documentation (nothing to download); a text, .jsonl, .csv or .parquet file; a directory
    of such files; or the name of a data set on the hub, such as roneneldan/TinyStories."""

    column: str = "text"
    """The column that holds the text, in .jsonl, .csv and .parquet files and in data sets of the hub."""

    split: str = "train"
    """The split to read of a data set on the hub."""

    max_documents: int | None = None
    """Take only this many documents, from the first on; all of them if null."""

    tokenizer: str = "char"
    """"char" for one token per character; "bpe" for byte-level byte-pair encoding trained on the text; the path of a
    tokenizer.json or of a directory that holds one; or a name on the hub, such as bert-base-uncased."""

    vocab_size: int = 8000
    """Tokens in a vocabulary trained with tokenizer "bpe"; not read otherwise."""

    chunking: Literal["stream", "windows"] = "stream"
    """"stream": the documents, a blank line between them, are one stream, and training draws windows of seq_length + 1
    tokens anywhere in it. "windows": each document is cut into consecutive windows of seq_length + 1 tokens, and
    what is left at its end is dropped."""

    shuffle: bool = True
    """Whether each epoch takes the windows in an order of its own; false keeps the documents' order (chunking
    "windows" only)."""

    valid_fraction: float = 0.1
    """The share held out for validation: the end of the stream, or the last windows."""

    def __post_init__(self) -> None:
        for name in ("path", "column", "split", "tokenizer"):
            if not getattr(self, name):
                raise InputError(f"data.{name} is empty: give it a value")
        if self.max_documents is not None and self.max_documents < 1:
            raise InputError(f"data.max_documents is {self.max_documents}: it must be at least 1, or null for all")
        if self.tokenizer == "bpe" and not 256 <= self.vocab_size <= LARGEST:
            raise InputError(f"data.vocab_size is {self.vocab_size}: byte-level BPE takes from 256 to {LARGEST}")
        if self.chunking not in ("stream", "windows"):
            raise InputError(f"data.chunking is {self.chunking!r}: it must be stream or windows")
        if self.chunking == "stream" and not self.shuffle:
            raise InputError("data.shuffle is false, but stream windows are drawn at random: use data.chunking windows")
        if not 0 < self.valid_fraction < 1:
            raise InputError(f"data.valid_fraction is {self.valid_fraction}: it must be more than 0 and less than 1")
