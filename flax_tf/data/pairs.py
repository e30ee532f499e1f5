"""Sentences and their translations: what they are read from, and how they are split."""

import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flax_tf.data import dates
from flax_tf.data.hub import is_hub_name, one_line
from flax_tf.data.text import TABLES, file_digest, hub_rows, hub_table, read_table
from flax_tf.errors import InputError

DATES = "dates"
RANDOM = "random"
BUILT_IN = (DATES, RANDOM)
OF_FILES = ("target", "valid_source", "valid_target", "test_source", "test_target")  # settings unread for the dates

Pair = tuple[str, str]
Split = Literal["train", "valid", "test"]


@dataclass(frozen=True, kw_only=True)
class PairDataConfig:
    """The sentences, their translations, the tokenizer and the batches of sequence-to-sequence training."""

    source: str = DATES
    """"dates" for dates of many locales into ISO dates (nothing to download); "random" for seed 002's random ids, one
    batch of batch_size rows of max_length tokens; a text file whose line i is translated by line i of target; or,
    without target, both sides in one: a .tsv file (source, tab, target; more columns aren't read), a .jsonl, .csv or
    .parquet file, or the name of a data set on the hub. Text and .tsv files may be .gz."""

    target: str | None = None
    """The text file with the translations. null: source has both sides."""

    valid_source: str | None = None
    """Pairs for validation, given as source is. null: valid_fraction of the pairs."""

    valid_target: str | None = None
    """The translations of valid_source, given as target is."""

    test_source: str | None = None
    """Pairs for the test at the end, given as source is. null: none, except that the dates have their own."""

    test_target: str | None = None
    """The translations of test_source, given as target is."""

    valid_fraction: float = 0.05
    """The share of the pairs held out for validation without valid_source. The text of a source sentence alone decides,
    so no sentence is on both sides."""

    source_column: str = "source"
    """The column of the source, in .jsonl, .csv and .parquet files and in data sets of the hub; a.b for the field b of
    a nested column a, such as translation.de."""

    target_column: str = "target"
    """The column of the target, as for source_column."""

    split: str = "train"
    """The split to read of a data set on the hub given as source."""

    valid_split: str = "validation"
    """The split to read of a data set on the hub given as valid_source."""

    test_split: str = "test"
    """The split to read of a data set on the hub given as test_source."""

    lower: bool = False
    """Whether both sides are put in lower case, references included."""

    tokenizer: str = "bpe"
    """"bpe" for byte-level byte-pair encoding trained on both sides of the training pairs together; "bpe-separate" for
    one trained on each side; "char" for one token per character, each side with its own; or a tokenizer for both
    sides: the path of a tokenizer.json or of a directory that holds one, or a name on the hub."""

    vocab_size: int = 8000
    """Tokens in a vocabulary trained with "bpe" or "bpe-separate", special ones included; not read otherwise."""

    max_length: int = 100
    """The most tokens of a source, and of a target with its end token; longer pairs are left out and reported. Not more
    than model.max_seq_length."""

    tokens_per_batch: int | None = 4000
    """Batches hold pairs of about one length, as many rows as make about so many tokens of the longer side, padding
    included. null: batch_size pairs of any length, padded to the longest of all."""

    buckets: int = 4
    """How many lengths there are with tokens_per_batch; each is a shape to compile for."""

    def __post_init__(self) -> None:
        for name in ("source", "source_column", "target_column", "split", "valid_split", "test_split", "tokenizer"):
            if not getattr(self, name):
                raise InputError(f"data.{name} is empty: give it a value")
        for name in OF_FILES:
            value = getattr(self, name)
            if value == "":
                raise InputError(f"data.{name} is empty: give it a value, or null")
            if value is not None and self.source in BUILT_IN:
                raise InputError(f"data.{name} is {value}, but data.source is the built-in {self.source}: set it, too")
        for name in ("valid", "test"):
            if getattr(self, f"{name}_source") is None and getattr(self, f"{name}_target") is not None:
                raise InputError(f"data.{name}_target is set without data.{name}_source: give both")
        if self.source_column == self.target_column:
            raise InputError(f"data.source_column and data.target_column are both {self.source_column}: name two")
        if not 0 < self.valid_fraction < 1:
            raise InputError(f"data.valid_fraction is {self.valid_fraction}: it must be more than 0 and less than 1")
        if self.tokenizer.startswith("bpe") and self.vocab_size < 259:
            raise InputError(f"data.vocab_size is {self.vocab_size}: byte-level BPE needs at least 259 for translation")
        for name, least in (("max_length", 2), ("buckets", 1), ("tokens_per_batch", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"data.{name} is {value}: it must be at least {least}")


@dataclass(frozen=True)
class PairTexts:
    """The pairs of a split, read anew each time it is iterated: text without space at its ends, perhaps blank.

    Raises InputError, when iterated, if a file can't be read or if there is no pair at all.
    """

    name: str
    """What to call the split in a message."""

    fingerprint: str
    """A hash of all that decides what the pairs are; to take it, files are read as bytes but not parsed."""

    pairs: Callable[[], Iterator[Pair]]
    """Opens the source."""

    def __iter__(self) -> Iterator[Pair]:
        complete = False
        for source, target in self.pairs():
            complete = complete or bool(source and target)
            yield source, target
        if not complete:
            raise InputError(f"{self.name}: no pairs in it, of a source and a target that both have text; give more")


def load_pairs(config: PairDataConfig) -> dict[Split, PairTexts]:
    """Finds the pairs: "train", "valid", and "test" where there is one.

    The hub is asked only for what has the shape of its names and isn't here. Raises InputError if something is neither
    here nor there, can't be read, or isn't pairs.
    """
    found: dict[Split, PairTexts]
    if config.source == DATES:
        kinds: dict[Split, str] = {"train": "training", "valid": "held-out days", "test": "held-out locales"}
        found = {split: _dates(split, kind) for split, kind in kinds.items()}
    else:
        found = {"train": _find(config, config.source, config.target, config.split)}
        if config.valid_source is not None:
            found["valid"] = _find(config, config.valid_source, config.valid_target, config.valid_split)
        if config.test_source is not None:
            found["test"] = _find(config, config.test_source, config.test_target, config.test_split)
    if config.lower:
        found = {split: _lower(texts) for split, texts in found.items()}
    if "valid" not in found:
        train = found["train"]
        found |= {"train": _part(train, config, held_out=False), "valid": _part(train, config, held_out=True)}
    return found


def _dates(split: Split, kind: str) -> PairTexts:
    return PairTexts(f"dates ({kind})", dates.fingerprint(split), lambda: iter(dates.date_pairs(split)))


def _lower(texts: PairTexts) -> PairTexts:
    def pairs() -> Iterator[Pair]:
        return ((source.lower(), target.lower()) for source, target in texts.pairs())

    return PairTexts(texts.name, f"{texts.fingerprint} lower", pairs)


def _part(texts: PairTexts, config: PairDataConfig, *, held_out: bool) -> PairTexts:
    """The pairs that are held out for validation, or the others."""
    limit = config.valid_fraction * 2**64

    def pairs() -> Iterator[Pair]:
        for source, target in texts.pairs():
            digest = hashlib.sha256(source.encode()).digest()
            if (int.from_bytes(digest[:8]) < limit) == held_out:
                yield source, target

    part = f"the share {config.valid_fraction} for validation" if held_out else "training"
    return PairTexts(f"{texts.name} ({part})", f"{texts.fingerprint} {config.valid_fraction} {held_out}", pairs)


def _find(config: PairDataConfig, source: str, target: str | None, split: str) -> PairTexts:
    file = Path(source).expanduser()
    columns = {"data.source_column": config.source_column, "data.target_column": config.target_column}
    if not file.exists():
        if target is not None or not is_hub_name(source):
            raise InputError(f"data path {source}: no such file or directory")
        table = hub_table(source, split)
        return _texts(
            source, ["hub", table._fingerprint, *columns.values()], lambda: _strip(hub_rows(table, columns, source))
        )
    if file.is_dir():
        raise InputError(f"{source}: a directory; name a file of pairs")
    kind = Path(file.name.lower().removesuffix(".gz")).suffix
    both_sides = kind == ".tsv" or kind in TABLES
    if target is not None:
        other = Path(target).expanduser()
        if both_sides:
            raise InputError(f"{source}: {kind} has both sides, so leave out {target}, or give two text files")
        if not other.is_file():
            raise InputError(f"data path {target}: no such file")
        return _texts(source, ["lines", file_digest(file), file_digest(other)], lambda: _read_lines(file, other))
    if not both_sides:
        raise InputError(
            f"{source}: text of one side only; give the file of its translations, too, or a .tsv, .jsonl, .csv or "
            ".parquet file that has both"
        )
    if kind == ".tsv":
        return _texts(source, ["tsv", file_digest(file)], lambda: _read_tsv(file))
    if file.suffix.lower() == ".gz":
        raise InputError(f"{source}: only text and .tsv files are read packed: unpack it (gunzip)")
    parts = [kind, file_digest(file), *columns.values()]
    return _texts(source, parts, lambda: _strip(read_table(file, TABLES[kind], columns)))


def _texts(name: str, parts: list[str], pairs: Callable[[], Iterator[Pair]]) -> PairTexts:
    return PairTexts(name, hashlib.sha256(json.dumps(parts).encode()).hexdigest(), pairs)


def _strip(rows: Iterator[tuple[str | None, ...]]) -> Iterator[Pair]:
    """Pairs of the rows of a table, where a null is no text."""
    return (((source or "").strip(), (target or "").strip()) for source, target in rows)


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a text file, perhaps .gz. Raises InputError, when iterated, if it can't be read or isn't UTF-8.

    Only a line feed ends a line: Python's splitlines would cut at characters of text.
    """
    number = 0
    try:
        opener = gzip.open if file.suffix.lower() == ".gz" else Path.open
        with opener(file, "rb") as stream:
            for number, line in enumerate(stream):
                yield line.decode("utf-8" if number else "utf-8-sig").strip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text (line {number + 1}); convert it") from error
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{file}: can't be read: {one_line(error)}") from error


def _read_lines(source: Path, target: Path) -> Iterator[Pair]:
    for lines in itertools.zip_longest(read_lines(source), read_lines(target)):
        if None in lines:
            counts = [sum(1 for _ in read_lines(file)) for file in (source, target)]
            raise InputError(
                f"{source} has {counts[0]} lines and {target} has {counts[1]}: line i of one must be the translation "
                "of line i of the other"
            )
        yield lines[0].strip(), lines[1].strip()


def _read_tsv(file: Path) -> Iterator[Pair]:
    for number, line in enumerate(read_lines(file)):
        source, tab, rest = line.partition("\t")
        if line.strip() and not tab:
            raise InputError(f"{file}: line {number + 1} has no tab between a source and a target")
        yield source.strip(), rest.partition("\t")[0].strip()
