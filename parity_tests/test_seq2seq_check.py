"""`flax-tf check` on the sequence-to-sequence systems: every submodule and every gradient, by the contract."""

import dataclasses

import pytest
import torch
from models import reference, state_arrays

from flax_tf.config import AttnRNNConfig, RNNConfig, TransformerConfig
from flax_tf.parity.check import check

TRANSFORMER = TransformerConfig(
    src_vocab_size=37, tgt_vocab_size=31, d_model=15, num_heads=3, num_layers=1, d_ff=29, max_seq_length=13
)
SHARED = dataclasses.replace(TRANSFORMER, tgt_vocab_size=37, shared_embeddings=True)
PLAIN = RNNConfig(src_vocab_size=37, tgt_vocab_size=31, hidden_size=11, max_length=5)
ATTENTION = AttnRNNConfig(src_vocab_size=37, tgt_vocab_size=31, hidden_size=11, max_length=5, mask_source=True)


@pytest.mark.parametrize(
    "config", [TRANSFORMER, SHARED, PLAIN, ATTENTION], ids=["transformer", "shared", "rnn", "attn_rnn"]
)
def test_every_submodule_and_gradient_is_checked_and_passes(config) -> None:
    module = reference(config)
    tensors = state_arrays(module)
    report = check(tensors, tensors, config)
    assert report.ok, report.summary()
    called = {path or "(model)" for path, m in module.named_modules() if not isinstance(m, torch.nn.ModuleList)}
    assert {row.name for row in report.rows if row.kind == "output"} == called
    parameters = dict(module.named_parameters(remove_duplicate=False))
    assert {row.name for row in report.rows if row.kind == "gradient"} == parameters.keys()
