"""The encoder-decoder Transformer against its reference, and the reference against PyTorch's own layers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors import safe_open
from twins import assert_same, relative_error, run, run_with_dropout, state_dict, twins, with_fixed_masks
from twins import float64 as float64

from flax_tf import masks
from flax_tf.config import TransformerConfig
from flax_tf.embedding import PositionalEncoding
from flax_tf.errors import InputError, TokenIdError
from flax_tf.porting import StateDictError, flax_to_torch, torch_to_flax
from flax_tf.porting.recognise import recognise
from flax_tf.saving import abstract, build, from_pretrained, save_pretrained
from torch_ref import masks as torch_masks
from torch_ref import saving as torch_saving

SMALL = TransformerConfig(
    src_vocab_size=23, tgt_vocab_size=19, d_model=14, num_heads=2, num_layers=1, d_ff=29, max_seq_length=17
)
SHARED = dataclasses.replace(SMALL, tgt_vocab_size=23, shared_embeddings=True)
# An odd width, the long table and the other options at once.
OPTIONS = dataclasses.replace(SHARED, d_model=15, num_heads=5, scale_embeddings=True, pad_id=3, max_seq_length=53)


def batch(config: TransformerConfig = SMALL, rows: int = 4, S: int = 11, T: int = 13) -> tuple[np.ndarray, np.ndarray]:
    """Full rows, padded rows, and a source and a target that are nothing but padding."""
    rng = np.random.default_rng(0)
    src = rng.integers(1, config.src_token_count(), size=(rows, S))
    tgt = rng.integers(1, config.tgt_token_count(), size=(rows, T))
    pad = config.pad_id
    src[1, S // 2 :], tgt[1, T // 3 :], tgt[-1, :], src[-2, :] = pad, pad, pad, pad
    return src, tgt


# Single tokens are in test_seq2seq_check.py.
@pytest.mark.parametrize(
    ("config", "shape"),
    [(dataclasses.replace(SMALL, num_layers=2), {}), (OPTIONS, {"S": 53, "T": 47})],
    ids=["padded", "options-long"],
)
def test_outputs_and_gradients(config, shape):
    assert_same(*twins(config), *batch(config, **shape))


def test_dropout_has_the_same_places():
    reference, model = twins(SMALL)
    inputs = [torch.from_numpy(ids) for ids in batch()]
    plain = reference(*inputs).detach()
    with_fixed_masks(reference, model)
    assert_same(reference, model, *batch())
    assert not np.allclose(plain, reference(*inputs).detach())


def test_dropout_acts_in_training_alone():
    _, model = twins(SMALL)
    expected = run(model, *batch())
    model.train()
    first, second = (run_with_dropout(model, *batch(), seed=seed) for seed in (0, 1))
    assert not np.allclose(first, second) and not np.allclose(first, expected)


def keys(layers: int) -> set[str]:
    """What the classes that seed 002 describes call their tensors."""

    def linear(*names: str) -> set[str]:
        return {f"{name}.{part}" for name in names for part in ("weight", "bias")}

    def attention(name: str) -> set[str]:
        return linear(*(f"{name}.{w}" for w in ("W_q", "W_k", "W_v", "W_o")))

    names = {"encoder_embedding.weight", "decoder_embedding.weight", "positional_encoding.pe"} | linear("fc")
    for i in range(layers):
        encoder, decoder = f"encoder_layers.{i}", f"decoder_layers.{i}"
        names |= attention(f"{encoder}.self_attn") | linear(f"{encoder}.norm1", f"{encoder}.norm2")
        names |= attention(f"{decoder}.self_attn") | attention(f"{decoder}.cross_attn")
        names |= linear(f"{decoder}.norm1", f"{decoder}.norm2", f"{decoder}.norm3")
        names |= linear(*(f"{side}.feed_forward.{fc}" for side in (encoder, decoder) for fc in ("fc1", "fc2")))
    return names


@pytest.mark.parametrize("config", [SMALL, SHARED], ids=["separate", "shared"])
def test_keys_are_the_seeds_and_weights_port_both_ways(config):
    reference, model = twins(config)
    original, ported = state_dict(reference), flax_to_torch(model)
    assert original.keys() == ported.keys() == keys(1)
    assert original["positional_encoding.pe"].shape == (1, 17, 14)
    assert all(ported[name].tobytes() == original[name].tobytes() for name in original)


def test_the_reference_is_pytorchs_own_encoder_and_decoder_layer():
    reference, _ = twins(SMALL)
    encoder = torch.nn.TransformerEncoderLayer(14, 2, 29, dropout=0, batch_first=True, dtype=torch.float64)
    decoder = torch.nn.TransformerDecoderLayer(14, 2, 29, dropout=0, batch_first=True, dtype=torch.float64)
    for theirs, ours in ((encoder, reference.encoder_layers[0]), (decoder, reference.decoder_layers[0])):
        own, tensors = ours.state_dict(), {}
        for attention in {"self_attn", "cross_attn"} & set(dict(ours.named_children())):
            name = attention.replace("cross", "multihead")
            for part in ("weight", "bias"):
                projections = [own[f"{attention}.W_{x}.{part}"] for x in "qkv"]
                tensors[f"{name}.in_proj_{part}"] = torch.cat(projections)
                tensors[f"{name}.out_proj.{part}"] = own[f"{attention}.W_o.{part}"]
        for key, tensor in own.items():
            if "attn" not in key:
                tensors[key.replace("feed_forward.fc", "linear")] = tensor
        theirs.load_state_dict(tensors)
        theirs.train()  # the evaluation mode takes a fused kernel; without dropout the function is the same
    src, tgt = (torch.from_numpy(ids) for ids in batch())
    src[2], tgt[3] = 1, 1  # PyTorch's layers give NaN where a whole row is masked
    src_mask, tgt_mask = reference.generate_mask(src, tgt)
    torch.manual_seed(1)
    x, y = torch.randn(4, 11, 14).double(), torch.randn(4, 13, 14).double()
    real, hidden = tgt != 0, ~torch.ones(13, 13).tril().bool()
    ours = reference.encoder_layers[0](x, src_mask)
    # Another order of the same sums: a few hundred roundings.
    assert relative_error(ours.detach(), encoder(x, src_key_padding_mask=src == 0).detach()) <= 1e-12
    ours = reference.decoder_layers[0](y, x, src_mask, tgt_mask)[real]
    theirs = decoder(y, x, tgt_mask=hidden, memory_key_padding_mask=src == 0)[real]
    assert relative_error(ours.detach(), theirs.detach()) <= 1e-12


def test_masks_are_exact_and_finite_in_half_precision():
    scores, mask = np.array([[-3, 2, 5], [7, -60000, 60000]], np.float16), np.array([[1, 0, 1], [0, 0, 0]], bool)
    ours, pull = jax.vjp(lambda x: masks.masked_softmax(x, jnp.asarray(mask)), jnp.asarray(scores))
    leaf = torch.from_numpy(scores).requires_grad_()
    theirs = torch_masks.masked_softmax(leaf, torch.from_numpy(mask))
    theirs.backward(torch.from_numpy(scores))
    for weights, gradient in (
        (np.asarray(ours), np.asarray(pull(jnp.asarray(scores))[0])),
        (theirs.detach().numpy(), leaf.grad.numpy()),
    ):
        assert weights.dtype == np.float16 and np.isfinite(gradient).all()
        assert weights[0, 1] == 0
        np.testing.assert_allclose(weights[1], 1 / 3, rtol=1e-3)  # a rounding of float16


@pytest.mark.parametrize("width", [14, 15])
def test_the_sinusoidal_table(width):
    config = dataclasses.replace(SMALL, d_model=width, num_heads=1, max_seq_length=101)
    expected = np.zeros((101, width))
    for i in range(width):
        angle = np.arange(101) / 10000 ** (2 * (i // 2) / width)
        expected[:, i] = np.cos(angle) if i % 2 else np.sin(angle)
    ours = np.asarray(PositionalEncoding(config).pe[0])
    theirs = torch_saving.build(config).positional_encoding.pe[0].numpy()
    assert ours.dtype == theirs.dtype == np.float32
    # Built in float32, where an angle of up to 100 is off by a few roundings of 6e-8.
    np.testing.assert_allclose(ours, expected, atol=3e-5)
    np.testing.assert_allclose(ours, theirs, atol=3e-5)


def test_the_table_is_saved_and_not_trained():
    model = abstract(SMALL)
    assert "positional_encoding" not in nnx.state(model, nnx.Param)
    assert "positional_encoding.pe" not in dict(torch_saving.build(SMALL).named_parameters())


def test_no_real_position_sees_a_later_one_or_padding():
    _, model = twins(SMALL)
    src, tgt = (jnp.asarray(ids) for ids in batch())
    logits, changed = run(model, src, tgt), run(model, src, tgt.at[0, 7:].set(5))
    np.testing.assert_array_equal(changed[0, :7], logits[0, :7])
    assert not np.allclose(changed[0, 7:], logits[0, 7:])
    longer = jnp.pad(src, ((0, 0), (0, 3)))
    # Longer rows may be summed in another order: a few roundings.
    np.testing.assert_allclose(run(model, longer, tgt)[:2], logits[:2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(18, 5), (5, 18)], ids=["source", "target"])
def test_lengths_past_the_table_are_an_error_in_both(shape):
    reference, model = twins(SMALL)
    src, tgt = (np.ones((2, length), int) for length in shape)
    with pytest.raises(TokenIdError, match="18 positions, but the position table has 17"):
        run(model, src, tgt)
    with pytest.raises(TokenIdError, match="18 positions, but the position table has 17"):
        reference(torch.from_numpy(src), torch.from_numpy(tgt))


def test_ids_outside_the_vocabulary_are_an_error():
    _, model = twins(SMALL)
    with pytest.raises(TokenIdError, match="token id 23 is outside the vocabulary of 23"):
        model(jnp.full((1, 2), 23), jnp.ones((1, 2), int))


class TestShared:
    """One parameter, used three times."""

    TIED = ("encoder_embedding.weight", "decoder_embedding.weight", "fc.weight")

    def test_there_is_one_matrix(self):
        ours = jax.jit(lambda: build(SHARED).fc.weight[...])()
        reference = torch_saving.build(SHARED)
        separate = dataclasses.replace(SHARED, shared_embeddings=False)
        for count, cls in (
            (lambda m: sum(leaf.size for leaf in jax.tree.leaves(nnx.state(m, nnx.Param))), abstract),
            (lambda m: sum(p.numel() for p in m.parameters()), torch_saving.build),
        ):
            assert count(cls(separate)) - count(cls(SHARED)) == 2 * 23 * 14
        # N(0, 1/D): over 322 values the spread is within a fifth (5 sigma).
        for weight in (np.asarray(ours), reference.fc.weight.detach().numpy()):
            assert weight.std() == pytest.approx(1 / math.sqrt(14), rel=0.2)

    def test_the_tie_survives_a_step(self):
        _, model = twins(SHARED)
        graph, parameters, rest = nnx.split(model, nnx.Param, ...)
        leaves, tree = jax.tree.flatten(parameters)
        moved = tree.unflatten([leaf + step for step, leaf in enumerate(leaves, 1)])  # no two copies move alike
        tensors, before = flax_to_torch(nnx.merge(graph, moved, rest)), flax_to_torch(model)
        for name in self.TIED:
            assert (tensors[name] == tensors[self.TIED[0]]).all() and (tensors[name] >= before[name] + 0.5).all()

    @pytest.mark.parametrize("kept", TIED)
    def test_any_one_key_will_do(self, kept):
        reference, model = twins(SHARED)
        tensors = {name: a for name, a in state_dict(reference).items() if name == kept or name not in self.TIED}
        config = recognise({name: a.shape for name, a in tensors.items()}, {"num_heads": 2})
        assert config == dataclasses.replace(SHARED, dropout=config.dropout)
        ported = flax_to_torch(torch_to_flax(tensors, abstract(SHARED)))
        assert all(ported[name].tobytes() == array.tobytes() for name, array in flax_to_torch(model).items())

    def test_none_of_the_keys_is_an_error(self):
        tensors = {name: a for name, a in state_dict(twins(SHARED)[0]).items() if name not in self.TIED}
        with pytest.raises(StateDictError, match=r"missing from the checkpoint \(3\)"):
            torch_to_flax(tensors, abstract(SHARED))

    def test_keys_that_differ_are_refused(self):
        tensors = state_dict(twins(SHARED)[0])
        tensors["fc.weight"] = tensors["fc.weight"].copy()
        tensors["fc.weight"][0, 0] += 1e-15
        with pytest.raises(StateDictError) as caught:
            torch_to_flax(tensors, abstract(SHARED))
        assert "tied in the model, but different in the checkpoint (1)" in str(caught.value)
        assert ", ".join(sorted(self.TIED)) in str(caught.value)

    def test_it_is_written_once_and_tied_again_by_both(self, tmp_path):
        reference, model = twins(SHARED)
        save_pretrained(model, tmp_path / "saved")
        with safe_open(tmp_path / "saved" / "model.safetensors", "np") as file:
            assert set(self.TIED) & set(file.keys()) == {"decoder_embedding.weight"}
        back, theirs = from_pretrained(tmp_path / "saved"), torch_saving.from_pretrained(tmp_path / "saved")
        assert back.fc.weight is back.decoder_embedding.embedding is back.encoder_embedding.embedding
        assert theirs.fc.weight is theirs.decoder_embedding.weight is theirs.encoder_embedding.weight
        for name, array in state_dict(reference).items():
            assert array.tobytes() == flax_to_torch(back)[name].tobytes() == state_dict(theirs)[name].tobytes()


def test_recognised_from_shapes_but_for_the_number_of_heads():
    shapes = {name: array.shape for name, array in state_dict(twins(SMALL)[0]).items()}
    with pytest.raises(InputError, match="this is a transformer, and its shapes do not tell num_heads"):
        recognise(shapes, {})
    assert recognise(shapes, {"num_heads": 2}) == SMALL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads 3 does not divide d_model 14"),
        ({"d_ff": 0}, "d_ff must be a whole number of at least 1"),
        ({"end_id": 19}, "end_id must be a token id from 0 to tgt_vocab_size - 1"),
        ({"end_id": 0}, "end_id 0 must differ from start_id and pad_id"),
        ({"shared_embeddings": True}, "shared_embeddings needs one vocabulary"),
        ({"src_vocab_size": 2, "pad_id": 5}, "pad_id 5 is outside the source vocabulary of 2"),
    ],
)
def test_impossible_configs(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SMALL, **change)
