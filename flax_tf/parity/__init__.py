"""Proof that a Flax module and a PyTorch module are the same model, or the name of the layer where they differ."""

from flax_tf.parity.compare import compare, compare_recorded, record, recorded_weights
from flax_tf.parity.report import Report, Row

__all__ = ["Report", "Row", "compare", "compare_recorded", "record", "recorded_weights"]
