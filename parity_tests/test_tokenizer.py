"""Tokenizers: what is encoded comes back, what is saved loads, what is unknown is named."""

import json
import socket
import sys

import huggingface_hub.constants
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from flax_tf.data import tokenizer as module
from flax_tf.data.tokenizer import (
    bpe_tokenizer,
    char_tokenizer,
    encode,
    encode_all,
    load_tokenizer,
    vocabulary_size,
)
from flax_tf.errors import InputError

# Combining marks, CRLF and tabs, joined emoji, NUL, Unicode's other line ends, the edges of its planes, special tokens.
ODD = "e\u0301 \r\n\r\n\t\U0001f469\u200d\U0001f467 \x00\x85\u2028\u2029  \x0b\x0c\ud7ff\ue000\U0010ffff [UNK] ##a"


def words(tmp_path, **parts):
    """A saved tokenizer of whole words."""
    vocab = {"[UNK]": 0, "[PAD]": 1, "one": 2, "two": 3, "[CLS]": 11}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_padding(pad_id=1, pad_token="[PAD]", length=17)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=ODD + "abc"))
def test_characters_come_back(text):
    tokenizer = char_tokenizer([ODD, "abc"])
    ids = encode(tokenizer, text)
    assert ids.dtype == np.uint32
    alphabet = sorted(set(ODD + "abc"))
    assert ids.tolist() == [alphabet.index(character) for character in text]
    assert tokenizer.decode(ids.tolist()) == text


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_comes_back_from_bytes(text):
    tokenizer = bpe_tokenizer(["the only text that was seen, the only one"], 270)
    assert tokenizer.decode(encode(tokenizer, text).tolist()) == text


def test_odd_text_comes_back_after_saving(tmp_path):
    for made in (char_tokenizer([ODD]), bpe_tokenizer([ODD], 300)):
        made.save(str(tmp_path / "tokenizer.json"))
        loaded = load_tokenizer(str(tmp_path))
        assert loaded.to_str() == made.to_str()
        assert loaded.decode(encode(loaded, ODD).tolist()) == ODD


def test_bpe_is_trained_the_same_each_time_and_shortens_the_text():
    text = "low lower lowest new newer newest wide wider widest " * 31
    first, second = bpe_tokenizer([text], 300), bpe_tokenizer([text], 300)
    assert first.to_str() == second.to_str()
    assert 256 < vocabulary_size(first) <= 300
    assert len(encode(first, text)) < len(text) / 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(alphabet="ab'sx1.\n\n\n  \t\r\x85\u00a0\u2028\u00e9\U0001f467")))
def test_pieces_change_nothing(texts):
    texts = [*texts, "", ODD * 3, "a\nb\n\nc \n d\r\ne\n", ""]
    with pytest.MonkeyPatch.context() as patch:
        for make in (char_tokenizer, lambda texts: bpe_tokenizer(texts, 300)):
            patch.setattr(module, "PIECE", 1 << 30)
            tokenizer = make(texts)
            whole = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
            patch.setattr(module, "PIECE", 2)
            patch.setattr(module, "CHARACTERS_AT_ONCE", 13)
            assert [ids.tolist() for ids in encode_all(tokenizer, texts)] == whole
            assert make(texts).to_str() == tokenizer.to_str()


def test_texts_are_cut_where_it_is_safe_and_only_there(tmp_path):
    text = "a\nb \nc" * module.PIECE
    pieces = [piece for piece, _ in module._pieces([text], module.AT_NEWLINE)]
    assert len(pieces) > 3
    assert "".join(pieces) == text
    assert all(piece.startswith("\nb") for piece in pieces[1:])  # not before the newline that follows a space
    assert module._safe_cut(char_tokenizer([text])) is module.ANYWHERE
    assert module._safe_cut(bpe_tokenizer([text], 256)) is module.AT_NEWLINE
    other = bpe_tokenizer([text], 256)
    other.add_special_tokens(["b \nc"])
    assert module._safe_cut(other) is None
    assert module._safe_cut(load_tokenizer(str(words(tmp_path)))) is None


def test_unknown_characters_are_named(tmp_path):
    char_tokenizer(["abc"]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError) as caught:
        encode(load_tokenizer(str(tmp_path)), "a\u00e9b\nc")
    assert "'\\n' (U+000A), 'é' (U+00E9)" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="and 6 more"):
        encode(char_tokenizer(["z"]), "abcdefghijklmnop")


def test_saved_padding_and_truncation_are_off(tmp_path):
    file = words(tmp_path)
    for place in (file, tmp_path):
        tokenizer = load_tokenizer(str(place))
        assert encode(tokenizer, "one two three one two").tolist() == [2, 3, 0, 2, 3]
    assert vocabulary_size(tokenizer) == 12  # ids have a gap: five tokens, greatest id 11


def test_special_tokens_are_not_added(tmp_path):
    tokenizer = load_tokenizer(str(words(tmp_path)))
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 11)])
    assert tokenizer.encode("one").ids == [11, 2]
    assert encode(tokenizer, "one").tolist() == [2]


def refused(name) -> str:
    with pytest.raises(InputError) as caught:
        load_tokenizer(str(name))
    assert "\n" not in str(caught.value)
    assert str(name) in str(caught.value)
    return str(caught.value)


def test_files_that_are_no_tokenizer(tmp_path):
    assert "no such file" in refused(tmp_path / "missing.json")
    for content in (b"", b"{", b"\xff\xfe", json.dumps({"model": 1}).encode()):
        (tmp_path / "tokenizer.json").write_bytes(content)
        assert "not a tokenizer.json" in refused(tmp_path / "tokenizer.json")
        assert "not a tokenizer.json" in refused(tmp_path)


def test_another_format_needs_transformers(tmp_path, monkeypatch):
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\nfoo\n")
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it weren't installed
    assert refused(tmp_path).endswith("pip install 'flax-tf[hf]'")


def test_a_hub_failure_names_both_places(tmp_path, monkeypatch):
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: asked.append(args))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("bert-base-nothing", "nobody/nothing"):
        assert "no such file or directory, and not to be had from the hub: " in refused(name)
    assert not asked
