"""Cuts formulas in LaTeX or plain text into tokens: one kind for each way to write one thing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from areal_megatron.reward.numeral import LONGEST_BARE, words


class NotRead(ValueError):
    """A text that is no formula, or of which a part has no meaning here."""


@dataclass(frozen=True)
class Token:
    """A piece of a formula."""

    kind: str
    """number, name, word, function, relation, separator, degree, dots, row, begin, end, command, "end of text", or the
    character itself."""
    text: str = ""
    at: int = 0
    """Where it begins in the text."""


def _table(text: str) -> dict[str, str]:
    """Returns each word with the one behind it."""
    return dict(zip(*[iter(text.split())] * 2, strict=True))


_WRAPPERS = "text|textbf|textrm|textit|textnormal|mathrm|mathbf|mathit|mathsf|mbox|operatorname\\*?|boldsymbol"
_TOKEN = re.compile(
    r"(?P<space>\s+|\.(?=\s*(?:\\end|\\\\|&|$))|\\[,;:! ]|~|\\?\$"
    r"|\\(?:quad|qquad|limits|displaystyle|left|right|big|Big|bigg|Bigg)(?![A-Za-z]))"
    rf"|\\(?P<wrapper>{_WRAPPERS}) ?(?:\{{(?P<text>[^{{}}\\]*)\}}|(?P<letter>[A-Za-z])(?![A-Za-z]))"
    r"|\\(?P<edge>begin|end) ?\{(?P<environment>[A-Za-z]+)\*?\}(?:\{[lcr|]*\})?"
    r"|(?P<degree>\^ ?\{? ?\\circ(?![A-Za-z]) ?\}?|°|\\degree(?![A-Za-z]))"
    r"|(?P<dots>\\(?:ldots|dots|cdots|dotsc|dotsb|vdots)(?![A-Za-z])|\.\.\.|…)"
    r"|(?P<repeating>[0-9]*\.[0-9]*(?:\\(?:overline|bar|dot) ?(?:\{ ?[0-9]+ ?\}|[0-9])[0-9]*)+)"
    r"|(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"|\\(?P<command>[A-Za-z]+)|(?P<letters>[A-Za-z]+)|(?P<row>\\\\)|\\(?P<escaped>[{}|%])|(?P<other>[^\\])"
)
_CHARACTERS = str.maketrans(
    {
        character: f"{text} "
        for character, text in _table(
            r"× \times · \cdot ⋅ \cdot ∙ \cdot ÷ \div − - – - π \pi ∞ \infty ∈ \in ∪ \cup ∩ \cap ± \pm ∓ \mp "
            r"√ \sqrt ≤ \le ≥ \ge ≠ \ne ≡ \equiv ≈ \approx ∅ \emptyset ¬ \neg ∨ \lor ∧ \land ² ^{2} ³ ^{3} "
            r"ℝ \mathbb{R} ℤ \mathbb{Z} ℕ \mathbb{N} ℚ \mathbb{Q} "
            r"α \alpha β \beta γ \gamma δ \delta ε \epsilon θ \theta λ \lambda μ \mu ρ \rho σ \sigma τ \tau φ \phi "
            r"ψ \psi ω \omega"
        ).items()
    }
)
_RELATIONS = _table(
    "= = < < > > lt < gt > le ≤ leq ≤ leqslant ≤ ge ≥ geq ≥ geqslant ≥ ne ≠ neq ≠ in ∈ notin ∉ equiv ≡ approx ≈ sim ∼ "
    ": : colon : mid | nmid ∤ to → rightarrow → longrightarrow → mapsto → implies ⇒ Rightarrow ⇒ iff ⇔ "
    "Leftrightarrow ⇔ subset ⊂ subseteq ⊆ perp ⊥ parallel ∥ cong ≅ propto ∝"
)
_SEPARATORS = _table("lor ∨ vee ∨ or or land ∧ wedge ∧ and and")
_OPERATIONS = _table(
    r"cdot * times * ast * div / pm ± mp ∓ cup ∪ bigcup ∪ cap ∩ setminus ∖ backslash ∖ lbrace \{ rbrace \} vert | "
    r"lvert | rvert | Vert \| lVert \| rVert \| lbrack [ rbrack ] prime '"
)
_CONSTANTS = _table("pi π infty ∞ infinity ∞ inf ∞ oo ∞ varnothing emptyset")
_ALIASES = _table(
    "asin arcsin acos arccos atan arctan cosec csc ctg cot tg tan dfrac frac tfrac frac cfrac frac tbinom binom "
    "dbinom binom varepsilon epsilon varphi phi vartheta theta varrho rho Bbb mathbb "
    "bar overline overrightarrow vec "
    "every all any all "
    "integers integer numbers number reals real primes prime solutions solution when if whenever if else otherwise "
    "lnot neg"
)
_FUNCTIONS = words(
    "sin cos tan sec csc cot arcsin arccos arctan sinh cosh tanh ln log lg exp max min gcd lcm det abs floor ceil arg "
    "Re Im cis deg dim ker sgn tr rank"
)
_SHORT_WORDS = words(
    "if is in at of to for all no not the any are has odd yes one two six ten or and as by on an per mod when even"
)
_MODULUS = re.compile(
    r"\( ?(?:(?:\\(?:mod|bmod)(?![A-Za-z])|\\(?:text|mathrm|operatorname) ?\{ ?mod ?\}|mod(?![A-Za-z])) ?([^()]*)"
    r"|\\(?:text|mathrm) ?\{ ?mod ([^{}()]*)\} ?)\)"
)
"""(mod 4), (\\text{mod } 4)."""
_SYSTEM = re.compile(r"^\\\{ ?\\begin ?\{(array|aligned)\} ?(?:\{[lcr|]*\})?(.*)\\end ?\{\1\} ?\.?$", re.DOTALL)
_FRENCH = re.compile(r"([\[\]])([^\[\]()]{1,99}?,[^\[\]()]{1,99}?)([\[\]])")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!)(?=[0-9]{3}(?![0-9]))")
_CHOSEN = re.compile(
    r"(?<![A-Za-z\\])C ?\( ?([0-9n]+) ?, ?([0-9a-z]+) ?\)|(?<![\w)}])[_^] ?\{?([0-9n]+)\}? ?C ?_ ?\{?([0-9a-z]+)\}?"
)
"""C(n, k), {}_nC_k and {}^nC_k."""
_AMBIGUOUS = re.compile(r"(?<=[0-9]),0[0-9]{2}(?![0-9.])")
"""In (1,000) a second element, or three digits of the first one."""


_VECTOR = r"\\(?:vec|mathbf|boldsymbol|bm|hat|overrightarrow)(?![A-Za-z]) ?(?:\{[^{}]*\}|\\?[A-Za-z]+) ?"
_INVERSE = r" ?\^ ?(?:T(?![A-Za-z])|\{ ?(?:-1|T|\\top|\\(?:mathrm|text) ?\{ ?T ?\}) ?\})"
_ORDERED = re.compile(
    rf"{_VECTOR}\\times(?![A-Za-z]) ?{_VECTOR}"
    rf"|(?<![a-z\\{{])[A-Z]{_INVERSE} ?[A-Z]|(?<![a-z\\{{])[A-Z] ?[A-Z]{_INVERSE}"
)
"""Products whose factors may not be exchanged: of vectors, and of what looks like a matrix, A^{-1}B."""


def prepared(text: str) -> str:
    """Returns a text with one character or command for each of several that mean the same. Raises NotRead for one of
    more than LONGEST_BARE characters, and for a product that is not one of numbers."""
    if len(text) > LONGEST_BARE:
        raise NotRead(f"more than {LONGEST_BARE} characters")
    if _ORDERED.search(text):
        raise NotRead("a product whose factors have an order")
    text = text.strip()
    if re.fullmatch(r"<[^<>=]*,[^<>=]*>", text):
        text = f"\\langle {text[1:-1]} \\rangle"
    if not re.search(r"[ABD-Z] ?\(", text):  # else C is a point
        text = _CHOSEN.sub(_binomial, text)
    text = _SYSTEM.sub(r"\\begin{cases}\2\\end{cases}", text)
    if text.count("[") + text.count("]") > 1:  # ]a, b[ is (a, b)
        text = _FRENCH.sub(lambda found: f"{'(['[found[1] == '[']}{found[2]}{')]'[found[3] == ']']}", text)
    return _MODULUS.sub(r"\\pmod{\1\2}", _THOUSANDS.sub("", text.translate(_CHARACTERS)))


def _binomial(found: re.Match[str]) -> str:
    n, k = filter(None, found.groups())
    return found[0] if n.isdigit() and k.isdigit() and int(n) < int(k) else f"\\binom{{{n}}}{{{k}}}"


def tokens_of(text: str) -> list[Token]:
    """Returns the tokens of a prepared text, the last of which is its end. Raises NotRead for what is no formula."""
    if len(text) > 4 * LONGEST_BARE or _AMBIGUOUS.search(text):  # prepared texts are a little longer
        raise NotRead("a comma between digits, or too many characters")
    return list(_tokens(text))


def _tokens(text: str) -> Iterator[Token]:
    at, last = 0, None
    while at < len(text):
        found = _TOKEN.match(text, at)
        if not found:
            raise NotRead(f"a stray {text[at]}")
        for token in _tokens_of(found, last):
            yield token
            last = token
        at = found.end()
    yield Token("end of text", at=at)


def _tokens_of(found: re.Match[str], last: Token | None) -> Iterator[Token]:
    at = found.start()
    if found["space"]:
        return
    if found["text"] is not None or found["letter"]:
        upright = found["wrapper"].startswith(("text", "mathrm", "mbox"))
        after_value = upright and last and last.kind in ("number", "name", "}", ")", "word")
        yield from _tokens_of_text(found["text"] or found["letter"] or "", at, bool(after_value))
    elif found["edge"]:
        yield Token(found["edge"], found["environment"], at)
    elif found["degree"] or found["dots"] or found["row"]:
        yield Token(next(kind for kind in ("degree", "dots", "row") if found[kind]), found[0], at)
    elif found["number"] or found["repeating"]:
        yield Token("number", found[0], at)
    elif found["command"]:
        yield _command(found["command"], at)
    elif found["letters"]:
        yield from _letters(found, at, last)
    elif found["escaped"]:
        yield Token("%" if found["escaped"] == "%" else f"\\{found['escaped']}", at=at)
    elif found["other"] in ",;":
        yield Token("separator", found["other"], at)
    elif found["other"] in _RELATIONS:
        yield Token("relation", _RELATIONS[found["other"]], at)
    else:
        yield Token("*" if found["other"] == "∗" else found["other"], at=at)


def _command(name: str, at: int) -> Token:
    name = _ALIASES.get(name, name)
    if name in _SEPARATORS:
        return Token("separator", _SEPARATORS[name], at)
    if name in _RELATIONS:
        return Token("relation", _RELATIONS[name], at)
    if name in _FUNCTIONS:
        return Token("function", name, at)
    if name in _OPERATIONS:
        return Token(_OPERATIONS[name], at=at)
    if name in _CONSTANTS:
        return Token("name", _CONSTANTS[name], at)
    return Token("command", name, at)


def _word(text: str, at: int) -> Token:
    text = text.casefold()
    text = _ALIASES.get(text, text)
    if text in _SEPARATORS:
        return Token("separator", _SEPARATORS[text], at)
    if text in _FUNCTIONS:
        return Token("function", text, at)
    return Token("relation", ":", at) if text == "to" else Token("word", text, at)


def _tokens_of_text(text: str, at: int, after_value: bool) -> Iterator[Token]:
    """Yields the words of \\text{…}; a letter alone is a name, but behind a value a unit."""
    pieces = re.findall(r"[A-Za-z]+(?:-[A-Za-z]{2,})*|[0-9]+(?:\.[0-9]+)?|[^A-Za-z0-9\s]", text)
    for piece, following in zip(pieces, [*pieces[1:], ""], strict=False):
        if piece == "a" and len(following) > 2 and following.isalpha() and following not in _SEPARATORS:
            continue
        if piece[0].isdigit():
            yield Token("number", piece, at)
        elif piece[0].isalpha():
            is_unit = after_value and len(pieces) == 1
            yield Token("name", piece, at) if len(piece) == 1 and not is_unit else _word(piece, at)
        elif piece in ",;":
            yield Token("separator", piece, at)
        elif piece in _RELATIONS:
            yield Token("relation", _RELATIONS[piece], at)
        elif piece not in ".'\"’$":
            yield Token(piece, at=at)


def _letters(found: re.Match[str], at: int, last: Token | None) -> Iterator[Token]:
    """Yields a function, a word, or a product of symbols for a run of letters without a backslash."""
    run = found["letters"]
    lower = run.casefold()
    beside = found.string[max(found.start() - 1, 0) : found.end() + 1].replace(run, "", 1)
    is_factor = len(run) == 2 and bool(re.search(r"[-+*/^=]", beside))  # at+b
    if run in _CONSTANTS or lower in ("infinity", "inf"):
        yield Token("name", _CONSTANTS[lower], at)
    elif _ALIASES.get(run, run) in _FUNCTIONS:
        yield Token("function", _ALIASES.get(run, run), at)
    elif run in ("sqrt", "cbrt", "frac"):
        yield Token("command", run, at)
    elif lower in _SEPARATORS:
        yield Token("separator", _SEPARATORS[lower], at)
    elif (lower in _SHORT_WORDS and not is_factor) or (len(run) > 3 and re.search("[aeiou]", lower)):
        if last and last.kind == "_":
            yield Token("name", run, at)
        else:
            yield _word(run, at)
    else:
        for place, letter in enumerate(run):
            yield Token("name", letter, at + place)
