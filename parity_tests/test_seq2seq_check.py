"""`flax-tf check` on the sequence-to-sequence systems: every submodule and every gradient, by the contract."""

import dataclasses

import numpy as np
import pytest
import torch
from models import ATTN_RNN, RNN, TRANSFORMER, reference, state_arrays

from flax_tf.errors import InputError
from flax_tf.parity.check import check
from flax_tf.parity.report import Report, Row
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


def test_a_tie_that_is_saved_once_is_checked() -> None:
    """As `save_pretrained` writes it: one name of the three."""
    tensors = state_arrays(reference(SHARED))
    once = {name: array for name, array in tensors.items() if name not in ("encoder_embedding.weight", "fc.weight")}
    assert check(once, tensors, SHARED).culprit is None
    with pytest.raises(InputError, match=r"decoder_embedding\.weight is int32: a model computes with"):
        check({**once, "decoder_embedding.weight": np.zeros((37, 15), np.int32)}, tensors, SHARED)


def test_a_gradient_that_fails_in_float32_alone_is_tried_on_other_inputs() -> None:
    """But nothing else is: neither an output, nor what is wrong in float64."""
    good = {kind: Row(kind, "name", "", 0.0, 1e-7, 1e-7) for kind in ("output", "gradient")}
    jump = dataclasses.replace(good["gradient"], float32=1e-4)
    wrong = dataclasses.replace(jump, float64=1e-4)
    inaccurate = dataclasses.replace(good["output"], float32=1e-4)
    lucky = Report((good["output"], good["gradient"]), (), None)
    for rows, unpaired, alone, saved in (
        ((good["output"], jump), (), True, True),
        ((good["output"], wrong), (), False, False),
        ((inaccurate, jump), (), False, False),
        ((good["output"], jump), ("parameter x",), False, False),
        ((good["output"], good["gradient"]), (), False, True),
    ):
        report = Report(rows, unpaired, None)
        assert report.in_float32_gradients_alone is alone
        assert report.luckier(lucky).ok is saved
        assert not report.luckier(Report((good["output"], jump), (), None)).ok or report.ok


def test_a_moved_weight_of_a_module_within_a_scan_is_located() -> None:
    tensors = state_arrays(reference(MASKED))
    moved = tensors["decoder.attention.Wa.weight"].copy()
    moved[3, 5] += 1e-3
    report = check(tensors, {**tensors, "decoder.attention.Wa.weight": moved}, MASKED)
    assert not report
    assert report.culprit == "decoder.attention.Wa"
