"""Tests of the scorers: what each reads in a text, and the faults kept in the published one."""

import ast
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftproof.accuracy.scoring import (
    marked_value,
    published_value,
    score,
    score_arithmetic,
    score_published,
)
from draftproof.accuracy.tests.support import gsm8k_file

# (response, what `score` reads, what the published scorer reads); None: no answer.
READINGS = [
    # Plain answers
    ("She makes 9 * 2 = 18.\n#### 18", "18", "18"),
    ("#### 18", "18", "18"),
    ("####18", "18", "18"),
    ("####\n18", "18", "18"),
    ("  ####   7  ", "7", "7"),
    ("##### 18", "18", "18"),
    ("#### 0", "0", "0"),
    ("#### The answer is 42", "42", "42"),
    ("#### **18**", "18", "18"),
    # Signs
    ("#### -10", "-10", "10"),
    ("#### \u221210", "-10", "10"),
    ("#### +5", "5", "5"),
    ("#### - 3", "-3", "3"),
    ("#### (-3)", "-3", "3"),
    ("#### -3 degrees", "-3", "3"),
    ("#### 10-20", "10", "20"),
    ("#### x-5", "5", "5"),
    ("#### x = -5", "-5", "5"),
    ("#### -0", "0", "0"),
    # Decimals
    ("#### 18.50", "18.5", "50"),
    ("#### 18.5", "18.5", "5"),
    ("#### 0.25", "0.25", "25"),
    ("#### .5", "0.5", "5"),
    ("#### -0.05", "-0.05", None),
    ("#### 18.0", "18", "0"),
    ("#### 18.", "18", "18"),
    ("#### ...5", "5", "5"),
    ("#### 1.2.3", None, "3"),
    # Thousands separators
    ("#### 70,000", "70000", "70000"),
    ("#### 1,234,567", "1234567", "1234567"),
    ("#### 1,234.56", "1234.56", "56"),
    ("#### 1{,}234", "1234", "234"),
    ("#### 1,00,000", None, "100000"),
    ("#### 3,4", None, "34"),
    ("#### 18, as said", "18", "18"),
    ("#### 70 000", "70000", "0"),
    # Currency
    ("#### $18", "18", "18"),
    ("#### $18.50", "18.5", "50"),
    ("#### -$5", "-5", "5"),
    ("#### $-5", "-5", "5"),
    ("#### $ 5", "5", "5"),
    ("#### \\$1,200", "1200", "1200"),
    ("#### €20", "20", "20"),
    ("#### 20 USD", "20", "20"),
    ("#### USD18", "18", "18"),
    # Percent
    ("#### 18%", "18", "18"),
    ("#### 12.5%", "12.5", "5"),
    ("#### 150\\%", "150", "150"),
    # Boxed
    ("#### \\boxed{18}", "18", "18"),
    ("#### $\\boxed{-7}$", "-7", "7"),
    ("So \\boxed{18}.", None, "18"),
    # Fractions
    ("#### 1/2", "0.5", "2"),
    ("#### 1/3", "1/3", "3"),
    ("#### -1/4", "-0.25", "4"),
    ("#### 36/2", "18", "2"),
    ("#### 1 1/2", "1.5", "2"),
    ("#### \\frac{3}{4}", "0.75", "4"),
    ("#### -\\dfrac{1}{2}", "-0.5", "2"),
    ("#### 5/0", None, "0"),
    ("#### 3/4/2020", None, "2020"),
    # Trailing sentences
    ("#### 18\nThere are 3 left.", "18", "3"),
    ("#### 18 dollars, for 2 days.", "18", "2"),
    ("#### 18. That was 5 steps.", "18", "5"),
    # A second marker, a next question
    ("#### 18\n#### 20", "18", "20"),
    ("#### \n#### 20", None, "20"),
    ("#### 18\n\nQuestion: how many are 5?\nAnswer: 5\n#### 5", "18", "5"),
    ("Question: again?\n#### 5", None, "5"),
    ("#### \nQuestion: what is 4?", None, "4"),
    # Leading zeros
    ("#### 018", "18", None),
    ("#### 007", "7", None),
    ("#### 00", "0", "0"),
    ("#### 18.05", "18.05", None),
    # Nothing at all
    ("", None, None),
    ("####", None, None),
    ("#### none", None, None),
    ("I do not know.", None, None),
    ("The answer is 18", None, "18"),
    ("### 18", None, "18"),
    # A truncated answer
    ("#### 1,", "1", "1"),
    ("#### 1,2", None, "12"),
    ("#### -", None, None),
    ("#### 18.", "18", "18"),
    ("She makes 9 * 2 = 1", None, "1"),
    ("She makes 18.\n##", None, "18"),
    # Other shapes
    ("#### 7:30", None, "30"),
    ("#### 1e3", None, "3"),
    ("#### 5km", "5", "5"),
    ("#### 18th", "18", "18"),
    ("#### ١٨", None, None),
    ("#### " + "9" * 101, None, "9" * 101),
]


@pytest.mark.parametrize("text, marked, published", READINGS)
def test_each_scorer_reads_the_value_that_its_rule_gives(text, marked, published):
    assert score(text, "#### 1").extracted == marked
    assert score_published(text, "#### 1").extracted == published


def test_the_table_is_long_enough_to_cover_the_shapes():
    assert len({text for text, _, _ in READINGS}) >= 60


@pytest.mark.parametrize(
    "label, right, wrong",
    [
        ("-30/3 = <<-30/3=-10>>-10 degrees\nThe average is -10 degrees.\n#### -10", -10, 10),
        ("Start = +<<2=2>>2 degrees\nIt was -3 degrees Celsius.\n#### -3", -3, 3),
    ],
    ids=["row 489", "row 1113"],
)
def test_negative_labels_keep_their_sign_in_score_and_lose_it_in_the_published_scorer(
    label, right, wrong
):
    assert marked_value(label) == right
    assert published_value(label) == wrong
    assert score(f"#### {right}", label).correct
    assert not score(f"#### {wrong}", label).correct
    # Right for the wrong reason, and a wrong answer taken for right: the fault is kept.
    assert score_published(f"#### {right}", label).correct
    assert score_published(f"#### {wrong}", label).correct


def test_a_label_may_speak_of_questions_before_its_marker():
    label = "Questions left: 75-40 = 35\nQuestions missed: 35+70 = 105.\n#### 105"
    assert score("35 + 70 = 105\n#### 105", label).correct
    # In a response the same word is the stop word, and nothing behind it counts.
    assert score(label, label).extracted is None


def test_values_are_compared_exactly_not_as_texts():
    assert score("#### 18.50", "#### 18.5").correct
    assert score("#### 1,200.00", "#### 1200").correct
    assert score("#### 37/2", "#### 18.5").correct
    assert not score("#### 0.33333333", "#### 1/3").correct
    assert not score("#### 18.0000000000000000001", "#### 18").correct


def test_a_label_without_a_value_is_an_error_and_not_a_wrong_answer():
    for scorer in (score, score_published, score_arithmetic):
        with pytest.raises(ValueError, match="label"):
            scorer("#### 1", "none")


@given(st.text(alphabet="0123456789,.-#$ %Qx٣\n", max_size=40))
def test_the_published_rule_matches_a_literal_reading_of_the_last_digits(text):
    runs = re.findall(r"\d+", text.replace(",", ""))
    try:
        want = ast.literal_eval(runs[-1]) if runs else None
    except SyntaxError:
        want = None
    assert published_value(text) == want


@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["{}", "{:,}", "${:,}", "**{}**", "{} kg", "{}.", "\\boxed{{{}}}", "{}.00"]),
)
def test_every_spelling_of_an_integer_has_its_value(number, spelling):
    assert marked_value(f"work\n#### {spelling.format(number)}\nmore 5") == number


@given(st.text(max_size=200))
def test_no_text_breaks_a_scorer(text):
    for scored in (
        score("####" + text, "#### 1"),
        score_published(text, "#### 1"),
        score_arithmetic(text, "1"),
    ):
        assert scored.extracted is not None or not scored.correct


def test_a_megabyte_of_digits_is_no_answer_and_no_hang():
    for text in ("#### " + "1" * 10**6, "#### " + "1," * 10**6, "#### " + "1/" * 10**6):
        assert marked_value(text) is None
    assert published_value("1" * 10**6) is None


@pytest.mark.parametrize(
    "text, label, extracted, correct",
    [
        ("160", "160", "160", True),
        ("84 + 76 = 160.", "160", "160", True),
        ("48 - 59 = -11", "-11", "-11", True),
        ("48-59=\u221211", "-11", "-11", True),
        ("48 - 59 is 11", "-11", "11", False),
        ("The answer is 1,024", "1024", "1024", True),
        ("-11", "-11", "-11", True),
        ("- 11", "-11", "-11", True),
        ("I cannot say.", "5", None, False),
        ("", "5", None, False),
        ("1.2.3", "3", None, False),
    ],
)
def test_arithmetic_takes_the_last_number(text, label, extracted, correct):
    assert score_arithmetic(text, label) == (extracted, correct)


def test_on_all_gsm8k_labels_the_two_rules_differ_in_rows_489_and_1113_alone():
    lines = gsm8k_file().read_text(encoding="utf-8").splitlines()
    labels = [json.loads(line)["answer"] for line in lines]
    assert len(labels) == 1319
    apart = []
    for row, label in enumerate(labels):
        own = score(label[label.index("####") :], label)
        assert own.correct
        if own.extracted != str(published_value(label)):
            apart.append(row)
    assert apart == [489, 1113]
