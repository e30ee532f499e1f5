"""Checkpoints of a run, by orbax: this is the only module that imports it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from flax_tf.data.hub import one_line, quiet
from flax_tf.errors import InputError
from flax_tf.training.step import TrainState

# They log the traceback of each thread of the storage library.
_THREADS = ("absl", "asyncio")
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
            with quiet(*_THREADS):
                self._orbax.save(step, _named(state), custom_metadata=about, force=True)
        except Exception as error:  # the storage library has kinds of its own
            for name in _THREADS:  # some end later
                logging.getLogger(name).disabled = True
            raise OSError(f"the checkpoint of step {step} can't be written: {one_line(error)}") from error

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or None if there is none."""
        latest = self._orbax.latest
        return None if latest is None else latest.step

    def load(self, like: TrainState, check: Callable[[dict[str, Any], int], None]) -> TrainState:
        """The state in the newest checkpoint that can be read, with the tree, shapes and placement of `like`.

        `check` gets what was saved beside the state, and the step, and may raise. Checkpoints that can't be read are
        deleted, with a warning, once a readable one is found. Raises InputError if there is none.
        """
        damaged = []
        for step in sorted((found.step for found in self._orbax.checkpoints), reverse=True):
            try:
                with quiet("absl"):
                    metadata: Any = self._orbax.metadata(step)
                    check(metadata.custom_metadata, step)
                    loaded = self._orbax.load(step, _abstract(like, metadata))
            except InputError:
                raise
            except Exception as error:  # whatever the storage library finds wrong
                log.warning("the checkpoint of step %d can't be read (%s)", step, type(error).__name__)
                damaged.append(step)
                continue
            for other in damaged:
                self._orbax.delete(other)
            return jax.tree.unflatten(jax.tree.structure(like), [loaded[name] for name in _named(like)])
        raise InputError(
            f"{self._orbax.directory} holds no checkpoint that can be read: start another run with --run_dir"
        )


def read_newest(directory: Path, like: Callable[[dict[str, Any]], TrainState]) -> TrainState:
    """The newest checkpoint that can be read of a run, which may be going on: nothing in `directory` is changed.

    `like` makes a state of the same tree and shapes from what was saved beside it, and may raise.
    Raises InputError if there is no checkpoint that can be read.
    """
    found = [path for path in directory.iterdir() if path.name.isdecimal()] if directory.is_dir() else []
    for path in sorted(found, key=lambda path: int(path.name), reverse=True):
        try:
            with quiet("absl"):
                metadata: Any = ocp.metadata(str(path.absolute()))
                state = like(metadata.custom_metadata)
                loaded: Any = ocp.load(str(path.absolute()), _abstract(state, metadata))
        except InputError:
            raise
        except Exception as error:  # whatever the storage library finds wrong
            log.warning("the checkpoint of step %s can't be read (%s)", path.name, type(error).__name__)
            continue
        return jax.tree.unflatten(jax.tree.structure(state), [loaded[name] for name in _named(state)])
    raise InputError(f"{directory} holds no checkpoint that can be read: name the directory of a run of train_jax.py")


def _abstract(like: TrainState, metadata: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and placement of `like` with the dtypes that were saved: a run keeps those that it started from."""
    names, saved = _named(like), metadata.metadata
    dtypes = {name: saved[name].dtype if name in saved else x.dtype for name, x in names.items()}
    if not jax.config.read("jax_enable_x64") and any(dtype == np.float64 for dtype in dtypes.values()):
        raise InputError("the run is of 64 bits, and JAX would cut them to 32: set JAX_ENABLE_X64=1")
    return {name: jax.ShapeDtypeStruct(x.shape, dtypes[name], sharding=x.sharding) for name, x in names.items()}


def _named(state: TrainState) -> dict[str, jax.Array]:
    """The arrays by their paths in the tree: a checkpoint doesn't depend on the classes of its nodes."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}
