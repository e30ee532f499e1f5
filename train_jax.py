#!/usr/bin/env python3
"""Trains a model in JAX. `python train_jax.py` runs the preset docs; `--help` shows every setting."""

import contextlib
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_tf.command import INTERRUPTED, OK, run
from flax_tf.errors import InputError
from flax_tf.files import replacing
from flax_tf.memory import keep_memory
from flax_tf.saving import build, save_pretrained
from flax_tf.training.checkpoint import Checkpoints
from flax_tf.training.command_line import parse
from flax_tf.training.config import AttnRNNRun, LanguageModelRun, RNNRun, RunConfig, TransformerRun
from flax_tf.training.init_from import fill, read_source, take_over
from flax_tf.training.interrupt import putting_off_interrupts
from flax_tf.training.language_modelling import language_modelling
from flax_tf.training.metrics import Metrics, describe, plot_losses, read_rows
from flax_tf.training.optimizer import build_optimizer, learning_rates
from flax_tf.training.run_directory import check_run_dir, check_same_run, identify
from flax_tf.training.sharding import data_mesh, replicate, shard
from flax_tf.training.step import TrainState, all_finite, forget_loss, start
from flax_tf.training.stepper import Stepper
from flax_tf.training.task import Task
from flax_tf.training.translation import translation

PROG = "train_jax.py"


def train(config: RunConfig, settings: str) -> int:
    """Runs `config`, whose YAML is `settings`. Returns the exit code; raises InputError for wrong input."""
    # Whatever is wrong with the input is found here, before anything is written.
    run_dir = Path(config.run_dir or f"runs/{config.preset}")
    check_run_dir(run_dir, config.resume)
    if config.keep_memory:
        keep_memory()
    mesh = data_mesh(config.fixed_batch_size)
    task = prepare(config, mesh.size)
    config: Any = task.config
    total_steps = config.total_steps(task.steps_per_epoch)
    about = identify(config, total_steps, task.key)

    model = build(config.model, config.seed)
    source = None if config.resume or config.init_from is None else read_source(config.init_from)
    if source is not None:
        fill(model, source)
    learning_rate = learning_rates(config.optimizer, total_steps)
    state, steps = start(
        model, build_optimizer(config.optimizer, total_steps), task.loss, config.seed, valid_loss=task.valid_loss
    )
    if source is not None:
        state = take_over(source, state, model, config.optimizer, total_steps)
    state = replicate(mesh, state)

    checkpoints = Checkpoints(run_dir / "checkpoints")
    with telling_how_to_resume(run_dir, checkpoints), putting_off_interrupts() as interrupted:
        if config.resume:
            state = checkpoints.load(state, lambda saved, step: check_same_run(run_dir, saved, about, step))
        else:
            (run_dir / "config.yaml").write_text(settings, encoding="utf-8")
            checkpoints.save(state, about)
        step = int(state.step)
        if step == total_steps and (run_dir / "loss.png").is_file():
            print(f"{run_dir}: all {total_steps:,} steps are done, there is nothing to resume")
            return OK

        print(task.about)
        if source is not None:
            print(source.about)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        print(f"{parameters:,} parameters, {mesh.size} {jax.default_backend()} device(s), {total_steps:,} steps")
        counted = float(state.token_count)
        intervals = config.log_interval, config.eval_interval, config.checkpoint_interval
        # One program for each shape of a batch (two with steps_per_call), and none is made later.
        stepper = Stepper(state, steps.train, mesh, task.shapes, config.steps_per_call)
        with Metrics(run_dir, step, total_steps) as metrics:
            clock = time.perf_counter()
            while step < total_steps:
                stop_at = min(total_steps, *(next_multiple(step, interval) for interval in intervals))
                upcoming = stepper.upcoming(step, stop_at)
                batches: Any = [task.train_batches[each] for each in upcoming]
                stepper.take(batches)
                step = upcoming.stop
                last = step == total_steps
                if last or step % config.log_interval == 0:
                    state = stepper.state
                    check_finite(state)  # waits for the device, which is done nowhere else in between
                    tokens = float(state.token_count)
                    rate = np.asarray(learning_rate(step - 1)).item()
                    seconds = time.perf_counter() - clock
                    metrics.train(step, float(state.loss_sum) / tokens, rate, (tokens - counted) / seconds)
                    stepper.state = forget_loss(state)
                    clock, counted = time.perf_counter(), 0.0
                if last or step % config.eval_interval == 0:
                    state = stepper.state
                    check_finite(state)
                    batches = task.valid_batches if last else task.valid_batches[: config.eval_batches]
                    sums = [steps.evaluate(state.params, shard(mesh, batch)) for batch in batches]
                    total, count = np.array(jax.device_get(sums), np.float64).sum(axis=0)
                    nnx.update(model, state.params)
                    metrics.valid(step, total / count, task.measure(model, last))
                    clock, counted = time.perf_counter(), float(state.token_count)
                stop = interrupted()
                if last or stop or step % config.checkpoint_interval == 0:
                    state = stepper.state
                    check_finite(state)
                    checkpoints.save(state, about)
                    clock, counted = time.perf_counter(), float(state.token_count)
                if stop and not last:
                    raise KeyboardInterrupt

        nnx.update(model, stepper.state.params)
        finish(task, run_dir, model)
    return OK


def prepare(config: RunConfig, devices: int) -> Task:
    """The task that the config describes. Raises InputError if its data can't be had."""
    match config:
        case LanguageModelRun():
            return language_modelling(config)
        case TransformerRun() | RNNRun() | AttnRNNRun():
            return translation(config, devices)
    raise TypeError(type(config))


def next_multiple(step: int, interval: int) -> int:
    """The first multiple of `interval` after `step`."""
    return step - step % interval + interval


def check_finite(state: TrainState) -> None:
    """Raises InputError if a loss or a parameter is not finite: such a state is neither logged nor saved."""
    if not bool(all_finite(state)):
        raise InputError(
            f"the loss became NaN or infinite by step {int(state.step)}: lower optimizer.learning_rate, or set "
            "optimizer.clip_norm, and start another run with --run_dir"
        )


@contextlib.contextmanager
def telling_how_to_resume(run_dir: Path, checkpoints: Checkpoints) -> Generator[None]:
    """An interrupted run, or one that can't write, ends in a line that says what is safe and how to go on."""

    def how() -> str:
        step = checkpoints.latest_step()
        if step is None:
            return f"nothing was saved in {run_dir}: remove it, and start again"
        return f"the checkpoint of step {step} in {run_dir} is intact: continue with the same command and --resume"

    try:
        yield
    except OSError as error:
        raise InputError(f"{error.filename or run_dir}: {error.strerror or error}; {how()}") from error
    except KeyboardInterrupt:
        print(f"\n{PROG}: interrupted; {how()}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def finish(task: Task, run_dir: Path, model: Any) -> None:
    """Exports and reports the result of a run: draws its losses and shows examples; the model is exported first."""
    save_pretrained(model, run_dir / "export", *task.tokenizers)
    rows = read_rows(run_dir / "metrics.jsonl")
    with replacing(run_dir / "loss.png") as path:
        plot_losses(rows, path, f"Preset {task.config.preset}, trained on {task.name}")
    last = [row for row in rows if "valid_loss" in row][-1]
    scores = {name: value for name, value in last.items() if name not in ("step", "valid_loss", "perplexity")}
    print(f"{describe(last['valid_loss'], scores)} (loss in nats per token)")
    if examples := task.show(model):
        print(examples)
    print(f"wrote {run_dir}/export (the model), {run_dir}/loss.png and {run_dir}/metrics.jsonl")


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the arguments say and returns the exit code."""
    return run(PROG, lambda: train(*parse(PROG, sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
