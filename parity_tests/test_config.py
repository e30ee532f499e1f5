"""Configs refuse what cannot be, with the message that helps, and survive JSON."""

import dataclasses
import json

import pytest

from flax_tf.config import BackboneConfig, BlockConfig, LanguageModelConfig, config_from_dict, config_to_dict
from flax_tf.errors import InputError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 5}, "num_heads 5 does not divide d_model 64: choose num_heads from 1, 2, 4, 8, 16, 32, 64"),
        ({"num_heads": 0}, "num_heads must be a whole number of at least 1, not 0"),
        ({"d_model": 64.0}, "d_model must be a whole number of at least 1, not 64.0"),
        ({"num_layers": True}, "num_layers must be a whole number of at least 1, not True"),
        ({"max_seq_length": -7}, "max_seq_length must be a whole number of at least 1, not -7"),
        ({"vocab_size": 0}, "vocab_size must be a whole number of at least 1, not 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, not 1.0"),
        ({"dropout": "some"}, "dropout must be at least 0 and below 1, not 'some'"),
        ({"layer_norm_eps": 0}, "layer_norm_eps must be above 0 and below 1, not 0"),
        ({"mask": 1}, "mask must be true or false, not 1"),
    ],
)
def test_impossible_values_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(InputError) as error:
        LanguageModelConfig(**fields)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"arch": "block", "num_head": 8},
            "unknown field 'num_head' in the config of a block: did you mean 'num_heads'?",
        ),
        (
            {"arch": "language_model", "zzz": 1},
            "unknown field 'zzz' in the config of a language_model: known are vocab",
        ),
        ({"arch": "gpt9"}, "unknown architecture 'gpt9': known are attn_rnn, backbone, block, language_model"),
        ({}, "unknown architecture None"),
        ({"arch": ["block"]}, "unknown architecture ['block']"),
    ],
)
def test_unknown_names_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(InputError) as error:
        config_from_dict(fields)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("cls", [BlockConfig, BackboneConfig, LanguageModelConfig])
def test_json_round_trip(cls) -> None:
    config = cls(d_model=66, num_heads=11)
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    assert config.head_dim == 6


def test_configs_are_frozen_and_a_null_vocabulary_builds_no_model() -> None:
    config = LanguageModelConfig(vocab_size=None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 1  # ty: ignore[invalid-assignment]
    with pytest.raises(InputError, match="vocab_size is null"):
        config.token_count()
