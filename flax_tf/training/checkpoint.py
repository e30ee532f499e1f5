"""Checkpoints of a run, by orbax: this is the only module that imports it."""

import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint.experimental.v1 as ocp

from flax_tf.training.step import TrainState

KEEP = 2  # the newest checkpoints, so that one is left if the other is damaged

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run in `directory`, each at `directory/STEP`, complete or not there at all."""

    def __init__(self, directory: Path):
        policies = ocp.training.preservation_policies
        self._orbax = ocp.training.Checkpointer(
            directory.absolute(),
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=policies.LatestN(KEEP),
            cleanup_tmp_directories=True,  # what a killed run was writing
        )

    def save(self, state: TrainState, about: dict[str, Any]) -> None:
        """Writes the state and `about`, which must be JSON, and deletes what is older than the newest few.

        Returns when the files are complete. Raises OSError if they can't be written.
        """
        try:
            self._orbax.save(int(state.step), _named(state), custom_metadata=about, force=True)
        except OSError:
            raise
        except Exception as error:  # the storage library has its own kinds
            raise OSError(str(error)) from error

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or None if there is none."""
        latest = self._orbax.latest
        return None if latest is None else latest.step

    def about(self) -> dict[str, Any]:
        """What was saved beside the state of the newest checkpoint."""
        return self._orbax.metadata().custom_metadata

    def load(self, like: TrainState) -> TrainState:
        """The state in the newest checkpoint, with the tree, dtypes and placement of `like`."""
        names = _named(like)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), names)
        loaded = self._orbax.load(abstract_state=abstract)
        return jax.tree.unflatten(jax.tree.structure(like), [loaded[name] for name in names])

    def close(self) -> None:
        self._orbax.close()


def _named(state: TrainState) -> dict[str, jax.Array]:
    """The arrays by their paths in the tree: a checkpoint doesn't depend on the classes of its nodes."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}
