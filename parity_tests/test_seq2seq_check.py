"""`flax-tf check` on the sequence-to-sequence systems: every submodule and every gradient, by the contract."""

import dataclasses

import numpy as np
import pytest
import torch
from flax import nnx
from models import ATTN_RNN, RNN, TRANSFORMER, reference, state_arrays

from flax_tf.errors import InputError
from flax_tf.layers import ReLU
from flax_tf.parity import compare, tolerances
from flax_tf.parity.check import check
from flax_tf.parity.tolerances import GRADIENT_FLOAT64
from flax_tf.porting import torch_to_flax

SHARED = dataclasses.replace(TRANSFORMER, tgt_vocab_size=37, shared_embeddings=True, max_seq_length=7)
MASKED = dataclasses.replace(ATTN_RNN, mask_source=True)


@pytest.mark.parametrize("config", [SHARED, RNN, MASKED], ids=lambda config: config.arch)
def test_every_submodule_and_gradient_is_checked_and_passes(config) -> None:
    module = reference(config)
    tensors = state_arrays(module)
    report = check(tensors, tensors, config)
    assert not report.unpaired
    for row in report.rows:
        # The float32 gradients of so small a model sit at the floor of their rule, where it is rounding luck.
        assert row.float64 <= GRADIENT_FLOAT64 if row.kind == "gradient" else row.ok, report.summary()
    called = {path or "(model)" for path, m in module.named_modules() if not isinstance(m, torch.nn.ModuleList)}
    assert {row.name for row in report.rows if row.kind == "output"} == called
    parameters = dict(module.named_parameters(remove_duplicate=False))
    assert {row.name for row in report.rows if row.kind == "gradient"} == parameters.keys()


def test_a_tie_that_is_saved_once_is_checked() -> None:
    """As `save_pretrained` writes it: one name of the three."""
    tensors = state_arrays(reference(SHARED))
    once = {name: array for name, array in tensors.items() if name not in ("encoder_embedding.weight", "fc.weight")}
    assert check(once, tensors, SHARED).culprit is None
    with pytest.raises(InputError, match=r"decoder_embedding\.weight is int32: a model computes with"):
        check({**once, "decoder_embedding.weight": np.zeros((37, 15), np.int32)}, tensors, SHARED)


def test_a_relu_that_flips_in_float32_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of its inputs is zero but for a rounding, which each framework's float32 makes on its own."""
    x = np.random.default_rng(0).standard_normal((5, 101)).astype(np.float32)
    flipped = 0
    for seed in range(12):
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Linear(101, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
        with torch.no_grad():
            module[0].bias[3] -= module.double()[0](torch.from_numpy(x).double())[2, 3]
        module.float()
        model = nnx.Sequential(nnx.Linear(101, 7, rngs=nnx.Rngs(0)), ReLU(), nnx.Linear(7, 3, rngs=nnx.Rngs(0)))
        torch_to_flax(state_arrays(module), model)
        for runs in ("NUDGES", "OWN_NUDGES"):
            monkeypatch.setattr(tolerances, runs, 0)
        report = compare(module, model, x)
        if not report:
            assert report.in_low_alone
            flipped += 1
            monkeypatch.undo()
            report = compare(module, model, x)
        assert report.ok, report.summary()
    assert flipped


def test_a_moved_weight_of_a_module_within_a_scan_is_located() -> None:
    tensors = state_arrays(reference(MASKED))
    moved = tensors["decoder.attention.Wa.weight"].copy()
    moved[3, 5] += 1e-3
    report = check(tensors, {**tensors, "decoder.attention.Wa.weight": moved}, MASKED)
    assert not report
    assert report.culprit == "decoder.attention.Wa"
