"""Read the numbers in free text, each as its exact value or as no value, never by its first digits.

Grammar, after these spellings are made one: the dashes U+2010, U+2011, U+2012, U+2013, U+2212,
U+FE63, U+FF0D are "-" and U+FF0B is "+"; no-break and thin spaces, `\\,` `\\;` `\\:` `\\ ` and `~`
are a thin space; U+2019 is "'"; U+2044, U+2215, U+FF0F are "/"; `{,}` is ","; `\\$`, `\\%`, `\\_`
lose their backslash; `\\dfrac`, `\\tfrac`, `\\cfrac` are `\\frac`; `\\times` is U+00D7 and `\\cdot`
U+00B7; `\\left`, `\\right`, `\\!` are nothing.

    number   = [sign] [currency] [sign] value
    value    = fraction | mixed | power | scaled | decimal
    decimal  = integer ["." digits] | "." digits
    integer  = digits | 1 to 3 digits, then groups of 3 digits, each behind the same separator
    separator= "," | "'" | "_" | thin space | space
    fraction = integer "/" digits | "\\frac" part part | vulgar
    part     = "{" number "}" | digit
    vulgar   = U+00BD and its like | superscript digits "/" subscript digits
    mixed    = integer [space | thin space] (vulgar | "\\frac" of two integers | digits "/" digits)
    power    = decimal exponent
    exponent = ("^" | "**") (["-"] digits, bare or in braces or brackets) | superscript digits
    scaled   = decimal times "10" exponent
    times    = "x" | "X" | "*" | U+00D7 | U+00B7, a space may stand on each side
    sign     = "-" | "+"      counts unless a letter, digit or closing bracket stands before it
                              (there it subtracts); brackets may open behind it: `-(5)`. Spaces
                              may follow it at the very start, or behind "=", ":", "(" and so on
    currency = "$" | "€" | "£" | "¥" | "₹", and one space may follow it

Digits are ASCII. What breaks the grammar has no value, as a whole: runs of digits and separators
that are no integer (`1,00,000`, `1.2.3`, `12 34`), two signs, `±`, a zero denominator, a date, a
clock time, `1e3`, a power of a power or of a bracket, an exponent that is no integer or above 100,
roots, multiples of pi, repeating decimals (`0.\\overline{3}`, `0.33...`), numerals of a base
(`101_2`), a number that touches a digit of another script, more than 100 characters. `1 234/5`
(mixed, or a group?) has none either. Exponents and indices of letters and units (`cm^3`, `x_1`) are
no numbers. A point or comma behind a number ends a sentence; units, `%`, degrees, ordinals (`18th`,
`18^{th}`) and brackets are not looked at. Leading zeros are allowed. Products and differences are
several numbers.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

# Longer runs are no answers, and Python refuses to convert very long ones.
_MAX_CHARACTERS = 100
_MAX_EXPONENT = 100
# Exact values of more digits are not written out.
_MAX_DIGITS = 400
# What stands before a number is looked at no farther back than this.
_LOOK_BACK = 40

_THIN = "\u202f"
_SPELLINGS = {
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f"), _THIN),
    **dict.fromkeys(map(ord, "\u2044\u2215\uff0f"), "/"),
    **dict.fromkeys(map(ord, "\u22c5\u2219"), "·"),
    ord("\uff0b"): "+",
    ord("\u2019"): "'",
}
_LATEX = (
    (re.compile(r"\\(?:left|right|!)(?![a-z])"), ""),
    (re.compile(r"\\[dtc]frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\{(\\,|,|-)\}"), r"\1"),
    (re.compile(r"\\[,;: ]|(?<=[0-9])~(?=[0-9])"), _THIN),
    (re.compile(r"\\([$%_])"), r"\1"),
    (re.compile(r"\\times(?![a-z])"), "×"),
    (re.compile(r"\\cdot(?![a-z])"), "·"),
)

_RAISED = {ord(raised): plain for raised, plain in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+", strict=True)}
_LOWERED = {ord(lowered): plain for lowered, plain in zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True)}
_VULGAR = {
    char: Fraction(*map(int, unicodedata.normalize("NFKC", char).split("\u2044")))
    for char in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒↉"
}

_UP = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_DOWN = "₀₁₂₃₄₅₆₇₈₉"
_START = re.compile(
    rf"\\frac(?![a-z])|[0-9]|(?<![.0-9])\.(?=[0-9])|[{''.join(_VULGAR)}]|[{_UP}](?=[{_UP}]*/[{_DOWN}])"
)
_RUN = re.compile(rf"\.?[0-9](?:[0-9]|[,.'_{_THIN} ](?=[0-9]))*")
_GROUPED = re.compile(
    rf"[0-9]{{1,3}}(?P<separator>[,'_{_THIN} ])[0-9]{{3}}(?:(?P=separator)[0-9]{{3}})*"
)
_DECIMAL = re.compile(rf"(?P<whole>{_GROUPED.pattern}|[0-9]+)?(?:\.(?P<places>[0-9]+))?")
_OVER = re.compile(r"/([0-9]+)")
_RAISED_FRACTION = re.compile(rf"([{_UP}]{{1,20}})/([{_DOWN}]{{1,20}})")
_MIXING = re.compile(rf"[ {_THIN}]?(?=\\frac(?![a-z])|[{''.join(_VULGAR)}{_UP}])")
_PART = re.compile(r" ?(?:\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|([0-9]))")
_INT = "([-+]?[0-9]{1,20})"
_EXPONENT = re.compile(
    rf"(?: ?\^ ?|\*\*)(?:\{{ ?{_INT} ?\}}|\( ?{_INT} ?\)|{_INT})|([⁻⁺]?[{_UP}]{{1,20}})"
)
_TIMES_TEN = re.compile(r" ?[xX×·*] ?10(?![0-9.,])")
_ORDINAL = re.compile(r" ?\^ ?\{? ?(?:\\circ|\\degree|(?:\\text\{ ?)?(?:st|nd|rd|th)(?![a-z]))|°")

# What must not follow a number: it would make it another one.
_SPOILS = re.compile(
    rf"[eE][-+]?[0-9]|[:/·][0-9]|/?[{_DOWN}]|[.,'_]?[0-9]|[{''.join(_VULGAR)}{_UP}⁻⁺]|_\{{?[0-9a-z]"
    r"| ?\^|\*\*[-+({]?[0-9]|\.?\\(?:overline|bar|dot)|\\(?:sqrt|pi|frac)(?![a-z])|√|π"
    rf"|[)\]}}]+ ?(?:\^|\*\*[-+({{]?[0-9]|[{_UP}⁻])"
)
_GOES_ON = re.compile(r"\.\.|…")

# What stands before a number: its sign, if it has one, or that it is none.
_OPENING = re.compile(r"(?:[({\[]|\\[a-z]+\{|\*\*)+\Z")
_CURRENCY = re.compile(rf"[$€£¥₹][ {_THIN}]?\Z")
_RAISES = re.compile(r"(?:\^|(?<!\A)(?<=[\w)\]}])\*\*) ?[{(]? ?[-+]?\Z")
_INDEXES = re.compile(r"[^\W_0-9]_\{?\Z|\}_\{?\Z")
_ROOT = re.compile(r"(?:√|\\sqrt(?:\[[^\]]*\]?)?) ?[{(]?\Z")
_EITHER = re.compile(r"(?:±|\\pm|\\mp|∓)\s*\Z")
_SIGN = re.compile(r"(?:(?<=[=:(\[{<>≈~$*])|\A) *([-+])[ \u202f]+\Z|([-+])\Z")
_ISO_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?![0-9])")


class Numeral(NamedTuple):
    """A number that stands in a text, with its value; None: it breaks the grammar."""

    value: Fraction | None


def first_value(text: str) -> Fraction | None:
    """Value of the first number in a text; None if there is none or it breaks the grammar."""
    return next((numeral.value for numeral in numerals(text)), None)


def last_value(text: str) -> Fraction | None:
    """Value of the last number in a text; None if there is none or it breaks the grammar."""
    last = None
    for numeral in numerals(text):
        last = numeral.value
    return last


def numerals(text: str) -> Iterator[Numeral]:
    """Find the numbers in a text, in their order.

    Parameters
    ----------
    text : str
        Any text; time is linear in its length.
    """
    text = _one_spelling(text)
    place = 0
    while start := _START.search(text, place):
        begin = start.start()
        if date := _ISO_DATE.match(text, begin):
            value, place = None, date.end()
        else:
            value, place = _magnitude(text, begin)
        before = text[max(0, begin - _LOOK_BACK) : begin]
        if _RAISES.search(before) or _INDEXES.search(before):
            continue  # an exponent or an index of a unit or a letter
        if value is not None and (
            place - begin > _MAX_CHARACTERS or _is_spoilt(text, begin, place)
        ):
            value = None
        sign = _sign(before)
        yield Numeral(None if value is None or sign is None else sign * value)


def written(value: Fraction | None) -> str | None:
    """Write a value as a decimal where it ends, else as a fraction."""
    if value is None:
        return None
    twos = fives = 0
    rest = value.denominator
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    places = max(twos, fives)
    if rest != 1 or not places:
        return str(value)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def _one_spelling(text: str) -> str:
    if not text.isascii():
        text = text.translate(_SPELLINGS)
    if "\\" in text or "{" in text or "~" in text:
        for pattern, spelling in _LATEX:
            text = pattern.sub(spelling, text)
    return text


def _magnitude(text: str, begin: int) -> tuple[Fraction | None, int]:
    """Value without its sign, and where it ends; None if it breaks the grammar."""
    if text[begin] in _VULGAR:
        return _VULGAR[text[begin]], begin + 1
    if text[begin] == "\\":
        return _frac(text, begin)
    if raised := _RAISED_FRACTION.match(text, begin):
        return _raised(raised), raised.end()
    run = _RUN.match(text, begin)
    if run is None:
        return None, begin + 1
    value, end = _decimal(run[0]), run.end()
    if over := _OVER.match(text, end):
        return _over(run[0], over[1]), over.end()
    if mixing := _MIXING.match(text, end):
        mixed = _mixed(text, run[0], mixing.end())
        if mixed is not None:
            return mixed
    if scaling := _TIMES_TEN.match(text, end):
        if exponent := _EXPONENT.match(text, scaling.end()):
            power = _power(Fraction(10), exponent)
            return None if value is None or power is None else value * power, exponent.end()
    elif (exponent := _EXPONENT.match(text, end)) and not _ORDINAL.match(text, end):
        return None if value is None else _power(value, exponent), exponent.end()
    return value, end


def _decimal(run: str) -> Fraction | None:
    match = _DECIMAL.fullmatch(run) if len(run) <= _MAX_CHARACTERS else None
    return None if match is None else Fraction(re.sub(rf"[,'_{_THIN} ]", "", run))


def _over(run: str, denominator: str) -> Fraction | None:
    """A run over a denominator: a fraction, or a mixed number if the run ends in a part."""
    if len(run) + len(denominator) > _MAX_CHARACTERS or int(denominator) == 0:
        return None
    head, space, part = (
        re.split(rf"([ {_THIN}])(?=[0-9]+\Z)", run)[:3] if _parts(run) else (run, "", "")
    )
    whole = _decimal(head)
    if whole is None or "." in head:
        return None
    if not space:
        return whole / int(denominator)
    if _decimal(run) is not None:  # a group of three digits, or the part of a mixed number?
        return None
    return whole + Fraction(int(part), int(denominator))


def _parts(run: str) -> bool:
    return bool(re.search(rf"[ {_THIN}][0-9]+\Z", run))


def _mixed(text: str, run: str, begin: int) -> tuple[Fraction | None, int] | None:
    """An integer with a fraction behind it, None if there is no fraction."""
    if text[begin] in _VULGAR:
        part, end = _VULGAR[text[begin]], begin + 1
    elif text[begin] == "\\":
        found = _frac(text, begin)
        two = re.fullmatch(
            r"\\frac ?(?:\{ ?[0-9]+ ?\}|[0-9]) ?(?:\{ ?[0-9]+ ?\}|[0-9])", text[begin : found[1]]
        )
        if found[0] is None or two is None:
            return None, found[1]
        part, end = found[0], found[1]
    else:
        raised = _RAISED_FRACTION.match(text, begin)
        if raised is None:
            return None  # an exponent
        value = _raised(raised)
        if value is None:
            return None, raised.end()
        part, end = value, raised.end()
    whole = _decimal(run)
    return (None if whole is None or "." in run else whole + part), end


def _frac(text: str, begin: int) -> tuple[Fraction | None, int]:
    end = begin + len("\\frac")
    values = []
    for _ in range(2):
        part = _PART.match(text, end)
        if part is None:
            return None, end
        end = part.end()
        values.append(_whole_number(part[1] if part[2] is None else part[2]))
    upper, lower = values
    return (upper / lower if upper is not None and lower else None), end


def _whole_number(text: str) -> Fraction | None:
    """Value of a text that is one number and nothing else."""
    match = re.fullmatch(r"\s*([-+])?\s*(\S.*?)\s*", text) if len(text) <= _MAX_CHARACTERS else None
    if match is None:
        return None
    value, end = _magnitude(match[2], 0) if _START.match(match[2]) else (None, 0)
    if value is None or end != len(match[2]):
        return None
    return -value if match[1] == "-" else value


def _raised(match: re.Match[str]) -> Fraction | None:
    upper, lower = int(match[1].translate(_RAISED)), int(match[2].translate(_LOWERED))
    return Fraction(upper, lower) if lower else None


def _power(base: Fraction, match: re.Match[str]) -> Fraction | None:
    told = match[1] or match[2] or match[3] or match[4].translate(_RAISED)
    exponent = int(told)
    digits = max(len(str(base.numerator)), len(str(base.denominator)))
    if abs(exponent) > _MAX_EXPONENT or digits * abs(exponent) > _MAX_DIGITS:
        return None
    return None if base == 0 and exponent <= 0 else base**exponent


def _is_spoilt(text: str, begin: int, end: int) -> bool:
    """Whether what touches a number makes it another one."""
    if _ORDINAL.match(text, end):
        return False
    if _SPOILS.match(text, end) or ("." in text[begin:end] and _GOES_ON.match(text, end)):
        return True
    neighbours = text[max(0, begin - 1) : begin] + text[end : end + 1]
    if any(char.isdecimal() and not char.isascii() for char in neighbours):
        return True
    return bool(_ROOT.search(text[max(0, begin - _LOOK_BACK) : begin]))


def _sign(before: str) -> int | None:
    """1 or -1 by what stands before a number, None for two signs or either."""
    inner = 0
    if currency := _CURRENCY.search(before):
        before = before[: currency.start()]
    elif (sign := re.search(r"[$€£¥₹]([-+])\Z", before)) is not None:
        inner, before = (-1 if sign[1] == "-" else 1), before[: sign.start()]
    outer, before = _signed(before)
    opening = _OPENING.search(before)
    if opening is not None and opening.group() != "**":
        further, _ = _signed(before[: opening.start()], is_close=True)
        if further and (outer or inner):
            return None
        outer = outer or further
    if _EITHER.search(before) or (outer and inner):
        return None
    if outer and before.endswith(("-", "+")):
        return None
    return outer or inner or 1


def _signed(before: str, is_close: bool = False) -> tuple[int, str]:
    """A sign at the end of what stands before, 0 if there is none, and what is left."""
    match = _SIGN.search(before)
    if match is None or (is_close and match[1]):
        return 0, before
    place = match.start(1) if match[1] else match.start(2)
    left = before[:place]
    if match[2] and re.search(r"[\w)\]}]\Z", left):
        return 0, before
    return (-1 if (match[1] or match[2]) == "-" else 1), left
