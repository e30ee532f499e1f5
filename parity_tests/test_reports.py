"""Reports as files: the page is whole and says what is in the report, the picture has every submodule, JSON is data."""

import datetime
import json
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from flax_tf.errors import InputError
from flax_tf.parity.html import html_page, write_html
from flax_tf.parity.picture import LABELS
from flax_tf.parity.report import ROOT, Low, Report, Row, write_json

DATE = datetime.date(2031, 7, 11)
VOID = {"meta", "br", "link", "img"}


def random_report(count: int, culprit: int | None = None, seed: int = 0) -> Report:
    """A report on `count` submodules; from `culprit` on, errors are outside the contract."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        name = f"blocks.{i}.<norm> & $scale$" if i < count - 1 else ROOT
        error = 1e-16 * rng.lognormal() * (1e9 if culprit is not None and i >= culprit else 1)
        low = {precision: Low(2 * eps, 3 * eps) for precision, eps in (("float32", 1e-7), ("bfloat16", 1e-2))}
        rows.append(Row("output", name, f"layers.{i}", f"Layer{i}", error, low))
    gradients = [Row("gradient", f"{row.name}.weight", f"{row.flax}.scale", "", 1e-15, row.low) for row in rows[:-1]]
    tensors = [Row("tensor", f"{row.name}.weight", f"{row.flax}.scale", "", 0.0) for row in rows[:-1]]
    return Report(
        rows=(*rows, *gradients, *tensors),
        unpaired=(),
        notes=("output of a < b is in PyTorch alone",),
        culprit=None if culprit is None else rows[culprit].name,
        settings={"jax": "1.2.3 & more"},
    )


class Page(HTMLParser):
    """A page as a browser takes it; fails on a tag that is not closed where it should be."""

    def __init__(self, text: str):
        super().__init__()
        self.text: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.tags: Counter[str] = Counter()
        self.marks: Counter[str] = Counter()
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags[tag] += 1
        if tag not in VOID:
            self._open.append(tag)
        if "id" in given:
            self.ids.append(str(given["id"]))
        for name in ("href", "xlink:href", "src", "action", "data"):
            if name in given and tag == "a":
                self.links.append(str(given[name]))
            elif name in given and not str(given[name]).startswith("#"):
                self.loaded.append(str(given[name]))
        if tag == "use" and self._open[-2] == "a":
            self.marks[self.links[-1]] += 1

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize(("count", "culprit"), [(1, None), (9, None), (9, 4), (9, 0), (307, 211)])
def test_the_page_is_whole_and_loads_nothing(count: int, culprit: int | None) -> None:
    report = random_report(count, culprit)
    text = html_page(report, DATE)
    page = Page(text)
    words = " ".join(page.text)
    assert not page.loaded and "@import" not in text and "url(http" not in text and page.tags["script"] == 0
    assert len(page.ids) == len(set(page.ids))
    assert set(page.links) <= {f"#{id}" for id in page.ids}
    for said in (report.summary(), "2031-07-11", "1.2.3 & more", *report.notes, *(row.name for row in report.rows[:9])):
        assert said in words
    assert ("The first difference" in words) == (culprit is not None)
    # Tags of the page alone: a name in angle brackets has become none.
    assert page.tags["norm"] == 0
    # Each submodule once for float64, float32 and bfloat16, each gradient once.
    expected = {f"#output-{i}": 3 for i in range(count)} | {f"#gradient-{i}": 1 for i in range(count - 1)}
    assert page.marks == expected
    names = [line for line in page.text if line.endswith("$scale$") and line.startswith(("blocks", "…"))]
    assert len(names) >= min(count - 1, LABELS // 2)


def test_the_page_is_the_same_for_the_same_report() -> None:
    assert html_page(random_report(7, 3), DATE) == html_page(random_report(7, 3), DATE)
    assert html_page(random_report(7, 3), DATE) != html_page(random_report(7, 3, seed=1), DATE)


def test_the_first_difference_comes_first_and_says_what_is_off() -> None:
    report = random_report(9, 4)
    words = " ".join(Page(html_page(report, DATE)).text)
    first = words.index("The first difference")
    assert first < words.index("The error of every submodule")
    assert "what comes out does not" in words
    assert report.differences()[0].name == report.culprit

    gradient = replace(report.rows[9 + 4], float64=1e-3)
    rows = tuple(gradient if row.kind == "gradient" and row.name == gradient.name else row for row in report.rows)
    rows = tuple(replace(row, float64=1e-16) if row.kind == "output" else row for row in rows)
    words = " ".join(Page(html_page(replace(report, rows=rows), DATE)).text)
    assert "All outputs agree" in words

    tensor = replace(report.rows[-1], float64=1.0)
    weights = replace(report, rows=(*report.rows[:-1], tensor), culprit=tensor.module)
    words = " ".join(Page(html_page(weights, DATE)).text)
    assert "7 of 8 tensors are equal" in words


@pytest.mark.parametrize("errors", [[0.0, 0.0], [float("inf"), float("inf")], [0.0, float("inf")]])
def test_errors_that_no_logarithmic_scale_has_are_drawn_too(errors: list[float]) -> None:
    rows = tuple(Row("output", str(i), str(i), "", error, {}) for i, error in enumerate(errors))
    page = Page(html_page(Report(rows=rows, unpaired=(), notes=(), culprit=None), DATE))
    assert page.marks == {"#output-0": 1, "#output-1": 1}


def test_nothing_to_draw() -> None:
    report = Report(rows=(), unpaired=("parameter a<b is in Flax alone",), notes=(), culprit=None)
    assert "parameter a<b is in Flax alone" in " ".join(Page(html_page(report, DATE)).text)


def test_json_is_the_report(tmp_path: Path) -> None:
    report = random_report(5, 2)
    report = replace(report, rows=(replace(report.rows[0], float64=float("inf")), *report.rows[1:]))
    write_json(report, tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    assert content == report.to_dict()
    assert content["same"] is False and content["culprit"] == report.culprit
    assert content["rows"][0]["float64"] is None
    for row, written in zip(report.rows[1:], content["rows"][1:], strict=True):
        assert (written["name"], written["float64"], written["ok"]) == (row.name, row.float64, row.ok)


@pytest.mark.parametrize("write", [write_html, write_json])
def test_a_file_is_replaced_whole_and_a_directory_never(write, tmp_path: Path) -> None:
    (tmp_path / "report").write_text("older")
    write(random_report(2), tmp_path / "report")
    assert "blocks.0" in (tmp_path / "report").read_text()
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "mine").touch()
    with pytest.raises(InputError, match="is a directory: name a file to write"):
        write(random_report(2), tmp_path / "directory")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["directory", "mine", "report"]
