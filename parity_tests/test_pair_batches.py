"""Pairs as ids, their buckets, and batches: shapes, coverage, order, and what is left out or refused."""

import itertools
from collections import Counter

import grain
import numpy as np
import pytest

from flax_tf.data.pair_batches import (
    example_batches,
    least_padding,
    make_buckets,
    steps_per_epoch,
    train_batches,
    valid_batches,
)
from flax_tf.data.pair_tokens import Pairs, SpecialIds, prepare_pairs
from flax_tf.data.pairs import PairDataConfig
from flax_tf.data.tokenizer import char_tokenizer
from flax_tf.errors import InputError

TRANSFORMER, RNN = SpecialIds(), SpecialIds(pad=0, start=0, end=1)


@pytest.fixture
def corpus(tmp_path):
    """211 distinct pairs of words with lengths of 1 to 40 characters, and 23 for validation."""
    rng = np.random.default_rng(7)

    def sentences(count):
        return ["".join(rng.choice(list("abcd é"), n)).strip() or "a" for n in rng.integers(1, 41, count)]

    files = {}
    for name, count in (("train", 211), ("valid", 23)):
        sides = zip(sentences(count), sentences(count), strict=True)
        pairs = [f"{i} {source}\t{target}" for i, (source, target) in enumerate(sides)]
        files[name] = tmp_path / f"{name}.tsv"
        files[name].write_text("\n".join(pairs), encoding="utf-8")
    return files


def data_of(files, tmp_path, special=TRANSFORMER, **fields):
    fields = {"tokenizer": "char", "max_length": 60, "tokens_per_batch": 300, **fields}
    config = PairDataConfig(source=str(files["train"]), valid_source=str(files["valid"]), **fields)
    return prepare_pairs(config, special, tmp_path / "cache"), config


def lines_of(file) -> list[tuple[str, str]]:
    return [tuple(line.split("\t")) for line in file.read_text(encoding="utf-8").splitlines()]


def decoded(data, batch) -> list[tuple[str, str]]:
    """The text of the rows, after a look at where the special ids are."""
    pad, start, end = data.train.special
    rows = []
    for source, target in zip(batch["source"].tolist(), batch["target"].tolist(), strict=True):
        length = target.index(end)
        assert target[0] == start
        assert target[length + 1 :] == [pad] * (len(target) - length - 1)
        body = target[1:length]
        assert not set(body) & {pad, start, end}
        tokens = list(itertools.takewhile(lambda number: number != pad, source))
        assert source[len(tokens) :] == [pad] * (len(source) - len(tokens))
        rows.append((data.source_tokenizer.decode(tokens), data.target_tokenizer.decode(body)))
    return rows


@pytest.mark.parametrize("special", [TRANSFORMER, RNN, SpecialIds(pad=2, start=1, end=0)])
@pytest.mark.parametrize("tokenizer", ["char", "bpe", "bpe-separate"])
def test_an_epoch_is_every_pair(corpus, tmp_path, special, tokenizer):
    data, config = data_of(corpus, tmp_path, special, tokenizer=tokenizer, vocab_size=300)
    buckets = make_buckets(data, config, batch_size=5)["train"]
    steps = steps_per_epoch(buckets)
    batches = train_batches(data.train, buckets, seed=3)
    epochs = []
    for epoch in range(2):
        elements = [batches[epoch * steps + k] for k in range(steps)]
        for batch in elements:
            assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
        rows = [row for batch in elements for row in decoded(data, batch)]
        counts = Counter(rows)
        assert set(counts) == set(lines_of(corpus["train"]))
        assert len(rows) - len(counts) == sum(-len(bucket.pairs) % bucket.batch_size for bucket in buckets)
        epochs.append(rows)
    assert epochs[0] != epochs[1]
    assert data.train.text() == lines_of(corpus["train"])
    names = {special.pad: "<pad>", special.end: "</s>"}
    assert {number: data.target_tokenizer.id_to_token(number) for number in names} == names


def test_vocabularies_of_one_or_two_sides(tmp_path):
    (tmp_path / "a.tsv").write_text("abc ab abc\txyz xy xyz\n" * 3)
    files = {"train": tmp_path / "a.tsv", "valid": tmp_path / "a.tsv"}
    joint, _ = data_of(files, tmp_path, tokenizer="bpe", vocab_size=270)
    assert joint.source_tokenizer.to_str() == joint.target_tokenizer.to_str()
    assert {"Ġabc", "Ġxyz"} <= joint.source_tokenizer.get_vocab().keys()
    assert joint.source_tokenizer.encode("abc abc").ids[0] == joint.source_tokenizer.encode("ab abc").ids[-1]
    apart, _ = data_of(files, tmp_path, tokenizer="bpe-separate", vocab_size=270)
    assert "Ġxyz" not in apart.source_tokenizer.get_vocab()
    assert "Ġabc" not in apart.target_tokenizer.get_vocab()
    characters, _ = data_of(files, tmp_path)
    assert (characters.source_vocab_size, characters.target_vocab_size) == (3 + 4, 3 + 4)
    assert "x" not in characters.source_tokenizer.get_vocab()


@pytest.mark.parametrize("devices", [1, 3])
def test_shapes_are_few_and_full(corpus, tmp_path, devices):
    data, config = data_of(corpus, tmp_path)
    buckets = make_buckets(data, config, batch_size=5, devices=devices)["train"]
    assert 1 < len(buckets) <= 4
    assert sorted(np.concatenate([bucket.pairs for bucket in buckets])) == list(range(len(data.train)))
    for bucket in buckets:
        B, S, T = bucket.shape
        assert B % devices == 0
        # One more multiple of the devices would be more tokens than asked for.
        longest = np.maximum(data.train.source_lengths, data.train.target_lengths)[bucket.pairs].max()
        assert B * longest <= 300 < (B + devices) * longest
        assert longest <= max(S, T)
    batches = train_batches(data.train, buckets, seed=0)
    seen = {(*batches[k]["source"].shape, batches[k]["target"].shape[1] - 1) for k in range(steps_per_epoch(buckets))}
    assert seen == {bucket.shape for bucket in buckets}


def test_held_out_pairs_take_no_shape_of_their_own(tmp_path):
    """Even where they are longer than all training pairs."""
    lengths = {"train": [(3, 1), (5, 2), (11, 7), (12, 13), (2, 3)], "valid": [(17, 3), (2, 19), (4, 2), (6, 11)]}
    files = {name: tmp_path / f"{name}.tsv" for name in lengths}
    for name, file in files.items():
        file.write_text("".join(f"{'a' * source}\t{'b' * (target - 1) or 'b'}\n" for source, target in lengths[name]))
    data, config = data_of(files, tmp_path, buckets=2, tokens_per_batch=60)
    buckets = make_buckets(data, config, batch_size=5)
    short, long = buckets["train"]
    assert [bucket.shape for bucket in buckets["valid"]] == [short.shape, long.shape]
    assert (short.source_length, short.target_length) == (5, 3)
    assert (long.source_length, long.target_length) == (17, 19)
    assert [bucket.pairs.tolist() for bucket in buckets["valid"]] == [[2], [0, 1, 3]]
    for batch in valid_batches(data.valid, buckets["valid"]):
        decoded(data, {name: batch[name][batch["pair"] >= 0] for name in ("source", "target")})


def test_the_examples_have_every_shape_of_the_training_batches(corpus, tmp_path):
    data, config = data_of(corpus, tmp_path)
    buckets = make_buckets(data, config, batch_size=5)["train"]
    batches = train_batches(data.train, buckets, seed=0)
    shapes = [tuple(array.shape for array in batch.values()) for batch in example_batches(data.train, buckets)]
    steps = range(2 * steps_per_epoch(buckets))
    assert {tuple(array.shape for array in batches[k].values()) for k in steps} == set(shapes)
    assert len(shapes) == len(buckets)


def test_a_fixed_batch_size_is_one_shape(corpus, tmp_path):
    data, config = data_of(corpus, tmp_path, tokens_per_batch=None)
    (bucket,) = make_buckets(data, config, batch_size=13)["train"]
    longest = [max(len(pair[side]) for pair in lines_of(corpus["train"])) for side in (0, 1)]
    assert bucket.shape == (13, longest[0], longest[1] + 1)
    assert steps_per_epoch([bucket]) == 17  # 211 / 13, rounded up
    batch = train_batches(data.train, [bucket], seed=1)[40]
    assert (batch["source"].shape, batch["target"].shape) == ((13, longest[0]), (13, longest[1] + 2))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_the_bounds_have_the_least_padding(count):
    rng = np.random.default_rng(count)
    for _ in range(5):
        lengths = rng.choice([1, 2, 3, 5, 8, 13, 21], 50, p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05])

        def padded(bounds, lengths=lengths):
            return sum(min(bound for bound in bounds if bound >= length) for length in lengths)

        top, distinct = lengths.max(), sorted(set(lengths.tolist()))
        choices = itertools.chain.from_iterable(itertools.combinations(distinct, n) for n in range(1, count + 1))
        bounds = least_padding(lengths, count)
        assert bounds == sorted(set(bounds))
        assert len(bounds) <= count
        assert padded(bounds) == min(padded(choice) for choice in choices if choice[-1] == top)


def test_a_batch_depends_on_the_seed_and_the_step_alone(corpus, tmp_path):
    data, config = data_of(corpus, tmp_path)
    buckets = make_buckets(data, config, batch_size=5)["train"]

    def run(seed):
        return train_batches(data.train, buckets, seed)

    first = [decoded(data, run(5)[k]) for k in range(60)]
    assert 2 * steps_per_epoch(buckets) < 60
    again = run(5)
    for k in (59, 3, 0, 31, 3):  # any order, as after a resume
        assert decoded(data, again[k]) == first[k]
    assert [decoded(data, run(6)[k]) for k in range(60)] != first
    assert decoded(data, again[10**9]) == decoded(data, run(5)[10**9])
    ahead = run(5).slice(slice(3, 50)).to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
    assert [decoded(data, batch) for batch in ahead] == first[3:50]
    for seed in (-1, 1 << 32):
        with pytest.raises(InputError, match="seed is"):
            run(seed)


@pytest.mark.parametrize("tokens", [None, 100])
def test_validation_is_every_pair_once(corpus, tmp_path, tokens):
    data, config = data_of(corpus, tmp_path, tokens_per_batch=tokens)
    buckets = make_buckets(data, config, batch_size=5)["valid"]
    seen = {}
    filled = 0
    for batch in valid_batches(data.valid, buckets):
        real = batch["pair"] >= 0
        assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
        rows = decoded(data, {name: batch[name][real] for name in ("source", "target")})
        seen |= dict(zip(batch["pair"][real].tolist(), rows, strict=True))
        assert (batch["target"][~real] == TRANSFORMER.pad).all()
        assert (batch["source"][~real, 0] != TRANSFORMER.pad).all()  # attention has something to look at
        filled += int((~real).sum())
    assert [seen[i] for i in range(len(seen))] == lines_of(corpus["valid"]) == data.valid.text()
    assert filled == sum(-len(bucket.pairs) % bucket.batch_size for bucket in buckets)
    assert filled


def test_a_second_start_reads_no_text(corpus, tmp_path, monkeypatch):
    for tokenizer, entries in (("bpe", 4), ("bpe-separate", 8), ("char", 12)):
        first, _ = data_of(corpus, tmp_path, tokenizer=tokenizer, vocab_size=300)
        assert len(list((tmp_path / "cache").glob("tokens-*/tokens.bin"))) == entries
        with monkeypatch.context() as patched:
            patched.setattr("flax_tf.data.pairs._read_tsv", lambda file: pytest.fail("the text is read again"))
            second, _ = data_of(corpus, tmp_path, tokenizer=tokenizer, vocab_size=300)
        for one, other in ((first.train, second.train), (first.valid, second.valid)):
            assert isinstance(other.source.tokens, np.memmap)
            assert np.array_equal(one.source.tokens, other.source.tokens)
            assert np.array_equal(one.target.tokens, other.target.tokens)
        assert first.target_tokenizer.to_str() == second.target_tokenizer.to_str()
    data_of(corpus, tmp_path, special=RNN)
    assert len(list((tmp_path / "cache").glob("tokens-*/tokens.bin"))) == 16


@pytest.mark.parametrize("tokenizer", ["bpe", "char", "own"])
def test_lower_case_goes_with_the_tokenizer(tmp_path, tokenizer):
    file = tmp_path / "a.tsv"
    file.write_text("ABC abc\tXyz\nabc aBC\txyz\n")
    if tokenizer == "own":
        tokenizer = str(tmp_path / "tokenizer.json")
        char_tokenizer(["abcxyz "], ["<pad>", "<s>", "</s>"]).save(tokenizer)
    data, _ = data_of({"train": file, "valid": file}, tmp_path, tokenizer=tokenizer, vocab_size=270, lower=True)
    assert data.train.text() == [("abc abc", "xyz")] * 2
    for text in ("ABC", "abc"):
        assert data.source_tokenizer.decode(data.source_tokenizer.encode(text).ids) == "abc"
    assert data.target_tokenizer.decode(data.target_tokenizer.encode("XYZ").ids) == "xyz"


def test_pairs_left_out_are_counted(tmp_path, caplog):
    file = tmp_path / "a.tsv"
    file.write_text("abcde\tabcd\n\nabcdef\ta\na\tabcde\n\tb\na\t \nab\tba\n")
    data, _ = data_of({"train": file, "valid": file}, tmp_path, max_length=5)
    assert data.train.text() == [("abcde", "abcd"), ("ab", "ba")]  # 5 tokens, and 4 with the end token, are allowed
    assert data.train.lines.tolist() == [0, 6]
    assert (data.train.empty, data.train.too_long) == (3, 2)
    says = "left out of 7 pairs: 3 with an empty side, 2 longer than 5 tokens (data.max_length)"
    assert [record.getMessage() for record in caplog.records] == [f"{file}: {says}"] * 2


def refused(files, tmp_path, *args, **fields) -> str:
    with pytest.raises(InputError) as caught:
        data_of(files, tmp_path, *args, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_pairs_left(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text("abc\tabc\nabcd\ta\n")
    message = refused({"train": file, "valid": file}, tmp_path, max_length=2)
    assert "no pairs left; left out of 2 pairs: 0 with an empty side, 2 longer than 2 tokens" in message


def test_special_ids_that_stand_for_text(corpus, tmp_path):
    char_tokenizer(["0123456789 abcdé"]).save(str(tmp_path / "tokenizer.json"))  # " " is its id 0
    message = refused(corpus, tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))
    assert "the text of pair 1 has token id 1 ('0'), which is model.start_id" in message  # "0" begins the first pair
    file = tmp_path / "a.tsv"
    file.write_text("one\teins\ntwo\tzwei </s>\n")
    message = refused({"train": file, "valid": file}, tmp_path, tokenizer="bpe")
    assert f"{file}: the text of pair 2 has token id 2 ('</s>'), which is model.end_id" in message
    # With free ids the same tokenizer will do.
    data, _ = data_of(corpus, tmp_path, SpecialIds(20, 21, 22), tokenizer=str(tmp_path / "tokenizer.json"))
    assert isinstance(data.train, Pairs)
    assert data.train.target.max_id < 20


def test_special_ids_with_gaps(corpus, tmp_path):
    message = refused(corpus, tmp_path, SpecialIds(0, 1, 3))
    assert "model.pad_id, start_id and end_id are 0, 1 and 3" in message


def test_a_tokenizer_of_characters_that_misses_some(corpus, tmp_path):
    char_tokenizer(["0123456789 abcd"], ["<pad>", "<s>", "</s>"]).save(str(tmp_path / "tokenizer.json"))
    assert "doesn't know 'é' (U+00E9)" in refused(corpus, tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))
