"""The verdicts of the math reward: forms of answers that published data sets and models use, and ways to cheat."""

import math_verify
import pytest

from areal_megatron.reward.math import final_answer, last_boxed, score
from areal_megatron.reward.no_score import AnswerRefused


def grade(response: str, answer: str) -> float:
    try:
        return score("", response, answer)
    except AnswerRefused:
        return 0.0


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("12+7: 9,1 so 19", "19", 1),
        ("12+7: 9,1 so 91", "19", 0),
        ("19 is wrong, I say 20", "19", 0),
        ("no number", "19", 0),
        ("", "19", 0),
        ("it is 1,234", "1234", 1),
        ("3,4", "4", 1),
        ("it is 19.0.", "19", 1),
        ("it is 0.5", "1/2", 1),
        ("it is -3", "3", 0),
        ("it is 1/0", "0", 0),
        (r"\boxed{19} and not 20", "19", 1),
        (r"\boxed{20} or \boxed{19}", "19", 1),
        (r"\boxed{19", "19", 0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{\frac{1}{2}}", r"\frac{2}{4}", 1),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        (r"\boxed{x^2+2x}", "(x+1)^2", 0),
        (r"so the answer is $\sqrt{8}$", r"2\sqrt{2}", 1),
        (r"\boxed{}", "19", 0),
    ],
)
def test_math_rewards(response, answer, expected):
    assert grade(response, answer) == expected


@pytest.mark.parametrize("response", ["12+7: 9,1 so 19", r"thus \boxed{-4}", "1,000", "x = 0.25", "3/4", "5 then 6"])
@pytest.mark.parametrize("answer", ["19", "-4", "1000", "0.25", "3/4", "6", "7"])
def test_plain_numbers_score_as_math_verify_scores_them(response, answer):
    known, found = math_verify.parse(f"${answer}$"), math_verify.parse(response)
    assert grade(response, answer) == math_verify.verify(known, found)


def test_the_last_box_is_found_with_nested_braces():
    assert last_boxed(r"a \boxed{1} b \boxed{\frac{a}{b}} c") == r"\frac{a}{b}"
    assert last_boxed(r"\boxed{1} then \boxed{\frac{a}") == "1"
    assert last_boxed("none") is None


RESTATED = {
    "42": [
        *(r"6 \times 7", r"6 \cdot 7", "6*7", "6 × 7", "(6)(7)", "40+2", "50-8", r"84 \div 2", "84/2", r"\frac{84}{2}"),
        *(
            r"\frac{126}{3}",
            "42/1",
            r"6 \times 7 = 42",
            "6*7=42",
            "40 + 2 = 42",
            "41+1",
            r"\sqrt{1764}",
            r"\sum_{k=1}^{6} 2k",
        ),
        *(
            r"\int_0^{42} dx",
            r"\lfloor 42.5 \rfloor",
            "|-42|",
            "-(-42)",
            r"42 \bmod 100",
            r"\max(3, 42)",
            r"\log_2 2^{42}",
        ),
        *(
            r"\text{lcm}(6, 14)",
            "42!",
            r"42 \cdot 1",
            "42^1",
            "42 + 0",
            "42x",
            r"42\pi",
            "42i",
            "7 = 42",
            "42 = 7 = 42",
        ),
        *(
            "42 or 43",
            r"42 \text{ or } 43",
            "41, 42",
            "42, 43",
            r"\{42, 43\}",
            "[41, 43]",
            "(41, 43)",
            "41-43",
            r"42 \pm 1",
        ),
        *(
            r"\approx 42",
            "> 41",
            r"x \le 42",
            "42%",
            r"42\%",
            "42 million",
            r"42 \text{ hundred}",
            "42 + x",
            "42 not 43",
        ),
        *(
            "forty-two",
            "42, maybe",
            r"x = 42 \text{ or } x = 43",
            "42?43",
            "42 43",
            "0.42e2x",
            r"4.2 \times 10",
            r"42_5",
        ),
        *(
            r"420 \times 10^{-1}",
            r"\det\begin{pmatrix}6&0\\0&7\end{pmatrix}",
            r"\begin{pmatrix}42\end{pmatrix}",
            "C(42,1)",
        ),
    ],
    "1": [
        r"\lim_{x \to 0} \frac{\sin x}{x}",
        "0!",
        "5 - 4",
        r"\sin^2 1 + \cos^2 1",
        "e^0",
        r"\cos 0",
        r"i^4",
        "7/7",
        r"\ln e",
    ],
    "21": [r"\gcd(462, 1071)", "gcd(462,1071)", r"\gcd(462,1071) = 20 = 21"],
    "184756": [r"\binom{20}{10}", "20C10", r"\frac{20!}{10!10!}", r"{20 \choose 10}", "binomial(20,10)"],
    "9": [r"\int_0^3 x^2 dx", r"\int_0^3 x^2\,\mathrm{d}x", r"3^2", "3**2", r"\prod_{i=1}^{2} 3"],
    "338350": [r"\sum_{k=1}^{100} k^2", r"\sum_{k=1}^{100} k^2 = 338350 = 338350"],
    "-2": [
        r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        r"\begin{vmatrix}1&2\\3&4\end{vmatrix}",
        "1 - 3",
        "-1 \\times 2",
    ],
    "7": [
        "8 = 7",
        r"7\%",
        "7%",
        "7 or 8",
        "7, 8",
        "5 + 2",
        r"\text{7 or 8}",
        "7 and 8",
        "6 < 7",
        "17 mod 10",
        "7 \\text{ percent}",
    ],
    "121932631112635269": ["123456789 * 987654321", r"123456789 \times 987654321", r"123456789 \cdot 987654321"],
    "120": ["5!", r"5 \cdot 4 \cdot 3 \cdot 2", r"\Gamma(6)", "P(5,5)", r"120_{3}", "2^3 * 15"],
    r"\frac{1}{2}": [
        r"\frac{2}{4}",
        "2/4",
        "1 - 1/2",
        r"\sin 30^\circ",
        r"2^{-1}",
        r"\frac{1}{4} + \frac{1}{4}",
        r"\frac12 \times 1",
    ],
    "3x^2": [
        r"\frac{d}{dx} x^3",
        r"\frac{d}{dx}(x^3)",
        r"\frac{\mathrm{d}}{\mathrm{d}x} x^3",
        r"\int 6x dx",
        "(x^3)'",
        "3 * 2 * x^2 / 2",
    ],
    "x^2": [
        r"x^2 \text{ or } x^3",
        "x^2, x^3",
        "x^3 = x^2",
        r"\int_0^x 2t\,dt",
        r"\lim_{h \to 0} (x+h)^2",
        r"x^2 + 1 - 1",
        r"\sqrt{x^4}",
    ],
    r"2\sqrt{3}": [
        r"\sqrt{3} \cdot \sqrt{4} \cdot 1^2",
        r"\pm 2\sqrt{3}",
        r"2\sqrt{3} \text{ or } 3",
        r"(\sqrt{3})^3 - \sqrt{3}",
    ],
    r"3+2\sqrt{2}": [r"(1+\sqrt{2})^2", r"(1+\sqrt{2})(1+\sqrt{2})", r"\frac{1}{3-2\sqrt{2}}"],
    "3+4i": ["(2+i)^2", "(2+i)(2+i)", r"\frac{25}{3-4i}"],
    "(2,3)": ["(1+1,3)", "(4/2,3)", r"(\sqrt{4},3)", "(1,2)+(1,1)", "(2,3),(3,2)", r"(2^1,3)"],
    r"\{1,2,3\}": [
        r"\{1,2\} \cup \{3\}",
        r"\{1,2,3,4\} \cap \{1,2,3\}",
        r"\{1,2,3,4\} \setminus \{4\}",
        r"\{1,2,1+2\}",
    ],
    "x>3": ["2x+1>7", "x>3 or x<0", "3x > 9"],
    "y=2x+1": ["2x-y=-1", "2y = 4x+2"],
    r"\frac{\pi}{4}": [
        r"\arctan 1",
        r"\int_0^1 \frac{1}{1+x^2} dx",
        r"\frac{\pi}{2} - \frac{\pi}{4} \times 1^2",
        r"\tan^{-1}(1)",
    ],
    r"\begin{pmatrix}4\\6\end{pmatrix}": [
        r"\begin{pmatrix}1\\2\end{pmatrix}+\begin{pmatrix}3\\4\end{pmatrix}",
        r"\begin{pmatrix}1+3\\2+4\end{pmatrix}",
    ],
}
"""The known answer → responses that restate a question or hedge."""


@pytest.mark.parametrize("answer", RESTATED)
def test_a_question_restated_and_several_answers_score_nothing(answer):
    wrong = [found for found in RESTATED[answer] if grade(f"So it is \\boxed{{{found}}}.", answer) != 0]
    assert not wrong


def test_there_are_enough_ways_to_cheat():
    assert sum(map(len, RESTATED.values())) >= 60


RIGHT = {
    "42": [
        *(
            "42",
            "42.",
            "42.0",
            "+42",
            " 42 ",
            "042",
            "$42$",
            r"\$42",
            "42 ",
            r"\text{42}",
            r"\mathbf{42}",
            r"\textbf{42}",
        ),
        *(
            r"42 \text{ cm}",
            r"42\text{ cm}^2",
            r"42 \text{ square units}",
            r"42\,\mathrm{cm}",
            r"42\text{ m/s}",
            "42 cm",
            "42 apples",
        ),
        *(
            "42 dollars",
            r"42^\circ",
            r"42^{\circ}",
            "42°",
            r"42 \text{ degrees}",
            "x = 42",
            "x=42",
            "f(3) = 42",
            "m+n = 42",
        ),
        *(
            r"m\angle ABC = 42^\circ",
            r"\text{Area} = 42",
            "AB = 42",
            "S_{10} = 42",
            "x = y = 42",
            "4.2e1",
            r"4.2 \times 10^{1}",
        ),
        *(
            r"42\text{nd}",
            r"42^{\text{nd}}",
            "{42}",
            r"\mathrm{42}",
            "**42**",
            "42 km/h",
            r"\displaystyle 42",
            r"\$42.00",
        ),
    ],
    "1234": [
        "1,234",
        "1{,}234",
        r"1\,234",
        r"1,\!234",
        "1 234",
        r"1\;234",
        r"\$1,234",
        "1,234.00",
        r"1.234 \times 10^3",
        r"1.234 \cdot 10^{3}",
    ],
    "204": ["204.", "204", "204.00", r"204 \text{ minutes}", "204 min"],
    "033": ["33", "033"],
    "-4": ["-4", "−4", "-4.0", "x=-4", r"-4^\circ"],
    "-$4": ["-4", r"-\$4"],
    "0.5": ["0.5", ".5", r"\frac{1}{2}", r"\frac12", r"\dfrac{1}{2}", r"\tfrac12", "1/2", "0.50", r"50\%"],
    r"\frac{1}{2}": [r"\frac{1}{2}", "0.5", "1/2", r"\frac 1 2", r"\frac{1}2", "x = 1/2"],
    r"-\frac{3}{4}": [r"-\frac{3}{4}", r"\frac{-3}{4}", r"\frac{3}{-4}", "-3/4", "-0.75", "-.75"],
    r"\frac{2}{4}": [r"\frac{1}{2}", r"\frac{2}{4}"],
    "3.5": [r"3\frac{1}{2}", "3 1/2", r"\frac{7}{2}", "7/2", "3.5", r"3\tfrac12"],
    r"0.\overline{36}": [r"0.\overline{36}", r"\frac{4}{11}", "4/11"],
    r"1{,}000{,}000": ["1000000", "1,000,000", r"10^6 = 1000000"[7:], r"1 \times 10^6"],
    "6.02e23": [r"6.02 \times 10^{23}", "6.02e23", r"6.02\cdot10^{23}", "6.02*10^23"],
    r"50\%": [r"50\%", "50%", "50", "0.5", r"\frac{1}{2}", r"50 \text{ percent}"],
    "0.07": [r"7\%", "7%", "0.07", r"\frac{7}{100}"],
    r"\$18.90": ["18.90", "18.9", r"\$18.90", "$18.90"],
    r"18 \text{ inches}": ["18", r"18 \text{ inches}", "18 in"],
    r"90^\circ": ["90", r"90^\circ", "90 degrees"],
    "120_3": ["120_3", "120_{3}", "120"],
    "Natalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72": ["72", "72 clips"],
    "27.0": ["27", "27.0"],
    r"2\sqrt{3}": [
        r"2\sqrt{3}",
        r"2\sqrt3",
        r"\sqrt{12}",
        r"2 \sqrt{3}",
        r"\sqrt{3}\cdot 2",
        r"2\sqrt{3}\text{ cm}",
        r"x = 2\sqrt{3}",
    ],
    r"\frac{\sqrt{2}}{2}": [r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", r"\dfrac{\sqrt2}2", r"\sqrt{2}/2"],
    r"\frac{\pi}{4}": [r"\frac{\pi}{4}", r"\pi/4", r"\frac{1}{4}\pi", r"\dfrac{\pi}{4}"],
    r"9\pi": [r"9\pi", r"9 \pi", r"9\pi \text{ cm}^2", r"\pi \cdot 9"],
    r"\frac{1+\sqrt{5}}{2}": [r"\frac{1+\sqrt{5}}{2}", r"\frac{\sqrt5+1}{2}", r"\frac12+\frac{\sqrt5}{2}"],
    r"3-2\sqrt{2}": [r"3-2\sqrt{2}", r"-2\sqrt{2}+3"],
    "3+4i": ["3+4i", "4i+3", "3 + 4i"],
    "x^2+2x+1": ["x^2+2x+1", "x^{2} + 2x + 1", "(x+1)^2", "2x + 1 + x^2", "x(x+2)+1"],
    "(x-1)(x+2)": ["(x-1)(x+2)", "(x+2)(x-1)"],
    "3x^2": ["3x^2", "3 x^{2}", r"3\cdot x^2", "f'(x) = 3x^2", "y = 3x^2"],
    r"\frac{x+2}{7}": [r"\frac{x+2}{7}", "(x+2)/7", r"\frac{x}{7} + \frac{2}{7}"],
    "y = 2x + 1": ["y=2x+1", "y = 1 + 2x", "2x+1"],
    "(2,3)": ["(2,3)", r"\left(2,3\right)", "(2, 3)", "2,3", "(x,y)=(2,3)"],
    r"\left( 3, \frac{\pi}{2} \right)": [r"(3, \frac{\pi}{2})", r"\left(3,\pi/2\right)"],
    "(-2,7]": ["(-2,7]", r"\left(-2,7\right]", r"x \in (-2,7]"],
    r"(-\infty,2)\cup(3,\infty)": [
        r"(-\infty,2)\cup(3,\infty)",
        r"(-\infty, 2) \cup (3, \infty)",
        r"(3,\infty)\cup(-\infty,2)",
    ],
    "x>3": ["x>3", "3<x", "x > 3"],
    r"\{1,2,3\}": [r"\{1,2,3\}", r"\{3,2,1\}", "1,2,3", r"\{ 1, 2, 3 \}"],
    "1,-2": ["1,-2", "-2, 1", r"1 \text{ and } -2", "x=1, x=-2"],
    r"\frac{1}{2}, \frac{1}{3}": [r"\frac12,\frac13", "1/2, 1/3"],
    r"\begin{pmatrix}1\\2\end{pmatrix}": [
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        r"\begin{bmatrix}1\\2\end{bmatrix}",
    ],
    r"\begin{pmatrix}1&0\\0&-1\end{pmatrix}": [r"\begin{pmatrix} 1 & 0 \\ 0 & -1 \end{pmatrix}"],
    r"\text{even}": [r"\text{even}", "even", "Even", r"\text{Even}", r"\textbf{even}"],
    r"\text{(B)}": ["B", "(B)", r"\text{(B)}", r"\textbf{(B)}"],
    "Tuesday": ["Tuesday", r"\text{Tuesday}"],
    "2^{10}": ["1024", "2^{10}", "2^10"],
    "2^{2007}-1": ["2^{2007}-1", "2^{2007} - 1", "-1+2^{2007}"],
    r"\ln 2": [r"\ln 2", r"\ln(2)"],
    r"\log_2 3": [r"\log_2 3", r"\log_{2}{3}"],
    r"\sin x": [r"\sin x", r"\sin(x)"],
    "e^2": ["e^2", "e^{2}"],
    r"\binom{10}{3}": ["120", r"\binom{10}{3}"],
    "5!": ["120", "5!"],
    "p - q": ["p-q", "-q+p"],
    r"\frac{3}{2}x": ["1.5x", r"\frac{3x}{2}", r"\frac32 x"],
    r"\infty": [r"\infty", r"+\infty"],
    "1:2": ["1:2", "1 : 2"],
    "3:00": ["3:00"],
    "n^2": ["n^2", "n^{2}", r"n \cdot n"],
    r"\theta": [r"\theta"],
    "ab": ["ab", "ba", "a b"],
    r"\sqrt[3]{2}": [r"\sqrt[3]{2}", "2^{1/3}"],
    "-1/x": [r"-\frac{1}{x}", "-1/x", r"-x^{-1}"],
}
"""The known answer → responses that are right."""


@pytest.mark.parametrize("answer", RIGHT)
def test_published_forms_of_right_answers_are_right(answer):
    refused = [found for found in RIGHT[answer] if grade(f"Thus the answer is $\\boxed{{{found}}}$.", answer) != 1]
    assert not refused


def test_there_are_enough_right_forms():
    assert sum(map(len, RIGHT.values())) >= 200


NUMBERS = ["42", "1234", "-4", "0.5", "3.5", "0.07", r"\frac{2}{3}", "1000000", "7", "0", "43", "-42", "420", "0.42"]


@pytest.mark.parametrize("answer", ["42", "1234", "-4", "0.5", "3.5", "0.07", "204"])
def test_no_right_form_of_one_number_is_right_for_another(answer):
    others = [number for number in NUMBERS if number not in (answer, "042")]
    for found in RIGHT[answer]:
        assert not [number for number in others if grade(f"\\boxed{{{found}}}", number) != 0]


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("We try 41, then 42 and maybe", "42", 0),
        ("The answer is $42$ (see step 3).", "42", 1),
        ("The answer is 42.", "42", 1),
        ("The final answer is: 42", "42", 1),
        ("**Answer:** 42", "42", 1),
        ("Answer: 42 cm\nAs shown above.", "42", 1),
        ("The answer is 7 or 8", "8", 0),
        ("The answer is 7 or 8", "7", 0),
        ("It is 7 or 8", "8", 0),
        ("It is 7 or maybe 8", "8", 0),
        ("between 7 and 8", "8", 0),
        ("the answer is 6 * 7", "42", 0),
        ("it is 2^7", "7", 0),
        ("so 6 + 36 = 42", "42", 1),
        ("She has 42 apples.", "42", 1),
        ("Work.\n#### 42", "42", 1),
        ("Work.\n#### 1,234", "1234", 1),
        ("We found 42. But then we need more steps", "42", 0),
        (r"it is \boxed{41}, no: \boxed{42", "41", 1),
        (r"so we get \boxed{42", "42", 0),
        (r"so $x = 42$.", "42", 1),
        (r"so the answer is \(\sqrt{8}\)", r"2\sqrt{2}", 1),
        ("no number", "42", 0),
        ("", "42", 0),
    ],
)
def test_answers_without_a_complete_box(response, answer, right):
    assert grade(response, answer) == right


def test_an_answer_that_is_not_worked_out_says_so():
    with pytest.raises(AnswerRefused, match="one plain number"):
        score("", r"\boxed{6 \times 7}", "42")
    with pytest.raises(AnswerRefused, match="lowest terms"):
        score("", r"\boxed{84/2}", "42")
    with pytest.raises(AnswerRefused, match="Derivative is left"):
        score("", r"\boxed{\frac{d}{dx}x^3}", "3x^2")
    assert score("", r"\boxed{43}", "42") == score("", r"\boxed{\text{none}}", "42") == 0


@pytest.mark.parametrize(
    "found",
    [
        "2^{2^{36}}",
        "9^{9^{9^{9}}}",
        "(10^9)!",
        "99999999!",
        "x^{99999999}",
        "(x+1)^{9999}",
        "1" * 900,
        "{" * 200 + "}" * 200,
        "1e999999999",
        r"10^{999999999}",
        "((((((((((((((x))))))))))))))",
        r"\sqrt{" * 50 + "x" + "}" * 50,
    ],
)
@pytest.mark.parametrize("answer", ["7", "x", r"\sqrt{2}"])
def test_what_would_take_for_ever_is_refused_at_once(found, answer):
    assert grade(f"\\boxed{{{found}}}", answer) == 0


def test_the_last_complete_box_counts():
    assert final_answer(r"\boxed{1} \boxed{\frac{a}{b}} }} {{") == r"\frac{a}{b}"
    assert final_answer(r"\boxed{\{1,2\}} and \boxed{3") == r"\{1,2\}"
    assert final_answer(r"\boxed{a {b} {{c}}} \{") == "a {b} {{c}}"
    assert final_answer(r"\boxed{a \boxed{b}}") == "b"
