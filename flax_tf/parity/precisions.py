"""Precisions as a person names them on a command line."""


def parse_precisions(text: str) -> tuple[str, ...]:
    """The precisions of "float32,bfloat16" as `compare` takes them, and checks their names.

    float64 is compared in any case: "float64" alone means nothing besides it.
    """
    return tuple(name.strip() for name in text.split(",") if name.strip() != "float64")
