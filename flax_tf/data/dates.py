"""The task `dates`: long dates as people write them in many places (by `babel`, from Unicode's CLDR) into ISO dates.

    fi maanantai 12. tammikuuta 2071    ->    2071-01-12
    hu 2071. január 12.                 ->    2071-01-12

Small enough to learn in minutes, and each answer is right or wrong. Two things are held out: the days of the validation
split are in no training pair, in whatever locale; and the test split has other locales, and only those days too.
"""

import datetime
import functools
import hashlib
import json
from typing import Literal

import numpy as np

# Languages of many families and scripts, and variants of some that have an order or punctuation of their own.
# fmt: off
LOCALES = (
    "en", "en_GB", "en_AU", "de", "de_CH", "fr", "fr_CH", "es", "es_MX", "pt", "pt_PT", "it", "nl", "da", "sv", "nb",
    "fi", "is", "et", "lv", "lt", "pl", "cs", "sk", "sl", "hr", "hu", "ro", "bg", "uk", "ru", "el", "tr", "id", "vi",
    "he", "ar", "hi", "ja", "ko", "zh",
)
# fmt: on
HELD_OUT_LOCALES = ("en_CA", "de_AT", "fr_CA", "es_AR", "pt_AO", "it_CH", "nl_BE")  # of languages that are in LOCALES

FORMS = ("full", "long")  # with and without the day of the week
FIRST_DAY, LAST_DAY = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)
HELD_OUT_DAYS = 3000  # of 73,049

Split = Literal["train", "valid", "test"]
PAIRS: dict[Split, int] = {"train": 60_000, "valid": 2000, "test": 1000}


def localized(day: datetime.date, locale: str, form: str) -> str:
    """The locale, a space, and the day (of the Gregorian calendar) in the locale's "full" or "long" form."""
    from babel.dates import format_date

    return f"{locale} {format_date(day, form, locale=locale)}"


@functools.cache  # seconds of work for the training split
def date_pairs(split: Split, seed: int = 0) -> tuple[tuple[str, str], ...]:
    """The pairs of a split, a localized date and the same day as YYYY-MM-DD: distinct draws, the same for a seed.

    "train" and "valid" are in LOCALES, "test" in HELD_OUT_LOCALES. "valid" and "test" are of the held-out days.
    """
    days = np.random.default_rng(seed).permutation(LAST_DAY.toordinal() - FIRST_DAY.toordinal() + 1)
    days = days[HELD_OUT_DAYS:] if split == "train" else days[:HELD_OUT_DAYS]
    locales = HELD_OUT_LOCALES if split == "test" else LOCALES
    rng = np.random.default_rng([seed, list(PAIRS).index(split)])
    combinations = rng.choice(len(days) * len(locales) * len(FORMS), PAIRS[split], replace=False)
    pairs = []
    for day, locale, form in zip(*np.unravel_index(combinations, (len(days), len(locales), len(FORMS))), strict=True):
        date = FIRST_DAY + datetime.timedelta(days=int(days[day]))
        pairs.append((localized(date, locales[locale], FORMS[form]), date.isoformat()))
    return tuple(pairs)


def fingerprint(split: Split, seed: int = 0) -> str:
    """A hash of all that decides what the pairs are."""
    import babel

    span = [FIRST_DAY.isoformat(), LAST_DAY.isoformat(), HELD_OUT_DAYS]
    parts = ["dates", babel.__version__, np.__version__, LOCALES, HELD_OUT_LOCALES, FORMS, span, PAIRS, split, seed]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
