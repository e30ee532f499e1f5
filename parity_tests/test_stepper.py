"""Steps with little work for the host, and programs that the next process finds compiled."""

import logging
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from models import ids
from runs import TRAIN, run
from test_training import TINY, TINY_MODEL, tiny_batch

from flax_tf import compilation
from flax_tf.loss import language_model_loss
from flax_tf.saving import build
from flax_tf.training.optimizer import OptimizerConfig, build_optimizer
from flax_tf.training.sharding import data_mesh, replicate
from flax_tf.training.step import forget_loss, start
from flax_tf.training.stepper import Stepper

MESH = data_mesh(1, jax.devices()[:1])
# Batches of two shapes, as those of ragged data.
SHORT, LONG = ({name: array[:, :length] for name, array in tiny_batch().items()} for length in (3, 7))


def stepper(steps_per_call: int, dtype: str = "float32", dropout: float = 0.3) -> Stepper:
    config = type(TINY_MODEL)(**{**TINY_MODEL.__dict__, "dropout": dropout})
    model = build(config)
    state, steps = start(model, build_optimizer(OptimizerConfig(), 100), language_model_loss, seed=5)
    state = jax.tree.map(lambda x: x.astype(dtype) if jax.numpy.issubdtype(x.dtype, np.floating) else x, state)
    return Stepper(replicate(MESH, state), steps.train, MESH, [SHORT, LONG], steps_per_call)


def batch(step: int) -> dict[str, np.ndarray]:
    """Of step `step`: long at first, then of both lengths in turn."""
    length = 7 if step < 30 or step % 7 < 4 else 3
    tokens = ids(3, length + 1, seed=step).astype(np.int32)
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


def losses(steps_per_call: int, stop: int = 50) -> np.ndarray:
    """The mean losses of every ten steps up to `stop`, in float64, as the training loop takes its steps."""
    running, step, found = stepper(steps_per_call, "float64"), 0, []
    while step < stop:
        upcoming = running.upcoming(step, step - step % 10 + 10)
        running.take([batch(each) for each in upcoming])
        step = upcoming.stop
        if step % 10 == 0:
            state = running.state
            found.append(float(state.loss_sum) / float(state.token_count))
            running.state = forget_loss(state)
    assert int(running.state.step) == stop
    return np.array(found)


@pytest.mark.parametrize("steps_per_call", [3, 5])
def test_several_steps_a_call_learn_what_single_steps_learn(steps_per_call: int) -> None:
    with jax.enable_x64(True):
        one, several = losses(1), losses(steps_per_call)
    # The same sums in programs that are compiled differently: roundings, which 50 steps magnify.
    np.testing.assert_allclose(several, one, rtol=1e-10)


def test_calls_end_where_the_loop_stops_and_begin_at_the_same_steps_after_a_resume() -> None:
    running = stepper(4)

    def calls(step: int, stop: int) -> list[tuple[int, int]]:
        found = []
        while step < stop:
            upcoming = running.upcoming(step, stop)
            found.append((upcoming.start, upcoming.stop))
            step = upcoming.stop
        return found

    whole = calls(0, 11)
    assert whole == [(0, 4), (4, 8), (8, 9), (9, 10), (10, 11)]
    assert calls(4, 11) == whole[1:]
    assert calls(9, 11) == whole[3:]
    assert calls(6, 11) == [(6, 7), (7, 8), *whole[2:]]  # as no run of its own stops there


def test_nothing_is_compiled_after_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        running = stepper(3)
        compiled = [r.getMessage() for r in caplog.records if "Finished XLA compilation of jit(train" in r.getMessage()]
        assert len(compiled) == 4  # two shapes, one step and three
        caplog.clear()
        for step in range(0, 48, 3):
            running.take([batch(each) for each in range(step, step + 3)])
        compiled = [r.getMessage() for r in caplog.records if "Finished XLA compilation of jit(train" in r.getMessage()]
    assert compiled == []


def test_the_next_process_finds_its_programs_compiled(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("so it goes on and on, as far as it goes. " * 40)
    (tmp_path / "tiny.yaml").write_text(TINY.replace("TEXT", "text.txt"))
    compiled = tmp_path / "cache" / "compiled"

    def start_run(name: str) -> tuple[set[str], list[str]]:
        # Not where the tests keep theirs.
        program = (
            "import os, runpy, sys; os.environ.pop('JAX_COMPILATION_CACHE_DIR'); "
            "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        )
        arguments = ["-c", program, TRAIN, "--config", "tiny.yaml", "--run_dir", name, "--steps", "3"]
        done = run([*arguments, "--log_interval", "1"], tmp_path, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.2")
        assert done.code == 0, done.err
        warned = [line for line in done.err.splitlines() if not line.startswith("step ")]
        return {path.name for path in compiled.rglob("*-cache")}, warned

    def programs(names: set[str]) -> set[str]:
        """Those that always take long enough to compile to be kept."""
        return {name for name in names if "train_one" in name or "evaluate" in name}

    first, warned = start_run("first")
    assert warned == []
    assert len(programs(first)) == 2
    # A damaged entry is compiled again, without a word.
    (damaged,) = (path for path in compiled.rglob("*train_one*-cache"))
    damaged.write_bytes(damaged.read_bytes()[:100])
    second, warned = start_run("second")
    assert warned == []
    assert programs(second) == programs(first)

    compiled.rename(tmp_path / "kept")
    compiled.write_text("a file in the way")
    _, (warning,) = start_run("third")
    assert "can't be written: programs will be compiled anew" in warning


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch, caplog) -> None:
    for name in ("FLAX_TF_CACHE", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    # As in a container that runs under a number: no HOME, and no entry among the users.
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    config: Any = jax.config
    kept = config.jax_compilation_cache_dir
    config.update("jax_compilation_cache_dir", None)
    try:
        compilation.keep_programs()
    finally:
        config.update("jax_compilation_cache_dir", kept)
    (warning,) = caplog.messages
    assert warning.startswith("there is no home directory for a cache (set FLAX_TF_CACHE): programs will be compiled")
