"""Manners towards the Hugging Face hub: which names to ask it for, and its failures in one line."""

import contextlib
import logging
import re
from collections.abc import Generator

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
FILE_EXTENSION = re.compile(r"\.[A-Za-z]\w*$")


def is_hub_name(name: str) -> bool:
    """Whether `name` has the shape owner/name or name and doesn't look like a file's name.

    `data/input.txt` is a file that is missing, not a data set of the owner "data"; `owner/model-v1.1` may exist.
    """
    return HUB_NAME.fullmatch(name) is not None and FILE_EXTENSION.search(name) is None


def one_line(error: BaseException) -> str:
    """The message of a library's exception on one line, shortened; its type where it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


@contextlib.contextmanager
def quiet(*names: str) -> Generator[None]:
    """Silences the loggers of those libraries, whose log lines repeat what the exception says."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
