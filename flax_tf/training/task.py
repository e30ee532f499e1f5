"""What a run is about, in the one form that the training loop knows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from tokenizers import Tokenizer

from flax_tf.training.config import RunConfig
from flax_tf.training.step import LossFunction

HostBatch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """The data of a run, its loss, and how what was learned is measured and shown."""

    config: RunConfig
    """The run's, with the sizes of the vocabularies filled in."""
    name: str
    """The data's."""
    about: str
    """The data in a line."""
    key: str
    """A hash of the data."""
    loss: LossFunction
    valid_loss: LossFunction

    train_batches: grain.MapDataset
    """The batch of step k, from 0 and without end; the same for the same k."""
    steps_per_epoch: int
    shapes: Sequence[HostBatch]
    """A training batch of each shape that there is: what the step is compiled for."""
    valid_batches: grain.MapDataset
    """The validation split, in order."""

    tokenizers: Sequence[Tokenizer]
    """What is saved with the model: none, one for all text, or the source's and the target's."""
    measure: Callable[[Any, bool], dict[str, float]]
    """(model, whether the run is over) -> further measures of the model, by name."""
    show: Callable[[Any], str]
    """Examples of what the model does, to be printed; "" for none."""
