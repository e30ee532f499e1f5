"""Faults that a check must catch and locate, and honest pairs that it must let pass. Run by `make sabotage`."""
