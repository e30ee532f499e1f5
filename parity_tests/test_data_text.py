"""Reading documents: every source, and what bad input gets."""

import json
import socket

import datasets
import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flax_tf.data.config import TextDataConfig
from flax_tf.data.hub import is_hub_name
from flax_tf.data.text import load_documents, python_topics
from flax_tf.errors import InputError


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """A test that looks up a host or connects fails at its end: a library may swallow an exception raised here."""
    asked = []

    def refuse(*args, **kwargs):
        asked.append(args)
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    assert not asked


def offline(monkeypatch):
    """Has the hub's libraries fail at once; they read HF_HUB_OFFLINE when they are imported, which may be long ago."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def read(path, **fields) -> list[str]:
    return list(load_documents(TextDataConfig(path=str(path), **fields)))


def error(path, **fields) -> str:
    with pytest.raises(InputError) as caught:
        read(path, **fields)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_python_topics_are_in_no_other_topic():
    topics = python_topics()
    assert sum(map(len, topics)) > 300_000  # the documentation itself, whichever version of Python
    assert all(a not in b for i, a in enumerate(topics) for j, b in enumerate(topics) if i != j)
    assert read("docs") == topics


def test_a_text_file_is_one_document_kept_as_it_is(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffeins\r\nzwei\t\u00e9\n".encode())
    assert read(file) == ["eins\r\nzwei\t\u00e9\n"]  # the byte order mark is no text, the line ends are
    (tmp_path / "notes.md").write_text("x")
    assert read(tmp_path / "notes.md") == ["x"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "odd [1] *name.jsonl", "A.JSONL"])
def test_tables(tmp_path, name):
    rows = [{"n": 1, "body": 'say "hi", he\nsaid'}, {"n": 2, "body": "NA"}, {"n": 3, "body": "\u00fc\u4e16"}]
    file = tmp_path / name
    match file.suffix:
        case ".csv":
            file.write_text('n,body\n1,"say ""hi"", he\nsaid"\n2,NA\n3,\u00fc\u4e16\n', encoding="utf-8")
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        case ".json":
            file.write_text(json.dumps(rows))
        case _:
            jsonl(file, rows)
    assert read(file, column="body") == [row["body"] for row in rows]


def test_a_directory_is_its_files_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    jsonl(tmp_path / "a.jsonl", [{"text": "first"}, {"text": "and a half"}])
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.txt").write_text("third")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no")
    assert read(tmp_path) == ["first", "and a half", "second", "third"]
    assert read(tmp_path, max_documents=2) == ["first", "and a half"]


def test_rows_without_text_are_left_out_and_counted(tmp_path):
    file = jsonl(
        tmp_path / "a.jsonl", [{"text": "one"}, {"text": None}, {"text": ""}, {"text": " \n"}, {"text": "two"}]
    )
    documents = load_documents(TextDataConfig(path=str(file)))
    assert list(documents) == ["one", "two"]
    assert documents.skipped == 3
    assert list(documents) == ["one", "two"]  # a second reading starts again
    assert documents.skipped == 3


def test_many_rows_with_a_column_that_changes_its_type(tmp_path):
    file = tmp_path / "a.csv"  # pandas reads 10,000 rows at a time and guesses types anew for each
    file.write_text("text,n\n" + "".join(f"t{i},{i if i < 15_000 else 'many'}\n" for i in range(21_001)))
    assert read(file) == [f"t{i}" for i in range(21_001)]


def test_the_fingerprint_follows_the_content_and_not_the_name(tmp_path):
    def fingerprint(path, **fields):
        return load_documents(TextDataConfig(path=str(path), **fields)).fingerprint

    (tmp_path / "a.txt").write_text("same")
    (tmp_path / "b.txt").write_text("same")
    (tmp_path / "c.txt").write_text("other")
    jsonl(tmp_path / "d.jsonl", [{"text": "same"}])
    (tmp_path / "e.txt").write_bytes((tmp_path / "d.jsonl").read_bytes())
    assert fingerprint(tmp_path / "a.txt") == fingerprint(tmp_path / "b.txt")
    distinct = {fingerprint(tmp_path / f"{name}") for name in ("a.txt", "c.txt", "d.jsonl", "e.txt")}
    distinct |= {fingerprint(tmp_path / "d.jsonl", column="n"), fingerprint(tmp_path / "d.jsonl", max_documents=1)}
    assert len(distinct) == 6


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("a.txt", b"", "no text"),
        ("a.txt", b" \n\t", "no text"),
        ("a.jsonl", b"", "no text"),
        ("a.jsonl", b"\n\n", "no text"),
        ("a.jsonl", b'{"text": null}\n', "no text"),
        ("a.csv", b"text,n\n", "no text"),
        ("a.txt", b"caf\xe9", "not UTF-8"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', "not UTF-8"),
        ("a.csv", b"text\ncaf\xe9\n", "not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "can't be read as jsonl"),
        ("a.jsonl", b'"only a string"\n', "line 1 holds no object with columns"),
        ("a.jsonl", b'null\n{"text": "x"}\n', "line 1 holds no object with columns"),
        ("a.csv", b"text,n\nhello, there,1\n", "line 2: more fields than columns"),
        ("a.csv", b'text,n\nx,1\n"y\n', "can't be read as csv"),
        ("a.parquet", b"PAR1 and no more", "can't be read as parquet"),
        ("a.jsonl", b'{"body": "x", "n": 1}\n', "no column 'text'; set data.column to one of: body, n"),
        ("a.jsonl", b'{"text": 3}\n', "column 'text' holds int, not text"),
        ("a.jsonl", b'{"text": ["x"]}\n', "column 'text' holds list"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', "not text"),
    ],
)
def test_files_that_will_not_do(tmp_path, capfd, name, content, says):
    (tmp_path / name).write_bytes(content)
    assert says in error(tmp_path / name)
    assert capfd.readouterr() == ("", "")  # the libraries' own log lines stay away


def test_a_directory_without_files(tmp_path):
    (tmp_path / ".hidden").write_text("no")
    assert "no files" in error(tmp_path)


@pytest.mark.parametrize("path", ["no/such/place", "no_such.txt", "data/input.txt", "/no/such", "./nothing", "a b"])
def test_a_missing_path_is_not_asked_of_the_hub(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    assert error(path) == f"data path {path}: no such file or directory"


@pytest.mark.parametrize("path", ["nobody/nothing-v1.1", "nothing"])
def test_a_hub_failure_names_both_places(tmp_path, monkeypatch, capfd, path):
    monkeypatch.chdir(tmp_path)
    offline(monkeypatch)
    message = error(path)
    assert message.startswith(f"data path {path}: no such file or directory, and not to be had from the hub: ")
    assert capfd.readouterr() == ("", "")


def test_a_data_set_of_the_hub(monkeypatch):
    table = datasets.Dataset.from_dict({"story": ["one", None, "two", "three"], "n": [1, 2, 3, 4]})
    asked = []

    def load_dataset(path, *, split):  # the hub itself can't be part of a test
        asked.append((path, split))
        return table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("owner/stories", column="story", split="validation", max_documents=3) == ["one", "two"]
    assert asked == [("owner/stories", "validation")]
    assert "no column 'text'; set data.column to one of: story, n" in error("owner/stories")


def test_names_of_the_hub():
    assert all(map(is_hub_name, ["roneneldan/TinyStories", "bert-base-uncased", "a/b-v1.1", "gpt2"]))
    assert not any(
        map(is_hub_name, ["a/b.txt", "input.txt", "a/b/c", "/a", "./a", "../a", "~/a", "a b", "", "a/b.parquet"])
    )


@pytest.mark.parametrize(
    "field, value",
    [
        ("path", ""),
        ("column", ""),
        ("max_documents", 0),
        ("chunking", "lines"),
        ("valid_fraction", 0.0),
        ("valid_fraction", 1.0),
        ("valid_fraction", float("nan")),
        ("shuffle", False),
    ],
)
def test_impossible_settings(field, value):
    with pytest.raises(InputError, match=rf"data\.{field} is ") as caught:
        TextDataConfig(**{field: value})
    assert "\n" not in str(caught.value)


def test_a_trained_vocabulary_holds_all_bytes():
    with pytest.raises(InputError, match=r"data\.vocab_size is 255"):
        TextDataConfig(tokenizer="bpe", vocab_size=255)
    assert TextDataConfig(tokenizer="char", vocab_size=255).vocab_size == 255  # not read, so not refused
