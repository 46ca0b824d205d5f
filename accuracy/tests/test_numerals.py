"""The number grammar: each spelling has its value, or none; never the value of its first digits."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftproof.accuracy.numerals import first_value, last_value, numerals, written

NONE = None
THIN = "\u202f"

# Spelling to value; None: no value.
READINGS: list[tuple[str, str | int | None]] = [
    # Decimals and digit groups
    ("18", 18),
    ("018", 18),
    ("18.50", "37/2"),
    (".5", "1/2"),
    ("18.", 18),
    ("1,234", 1234),
    ("1,234,567.89", "123456789/100"),
    ("1 234", 1234),
    ("1\u00a0234", 1234),
    ("1\u202f234\u202f567", 1234567),
    ("1\u2009234", 1234),
    (r"1\,234", 1234),
    (r"1\;234", 1234),
    (r"1\ 234", 1234),
    ("1~234", 1234),
    (r"1{,}234", 1234),
    (r"1{\,}234", 1234),
    (r"1{,}\!234", 1234),
    ("1_234", 1234),
    (r"1\_234", 1234),
    ("1'234", 1234),
    ("1\u2019234", 1234),
    ("70 000.5", "140001/2"),
    ("1,234 567", NONE),
    ("1,00,000", NONE),
    ("1.2.3", NONE),
    ("3,4", NONE),
    ("1.234,56", NONE),
    ("12 34", NONE),
    ("1_2", NONE),
    ("5'10", NONE),
    ("0.123 456", NONE),
    ("0.123_456", NONE),
    ("2020 100", NONE),
    ("9" * 100, "9" * 100),
    ("9" * 101, NONE),
    # Signs
    ("-5", -5),
    ("+5", 5),
    ("\u22125", -5),
    ("\u20135", -5),
    ("\uff0d5", -5),
    ("\u20115", -5),
    ("\uff0b5", 5),
    ("- 5", -5),
    ("\u2013 5", -5),
    ("x = - 5", -5),
    ("x = \u2013 5", -5),
    ("{-}5", -5),
    ("(-5)", -5),
    ("-(5)", -5),
    (r"-\boxed{5}", -5),
    (r"\boxed{-5}", -5),
    ("-$5", -5),
    ("$-5", -5),
    ("$\u20135", -5),
    ("$ 5", 5),
    ("\\$1,200", 1200),
    ("-0", 0),
    ("--5", NONE),
    ("-$-5", NONE),
    ("-(-5)", NONE),
    ("±5", NONE),
    (r"\pm 5", NONE),
    ("10-20", 10),
    ("10\u201320", 10),
    # Fractions
    ("1/2", "1/2"),
    ("1\u20442", "1/2"),
    ("-1/2", "-1/2"),
    ("36/2", 18),
    ("1,000/8", 125),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac12", "1/2"),
    (r"\frac1{2}", "1/2"),
    (r"\frac{1}2", "1/2"),
    (r"\frac 1 2", "1/2"),
    (r"\dfrac{3}{4}", "3/4"),
    (r"\tfrac34", "3/4"),
    (r"\frac{-1}{2}", "-1/2"),
    (r"\frac{1}{-2}", "-1/2"),
    (r"-\frac{1}{2}", "-1/2"),
    (r"-\frac{-1}{2}", "1/2"),
    ("\\frac{\u22121}{2}", "-1/2"),
    (r"\frac{3.5}{2}", "7/4"),
    (r"\frac{1{,}000}{8}", 125),
    (r"\frac{10^3}{8}", 125),
    (r"\frac{\frac{1}{2}}{2}", "1/4"),
    (r"\left(\frac{1}{2}\right)", "1/2"),
    (r"\frac{x}{2}", NONE),
    (r"\frac{1}{x}", NONE),
    (r"\frac{1+1}{2}", NONE),
    (r"\frac{1}{0}", NONE),
    ("5/0", NONE),
    ("3.5/2", NONE),
    ("1/2.5", NONE),
    ("3/4/2020", NONE),
    ("½", "1/2"),
    ("-½", "-1/2"),
    ("⅔", "2/3"),
    ("¹⁄₂", "1/2"),
    # Mixed numbers
    ("1 1/2", "3/2"),
    ("-1 1/2", "-3/2"),
    ("1\u00a01/2", "3/2"),
    ("1 1\u20442", "3/2"),
    (r"2\frac{1}{2}", "5/2"),
    (r"2 \frac{1}{2}", "5/2"),
    (r"2\frac12", "5/2"),
    (r"-2\frac{1}{2}", "-5/2"),
    (r"2\dfrac{1}{2}", "5/2"),
    ("2½", "5/2"),
    ("2 ½", "5/2"),
    ("1¹⁄₂", "3/2"),
    (r"2\frac{-1}{2}", NONE),
    (r"2\frac{3.5}{2}", NONE),
    (r"2\frac{x}{2}", NONE),
    (r"2.5\frac{1}{2}", NONE),
    ("2.5½", NONE),
    ("1 234/5", NONE),
    ("½2", NONE),
    # Powers
    ("10^3", 1000),
    ("10^{3}", 1000),
    ("10^(3)", 1000),
    ("10 ^ 3", 1000),
    ("10**3", 1000),
    ("10²", 100),
    ("10⁻²", "1/100"),
    ("10^{-2}", "1/100"),
    ("10^{\u22122}", "1/100"),
    ("10^-2", "1/100"),
    ("2^10", 1024),
    ("-2^2", -4),
    ("1.5^2", "9/4"),
    ("1.5x10^3", 1500),
    ("1.5 x 10^3", 1500),
    ("1.5×10^3", 1500),
    (r"1.5\times10^3", 1500),
    (r"1.5 \times 10^{3}", 1500),
    (r"1.5\cdot10^{3}", 1500),
    ("1.5·10³", 1500),
    ("1.5*10**3", 1500),
    ("-1.5x10^{-3}", "-3/2000"),
    ("1e3", NONE),
    ("2^0.5", NONE),
    ("2^x", NONE),
    ("2^{1/2}", NONE),
    ("10^{10^{10}}", NONE),
    ("2^3^2", NONE),
    ("10^101", NONE),
    ("10^99999999999", NONE),
    ("0^0", NONE),
    ("1/2^3", NONE),
    ("(-2)^2", NONE),
    ("(5)²", NONE),
    ("5 cm^2", 5),
    ("5 m²", 5),
    # What makes it another number
    ("7:30", NONE),
    ("2020-12-05", NONE),
    (r"2\sqrt{3}", NONE),
    (r"\sqrt{16}", NONE),
    (r"\sqrt[3]{8}", NONE),
    ("√16", NONE),
    ("3π", NONE),
    (r"3\pi", NONE),
    (r"0.\overline{3}", NONE),
    (r"0.\bar3", NONE),
    ("0.333...", NONE),
    ("0.33…", NONE),
    ("101_2", NONE),
    ("101_{2}", NONE),
    ("10₂", NONE),
    ("3·5", NONE),
    ("1\uff18", NONE),
    ("1٨", NONE),
    ("٨1", NONE),
    # What does not
    ("18%", 18),
    (r"18\%", 18),
    ("5km", 5),
    ("18th", 18),
    ("18^{th}", 18),
    (r"90^\circ", 90),
    (r"90^{\circ}", 90),
    ("90°", 90),
    ("**18**", 18),
    ("18, as said", 18),
    ("18...", 18),
    (r"\boxed{18}", 18),
    (r"\text{18}", 18),
    ("USD18", 18),
    # No number at all
    ("", NONE),
    ("x^2", NONE),
    ("x_1", NONE),
    ("١٨", NONE),
]


@pytest.mark.parametrize(("text", "value"), READINGS)
def test_a_spelling_has_its_value_or_none(text: str, value: str | int | None) -> None:
    wanted = None if value is None else Fraction(value)
    assert first_value(text) == wanted
    # Words around it change nothing.
    assert first_value(f"It is: {text}") == wanted


def test_the_last_number_is_not_the_exponent_or_the_index_of_a_unit() -> None:
    assert last_value("24 cm^3") == 24
    assert last_value("24 \\text{ cm}^{3}") == 24
    assert last_value("so 24 is x_1") == 24
    assert last_value("9 * 2 = 18") == 18
    assert last_value("48-59=\u221211") == -11
    assert last_value("48 59 -11") == -11


@given(
    st.integers(0, 10**12),
    st.sampled_from([",", "'", "_", " ", "\u00a0", "\u202f", "\u2009", "\\,", "{,}"]),
    st.sampled_from(["-", "\u2212", "\u2013", "\uff0d", "\u2011", ""]),
    st.sampled_from(["{}", "${}", "({})", "**{}**", "{} kg", "{}.", "\\boxed{{{}}}", "{}%"]),
)
def test_every_grouping_and_sign_of_an_integer_has_its_value(
    number: int, separator: str, minus: str, around: str
) -> None:
    text = around.format(minus + f"{number:,}".replace(",", separator))
    assert first_value(text) == (-number if minus else number)


@given(st.integers(0, 99), st.integers(0, 99), st.integers(1, 99))
def test_mixed_numbers_and_fractions_have_their_values(whole: int, upper: int, lower: int) -> None:
    part = Fraction(upper, lower)
    assert first_value(f"{upper}/{lower}") == part
    assert first_value(f"\\frac{{{upper}}}{{{lower}}}") == part
    assert first_value(f"-{whole}\\frac{{{upper}}}{{{lower}}}") == -(whole + part)
    assert first_value(f"{whole} {upper}/{lower}") == whole + part


@given(st.text(alphabet="0123456789,.-+^*_'/ \\{}()fracsqrt$x×·½²₂⁄\u202f\u2013", max_size=60))
def test_no_text_breaks_the_reader_and_its_values_can_be_written(text: str) -> None:
    for numeral in numerals(text):
        said = written(numeral.value)
        assert (said is None) == (numeral.value is None)
        if said is not None and len(said) < 100:
            assert first_value(said) == numeral.value


@pytest.mark.parametrize("piece", ["1", "1,", "1/", "1 ", "10^", "\\frac{", "\\frac1", "-(", "1 ½"])
def test_long_texts_take_no_long_time(piece: str) -> None:
    started = time.process_time()
    last_value(piece * (20_000 // len(piece)))
    assert time.process_time() - started < 3
