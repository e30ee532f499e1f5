"""Optimizers, clipping, decay and schedules, step for step beside torch.optim in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from models import LANGUAGE_MODEL, ids, reference, twin
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

from flax_tf.errors import InputError
from flax_tf.loss import language_model_loss
from flax_tf.parity.tolerances import relative_error
from flax_tf.porting import flax_to_torch
from flax_tf.training.muon import orthogonalize
from flax_tf.training.optimizer import OptimizerConfig, build_optimizer, clip_by_global_norm, learning_rates
from flax_tf.training.step import forget_loss, start
from torch_ref import loss as torch_loss

STEPS = 100
# Both sides do the same few float64 operations a step; rounding (2e-16) grows over 100 steps to about 1e-13.
SAME_GRADIENTS = 1e-12
# With a model in the loop, a rounding of the weights changes the gradients of the next step: the contract's 1e-9.
TRAJECTORY = 1e-9


def torch_schedule(optimizer: torch.optim.Optimizer, config: OptimizerConfig, steps: int):
    """The same rates from torch's own schedulers."""
    warmup, floor = config.warmup_steps, config.min_learning_rate
    if config.schedule == "cosine":
        after = CosineAnnealingLR(optimizer, max(1, steps - 1 - warmup), eta_min=floor)
    elif config.schedule == "inverse_sqrt":
        after = LambdaLR(optimizer, lambda step: ((warmup + 1) / (step + warmup + 1)) ** 0.5)
    else:
        after = ConstantLR(optimizer, 1.0)
    if not warmup:
        return after
    rising = LinearLR(optimizer, start_factor=1 / (warmup + 1), end_factor=1.0, total_iters=warmup)
    return SequentialLR(optimizer, [rising, after], [warmup])


def torch_optimizers(config: OptimizerConfig, params: list[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    decayed = [p for p in params if config.decay == "all" or p.ndim >= 2]
    rest = [p for p in params if not any(p is q for q in decayed)]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    lr = config.learning_rate
    match config.name:
        case "adamw":
            return [torch.optim.AdamW(groups, lr=lr, betas=config.betas, eps=config.eps)]
        case "adam":
            return [torch.optim.Adam(groups, lr=lr, betas=config.betas, eps=config.eps)]
        case "sgd":
            return [torch.optim.SGD(groups, lr=lr, momentum=config.momentum)]
        case "muon":
            matrices, rest = ([p for p in params if (p.ndim == 2) is is_matrix] for is_matrix in (True, False))
            options = {"momentum": config.momentum, "weight_decay": config.weight_decay}
            return [
                torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw", **options),
                torch.optim.AdamW(rest, lr=lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay),
            ]


CONFIGS = {
    "adamw": OptimizerConfig(),
    "adamw-nanogpt": OptimizerConfig(
        betas=(0.9, 0.99),
        weight_decay=0.1,
        decay="matrices",
        schedule="cosine",
        warmup_steps=7,
        min_learning_rate=1e-4,
        clip_norm=1.0,
    ),
    "adam-l2": OptimizerConfig(name="adam", weight_decay=0.1, betas=(0.8, 0.97), eps=1e-6),
    "muon": OptimizerConfig(name="muon", momentum=0.95),
    "sgd": OptimizerConfig(name="sgd", learning_rate=1e-2, momentum=0.9, weight_decay=0.1, decay="matrices"),
}


@pytest.fixture
def exact_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon rounds to bfloat16, which has three digits; without that its arithmetic can be compared."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)


@pytest.mark.usefixtures("exact_muon")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_hundred_steps_on_the_same_gradients(config: OptimizerConfig) -> None:
    rng = np.random.default_rng(0)
    shapes = {"matrix": (5, 3), "bias": (7,), "table": (11, 2), "scalar": ()}
    initial = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    params = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in initial.items()}
    optimizers = torch_optimizers(config, list(params.values()))
    schedules = [torch_schedule(optimizer, config, STEPS) for optimizer in optimizers]
    with jax.enable_x64(True):
        ours = {name: jnp.array(value) for name, value in initial.items()}
        rule = build_optimizer(config, STEPS)
        state = rule.init(ours)
        update = jax.jit(rule.update)
        for _ in range(STEPS):
            # Norms around 10 and around 0.01, so that clipping acts on some steps alone.
            scale = rng.choice([1e-3, 1.0])
            grads = {name: scale * rng.standard_normal(shape) for name, shape in shapes.items()}
            updates, state = update({name: jnp.array(grad) for name, grad in grads.items()}, state, ours)
            ours = {name: ours[name] + updates[name] for name in ours}
            for name, grad in grads.items():
                params[name].grad = torch.tensor(grad)
            if config.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(params.values(), config.clip_norm)
            for each in (*optimizers, *schedules):
                each.step()
            for name, param in params.items():
                assert relative_error(np.asarray(ours[name]), param.detach().numpy()) <= SAME_GRADIENTS, name


@pytest.mark.usefixtures("exact_muon")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_hundred_steps_of_a_model(config: OptimizerConfig) -> None:
    """Everything at once: the loss, its gradients, the step function and the optimizer."""
    module = reference(dataclasses.replace(LANGUAGE_MODEL, num_layers=1)).double()
    params = dict(module.named_parameters())
    optimizers = torch_optimizers(config, list(params.values()))
    schedules = [torch_schedule(optimizer, config, STEPS) for optimizer in optimizers]
    with jax.enable_x64(True):
        model = twin(module)
        state, steps = start(model, build_optimizer(config, STEPS), language_model_loss, seed=0)
        for k in range(STEPS):
            tokens = ids(3, 8, seed=k).astype(np.int32)
            batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
            state = steps.train(forget_loss(state), batch)
            total, count = torch_loss.language_model_loss(module, {n: torch.tensor(a) for n, a in batch.items()})
            module.zero_grad()
            (total / count).backward()
            if config.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(params.values(), config.clip_norm)
            for each in (*optimizers, *schedules):
                each.step()
            assert relative_error(np.asarray(state.loss_sum), total.detach().numpy()) <= TRAJECTORY
            nnx.update(model, state.params)
            ours = flax_to_torch(model)
            for name, param in params.items():
                assert relative_error(ours[name], param.detach().numpy()) <= TRAJECTORY, (k, name)


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 100.0])
def test_clipping_is_torchs(max_norm: float) -> None:
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal((5, 3)), rng.standard_normal(7)]
    params = [torch.nn.Parameter(torch.zeros(grad.shape, dtype=torch.float64)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = torch.tensor(grad)
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    with jax.enable_x64(True):
        clip = clip_by_global_norm(max_norm)
        ours, _ = clip.update([jnp.array(grad) for grad in grads], clip.init(None))
    for a, param in zip(ours, params, strict=True):
        assert relative_error(np.asarray(a), param.grad.numpy()) <= SAME_GRADIENTS


@pytest.mark.parametrize("schedule", ["constant", "cosine", "inverse_sqrt"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 23), (1, 23), (7, 23), (22, 23), (29, 23)])
def test_the_list_of_rates_is_torchs(schedule, warmup: int, steps: int) -> None:
    config = OptimizerConfig(learning_rate=3e-3, min_learning_rate=2e-4, schedule=schedule, warmup_steps=warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    scheduler = torch_schedule(optimizer, config, steps)
    theirs = []
    for _ in range(steps):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    with jax.enable_x64(True):
        ours = jax.vmap(learning_rates(config, steps))(jnp.arange(steps, dtype=jnp.int32))
    # torch goes from rate to rate by a recurrence, whose rounding adds up over the steps.
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    assert ours[0] == pytest.approx(3e-3 / (warmup + 1), rel=1e-12)  # no step is wasted on a rate of zero
    if schedule == "cosine" and steps > warmup + 1:
        assert ours[-1] == pytest.approx(2e-4, rel=1e-12)


@pytest.mark.parametrize("warmup", [1, 7, 4000])
def test_the_inverse_square_root_is_that_of_the_paper(warmup: int) -> None:
    """Vaswani et al. 2017, equation 3: d^-0.5 min(s^-0.5, s w^-1.5), with steps s from 1."""
    d_model = 512
    peak = (d_model * warmup) ** -0.5
    config = OptimizerConfig(learning_rate=peak, schedule="inverse_sqrt", warmup_steps=warmup - 1)
    s = np.arange(1, 9001)
    paper = d_model**-0.5 * np.minimum(s**-0.5, s * warmup**-1.5)
    with jax.enable_x64(True):
        ours = jax.vmap(learning_rates(config, 9000))(jnp.arange(9000, dtype=jnp.int32))
    np.testing.assert_allclose(ours, paper, rtol=1e-13)  # a few roundings of 1e-16, and 1e-14 in a float warm-up


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "adamax"},
        {"decay": "none"},
        {"schedule": "linear"},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"betas": (0.9, 1.0)},
        {"momentum": 1.0},
        {"eps": -1e-8},
        {"weight_decay": float("inf")},
        {"warmup_steps": -1},
        {"min_learning_rate": 1.0},
        {"clip_norm": 0.0},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_impossible_values_are_refused_by_name(wrong: dict) -> None:
    with pytest.raises(InputError, match=f"optimizer.{next(iter(wrong))} is "):
        OptimizerConfig(**wrong)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (7, 7)])
def test_orthogonalize_flattens_the_singular_values(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(0).standard_normal(shape)
    with jax.enable_x64(True):
        values = np.linalg.svd(np.asarray(orthogonalize(jnp.array(matrix))), compute_uv=False)
    # The iteration's own band: its coefficients trade exactness for speed.
    assert (values > 0.5).all()
    assert (values < 1.5).all()
