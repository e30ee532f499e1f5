"""The one exception for input that the user can put right."""


class InputError(ValueError):
    """The input is wrong, and the message (one line) says what is wrong and what to do.

    Entry points print the message without a traceback and end with exit code 2.
    """


class TokenIdError(InputError, IndexError):
    """A token id or position outside its table. PyTorch raises IndexError; a lookup in JAX would go on, wrongly."""
