"""A user's own pair of models, named by import paths and described by a config file."""

import contextlib
import difflib
import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import jax
import numpy as np
from flax import nnx

from flax_tf.errors import InputError
from flax_tf.parity.compare import compare
from flax_tf.parity.flax_side import run_flax
from flax_tf.parity.report import Report
from flax_tf.parity.torch_side import run_torch
from flax_tf.porting import read_weights, torch_to_flax
from flax_tf.porting.files import numpy_to_torch
from flax_tf.porting.names import strip_wrappers

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "int32", "int64", "bool")
MOST_SEED = 2**32 - 1  # that both frameworks and NumPy take
MOST_NUMBERS = 2**48  # far below what NumPy can address, far above any memory
MESSAGE_LENGTH = 300  # characters of an exception from within a model


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """An argument of both models: a random array, or a value."""

    shape: list | None = None
    """Of a random array, as PyTorch's side takes it."""
    dtype: str = "float32"
    """float32: standard normal, cast to each precision that is compared. int32, int64: from 0 to below high. bool."""
    high: int | None = None
    """Above the largest integer, such as the size of the vocabulary."""
    value: Any = None
    """In place of a shape: what is given as it is; a list becomes an array."""
    name: str | None = None
    """The keyword that it is given by. null: by its place."""


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """How to make both models, and what to feed them."""

    init: dict = field(default_factory=dict)
    """Keyword arguments of both classes."""
    torch: dict = field(default_factory=dict)
    """Keyword arguments of the PyTorch class alone."""
    flax: dict = field(default_factory=dict)
    """Keyword arguments of the Flax class alone. `rngs` is given to a class that takes it."""
    inputs: list = field(default_factory=list)
    """The arguments of both models: settings as of InputConfig for each."""
    rename: dict = field(default_factory=dict)
    """{PyTorch path: Flax path, or null} where these differ (see `porting.torch_to_flax`)."""
    channels_last: bool = False
    """Whether Flax takes and returns images with the channels last."""
    train: bool = False
    """Whether to compare in training mode, with PyTorch's dropout masks in both."""
    seed: int = 0
    """Decides PyTorch's random weights, the inputs and dropout."""


def check_pair(
    torch_name: str,
    flax_name: str,
    settings: Mapping[str, Any],
    weights: str | os.PathLike | None = None,
    precisions: Sequence[str] = ("float32",),
) -> Report:
    """Makes both models, ports PyTorch's weights to Flax, and compares the two.

    Args:
        torch_name: "package.module:Class" of PyTorch's side: a class or function that makes an `nn.Module`. Modules
            are looked for in the current directory too.
        flax_name: the same of Flax's side, for an `nnx.Module`.
        settings: the fields of PairConfig.
        weights: a weight file or directory for PyTorch's side, loaded strictly. None: its own random ones.

    Raises InputError for whatever can't be used; an error from within a model's code is told with its side and place.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise InputError("a check runs both frameworks and needs PyTorch: pip install 'flax-tf[torch]'") from None
    config = _settings(PairConfig, settings, "config")
    for theirs, ours in config.rename.items():
        if not (isinstance(theirs, str) and isinstance(ours, str | None)):
            raise InputError(f"config: rename must map PyTorch's paths to Flax's or null, not {theirs!r} to {ours!r}")
    if not 0 <= config.seed <= MOST_SEED:
        raise InputError(f"config: seed must be from 0 to {MOST_SEED}, not {config.seed}")
    args, kwargs = _inputs(config)
    with _current_directory_importable():
        make_torch, make_flax = _find("--torch", torch_name), _find("--flax", flax_name)
        torch.manual_seed(config.seed)
        torch_module: Any = _make("--torch", torch_name, make_torch, config.init | config.torch, torch.nn.Module)
        check_filled(torch_module)
        if weights is not None:
            _load(torch_module, weights)
        rngs = {"rngs": nnx.Rngs(config.seed)} if _takes_rngs(make_flax) else {}
        flax_module: Any = _make("--flax", flax_name, make_flax, config.init | config.flax | rngs, nnx.Module)
        port(torch_module, flax_module, config.rename)
        try:
            return compare(
                torch_module,
                flax_module,
                *args,
                rename=config.rename,
                train=config.train,
                channels_last=config.channels_last,
                precisions=precisions,
                seed=config.seed,
                **kwargs,
            )
        except (InputError, MemoryError):
            raise
        except Exception as error:
            codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
            for runner, flag, name in ((run_torch, "--torch", torch_name), (run_flax, "--flax", flax_name)):
                if runner.__code__ in codes:
                    raise InputError(f"{flag} {name}: running it raised {_told(error, name)}") from error
            raise


def check_filled(module: "torch.nn.Module") -> None:
    """Raises InputError if a parameter or a buffer of the module holds no numbers: on the meta device, or lazy."""
    from torch.nn.parameter import is_lazy

    for name, tensor in module.state_dict(keep_vars=True).items():
        if is_lazy(tensor):
            raise InputError(f"{name} of the PyTorch model is lazy and has no shape yet: give its layer all sizes")
        if tensor.is_meta:
            raise InputError(f"{name} of the PyTorch model is on the meta device, without numbers: make it on the CPU")


def port(torch_module: "torch.nn.Module", flax_module: nnx.Module, rename: Mapping[str, str | None] | None) -> None:
    """Fills the Flax module with the PyTorch module's weights, 64-bit ones too. Raises as `torch_to_flax`."""
    with jax.enable_x64(True):
        torch_to_flax(torch_module.state_dict(), flax_module, rename)


def _settings(cls: Any, given: Any, what: str) -> Any:
    """An instance of the dataclass. Raises InputError for unknown fields and wrong types."""
    if not isinstance(given, Mapping):
        raise InputError(f"{what} must hold settings, one `name: value` a line, not {given!r}")
    hints, known = get_type_hints(cls), [field.name for field in fields(cls)]
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise InputError(f"{what}: unknown field {name!r}: {hint}")
        kinds = get_args(hints[name]) or (hints[name],)
        if Any not in kinds and type(value) not in kinds:
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise InputError(f"{what}: {name} must be {wanted}, not {value!r}")
    return cls(**given)


def _inputs(config: PairConfig) -> tuple[list[Any], dict[str, Any]]:
    """The arguments and keyword arguments of both models."""
    rng = np.random.default_rng(config.seed)
    if not config.inputs:
        raise InputError("config: inputs is missing: say what to feed the models, such as `inputs: [{shape: [2, 7]}]`")
    args, kwargs = [], {}
    for number, given in enumerate(config.inputs, 1):
        what = f"config, input {number}"
        one = _settings(InputConfig, given, what)
        if (one.shape is None) == (one.value is None):
            raise InputError(f"{what}: give a shape or a value")
        value = one.value if one.shape is None else _random(one, rng, what)
        value = _array(value, what) if isinstance(value, list) else value
        if one.name is None:
            args.append(value)
        else:
            kwargs[one.name] = value
    return args, kwargs


def _array(value: list, what: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:  # of rows of different lengths
        array = None
    if array is None or array.dtype.kind not in "biuf":
        raise InputError(f"{what}: a list as value must hold numbers, in rows of one length, not {value}")
    return array


def _random(config: InputConfig, rng: np.random.Generator, what: str) -> np.ndarray:
    shape = config.shape or []
    if any(type(size) is not int or size < 1 for size in shape):
        raise InputError(f"{what}: shape must be a list of sizes of at least 1, not {shape}")
    if math.prod(shape) > MOST_NUMBERS:
        raise InputError(f"{what}: shape {shape} is of more numbers than any memory holds")
    if config.dtype not in DTYPES:
        raise InputError(f"{what}: dtype {config.dtype!r}: choose from {', '.join(DTYPES)}")
    if config.dtype == "float32":
        return rng.standard_normal(shape)
    if config.dtype == "bool":
        return rng.random(shape) < 0.5
    if config.high is None or config.high < 1:
        raise InputError(
            f"{what}: integers need `high`, such as the size of the vocabulary: they are from 0 to below it"
        )
    most = np.iinfo(config.dtype).max + 1
    if config.high > most:
        raise InputError(f"{what}: high must be at most {most} for {config.dtype}, not {config.high}")
    return rng.integers(config.high, size=shape, dtype=config.dtype)


@contextlib.contextmanager
def _current_directory_importable() -> Generator[None]:
    """As `python -m` has it, for the block."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _find(flag: str, name: str) -> Callable[..., Any]:
    """The class or function that an import path names."""
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute.isidentifier()):
        raise InputError(f"{flag} {name}: write it as package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise InputError(
                f"{flag} {name}: there is no module {error.name}, installed or in the current directory"
            ) from None
        raise InputError(f"{flag} {name}: importing it raised {_told(error, name)}") from error
    except Exception as error:
        raise InputError(f"{flag} {name}: importing it raised {_told(error, name)}") from error
    found = getattr(module, attribute, None)
    if found is None:
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        raise InputError(f"{flag} {name}: {module_name} has no {attribute}{hint}")
    if not callable(found):
        raise InputError(f"{flag} {name}: it is neither a class nor a function")
    return found


def _make(flag: str, name: str, make: Callable[..., Any], kwargs: Mapping[str, Any], kind: type) -> Any:
    """The module that a class or function makes."""
    try:
        module = make(**kwargs)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in kwargs.items() if key != "rngs")
        raise InputError(f"{flag} {name}: making it with ({given}) raised {_told(error, name)}") from error
    if not isinstance(module, kind):
        wanted = "torch.nn.Module" if flag == "--torch" else "flax.nnx.Module"
        raise InputError(f"{flag} {name}: it makes a {type(module).__name__}, not a {wanted}")
    return module


def _takes_rngs(make: Callable[..., Any]) -> bool:
    # A class's own signature says nothing: NNX makes objects through a metaclass.
    return "rngs" in inspect.signature(make.__init__ if isinstance(make, type) else make).parameters


def _load(module: "torch.nn.Module", path: str | os.PathLike) -> None:
    tensors = read_weights(path)
    names = strip_wrappers(tensors, expected=module.state_dict())
    if len(set(names.values())) < len(names):
        raise InputError(f"{path} holds one tensor under two names, with a wrapper's prefix and without: keep one")
    try:
        module.load_state_dict({names[key]: numpy_to_torch(array) for key, array in tensors.items()})
    except RuntimeError as error:
        raise InputError(f"{path} does not fit the PyTorch model: {' '.join(str(error).split())}") from None


def _told(error: Exception, name: str) -> str:
    """An exception in one line, with the last place in the user's own files that it came through."""
    module = sys.modules.get(name.partition(":")[0])
    own = Path(getattr(module, "__file__", None) or "here").resolve().parent
    files = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    places = [
        f" ({file.relative_to(own)}, line {line})"
        for file, line in files
        if file.is_relative_to(own) and "site-packages" not in file.parts
    ]
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:MESSAGE_LENGTH]}{places[-1] if places else ''}"
