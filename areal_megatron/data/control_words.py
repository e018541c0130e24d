"""Control words: what a chat template writes around texts, which texts from outside must not be able to write.

A control word is a token that the tokenizer finds in a text before anything else, such as `<|im_end|>`. In a message, a
row or the output of a tool it is text like any other. So it is hidden from the tokenizer there, while the same words of
the template itself stay tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import Encoding

_TAG = re.compile(r"</?([A-Za-z_][\w-]*)>")
_CHARACTERS = range(0x100000, 0x10FFFE)
"""Characters for private use, which no published text has."""
_CHARACTER = re.compile(f"[{chr(_CHARACTERS[0])}-{chr(_CHARACTERS[-1])}]")


def tags(words: Iterable[str]) -> set[str]:
    """Returns the words that come in pairs, `<name>` and `</name>`, as models use them to structure answers."""
    found = {word: tag[1] for word in words if (tag := _TAG.fullmatch(word))}
    return {word for word, name in found.items() if {f"<{name}>", f"</{name}>"} <= found.keys()}


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that finds the words, the longest that begins at a place; without words it finds nothing."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or r"(?!)")


class ControlWords:
    """The control words of a tokenizer, and its twin that knows them by secret names only.

    Example:
        words = ControlWords(library, {"<|im_start|>", "<|im_end|>"})
        hidden = words.hide()
        text = f"<|im_start|>user\\n{hidden(content)}<|im_end|>"
        ids = words.encode(text, hidden)  # two control tokens, whatever the content says
    """

    def __init__(self, library: tokenizers.Tokenizer, words: Iterable[str]):
        self._library = library
        self._words = sorted(words)
        self._numbers = {word: number for number, word in enumerate(self._words)}
        self._pattern = any_of(self._words)
        secret = secrets.token_hex(8)
        # private characters are changed by no normalizer, and are no letters beside which a word would not be found
        self._names = {word: f"\ue000{secret}{number}\ue001" for number, word in enumerate(self._words)}
        added = library.get_added_tokens_decoder().values()
        self._normalizes = library.normalizer is not None and any(
            token.normalized for token in added if token.content in self._names
        )

    def hide(self) -> Hidden:
        """Returns what hides control words, for one rendering."""
        return Hidden(self, self._pattern)

    def normalized(self, text: str) -> str:
        """Returns a text in which the tokenizer looks for control words."""
        return self._library.normalizer.normalize_str(text) if self._normalizes else ""

    def __len__(self) -> int:
        return len(self._words)

    def number(self, word: str) -> int:
        return self._numbers[word]

    def word(self, number: int) -> str:
        return self._words[number]

    def encode(self, text: str, hidden: Hidden, special: bool = False) -> list[int]:
        """Returns the token ids of a text in which control words are hidden; `special` is the library's
        `add_special_tokens`."""
        [encoding] = self._twin.encode_batch([self._named(text, hidden)], add_special_tokens=special)
        return encoding.ids

    def encode_with_places(self, text: str, hidden: Hidden, places: Sequence[int]) -> tuple[Encoding, list[int]]:
        """Returns the tokens of a text in which control words are hidden, and where characters of it (`places`) are in
        the text that the tokens' offsets are of."""
        [encoding] = self._twin.encode_batch([self._named(text, hidden)], add_special_tokens=False)
        return encoding, [len(self._named(text[:place], hidden)) for place in places]

    def _named(self, text: str, hidden: Hidden) -> str:
        return hidden.shown(self._pattern.sub(lambda found: self._names[found[0]], text))

    @cached_property
    def _twin(self) -> tokenizers.Tokenizer:
        described = json.loads(self._library.to_str())
        model = described["model"]
        for token in described["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {self._names.get(word, word): number for word, number in vocabulary.items()}
        elif vocabulary:  # pieces with their scores
            model["vocab"] = [[self._names.get(piece, piece), score] for piece, score in vocabulary]
        if "merges" in model:  # none may make a control word of its letters, nor begin with one
            pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
            model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & self._names.keys()]
        if model.get("unk_token") in self._names:
            model["unk_token"] = self._names[model["unk_token"]]
        return tokenizers.Tokenizer.from_str(json.dumps(described))


class Hidden:
    """Hides each control word in the texts of one rendering behind a single character, which no template takes apart.

    Which characters these are is drawn anew for each rendering. Where a text has one of them already, it becomes the
    word's text, and never its token.
    """

    def __init__(self, words: ControlWords, pattern: re.Pattern[str]):
        self._words, self._control = words, pattern
        self._first = _CHARACTERS.start + secrets.randbelow(len(_CHARACTERS) - len(words))
        self.place = f"z{secrets.token_hex(12)}z"
        """A text that is in no message, to find the place of one that takes its place."""
        self.some = False
        """Whether any control word was hidden."""

    def __call__(self, value: Any, but: Collection[str] = ()) -> Any:
        """Returns a text, or lists and objects of texts, with their control words hidden, except for `but`."""
        if isinstance(value, str):
            return self._text(value, but)
        if isinstance(value, Mapping):
            return {self(key, but): self(one, but) for key, one in value.items()}
        return [self(one, but) for one in value] if isinstance(value, list | tuple) else value

    def shown(self, text: str) -> str:
        """Returns a text with the words where they were hidden."""

        def word(found: re.Match[str]) -> str:
            number = ord(found[0]) - self._first
            return self._words.word(number) if 0 <= number < len(self._words) else found[0]

        return _CHARACTER.sub(word, text)

    def _text(self, text: str, but: Collection[str]) -> str:
        def replaced(found: re.Match[str]) -> str:
            if found[0] in but:
                return found[0]
            self.some = True
            return chr(self._first + self._words.number(found[0]))

        if any(found not in but for found in self._control.findall(self._words.normalized(text))):
            self.some = True
        return self._control.sub(replaced, text)
