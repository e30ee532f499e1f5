"""Checkpoints of a run, by orbax: this is the only module that imports it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint.experimental.v1 as ocp

from flax_tf.data.hub import one_line, quiet
from flax_tf.errors import InputError
from flax_tf.training.step import TrainState

KEEP = 2  # the newest checkpoints, so that one is left if the other is damaged

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run in `directory`, each at `directory/STEP`, complete or not there at all."""

    def __init__(self, directory: Path):
        training: Any = ocp.training  # whose own policies don't fit its annotations
        self._orbax = training.Checkpointer(
            str(directory.absolute()),
            save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=training.preservation_policies.LatestN(KEEP),
            cleanup_tmp_directories=True,  # what a killed run was writing
        )

    def save(self, state: TrainState, about: dict[str, Any]) -> None:
        """Writes the state and `about`, which must be JSON, and deletes what is older than the newest few.

        Returns when the files are complete. Raises OSError if they can't be written.
        """
        step = int(state.step)
        try:
            with quiet("absl"):  # which logs the traceback of each of its threads
                self._orbax.save(step, _named(state), custom_metadata=about, force=True)
        except Exception as error:  # the storage library has kinds of its own
            raise OSError(f"the checkpoint of step {step} can't be written: {one_line(error)}") from error

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or None if there is none."""
        latest = self._orbax.latest
        return None if latest is None else latest.step

    def load(self, like: TrainState, check: Callable[[dict[str, Any], int], None]) -> TrainState:
        """The state in the newest checkpoint that can be read, with the tree, dtypes and placement of `like`.

        `check` gets what was saved beside the state, and the step, and may raise. Checkpoints that can't be read are
        deleted, with a warning, once a readable one is found. Raises InputError if there is none.
        """
        names = _named(like)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), names)
        damaged = []
        for step in sorted((found.step for found in self._orbax.checkpoints), reverse=True):
            try:
                with quiet("absl"):
                    check(self._orbax.metadata(step).custom_metadata, step)
                    loaded = self._orbax.load(step, abstract)
            except InputError:
                raise
            except Exception as error:  # whatever the storage library finds wrong
                log.warning("the checkpoint of step %d can't be read (%s)", step, type(error).__name__)
                damaged.append(step)
                continue
            for other in damaged:
                self._orbax.delete(other)
            return jax.tree.unflatten(jax.tree.structure(like), [loaded[name] for name in names])
        raise InputError(
            f"{self._orbax.directory} holds no checkpoint that can be read: start another run with --run_dir"
        )


def _named(state: TrainState) -> dict[str, jax.Array]:
    """The arrays by their paths in the tree: a checkpoint doesn't depend on the classes of its nodes."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}
