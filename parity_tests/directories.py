"""What a directory holds, to see that a command leaves it as it was."""

from pathlib import Path


def listing(directory: Path) -> dict[str, bytes | None]:
    """Every path below the directory, with the content of files."""
    paths = sorted(directory.rglob("*"))
    return {str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None for path in paths}
