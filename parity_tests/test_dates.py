"""The generated task: known dates read by hand, what is held out, determinism."""

import datetime
import re

import pytest

from flax_tf.data.dates import FORMS, HELD_OUT_LOCALES, LOCALES, PAIRS, date_pairs, localized


@pytest.mark.parametrize(
    "locale, form, day, expected",
    [
        ("fi", "full", (2071, 1, 12), "fi maanantai 12. tammikuuta 2071"),
        ("de", "full", (2024, 2, 29), "de Donnerstag, 29. Februar 2024"),
        ("de_AT", "long", (1999, 1, 3), "de_AT 3. Jänner 1999"),
        ("en", "long", (1900, 7, 4), "en July 4, 1900"),
        ("en_GB", "long", (1900, 7, 4), "en_GB 4 July 1900"),
        ("fr", "full", (1944, 6, 6), "fr mardi 6 juin 1944"),
        ("pt", "long", (2099, 12, 31), "pt 31 de dezembro de 2099"),
        ("hu", "long", (1956, 10, 23), "hu 1956. október 23."),
        ("ja", "full", (2000, 1, 1), "ja 2000年1月1日土曜日"),
        ("el", "long", (2004, 8, 13), "el 13 Αυγούστου 2004"),
    ],
)
def test_dates_as_people_write_them(locale, form, day, expected):
    assert localized(datetime.date(*day), locale, form) == expected


@pytest.fixture(scope="module")
def splits():
    return {split: date_pairs(split) for split in PAIRS}


def test_every_pair_is_about_one_day(splits):
    for pairs in splits.values():
        for source, target in pairs:
            day = datetime.date.fromisoformat(target)
            assert 1900 <= day.year <= 2099
            # Year and day are in figures everywhere, the month in some places; nothing else is.
            numbers = sorted(map(int, re.findall(r"\d+", source)))
            assert numbers in (sorted([day.year, day.day]), sorted([day.year, day.month, day.day]))
            assert len(source) <= 45
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", target)


def test_a_month_has_one_name_in_a_locale_and_form(splits):
    """Else a model could not know it: (locale, the words around the numbers) decide the month, where it has a name."""
    months: dict[tuple[str, str], set[str]] = {}
    for source, target in splits["train"]:
        locale, words = source.split(" ", 1)
        if locale not in ("ja", "ko", "zh", "vi"):  # the month is a number
            months.setdefault((locale, re.sub(r"\d+", "#", words)), set()).add(target[5:7])
    assert {len(numbers) for numbers in months.values()} == {1}
    assert {locale for locale, _ in months} == set(LOCALES) - {"ja", "ko", "zh", "vi"}


def test_what_is_held_out(splits):
    days = {split: {target for _, target in pairs} for split, pairs in splits.items()}
    locales = {split: {source.split(" ", 1)[0] for source, _ in pairs} for split, pairs in splits.items()}
    assert not days["train"] & (days["valid"] | days["test"])
    assert locales == {"train": set(LOCALES), "valid": set(LOCALES), "test": set(HELD_OUT_LOCALES)}
    assert not set(LOCALES) & set(HELD_OUT_LOCALES)
    assert {locale.split("_")[0] for locale in HELD_OUT_LOCALES} <= set(LOCALES)
    seen = set("".join(source for source, _ in splits["train"]))
    assert set("".join(source for source, _ in splits["test"])) <= seen  # no character that was never trained


def test_pairs_are_distinct_and_many(splits):
    assert {split: len(set(pairs)) for split, pairs in splits.items()} == PAIRS
    assert len(FORMS) == 2
    assert len({target for _, target in splits["train"]}) > 30_000


def test_the_seed_decides(splits):
    again = date_pairs.__wrapped__("test")
    assert again == splits["test"]
    other = date_pairs("test", seed=1)
    assert other != splits["test"]
    assert len(other) == len(splits["test"])
