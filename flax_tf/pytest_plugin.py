"""A pytest plugin: the fixture `assert_parity` proves a Flax module equal to a PyTorch module, in one line of a test.

It is loaded in every pytest run where flax_tf is installed, and so imports JAX and PyTorch where it is used alone.
"""

import io
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
    from flax import nnx

    from flax_tf.parity import Report

ROWS_TOLD = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options `--parity-precision` and `--parity-html`, and the setting `parity_precision`."""
    group = parser.getgroup("parity", "parity of PyTorch and Flax modules")
    group.addoption(
        "--parity-precision",
        metavar="NAMES",
        help="what assert_parity compares besides float64: float32, bfloat16, or both with a comma between; "
        "float64: nothing (default: the setting parity_precision, or float32)",
    )
    group.addoption("--parity-html", metavar="DIR", help="write a page for every comparison of assert_parity")
    parser.addini("parity_precision", "what assert_parity compares besides float64", default="float32")


@pytest.fixture
def assert_parity(request: pytest.FixtureRequest) -> Callable[..., "Report"]:
    """`assert_parity(torch_module, flax_module, *inputs, port=False, **kwargs)` compares by the contract.

    With `port=True` the Flax module is first filled with PyTorch's weights, else its own are compared as they are. The
    rest is as of `flax_tf.parity.compare`; `precisions` may be a string as the option takes, and without it the options
    of pytest say them. Returns the report; fails with the table of what differs, the first difference first. Where
    PyTorch is missing, it fails and says so.
    """
    pages = 0

    def compare_and_assert(
        torch_module: "torch.nn.Module",
        flax_module: "nnx.Module",
        *inputs: Any,
        port: bool = False,
        precisions: Sequence[str] | str | None = None,
        **kwargs: Any,
    ) -> "Report":
        __tracebackhide__ = True
        nonlocal pages
        try:
            import torch  # noqa: F401
        except ModuleNotFoundError:
            missing = "assert_parity runs both frameworks and needs PyTorch: pip install 'flax-tf[torch]'"
            raise pytest.fail.Exception(missing) from None
        from flax_tf.errors import InputError
        from flax_tf.parity import compare
        from flax_tf.parity.html import write_html
        from flax_tf.parity.pair import check_filled
        from flax_tf.parity.pair import port as port_weights
        from flax_tf.parity.precisions import parse_precisions

        config = request.config
        if precisions is None:
            precisions = config.getoption("--parity-precision") or config.getini("parity_precision")
        if isinstance(precisions, str):
            precisions = parse_precisions(precisions)
        try:
            check_filled(torch_module)
            if port:
                port_weights(torch_module, flax_module, kwargs.get("rename"))
            report = compare(torch_module, flax_module, *inputs, precisions=precisions, **kwargs)
            told = ""
            if (directory := config.getoption("--parity-html")) is not None:
                pages += 1
                page = Path(directory, _page_name(request.node.nodeid, pages))
                write_html(report, page)
                told = f"\nThe page: {page}"
        except InputError as error:
            raise pytest.fail.Exception(str(error)) from None
        if not report:
            raise AssertionError(_differences(report) + told)
        return report

    return compare_and_assert


def _differences(report: "Report") -> str:
    """The summary, and what it is about."""
    from rich.console import Console

    lines = [report.summary(), *(f"unpaired: {line}" for line in report.unpaired)]
    if found := len(report.differences()):
        table = io.StringIO()
        Console(file=table, width=10_000).print(report.difference_table(ROWS_TOLD))
        lines += [line.rstrip() for line in table.getvalue().splitlines() if line.strip()]
        lines += [f"and {found - ROWS_TOLD} more"] if found > ROWS_TOLD else []
    return "\n".join(lines)


def _page_name(test: str, number: int) -> str:
    """A file name for one comparison of a test. The checksum tells tests apart whose names differ in signs alone."""
    name = re.sub(r"[^\w.]+", "-", test)[-150:].strip("-")
    return f"{name}-{zlib.crc32(test.encode()):08x}-{number}.html"
