"""Training sequence to sequence: the loss and its shift, the tasks, whole runs, and what wrong input gets."""

import contextlib
import dataclasses
import io
import json
import logging
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import yaml
from flax import nnx
from models import ATTN_RNN, RNN, TRANSFORMER, reference, twin
from runs import TRAIN, Done, exported, losses, run, train
from torch.nn.functional import cross_entropy

from flax_tf.data.pairs import load_pairs
from flax_tf.data.random_pairs import random_batch
from flax_tf.errors import InputError
from flax_tf.loss import sequence_loss
from flax_tf.porting import flax_to_torch
from flax_tf.saving import from_pretrained
from flax_tf.training.command_line import parse
from flax_tf.training.metrics import plot_losses, read_rows
from flax_tf.training.optimizer import OptimizerConfig, build_optimizer
from flax_tf.training.scores import Bleu, ExactMatch
from flax_tf.training.step import start
from torch_ref import loss as torch_loss

SYSTEMS = pytest.mark.parametrize("config", [TRANSFORMER, RNN, ATTN_RNN], ids=lambda config: config.arch)
B, S, T = 3, 7, 5

# Runs of seconds: words in another order, sentences of 1 to 9 words.
TINY = """
arch: ARCH
steps: 12
batch_size: 5
log_interval: 3
eval_interval: 6
checkpoint_interval: 4
label_smoothing: 0.1
decoding: {metric: bleu, beam_size: 2, max_length: 11, samples: 2}
data: {source: train.tsv, valid_source: valid.tsv, tokenizer: char, max_length: 40, tokens_per_batch: 300, buckets: 3}
model: MODEL
optimizer: {name: adam, learning_rate: 1e-2, weight_decay: 0.0, schedule: inverse_sqrt, warmup_steps: 2, clip_norm: 1.0}
"""
MODELS = {
    "transformer": "{src_vocab_size: null, tgt_vocab_size: null, d_model: 14, num_heads: 2, num_layers: 1, d_ff: 17, "
    "max_seq_length: 40, dropout: 0.2}",
    "rnn": "{src_vocab_size: null, tgt_vocab_size: null, hidden_size: 11, max_length: 13, dropout: 0.2}",
    "attn_rnn": "{src_vocab_size: null, tgt_vocab_size: null, hidden_size: 11, max_length: 13, mask_source: true}",
}


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with pairs, a config for each system, and the caches of everything that runs in it."""
    room = tmp_path_factory.mktemp("room")
    rng = np.random.default_rng(0)
    for name, count in (("train", 101), ("valid", 7), ("test", 3)):
        sentences = [rng.choice(["ab", "ba", "c", "dd"], n) for n in rng.integers(1, 10, count)]
        pairs = [f"{' '.join(words)}\t{' '.join(words[::-1]).replace('d', 'e')}\n" for words in sentences]
        (room / f"{name}.tsv").write_text("".join(pairs), encoding="utf-8")
    for arch, model in MODELS.items():
        (room / f"{arch}.yaml").write_text(TINY.replace("ARCH", arch).replace("MODEL", model), encoding="utf-8")
    return room


@pytest.fixture(scope="module")
def whole(room: Path) -> tuple[Path, Done]:
    """A finished run of the Transformer, and what it printed."""
    done = run([TRAIN, "--config", "transformer.yaml", "--run_dir", "whole", "--data.test_source", "test.tsv"], room)
    assert done.code == 0, done.err
    return room / "whole", done


def batch_of(config, seed: int = 0) -> dict[str, np.ndarray]:
    """Random rows with padding at their ends, one of nothing else."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, size, length in (("source", config.src_vocab_size, S), ("target", config.tgt_vocab_size, T + 1)):
        rows = rng.integers(3, size, (B, length)).astype(np.int32)
        found[name] = np.where(np.arange(length) < np.array([[length], [length - 2], [0]]), rows, config.pad_id)
    found["target"][:, 0] = config.start_id
    return found


def arrays(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.array(rows) for name, rows in batch.items()}


# The loss


@SYSTEMS
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_the_seed(config, smoothing: float) -> None:
    """Decoder input [:, :-1], labels [:, 1:], cross-entropy that ignores padding, mean over real tokens."""
    module = reference(config).double()
    batch = {name: torch.tensor(rows, dtype=torch.long) for name, rows in batch_of(config).items()}
    source, target = batch["source"], batch["target"]
    output = module(source, target[:, :-1]) if config is TRANSFORMER else module(source, target[:, 1:])[0]
    labels = target[:, 1:].reshape(-1)
    expected = cross_entropy(
        output.reshape(-1, config.tgt_vocab_size), labels, ignore_index=config.pad_id, label_smoothing=smoothing
    )
    expected.backward()
    total, count = torch_loss.sequence_loss(module, batch, smoothing)
    torch.testing.assert_close(total / count, expected, rtol=1e-14, atol=0)
    with jax.enable_x64(True):
        graph, params, rest = nnx.split(twin(module), nnx.Param, ...)

        def mean(params):
            total, count = sequence_loss(nnx.merge(graph, params, rest), arrays(batch_of(config)), smoothing)
            return total / count, count

        (ours, count), gradients = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
        gradients = flax_to_torch(nnx.merge(graph, gradients, rest))
    assert int(count) == (labels != config.pad_id).sum()
    # The contract: outputs to 1e-12, gradients to 1e-10, of float64 sums of some hundred terms.
    assert float(ours) == pytest.approx(expected.item(), rel=1e-12)
    for name, parameter in module.named_parameters():
        scale = max(parameter.grad.norm().item(), 1e-4)  # biases that softmax takes out have rounding alone
        assert np.linalg.norm(gradients[name] - parameter.grad.numpy()) <= 1e-10 * scale, name


@SYSTEMS
def test_a_hundred_steps_are_torchs(config) -> None:
    """The seed's optimizer, with label smoothing, clipping and the warm-up: every parameter after every step."""
    settings = OptimizerConfig(
        name="adam", learning_rate=1e-2, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0, clip_norm=0.7,
        schedule="inverse_sqrt", warmup_steps=9,
    )  # fmt: skip
    config = dataclasses.replace(config, dropout=0.0)
    module = reference(config).double()
    optimizer = torch.optim.Adam(module.parameters(), lr=1.0, betas=settings.betas, eps=settings.eps)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1e-2 * min((k + 1) / 10, (10 / (k + 1)) ** 0.5))

    def loss(model, batch, rngs=None):
        return sequence_loss(model, batch, 0.1, rngs=rngs)

    with jax.enable_x64(True):
        model = twin(module)
        state, steps = start(model, build_optimizer(settings, 100), loss, seed=0)
        for k in range(100):
            batch = batch_of(config, seed=k)
            state = steps.train(state, batch)
            tensors = {name: torch.tensor(rows, dtype=torch.long) for name, rows in batch.items()}
            total, count = torch_loss.sequence_loss(module, tensors, 0.1)
            module.zero_grad()
            (total / count).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), settings.clip_norm)
            optimizer.step()
            rates.step()
        nnx.update(model, state.params)
        ours = flax_to_torch(model)
    for name, parameter in module.named_parameters():
        truth = parameter.detach().numpy()
        # The contract of trajectories. The bias that softmax takes out has a gradient of rounding alone, which Adam
        # makes larger: in either framework it has moved by about 1e-10.
        scale = 1.0 if name == "decoder.attention.Va.bias" else np.linalg.norm(truth)
        assert np.linalg.norm(ours[name] - truth) <= 1e-9 * scale, name


@pytest.mark.parametrize("config", [RNN, ATTN_RNN], ids=lambda config: config.arch)
def test_with_a_masked_source_padding_changes_nothing(config) -> None:
    for masked in (True, False):
        module = reference(dataclasses.replace(config, mask_source=masked)).double()
        batch = batch_of(config)
        source, target = batch["source"][:2], batch["target"][:2, 1:]
        longer = np.pad(source, ((0, 0), (0, 4)), constant_values=config.pad_id)
        with jax.enable_x64(True):
            short, long = (twin(module)(jnp.array(rows), jnp.array(target))[0] for rows in (source, longer))
            short, long = np.asarray(short), np.asarray(long)
        difference = np.abs(short - long).max()
        # The same float64 sums with zeros in them; unmasked, the encoder and attention read the padding.
        assert difference <= 1e-12 if masked else difference > 1e-4
        theirs = module(torch.tensor(longer), torch.tensor(target))[0].detach().numpy()
        np.testing.assert_allclose(long, theirs, rtol=1e-12)


# The scores


def test_exact_match_counts_whole_texts() -> None:
    assert ExactMatch()(["ab", "b", "", "C"], ["ab", "bb", "", "c"]) == {"exact_match": 50.0}


def test_bleu_and_chrf_are_sacrebleus() -> None:
    from sacrebleu import corpus_bleu, corpus_chrf

    texts = ["the cat sat on a mat .", "a dog runs in the park"]
    targets = ["the cat sat on the mat .", "a dog is running in the park"]
    score = Bleu()
    found = score(texts, targets)
    assert found == {"bleu": corpus_bleu(texts, [targets]).score, "chrf": corpus_chrf(texts, [targets]).score}
    assert 0 < found["bleu"] < 100
    assert re.fullmatch(r"bleu nrefs:1\|case:mixed.*tok:13a.*; chrf nrefs:1\|.*nc:6.*", score.signature)


# The random data of the seed


def test_the_seed_preset_has_the_numbers_of_its_document() -> None:
    config, _ = parse("train_jax.py", ["--preset", "seed-translation"])
    model, optimizer = config.model, config.optimizer
    assert (model.src_vocab_size, model.tgt_vocab_size, model.d_model, model.num_heads) == (5000, 5000, 512, 8)
    assert (model.num_layers, model.d_ff, model.max_seq_length, model.dropout) == (6, 2048, 100, 0.1)
    assert (config.batch_size, config.data.max_length, config.steps, config.label_smoothing) == (64, 100, 100, 0.0)
    assert (optimizer.name, optimizer.learning_rate) == ("adam", 1e-4)
    assert (optimizer.betas, optimizer.eps) == ((0.9, 0.98), 1e-9)
    assert (optimizer.schedule, optimizer.weight_decay, optimizer.clip_norm) == ("constant", 0.0, None)
    assert not model.shared_embeddings and not model.scale_embeddings


def test_the_random_batch_has_every_id_but_padding() -> None:
    config = dataclasses.replace(TRANSFORMER, src_vocab_size=5, tgt_vocab_size=7, pad_id=3)
    batch = random_batch(config, rows=11, length=29, seed=0)
    assert {name: (ids.shape, ids.dtype) for name, ids in batch.items()} == {
        "source": ((11, 29), np.int32),
        "target": ((11, 29), np.int32),
    }
    assert set(batch["source"].flat) == {0, 1, 2, 4}
    assert set(batch["target"].flat) == {0, 1, 2, 4, 5, 6}
    assert not np.array_equal(batch["source"], random_batch(config, 11, 29, seed=1)["source"])


def test_the_random_batch_is_learned_by_heart(room: Path) -> None:
    flags = ["--steps", "30", "--batch_size", "3", "--data.max_length", "7", "--optimizer.learning_rate", "3e-3"]
    small = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 23, "src_vocab_size": 19, "tgt_vocab_size": 17}
    flags += [part for name, value in small.items() for part in (f"--model.{name}", str(value))]
    (room / "seed.yaml").write_text("preset: seed-translation\n")
    done = train(room, "--config", "seed.yaml", "--run_dir", "seed", *flags)
    assert done.code == 0, done.err
    rows = [row["loss"] for row in read_rows(room / "seed" / "metrics.jsonl") if "loss" in row]
    assert len(rows) == 30
    assert np.isfinite(rows).all()
    assert rows[-1] < rows[0] - 1
    assert "one batch of random ids, 3 x 7 on each side" in done.out


# Whole runs


def test_a_run_leaves_scores_a_picture_and_a_model_for_both_frameworks(whole) -> None:
    run_dir, done = whole
    rows = losses(run_dir)
    assert [row["step"] for row in rows if "loss" in row] == [3, 6, 9, 12]
    first, last = (row for row in rows if "valid_loss" in row)
    assert (first["step"], last["step"]) == (6, 12)
    assert {"bleu", "chrf"} <= first.keys() and "test_bleu" not in first
    assert {"bleu", "chrf", "test_bleu", "test_chrf"} <= last.keys()
    assert last["valid_loss"] < rows[0]["loss"]
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "train.tsv: 101 pairs to train on, 7 held out" in done.out
    assert f"bleu {last['bleu']:.2f}, chrf {last['chrf']:.2f}, test_bleu {last['test_bleu']:.2f}" in done.out
    assert "nrefs:1" in done.out
    assert done.out.count("translation:") == done.out.count("target:") == 2
    assert sorted(path.name for path in (run_dir / "export").iterdir()) == [
        "config.json", "model.safetensors", "target_tokenizer.json", "tokenizer.json",
    ]  # fmt: skip
    source, target = np.array([[3, 4, 5, 0]]), np.array([[1, 3, 4]])
    ours = from_pretrained(run_dir / "export")(jnp.array(source), jnp.array(target))
    theirs = torch.tensor(0)
    from torch_ref.saving import from_pretrained as torch_from_pretrained

    theirs = torch_from_pretrained(run_dir / "export")(torch.tensor(source), torch.tensor(target))
    # The parity contract is tested elsewhere; here it is the same file, to float32's last digits.
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_the_validation_loss_is_the_mean_over_all_real_tokens_without_smoothing(whole) -> None:
    run_dir, _ = whole
    model = from_pretrained(run_dir / "export")
    from flax_tf.data.pair_tokens import SpecialIds, prepare_pairs
    from flax_tf.data.pairs import PairDataConfig

    room = run_dir.parent
    config = PairDataConfig(source=str(room / "train.tsv"), valid_source=str(room / "valid.tsv"), tokenizer="char")
    data = prepare_pairs(config, SpecialIds(), room / "cache")
    total = count = 0.0
    for source, target in data.valid.text():  # a sentence at a time, so without any padding
        ids = [1, *data.target_tokenizer.encode(target).ids, 2]
        batch = {"source": np.array([data.source_tokenizer.encode(source).ids]), "target": np.array([ids])}
        summed, tokens = sequence_loss(model, arrays(batch))
        total, count = total + float(summed), count + int(tokens)
    last = [row["valid_loss"] for row in read_rows(run_dir / "metrics.jsonl") if "valid_loss" in row][-1]
    assert last == pytest.approx(total / count, rel=1e-5)  # float32 sums in another order


def test_a_resumed_run_ends_with_the_same_bits(room: Path, whole) -> None:
    run_dir, _ = whole
    copy = room / "resumed"
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "checkpoints" / "12")
    (copy / "loss.png").unlink()
    flags = ["--config", "transformer.yaml", "--run_dir", "resumed", "--data.test_source", "test.tsv", "--resume"]
    done = train(room, *flags)
    assert done.code == 0, done.err
    assert losses(copy) == losses(run_dir)
    ours, truth = exported(copy), exported(run_dir)
    assert all(np.array_equal(ours[name], array) for name, array in truth.items())


@pytest.mark.parametrize("arch", ["rnn", "attn_rnn"])
def test_recurrent_models_are_trained_too(room: Path, arch: str) -> None:
    flags = ["--decoding.metric", "exact_match", "--decoding.samples", "1", "--data.tokenizer", "bpe"]
    done = train(room, "--config", f"{arch}.yaml", "--run_dir", arch, *flags, "--data.vocab_size", "270")
    assert done.code == 0, done.err
    rows = read_rows(room / arch / "metrics.jsonl")
    assert [row["loss"] for row in rows if "loss" in row][-1] < rows[0]["loss"]
    assert 0 <= rows[-1]["exact_match"] <= 100
    config = json.loads((room / arch / "export" / "config.json").read_text())
    assert (config["arch"], config["start_id"], config["end_id"]) == (arch, 0, 1)
    assert not (room / arch / "export" / "target_tokenizer.json").exists()  # one for both sides


def test_compilations_are_bounded_by_the_buckets(room: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three epochs of ragged sentences."""
    flags = ["--epochs", "3", "--steps", "null", "--eval_interval", "7", "--run_dir", "ragged"]
    jax.clear_caches()  # of the runs before in this process
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        done = train(room, "--config", "transformer.yaml", *flags)
    assert done.code == 0, done.err
    compiled = [record.getMessage() for record in caplog.records]
    for name, most in (("train_one", 3), ("evaluate", 3), ("_greedy", 3), ("_beam", 3)):
        count = sum(message.startswith(f"Finished XLA compilation of jit({name})") for message in compiled)
        assert 1 <= count <= most, name


def test_the_picture_shows_the_scores(tmp_path: Path) -> None:
    rows = [{"step": k, "loss": 5 / k} for k in range(1, 9)]
    plain = plot_losses(rows, tmp_path / "plain.png", "A title")
    rows += [{"step": k, "valid_loss": 1.0, "bleu": 3.0 * k, "chrf": 5.0 * k} for k in (4, 8)]
    plot_losses(rows, tmp_path / "scored.png", "A title")
    sizes = []
    for name in ("plain", "scored"):
        header = (tmp_path / f"{name}.png").read_bytes()[16:24]
        sizes.append((int.from_bytes(header[:4]), int.from_bytes(header[4:])))
    assert plain is None
    assert sizes[0][0] == sizes[1][0]
    assert sizes[0][1] < sizes[1][1]  # a panel more


# What wrong input gets

WRONG = {
    "unequal": (
        ["--data.source", "three.txt", "--data.target", "two.txt"],
        "three.txt has 3 lines and two.txt has 2: line i of one must be the translation of line i of the other",
    ),
    "one-sided": (["--data.source", "two.txt"], "two.txt: text of one side only"),
    "target-only": (
        ["--data.source", "dates", "--data.target", "two.txt", "--data.valid_source", "null"],
        "data.target is two.txt, but data.source is the built-in dates: set it, too",
    ),
    "empty": (["--data.source", "blank.tsv"], "blank.tsv: no pairs in it"),
    "pad-as-text": (
        ["--data.tokenizer", "tokenizer.json"],
        "has token id 0 ('b'), which is model.pad_id",
    ),
    "table": (["--model.max_seq_length", "30"], "data.max_length is 40, and the model's table has 30 positions"),
    "decoding-table": (["--decoding.max_length", "41"], "decoding.max_length is 41, and the model's table has 40"),
    "vocabulary": (
        ["--model.tgt_vocab_size", "5"],
        "vocabulary of 5 (ids 0 to 4): set model.tgt_vocab_size to at least 8",
    ),
    "smoothing": (["--label_smoothing", "1"], "label_smoothing is 1.0: it must be at least 0 and below 1"),
    "metric": (["--decoding.metric", "rouge"], "decoding.metric must be one of none, exact_match, bleu, not rouge"),
    "beam": (["--decoding.beam_size", "0"], "decoding.beam_size is 0: it must be at least 1"),
    "arch": (["--config", "arch.yaml", "--preset", "dates"], "preset dates is for arch transformer, not rnn: choose a"),
    "unknown-arch": (["--arch", "gpt"], "arch is 'gpt': choose from language_model, transformer, rnn, attn_rnn"),
    "text-setting": (["--data.path", "two.txt"], "unknown flag --data.path"),
    "tsv-and-target": (["--data.target", "two.txt"], "train.tsv: .tsv has both sides, so leave out two.txt"),
    "random": (
        ["--data.source", "random", "--data.valid_source", "null"],
        "data.source is random: set model.src_vocab_size",
    ),
}


@pytest.mark.parametrize(("flags", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_ends_in_one_line_and_leaves_nothing(room: Path, flags: list[str], message: str) -> None:
    from flax_tf.data.tokenizer import char_tokenizer

    (room / "three.txt").write_text("a\nb\nc\n")
    (room / "two.txt").write_text("a\nb\n")
    (room / "blank.tsv").write_text("\ta\nb\t \n")
    (room / "arch.yaml").write_text("arch: rnn\n")
    char_tokenizer(["bacd "]).save(str(room / "tokenizer.json"))
    if flags[0] == "--data.tokenizer":
        tokenizer = json.loads((room / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"] = {"b": 0, " ": 8, "a": 4, "c": 5, "d": 6, "e": 7}
        (room / "tokenizer.json").write_text(json.dumps(tokenizer))
    base = [] if "--config" in flags else ["--config", "transformer.yaml"]
    train(room, *base, "--run_dir", "refused", *flags).check_refused(message)
    assert not (room / "refused").exists()


def test_lines_that_cannot_be_used_are_counted_and_reported(room: Path) -> None:
    (room / "holes.tsv").write_text("ab\tab\n\tb\nb\t\n" + "a" * 60 + "\tb\n" + "ab ab\tab\n" * 3)
    flags = ["--data.source", "holes.tsv", "--data.valid_source", "valid.tsv", "--steps", "2", "--run_dir", "holes"]
    done = run([TRAIN, "--config", "transformer.yaml", *flags], room)
    assert done.code == 0, done.err
    says = "holes.tsv: left out of 7 pairs: 2 with an empty side, 1 longer than 40 tokens (data.max_length)"
    assert says in done.err
    assert "holes.tsv: 4 pairs to train on" in done.out


def test_bleu_without_sacrebleu_says_what_to_install(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu.metrics", None)
    done = train(room, "--config", "transformer.yaml", "--run_dir", "refused")
    done.check_refused("decoding.metric bleu needs sacrebleu: pip install 'flax-tf[eval]'")


@pytest.mark.parametrize(
    ("arch", "preset"),
    [("transformer", "dates"), ("attn_rnn", "dates-rnn"), ("rnn", "dates-rnn-plain"), ("language_model", "docs")],
)
def test_an_architecture_has_a_preset_of_its_own(arch: str, preset: str) -> None:
    config, settings = parse("train_jax.py", ["--arch", arch])
    assert config.preset == preset
    assert yaml.safe_load(settings)["arch"] == config.model.arch == arch


def test_data_with_both_sides_needs_no_other_setting_of_a_preset(room: Path) -> None:
    """That is, multi30k names no file of targets that would have to be unset."""
    for preset in ("dates", "multi30k"):
        config, _ = parse("train_jax.py", ["--preset", preset, "--data", str(room / "train.tsv")])
        assert load_pairs(config.data)["train"].name.startswith(str(room / "train.tsv"))
    with pytest.raises(InputError, match=r"train\.de\.gz: no such file"):
        load_pairs(parse("train_jax.py", ["--preset", "multi30k"])[0].data)


def test_the_setting_that_data_is_short_for(room: Path) -> None:
    config, _ = parse("train_jax.py", ["--preset", "dates", "--data", "mine.tsv"])
    assert config.data.source == "mine.tsv"


def test_the_help_of_each_system_has_its_own_settings() -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        parse("train_jax.py", ["--preset", "multi30k", "--help"])
    assert "--model.shared_embeddings" in out.getvalue()
    assert "--sample.prompt" not in out.getvalue()
    with pytest.raises(InputError, match=r"unknown flag --sample\.tokens"):
        parse("train_jax.py", ["--preset", "multi30k", "--sample.tokens", "3"])
