"""Printing for people."""

from rich.console import Console
from rich.table import Table


def print_table(table: Table) -> None:
    """Prints a table at its full width, so that names stay whole in a narrow window or a file."""
    console = Console()
    needed = Console(width=10_000).measure(table).maximum
    Console(width=max(console.width, needed)).print(table)
