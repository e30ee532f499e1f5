#!/usr/bin/env python3
"""Trains a language model in JAX. `python train_jax.py` runs the preset docs; `--help` shows every setting."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int

from flax_tf.command import INTERRUPTED, OK, run
from flax_tf.data.batches import TextData, check_ids, prepare, steps_per_epoch, train_batches, valid_batches
from flax_tf.data.tokenizer import encode
from flax_tf.errors import InputError
from flax_tf.files import replacing
from flax_tf.generation import generate
from flax_tf.language_model import LanguageModel
from flax_tf.loss import language_model_loss
from flax_tf.saving import build, save_pretrained
from flax_tf.training.checkpoint import Checkpoints
from flax_tf.training.command_line import parse
from flax_tf.training.config import RunConfig
from flax_tf.training.metrics import Metrics, perplexity, plot_losses, read_rows
from flax_tf.training.optimizer import build_optimizer, learning_rates
from flax_tf.training.run_directory import check_run_dir, check_same_run, describe
from flax_tf.training.sharding import data_mesh, replicate, shard
from flax_tf.training.step import TrainState, forget_loss, start

PROG = "train_jax.py"


def train(config: RunConfig, settings: str) -> int:
    """Runs `config`, whose YAML is `settings`. Returns the exit code; raises InputError for wrong input."""
    # Whatever is wrong with the input is found here, before anything is written.
    run_dir = Path(config.run_dir or f"runs/{config.preset}")
    check_run_dir(run_dir, config.resume)
    mesh = data_mesh(config.batch_size)
    data = prepare(config.data, config.model.max_seq_length)
    config = with_vocabulary(config, data)
    prompt = prompt_ids(config, data)
    total_steps = config.total_steps(steps_per_epoch(data, config.batch_size))
    about = describe(config, total_steps, data.key)

    model = build(config.model, config.seed)
    learning_rate = learning_rates(config.optimizer, total_steps)
    state, steps = start(model, build_optimizer(config.optimizer, total_steps), language_model_loss, config.seed)
    state = replicate(mesh, state)
    train_data = train_batches(data, config.batch_size, config.seed)
    valid_data = valid_batches(data, config.batch_size)

    checkpoints = Checkpoints(run_dir / "checkpoints")
    with telling_how_to_resume(run_dir, checkpoints):
        if config.resume:
            state = checkpoints.load(state, lambda saved, step: check_same_run(run_dir, saved, about, step))
        else:
            (run_dir / "config.yaml").write_text(settings, encoding="utf-8")
            checkpoints.save(state, about)
        step = int(state.step)
        if step == total_steps and (run_dir / "loss.png").is_file():
            print(f"{run_dir}: all {total_steps:,} steps are done, there is nothing to resume")
            return OK

        print(f"{config.data.path}: {data.train_tokens:,} tokens to train on, {data.valid_tokens:,} held out")
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        print(f"{parameters:,} parameters, {mesh.size} {jax.default_backend()} device(s), {total_steps:,} steps")
        train_step = steps.train.lower(state, shard(mesh, train_data[step])).compile()
        with Metrics(run_dir, step, total_steps) as metrics:
            clock, clock_step = time.perf_counter(), step
            while step < total_steps:
                state = train_step(state, shard(mesh, train_data[step]))
                step += 1
                last = step == total_steps
                if last or step % config.log_interval == 0:
                    check_finite(state)  # waits for the device, which is done nowhere else in between
                    loss = float(state.loss_sum / state.token_count)
                    tokens = (step - clock_step) * config.batch_size * data.seq_length
                    rate = np.asarray(learning_rate(step - 1)).item()
                    metrics.train(step, loss, rate, tokens / (time.perf_counter() - clock))
                    state = forget_loss(state)
                    clock, clock_step = time.perf_counter(), step
                if last or step % config.eval_interval == 0:
                    check_finite(state)
                    batches = valid_data if last else valid_data[: config.eval_batches]
                    sums = [steps.evaluate(state.params, shard(mesh, batch)) for batch in batches]
                    total, count = np.array(jax.device_get(sums), np.float64).sum(axis=0)
                    metrics.valid(step, total / count)
                    clock, clock_step = time.perf_counter(), step
                if last or step % config.checkpoint_interval == 0:
                    check_finite(state)
                    checkpoints.save(state, about)
                    clock, clock_step = time.perf_counter(), step

        nnx.update(model, state.params)
        finish(config, run_dir, model, data, prompt)
    return OK


def with_vocabulary(config: RunConfig, data: TextData) -> RunConfig:
    """The config with the tokenizer's vocabulary where it has none. Raises InputError if the text doesn't fit it."""
    vocab_size = data.vocab_size if config.model.vocab_size is None else config.model.vocab_size
    check_ids(data.max_id, vocab_size)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


def prompt_ids(config: RunConfig, data: TextData) -> Int[np.ndarray, "P"]:
    """The ids that the sample begins with: of the prompt, or the first of the held-out text."""
    if config.sample.prompt is None:
        return data.tokens[data.valid_starts[:1]].astype(np.int32)
    try:
        ids = encode(data.tokenizer, config.sample.prompt).astype(np.int32)
    except InputError as error:
        raise InputError(f"sample.prompt: {error}") from None
    if not ids.size:
        raise InputError(f"sample.prompt {config.sample.prompt!r} makes no tokens: give other text")
    check_ids(int(ids.max()), config.model.token_count())
    return ids


def check_finite(state: TrainState) -> None:
    """Raises InputError if a loss or a gradient was not finite: such a state is neither logged nor saved."""
    if not bool(state.finite):
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


def finish(
    config: RunConfig, run_dir: Path, model: LanguageModel, data: TextData, prompt: Int[np.ndarray, "P"]
) -> None:
    """Exports and reports the result of a run: draws its losses and writes a sample; the model is exported first."""
    save_pretrained(model, run_dir / "export", data.tokenizer)
    rows = read_rows(run_dir / "metrics.jsonl")
    with replacing(run_dir / "loss.png") as path:
        plot_losses(rows, path, f"Preset {config.preset}, trained on {Path(config.data.path).name}")
    valid_loss = [row["valid_loss"] for row in rows if "valid_loss" in row][-1]
    print(f"validation loss {valid_loss:.4f} (nats per token), perplexity {perplexity(valid_loss):.2f}")
    if config.sample.tokens:
        ids = generate(
            model,
            prompt[None],
            config.sample.tokens,
            temperature=config.sample.temperature,
            top_k=config.sample.top_k,
            seed=config.seed,
        )
        print("--- sample ---")
        print(data.tokenizer.decode(ids[0].tolist()))
        print("---")
    print(f"wrote {run_dir}/export (the model), {run_dir}/loss.png and {run_dir}/metrics.jsonl")


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the arguments say and returns the exit code."""
    return run(PROG, lambda: train(*parse(PROG, sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
