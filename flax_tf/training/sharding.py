"""Data parallelism: every device holds the whole state and takes its share of each batch."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_tf.errors import InputError


def data_mesh(batch_size: int | None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the devices (all local ones by default) along one axis, `data`.

    Raises InputError if they can't share a batch of a given size evenly.
    """
    devices = jax.local_devices() if devices is None else devices
    if batch_size is not None and batch_size % len(devices):
        raise InputError(f"batch_size {batch_size} does not divide by the {len(devices)} devices: choose a multiple")
    # Explicit axes, the default, would want an out_sharding at every lookup.
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def replicate(mesh: Mesh, tree: Any) -> Any:
    """The tree with a whole copy of each array on every device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def shard(mesh: Mesh, batch: Any, axis: int = 0) -> Any:
    """The batch with its first axis, or another, spread over the devices."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(*[None] * axis, "data")))
