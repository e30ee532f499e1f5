"""Names that differ between the two models, as the caller of the porting functions gives them."""

from collections.abc import Mapping

from flax_tf.errors import InputError

Path = tuple[str, ...]


class Rename:
    """The parsed form of `rename`: {PyTorch path: Flax path, or None for what Flax lacks on purpose}.

    A path, of a module or a parameter, stands for everything below it; the deeper one wins. `*` stands for one
    component, and stars correspond in order: `{"layers.*.attn": "blocks.*.attention"}`. Flax paths are NNX's own:
    attribute names and list indices, such as `mlp.layers.0` for a member of an `nnx.Sequential`.

    Raises InputError for paths whose stars do not correspond, and for two PyTorch names of one Flax path.
    """

    def __init__(self, rename: Mapping[str, str | None] | None):
        self._flax: dict[Path, Path] = {}  # from Flax to PyTorch
        self._torch: dict[Path, bool] = {}  # whether Flax has it
        self._used: set[Path] = set()
        for torch, flax in (rename or {}).items():
            self._torch[split(torch)] = flax is not None
            if flax is None:
                continue
            if split(torch).count("*") != split(flax).count("*"):
                raise InputError(f"rename of {torch!r} to {flax!r}: give both as many stars")
            self._add(split(flax), split(torch))

    def _add(self, flax: Path, torch: Path) -> None:
        if self._flax.setdefault(flax, torch) != torch:
            _two_names(flax, self._flax[flax], torch)

    def torch_path(self, flax: Path) -> Path | None:
        """The PyTorch path given to exactly this Flax path, or None. A pattern with fewer stars goes first."""
        found = sorted((pattern.count("*"), pattern) for pattern in self._flax if _matches(pattern, flax))
        self._used.update(pattern for _, pattern in found)
        names = [_filled(self._flax[pattern], pattern, flax) for stars, pattern in found if stars == found[0][0]]
        if len(set(names)) > 1:
            _two_names(flax, *names[:2])
        return names[0] if names else None

    def leaves_out(self, key: str) -> bool:
        """Whether this PyTorch key or path, or the nearest one above it that is renamed, has None for Flax."""
        path = split(key)
        found = [p for p in self._torch if len(p) <= len(path) and _matches(p, path[: len(p)])]
        return bool(found) and not self._torch[max(found, key=lambda p: (len(p), -p.count("*")))]

    def check_used(self) -> None:
        """Raises InputError for the first entry whose Flax path `torch_path` has never been asked for."""
        for flax, torch in self._flax.items():
            if flax not in self._used:
                raise InputError(
                    f"rename of {join(torch)!r} to {join(flax)!r}: the Flax model has no {join(flax)!r}; give the path "
                    "as NNX has it, attributes and indices joined by dots"
                )


def split(path: str) -> Path:
    """The components of a dotted path; none for the root, ""."""
    return tuple(path.split(".")) if path else ()


def join(path: Path) -> str:
    """The dotted path of components."""
    return ".".join(path)


def _matches(pattern: Path, path: Path) -> bool:
    return len(pattern) == len(path) and all(p in ("*", part) for p, part in zip(pattern, path, strict=True))


def _filled(torch: Path, flax: Path, path: Path) -> Path:
    stars = iter(part for pattern, part in zip(flax, path, strict=True) if pattern == "*")
    return tuple(next(stars) if part == "*" else part for part in torch)


def _two_names(flax: Path, one: Path, other: Path) -> None:
    raise InputError(f"rename gives {join(flax)!r} two PyTorch names, {join(one)!r} and {join(other)!r}: keep one")
