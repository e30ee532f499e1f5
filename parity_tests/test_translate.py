"""Lines in, translations out: the function and `flax-tf generate` with its sources, and every wrong input."""

import dataclasses
import gzip
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from directories import listing
from models import LANGUAGE_MODEL, reference, twin
from tokenizers import Tokenizer, models
from translators import ATTENTION, PLAIN, SOURCE, SPECIAL, TARGET, TRANSFORMER, saved, translator
from twins import float64 as float64

import flax_tf
from flax_tf import decoding
from flax_tf.cli import main
from flax_tf.data.tokenizer import bpe_tokenizer, char_tokenizer, encode, vocabulary_size
from flax_tf.decoding import beam_search, greedy_search
from flax_tf.errors import InputError
from flax_tf.saving import build, save_pretrained
from flax_tf.translation import Translation, decode_target, translate

ALL = pytest.mark.parametrize("config", [TRANSFORMER, PLAIN, ATTENTION], ids=lambda config: config.arch)
# Of 3, 5 and 17 tokens: where padding is not read, two padded lengths, the second the table's.
LINES = ["abc", "ghi", "cab f", "hedge", "bad", " fed ", "abcdefghi abcdefg", "bad hedge bad cab"]
SEARCH: Any = {"beam_size": 3, "max_tokens": 7}


def alone(model: Any, line: str) -> tuple[str, float]:
    tokens, scores = beam_search(model, encode(SOURCE, line.strip())[None].astype(int), 3, 7)
    return decode_target(model.config, TARGET, np.asarray(tokens[0, 0])), float(scores[0, 0])


@ALL
def test_a_line_has_the_translation_that_it_has_alone_whatever_its_neighbours(config) -> None:
    _, model = translator(config)
    expected = [alone(model, line) for line in LINES]
    for order in (range(8), [5, 0, 3, 3, 6, 5, 0, 6]):
        results = translate(model, SOURCE, TARGET, [LINES[i] for i in order], **SEARCH)
        for i, result in zip(order, results, strict=True):
            assert result.problem is None
            ((text, score),) = result.hypotheses
            assert text == expected[i][0]
            # The same sums in another order, of rows that are filled up: a few hundred roundings.
            assert score == pytest.approx(expected[i][1], rel=1e-12)
    assert len({text for text, _ in expected}) > 2  # the test is of varied outputs


def test_greedily(capsys: pytest.CaptureFixture[str]) -> None:
    _, model = translator(PLAIN)
    done: list[int] = []
    results = translate(model, SOURCE, TARGET, LINES[:3], greedy=True, report=done.append)
    for line, (hypotheses, _) in zip(LINES[:3], results, strict=True):
        tokens, scores = greedy_search(model, encode(SOURCE, line)[None].astype(int))
        ((text, score),) = hypotheses
        assert text == decode_target(PLAIN, TARGET, np.asarray(tokens[0]))
        assert score == pytest.approx(float(scores[0]), rel=1e-12)  # as above
    assert done == [2, 3]  # those of 3 tokens, that of 5
    assert capsys.readouterr() == ("", "")


def test_a_long_file_is_compiled_for_few_shapes() -> None:
    _, model = translator(TRANSFORMER)
    lines = ["abcdefghi abcdefghi"[: 1 + i % 19] for i in range(190)]
    before = decoding._greedy._cache_size()
    results = translate(model, SOURCE, TARGET, lines, greedy=True, max_tokens=2)
    assert decoding._greedy._cache_size() - before == 2  # 16 and 19 tokens
    assert all(result == results[i % 19] for i, result in enumerate(results))  # the batches that are filled up, too


def test_there_may_be_fewer_hypotheses_than_asked_for() -> None:
    _, model = translator(TRANSFORMER)
    ((hypotheses, _),) = translate(model, SOURCE, TARGET, ["abc"], beam_size=17, n_best=17, max_tokens=1)
    scores = [score for _, score in hypotheses]
    assert len(hypotheses) == 10  # every token but padding
    assert scores == sorted(scores, reverse=True) and np.isfinite(scores).all()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "blank"),
        (" \t ", "blank"),
        ("abß", "the tokenizer of characters doesn't know 'ß' (U+00DF): leave them out"),
        ("a</s>", "the text of a special token in it: </s>"),
        ("a<pad>b", "the text of a special token in it: <pad>"),
        ("a" * 20, "longer than the 19 tokens that the model takes"),
    ],
)
def test_what_cannot_be_translated_is_told_and_harms_no_other_line(line: str, problem: str) -> None:
    _, model = translator(TRANSFORMER)
    (good,) = translate(model, SOURCE, TARGET, ["abc"], greedy=True, max_tokens=5)
    assert translate(model, SOURCE, TARGET, [line, "abc"], greedy=True, max_tokens=5) == [
        Translation([], problem),
        good,
    ]


def test_a_recurrent_model_takes_any_length() -> None:
    (result,) = translate(translator(PLAIN)[1], SOURCE, TARGET, ["a" * 41], greedy=True)
    assert result.problem is None and len(result.hypotheses) == 1


def test_text_that_leaves_no_tokens() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 3}, []))  # leaves out what it doesn't know
    assert translate(translator(PLAIN)[1], tokenizer, TARGET, ["ß"], greedy=True) == [
        Translation([], "no tokens in it that the tokenizer knows")
    ]


def test_wrong_options_of_the_function() -> None:
    _, model = translator(TRANSFORMER)
    for options, message in (
        ({"max_tokens": 0}, "max_tokens must be 1 to 19, not 0"),
        ({"max_tokens": 20}, "max_tokens must be 1 to 19, not 20"),
        ({"beam_size": 0}, "beam_size must be at least 1, not 0"),
        ({"n_best": 6}, "n_best must be 1 to beam_size, 5, not 6"),
    ):
        with pytest.raises(InputError, match=message):
            translate(model, SOURCE, TARGET, ["abc"], **options)
    with pytest.raises(InputError, match="max_tokens must be at least 1, not 0"):
        translate(translator(PLAIN)[1], SOURCE, TARGET, ["abc"], max_tokens=0)
    other = char_tokenizer(["abcdefghijklm"], SPECIAL)
    with pytest.raises(
        InputError, match="the source tokenizer has ids up to 15, but the model is for 13 source tokens"
    ):
        translate(model, other, TARGET, ["abc"])
    with pytest.raises(
        InputError, match=r"the target tokenizer has ids up to 12, .* for 11 target tokens: give its own"
    ):
        translate(model, SOURCE, SOURCE, ["abc"])  # what comes of a target_tokenizer.json that is lost


def test_a_hypothesis_is_one_line_of_text_without_special_tokens() -> None:
    tokenizer = char_tokenizer(["a\nb\r"], SPECIAL)
    ids = [tokenizer.token_to_id(token) for token in ["<pad>", "a", "\n", "b", "\r", "<s>", "a", "</s>", "<pad>", "b"]]
    assert decode_target(PLAIN, tokenizer, np.array(ids)) == "a b a"
    assert decode_target(PLAIN, tokenizer, np.array(ids[:7])) == "a b a"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, float64: None) -> Path:
    """Translators, a language model, and files of sentences."""
    here = tmp_path_factory.mktemp("files")
    saved(TRANSFORMER, here / "transformer")
    saved(PLAIN, here / "rnn")
    (here / "run").mkdir()
    saved(ATTENTION, here / "run" / "export")
    save_pretrained(translator(PLAIN)[1], here / "bare")
    save_pretrained(twin(reference(LANGUAGE_MODEL)), here / "lm", char_tokenizer(["abc"]))
    (here / "lines.txt").write_text("\n".join(LINES) + "\n")
    (here / "faulty.txt").write_text("abc\n\nghi\r\nß\n  \n" + "a" * 20 + "\na</s>\nbad")
    (here / "latin.txt").write_bytes("abc\nß\n".encode("latin-1"))
    (here / "empty.txt").write_text("")
    return here


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> list[str]:
    """The lines that a successful command prints."""
    assert main([str(argument) for argument in arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.split("\n")[:-1]


def texts(config, lines: list[str], **options: Any) -> list[str]:
    results = translate(translator(config)[1], SOURCE, TARGET, lines, **options)
    return [hypotheses[0].text if hypotheses else "" for hypotheses, _ in results]


@pytest.mark.parametrize(
    ("name", "config"),
    [("transformer", TRANSFORMER), ("rnn", PLAIN), ("run", ATTENTION)],
    ids=lambda value: str(value)[:11],
)
def test_the_command_prints_a_line_for_a_line(files: Path, name: str, config, capsys) -> None:
    beam = texts(config, LINES, **SEARCH)
    command = ["generate", files / name, "--max_tokens", 7]
    assert run(capsys, *command, "--source_file", files / "lines.txt", "--beam_size", 3) == beam
    assert run(capsys, *command, "--source", LINES[0], "--beam_size", 3) == beam[:1]
    greedy = texts(config, LINES, greedy=True, max_tokens=7)
    assert run(capsys, *command, "--source_file", files / "lines.txt", "--greedy") == greedy
    assert len(set(beam)) > 2 and len(set(greedy)) > 2


def test_packed_files_are_read(files: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "lines.gz").write_bytes(gzip.compress(b"abc\nghi"))
    command = ["generate", files / "rnn", "--source_file", tmp_path / "lines.gz", "--greedy"]
    assert run(capsys, *command) == texts(PLAIN, ["abc", "ghi"], greedy=True)


def test_an_empty_file_has_no_translations(files: Path, capsys) -> None:
    assert run(capsys, "generate", files / "rnn", "--source_file", files / "empty.txt") == []


def test_n_best_lines_have_the_number_the_score_and_the_text(files: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "two.txt").write_text("abc\n\n")
    command = ["generate", files / "transformer", "--source_file", tmp_path / "two.txt", "--max_tokens", 1]
    lines = run(capsys, *command, "--beam_size", 11, "--n_best", 11)
    ((hypotheses, _),) = translate(
        translator(TRANSFORMER)[1], SOURCE, TARGET, ["abc"], max_tokens=1, beam_size=11, n_best=11
    )
    expected = [f"1\t{score:.6f}\t{text}" for text, score in hypotheses]
    assert len(expected) == 10
    assert lines == [*expected, "1\t-inf\t", *["2\t-inf\t"] * 11]


def test_lines_that_cannot_be_translated_are_empty_and_reported(files: Path, capsys, caplog) -> None:
    command = ["generate", files / "transformer", "--source_file", files / "faulty.txt", "--greedy"]
    abc, ghi, bad = texts(TRANSFORMER, ["abc", "ghi", "bad"], greedy=True)
    assert run(capsys, *command) == [abc, "", ghi, "", "", "", "", bad]
    file = files / "faulty.txt"
    assert caplog.messages == [
        f"{file}: 5 of 8 lines not translated, and empty in the output",
        f"{file}: blank: line 2, 5",
        f"{file}: the tokenizer of characters doesn't know 'ß' (U+00DF): leave them out: line 4",
        f"{file}: longer than the 19 tokens that the model takes: line 6",
        f"{file}: the text of a special token in it: </s>: line 7",
    ]


def test_ids_in_ids_out(files: Path, capsys) -> None:
    ids = [4, 3, 7]
    command = ["generate", files / "bare", "--source_ids", str(ids), "--max_tokens", "5"]
    _, model = translator(PLAIN)

    def until_end(row: np.ndarray) -> list[int]:
        return [*itertools.takewhile(lambda token: token != PLAIN.end_id, row.tolist())]

    greedy = until_end(np.asarray(greedy_search(model, np.array([ids]), 5).tokens[0]))
    assert run(capsys, *command, "--greedy") == [str(greedy)]
    found = beam_search(model, np.array([ids]), 3, 5, n_best=2)
    lines = run(capsys, *command, "--beam_size", "3", "--n_best", "2")
    rows = [until_end(row) for row in np.asarray(found.tokens[0])]
    assert [line.split("\t")[::2] for line in lines] == [["1", str(row)] for row in rows]
    # As printed, to six digits.
    assert [float(line.split("\t")[1]) for line in lines] == pytest.approx(found.scores[0].tolist(), abs=1e-6)


def test_one_tokenizer_for_both_sides(tmp_path: Path, capsys) -> None:
    tokenizer = bpe_tokenizer(["der Hund", "the dog"] * 3, 271, SPECIAL, sentences=True)
    size = vocabulary_size(tokenizer)
    model = build(dataclasses.replace(PLAIN, src_vocab_size=size, tgt_vocab_size=size))
    model.eval()
    save_pretrained(model, tmp_path / "joint", tokenizer)
    assert sorted(listing(tmp_path / "joint")) == ["config.json", "model.safetensors", "tokenizer.json"]
    (result,) = translate(model, tokenizer, tokenizer, ["der Hund ß"], greedy=True)
    (line,) = run(capsys, "generate", tmp_path / "joint", "--source", "der Hund ß", "--greedy")
    assert line == result.hypotheses[0].text


def test_tokenizers_from_elsewhere(files: Path, capsys) -> None:
    command = ["generate", files / "bare", "--source", "abc", "--greedy", "--tokenizer", files / "rnn"]
    assert run(capsys, *command) == texts(PLAIN, ["abc"], greedy=True)


def test_a_saved_model_with_two_tokenizers_is_ported_and_replaced(files: Path, tmp_path: Path, capsys) -> None:
    names = ["config.json", "model.safetensors", "target_tokenizer.json", "tokenizer.json"]
    for _ in range(2):
        run(capsys, "port", files / "rnn", tmp_path / "out")
        assert sorted(listing(tmp_path / "out")) == names
    assert listing(tmp_path / "out") == listing(files / "rnn")
    run(capsys, "port", files / "bare", tmp_path / "out")
    assert sorted(listing(tmp_path / "out")) == names[:2]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["transformer"], "give a sentence, not empty, as --source, or a file of them as --source_file, or --source_i"),
        (["transformer", "--source", ""], "give a sentence, not empty, as --source"),
        (["transformer", "--source", " "], "give a sentence, not empty, as --source"),
        (["transformer", "--source", "abc", "--source_file", "lines.txt"], "give only one of --source, --source"),
        (["transformer", "--source", "abß"], "--source: the tokenizer of characters doesn't know 'ß'"),
        (["transformer", "--source", "a</s>"], "--source: the text of a special token in it: </s>"),
        (["transformer", "--source", "a" * 20], "--source: longer than the 19 tokens that the model takes"),
        (["transformer", "--source_file", "nowhere.txt"], "nowhere.txt: can't be read"),
        (["transformer", "--source_file", "lm"], "lm: can't be read"),
        (["transformer", "--source_file", "latin.txt"], "latin.txt: not UTF-8 text (line 2)"),
        (["bare", "--source_ids", "[3, 13]"], "token id 13 is outside the vocabulary of 13"),
        (["bare", "--source_ids", "[]"], "the source is empty: give at least one token"),
        (["bare", "--source_ids", "[99999999999999999999]"], "is outside every vocabulary"),
        (["transformer", "--source_ids", str([3] * 20)], "20 positions, but the position table has 19"),
        (["rnn", "--source_ids", "[3]", "--source", "abc"], "give only one of --source, --source_file"),
        (["rnn", "--source", "abc", "--beam_size", "two"], "--beam_size must be a valid int, not two"),
        (["rnn", "--source", "abc", "--length_penalty", "nan"], "--length_penalty must be a valid float, not nan"),
        (["lm", "--source_ids", "[3]"], "--source_ids: for translators only"),
        (["bare", "--source", "abc"], "bare has no tokenizer.json: name one with --tokenizer"),
        (["nowhere", "--source", "abc"], "nowhere does not exist"),
        (["rnn", "--source", "abc", "--max_tokens", "0"], "max_tokens must be at least 1, not 0"),
        (["transformer", "--source", "abc", "--max_tokens", "20"], "max_tokens must be 1 to 19, not 20"),
        (["transformer", "--source", "abc", "--beam_size", "0"], "beam_size must be at least 1"),
        (["transformer", "--source", "abc", "--n_best", "0"], "n_best must be 1 to beam_size"),
        (["transformer", "--source", "abc", "--n_best", "6"], "n_best must be 1 to beam_size, 5, not 6"),
        (["transformer", "--source", "abc", "--length_penalty", "-1"], "length_penalty must be at least 0"),
        (["transformer", "--source", "abc", "--greedy", "--beam_size", "5"], "--beam_size: for beam search only"),
        (["transformer", "--source", "abc", "--greedy", "--n_best", "1"], "--n_best: for beam search only"),
        (["transformer", "--prompt", "abc"], "--prompt: for language models only, and {files}/transformer holds a"),
        (["rnn", "--prompt_ids", "[3]"], "--prompt_ids: for language models only"),
        (["run", "--source", "abc", "--temperature", "1"], "--temperature: for language models only"),
        (["rnn", "--source", "abc", "--top_k", "3", "--seed", "0"], "--top_k, --seed: for language models only"),
        (["lm", "--source", "abc"], "--source: for translators only, and {files}/lm holds a language_model"),
        (["lm", "--source_file", "lines.txt"], "--source_file: for translators only"),
        (["lm", "--prompt", "abc", "--beam_size", "5"], "--beam_size: for translators only"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(files: Path, command: list[str], message: str, monkeypatch, capsys) -> None:
    monkeypatch.chdir(files)
    before = listing(files)
    assert main(["generate", str(files / command[0]), *command[1:]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("flax-tf: error: ") and message.replace("{files}", str(files)) in line
    assert listing(files) == before


def test_as_a_user_starts_it(files: Path) -> None:
    program = [sys.executable, "-m", "flax_tf", "generate"]
    root = Path(flax_tf.__file__).parents[1]
    command = [*program, files / "rnn", "--source_file", files / "faulty.txt", "--greedy", "--max_tokens", "3"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    abc, ghi, long, bad = texts(PLAIN, ["abc", "ghi", "a" * 20, "bad"], greedy=True, max_tokens=3)
    assert (done.returncode, done.stdout.split("\n")) == (0, [abc, "", ghi, "", "", long, "", bad, ""])
    assert done.stderr.startswith(f"flax-tf: {files}/faulty.txt: 4 of 8 lines not translated")
    done = subprocess.run([*program, files / "rnn", "--source", ""], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
