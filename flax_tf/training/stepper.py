"""Taking training steps with little work for the host, however many parameters there are."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from flax_tf.memory import release_memory
from flax_tf.training.sharding import shard
from flax_tf.training.step import Batch, TrainState
from flax_tf.training.task import HostBatch

Shapes = tuple[tuple[int, ...], ...]


class Stepper:
    """Holds the state of a run between its steps, and takes these by programs that are compiled once.

    Between two steps the state is a flat list of arrays, which is what a compiled program takes and gives: to walk
    through the tree of the model for each call would take longer than small models compute.
    """

    def __init__(
        self,
        state: TrainState,
        train: Callable[[TrainState, Batch], TrainState],
        mesh: Mesh,
        examples: Sequence[HostBatch],
        steps_per_call: int = 1,
    ):
        """Compiles `train` for the shapes of the examples, for one step a call and, if more, for `steps_per_call`.

        `state` lies on the mesh, and is given away: its arrays are donated to the first call.
        """
        self._leaves, self._tree = jax.tree.flatten(state)
        self._mesh, self._steps_per_call = mesh, steps_per_call

        def train_one(leaves: list[jax.Array], batch: Batch) -> list[jax.Array]:
            return jax.tree.leaves(train(jax.tree.unflatten(self._tree, leaves), batch))

        def train_several(leaves: list[jax.Array], batches: Batch) -> list[jax.Array]:
            return jax.lax.scan(lambda leaves, batch: (train_one(leaves, batch), None), leaves, batches)[0]

        self._programs: dict[tuple[int, Shapes], Any] = {}
        functions: dict[int, Callable[..., list[jax.Array]]] = {1: train_one}
        if steps_per_call > 1:
            functions[steps_per_call] = train_several
        for batch in examples:
            for count, function in functions.items():
                program = jax.jit(function, donate_argnums=0).lower(self._leaves, self._placed([batch] * count))
                self._programs[count, shapes(batch)] = program.compile()
        release_memory()  # what compiling took; otherwise it stays beside what the steps take

    @property
    def state(self) -> TrainState:
        """The state after the steps so far. The next call takes its arrays away."""
        return jax.tree.unflatten(self._tree, self._leaves)

    @state.setter
    def state(self, state: TrainState) -> None:
        self._leaves = jax.tree.leaves(state)

    def upcoming(self, step: int, stop: int) -> range:
        """The steps from `step` on that make the next call, none of them `stop` or later.

        Calls of several steps begin at multiples of their number, so that a run that is resumed makes the same ones.
        """
        count = self._steps_per_call
        return range(step, step + count) if step % count == 0 and step + count <= stop else range(step, step + 1)

    def take(self, batches: Sequence[HostBatch]) -> None:
        """A step on each of the batches: in one call if they are `steps_per_call` of one shape, else one by one."""
        if len(batches) != self._steps_per_call or len({shapes(batch) for batch in batches}) > 1:
            calls = [[batch] for batch in batches]
        else:
            calls = [batches]
        for call in calls:
            self._leaves = self._programs[len(call), shapes(call[0])](self._leaves, self._placed(call))

    def _placed(self, batches: Sequence[HostBatch]) -> Batch:
        """The batches on the devices, with an axis for them in front if they are several."""
        if len(batches) == 1:
            return shard(self._mesh, batches[0])
        return shard(self._mesh, jax.tree.map(lambda *arrays: np.stack(arrays), *batches), axis=1)


def shapes(batch: HostBatch) -> Shapes:
    """Those of the arrays of a batch: what a compiled step can take is known by them."""
    return tuple(array.shape for array in batch.values())
