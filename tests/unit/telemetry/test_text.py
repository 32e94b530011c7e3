import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.telemetry.terminal.text import duration, encodable, number, safe_text


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\rb\nc\td", "a\\rb\\nc\\td"),
        ("\x9b2J", "\\x9b2J"),
        ("abc\u202edef", "abc\\u202edef"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("47 + 8 = 55, déjà vu, 数", "47 + 8 = 55, déjà vu, 数"),
    ],
)
def test_characters_that_drive_a_terminal_are_escaped_and_others_are_kept(raw: str, shown: str) -> None:
    assert safe_text(raw) == shown


@given(st.text())
def test_safe_text_is_printable_on_one_line_whatever_comes_in(raw: str) -> None:
    shown = safe_text(raw)
    assert not any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 or char in "\u2028\u2029" for char in shown)
    shown.encode("utf-8")


@given(st.text(), st.sampled_from(["ascii", "latin-1", "cp1252", "utf-8"]))
def test_any_text_can_be_made_encodable(text: str, encoding: str) -> None:
    encodable(safe_text(text), encoding).encode(encoding)


@pytest.mark.parametrize(
    ("value", "width", "digits", "shown"),
    [
        (0.73449, 8, 3, "   0.734"),
        (None, 8, 3, "       -"),
        (math.nan, 8, 3, "     nan"),
        (-math.inf, 8, 3, "    -inf"),
        (0.0, 8, 3, "   0.000"),
        (0.0000123, 9, 5, "  0.00001"),
        (0.0000012, 9, 5, "    1e-06"),
        (1234.5678, 7, 3, "1234.57"),
        (14784.2, 8, 0, "   14784"),
        (1234567.0, 8, 0, "   1235k"),
        (1.7e30, 8, 3, "   2e+30"),
    ],
)
def test_numbers_fill_their_column_exactly(value: float | None, width: int, digits: int, shown: str) -> None:
    assert number(value, width, digits) == shown


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.314, "0.31 s"), (12.36, "12.4 s"), (59.97, "1 min 00 s"), (185.0, "3 min 05 s"), (7620.0, "2 h 07 min")],
)
def test_durations_read_as_a_person_says_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said
