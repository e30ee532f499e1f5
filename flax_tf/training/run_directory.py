"""The directory of a run: whether it can be used, and whether the run in it is the one that is asked for."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flax_tf.errors import InputError
from flax_tf.files import try_to_write
from flax_tf.training.config import RunConfig

# What may change between the start of a run and a resume: it decides what is written, not what is learned.
_FREE = (
    "preset",
    "run_dir",
    "resume",
    "steps_per_call",
    "log_interval",
    "eval_interval",
    "eval_batches",
    "keep_memory",
    "checkpoint_interval",
    "sample",
    "decoding",
)


def check_run_dir(run_dir: Path, resume: bool) -> None:
    """Raises InputError, having written nothing, if the run can't be kept here: before the long work, not after it."""
    checkpoints = run_dir / "checkpoints"
    if resume and not checkpoints.is_dir():
        raise InputError(f"{run_dir} holds no run to resume: leave out --resume, or name a run with --run_dir")
    try:
        if run_dir.exists() and not resume and any(run_dir.iterdir()):
            what = "a run: continue it with --resume" if checkpoints.is_dir() else "other files: empty it"
            raise InputError(f"{run_dir} already holds {what}, or choose another --run_dir")
        try_to_write(run_dir)
    except OSError as error:
        raise InputError(
            f"can't write the run directory {run_dir} ({error.strerror}): choose another --run_dir"
        ) from None


def identify(config: RunConfig, total_steps: int, text: str) -> dict[str, Any]:
    """What is saved in each checkpoint to know the run by; plain JSON. `text` is a hash of the tokenised text."""
    about = {"config": dataclasses.asdict(config), "total_steps": total_steps, "text": text}
    return json.loads(json.dumps(about))


def check_same_run(run_dir: Path, saved: dict[str, Any], now: dict[str, Any], step: int) -> None:
    """Raises InputError that names the first setting in which a checkpoint and the run that would resume it differ."""
    old, new = dict(_flatten(saved["config"])), dict(_flatten(now["config"]))
    for key in sorted(old.keys() | new.keys()):
        if key.split(".")[0] not in (*_FREE, "steps", "epochs") and old.get(key) != new.get(key):
            raise InputError(
                f"{run_dir} was started with {key} {old.get(key)}, not {new.get(key)}: resume with the same "
                "settings, or start another run with --run_dir"
            )
    if saved["text"] != now["text"]:
        raise InputError(f"{run_dir} was started on another text: it has changed, start another run with --run_dir")
    total_steps = now["total_steps"]
    if total_steps != saved["total_steps"] and new["optimizer.schedule"] != "constant":
        raise InputError(
            f"{run_dir} was started for {saved['total_steps']} steps, not {total_steps}, which would change its "
            "learning rates: only a run with optimizer.schedule constant can be made longer"
        )
    if total_steps < step:
        raise InputError(f"{run_dir} has done {step} steps already: resume with --steps {step} or more")


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
