"""The weights of attention are those that the model uses, and the pictures show them."""

import dataclasses
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from directories import listing
from matplotlib.image import imread
from models import BLOCK, LANGUAGE_MODEL, reference, twin
from tokenizers import Tokenizer, models
from translators import ATTENTION, PLAIN, SOURCE, SPECIAL, TARGET, TRANSFORMER, saved, translator
from twins import float64 as float64
from twins import relative_error

from flax_tf.attention_maps import attention_weights, draw_attention, submodule_outputs, token_labels
from flax_tf.cli import main
from flax_tf.data.tokenizer import bpe_tokenizer, char_tokenizer
from flax_tf.decoding import greedy_search
from flax_tf.errors import InputError
from flax_tf.recurrent import shift_right
from flax_tf.saving import save_pretrained
from flax_tf.translation import decode_target, encode_source

DEEP = dataclasses.replace(TRANSFORMER, num_layers=2, max_seq_length=11)
SRC = np.array([[3, 5, 12, 7, 4], [6, 9, 0, 0, 0], [4, 3, 8, 0, 0]])
TARGET_IDS = np.array([[3, 4, 5, 2], [7, 2, 0, 0], [9, 10, 3, 2]])


def test_the_weights_of_the_transformer_are_those_that_give_its_output() -> None:
    _, model = translator(DEEP)
    weights = np.asarray(attention_weights(model, SRC, TARGET_IDS))
    assert weights.shape == (2, 3, 2, 4, 5)
    outputs = submodule_outputs(model, jnp.asarray(SRC), shift_right(jnp.asarray(TARGET_IDS), DEEP.start_id))
    memory = outputs["encoder_layers.1"]
    for number, layer in enumerate(model.decoder_layers):
        attention = layer.cross_attn
        values = attention.split_heads(attention.W_v(memory))  # (B, N, S, H)
        mixed = np.swapaxes(weights[number] @ np.asarray(values), 1, 2).reshape(3, 4, 10)
        output = np.asarray(outputs[f"decoder_layers.{number}.cross_attn"])
        # The contract's bound for a submodule.
        assert np.linalg.norm(attention.W_o(mixed) - output) <= 1e-12 * np.linalg.norm(output)
    check_rows(weights)


def test_the_weights_of_the_recurrent_model_are_the_references() -> None:
    module, model = translator(ATTENTION)
    weights = np.asarray(attention_weights(model, SRC, TARGET_IDS))
    assert weights.shape == (1, 3, 1, 4, 5)
    with torch.no_grad():
        expected = module(torch.from_numpy(SRC), torch.from_numpy(TARGET_IDS))[2]
    assert relative_error(weights[0, :, 0], expected) <= 1e-12  # as above
    check_rows(weights)


def check_rows(weights: np.ndarray) -> None:
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-14)  # 5 numbers, a rounding of 1e-16 each
    assert (weights[..., :2] > 0).all()
    padding = np.broadcast_to((SRC == 0)[None, :, None, None, :], weights.shape)
    assert (weights[padding] == 0).all()


def test_a_model_in_training_attends_as_in_evaluation_and_stays_in_training() -> None:
    _, model = translator(DEEP)
    expected = attention_weights(model, SRC, TARGET_IDS)
    model.train()
    try:
        np.testing.assert_array_equal(attention_weights(model, SRC, TARGET_IDS), expected)
        assert not model.dropout.deterministic
    finally:
        model.eval()


@pytest.mark.parametrize("config", [BLOCK, PLAIN], ids=lambda config: config.arch)
def test_models_without_attention_over_a_source(config) -> None:
    model = twin(reference(config))
    with pytest.raises(InputError, match=f"a {type(model).__name__} has no attention over a source"):
        attention_weights(model, SRC, TARGET_IDS)


def test_labels_of_tokens() -> None:
    assert token_labels(SOURCE, [3, 4, 2, 99]) == ["␣", "a", "</s>", "99"]
    signs = char_tokenizer(["\n$ß日я\u200f"], SPECIAL)
    labels = [token_labels(signs, [signs.token_to_id(sign)])[0] for sign in "\n$ß日я\u200f"]
    assert labels == ["U+000A", "$", "ß", "U+65E5", "я", "U+200F"]
    assert token_labels(Tokenizer(models.WordLevel({"▁der": 0})), [0]) == ["▁der"]


@pytest.mark.parametrize("sentences", [True, False])
def test_labels_of_bytes(sentences: bool) -> None:
    tokenizer = bpe_tokenizer(["süß süß süß мы мы"], 280, SPECIAL, sentences=sentences)
    ids = tokenizer.encode("süß мы ö日").ids
    labels = token_labels(tokenizer, ids)
    assert labels[-5:] == ["\\xc3", "\\xb6", "\\xe6", "\\x97", "\\xa5"]
    text = "".join(labels[:-5]).replace("␣", " ")
    assert text == (" " if sentences else "") + "süß мы "
    assert token_labels(tokenizer, [0, 2]) == ["<pad>", "</s>"]


def test_the_picture_has_the_source_along_x_and_the_target_down_y(tmp_path: Path) -> None:
    weights = np.array([[[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]]])  # of 2 target tokens over 3 source tokens
    draw_attention(weights, ["a", "$b", "c" * 20], ["$d$", "e"], tmp_path / "new" / "map.png")
    image = imread(tmp_path / "new" / "map.png")[..., :3]
    panel = image[:, : int(image.shape[1] * 0.75)]  # without the bar of colours
    dark = (panel[..., 2] > 0.35) & (panel[..., 0] < 0.1)  # the blue of 1
    rows, columns = np.nonzero(dark)
    middle = (rows.min() + rows.max()) / 2
    assert dark.sum() > 1000 and columns[rows < middle].min() > columns[rows > middle].max()


def test_large_pictures_have_a_bounded_size(tmp_path: Path) -> None:
    draw_attention(np.full((1, 1, 211, 223), 1 / 223), ["s"] * 223, ["t"] * 211, tmp_path / "map.png")
    width, height = struct.unpack(">II", (tmp_path / "map.png").read_bytes()[16:24])
    assert 39e6 < height * width < 40e6


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, float64: None) -> Path:
    here = tmp_path_factory.mktemp("files")
    saved(DEEP, here / "transformer")
    saved(PLAIN, here / "rnn")
    (here / "run").mkdir()
    saved(ATTENTION, here / "run" / "export")
    save_pretrained(twin(reference(LANGUAGE_MODEL)), here / "lm", char_tokenizer(["abc"]))
    save_pretrained(translator(ATTENTION)[1], here / "bare")
    return here


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """What a successful command prints."""
    assert main(["attention", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize(("name", "config"), [("transformer", DEEP), ("run", ATTENTION)], ids=["transformer", "rnn"])
def test_the_command_draws_the_greedy_translation(
    files: Path, name: str, config, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    _, model = translator(config)
    tokens = greedy_search(model, encode_source(config, SOURCE, "bad cab")[None]).tokens
    text = decode_target(config, TARGET, np.asarray(tokens[0]))
    assert run(capsys, files / name, "--source", " bad cab ") == f"attention.png: {text}\n"
    assert list(listing(tmp_path)) == ["attention.png"]
    assert imread(tmp_path / "attention.png").ndim == 3


def test_a_translation_can_be_given_and_heads_shown(files: Path, tmp_path: Path, capsys) -> None:
    command = [files / "transformer", "--source", "bad cab", "--target", " dab "]
    assert run(capsys, *command, "--out", tmp_path / "layers.png") == f"{tmp_path}/layers.png: dab\n"
    run(capsys, *command, "--heads", "--out", tmp_path / "layers.png")  # takes the other's place
    run(capsys, *command, "--out", tmp_path / "again.png")
    heads, layers = (imread(tmp_path / name).shape for name in ("layers.png", "again.png"))
    assert heads[0] > 1.9 * layers[0]  # two rows, for two layers


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["rnn", "--source", "abc"], "{files}/rnn holds a rnn, which has no attention over a source"),
        (["lm", "--source", "abc"], "{files}/lm holds a language_model, which has no attention over a source"),
        (["nowhere", "--source", "abc"], "nowhere does not exist"),
        (["bare", "--source", "abc"], "bare has no tokenizer.json: name one with --tokenizer"),
        (["run"], "give the sentence to translate, not empty, as --source"),
        (["run", "--source", " "], "give the sentence to translate, not empty, as --source"),
        (["run", "--source", "abß"], "--source: the tokenizer of characters doesn't know 'ß'"),
        (["run", "--source", "a</s>"], "--source: the text of a special token in it: </s>"),
        (["transformer", "--source", "a" * 12], "--source: longer than the 11 tokens that the model takes"),
        (["transformer", "--source", "a", "--target", "a" * 11], "12 positions, but the position table has 11"),
        (["run", "--source", "a", "--target", "aß"], "the tokenizer of characters doesn't know 'ß'"),
        (["run", "--source", "a", "--out", "map.pdf"], "--out map.pdf: the picture is a PNG, so end the name in .png"),
        (["run", "--source", "a", "--target", "a", "--out", "{files}/folder.png"], "folder.png is a directory"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line_and_draws_nothing(files: Path, command, message, monkeypatch, capsys) -> None:
    (files / "folder.png").mkdir(exist_ok=True)
    monkeypatch.chdir(files)
    before = listing(files)
    arguments = [argument.replace("{files}", str(files)) for argument in command]
    assert main(["attention", str(files / arguments[0]), *arguments[1:]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("flax-tf: error: ") and message.replace("{files}", str(files)) in line
    assert listing(files) == before
