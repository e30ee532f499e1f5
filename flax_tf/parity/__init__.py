"""Proof that a Flax module and a PyTorch module are the same model, or the name of the layer where they differ."""

from flax_tf.parity.compare import compare, compare_recorded, record, recorded_weights
from flax_tf.parity.html import write_html
from flax_tf.parity.report import Report, Row, write_json
from flax_tf.parity.training import compare_training, same_optimizer
from flax_tf.parity.training_report import TrainingReport

__all__ = [
    "Report",
    "Row",
    "TrainingReport",
    "compare",
    "compare_recorded",
    "compare_training",
    "record",
    "recorded_weights",
    "same_optimizer",
    "write_html",
    "write_json",
]
