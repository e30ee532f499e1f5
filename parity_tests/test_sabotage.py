"""Every planted fault of `make sabotage`, and one honest pair of each kind."""

from collections.abc import Generator

import jax
import pytest
from sabotage import FAULTS, Fault
from sabotage.honest import honest


@pytest.fixture(autouse=True)
def as_users_write() -> Generator[None]:
    """Models that are not the project's own broadcast as they like."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught_and_located(fault: Fault) -> None:
    assert fault.find() == fault.place


@pytest.mark.parametrize("seed", range(8))
def test_an_honest_pair_is_the_same(seed: int) -> None:
    what, report = honest(seed)
    assert report.ok, f"{what}: {report.summary()}"
