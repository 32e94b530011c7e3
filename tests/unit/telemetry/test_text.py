"""Text for people: harmless, in columns, and a step as one line."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.telemetry.terminal import step_line
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


def test_a_long_text_is_cut_between_words_and_one_long_word_anywhere() -> None:
    words = " ".join(f"word{number}" for number in range(100, 200))
    shown = safe_text(words, limit=80)
    assert len(shown) <= 80 and set(shown.split()) <= {*words.split(), "..."}
    assert safe_text("x" * 100, limit=35) == "x" * 20 + " ... " + "x" * 10


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


METRICS = {
    "reward/mean": 0.5,
    "val/openai/gsm8k/mean@1": 0.25,
    "val/arithmetic/mean@1": 0.75,
    "val/arithmetic/best@4": 0.99,
    "actor/kl_loss": 0.00123,
    "actor/pg_clipfrac": 0.02,
    "response_length/mean": 8.25,
    "perf/tokens_per_s": 12345.6,
    "timing_s/step": 2.0,
    "timing_s/gen": 0.5,
    "timing_s/reward": 0.0004,
    "timing_s/ref": 0.2,
    "timing_s/update_actor": 0.7,
    "timing_s/sync_weights": 0.1,
}


def as_text(pieces: list[step_line.Piece]) -> str:
    return "".join(text for text, _ in pieces)


def test_a_step_is_one_line_with_every_value_under_its_name() -> None:
    names = as_text(step_line.header()).split()
    values = as_text(step_line.line(3, 60, METRICS, 725.4)).split()
    assert dict(zip(names, values, strict=True)) == {
        "step": "3/60",
        "reward": "0.500",
        "valid": "0.500",  # the mean of 0.25 and 0.75
        "kl": "0.00123",
        "clip": "0.0200",
        "length": "8.2",
        "tok/s": "12346",
        "seconds": "2.00",
        "left": "12m05s",
        "|": "|",
        "gen": "0.50",
        "ref": "0.20",
        "update": "0.70",
        "sync": "0.10",
        "other": "0.50",
    } | {"reward": "0.00"}  # the name stands twice: the score, and the seconds, which come later


@pytest.mark.parametrize("value", [0.0, -1e12, 1e12, 1e-12, math.nan, math.inf, -math.inf])
def test_the_width_of_a_line_never_depends_on_the_values(value: float) -> None:
    width = len(as_text(step_line.header()))
    assert width <= 120
    assert len(as_text(step_line.line(123, 4567, dict.fromkeys(METRICS, value)))) == width
    assert len(as_text(step_line.line(1, 2, {}))) == width


def test_components_and_failed_scores_follow_where_there_are_some() -> None:
    shown = {"reward/mean": 0.5, "reward/auto": 0.5, "reward/auto/acc": 0.5, "reward/acc": 0.5}
    plain = as_text(step_line.line(1, 9, shown))
    assert len(plain) == 119
    rich = {"reward/mean": 0.6, "reward/auto": 0.5, "reward/format": 1.0}
    rich |= {"reward/timeouts": 2.0, "reward/errors": 1.0, "reward/dropped": 3.0}
    text = as_text(step_line.line(1, 9, rich))
    assert text[119:] == "  |  auto  0.500  format  1.000  3 scores failed (2 timed out, 1 in error)"
    many = {"reward/mean": 1.0} | {f"reward/part{number}": 1.0 for number in range(6)}
    assert as_text(step_line.line(1, 9, many)).endswith("  part3  1.000  and 2 more")


def test_a_run_on_pairs_has_a_line_of_its_own() -> None:
    names = {"train/loss": 0.6, "val/loss": 0.5, "train/accuracy": 0.75, "val/accuracy": 0.8}
    names |= {"train/margin": 0.1, "val/margin": -0.2}
    metrics = {**names, "actor/grad_norm": 0.3, "perf/tokens_per_s": 99.0, "timing_s/step": 1.5, "val/arithmetic/mean@1": 0.25}
    head, line = as_text(step_line.header(metrics)), as_text(step_line.line(2, 9, metrics, 61.0))
    assert line.split() == [
        "2/9",
        "0.6000",
        "0.5000",
        "0.750",
        "0.800",
        "0.100",
        "-0.200",
        "0.250",
        "0.300",
        "99",
        "1.50",
        "1m01s",
    ]
    # Every value ends under the end of its name, before the first step as well, if there is validation alone.
    assert len(head) == len(line) == len(as_text(step_line.line(0, 9, {"val/accuracy": 0.0, "val/loss": 0.7})))
    assert head.split()[:4] == ["step", "loss", "val", "loss"] and "margin" in head and "ppl" not in head
