"""The command line: `flax-tf inspect | port | check | generate | attention | hand-over`."""

import re
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from flax_tf.command import DIFFERENT, OK, Parser, enable_wide, read_yaml, run, wrong_value
from flax_tf.config import Config, config_to_dict
from flax_tf.data.tokenizer import load_tokenizer
from flax_tf.errors import InputError
from flax_tf.files import check_file
from flax_tf.parity.check import check as check_tensors
from flax_tf.parity.html import write_html
from flax_tf.parity.pair import check_pair
from flax_tf.parity.precisions import parse_precisions
from flax_tf.parity.report import write_json
from flax_tf.porting import read_weights, torch_to_flax
from flax_tf.porting.names import strip_wrappers
from flax_tf.porting.recognise import UnknownArchitectureError, recognise
from flax_tf.saving import abstract, model_directory, read_config, save_pretrained
from flax_tf.terminal import print_table
from flax_tf.text_commands import attention, generate
from flax_tf.training.hand_over import hand_over


def inspect(ckpt: str) -> int:
    """Prints a checkpoint's tensors (names, shapes, dtypes) and which architecture it is.

    Args:
        ckpt: A .safetensors, .pt, .pth or .bin file, or a directory that holds one.
    """
    tensors = _read(ckpt)
    table = Table("tensor", "shape", "dtype", box=None, pad_edge=False)
    for name, array in tensors.items():
        table.add_row(Text(name), str(tuple(array.shape)), str(array.dtype))
    print_table(table)
    print(f"{len(tensors)} tensors, {sum(a.size for a in tensors.values()):,} numbers, ", end="")
    print(f"{sum(a.nbytes for a in tensors.values()):,} bytes")
    try:
        print(f"architecture: {_describe(_config(ckpt, tensors, None))}")
    except InputError as error:
        print(f"architecture: {error}")
    return OK


def port(ckpt: str, out: str, config: str | None = None) -> int:
    """Ports a PyTorch checkpoint to a directory that both frameworks load: config.json and model.safetensors.

    Args:
        ckpt: A .safetensors, .pt, .pth or .bin file, or a directory that holds one.
        out: The directory to make.
        config: A YAML or JSON file with the config fields that shapes do not tell, such as num_heads.
    """
    tensors = _read(ckpt)
    found = _config(ckpt, tensors, config)
    files = [Path(ckpt) / name for name in ("tokenizer.json", "target_tokenizer.json")]
    tokenizers = [load_tokenizer(str(file)) if file.is_file() else None for file in files]
    save_pretrained(torch_to_flax(tensors, abstract(found)), out, *tokenizers)
    print(f"ported {len(tensors)} tensors to {out}: {_describe(found)}")
    return OK


def check(
    ckpt: str | None = None,
    config: str | None = None,
    against: str | None = None,
    torch: str | None = None,
    flax: str | None = None,
    weights: str | None = None,
    precisions: str = "float32",
    html: str | None = None,
    json: str | None = None,
) -> int:
    """Ports a checkpoint, runs PyTorch and Flax on the same random inputs, and compares every submodule.

    Prints a table of relative errors. Exit code 0: the same model; 1: not, and the last line names the layer. In place
    of a checkpoint of a known architecture, it takes a pair of models of your own: --torch, --flax and --config.

    Args:
        ckpt: A .safetensors, .pt, .pth or .bin file, or a directory that holds one: PyTorch's side.
        config: A YAML or JSON file. For CKPT: the config fields that shapes do not tell, such as num_heads. For your
            own pair: how to make both (init, torch, flax) and what to feed them (inputs), and rename, channels_last,
            train, seed.
        against: A file or directory with the weights for Flax's side; by default CKPT itself, ported.
        torch: Your own PyTorch class, or function that makes a module, as package.module:Class.
        flax: Your own Flax (NNX) class or function, as package.module:Class.
        weights: A file or directory with the weights of your own pair; by default PyTorch's random ones.
        precisions: What to compare besides float64: float32, bfloat16, or both with a comma between; float64: nothing.
        html: A file for the report as a page, with a picture of the errors.
        json: A file for the report as data.
    """
    # Before the work, not after.
    _check_reports(
        {"--html": html, "--json": json}, {"CKPT": ckpt, "--config": config, "--against": against, "--weights": weights}
    )
    named = parse_precisions(precisions)
    if ckpt is not None and torch is None and flax is None and weights is None:
        tensors = _read(ckpt)
        theirs = tensors if against is None else _read(against)
        try:
            described = _config(ckpt, tensors, config)
        except UnknownArchitectureError as error:
            raise InputError(f"{error}; for a pair of your own: --torch, --flax and --config") from None
        report = check_tensors(tensors, theirs, described, precisions=named)
    elif ckpt is not None:
        raise InputError("--torch, --flax and --weights are for a pair of your own: give them, or CKPT, not both")
    elif torch is None or flax is None or against is not None:
        raise InputError("give a checkpoint as CKPT (and --against), or your own pair as --torch and --flax")
    elif config is None:
        raise InputError("--torch and --flax need --config FILE: how to make both models and what to feed them")
    else:
        report = check_pair(torch, flax, read_yaml(Path(config)), weights, named)
    report.print()
    if html is not None:
        write_html(report, html)
    if json is not None:
        write_json(report, json)
    return OK if report else DIFFERENT


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    return run("flax-tf", lambda: _dispatch(argv))


# jsonargparse would ask for `--greedy true`.
_FLAGS = {
    "greedy": "Take the most probable token every time.",
    "heads": "A panel for every head, in place of the mean of a layer's heads.",
}


def _dispatch(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="flax-tf", description="PyTorch transformers in JAX, with proof that they are the same model.")
    subcommands = parser.add_subcommands(dest="command")
    commands = (inspect, port, check, generate, attention, hand_over)
    functions = {function.__name__.replace("_", "-"): function for function in commands}
    for name, function in functions.items():
        subparser = Parser(description=(function.__doc__ or "").split("\n\n    Args:")[0])
        optional = {"ckpt"} if function is check else set()
        for positional in optional:
            subparser.add_argument(positional, nargs="?", help="What to check, unless it is a pair of your own.")
        subparser.add_function_arguments(function, as_positional=True, skip=_FLAGS.keys() | optional)
        for flag, meaning in _FLAGS.items():
            if flag in signature(function).parameters:
                subparser.add_argument(f"--{flag}", action="store_true", help=meaning)
        subcommands.add_subcommand(name, subparser, help=(function.__doc__ or "").splitlines()[0])
    try:
        args: Any = parser.parse_args(argv)
    except InputError as error:
        if wrong := wrong_value(error):
            kinds = [kind for kind in re.findall(r"Expected an? <class '(\w+)'>", str(error)) if kind != "NoneType"]
            raise InputError(f"--{wrong[0]} must be a valid {' or '.join(kinds) or 'value'}, not {wrong[1]}") from None
        raise
    given = args[args.command].as_dict()
    for name in ("ckpt", "against", "weights"):
        if given.get(name):
            given[name] = str(model_directory(given[name]))
    return functions[args.command](**given)


def _read(path: str) -> dict[str, np.ndarray]:
    """A checkpoint's tensors under their bare names. Two names that become one stay, and fail as duplicates."""
    tensors = read_weights(path)
    names = strip_wrappers(tensors)
    enable_wide(tensors)
    if len(set(names.values())) < len(names):
        return tensors
    return {names[key]: array for key, array in tensors.items()}


def _config(ckpt: str, tensors: Mapping[str, np.ndarray], file: str | None) -> Config:
    """The config from FILE and the shapes; without FILE, from the directory's own config.json if it is one of ours."""
    if file is None and (Path(ckpt) / "config.json").is_file():
        return read_config(ckpt)
    names = strip_wrappers(tensors)
    return recognise({names[key]: array.shape for key, array in tensors.items()}, read_yaml(Path(file)) if file else {})


def _check_reports(reports: Mapping[str, str | None], inputs: Mapping[str, str | None]) -> None:
    """Raises InputError if a report can't be written to its file, or would take the place of an input or of another."""
    taken = {Path(file).resolve(): name for name, file in inputs.items() if file is not None}
    for name, file in reports.items():
        if file is not None:
            check_file(file)
            other = taken.setdefault(Path(file).resolve(), name)
            if other != name:
                raise InputError(f"{name} {file} is the file of {other} too: name another")


def _describe(config: Config) -> str:
    fields = config_to_dict(config)
    return f"{fields.pop('arch')} ({', '.join(f'{name} {value}' for name, value in fields.items())})"
