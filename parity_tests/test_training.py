"""Training: the step, data parallelism, checkpoints and resuming, the command line and what wrong input gets."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import yaml
from models import LANGUAGE_MODEL, ids
from runs import ROOT, TRAIN, environment, exported, losses, run, train

import torch_ref.saving
from flax_tf.errors import InputError
from flax_tf.loss import language_model_loss
from flax_tf.porting import flax_to_torch
from flax_tf.saving import build, from_pretrained
from flax_tf.training.checkpoint import KEEP, Checkpoints
from flax_tf.training.command_line import parse, presets
from flax_tf.training.config import LanguageModelRun
from flax_tf.training.metrics import plot_losses, read_rows
from flax_tf.training.optimizer import OptimizerConfig, build_optimizer
from flax_tf.training.sharding import data_mesh, replicate, shard
from flax_tf.training.step import TrainState, forget_loss, start

B, T = 3, 7
TINY_MODEL = dataclasses.replace(LANGUAGE_MODEL, num_layers=1)

# A run of a second or two: everything that a large one has, dropout included.
TINY = """
steps: 24
batch_size: 3
log_interval: 3
eval_interval: 8
eval_batches: 2
checkpoint_interval: 5
sample: {tokens: 11}
data: {path: TEXT}
model: {vocab_size: null, max_seq_length: 13, d_model: 14, num_heads: 2, num_layers: 1, dropout: 0.2}
optimizer: {learning_rate: 1e-2, schedule: cosine, warmup_steps: 2, min_learning_rate: 1e-3, clip_norm: 1.0}
"""


def tiny_batch(seed: int = 0, rows: int = B) -> dict[str, np.ndarray]:
    tokens = ids(rows, T + 1, seed=seed).astype(np.int32)
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


def tiny_start(dropout: float = 0.0, seed: int = 0):
    config = dataclasses.replace(TINY_MODEL, dropout=dropout)
    return start(build(config), build_optimizer(OptimizerConfig(), 100), language_model_loss, seed)


def leaves_equal(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


# The step


def test_a_run_compiles_each_function_once() -> None:
    state, steps = tiny_start()
    for k in range(5):
        state = steps.train(state, tiny_batch(k))
        steps.evaluate(state.params, {**tiny_batch(k), "weights": np.ones((B, T), np.float32)})
        if k % 2:
            state = forget_loss(state)
    assert steps.train._cache_size() == 1
    assert steps.evaluate._cache_size() == 1
    assert int(state.step) == 5


def test_dropout_depends_on_the_key_and_the_step_alone_and_is_off_in_evaluation() -> None:
    state, steps = tiny_start(dropout=0.5)

    def trained(seed: int, step: int) -> TrainState:
        fresh = jax.tree.map(jnp.copy, state)
        key = jax.random.key_data(jax.random.key(seed))
        return steps.train(fresh._replace(key=key, step=jnp.array(step, jnp.int32)), tiny_batch())

    assert leaves_equal(trained(0, 0), trained(0, 0))
    assert not leaves_equal(trained(0, 0).params, trained(1, 0).params)
    assert not leaves_equal(trained(0, 0).params, trained(0, 1).params)
    plain = start(build(TINY_MODEL), build_optimizer(OptimizerConfig(), 100), language_model_loss, seed=0)[1]
    assert steps.evaluate(state.params, tiny_batch()) == plain.evaluate(state.params, tiny_batch())


def test_the_state_counts_losses_and_tokens_until_they_are_forgotten() -> None:
    state, steps = tiny_start()
    total, tokens = steps.evaluate(state.params, tiny_batch(0))
    state = steps.train(state, tiny_batch(0))
    # The same float32 loss from two programs: their sums may be ordered differently.
    np.testing.assert_allclose(state.loss_sum, total, rtol=1e-6)
    assert float(state.token_count) == float(tokens) == B * T
    state = steps.train(state, tiny_batch(1))
    assert float(state.token_count) == 2 * B * T
    assert float(forget_loss(state).token_count) == float(forget_loss(state).loss_sum) == 0


def test_a_loss_that_is_not_finite_is_remembered() -> None:
    state, steps = tiny_start()
    state = steps.train(state, tiny_batch())
    assert bool(state.finite)
    broken = jax.tree.map(lambda x: x.at[0].set(np.nan), state.params)
    state = steps.train(state._replace(params=broken), tiny_batch())
    assert not bool(state.finite)
    state = tiny_start()[0]._replace(finite=state.finite)
    assert not bool(steps.train(state, tiny_batch()).finite)


def test_eight_devices_learn_what_one_learns(tmp_path: Path) -> None:
    """In a process of its own: the number of devices is fixed when JAX starts."""
    program = tmp_path / "program.py"
    program.write_text(
        """
import sys
import jax, numpy as np
sys.path.insert(0, sys.argv[1])
from test_training import tiny_batch, tiny_start
from flax_tf.training.sharding import data_mesh, replicate, shard
from flax_tf.training.step import TrainState, forget_loss
jax.config.update("jax_enable_x64", True)

def losses(mesh):
    state, steps = tiny_start()
    state = jax.tree.map(lambda x: x.astype("float64") if x.dtype == "float32" else x, state)
    state, found = replicate(mesh, state), []
    for k in range(5):
        batch = tiny_batch(k, rows=16)
        state = steps.train(state, shard(mesh, batch))
        found.append(float(state.loss_sum))
        state = forget_loss(state)
    assert steps.train._cache_size() == 1
    return found

many = data_mesh(16)
assert many.size == 8
print(losses(data_mesh(16, jax.devices()[:1])), losses(many), sep="\\n")
"""
    )
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = run([program, ROOT / "parity_tests"], tmp_path, **flags)
    one, many = (json.loads(line) for line in done.out.splitlines())
    # The same float64 sums in another order: a few roundings of 2e-16, carried through five updates.
    np.testing.assert_allclose(many, one, rtol=1e-12)


def test_a_batch_that_the_devices_cannot_share_is_refused() -> None:
    assert data_mesh(5).size == 1
    with pytest.raises(InputError, match="batch_size 3 does not divide by the 2 devices"):
        data_mesh(3, devices=2 * jax.local_devices())


# Checkpoints


def test_a_checkpoint_holds_every_bit_and_only_the_newest_stay(tmp_path: Path) -> None:
    state, steps = tiny_start(dropout=0.2)
    mesh = data_mesh(B)
    state = replicate(mesh, state)
    checkpoints = Checkpoints(tmp_path)
    for k in range(KEEP + 1):
        state = steps.train(state, shard(mesh, tiny_batch(k)))
        checkpoints.save(state, {"number": k})
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == list(range(2, KEEP + 2))
    found: list = []
    like = replicate(mesh, tiny_start(seed=5)[0])
    loaded = Checkpoints(tmp_path).load(like, lambda about, step: found.append((about, step)))
    assert found == [({"number": KEEP}, KEEP + 1)]
    assert leaves_equal(loaded, state)
    again, twice = (steps.train(s, shard(mesh, tiny_batch(9))) for s in (loaded, state))
    assert leaves_equal(again, twice)
    assert steps.train._cache_size() == 1


# Reads that are under way when the first one fails are left to end in a closed event loop, which orbax doesn't catch.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["truncated", "no manifest", "no metadata"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    state, steps = tiny_start()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, {})
    newer = steps.train(jax.tree.map(jnp.copy, state), tiny_batch())
    checkpoints.save(newer, {})
    newest = tmp_path / "1" / "state"
    if damage == "truncated":
        for file in (path for path in newest.rglob("*") if path.is_file() and path.stat().st_size > 1000):
            os.truncate(file, file.stat().st_size // 2)
    else:
        (newest / {"no manifest": "manifest.ocdbt", "no metadata": "_METADATA"}[damage]).unlink()
    loaded = Checkpoints(tmp_path).load(tiny_start()[0], lambda about, step: None)
    assert leaves_equal(loaded, state)
    assert "the checkpoint of step 1 can't be read" in caplog.text
    assert not (tmp_path / "1").exists()


def test_no_checkpoint_is_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no checkpoint that can be read"):
        Checkpoints(tmp_path).load(tiny_start()[0], lambda about, step: None)


# Whole runs of train_jax.py


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a text, a config, and the caches of everything that runs in it."""
    room = tmp_path_factory.mktemp("room")
    rng = np.random.default_rng(0)
    words = ["def", "class", "return", "the", "value", "of", "a", "list", "is", "not"]
    (room / "text.txt").write_text(" ".join(rng.choice(words, 2000)), encoding="utf-8")
    (room / "tiny.yaml").write_text(TINY.replace("TEXT", "text.txt"), encoding="utf-8")
    return room


@pytest.fixture(scope="module")
def whole(room: Path) -> Path:
    """A finished run."""
    done = run([TRAIN, "--config", "tiny.yaml", "--run_dir", "whole"], room)
    assert done.code == 0, done.err
    assert re.search(r"validation loss \d\.\d+, perplexity \d+\.\d+ \(loss in nats per token\)", done.out)
    assert "sample" in done.out
    return room / "whole"


def test_a_run_leaves_metrics_a_picture_and_a_model_for_both_frameworks(whole: Path) -> None:
    rows = losses(whole)
    trained = [row for row in rows if "loss" in row]
    valid = [row for row in rows if "valid_loss" in row]
    assert [row["step"] for row in trained] == [3, 6, 9, 12, 15, 18, 21, 24]
    assert [row["step"] for row in valid] == [8, 16, 24]
    assert valid[-1]["valid_loss"] < trained[0]["loss"]
    for row in valid:
        assert row["perplexity"] == pytest.approx(np.exp(row["valid_loss"]), rel=1e-12)
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((whole / "tensorboard").glob("events.out.tfevents.*"))
    assert yaml.safe_load((whole / "config.yaml").read_text())["model"]["d_model"] == 14
    tokens = ids(2, 13) % 10
    ours = from_pretrained(whole / "export")(jnp.array(tokens))
    theirs = torch_ref.saving.from_pretrained(whole / "export")(torch.tensor(tokens))
    # The parity contract is tested elsewhere; here it is the same file, to float32's last digits.
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_the_last_validation_loss_is_over_the_whole_held_out_split(whole: Path) -> None:
    from flax_tf.data.batches import prepare, valid_batches
    from flax_tf.data.config import TextDataConfig

    data = prepare(TextDataConfig(path=str(whole.parent / "text.txt")), 13, whole.parent / "cache")
    model = from_pretrained(whole / "export")
    sums = [language_model_loss(model, jax.tree.map(jnp.array, batch)) for batch in valid_batches(data, 3)]
    total, count = np.array(sums, np.float64).sum(axis=0)
    assert count == data.valid_tokens
    # The same float32 losses, compiled differently.
    assert losses(whole)[-1]["valid_loss"] == pytest.approx(total / count, rel=1e-5)


def test_a_run_that_is_killed_and_resumed_is_the_uninterrupted_run_bit_for_bit(room: Path, whole: Path) -> None:
    """kill -9, twice: once between two checkpoints, once in a checkpoint or wherever it hits."""
    run_dir = room / "killed"
    flags = ["--run_dir", "killed"]
    for kill_after, resume in ((7, []), (13, ["--resume"])):
        command = [sys.executable, str(TRAIN), "--config", "tiny.yaml", *flags, *resume]
        process = subprocess.Popen(
            command, cwd=room, env=environment(room), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        while process.poll() is None:
            rows = read_rows(run_dir / "metrics.jsonl")
            if rows and rows[-1]["step"] >= kill_after:
                process.send_signal(signal.SIGKILL)
            time.sleep(0.001)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (run_dir / "export").exists()
    done = run([TRAIN, "--config", "tiny.yaml", *flags, "--resume"], room)
    assert done.code == 0, done.err
    assert losses(run_dir) == losses(whole)
    ours, truth = exported(run_dir), exported(whole)
    assert ours.keys() == truth.keys()
    for name, array in truth.items():
        assert np.array_equal(ours[name], array), name


def test_resuming_what_is_finished_says_so(room: Path, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()}
    done = train(room, "--run_dir", "whole", "--resume")
    assert done.code == 0
    assert "all 24 steps are done" in done.out
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.d_model", "16"], "was started with model.d_model 14, not 16"),
        (["--optimizer.learning_rate", "1e-3"], "was started with optimizer.learning_rate 0.01, not 0.001"),
        (["--seed", "1"], "was started with seed 0, not 1"),
        (["--batch_size", "4"], "was started with batch_size 3, not 4"),
        (["--steps", "30"], "was started for 24 steps, not 30"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_resuming_with_other_settings_names_the_field(room: Path, whole: Path, flags: list[str], message: str) -> None:
    train(room, "--run_dir", "whole", "--resume", *flags).check_refused(message)


def test_a_run_with_a_constant_rate_can_be_made_longer(room: Path) -> None:
    constant = ["--optimizer.schedule", "constant", "--optimizer.min_learning_rate", "0", "--sample.tokens", "0"]
    for steps, resume in (("4", []), ("8", ["--resume"])):
        done = train(room, "--run_dir", "longer", "--steps", steps, *constant, *resume)
        assert done.code == 0, done.err
    straight = train(room, "--run_dir", "straight", "--steps", "8", *constant)
    assert straight.code == 0, straight.err
    ours, truth = exported(room / "longer"), exported(room / "straight")
    assert all(np.array_equal(ours[name], array) for name, array in truth.items())


# What wrong input gets


WRONG = {
    "heads": (["--model.num_heads", "5", "--model.d_model", "64"], "num_heads 5 does not divide d_model 64"),
    "unknown-key": (
        ["--config", "unknown.yaml"],
        "unknown.yaml: unknown key model.num_headz: did you mean model.num_heads",
    ),
    "broken-yaml": (["--config", "broken.yaml"], "broken.yaml, line 2: not YAML"),
    "type-in-yaml": (["--config", "type.yaml"], "type.yaml: steps must be int | null, not many"),
    "not-a-mapping": (["--config", "list.yaml"], "list.yaml: it must hold settings"),
    "missing-config": (["--config", "none.yaml"], "config file none.yaml: No such file or directory"),
    "unknown-flag": (["--stepz", "3"], "unknown flag --stepz: did you mean --steps?"),
    "unknown-preset": (["--preset", "docz"], "unknown preset 'docz': did you mean docs? there are dates, dates-rnn"),
    "type": (["--steps", "many"], "steps must be int | null, not many"),
    "choice": (["--optimizer.name", "adagrad"], "optimizer.name must be one of adamw, adam, sgd, muon, not adagrad"),
    "empty-text": (["--data", "empty.txt"], "empty.txt: no text in it"),
    "missing-data": (["--data=missing/text.txt"], "missing/text.txt"),
    "short-text": (["--data.path", "short.txt"], "short.txt: "),
    "vocabulary": (["--model.vocab_size", "3"], "outside the model's vocabulary of 3"),
    "prompt": (["--sample.prompt", "ż"], "sample.prompt: the tokenizer of characters doesn't know 'ż'"),
    "below-a-file": (["--run_dir", "text.txt/run"], "text.txt/run"),
    "in-proc": (["--run_dir", "/proc/run"], "can't write the run directory /proc/run"),
    "no-run": (["--run_dir", "new", "--resume"], "new holds no run to resume"),
}


@pytest.mark.parametrize(("flags", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_ends_in_one_line_and_leaves_nothing(room: Path, flags: list[str], message: str) -> None:
    files = {
        "unknown.yaml": "model: {num_headz: 2}",
        "broken.yaml": "steps: [1\n",
        "type.yaml": "steps: many",
        "list.yaml": "- 1",
        "empty.txt": "",
        "short.txt": "abc",
    }
    for name, content in files.items():
        (room / name).write_text(content, encoding="utf-8")
    (room / "cache").mkdir(exist_ok=True)  # of tokens: kept, whatever becomes of the run
    before = sorted(path.name for path in room.iterdir())
    where = [] if "--run_dir" in flags else ["--run_dir", "refused"]
    train(room, *where, *flags).check_refused(message)
    assert sorted(path.name for path in room.iterdir()) == before


def test_a_run_directory_that_is_in_use_is_refused(room: Path, whole: Path) -> None:
    train(room, "--run_dir", "whole").check_refused("whole already holds a run: continue it with --resume")
    (room / "mine").mkdir()
    (room / "mine" / "thesis.txt").write_text("words", encoding="utf-8")
    train(room, "--run_dir", "mine").check_refused("mine already holds other files")


def test_a_full_disk_names_the_checkpoint_that_is_safe(room: Path) -> None:
    # A write past this size fails as one on a full disk does: an OSError from the file that is written.
    limited = "import resource, sys, train_jax; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
    flags = ["--run_dir", "full", "--steps", "3000", "--log_interval", "1", "--checkpoint_interval", "100"]
    done = run(["-c", limited + "sys.exit(train_jax.main())", "--config", "tiny.yaml", *flags], room)
    assert done.code == 2
    last = done.err.splitlines()[-1]
    assert last.startswith("train_jax.py: error: ")
    step = re.search(r"the checkpoint of step (\d+) in full is intact: continue with .* --resume", last)[1]
    assert int(step) > 0
    assert (room / "full" / "checkpoints" / step).is_dir()


def test_ctrl_c_says_how_to_go_on(room: Path) -> None:
    command = [sys.executable, str(TRAIN), "--config", "tiny.yaml", "--run_dir", "interrupted", "--steps", "100000"]
    process = subprocess.Popen(
        command, cwd=room, env=environment(room), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while not read_rows(room / "interrupted" / "metrics.jsonl"):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    step = int(
        re.search(r"train_jax.py: interrupted; the checkpoint of step (\d+) in interrupted is intact", errors)[1]
    )
    assert (room / "interrupted" / "checkpoints" / str(step)).is_dir()
    assert read_rows(room / "interrupted" / "metrics.jsonl")[-1]["step"] <= step  # no work is lost


def test_a_loss_that_explodes_stops_the_run_and_saves_nothing_bad(room: Path) -> None:
    flags = ["--optimizer.name", "sgd", "--optimizer.learning_rate", "1e30", "--optimizer.clip_norm", "null"]
    done = train(room, "--run_dir", "nan", *flags)
    assert done.code == 2
    assert "the loss became NaN or infinite by step" in done.err.splitlines()[-1]
    assert not (room / "nan" / "export").exists()
    assert all(np.isfinite(row.get("loss", 0.0)) for row in read_rows(room / "nan" / "metrics.jsonl"))
    assert [path.name for path in (room / "nan" / "checkpoints").iterdir()] == ["0"]


# Settings


def test_later_settings_win_over_earlier_ones(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: nanogpt-cpu\ndata: here.txt\nbatch_size: 7\noptimizer:\n  learning_rate: 2e-3\n")
    config, _ = parse("train_jax.py", ["--config", str(file), "--steps", "20", "--optimizer.betas", "[0.5, 0.6]"])
    assert (config.preset, config.data.path, config.batch_size, config.steps) == ("nanogpt-cpu", "here.txt", 7, 20)
    assert config.optimizer.learning_rate == 2e-3  # the file's, over the preset's
    assert config.optimizer.betas == (0.5, 0.6)  # the flag's
    assert config.optimizer.warmup_steps == 100  # the preset's
    assert config.optimizer.eps == OptimizerConfig().eps  # the default
    for flags in (["--data", "there.txt"], ["--data=there.txt"], ["--data.path", "there.txt"]):
        assert parse("train_jax.py", ["--config", str(file), *flags])[0].data.path == "there.txt"
    assert parse("train_jax.py", ["--resume"])[0].resume
    assert not parse("train_jax.py", ["--resume", "false"])[0].resume


@pytest.mark.parametrize("preset", presets())
def test_a_printed_config_is_the_same_run(preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("train_jax.py", ["--preset", preset, "--seed", "3", "--print_config"])
    assert ended.value.code == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert parse("train_jax.py", ["--config", str(file)])[0] == parse("x", ["--preset", preset, "--seed", "3"])[0]


def test_the_seed_preset_has_the_numbers_of_its_document() -> None:
    config, _ = parse("train_jax.py", ["--preset", "seed-lm"])
    model, optimizer, data = config.model, config.optimizer, config.data
    assert (config.batch_size, config.epochs, config.steps) == (256, 1, None)
    assert (model.vocab_size, model.max_seq_length, model.d_model) == (30_522, 128, 64)
    assert (model.num_heads, model.num_layers, model.dropout) == (4, 4, 0.0)
    assert (data.path, data.max_documents, data.tokenizer) == ("roneneldan/TinyStories", 500_000, "bert-base-uncased")
    assert (data.chunking, data.shuffle) == ("windows", False)
    torchs = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3).defaults
    for name, value in (("lr", optimizer.learning_rate), ("betas", optimizer.betas), ("eps", optimizer.eps)):
        assert torchs[name] == value
    assert torchs["weight_decay"] == optimizer.weight_decay
    assert (optimizer.name, optimizer.decay, optimizer.schedule) == ("adamw", "all", "constant")


def test_the_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("train_jax.py", ["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for flag, words in (("--steps", "whichever ends first"), ("--optimizer.decay", "no biases, no norms")):
        assert flag in text
        assert words in text


@pytest.mark.parametrize(
    ("steps", "epochs", "expected"), [(20, None, 20), (None, 2.0, 34), (20, 2.0, 20), (100, 0.5, 9)]
)
def test_steps_and_epochs_end_at_whichever_is_first(steps, epochs, expected: int) -> None:
    assert LanguageModelRun(steps=steps, epochs=epochs).total_steps(steps_per_epoch=17) == expected


def test_the_picture_is_drawn_from_any_rows(tmp_path: Path) -> None:
    rows = [{"step": k, "loss": 5 / k} for k in range(1, 90)] + [{"step": 50, "valid_loss": 1.0}]
    for number, some in enumerate((rows, rows[:1], rows[-1:], [{"step": 9, "valid_loss": 1e9}])):
        plot_losses(some, tmp_path / f"{number}.png", "A title")
        assert (tmp_path / f"{number}.png").stat().st_size > 1000


def test_a_run_that_keeps_memory_learns_the_same(room: Path) -> None:
    logged = []
    for kept in ("false", "true"):
        done = run([TRAIN, "--config", "tiny.yaml", "--run_dir", kept, "--keep_memory", kept], room)
        assert done.code == 0, done.err
        logged.append(losses(room / kept))
    assert logged[0] == logged[1]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--sample.temperature", "1e-7", "sample.temperature is 1e-07: it must be at least 1e-06"),
        ("--steps_per_call", "4", "steps_per_call is 4: it must be at most log_interval, 3"),
    ],
)
def test_what_would_fail_or_do_nothing_later_is_refused_first(room: Path, flag: str, value: str, message: str) -> None:
    train(room, "--run_dir", "refused", flag, value).check_refused(message)
    assert not (room / "refused").exists()


def test_a_run_stands_for_its_export(whole: Path) -> None:
    models = [from_pretrained(path) for path in (whole, whole / "export")]
    one, other = (flax_to_torch(model) for model in models)
    np.testing.assert_equal(one, other)


def test_it_is_kept_or_not(room: Path) -> None:
    train(room, "--run_dir", "run", "--keep_memory", "maybe").check_refused("keep_memory")
