"""Faults that a check must catch and locate, and honest pairs that it must let pass. Run by `make sabotage`."""

from sabotage import decoder_only, own_pairs, sequence_to_sequence, training
from sabotage.fault import Fault

FAULTS: list[Fault] = [
    fault for module in (decoder_only, sequence_to_sequence, own_pairs, training) for fault in module.FAULTS
]


def find(number: int) -> str | None:
    """What the report on the fault of this number names."""
    return FAULTS[number].find()
