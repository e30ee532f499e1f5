"""Texts are tokenised once: the ids stand in a memory-mapped file, found again by a hash of what they come from."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer

from flax_tf.data.tokenizer import encode_all, vocabulary_size
from flax_tf.errors import InputError
from flax_tf.files import replacing

FORMAT = 1  # goes into the key: raise it when what is stored for the same text changes


@dataclass(frozen=True)
class TokenizedText:
    """One corpus as ids."""

    tokenizer: Tokenizer
    tokens: np.ndarray
    """[tokens] uint16 or uint32, memory-mapped, read-only: the documents one after the other."""

    ends: np.ndarray
    """[documents] int64: where each document's tokens end."""

    max_id: int
    """The greatest id in `tokens`."""

    key: str
    """A hash of all that the ids depend on."""


def cached(
    directory: Path, parts: Iterable[str], build: Callable[[], tuple[Tokenizer, Iterable[str]]]
) -> TokenizedText:
    """The entry for `parts` (what the ids depend on), made with `build` if there is none or it is damaged.

    `build` gives the tokenizer and the texts. Processes that want the same entry wait for the first to make it.
    Raises InputError if the directory can't be written.
    """
    key = hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()[:32]
    entry = directory / f"tokens-{key}"
    if (found := _read(entry)) is not None:
        return found
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / f"tokens-{key}.lock"):
            if (found := _read(entry)) is not None:
                return found
            with replacing(entry) as fresh:
                _write(fresh, *build())
    except OSError as error:
        raise InputError(
            f"the token cache {directory} can't be written ({error.strerror or error}): "
            "set FLAX_TF_CACHE to a directory that can"
        ) from error
    written = _read(entry)
    if written is None:
        raise InputError(f"the token cache {directory} doesn't keep what is written: set FLAX_TF_CACHE to another")
    return written


def _write(entry: Path, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    entry.mkdir()
    dtype = np.dtype(np.uint16 if vocabulary_size(tokenizer) <= 1 << 16 else np.uint32)
    max_id, ends, end = 0, [], 0
    with (entry / "tokens.bin").open("wb") as file:
        for ids in encode_all(tokenizer, texts):
            file.write(ids.astype(dtype).tobytes())
            max_id = max(max_id, int(ids.max(initial=0)))
            end += len(ids)
            ends.append(end)
    if not end:
        raise InputError("the tokenizer makes no tokens of this text: give other text or another tokenizer")
    np.save(entry / "ends.npy", np.array(ends, np.int64))
    (entry / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    files = {file.name: _digest(file) for file in sorted(entry.iterdir())}
    (entry / "entry.json").write_text(json.dumps({"dtype": dtype.name, "max_id": max_id, "sha256": files}))


def _read(entry: Path) -> TokenizedText | None:
    """The entry, or None if it isn't there or is damaged in any way."""
    try:
        about = json.loads((entry / "entry.json").read_text())
        if any(_digest(entry / name) != digest for name, digest in about["sha256"].items()):
            return None
        return TokenizedText(
            Tokenizer.from_file(str(entry / "tokenizer.json")),
            np.memmap(entry / "tokens.bin", about["dtype"], mode="r"),
            np.load(entry / "ends.npy"),
            about["max_id"],
            entry.name,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
