"""Half-trained runs handed over between torch.optim and optax: both directions, by call and by command."""

import copy
import dataclasses
import itertools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from models import LANGUAGE_MODEL, TRANSFORMER, ids, reference, twin
from runs import exported, losses, train

from flax_tf.data.batches import prepare, train_batches
from flax_tf.errors import InputError
from flax_tf.loss import language_model_loss
from flax_tf.parity.tolerances import relative_error
from flax_tf.porting import flax_to_torch, torch_to_flax
from flax_tf.porting.optimizer import optax_to_torch, torch_to_optax
from flax_tf.porting.param_groups import param_groups
from flax_tf.saving import build
from flax_tf.training.checkpoint import Checkpoints, read_newest
from flax_tf.training.command_line import parse
from flax_tf.training.hand_over import hand_over
from flax_tf.training.init_from import read_source, take_over
from flax_tf.training.optimizer import OptimizerConfig, build_optimizer, learning_rates
from flax_tf.training.step import TrainState, start
from torch_ref import loss as torch_loss
from torch_ref import optimizer as torch_optimizer
from torch_ref import saving as torch_saving

STEPS, K = 10, 4
# The contract for steps in float64. What is seen is 1e-15.
TRAJECTORY = 1e-9
# linear_proj is square: a transposed moment of it fits, and must be noticed by what it does.
MODEL = dataclasses.replace(LANGUAGE_MODEL, num_layers=1)
SQUARE = "transformer.transformer_layers.0.mha.linear_proj.weight"
CONFIGS = {
    "adam": OptimizerConfig(name="adam", weight_decay=0.1, betas=(0.8, 0.97)),
    "adamw": OptimizerConfig(
        learning_rate=1e-2,
        betas=(0.9, 0.99),
        weight_decay=0.1,
        decay="matrices",
        schedule="cosine",
        warmup_steps=2,
        min_learning_rate=1e-3,
        clip_norm=1.0,
    ),
    "sgd": OptimizerConfig(name="sgd", learning_rate=1e-2, momentum=0.9, schedule="inverse_sqrt", warmup_steps=3),
}
BOTH_WAYS = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture(autouse=True)
def float64(request: pytest.FixtureRequest):
    """For every test but those of commands, which are of float32."""
    with jax.enable_x64("room" not in request.fixturenames):
        yield


def batch(k: int) -> dict[str, np.ndarray]:
    tokens = ids(3, 8, seed=k).astype(np.int32)
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


class TorchRun:
    """A PyTorch run of `steps` steps that is at `step`."""

    def __init__(self, config: OptimizerConfig, module: Any = None, steps: int = STEPS):
        self.config, self.steps = config, steps
        self.module = reference(MODEL).double() if module is None else module
        self.optimizer = torch_optimizer.build_optimizer(config, self.module)
        self.scheduler = torch_optimizer.build_scheduler(config, self.optimizer, steps)

    def resume(self, checkpoint: dict[str, Any]) -> None:
        self.module.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.scheduler = torch_optimizer.build_scheduler(
            self.config, self.optimizer, self.steps, step=checkpoint["step"]
        )

    def do(self, batch: dict[str, np.ndarray]) -> None:
        total, count = torch_loss.language_model_loss(self.module, {n: torch.tensor(a) for n, a in batch.items()})
        self.module.zero_grad()
        (total / count).backward()
        torch_optimizer.clip_gradients(self.config, self.module)
        self.optimizer.step()
        self.scheduler.step()


def stopped(config: OptimizerConfig, steps: int = K) -> TorchRun:
    run = TorchRun(config)
    for k in range(steps):
        run.do(batch(k))
    return run


def jax_start(model: nnx.Module, config: OptimizerConfig):
    return start(model, build_optimizer(config, STEPS), language_model_loss, seed=0)


def taken_over(run: TorchRun, state_dict: dict[str, Any]) -> tuple[nnx.Module, TrainState, Any]:
    model = twin(run.module)
    state, steps = jax_start(model, run.config)
    opt_state = torch_to_optax(state_dict, model, state.opt_state, step=K)
    return model, state._replace(step=jnp.array(K, jnp.int32), opt_state=opt_state), steps


def worst(model: nnx.Module, state: TrainState, module: Any) -> float:
    nnx.update(model, state.params)
    ours = flax_to_torch(model)
    return max(relative_error(ours[name], param.detach().numpy()) for name, param in module.named_parameters())


@BOTH_WAYS
def test_the_rates_are_the_same_in_both(config: OptimizerConfig) -> None:
    theirs = [torch_optimizer.learning_rate(config, STEPS, k) for k in range(STEPS)]
    ours = jax.vmap(learning_rates(config, STEPS))(jnp.arange(STEPS))
    np.testing.assert_allclose(ours, theirs, rtol=1e-14)  # a few roundings


@BOTH_WAYS
def test_jax_goes_on_as_the_pytorch_run_that_was_never_stopped(config: OptimizerConfig) -> None:
    run = stopped(config)
    model, state, steps = taken_over(run, run.optimizer.state_dict())
    for k in range(K, STEPS):
        run.do(batch(k))
        state = steps.train(state, batch(k))
        assert worst(model, state, run.module) <= TRAJECTORY, k


@BOTH_WAYS
def test_pytorch_goes_on_as_the_jax_run_that_was_never_stopped(config: OptimizerConfig) -> None:
    module = reference(MODEL).double()
    model = twin(module)
    state, steps = jax_start(model, config)
    for k in range(K):
        state = steps.train(state, batch(k))
    nnx.update(model, state.params)
    run = TorchRun(config, reference(MODEL, seed=5).double())
    weights = {name: torch.tensor(array) for name, array in flax_to_torch(model).items()}
    optimizer = optax_to_torch(state.opt_state, model, run.optimizer.state_dict())
    run.resume({"model": weights, "optimizer": optimizer, "step": K})
    for k in range(K, STEPS):
        run.do(batch(k))
        state = steps.train(state, batch(k))
        assert worst(model, state, run.module) <= TRAJECTORY, k


def swapped(entry: dict[str, Any], name: str) -> None:
    entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg_sq"], entry["exp_avg"].abs()


def uncounted(entry: dict[str, Any], name: str) -> None:
    entry["step"] = torch.tensor(0.0)


def transposed(entry: dict[str, Any], name: str) -> None:
    if name == SQUARE:
        entry["exp_avg"] = entry["exp_avg"].T


@pytest.mark.parametrize("fault", [swapped, uncounted, transposed])
def test_a_wrong_conversion_would_be_noticed(fault: Callable[[dict[str, Any], str], None]) -> None:
    run = stopped(CONFIGS["adamw"])
    state_dict = copy.deepcopy(run.optimizer.state_dict())
    names = [name for group in state_dict["param_groups"] for name in group["param_names"]]
    for index, name in enumerate(names):
        fault(state_dict["state"][index], name)
    model, state, steps = taken_over(run, state_dict)
    run.do(batch(K))
    assert worst(model, steps.train(state, batch(K)), run.module) > 1000 * TRAJECTORY


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_there_and_back_keeps_every_bit(dtype: torch.dtype) -> None:
    module = reference(MODEL).to(dtype)
    config = CONFIGS["adam"]
    run = TorchRun(config, module)
    run.do(batch(0))
    state_dict = run.optimizer.state_dict()
    model = twin(module)
    opt_state = torch_to_optax(state_dict, model, jax_start(model, config)[0].opt_state)
    back = optax_to_torch(opt_state, model, torch_optimizer.build_optimizer(config, module).state_dict())
    assert back["state"].keys() == state_dict["state"].keys()
    for index, entry in state_dict["state"].items():
        assert entry.keys() == back["state"][index].keys()
        for name, tensor in entry.items():
            assert tensor.dtype == back["state"][index][name].dtype
            assert torch.equal(tensor, back["state"][index][name]), (index, name)


def labels(params: Any) -> Any:
    return jax.tree.map(lambda param: "matrices" if param.ndim >= 2 else "rest", params)


TREES = {
    "masked parts": lambda: optax.multi_transform({n: optax.adam(1e-3) for n in ("matrices", "rest")}, labels),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=7.0),
    "injected schedule": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=optax.constant_schedule(1e-3)),
    "accumulated": lambda: optax.MultiSteps(optax.adam(optax.constant_schedule(1e-3)), 3).gradient_transformation(),
}


@pytest.mark.parametrize("tree", TREES)
def test_any_tree_of_optax_is_filled(tree: str) -> None:
    run = stopped(OptimizerConfig(name="adam", weight_decay=0.0))
    state_dict = run.optimizer.state_dict()
    model = twin(run.module)
    opt_state = torch_to_optax(state_dict, model, TREES[tree]().init(nnx.state(model, nnx.Param)))
    back = optax_to_torch(opt_state, model, state_dict)
    for index, entry in state_dict["state"].items():
        assert all(torch.equal(tensor, back["state"][index][name]) for name, tensor in entry.items())
    counts = {
        jax.tree_util.keystr(path): int(leaf)
        for path, leaf in jax.tree.leaves_with_path(opt_state)
        if jnp.issubdtype(leaf.dtype, jnp.integer)
    }
    assert all(count == (0 if "mini_step" in path else K) for path, count in counts.items()), counts
    if tree == "injected":
        assert opt_state.hyperparams["learning_rate"] == 1e-3
        assert back["param_groups"][0]["lr"] == 1e-3


def test_the_state_of_an_nnx_optimizer_is_filled() -> None:
    run = stopped(OptimizerConfig(name="adam", weight_decay=0.0))
    model = twin(run.module)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    filled = torch_to_optax(run.optimizer.state_dict(), model, optimizer.opt_state)
    nnx.update(optimizer.opt_state, nnx.state(filled))

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: dict[str, Any]) -> None:
        def loss(model):
            total, count = language_model_loss(model, batch)
            return total / count

        optimizer.update(model, nnx.grad(loss)(model))

    for k in range(K, K + 2):
        run.do(batch(k))
        step(model, optimizer, batch(k))
        ours = flax_to_torch(model)
        for name, param in run.module.named_parameters():
            assert relative_error(ours[name], param.detach().numpy()) <= TRAJECTORY


# Which number is which parameter


def test_numbers_are_told_from_the_order_and_the_shapes() -> None:
    module = reference(MODEL)
    named = dict(module.named_parameters())
    model = twin(module)
    matrices = [name for name, param in named.items() if param.ndim >= 2]
    rest = [name for name, param in named.items() if param.ndim < 2]
    for parts in ([list(named)], [matrices, rest], [rest, matrices]):
        groups = [{"params": [named[name] for name in part]} for part in parts]
        optimizer = torch.optim.Adam(groups)
        for param in named.values():
            param.grad = torch.ones_like(param)
        optimizer.step()
        told = param_groups(optimizer.state_dict(), model, names=module.state_dict())
        assert [group["params"] for group in told] == parts
    backwards = torch.optim.Adam([named[name] for name in reversed(named)])
    backwards.step()
    with pytest.raises(InputError, match="can't be told from their shapes and order: give the optimizer"):
        param_groups(backwards.state_dict(), model, names=named)
    with pytest.raises(InputError, match="doesn't name its parameters: give the optimizer"):
        param_groups(backwards.state_dict(), model)
    told = param_groups(backwards.state_dict(), model, names=list(reversed(named)))
    assert told[0]["params"] == list(reversed(named))


def test_a_tied_parameter_is_one() -> None:
    config = dataclasses.replace(TRANSFORMER, tgt_vocab_size=37, shared_embeddings=True)
    module = reference(config)
    optimizer = torch.optim.Adam(module.parameters())
    for number, param in enumerate(module.parameters()):
        param.grad = torch.full_like(param, number + 1.0)
    optimizer.step()
    model = twin(module)
    opt_state = torch_to_optax(
        optimizer.state_dict(), model, optax.adam(1e-3).init(nnx.state(model, nnx.Param)), names=module.state_dict()
    )
    back = optax_to_torch(opt_state, model, optimizer.state_dict(), names=module.state_dict())
    for index, entry in optimizer.state_dict()["state"].items():
        assert torch.equal(entry["exp_avg"], back["state"][index]["exp_avg"])
    names = param_groups(optimizer.state_dict(), model, names=module.state_dict())[0]["params"]
    params = dict(module.named_parameters(remove_duplicate=False))
    assert [id(params[name]) for name in names] == [id(param) for param in module.parameters()]


# What has no counterpart


def setting(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state_dict: state_dict["param_groups"][0].update({name: value})


REFUSED = {
    "amsgrad": ("adam", setting("amsgrad", True), "amsgrad=True, which has no counterpart"),
    "maximize": ("adam", setting("maximize", True), "maximize=True, which has no counterpart"),
    "dampening": ("sgd", setting("dampening", 0.1), "dampening=0.1, and optax's momentum has none"),
    "no-groups": ("adam", lambda s: s.pop("param_groups"), "not the state_dict of a torch.optim optimizer"),
    "no-state": ("adam", lambda s: s.pop("state"), "not the state_dict of a torch.optim optimizer"),
    "no-moment": ("adam", lambda s: s["state"][3].pop("exp_avg_sq"), "has no exp_avg_sq: it is incomplete"),
    "never-stepped": ("adam", lambda s: s["state"].pop(3), "which never got a gradient: their Adam is at step 0"),
    "uneven": ("adam", lambda s: s["state"][3].update(step=torch.tensor(2.0)), "at step 1 for .* and at 2 for others"),
    "other-kind": ("adam", lambda s: s["param_groups"][0].pop("amsgrad"), "of neither Adam, AdamW nor SGD"),
    "too-many": ("adam", lambda s: s["state"].update({99: s["state"][0]}), "moments of 99, which is in none"),
    "untrained": ("adam", lambda s: [s["param_groups"][0][n].pop() for n in ("params", "param_names")]
                  and s["state"].popitem(), "does not train 1 of the model's parameters"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "spoil", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_counterpart_is_refused(name: str, spoil: Callable[[dict[str, Any]], Any], message: str) -> None:
    run = stopped(CONFIGS[name], steps=1)
    state_dict = copy.deepcopy(run.optimizer.state_dict())
    spoil(state_dict)
    model = twin(run.module)
    with pytest.raises(InputError, match=message):
        torch_to_optax(state_dict, model, jax_start(model, CONFIGS[name])[0].opt_state, step=1)


def test_adam_is_not_momentum_nor_the_reverse() -> None:
    runs = {name: stopped(CONFIGS[name], steps=1) for name in ("adam", "sgd")}
    model = twin(runs["adam"].module)
    states = {name: jax_start(model, CONFIGS[name])[0].opt_state for name in runs}
    for theirs, ours in (("adam", "sgd"), ("sgd", "adam")):
        with pytest.raises(InputError, match="and the optax state has no"):
            torch_to_optax(runs[theirs].optimizer.state_dict(), model, states[ours], step=1)
        with pytest.raises(InputError, match="and the optax state has no"):
            optax_to_torch(states[ours], model, runs[theirs].optimizer.state_dict())
    with pytest.raises(InputError, match=r"SGD doesn't count its steps, .* pass step"):
        torch_to_optax(runs["sgd"].optimizer.state_dict(), model, states["sgd"])


# The commands

TINY = """
steps: 13
batch_size: 3
log_interval: 1
eval_interval: 11
checkpoint_interval: 3
sample: {tokens: 0}
data: {path: text.txt}
model: {vocab_size: null, max_seq_length: 11, d_model: 14, num_heads: 2, num_layers: 1, dropout: 0.0}
optimizer: {name: adamw, momentum: 0.0, betas: [0.9, 0.99], weight_decay: 0.1, decay: matrices, learning_rate: 1e-2,
  schedule: cosine, warmup_steps: 2, min_learning_rate: 1e-3, clip_norm: 1.0}
"""
AT = 5


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, a config, PyTorch's run at step 5 as `run.pt` in some forms, and what became of it as `end.pt`."""
    room = tmp_path_factory.mktemp("room")
    words = np.random.default_rng(0).choice(["def", "class", "return", "the", "value", "of"], 600)
    (room / "text.txt").write_text(" ".join(words), encoding="utf-8")
    (room / "tiny.yaml").write_text(TINY, encoding="utf-8")
    config, _ = parse("", ["--config", str(room / "tiny.yaml")])
    settings: Any = dataclasses.replace(config.data, path=str(room / "text.txt"))
    data = prepare(settings, 11, room / "cache")
    batches: Any = train_batches(data, 3, config.seed)
    module = reference(dataclasses.replace(config.model, vocab_size=data.vocab_size))
    run = TorchRun(config.optimizer, module, 13)
    for k in range(13):
        if k == AT:
            model, optimizer = module.state_dict(), run.optimizer.state_dict()
            prefixed = {f"model.{name}": tensor for name, tensor in model.items()}
            torch.save({"model": model, "optimizer": optimizer, "step": k}, room / "run.pt")
            torch.save({"state_dict": prefixed, "optimizer_states": [optimizer], "global_step": k}, room / "run.ckpt")
            torch.save({"model": model, "optimizer_state_dict": optimizer}, room / "uncounted.pt")
            torch.save(model, room / "weights.pt")
        run.do(batches[k])
    torch.save(module.state_dict(), room / "end.pt")
    return room


def distance(run_dir: Path, room: Path) -> float:
    truth = torch.load(room / "end.pt", weights_only=True)
    return max(relative_error(array, truth[name].numpy()) for name, array in exported(run_dir).items())


@pytest.mark.parametrize("file", ["run.pt", "run.ckpt", "uncounted.pt"])
def test_the_command_continues_a_pytorch_run(room: Path, file: str, caplog: pytest.LogCaptureFixture) -> None:
    done = train(room, "--init_from", file, "--run_dir", file.replace(".", "-"))
    assert done.code == 0, done.err
    assert f"{file}: weights and the state of the optimizer, the run goes on at step 5" in done.out
    assert not [message for message in caplog.messages if "was trained with" in message]
    run_dir = room / file.replace(".", "-")
    # float32: roundings of 6e-8 in the gradients of eight steps, of which Adam makes steps of 1e-2 at most.
    assert distance(run_dir, room) <= 1e-4
    assert [row["step"] for row in losses(run_dir) if "loss" in row] == list(range(AT + 1, 14))


def test_a_resumed_run_does_not_start_from_the_file_again(room: Path) -> None:
    flags = ["--init_from", "run.pt", "--run_dir", "resumed"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flax_tf.training.metrics.Metrics.valid", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(SystemExit, match="130"):
            train(room, *flags)
    done = train(room, *flags, "--resume")
    assert done.code == 0, done.err
    assert "goes on at step" not in done.out
    straight = train(room, "--init_from", "run.pt", "--run_dir", "straight")
    assert straight.code == 0, straight.err
    ours, truth = exported(room / "resumed"), exported(room / "straight")
    assert all(np.array_equal(ours[name], array) for name, array in truth.items())


def test_weights_alone_start_at_step_0(room: Path) -> None:
    done = train(room, "--init_from", "weights.pt", "--run_dir", "fresh", "--optimizer.learning_rate", "1e-3")
    assert done.code == 0, done.err
    assert "weights.pt: weights alone, the run starts at step 0 with a fresh optimizer" in done.out
    assert losses(room / "fresh")[0]["step"] == 1
    again = train(room, "--init_from", "fresh", "--run_dir", "fresher", "--optimizer.name", "muon")  # a run's export
    assert again.code == 0, again.err
    assert losses(room / "fresher")[0]["loss"] < losses(room / "fresh")[0]["loss"]


CONSTANT = "--optimizer.schedule constant --optimizer.warmup_steps 0 --optimizer.learning_rate 0.0"
CHANGED = {
    "betas": (["--optimizer.betas", "[0.9,0.95]"], "betas (0.9, 0.99)", "--optimizer.betas [0.9,0.99]"),
    "eps": (["--optimizer.eps", "1e-6"], "eps 1e-08", "--optimizer.eps 1e-08"),
    "decay": (["--optimizer.decay", "all"], "weight_decay 0.0, 0.1",
              "--optimizer.weight_decay 0.1 --optimizer.decay matrices"),
    "adam": (["--optimizer.name", "adam"], "name adamw", "--optimizer.name adamw"),
    "rate": (["--optimizer.learning_rate", "2e-3"], "learning_rate of step 5", "--optimizer.learning_rate 0.01"),
    "schedule": (["--steps", "17"], "learning_rate of step 5", "the schedule, the warm-up and the --steps"),
    "both": (["--steps", "17", "--optimizer.learning_rate", "2e-3"], "learning_rate of step 5", CONSTANT),
}  # fmt: skip


def taken_from(room: Path, file: str, *flags: str) -> TrainState:
    """What a run of the flags starts with."""
    config, _ = parse("", ["--config", str(room / "tiny.yaml"), *flags])
    source = read_source(room / file)
    model = build(dataclasses.replace(config.model, vocab_size=len(source.weights["classifier.bias"])))
    torch_to_flax(source.weights, model)
    state, _ = start(model, build_optimizer(config.optimizer, config.steps), language_model_loss, seed=0)
    return take_over(source, state, model, config.optimizer, config.steps)


@pytest.mark.parametrize(("flags", "what", "how"), CHANGED.values(), ids=CHANGED)
def test_a_changed_setting_is_told_in_one_line(
    room: Path, flags: list[str], what: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert int(taken_from(room, "run.pt", *flags).step) == AT
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"{room}/run.pt was trained with {what}")
    assert how in caplog.messages[0]


@pytest.mark.parametrize("name", ["both", "rate"])
def test_the_flags_of_the_hint_keep_the_rate(room: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    flags = CHANGED[name][0]
    taken_from(room, "run.pt", *flags)
    hint = caplog.messages[0].partition("as it was with ")[2].partition(", or with")[0]
    caplog.clear()
    taken_from(room, "run.pt", *flags, *hint.split())
    assert caplog.messages == []


def unnamed(whole: dict[str, Any], *sizes: int) -> dict[str, Any]:
    """A checkpoint whose optimizer has the parameters in the model's order without names, in groups of the sizes."""
    first, second = whole["optimizer"]["param_groups"]
    order = [*first["param_names"], *second["param_names"]]
    state = {
        i: whole["optimizer"]["state"][order.index(n)] for i, n in enumerate(k for k in whole["model"] if k in order)
    }
    settings = {name: value for name, value in first.items() if name not in ("params", "param_names")}
    cuts = [0, *sizes, len(order)]
    groups = [{**settings, "params": list(range(a, b))} for a, b in itertools.pairwise(cuts)]
    return {**whole, "optimizer": {"state": state, "param_groups": groups}}


def test_an_order_that_is_assumed_is_told(room: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = torch.load(room / "run.pt", weights_only=True)
    torch.save(unnamed(whole), room / "unnamed.pt")
    named, assumed = (taken_from(room, file, "--optimizer.decay", "all") for file in ("run.pt", "unnamed.pt"))
    for ours, theirs in zip(jax.tree.leaves(assumed), jax.tree.leaves(named), strict=True):
        assert np.array_equal(ours, theirs)
    (line,) = [message for message in caplog.messages if "without names of its parameters" in message]
    assert "made with model.named_parameters()" in line
    torch.save(unnamed(whole, 2), room / "groups.pt")
    with pytest.raises(InputError, match="2 groups of parameters without names"):
        taken_from(room, "groups.pt")


SPOILED = {
    "no-rate": ({"lr": None}, {}, "has lr=None, which must be of finite numbers"),
    "no-decay": ({"weight_decay": None}, {}, "has weight_decay=None"),
    "far": ({}, {"step": 1e300}, "says step 1e\\+300, which is no number of steps"),
    "inf": ({}, {"step": float("inf")}, "says step inf"),
    "nan": ({}, {"step": torch.tensor(float("nan"))}, "says step nan"),
    "negative": ({}, {"step": -1}, "says step -1"),
}


@pytest.mark.parametrize(("setting", "other", "message"), SPOILED.values(), ids=SPOILED)
def test_a_spoiled_checkpoint_is_told_in_one_line(
    room: Path, tmp_path: Path, setting: dict[str, Any], other: dict[str, Any], message: str
) -> None:
    whole = torch.load(room / "run.pt", weights_only=True)
    whole["optimizer"]["param_groups"][0].update(setting)
    torch.save({**whole, **other}, tmp_path / "spoiled.pt")
    with pytest.raises(InputError, match=message) as caught:
        taken_from(room, str(tmp_path / "spoiled.pt"))
    assert "\n" not in str(caught.value)


WRONG = {
    "muon": (["--init_from", "run.pt", "--optimizer.name", "muon"], "is AdamW, which muon can't go on from: give"),
    "sgd": (["--init_from", "run.pt", "--optimizer.name", "sgd"], "which sgd can't go on from"),
    "over": (["--init_from", "run.pt", "--steps", "5"], "run.pt has done 5 steps, and the run takes 5: raise --steps"),
    "missing": (["--init_from", "none.pt"], "none.pt does not exist"),
    "damaged": (["--init_from", "half.pt"], "half.pt is not a whole PyTorch file"),
    "unsafe": (["--init_from", "unsafe.pt"], "unsafe.pt holds pickled Python objects"),
    "no-weights": (["--init_from", "empty.pt"], "empty.pt holds no state dict"),
    "truncated": (["--init_from", "cut.pt"], "cut.pt: this is not the state_dict of a torch.optim optimizer"),
    "two": (["--init_from", "two.pt"], "two.pt holds 2 optimizers under 'optimizer_states'"),
    "no-step": (["--init_from", "no-step.pt"], "no-step.pt does not tell how many steps were done"),
    "kind": (["--init_from", "text.txt"], "text.txt is of an unknown kind"),
}  # fmt: skip


@pytest.mark.parametrize(("flags", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_source_ends_in_one_line_and_leaves_nothing(room: Path, flags: list[str], message: str) -> None:
    whole = torch.load(room / "run.pt", weights_only=True)
    torch.save({"model": whole["model"], "loss": Fraction(1, 3)}, room / "unsafe.pt")
    (room / "half.pt").write_bytes((room / "run.pt").read_bytes()[:5000])
    torch.save({"optimizer": whole["optimizer"]}, room / "empty.pt")
    torch.save({**whole, "optimizer": {"state": whole["optimizer"]["state"]}}, room / "cut.pt")
    torch.save({"model": whole["model"], "optimizer_states": 2 * [whole["optimizer"]]}, room / "two.pt")
    torch.save({"model": whole["model"], "optimizer": {"state": {}, "param_groups": []}}, room / "no-step.pt")
    train(room, "--run_dir", "refused", *flags).check_refused(message)
    assert not (room / "refused").exists()


def test_a_checkpoint_of_another_size_is_refused_with_the_flags_that_fit(room: Path) -> None:
    flags = ["--run_dir", "refused", "--model.num_layers", "2", "--model.max_seq_length", "7"]
    done = train(room, *flags, "--init_from", "weights.pt")
    done.check_refused(
        "holds a language_model of other sizes than the run's: give --model.num_layers 1 --model.max_seq"
    )
    flags = done.err.partition("give ")[2].split()
    assert train(room, "--run_dir", "refused", "--init_from", "none.pt", *flags).err.endswith("torch.save wrote\n")
    assert not (room / "refused").exists()


def test_a_checkpoint_of_another_model_is_refused_with_its_keys(room: Path) -> None:
    weights = torch.load(room / "weights.pt", weights_only=True)
    del weights["classifier.bias"]
    torch.save(weights, room / "short.pt")
    done = train(room, "--run_dir", "refused", "--init_from", "short.pt")
    assert done.code == 2
    assert "short.pt: the checkpoint does not fit" in done.err and "missing from the checkpoint (1)" in done.err
    assert not (room / "refused").exists()


def test_a_run_is_handed_over_to_pytorch(room: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two steps here, to the end there: it is the run that was all PyTorch's, in float32."""
    done = train(room, "--init_from", "run.pt", "--run_dir", "to-torch")
    assert done.code == 0, done.err
    run_dir = room / "to-torch"
    assert hand_over(str(run_dir), str(tmp_path / "out.pt")) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path}/out.pt: model and optimizer of step 13\n"
    checkpoint = torch.load(tmp_path / "out.pt", weights_only=True)
    ours = exported(run_dir)
    assert all(np.array_equal(tensor.numpy(), ours[name]) for name, tensor in checkpoint["model"].items())
    config, _ = parse("", ["--config", str(room / "tiny.yaml")])
    run = TorchRun(config.optimizer, torch_saving.from_pretrained(run_dir / "export"), 13)
    run.resume(checkpoint)
    group = run.optimizer.param_groups[0]
    assert (group["initial_lr"], group["betas"], checkpoint["step"]) == (1e-2, (0.9, 0.99), 13)
    assert all(int(entry["step"]) == 13 for entry in run.optimizer.state.values())
    # And back: the file is one that train_jax.py goes on from.
    more = train(room, "--init_from", str(tmp_path / "out.pt"), "--run_dir", str(tmp_path / "on"), "--steps", "15")
    assert "the run goes on at step 13" in more.out


@pytest.mark.parametrize(
    ("run_dir", "out", "message"),
    [("none", "out.pt", "none/checkpoints holds no checkpoint"), ("none", "out.xyz", "out.xyz is of an unknown kind")],
)
def test_a_hand_over_of_nothing_is_refused(tmp_path: Path, run_dir: str, out: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        hand_over(str(tmp_path / run_dir), str(tmp_path / out))
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_that_pytorch_has_not_is_named(room: Path, tmp_path: Path) -> None:
    done = train(room, "--run_dir", str(tmp_path / "muon"), "--optimizer.name", "muon")
    assert done.code == 0, done.err
    with pytest.raises(InputError, match=r"muon: optimizer.name muon is no .*: train with adamw, .* alone: .*export"):
        hand_over(str(tmp_path / "muon"), str(tmp_path / "out.pt"))
    assert not (tmp_path / "out.pt").exists()


def test_a_directory_is_not_replaced_by_a_hand_over(room: Path, tmp_path: Path) -> None:
    done = train(room, "--init_from", "weights.pt", "--run_dir", str(tmp_path / "run"), "--steps", "1")
    assert done.code == 0, done.err
    (tmp_path / "out.ckpt").mkdir()
    (tmp_path / "out.ckpt" / "mine").write_text("mine")
    with pytest.raises(InputError, match=r"out\.ckpt is a directory: name a file to write"):
        hand_over(str(tmp_path / "run"), str(tmp_path / "out.ckpt"))
    assert (tmp_path / "out.ckpt" / "mine").read_text() == "mine"


def test_a_resumed_run_keeps_the_precision_that_it_started_from(tmp_path: Path) -> None:
    config = CONFIGS["adam"]
    half, _ = jax_start(twin(reference(MODEL).bfloat16()), config)
    fresh, _ = jax_start(twin(reference(MODEL)), config)
    Checkpoints(tmp_path).save(half, {})
    for loaded in (Checkpoints(tmp_path).load(fresh, lambda about, step: None), read_newest(tmp_path, lambda _: fresh)):
        for new, old in zip(jax.tree.leaves(loaded), jax.tree.leaves(half), strict=True):
            assert new.dtype == old.dtype
            assert np.array_equal(new, old)


def test_64_bits_are_not_cut_in_silence(tmp_path: Path) -> None:
    wide, _ = jax_start(twin(reference(MODEL).double()), CONFIGS["adam"])
    Checkpoints(tmp_path).save(wide, {})
    with jax.enable_x64(False), pytest.raises(InputError, match="set JAX_ENABLE_X64=1"):
        read_newest(tmp_path, lambda _: jax_start(twin(reference(MODEL)), CONFIGS["adam"])[0])
