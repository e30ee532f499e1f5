"""Where the device's time goes, by kind of operation, from a trace of JAX's profiler."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax

_HOLDS_OTHERS = {"while", "call", "conditional"}


def kind(operation: str) -> str:
    """The operation's name without its number: `loop_add_fusion.12` and `loop_add_fusion_3` are of one kind."""
    return re.sub(r"([._]\d+)+$", "", operation)


def profile(run: Callable[[], object]) -> list[tuple[str, float]]:
    """(kind of operation, share of the time of all), the most expensive first, of what `run` does and waits for."""
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            run()
        (file,) = Path(directory).rglob("*.xplane.pb")
        spent = Counter[str]()
        data = jax.profiler.ProfileData.from_file(str(file))
        planes = list(data.planes)
        # A GPU's own timeline, if there is one: the host's has the same operations as they are started.
        for plane in [plane for plane in planes if plane.name.startswith("/device:")] or planes:
            lines = list(plane.lines)
            # A plane may hold its operations twice, by stream and together.
            for line in [line for line in lines if line.name == "XLA Ops"] or lines:
                for event in line.events:
                    operation = dict(event.stats).get("hlo_op")
                    if operation is not None and kind(str(operation)) not in _HOLDS_OTHERS:
                        spent[kind(str(operation))] += event.duration_ns
    return [(name, time / spent.total()) for name, time in spent.most_common()]
