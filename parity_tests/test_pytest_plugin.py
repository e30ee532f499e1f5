"""The pytest plugin in a user's own repository: real pytest runs in a fresh directory and process."""

import re

import pytest

from flax_tf.parity.precisions import parse_precisions

pytest_plugins = ["pytester"]

MODELS = """
import numpy as np
import torch
from flax import nnx

X = np.random.default_rng(0).standard_normal((3, 7))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(7)
        self.out = torch.nn.Linear(7, 5)

    def forward(self, x):
        return self.out(self.norm(x))


class Twin(nnx.Module):
    def __init__(self, epsilon=1e-5):
        self.norm = nnx.LayerNorm(7, epsilon=epsilon, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(7, 5, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(self.norm(x))
"""

TESTS = """
from user_pair import Net, Twin, X

RENAME = {"out": "head"}


def test_same(assert_parity):
    report = assert_parity(Net(), Twin(), X, port=True, rename=RENAME)
    assert report and report.precisions == ["bfloat16"]


def test_told_in_the_test(assert_parity):
    net, twin = Net(), Twin()
    assert_parity(net, twin, X, port=True, rename=RENAME, precisions=())
    assert assert_parity(net, twin, x=X, rename=RENAME, precisions=["float32"]).precisions == ["float32"]
    assert assert_parity(net, twin, X, rename=RENAME, precisions="float32").precisions == ["float32"]


def test_epsilon(assert_parity):
    assert_parity(Net(), Twin(epsilon=1e-3), X, port=True, rename=RENAME)


def test_not_ported(assert_parity):
    assert_parity(Net(), Twin(), X, rename=RENAME)


def test_no_rename(assert_parity):
    assert_parity(Net(), Twin(), X, port=True)
"""


@pytest.fixture
def own(pytester: pytest.Pytester) -> pytest.Pytester:
    """A user's repository, where every warning is an error."""
    pytester.makepyfile(user_pair=MODELS)
    pytester.makeini("[pytest]\nfilterwarnings = error\n")
    return pytester


def test_a_users_tests(own: pytest.Pytester) -> None:
    own.makeini("[pytest]\nfilterwarnings = error\nparity_precision = float16\n")  # the option is stronger
    own.makepyfile(TESTS)
    result = own.runpytest_subprocess("--parity-precision", "bfloat16", "--parity-html", "pages", "-rf")
    result.assert_outcomes(passed=2, failed=3)
    output = result.stdout.str()
    # The line of the user's test, then the verdict and the first difference first; nothing of the library's own code.
    result.stdout.fnmatch_lines(
        [
            ">*assert_parity(Net(), Twin(epsilon=1e-3), X, port=True, rename=RENAME)",
            "E*NOT the same model: the first difference is in norm (* rows differ)",
            "E*differs*of*layer*float64*limit*bfloat16*limit",
            "E*output*norm*LayerNorm*1.0e-12*",
            "E*output*out*Linear*",
            "E*The page: pages?*test_epsilon*.html",
        ]
    )
    result.stdout.fnmatch_lines(
        ["E*the first difference is in out*", "E*output*out*Linear*", "E*tensor*out.weight*0.0e+00*"]
    )
    result.stdout.fnmatch_lines(["E*the checkpoint does not fit the model:", "E*head.bias (5,)"])
    assert "compare.py" not in output and "pytest_plugin.py" not in output and "During handling" not in output
    pages = sorted(path.name for path in (own.path / "pages").iterdir())
    kinds = [re.sub(r"^.*py-(\w+)-[0-9a-f]{8}-(\d+)\.html$", r"\1 \2", page) for page in pages]
    assert kinds == [
        "test_epsilon 1",
        "test_not_ported 1",
        "test_same 1",
        "test_told_in_the_test 1",
        "test_told_in_the_test 2",
        "test_told_in_the_test 3",
    ]
    assert "The first difference" in (own.path / "pages" / pages[0]).read_text()


def test_precision_by_default_and_by_setting(own: pytest.Pytester) -> None:
    own.makepyfile(
        """
        from user_pair import Net, Twin, X

        def test_it(assert_parity):
            report = assert_parity(Net(), Twin(), X, port=True, rename={"out": "head"})
            assert report.precisions == ["float32"]
        """
    )
    own.runpytest_subprocess().assert_outcomes(passed=1)
    own.makeini("[pytest]\nparity_precision = float16\n")
    result = own.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*precision 'float16': besides float64, choose from float32, bfloat16"])


@pytest.mark.parametrize(
    ("text", "precisions"),
    [("float64", ()), ("float32", ("float32",)), ("float64, bfloat16,float32", ("bfloat16", "float32"))],
)
def test_precisions_as_a_person_names_them(text: str, precisions: tuple[str, ...]) -> None:
    assert parse_precisions(text) == precisions


def test_a_run_that_does_not_use_it_imports_neither_framework(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing(request):
            assert request.config.pluginmanager.has_plugin("flax_tf")
            assert "flax_tf.pytest_plugin" in sys.modules
            assert not {"jax", "flax", "torch", "matplotlib"} & sys.modules.keys()
        """
    )
    result = pytester.runpytest_subprocess("-W", "error")
    result.assert_outcomes(passed=1)
    assert "warning" not in result.stdout.str()


def test_without_pytorch_the_fixture_says_what_to_install(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import sys\nsys.modules['torch'] = None  # importing it fails, as if it were not installed")
    pytester.makepyfile(
        """
        def test_it(assert_parity):
            assert_parity(None, None)

        def test_other():
            assert 1 + 1 == 2
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["E*assert_parity runs both frameworks and needs PyTorch: pip install 'flax-tf?torch?'"]
    )


def test_help_names_the_options(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--help")
    result.stdout.fnmatch_lines(["*--parity-precision=NAMES*", "*--parity-html=DIR*", "*parity_precision (string)*"])
