"""Where the text comes from: Python's own documentation, local files, or a data set of the hub."""

import csv
import glob
import hashlib
import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax_tf.data.config import TextDataConfig
from flax_tf.data.hub import is_hub_name, one_line, quiet
from flax_tf.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

TABLES = {".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
ROWS_AT_ONCE = 1000


@dataclass
class Documents:
    """The documents of a corpus, read anew each time it is iterated. Rows without text are left out.

    Raises InputError, when iterated, if a file can't be read or if there is no text at all.
    """

    name: str
    """What to call the corpus in a message."""

    fingerprint: str
    """A hash of all that decides what the documents are; to take it, files are read as bytes but not parsed."""

    rows: Callable[[], Iterator[str | None]]
    """Opens the source; None is a null in a table."""

    max_documents: int | None
    """How many rows to take, from the first on; all if None."""

    skipped: int = 0
    """How many rows had no text (null, empty or blank) in the last complete iteration."""

    def __iter__(self) -> Iterator[str]:
        taken = skipped = 0
        for row in itertools.islice(self.rows(), min(self.max_documents or sys.maxsize, sys.maxsize)):
            if row is None or not row.strip():
                skipped += 1
            else:
                taken += 1
                yield row
        if not taken:
            raise InputError(f"{self.name}: no text in it; give a file, directory or data set that has some")
        self.skipped = skipped


def load_documents(config: TextDataConfig) -> Documents:
    """Finds `config.path`: the word "docs", then a file or directory here, then a data set on the hub.

    The hub is asked only for what has the shape of its names and isn't here. Raises InputError if the path is none of
    these or can't be read.
    """
    path = Path(config.path).expanduser()
    if config.path == "docs":
        topics = python_topics()
        return _documents(config, [_sha256(topic.encode()) for topic in topics], lambda: iter(topics))
    if path.exists():
        files = _files(path)
        digests = [f"{TABLES.get(file.suffix.lower(), 'text')} {file_digest(file)}" for file in files]
        return _documents(config, digests, lambda: _read_files(files, config.column))
    if not is_hub_name(config.path):
        raise InputError(f"data path {config.path}: no such file or directory")
    return _hub_documents(config)


def python_topics() -> list[str]:
    """The topics of Python's own documentation (`pydoc_data.topics`), each text once.

    A topic that stands inside another is left out: held-out text must not be found in the training text.
    """
    from pydoc_data.topics import topics  # half a megabyte, and wanted only by those who train on it

    distinct = list(dict.fromkeys(topics.values()))
    return [text for text in distinct if not any(text in other for other in distinct if other is not text)]


def _documents(config: TextDataConfig, contents: list[str], rows: Callable[[], Iterator[str | None]]) -> Documents:
    parts = [contents, config.column, config.max_documents]
    return Documents(config.path, _sha256(json.dumps(parts).encode()), rows, config.max_documents)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_digest(file: Path) -> str:
    """The SHA-256 of the file's bytes. Raises InputError if it can't be read."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{file}: can't be read ({error.strerror})") from error


def _files(path: Path) -> list[Path]:
    """The file itself, or all files under the directory in the order of their names, without hidden ones."""
    if not path.is_dir():
        return [path]
    names = sorted(file.relative_to(path).parts for file in path.rglob("*") if file.is_file())
    files = [path.joinpath(*parts) for parts in names if not any(part.startswith(".") for part in parts)]
    if not files:
        raise InputError(f"{path}: the directory holds no files (hidden ones don't count)")
    return files


def _read_files(files: list[Path], column: str) -> Iterator[str | None]:
    for file in files:
        kind = TABLES.get(file.suffix.lower())
        if kind is None:
            yield _read_text(file)
        elif file.stat().st_size:  # an empty table is an error to the readers, and no rows to us
            yield from (text for (text,) in read_table(file, kind, {"data.column": column}))


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text (byte {error.start}); convert it, or leave it out") from error
    except OSError as error:
        raise InputError(f"{file}: can't be read ({error.strerror})") from error


def read_table(file: Path, kind: str, columns: Mapping[str, str]) -> Iterator[tuple[str | None, ...]]:
    """The rows of a table whose format is `kind`, one of the values of TABLES: the text in each of the columns.

    `columns` has the columns' names by the settings that give them; a field of a nested column is column.field.
    Raises InputError if the file can't be read so, lacks a column, or has something else than text there.
    """
    try:
        match kind:
            case "jsonl":
                yield from _read_lines(file, columns)
            case "csv":
                yield from _read_csv(file, columns)
            case _:
                yield from _read_arrow(file, kind, columns)
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text; convert it, or leave it out") from error
    except Exception as error:  # json, csv, pyarrow and datasets each have their own
        raise InputError(f"{file}: can't be read as {file.suffix.lower()[1:]}: {one_line(error)}") from error


def _read_lines(file: Path, columns: Mapping[str, str]) -> Iterator[tuple[str | None, ...]]:
    with file.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(f"{file}: line {number} can't be read as jsonl: {one_line(error)}") from error
            if not isinstance(row, dict):
                raise InputError(f"{file}: line {number} holds no object with columns")
            row = _flattened(row)
            for setting, column in columns.items():
                if column not in row:
                    names = ", ".join(row)
                    raise InputError(f"{file}: line {number}: no column {column!r}; set {setting} to one of: {names}")
                if not isinstance(row[column], str | None):
                    kind = type(row[column]).__name__
                    raise InputError(f"{file}: column {column!r} holds {kind}, not text; set {setting} to another")
            yield tuple(row[column] for column in columns.values())


def _flattened(row: Mapping[str, Any]) -> dict[str, Any]:
    """A column `translation` of two fields becomes `translation.de` and `translation.en`."""
    flat = {}
    for name, value in row.items():
        flat |= (
            {f"{name}.{field}": inner for field, inner in value.items()} if isinstance(value, dict) else {name: value}
        )
    return flat


def _read_csv(file: Path, columns: Mapping[str, str]) -> Iterator[tuple[str | None, ...]]:
    csv.field_size_limit(sys.maxsize)
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = csv.DictReader(stream, strict=True)
        names = rows.fieldnames or []
        for setting, column in columns.items():
            if column not in names:
                raise InputError(f"{file}: no column {column!r}; set {setting} to one of: {', '.join(names)}")
        for row in rows:
            if None in row:  # where DictReader puts what is beyond the header
                raise InputError(f"{file}: line {rows.line_num}: more fields than columns; quote text that has commas")
            yield tuple(row[column] for column in columns.values())


def _read_arrow(file: Path, kind: str, columns: Mapping[str, str]) -> Iterator[tuple[str | None, ...]]:
    from datasets import IterableDataset  # seconds to import, and not needed for plain text

    # Through the reader itself: `load_dataset` would report each use of one to a counter on the network. The path is
    # escaped, because `datasets` takes it for a pattern.
    pattern = glob.escape(str(file.absolute()))
    with quiet("datasets"):
        table = IterableDataset.from_json(pattern) if kind == "json" else IterableDataset.from_parquet(pattern)
        for batch in table.with_format("arrow").iter(ROWS_AT_ONCE):
            yield from _rows(batch, columns, str(file))


def _rows(batch, columns: Mapping[str, str], name: str) -> Iterator[tuple[str | None, ...]]:
    """The rows of a `pyarrow.Table`: the text in each of the columns, as for `read_table`."""
    from pyarrow import types

    batch = batch.flatten()  # as `_flattened`
    for setting, column in columns.items():
        if column not in batch.column_names:
            names = ", ".join(batch.column_names)
            raise InputError(f"{name}: no column {column!r}; set {setting} to one of: {names}")
        kind = batch[column].type
        if not any(test(kind) for test in (types.is_string, types.is_large_string, types.is_null)):
            raise InputError(f"{name}: column {column!r} holds {kind}, not text; set {setting} to another")
    return zip(*(batch[column].to_pylist() for column in columns.values()), strict=True)


def hub_table(name: str, split: str) -> "Dataset":
    """A split of a data set of the hub. Raises InputError if it can't be had."""
    from datasets import Dataset, load_dataset

    log.info("%s: no such file here; asking the hub", name)
    try:
        with quiet("datasets", "huggingface_hub"):
            table = load_dataset(name, split=split)
    except Exception as error:  # the hub's libraries raise dozens of kinds
        raise InputError(
            f"data path {name}: no such file or directory, and not to be had from the hub: {one_line(error)}"
        ) from error
    assert isinstance(table, Dataset)  # a split was named, and streaming wasn't asked for
    return table


def hub_rows(table: "Dataset", columns: Mapping[str, str], name: str) -> Iterator[tuple[str | None, ...]]:
    """The rows of a data set of the hub, as those of `read_table`."""
    for batch in table.with_format("arrow").iter(ROWS_AT_ONCE):
        yield from _rows(batch, columns, name)


def _hub_documents(config: TextDataConfig) -> Documents:
    table = hub_table(config.path, config.split)

    def rows() -> Iterator[str | None]:
        return (text for (text,) in hub_rows(table, {"data.column": config.column}, config.path))

    return _documents(config, [table._fingerprint], rows)
