"""Reading pairs: every kind of file, how they are split, and what is refused."""

import gzip
import json
import socket

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flax_tf.data.dates import date_pairs
from flax_tf.data.pairs import PairDataConfig, load_pairs
from flax_tf.errors import InputError

PAIRS = [("Ein Hund läuft.", "A dog runs."), ("Zwei", "Two NA"), ("世界", "NA")]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    asked = []

    def refuse(*args):
        asked.append(args)
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    assert not asked


def read(source, target=None, **fields) -> dict[str, list[tuple[str, str]]]:
    config = PairDataConfig(source=str(source), target=target and str(target), **fields)
    return {split: list(texts) for split, texts in load_pairs(config).items()}


def everything(*args, **fields) -> set[tuple[str, str]]:
    """The pairs of both splits, of a file with no pair twice."""
    splits = load_pairs(PairDataConfig(source=str(args[0]), target=args[1] if args[1:] else None, **fields))
    return {pair for texts in splits.values() for pair in texts.pairs()}


def refused(source, target=None, **fields) -> str:
    with pytest.raises(InputError) as caught:
        read(source, target, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def text(path, lines, end="\n"):
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_two_text_files(tmp_path, end):
    source = text(tmp_path / "a.de", ["\ufeffein\u2028s ", "", "zwei\x0bb", " drei"], end)
    target = text(tmp_path / "a.en", ["one", "empty", "two", "three"], end)
    pairs = [("ein\u2028s", "one"), ("", "empty"), ("zwei\x0bb", "two"), ("drei", "three")]
    assert read(source, target, valid_source=str(source), valid_target=str(target)) == {"train": pairs, "valid": pairs}


def test_packed_files_and_a_test_split(tmp_path):
    source, target = tmp_path / "a.de.gz", tmp_path / "a.en.gz"
    source.write_bytes(gzip.compress("Über\nzwei\n".encode()))
    target.write_bytes(gzip.compress(b"Over\ntwo"))  # the last line has no end
    tsv = tmp_path / "b.tsv.gz"
    tsv.write_bytes(gzip.compress(b"Eins\tOne\n"))
    splits = read(source, target, valid_source=str(tsv), test_source=str(source), test_target=str(target), lower=True)
    both = [("über", "over"), ("zwei", "two")]
    assert splits == {"train": both, "valid": [("eins", "one")], "test": both}


@pytest.mark.parametrize("name", ["a.tsv", "a.jsonl", "a.json", "a.csv", "a.parquet", "A.TSV"])
def test_one_file_with_both_sides(tmp_path, name):
    file = tmp_path / name
    rows = [{"n": i, "de": source, "en": target} for i, (source, target) in enumerate(PAIRS)]
    match file.suffix.lower():
        case ".tsv":
            text(file, [f"{source}\t{target}\tmore" for source, target in PAIRS])
        case ".csv":
            text(file, ["n,de,en", *(f'{row["n"]},"{row["de"]}",{row["en"]}' for row in rows)])
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        case ".json":
            file.write_text(json.dumps(rows))
        case _:
            text(file, map(json.dumps, rows))
    assert everything(file, source_column="de", target_column="en") == set(PAIRS)


def test_nested_columns_and_nulls(tmp_path):
    file = tmp_path / "a.jsonl"
    rows = [{"translation": {"de": source, "en": target}} for source, target in [*PAIRS, ("allein", None)]]
    text(file, map(json.dumps, rows))
    columns = {"source_column": "translation.en", "target_column": "translation.de"}
    assert everything(file, **columns) == {(target or "", source) for source, target in [*PAIRS, ("allein", None)]}
    assert "set data.source_column to one of: translation.de, translation.en" in refused(file)


def test_a_data_set_of_the_hub(monkeypatch):
    asked = []

    def load_dataset(path, *, split):  # the hub itself can't be part of a test
        asked.append((path, split))
        return datasets.Dataset.from_dict({"de": [f"{split} eins"], "en": ["one"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    name = "owner/pairs"
    splits = read(name, valid_source=name, test_source=name, source_column="de", target_column="en", test_split="t")
    assert splits == {
        "train": [("train eins", "one")],
        "valid": [("validation eins", "one")],
        "test": [("t eins", "one")],
    }
    assert asked == [(name, "train"), (name, "validation"), (name, "t")]


def test_held_out_by_the_source_sentence(tmp_path):
    pairs = [(f"satz {i % 700}", f"sentence {i}") for i in range(1000)]  # 300 sentences have two translations
    splits = read(text(tmp_path / "a.tsv", ["\t".join(pair) for pair in pairs]), valid_fraction=0.2)
    assert sorted(splits["train"] + splits["valid"]) == sorted(pairs)
    sources = {split: {source for source, _ in part} for split, part in splits.items()}
    assert not sources["train"] & sources["valid"]
    # 140 of 700 with a deviation of sqrt(700 * 0.2 * 0.8) = 10.6: 5 of them either side.
    assert 140 - 53 < len(sources["valid"]) < 140 + 53
    # The order and what else is there change nothing.
    moved = read(text(tmp_path / "b.tsv", ["\t".join(pair) for pair in pairs[:99:-1]]), valid_fraction=0.2)
    assert set(moved["valid"]) == set(splits["valid"]) & set(pairs[100:])
    # A greater share holds out the same and more.
    more = read(tmp_path / "a.tsv", valid_fraction=0.4)
    assert set(splits["valid"]) < set(more["valid"])


def test_the_dates_are_built_in():
    splits = load_pairs(PairDataConfig())
    assert tuple(splits["test"]) == date_pairs("test")
    assert list(splits) == ["train", "valid", "test"]
    assert len({texts.fingerprint for texts in splits.values()}) == 3
    lower = load_pairs(PairDataConfig(lower=True))["test"]
    assert next(iter(lower))[0] == date_pairs("test")[0][0].lower()


def test_the_fingerprint_follows_content_and_settings(tmp_path):
    a, b = text(tmp_path / "a.txt", ["x", "y"]), text(tmp_path / "b.txt", ["1", "2"])
    c = text(tmp_path / "c.txt", ["x", "y"])
    table = text(tmp_path / "t.jsonl", ['{"source": "x", "target": "y", "n": "z"}'])

    def fingerprints(source, target=None, **fields):
        config = PairDataConfig(source=str(source), target=target and str(target), **fields)
        return {texts.fingerprint for texts in load_pairs(config).values()}

    assert fingerprints(a, b) == fingerprints(c, b)
    distinct = [
        fingerprints(a, b),
        fingerprints(b, a),
        fingerprints(a, b, lower=True),
        fingerprints(a, b, valid_fraction=0.5),
        fingerprints(table),
        fingerprints(table, target_column="n"),
    ]
    assert len(set().union(*distinct)) == 2 * len(distinct)


def test_sides_of_unequal_length(tmp_path):
    a, b = text(tmp_path / "a.txt", "xyz"), text(tmp_path / "b.txt", "12")
    assert f"{a} has 3 lines and {b} has 2: line i of one" in refused(a, b)
    assert f"{b} has 2 lines and {a} has 3: line i of one" in refused(b, a)


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("a.txt", b"one side\n", "text of one side only; give the file of its translations"),
        ("a.de.gz", gzip.compress(b"one side\n", mtime=0), "text of one side only"),
        ("a.tsv", b"x\ty\n\nalone\n", "line 3 has no tab between a source and a target"),
        ("a.tsv", b"x\t\n \ty\n", "no pairs in it"),
        ("a.tsv", b"", "no pairs in it"),
        ("a.tsv", b"x\ty\ncaf\xe9\tz\n", "not UTF-8 text (line 2)"),
        ("a.tsv.gz", b"not packed", "can't be read: Not a gzipped file"),
        ("a.tsv.gz", gzip.compress(b"x\ty\n" * 99, mtime=0)[:-12], "can't be read: "),
        ("a.jsonl", b'{"source": "x"}\n', "no column 'target'; set data.target_column to one of: source"),
        ("a.jsonl", b'{"target": "x"}\n', "no column 'source'; set data.source_column to one of: target"),
        ("a.jsonl", b'{"source": "x", "target": 3}\n', "column 'target' holds int, not text; set data.target_column"),
        ("a.jsonl", b'{"source": "x", "target": null}\n', "no pairs in it"),
        ("a.jsonl", b"{broken", "can't be read as jsonl"),
        ("a.jsonl.gz", b"", "unpack it"),
    ],
)
def test_files_that_will_not_do(tmp_path, capfd, name, content, says):
    (tmp_path / name).write_bytes(content)
    message = refused(tmp_path / name, valid_source=str(tmp_path / name))
    assert says in message
    assert str(tmp_path / name) in message
    assert capfd.readouterr() == ("", "")


def test_files_that_do_not_go_together(tmp_path):
    lines, table = text(tmp_path / "a.txt", "x"), text(tmp_path / "a.jsonl", ['{"source": "x", "target": "y"}'])
    assert "has both sides" in refused(table, lines)
    assert f"data path {tmp_path}/no.txt: no such file" in refused(lines, tmp_path / "no.txt")
    assert f"data path {tmp_path}/no.txt: no such file" in refused(tmp_path / "no.txt")
    assert "no such file" in refused("owner/pairs", lines)  # a data set of the hub has both sides
    assert "a directory" in refused(tmp_path)
    tsv = text(tmp_path / "one.tsv", ["x\ty"])
    assert "(the share 1e-09 for validation): no pairs in it" in refused(tsv, valid_fraction=1e-9)


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"target": "b.txt"}, "data.target is b.txt, but data.source is the built-in dates"),
        ({"valid_source": "b.txt"}, "data.valid_source is b.txt, but data.source"),
        ({"source": "a", "target": ""}, "data.target is empty"),
        ({"source": ""}, "data.source is empty"),
        ({"source": "a", "test_target": "b"}, "data.test_target is set without data.test_source"),
        ({"source_column": "x", "target_column": "x"}, "are both x"),
        ({"valid_fraction": 1.0}, "data.valid_fraction is 1.0"),
        ({"valid_fraction": float("nan")}, "data.valid_fraction is nan"),
        ({"tokenizer": "bpe-separate", "vocab_size": 258}, "data.vocab_size is 258"),
        ({"max_length": 1}, "data.max_length is 1"),
        ({"buckets": 0}, "data.buckets is 0"),
        ({"tokens_per_batch": 0}, "data.tokens_per_batch is 0"),
    ],
)
def test_impossible_settings(fields, says):
    with pytest.raises(InputError) as caught:
        PairDataConfig(**fields)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
