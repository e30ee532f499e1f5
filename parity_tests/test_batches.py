"""Windows, batches, their order, and the cache of tokens."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grain
import numpy as np
import pytest

from flax_tf.data.batches import check_ids, prepare, steps_per_epoch, train_batches, valid_batches
from flax_tf.data.cache import cached
from flax_tf.data.config import TextDataConfig
from flax_tf.data.tokenizer import bpe_tokenizer, char_tokenizer
from flax_tf.errors import InputError
from flax_tf.files import cache_directory

T, BATCH = 7, 5


@pytest.fixture
def stories(tmp_path) -> tuple[Path, list[str]]:
    """A file of documents whose lengths are shorter than, equal to and between multiples of T + 1."""
    rng = np.random.default_rng(3)
    lengths = [3, 8, 16, 17, 31, 1, 80, 7, 9, *rng.integers(1, 60, 41).tolist()]
    texts = ["".join(rng.choice(list("abcdefgh ,.\n"), n - 1)) + "x" for n in lengths]
    file = tmp_path / "stories.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file, texts


def data_of(file, tmp_path, seq_length=T, **fields):
    return prepare(TextDataConfig(path=str(file), **fields), seq_length, tmp_path / "cache")


def written(tmp_path, text: str) -> Path:
    (tmp_path / "text.txt").write_text(text)
    return tmp_path / "text.txt"


def letters(count: int) -> str:
    """`count` characters, no eight of which follow each other in two places: a window tells where it is from."""
    return "".join(chr(0x4E00 + i) for i in range(count))


def chunked(texts, tokenizer, seq_length) -> list[tuple[list[int], list[int]]]:
    """The reference's chunking, in plain Python: windows of T + 1, inputs and labels shifted by one, no short rests."""
    pairs = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        while len(ids) >= seq_length + 1:
            window, ids = ids[: seq_length + 1], ids[seq_length + 1 :]
            pairs.append((window[:-1], window[1:]))
    return pairs


def pairs_of(batch) -> list[tuple[list[int], list[int]]]:
    return list(zip(batch["inputs"].tolist(), batch["labels"].tolist(), strict=True))


@pytest.mark.parametrize("kind", ["char", "bpe", "saved"])
def test_windows_are_the_references(stories, tmp_path, kind):
    file, texts = stories
    if kind == "saved":
        bpe_tokenizer(texts, 300).save(str(tmp_path / "tokenizer.json"))
    named = {"char": "char", "bpe": "bpe", "saved": str(tmp_path / "tokenizer.json")}[kind]
    tokenizer = char_tokenizer(texts) if kind == "char" else bpe_tokenizer(texts, 300)
    data = data_of(
        file, tmp_path, tokenizer=named, vocab_size=300, chunking="windows", shuffle=False, valid_fraction=0.2
    )
    expected = chunked(texts, tokenizer, T)
    train = int(len(expected) * 0.8)
    assert len(expected) > 3 * BATCH

    steps = steps_per_epoch(data, BATCH)
    assert steps == -(-train // BATCH)
    batches = train_batches(data, BATCH, seed=1)
    seen = [pair for k in range(steps) for pair in pairs_of(batches[k])]
    assert seen == (expected[:train] * 2)[: len(seen)]  # in the documents' order; the next epoch fills the last batch

    held_out = [
        pair
        for batch in valid_batches(data, BATCH)
        for pair, weights in zip(pairs_of(batch), batch["weights"], strict=True)
        if weights.all()
    ]
    assert held_out == expected[train:]
    assert data.train_tokens == train * T
    assert data.valid_tokens == (len(expected) - train) * T
    assert sum(batch["weights"].sum() for batch in valid_batches(data, BATCH)) == data.valid_tokens


def test_every_epoch_takes_every_window_once_in_an_order_of_its_own(stories, tmp_path):
    data = data_of(stories[0], tmp_path, chunking="windows", valid_fraction=0.1)
    windows = len(data.train_starts)
    batches = train_batches(data, BATCH, seed=11)
    pairs = [pair for k in range(3 * windows // BATCH + 1) for pair in pairs_of(batches[k])]
    epochs = [pairs[i * windows : (i + 1) * windows] for i in range(3)]
    counts = [Counter(map(str, epoch)) for epoch in epochs]
    expected = Counter(str(pair) for pair in chunked(stories[1], data.tokenizer, T)[:windows])
    assert counts == [expected] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    # Neighbouring seeds don't share an order one epoch apart (the shuffle alone would use seed + epoch).
    other = train_batches(data, windows, seed=10)
    assert pairs_of(other[1]) != epochs[0]


@pytest.mark.parametrize("chunking", ["stream", "windows"])
def test_a_batch_depends_on_the_seed_and_the_step_alone(stories, tmp_path, chunking):
    data = data_of(stories[0], tmp_path, chunking=chunking)
    run = train_batches(data, BATCH, seed=5)
    first = [run[k] for k in range(23)]
    again = train_batches(data_of(stories[0], tmp_path, chunking=chunking), BATCH, seed=5)
    for k in (22, 3, 0, 17, 3):  # any order, as after a resume
        assert pairs_of(again[k]) == pairs_of(first[k])
    assert len({str(batch) for batch in first}) == 23
    assert pairs_of(train_batches(data, BATCH, seed=6)[0]) != pairs_of(first[0])
    assert pairs_of(run[10**9]) == pairs_of(again[10**9])
    for batch in first:
        assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
            "inputs": ((BATCH, T), np.int32),
            "labels": ((BATCH, T), np.int32),
        }
    # Iterating, as a training loop does it with read-ahead, gives what indexing gives.
    ahead = run.slice(slice(3, 9)).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    assert [pairs_of(batch) for batch in ahead] == [pairs_of(batch) for batch in first[3:9]]


def test_stream_windows_start_anywhere_in_the_training_part(tmp_path):
    data = data_of(written(tmp_path, letters(50)), tmp_path, valid_fraction=0.4)
    assert data.vocab_size == 50
    starts = Counter()
    batches = train_batches(data, 61, seed=2)
    for k in range(100):
        batch = batches[k]
        assert (batch["inputs"] == batch["inputs"][:, :1] + np.arange(T)).all()
        assert (batch["labels"] == batch["inputs"] + 1).all()
        starts.update(batch["inputs"][:, 0].tolist())
    # 30 training tokens: 23 starts, the last with token 29 as its last label. 6,100 draws: each start is expected
    # 265 times with a deviation of 16, so 5 deviations either side fail a right sampler once in 10^5 or so.
    assert sorted(starts) == list(range(23))
    assert all(abs(count - 6100 / 23) < 5 * 16 for count in starts.values())


@pytest.mark.parametrize("characters", [50, 51, 56, 57, 120])
def test_validation_covers_the_held_out_stream_once(tmp_path, characters):
    data = data_of(written(tmp_path, letters(characters)), tmp_path, valid_fraction=0.4)
    train = int(characters * 0.6)
    labels = []
    batches = valid_batches(data, 3)
    for batch in batches:
        assert batch["inputs"].shape == batch["labels"].shape == batch["weights"].shape == (3, T)
        assert batch["weights"].dtype == np.float32
        counted = batch["weights"] == 1
        assert (counted | (batch["weights"] == 0)).all()
        assert (batch["labels"][counted] == batch["inputs"][counted] + 1).all()
        assert batch["labels"].max() < characters  # padding has ids that exist, too
        labels += batch["labels"][counted].tolist()
    assert labels == list(
        range(train + 1, characters)
    )  # each held-out token but the first is predicted, once, in order
    assert data.valid_tokens == len(labels)
    assert data.train_tokens == train - 1
    assert [pairs_of(batch) for batch in batches] == [pairs_of(batch) for batch in valid_batches(data, 3)]


def test_a_stream_joins_documents_by_a_blank_line(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("first document")
    (tmp_path / "in" / "b.txt").write_text("second document")
    joined = data_of(tmp_path / "in", tmp_path, 1)
    assert joined.tokenizer.decode(joined.tokens.tolist()) == "first document\n\nsecond document"
    apart = data_of(tmp_path / "in", tmp_path, 1, chunking="windows")
    assert apart.tokenizer.decode(apart.tokens.tolist()) == "first documentsecond document"
    assert apart.vocab_size == joined.vocab_size - 1  # no newline


def test_ids_past_two_bytes(tmp_path):
    text = "".join(map(chr, range(0x10000, 0x10000 + 65_537)))
    data = data_of(written(tmp_path, text), tmp_path)
    assert (data.tokens.dtype, data.max_id, data.vocab_size) == (np.uint32, 65_536, 65_537)
    assert data.tokens.tolist() == list(range(65_537))
    small = data_of(written(tmp_path, text[:-1]), tmp_path)
    assert (small.tokens.dtype, small.max_id) == (np.uint16, 65_535)
    assert small.tokens.tolist() == list(range(65_536))


def entry_files(tmp_path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("tokens-*/*")}


def test_a_second_start_maps_what_the_first_wrote(stories, tmp_path):
    first = data_of(stories[0], tmp_path)
    files = entry_files(tmp_path)
    assert {file.name for file in files} == {"tokens.bin", "ends.npy", "tokenizer.json", "entry.json"}
    moved = tmp_path / "moved.jsonl"
    stories[0].rename(moved)
    second = data_of(moved, tmp_path, seq_length=3, valid_fraction=0.3)  # the same text: found by content
    assert entry_files(tmp_path) == files
    assert isinstance(second.tokens, np.memmap)
    assert np.array_equal(first.tokens, second.tokens)
    assert first.tokenizer.to_str() == second.tokenizer.to_str()
    data_of(moved, tmp_path, tokenizer="bpe", vocab_size=300)
    moved.write_text(moved.read_text() + '{"text": "more"}\n')
    data_of(moved, tmp_path)
    assert len(entry_files(tmp_path)) == 3 * len(files)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["tokens.bin", "ends.npy", "tokenizer.json", "entry.json"])
@pytest.mark.parametrize("damage", [flip, lambda file: os.truncate(file, file.stat().st_size // 2), Path.unlink])
def test_a_damaged_entry_is_made_anew(stories, tmp_path, name, damage):
    before = np.array(data_of(stories[0], tmp_path).tokens)
    (victim,) = (tmp_path / "cache").glob(f"tokens-*/{name}")
    damage(victim)
    after = data_of(stories[0], tmp_path)
    assert np.array_equal(after.tokens, before)
    files = entry_files(tmp_path)
    data_of(stories[0], tmp_path)
    assert entry_files(tmp_path) == files  # the new entry is whole


def test_processes_that_start_together_all_succeed(tmp_path):
    program = (
        "import sys, hashlib\n"
        "from flax_tf.data.batches import prepare\n"
        "from flax_tf.data.config import TextDataConfig\n"
        "data = prepare(TextDataConfig(tokenizer='bpe', vocab_size=300), 8, sys.argv[1])\n"
        "print(len(data.tokens), hashlib.sha256(data.tokens).hexdigest())"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cache")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert len(list((tmp_path / "cache").glob("tokens-*/tokens.bin"))) == 1
    assert not list((tmp_path / "cache").glob(".*"))  # nothing half-written is left


def test_whoever_comes_while_an_entry_is_made_waits_for_it(tmp_path):
    making, built = threading.Event(), []

    def build():
        built.append(1)
        making.set()
        time.sleep(0.5)
        return char_tokenizer(["abc"]), ["abc"]

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(cached, tmp_path, ["the same"], build)
        assert making.wait(60)
        others = [pool.submit(cached, tmp_path, ["the same"], build) for _ in range(3)]
        assert [run.result().tokens.tolist() for run in (first, *others)] == [[0, 1, 2]] * 4
    assert built == [1]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.delenv("FLAX_TF_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == Path("/home/user/.cache/flax_tf")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/flax_tf")
    monkeypatch.setenv("FLAX_TF_CACHE", str(tmp_path / "own"))
    prepare(TextDataConfig(path=str(written(tmp_path, letters(200)))), T)
    assert list((tmp_path / "own").glob("tokens-*/tokens.bin"))


def refused(tmp_path, file, seq_length=T, **fields) -> str:
    with pytest.raises(InputError) as caught:
        data_of(file, tmp_path, seq_length, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "cache").write_text("a file is in the way")
    assert "set FLAX_TF_CACHE" in refused(tmp_path, written(tmp_path, letters(200)))


def test_text_shorter_than_a_window(tmp_path, stories):
    file = written(tmp_path, letters(100))
    message = refused(tmp_path, file, 90)
    assert "90 of its 100 tokens are for training, and a window takes 91" in message
    assert "model.max_seq_length" in message
    assert "10 of its 100 tokens are for validation, and a window takes 11" in refused(tmp_path, file, 10)
    assert data_of(file, tmp_path, 9).valid_tokens == 9  # just enough
    message = refused(tmp_path, stories[0], 80, chunking="windows")
    assert "50 documents (the longest has 80 tokens) make 0 windows of 81 tokens" in message
    assert "1 windows of 80 tokens" in refused(tmp_path, stories[0], 79, chunking="windows", valid_fraction=0.5)


def test_nothing_is_left_of_a_text_that_fails(tmp_path):
    assert "no text" in refused(tmp_path, written(tmp_path, ""))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n' * 3 + "{broken")
    assert "can't be read as jsonl" in refused(tmp_path, bad)
    assert not list((tmp_path / "cache").glob("tokens-*/*"))
    assert not list((tmp_path / "cache").glob(".*"))


def test_a_saved_tokenizer_of_characters_that_misses_some(tmp_path):
    char_tokenizer(["abc"]).save(str(tmp_path / "tokenizer.json"))
    message = refused(tmp_path, written(tmp_path, "abcq"), tokenizer=str(tmp_path / "tokenizer.json"))
    assert "'q' (U+0071)" in message


def test_rows_left_out_are_reported(tmp_path, caplog):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": letters(200)}) + '\n{"text": null}\n{"text": ""}\n')
    data_of(file, tmp_path, tokenizer="bpe")
    assert [record.getMessage() for record in caplog.records] == [f"{file}: left out 2 rows that have no text"]


def test_ids_outside_the_vocabulary():
    check_ids(30, 31)
    with pytest.raises(InputError, match="token id 31 is outside the model's vocabulary of 31"):
        check_ids(31, 31)


def test_seeds_outside_the_range(stories, tmp_path):
    data = data_of(stories[0], tmp_path)
    for seed in (-1, 1 << 32):
        with pytest.raises(InputError, match=f"seed is {seed}"):
            train_batches(data, BATCH, seed)
    assert train_batches(data, BATCH, (1 << 32) - 1)[0]["inputs"].shape == (BATCH, T)
