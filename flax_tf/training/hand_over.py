"""A run of `train_jax.py` as a PyTorch training checkpoint."""

from pathlib import Path
from typing import Any

from flax import nnx

from flax_tf.command import OK
from flax_tf.config import config_from_dict
from flax_tf.errors import InputError
from flax_tf.files import check_file, replacing
from flax_tf.loss import language_model_loss
from flax_tf.porting.convert import flax_to_torch
from flax_tf.porting.files import TORCH_SUFFIXES, numpy_to_torch
from flax_tf.porting.optimizer import optax_to_torch
from flax_tf.saving import build
from flax_tf.training.optimizer import build_optimizer
from flax_tf.training.optimizer_config import OptimizerConfig
from flax_tf.training.step import TrainState, start


def hand_over(run_dir: str, out: str) -> int:
    """Writes the newest checkpoint of a training run as one of PyTorch's, with which torch.optim goes on.

    The file holds a dict of model and optimizer, which are state dicts, and step. The optimizer's parameters are in the
    order of model.named_parameters(); with optimizer.decay matrices in two groups, of the parameters with two axes or
    more and of the rest.

    Args:
        run_dir: The directory of a run of train_jax.py, with the optimizer adamw, adam or sgd. It may be going on.
        out: The .pt file to write.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise InputError("a hand-over to PyTorch needs PyTorch: pip install 'flax-tf[torch]'") from None
    import torch_ref.optimizer
    import torch_ref.saving
    from flax_tf.training.checkpoint import read_newest  # orbax is slow to import, and takes over the log

    if Path(out).suffix not in TORCH_SUFFIXES:
        raise InputError(f"{out} is of an unknown kind: name one of {', '.join(TORCH_SUFFIXES)}")
    check_file(out)
    run: dict[str, Any] = {}

    def like(about: Any) -> TrainState:
        settings: Any = {**about["config"]["optimizer"], "betas": tuple(about["config"]["optimizer"]["betas"])}
        run["optimizer"] = OptimizerConfig(**settings)
        run["steps"] = about["total_steps"]
        run["model"] = build(config_from_dict({"arch": about["config"]["arch"], **about["config"]["model"]}))
        # The loss is never computed: of the step, only the state is used.
        return start(run["model"], build_optimizer(run["optimizer"], run["steps"]), language_model_loss, seed=0)[0]

    state = read_newest(Path(run_dir) / "checkpoints", like)
    model, config, step = run["model"], run["optimizer"], int(state.step)
    nnx.update(model, state.params)
    with torch.device("meta"):
        twin = torch_ref.saving.build(model.config)
    try:
        optimizer = torch_ref.optimizer.build_optimizer(config, twin)
    except InputError as error:
        raise InputError(f"{run_dir}: {error} (for the weights alone: {Path(run_dir) / 'export'})") from None
    torch_ref.optimizer.build_scheduler(config, optimizer, run["steps"])  # notes the peak as initial_lr
    for group in optimizer.param_groups:
        group["lr"] = torch_ref.optimizer.learning_rate(config, run["steps"], step)
    checkpoint = {
        "model": {name: numpy_to_torch(array) for name, array in flax_to_torch(model).items()},
        "optimizer": optax_to_torch(state.opt_state, model, optimizer.state_dict()),
        "step": step,
    }
    with replacing(out) as path:
        try:
            torch.save(checkpoint, path)
        except RuntimeError as error:  # what torch makes of a full disk
            raise OSError(str(error).splitlines()[0]) from error
    print(f"wrote {out}: model and optimizer of step {step}")  # noqa: T201
    return OK
