"""From presets, YAML files and flags to a `RunConfig`, with one clear line for whatever is wrong with them."""

import argparse
import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jsonargparse import set_parsing_settings

from flax_tf.command import Parser, read_yaml, wrong_value
from flax_tf.errors import InputError
from flax_tf.training.config import RUNS, RunConfig

DEFAULT_ARCH = "language_model"
DEFAULT_PRESETS = {
    "language_model": "docs",
    "transformer": "dates",
    "rnn": "dates-rnn-plain",
    "attn_rnn": "dates-rnn",
}


def parse(prog: str, argv: Sequence[str]) -> tuple[RunConfig, str]:
    """The run that the arguments ask for, and all of its settings as YAML (what `--print_config` prints).

    Raises InputError for whatever is wrong, and SystemExit(0) after `--help` and `--print_config`.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config")
    first.add_argument("--preset")
    first.add_argument("--arch")
    first.add_argument("--print_config", action="store_true")
    try:
        files, flags = first.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise InputError(str(error)) from None

    own = {} if files.config is None else read_yaml(Path(files.config))
    wanted = files.arch or own.get("arch")
    preset = files.preset or own.get("preset") or DEFAULT_PRESETS[_known_arch(wanted or DEFAULT_ARCH)]
    file = _preset(preset)
    given = read_yaml(file)
    arch = _arch(given)
    if wanted not in (None, arch):  # the data and the model of the preset are another system's
        raise InputError(f"preset {preset} is for arch {arch}, not {wanted}: {_presets_of(wanted)}")
    run = RUNS[arch]
    parser = _parser(prog, run)
    layers = (
        (f"preset {preset}", _settings(given, run, file)),
        (
            files.config,
            {**_settings(own, run, Path(files.config or "")), "preset": preset, "arch": arch},
        ),
    )
    for source, layer in layers:
        try:
            parser.parse_object(layer)  # checks the types: what is set as a default isn't checked again
        except InputError as error:
            raise InputError(f"{source}: {_clear(error, parser, run)}") from None
        parser.set_defaults(layer)
    try:
        chosen: Any = parser.parse_args(list(_expand(flags, run)))
    except InputError as error:
        raise InputError(_clear(error, parser, run)) from None
    for name in ("config", "print_config"):
        del chosen[name]
    config = run(**parser.instantiate(chosen).as_dict())
    text = parser.dump(chosen, skip_unset=False, skip_validation=True)
    if files.print_config:
        print(text, end="")  # noqa: T201
        raise SystemExit(0)
    return config, text


def presets() -> dict[str, Path]:
    """{name: YAML file} of every preset."""
    folder = Path(str(resources.files("flax_tf") / "presets"))
    return dict(sorted((path.stem, path) for path in folder.glob("*.yaml")))


def _parser(prog: str, run: type[RunConfig]) -> Parser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = Parser(prog=prog, description="Trains a model in JAX.", allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="A YAML file with any of the settings below.")
    parser.add_argument("--print_config", action="store_true", help="Print all settings as YAML, and stop.")
    parser.add_class_arguments(run)
    return parser


def _preset(name: object) -> Path:
    known = presets()
    if not isinstance(name, str) or name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(f"unknown preset {name!r}: {hint}there are {', '.join(known)}")
    return known[name]


def _arch(preset: Mapping[str, Any]) -> str:
    return preset.get("arch", DEFAULT_ARCH)


def _known_arch(arch: object) -> str:
    if not isinstance(arch, str) or arch not in RUNS:
        raise InputError(f"arch is {arch!r}: choose from {', '.join(RUNS)}")
    return arch


def _presets_of(arch: object) -> str:
    names = [name for name, file in presets().items() if _arch(read_yaml(file)) == _known_arch(arch)]
    return f"choose a --preset from {', '.join(names)}"


def _settings(content: dict[str, Any], run: type[RunConfig], file: Path) -> dict[str, Any]:
    """{dotted key: value} of the content of a YAML file. Raises InputError for unknown keys."""
    if isinstance(content.get("data"), str):
        content = {**content, "data": {_data_key(run): content["data"]}}
    return dict(_flatten(content, run, file))


def _data_key(run: type[RunConfig]) -> str:
    """The setting that `--data` alone is short for."""
    return "path" if run is RUNS["language_model"] else "source"


def _flatten(content: Mapping[str, Any], cls: Any, file: Path, prefix: str = "") -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(cls)
    types = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    for key, value in content.items():
        if key not in types:
            near = difflib.get_close_matches(str(key), types, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known are {', '.join(types)}"
            raise InputError(f"{file}: unknown key {prefix}{key}: {hint}")
        if not dataclasses.is_dataclass(types[key]):
            yield prefix + key, value
        elif isinstance(value, Mapping):
            yield from _flatten(value, types[key], file, f"{prefix}{key}.")
        else:
            raise InputError(f"{file}: {prefix}{key} must hold settings, one `name: value` a line, not {value!r}")


def _expand(flags: Sequence[str], run: type[RunConfig]) -> Iterator[str]:
    """`--data FILE` is short for `--data.path` or `--data.source FILE`, and `--resume` for `--resume true`."""
    for flag, following in zip(flags, [*flags, ""][1:], strict=True):
        if flag == "--resume" and following not in ("true", "false"):
            yield "--resume=true"
        else:
            yield re.sub(r"^--data(?==|$)", f"--data.{_data_key(run)}", flag)


def _clear(error: InputError, parser: Parser, run: type[RunConfig]) -> str:
    """An error of the argument parser in the words of a person."""
    message = str(error)
    if wrong := wrong_value(error):
        key, value = wrong
        return f"{key} must be {_type_name(key, run)}, not {value}"
    unknown = re.match(r"[Uu]nrecognized arguments: (\S+)", message)
    if unknown:
        flag = unknown[1].split("=")[0]
        flags = [name for action in parser._actions for name in action.option_strings]
        near = difflib.get_close_matches(flag, flags, n=1)
        kind = "flag" if flag.startswith("-") else "argument"
        return f"unknown {kind} {flag}: {f'did you mean {near[0]}?' if near else 'see --help'}"
    return message


def _type_name(key: str, run: type[RunConfig]) -> str:
    hint: Any = run
    for part in key.split("."):
        hint = get_type_hints(hint)[part]
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("None", "null")
