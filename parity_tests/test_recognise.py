"""Which architecture a checkpoint is, from its keys and shapes, and what must be asked for."""

from typing import Any

import pytest
from models import ATTN_RNN, BACKBONE, BLOCK, LANGUAGE_MODEL, RNN, reference, state_arrays

from flax_tf.config import LanguageModelConfig
from flax_tf.errors import InputError
from flax_tf.porting.recognise import recognise, recognise_arch

Shapes = dict[str, tuple[int, ...]]


def shapes_of(config: Any) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in reference(config).state_dict().items()}


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (BLOCK, {"num_heads": 3}),
        (BACKBONE, {"mask": False}),
        (LANGUAGE_MODEL, {}),
        (LANGUAGE_MODEL, {"arch": "language_model", "num_heads": 3, "num_layers": 2, "vocab_size": 37}),
        (
            LanguageModelConfig(**{**LANGUAGE_MODEL.__dict__, "mask": False, "dropout": 0.3}),
            {"mask": False, "dropout": 0.3},
        ),
        # More than ten layers and heads, so that a number has two digits.
        (LanguageModelConfig(vocab_size=7, max_seq_length=3, d_model=22, num_heads=11, num_layers=13), {}),
    ],
)
def test_the_config_is_read_off_the_shapes(config, given: dict[str, Any]) -> None:
    shapes = shapes_of(config)
    assert recognise_arch(shapes) == config.arch
    before = dict(given)
    assert recognise(shapes, given) == config
    assert given == before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BLOCK, "this is a block, and its shapes do not tell num_heads: write `num_heads: N` into a YAML file"),
        (
            BACKBONE,
            "this is a backbone, and its shapes do not tell mask: write `mask: true` (causal) or `mask: false` "
            "(encoder) into a YAML file",
        ),
    ],
    ids=["block", "backbone"],
)
def test_what_shapes_do_not_tell_is_asked_for_by_name(config, message: str) -> None:
    with pytest.raises(InputError) as caught:
        recognise(shapes_of(config), {})
    assert str(caught.value) == f"{message}, and pass it to port or check as --config FILE"


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (LANGUAGE_MODEL, {"num_heads": 5}, "the config says num_heads 5, but the checkpoint has 3"),
        (LANGUAGE_MODEL, {"num_layers": 3}, "the config says num_layers 3, but the checkpoint has 2"),
        (LANGUAGE_MODEL, {"vocab_size": 36}, "the config says vocab_size 36, but the checkpoint has 37"),
        (LANGUAGE_MODEL, {"vocab_size": None}, "the config says vocab_size None, but the checkpoint has 37"),
        (LANGUAGE_MODEL, {"max_seq_length": 12}, "the config says max_seq_length 12, but the checkpoint has 13"),
        (LANGUAGE_MODEL, {"d_model": "15"}, "the config says d_model '15', but the checkpoint has 15"),
        (BLOCK, {"num_heads": 3, "d_model": 18}, "the config says d_model 18, but the checkpoint has 15"),
        (BLOCK, {"num_heads": 4}, "num_heads 4 does not divide d_model 15: choose num_heads from 1, 3, 5, 15"),
        (BLOCK, {"num_heads": "3"}, "num_heads must be a whole number of at least 1, not '3'"),
        (BLOCK, {"arch": "backbone"}, "the config says arch 'backbone', but the keys are those of a block"),
        (BLOCK, {"num_head": 3}, "unknown field 'num_head' in the config of a block: did you mean 'num_heads'?"),
        (BLOCK, {"vocab_size": 37}, "unknown field 'vocab_size' in the config of a block: known are d_model, "
         "num_heads, layer_norm_eps"),
        (BLOCK, {3: 5}, "unknown field 3 in the config of a block: known are d_model, num_heads, layer_norm_eps"),
    ],
)  # fmt: skip
def test_what_contradicts_the_checkpoint_is_refused(config, given: dict[Any, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        recognise(shapes_of(config), given)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("shapes", "first"),
    [
        ({}, "none"),
        ({"h.0.attn.c_attn.weight": (15, 45), "wte.weight": (37, 15)}, "h.0.attn.c_attn.weight, wte.weight"),
        ({"kqv_projection.weight": (45,)}, "kqv_projection.weight"),
        ({"embeddings.token_embd.weight": ()}, "embeddings.token_embd.weight"),
    ],
)
def test_unknown_keys_are_refused_with_what_is_known(shapes: Shapes, first: str) -> None:
    with pytest.raises(InputError) as caught:
        recognise(shapes, {})
    assert str(caught.value) == (
        f"no known architecture has these keys (the first: {first}); block has kqv_projection.weight; backbone has "
        "embeddings.token_embd.weight; language_model has transformer.embeddings.token_embd.weight; transformer has "
        "decoder_layers.0.cross_attn.W_q.weight; attn_rnn has decoder.attention.Wa.weight; rnn has "
        "decoder.gru.weight_hh_l0"
    )


@pytest.mark.parametrize("half", ["encoder", "decoder"])
@pytest.mark.parametrize("config", [RNN, ATTN_RNN], ids=lambda config: config.arch)
def test_one_half_of_a_recurrent_model_is_told_what_to_do(config, half: str) -> None:
    shapes = {name: array.shape for name, array in state_arrays(getattr(reference(config), half)).items()}
    with pytest.raises(InputError, match="this is one half of a recurrent model: save both halves in one file"):
        recognise(shapes, {})


def test_a_position_table_that_is_none_is_left_to_the_list_of_what_does_not_fit() -> None:
    shapes = shapes_of(LANGUAGE_MODEL)
    for odd in ((), (13,), (13, 15, 1)):
        shapes["transformer.embeddings.pos_embd.weight"] = odd
        assert recognise(shapes, {"max_seq_length": 11}).max_seq_length == 11
