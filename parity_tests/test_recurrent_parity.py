"""The recurrent sequence-to-sequence models against their references."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from twins import assert_same, relative_error, run, run_with_dropout, state_dict, twins, with_fixed_masks
from twins import float64 as float64

from flax_tf.config import AttnRNNConfig, RNNConfig
from flax_tf.porting import flax_to_torch
from flax_tf.porting.recognise import recognise
from flax_tf.saving import from_pretrained, save_pretrained
from torch_ref import saving as torch_saving

PLAIN = RNNConfig(src_vocab_size=23, tgt_vocab_size=19, hidden_size=11, max_length=7)
ATTENTION = AttnRNNConfig(src_vocab_size=23, tgt_vocab_size=19, hidden_size=11, max_length=7)
MASKED = dataclasses.replace(ATTENTION, mask_source=True, pad_id=3)
ALL = pytest.mark.parametrize("config", [PLAIN, ATTENTION, MASKED], ids=["plain", "attention", "masked"])


def batch(rows: int = 4, S: int = 5, T: int = 13, pad: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Full rows, padded rows, and a source and a target that are nothing but padding."""
    rng = np.random.default_rng(0)
    src, tgt = rng.integers(4, 23, size=(rows, S)), rng.integers(4, 19, size=(rows, T))
    src[1, S // 2 :], tgt[1, T // 3 :], tgt[-1, :], src[-2, :] = pad, pad, pad, pad
    return src, tgt


BOTH = pytest.mark.parametrize("config", [PLAIN, MASKED], ids=["plain", "masked"])


# Single tokens are in test_seq2seq_check.py.
@BOTH
def test_teacher_forced_long_sequences(config):
    assert_same(*twins(config), *batch(S=53, T=51, pad=config.pad_id))


@pytest.mark.parametrize("config", [PLAIN, ATTENTION], ids=["plain", "attention"])
def test_running_free(config):
    assert_same(*twins(config, scale=2), batch(pad=config.pad_id)[0])


@BOTH
def test_running_free_reads_its_own_tokens(config):
    _, model = twins(config, scale=2)
    src, _ = batch()
    log_probs, _, _ = run(model, src)
    assert log_probs.shape == (4, 7, 19)
    np.testing.assert_allclose(np.exp(log_probs).sum(axis=-1), 1, rtol=1e-13)  # a sum of 19 numbers
    forced, _, _ = run(model, src, log_probs.argmax(axis=-1))
    np.testing.assert_allclose(forced, log_probs, rtol=1e-12)  # the same sums, perhaps in another order


def test_third_is_none_or_the_weights_of_attention():
    src, tgt = batch()
    for config in (PLAIN, ATTENTION):
        reference, model = twins(config)
        theirs, ours = reference(*map(torch.from_numpy, (src, tgt)))[2], run(model, src, tgt)[2]
        if config is PLAIN:
            assert theirs is None and ours is None
        else:
            assert theirs.shape == ours.shape == (4, 13, 5)
            np.testing.assert_allclose(ours.sum(axis=-1), 1, rtol=1e-14)  # a sum of 5 numbers


def test_the_mask_hides_padding_from_attention():
    src, tgt = batch(pad=3)
    _, model = twins(MASKED)
    weights = np.asarray(run(model, src, tgt)[2])
    assert (weights[1, :, 2:] == 0).all() and (weights[1, :, :2] > 0).all()
    assert (weights[0] > 0).all()
    np.testing.assert_allclose(weights[2], 1 / 5, rtol=1e-14)  # nothing to look at: everywhere alike, and finite


def test_the_decoder_rectifies_what_it_reads():
    reference, model = twins(PLAIN)
    with torch.no_grad():
        reference.decoder.embedding.weight.copy_(-reference.decoder.embedding.weight.abs())
    model.decoder.embedding.embedding.set_value(-jnp.abs(model.decoder.embedding.embedding[...]))
    src, tgt = batch()
    first, second = run(model, src, tgt)[0], run(model, src, tgt[:, ::-1].copy())[0]
    np.testing.assert_array_equal(first, second)  # every token reads as zero
    # The contract for outputs: a few hundred roundings.
    assert relative_error(first, reference(*map(torch.from_numpy, (src, tgt)))[0].detach()) <= 1e-12


@pytest.mark.parametrize(
    ("config", "given"), [(PLAIN, 2), (MASKED, 2), (MASKED, 1)], ids=["plain", "masked", "masked-free"]
)
def test_dropout_has_the_same_places(config, given):
    reference, model = twins(config)
    inputs = batch()[:given]
    plain = reference(*map(torch.from_numpy, inputs))[0].detach()
    with_fixed_masks(reference, model)
    assert_same(reference, model, *inputs)
    assert not np.allclose(plain, reference(*map(torch.from_numpy, inputs))[0].detach())


@BOTH
def test_dropout_acts_in_training_alone(config):
    _, model = twins(config)
    src, _ = batch()
    expected = run(model, src)[0]
    model.train()
    first, second = (run_with_dropout(model, src, seed=seed)[0] for seed in (0, 1))
    assert not np.allclose(first, second) and not np.allclose(first, expected)


def gru(name: str) -> set[str]:
    return {f"{name}.{part}_l0" for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}


@ALL
def test_keys_are_the_seeds_and_weights_port_both_ways(config):
    reference, model = twins(config)
    original, ported = state_dict(reference), flax_to_torch(model)
    # What the classes that seed 002 describes call their tensors.
    keys = {"encoder.embedding.weight", "decoder.embedding.weight", "decoder.out.weight", "decoder.out.bias"}
    keys |= gru("encoder.gru") | gru("decoder.gru")
    if config is not PLAIN:
        keys |= {f"decoder.attention.{name}a.{part}" for name in "WUV" for part in ("weight", "bias")}
        assert original["decoder.gru.weight_ih_l0"].shape == (33, 22)
    assert original.keys() == ported.keys() == keys
    assert all(ported[name].tobytes() == original[name].tobytes() for name in original)


@ALL
def test_recognised_from_shapes(config):
    shapes = {name: array.shape for name, array in state_dict(twins(config)[0]).items()}
    given = {"max_length": 7, "pad_id": config.pad_id}
    if config is MASKED:
        given["mask_source"] = True
    assert recognise(shapes, given) == config


@ALL
def test_saved_for_both(config, tmp_path):
    reference, model = twins(config)
    save_pretrained(model, tmp_path / "saved")
    ours, theirs = from_pretrained(tmp_path / "saved"), torch_saving.from_pretrained(tmp_path / "saved")
    assert ours.config == theirs.config == config
    for name, array in state_dict(reference).items():
        assert array.tobytes() == flax_to_torch(ours)[name].tobytes() == state_dict(theirs)[name].tobytes()
