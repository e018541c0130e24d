"""Text to token ids and back, from a model folder's tokenizer.json.

Imports no torch: the controller, the reward workers and the check of a config on a login node all tokenize.

Settings with no place in a run are not applied: truncation, padding and dropout, left in a tokenizer's file by a call
before it was saved. Texts from outside are text, whatever they say (`control_words`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from areal_megatron.config import ConfigError
from areal_megatron.data import chat_template
from areal_megatron.data.chat_template import ChatTemplate, Span, TemplateRefused
from areal_megatron.data.control_words import ControlWords, Hidden, any_of, tags
from areal_megatron.data.drawing import digest_of
from areal_megatron.data.formats import Chat
from areal_megatron.process.errors import printable
from areal_megatron.run.json_input import read_object, read_regular

_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_MORE_NAMES = ("additional_special_tokens", "extra_special_tokens")
MOST_TOKENIZER_BYTES = 256 * 2**20
"""Bytes of the largest tokenizer.json that is read; published models' have up to 35 MB."""
_INSTRUCTING = ("system", "developer")
"""Roles whose messages templates may drop, or shorten, while the others say the same words."""
_TAIL = 64
"""The last tokens of a prompt, which are looked at for how it begins the answer."""
_TAG = re.compile(r"</?[A-Za-z_][\w-]*>|\[/?[A-Z][A-Z_]*\]")
_OPENED = re.compile(rf"(?:(?:{_TAG.pattern})\s*)+\Z")
"""Tags at the end of a prompt: the template begins the answer with them."""
_MARK = r"<[|｜](?![^<>]*(?:end|eot|eom))[^<>|｜\s]{4,40}[|｜]>|<s>|<bos>|<start_of_turn>|\[INST\]|\[gMASK\]"
_LAST_MARK = r"<[|｜][^<>|｜\s]{3,40}[|｜]>|<(?:start|end)_of_turn>|\[/INST\]"
"""How other models' templates begin and end a conversation, by words that are longer than a formula's ⟨|x|⟩."""
_NOT_FOLLOWED = {
    "split_special_tokens": "the template's control words are tokens",
    "fix_mistral_regex": "tokenizer.json alone says how texts are split; save it with the fix",
}

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""What is said of an added token."""


class Tokenizer:
    """The tokenizer and chat template of a Hugging Face model folder.

    Raises ConfigError if the folder has no usable tokenizer, no end token, or a chat template that does not parse.

    Example:
        tokenizer = Tokenizer("models/Qwen2.5-0.5B-Instruct")
        [tokens] = tokenizer.prompts(["What is 2 + 3?"])  # one user message, and the header of the answer
        tokenizer.decode(tokens, special=True)  # "<|im_start|>system…"
        tokenizer.stop_tokens  # [151645, 151643]
    """

    def __init__(self, folder: str | Path, untried: bool = False):
        """`untried`: nobody has rendered anything by the folder's chat template before, so that it is tried first, as
        in `chat_template.tried`."""
        self._folder = Path(folder)
        self._settings = self._all_settings()
        self._described = self._json("config.json")
        self._tokenizer = self._library()
        self._special = {name: self._named(name) for name in _NAMES}
        sources = chat_template.sources(self._folder, self._settings)
        written = {name: text for name, text in self._special.items() if text}
        if untried and (problem := chat_template.tried(sources, written)):
            raise ConfigError(f"model.path: {folder}: the chat template cannot be used: {problem}")
        self._template = ChatTemplate(sources, written, self._folder) if sources else None
        self._apply_settings()
        self.stop_tokens = self._stop_tokens()
        """Token ids that end an answer, the tokenizer's own end token first."""

    def prompts(self, prompts: Sequence[str | Chat], places: Sequence[str] = ()) -> list[list[int]]:
        """Returns the token ids of each prompt.

        Messages are rendered by the model's chat template, and so is a text, as one user message; what they say is
        text, control words included. Without a template a text is the whole prompt and tokenized as it is.

        Raises ConfigError if the template refuses a prompt, or if a prompt is a list of messages and the model has no
        template, or if a prompt is rendered already. `places` are the entries of the data by which errors name prompts;
        with them, prompts with tokens that the model does not have are refused, without them such tokens are text.
        """
        named = zip(prompts, places or [""] * len(prompts), strict=True)
        if self._template is None:
            self._check_open_end()
            texts = [_plain(prompt, place or str(self._folder)) for prompt, place in named]
            found = [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]
        else:
            found = self._encoded([self._as_chat(prompt, place) for prompt, place in named])
        for ids, place in zip(found, places, strict=bool(places)):
            self._check_known(ids, place)
        return found

    def responses(
        self, texts: Sequence[str], prompts: Sequence[list[int]] = (), places: Sequence[str] = ()
    ) -> list[list[int]]:
        """Returns the token ids of each response, with the end token appended.

        What the template writes too is not repeated: the tags with which the prompt begins the answer, of `prompts`'
        token ids, and an end token. Control words that only a template writes are text. Raises ConfigError, which names
        the entry of `places`, as `prompts` does.
        """
        may_write = self._answers_may_write(bool(places))
        found = []
        for number, text in enumerate(texts):
            if places and self._template and self._is_rendered(text):
                raise ConfigError(
                    f"{places[number]}: the response is rendered by a chat template already: give the answer's text "
                    "alone"
                )
            begun = self.decode(prompts[number][-_TAIL:], special=True) if prompts and self._template else ""
            answer, hidden = _unrepeated(self.unended(text), begun), self._control.hide()
            again = next((tag for tag in _opening(begun) if answer.lstrip().startswith(tag)), "")
            if again and places:
                raise ConfigError(
                    f"{places[number]}: the response begins with {again}, which the chat template of {self._folder} "
                    "writes before every answer, and ends there: leave it out, or give the model another template"
                )
            found.append((hidden(answer, but=may_write), hidden))
        tokens = [[*ids, self.stop_tokens[0]] for ids in self._encoded(found)]
        for ids, place in zip(tokens, places, strict=bool(places)):
            self._check_known(ids, place)
        return tokens

    @property
    def unknown_token(self) -> int | None:
        """The token that stands for all characters that the tokenizer does not know; None if it has none of its own."""
        others = [text for name, text in self._special.items() if name != "unk_token"]
        text = self._special["unk_token"]
        return self._tokenizer.token_to_id(text) if text and text not in others else None

    @property
    def pad_token(self) -> int | None:
        """The token that fills up batches; None if the tokenizer has none, or it ends answers as well. Raises
        ConfigError if the model does not have it."""
        token = self._tokenizer.token_to_id(self._special["pad_token"])
        if token is None or token in self.stop_tokens:
            return None
        self._check_known([token], f"model.path: {self._folder / 'tokenizer_config.json'}: pad_token")
        return token

    def check(self) -> list[str]:
        """Returns what is worth a line at the launch: settings of the folder that are not followed here. Raises
        ConfigError if the files do not agree on the numbers of tokens."""
        file = self._folder / "tokenizer.json"
        for token in _decode_file(file.read_bytes()).added_tokens:
            if (number := self._tokenizer.token_to_id(token.content)) != token.id:
                raise ConfigError(
                    f"model.path: {file}: {printable(repr(token.content), 60)} has the number {token.id}, but the "
                    f"library gives it {number}: there are gaps before it, fill them with added tokens"
                )
        found = [
            f"{name}={self._settings[name]!r} of {self._folder / 'tokenizer_config.json'} is not followed: {why}"
            for name, why in _NOT_FOLLOWED.items()
            if self._settings.get(name)
        ]
        missing = [text for text in self._all_named() if self._tokenizer.token_to_id(text) is None]
        if missing:
            found.append(
                f"{printable(repr(missing[0]), 60)} of {self._folder / 'tokenizer_config.json'} is no token of "
                f"tokenizer.json and so text, as are {len(missing) - 1} others: save the tokenizer again"
            )
        around = self._tokenizer.encode("1").ids
        for name, at in (("bos_token", 0), ("eos_token", -1)) if self._template is None else ():
            wanted, token = self._settings.get(f"add_{name}"), self._tokenizer.token_to_id(self._special[name])
            if type(wanted) is bool and token is not None and around and wanted != (around[at] == token):
                found.append(
                    f"add_{name}={wanted} of {self._folder / 'tokenizer_config.json'} is not followed: tokenizer.json "
                    "alone says what is put around a text"
                )
        try:
            end = self.continuation([{"role": role, "content": "1"} for role in ("user", "assistant", "user")], 1)[:1]
        except ConfigError:  # it takes one turn only
            end = []
        if end and self._template and {*end} & {*self._words.values()} and end[0] not in self.stop_tokens:
            found.append(
                f"the chat template of {self._folder} ends answers with {self._tokenizer.id_to_token(end[0])!r}, which "
                "is no end token (eos_token, generation_config.json): the model's answers go on after it"
            )
        return found

    @property
    def digests(self) -> tuple[str, str]:
        """Digests of the tokenizer with its end tokens, and of the chat template with the special tokens that it may
        write. They are equal in all folders that make the same tokens of the same text."""
        described: dict[str, Any] = (self._json("tokenizer.json") or {}) | {"truncation": None, "padding": None}
        described["model"] = described["model"] | {"dropout": None}
        described["added_tokens"] = sorted(
            [number, token.content, *(getattr(token, flag) for flag in _FLAGS)]
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
        )
        template = self._template.written if self._template else None
        return digest_of(described, self.stop_tokens).hex(), digest_of(template).hex()

    def _all_named(self) -> list[str]:
        """The texts of the special tokens that tokenizer_config.json names."""
        named: list[Any] = list(self._special.values())
        for key in _MORE_NAMES:
            more = self._settings.get(key)
            named += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
        texts = [token.get("content") if isinstance(token, dict) else token for token in named]
        return [text for text in texts if isinstance(text, str) and text]

    def longest_token(self) -> int:
        """Returns an upper bound of the UTF-8 bytes of text that one token stands for. Reads the whole vocabulary."""
        return max(len(token.encode()) for token in self._tokenizer.get_vocab())

    def check_same(self, folder: str | Path, key: str) -> None:
        """Raises ConfigError, which names `key`, if the model of `folder` has other tokens than this one."""
        own, other = self._tokenizer.get_vocab(), Tokenizer(folder, untried=True)._tokenizer.get_vocab()
        if own == other:
            return
        different = [token for token in own.keys() | other.keys() if own.get(token) != other.get(token)]
        example = min(different, key=lambda token: (own.get(token, other.get(token)), token))
        raise ConfigError(
            f"{key}: {folder} has another tokenizer than {self._folder}: {len(different)} tokens differ, such as "
            f"{example!r} ({other.get(example, 'missing')} and {own.get(example, 'missing')})"
        )

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template of the folder, None if it has none."""
        return self._template

    def hide(self) -> Hidden:
        """Returns what hides control words in the texts of one conversation, however often it is rendered."""
        return self._control.hide()

    def written(self, value: Any, hidden: Hidden, role: str = "assistant") -> Any:
        """Returns a message of a role, or a part of it, as templates get it: with control words hidden."""
        return hidden(value, but=self._answers_may_write(True) if role == "assistant" else self._beyond)

    def unended(self, text: str) -> str:
        """Returns an answer without end tokens at its end."""
        while end := next((word for word in self._ends if text.rstrip().endswith(word)), ""):
            text = text.rstrip().removesuffix(end)
        return text

    def check_unrendered(self, text: str, place: str) -> None:
        """Raises ConfigError if a message's text is rendered by a chat template already."""
        if self._is_rendered(text):
            raise ConfigError(f"{place} is rendered by a chat template already: give the text alone")

    def check_shown(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None,
        text: str,
        place: str,
        hidden: Hidden,
        begin: int = 0,
    ) -> None:
        """Raises ConfigError if the text of messages, in which `hidden` has hidden control words, does not show one of
        them, from number `begin` on. The assistant's are left out: templates drop thinking."""
        for number, message in enumerate(messages[begin:], begin):
            said = message["content"].strip()
            if message["role"] == "assistant" or (message["role"] not in _INSTRUCTING and said in text):
                continue
            marked = [*messages[:number], message | {"content": said + hidden.place}, *messages[number + 1 :]]
            if said and hidden.place.casefold() not in self.rendered(marked, tools, place).casefold():
                raise ConfigError(
                    f"{place}: the chat template of {self._folder} does not show message {number + 1}, of the role "
                    f"{message['role']!r}: say it in another message, or give the model another chat template"
                )

    def rendered(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None,
        place: str,
        asks: bool = True,
        marks: list[Span] | None = None,
    ) -> str:
        """Returns the text of messages and tools in which control words are hidden, as `ChatTemplate.render` does.
        Raises ConfigError, which names `place`, if the template refuses them."""
        assert self._template is not None
        try:
            return self._template.render(messages, tools, asks, marks)
        except TemplateRefused as e:
            problem = f"the chat template of {self._folder} refuses the prompt: {e}"
            raise ConfigError(f"{place or 'messages'}: {problem}") from None

    def answer_end(self, text: str) -> int:
        """Returns the place after the control word with which a rendered text ends; 0 if it ends otherwise."""
        whole = text.rstrip()
        return len(whole) if any(whole.endswith(word) for word in self._marks) else 0

    @cached_property
    def next_words(self) -> dict[str, str]:
        """The word that ends an answer where the template writes it at the beginning of the next message alone, by the
        role of that: GLM's <|user|> and <|observation|>. Else the end token."""
        found = {}
        for role in ("user", "tool"):
            messages = [{"role": name, "content": "1"} for name in ("user", "assistant", role)]
            try:
                first = self.continuation(messages, 1)[:1]
            except ConfigError:  # it takes no such message there
                first = []
            ends = first[0] if first and first[0] in self.stop_tokens else self.stop_tokens[0]
            found[role] = self._tokenizer.id_to_token(ends)
        return found

    def spans(
        self, texts: Sequence[tuple[str, Hidden, Sequence[Span]]], places: Sequence[str], apart: bool = False
    ) -> list[tuple[list[int], list[Span]]]:
        """Returns the token ids of rendered texts, and which tokens the parts of each text are, as (first, one after
        the last).

        Where the library would put characters before a part and of it into one token, or always if they are to be
        `apart`, they are tokenized one after the other, as a prompt and the answer to it are. Raises ConfigError for
        tokens that the model does not have.
        """
        clear = [text for text, hidden, _ in texts if not hidden.some]
        encodings = iter(self._tokenizer.encode_batch(clear, add_special_tokens=False) if clear else ())
        found = []
        for (text, hidden, parts), place in zip(texts, places, strict=True):
            edges = [edge for part in parts for edge in part]
            if hidden.some:
                encoding, at = self._control.encode_with_places(text, hidden, edges)
            else:
                encoding, at = next(encodings), edges
            covered = [_covered(encoding, begin, end) for begin, end in zip(at[::2], at[1::2], strict=True)]
            whole = not apart and None not in covered
            found.append((encoding.ids, covered) if whole else self._in_pieces(text, hidden, parts))
            self._check_known(found[-1][0], place)
        return found

    def conversation(self, messages: Chat, tools: Sequence[Any] | None = None) -> list[int]:
        """Returns the token ids of a conversation, up to where the model starts its answer. The contents of the
        messages are text, as in `prompts`; but in the assistant's, tags that structure answers are tokens.

        Without a chat template the contents of the messages are concatenated. Raises ConfigError if the template
        refuses the messages.
        """
        [ids] = self._encoded([self._rendered(messages, tools)], special=self._template is None)
        return ids

    def continuation(self, messages: Chat, answer: int, tools: Sequence[Any] | None = None) -> list[int]:
        """Returns the token ids between the content of messages[answer], an answer of the model, and its next answer.

        The first one is the end token if the template ends answers with it. Raises ConfigError if the template refuses
        the messages, or does not show the answer exactly once.
        """
        hidden = self._control.hide()
        replaced = [*messages[:answer], {"role": "assistant", "content": hidden.place}, *messages[answer + 1 :]]
        text, _ = self._rendered(replaced, tools, hidden=hidden)
        _, *after = text.split(hidden.place)
        if len(after) != 1:
            raise ConfigError(
                f"the chat template of {self._folder} shows an answer {len(after)} times when another message "
                "follows it, expected once"
            )
        [ids] = self._encoded([(after[0], hidden)])
        return ids

    def keeps(self, messages: Chat, answer: int, said: str, tools: Sequence[Any] | None = None) -> bool:
        """Returns whether the template still shows messages[answer] as the model wrote it (`said`), and what is before
        it as the model saw it. Else the next answer's prompt does not begin with the tokens of this one."""
        hidden = self._control.hide()
        try:
            before, now = (self._rendered(shown, tools, hidden=hidden)[0] for shown in (messages[:answer], messages))
        except ConfigError:
            return False
        return hidden.shown(now).startswith(hidden.shown(before) + said)

    def decode(self, tokens: list[int], special: bool = False) -> str:
        """Returns the text of the tokens; without `special`, as an answer: tags and all, but without the control words
        that only a template writes."""
        if not special and not self._left_out.isdisjoint(tokens):
            tokens = [token for token in tokens if token not in self._left_out]
        [text] = self._tokenizer.decode_batch([tokens], skip_special_tokens=False)
        return text

    def _encoded(self, texts: Sequence[tuple[str, Hidden]], special: bool = False) -> list[list[int]]:
        # A batch, unlike a single text, is encoded without the interpreter's lock: other threads go on.
        clear = [text for text, hidden in texts if not hidden.some]
        encodings = iter(self._tokenizer.encode_batch(clear, add_special_tokens=special) if clear else ())
        return [
            self._control.encode(text, hidden, special) if hidden.some else next(encodings).ids
            for text, hidden in texts
        ]

    def _in_pieces(self, text: str, hidden: Hidden, parts: Sequence[Span]) -> tuple[list[int], list[Span]]:
        cuts = [0, *(edge for part in parts for edge in part), len(text)]
        pieces = self._encoded([(text[begin:end], hidden) for begin, end in pairwise(cuts)])
        ids: list[int] = []
        numbers = [0]
        for piece in pieces:
            ids += piece
            numbers.append(len(ids))
        return ids, [*pairwise(numbers)][1::2]

    def _as_chat(self, prompt: str | Chat, place: str) -> tuple[str, Hidden]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if any(self._is_rendered(message["content"]) for message in messages):
            raise ConfigError(
                f"{place or 'prompt'}: the prompt is rendered by a chat template already, and that of {self._folder} "
                "would render it again: give the user's text alone; a model folder without a template takes it as it is"
            )
        return self._rendered(messages, place=place)

    def _rendered(
        self, messages: Chat, tools: Sequence[Any] | None = None, place: str = "", hidden: Hidden | None = None
    ) -> tuple[str, Hidden]:
        """Returns the text of a conversation, and what has hidden the control words of its messages."""
        hidden = hidden or self._control.hide()
        if self._template is None:
            return hidden("".join(message["content"] for message in messages)), hidden
        may_write = {"assistant": self._answers_may_write(bool(place))}
        others = self._beyond if place else set()
        shown = [hidden(message, but=may_write.get(message.get("role", ""), others)) for message in messages]
        text = self.rendered(shown, hidden(tools), place)
        if place:
            self.check_shown(shown, hidden(tools), text, place, hidden)
        return text, hidden

    @cached_property
    def _control(self) -> ControlWords:
        """The words that no text from outside may write as tokens."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return ControlWords(
            self._tokenizer, {token.content for token in added if token.special} | self._marks | self._beyond
        )

    @cached_property
    def _words(self) -> dict[str, int]:
        """The tokens that are found in a text before all others, and their ids."""
        return {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def _marks(self) -> set[str]:
        """The words that only a template writes, around messages and at the beginning and end of texts."""
        named = {text for text in self._special.values() if text in self._words}
        written = set()
        if self._template:
            for messages in ([("user", "1")], [("system", "1"), ("user", "1"), ("assistant", "1"), ("user", "1")]):
                try:
                    text = self._template.render([{"role": role, "content": text} for role, text in messages])
                except TemplateRefused:
                    continue
                written |= set(any_of(self._words).findall(text))
        return named | self._ends | (written - tags(self._words))

    @cached_property
    def _beyond(self) -> set[str]:
        """The words whose tokens the model does not have."""
        size = self._size
        return {word for word, number in self._words.items() if size is not None and number >= size}

    @cached_property
    def _ends(self) -> set[str]:
        """The words that end answers."""
        return {word for word, number in self._words.items() if number in self.stop_tokens}

    @cached_property
    def _left_out(self) -> set[int]:
        return {self._words[word] for word in self._marks}

    @property
    def _size(self) -> int | None:
        """The number of tokens that the model has; None if its config does not say."""
        described = self._described.get("text_config")
        sizes = (described if isinstance(described, dict) else {}) | self._described
        size = sizes.get("vocab_size")
        return size if type(size) is int else None

    def _answers_may_write(self, checked: bool) -> set[str]:
        """The words that are tokens in an answer. `checked`: those that the model does not have will be refused."""
        return (self._words.keys() - self._marks) - (set() if checked else self._beyond)

    def _is_rendered(self, text: str) -> bool:
        """Whether a text begins and ends as one that a chat template has rendered."""
        first, last = self._rendering
        begun = first.match(text)
        return bool(begun) and bool(last.search(text, begun.end()))

    @cached_property
    def _rendering(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """How rendered texts begin and end: by the marks of this template or of another model's."""
        around, place = ["", ""], self._control.hide().place
        try:
            text, _ = self._rendered([{"role": "user", "content": place}])
            around = [part.strip() for part in text.split(place)]
        except ConfigError:  # it takes no message of the user alone
            pass
        own = self._marks - {self._special["unk_token"]}
        first = "|".join([*map(re.escape, filter(None, [*(own - self._ends), around[0]])), _MARK])
        last = "|".join([*map(re.escape, filter(None, [*own, around[-1]])), _LAST_MARK])
        return re.compile(rf"\s*(?:{first})"), re.compile(rf"(?:{last})\s*+\w{{0,20}}+\s*+(?:</?think>\s*+)*+\Z")

    def _check_open_end(self) -> None:
        """Raises ConfigError if the tokenizer ends every text, and so a prompt, before the answer to it."""
        if (ids := self._tokenizer.encode("1").ids) and ids[-1] in self.stop_tokens:
            raise ConfigError(
                f"model.path: {self._folder} has no chat template, and its tokenizer puts "
                f"{self._tokenizer.id_to_token(ids[-1])!r} after every text, so that answers would follow an end: save "
                "it without (its post_processor)"
            )

    def _check_known(self, ids: Sequence[int], place: str) -> None:
        if self._size is not None and ids and (largest := max(ids)) >= self._size:
            raise ConfigError(
                f"{place}: token {largest}, {printable(repr(self._tokenizer.id_to_token(largest)), 60)}, is beyond the "
                f"vocab_size={self._size} of {self._folder / 'config.json'}: the model has no such token"
            )

    def _library(self) -> tokenizers.Tokenizer:
        file = self._folder / "tokenizer.json"
        missing = f"model.path: {file} is missing; save the tokenizer as a fast one (save_pretrained)"
        try:
            library = tokenizers.Tokenizer.from_buffer(read_regular(file, MOST_TOKENIZER_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(missing) from None
        except OSError as e:
            raise ConfigError(f"model.path: cannot read {file}: {e.strerror}") from None
        except Exception as e:  # the library raises bare Exception for a broken file
            raise ConfigError(f"model.path: {file} is no tokenizer: {printable(str(e))}") from None
        library.no_truncation()
        library.no_padding()
        if getattr(library.model, "dropout", None):
            library.model.dropout = None
        return library

    def _apply_settings(self) -> None:
        """Applies what tokenizer_config.json says of tokens, as transformers does. Raises ConfigError where it has
        tokens that tokenizer.json lacks."""
        file, library = self._folder / "tokenizer_config.json", self._tokenizer
        again = "save the tokenizer again (save_pretrained)"
        listed = self._settings.get("added_tokens_decoder")
        changed = []
        for number, said in sorted(listed.items()) if isinstance(listed, dict) else ():
            token = _added(said)
            if token is None or str(library.token_to_id(token.content)) != number:
                shown = printable(repr(said), 80)
                raise ConfigError(
                    f"model.path: {file}: added token {number}, {shown}, is not in tokenizer.json: {again}"
                )
            changed.append(token)
        for name in ("bos_token", "eos_token"):
            if (text := self._special[name]) and library.token_to_id(text) is None:
                shown = printable(repr(text), 60)
                raise ConfigError(f"model.path: {file}: {name} is {shown}, no token of tokenizer.json: {again}")
        known = {token.content: token for token in library.get_added_tokens_decoder().values()}
        library.add_tokens([token for token in changed if repr(token) != repr(known.get(token.content))])

    def _stop_tokens(self) -> list[int]:
        stops = [self._tokenizer.token_to_id(self._special["eos_token"])]
        for file in ("generation_config.json", "config.json"):
            named = self._json(file).get("eos_token_id")
            stops += named if isinstance(named, list) else [named]
            if wrong := [
                stop for stop in stops if stop is not None and (type(stop) is not int or not 0 <= stop < 2**31)
            ]:
                problem = f"eos_token_id must be token ids, has {printable(repr(wrong[0]), 60)}"
                raise ConfigError(f"model.path: {self._folder / file}: {problem}")
        known = list(dict.fromkeys(stop for stop in stops if stop is not None))
        if not known:
            raise ConfigError(f"model.path: {self._folder} names no end token (eos_token or eos_token_id)")
        self._check_known(known, f"model.path: {self._folder}: end token")
        return known

    def _json(self, name: str) -> dict[str, Any]:
        file = self._folder / name
        try:
            return read_object(file) if os.path.lexists(file) else {}
        except OSError as e:
            raise ConfigError(f"model.path: cannot read {file}: {e.strerror}") from None
        except ValueError as e:
            raise ConfigError(f"model.path: {file} {e}") from None

    def _all_settings(self) -> dict[str, Any]:
        """Returns tokenizer_config.json. Where it does not list the added tokens, it is an older one: the special
        tokens then come from special_tokens_map.json, as in transformers."""
        settings = self._json("tokenizer_config.json")
        if "added_tokens_decoder" in settings:
            return settings
        named = self._json("special_tokens_map.json")
        return settings | {key: named[key] for key in (*_NAMES, *_MORE_NAMES) if key in named}

    def _named(self, key: str) -> str:
        """Returns the text of a special token, empty if the model has none."""
        token = self._settings.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if text is not None and not isinstance(text, str):
            problem = f"{key} must be a text, is {printable(repr(text), 60)}"
            raise ConfigError(f"model.path: {self._folder / 'tokenizer_config.json'}: {problem}")
        return text or ""


def _plain(prompt: str | Chat, place: str) -> str:
    if not isinstance(prompt, str):
        raise ConfigError(
            f"{place}: the prompt is a list of messages, but the model has no chat template; give it one "
            "(chat_template.jinja) or make the prompt a text"
        )
    return prompt


def _covered(encoding: tokenizers.Encoding, begin: int, end: int) -> Span | None:
    """Returns the tokens that have the characters from `begin` to `end`; None if one has characters before them too."""
    first, last = encoding.char_to_token(begin), encoding.char_to_token(end - 1)
    if not first or last is None or _characters(encoding, first - 1)[1] != begin:
        return None
    while last + 1 < len(encoding) and _characters(encoding, last + 1)[0] < end:  # of one character's bytes
        last += 1
    return first, last + 1


def _characters(encoding: tokenizers.Encoding, token: int) -> Span:
    found = encoding.token_to_chars(token)
    assert found is not None
    return found


def _opening(begun: str) -> list[str]:
    """The tags with which a prompt begins its answer."""
    opened = _OPENED.search(begun)
    return _TAG.findall(opened[0]) if opened else []


def _unrepeated(text: str, begun: str) -> str:
    """Returns an answer without the tags that its prompt ends with, if it begins with them too."""
    opened = _OPENED.search(begun)
    again = opened and re.match(r"\s*" + r"\s*".join(map(re.escape, _opening(begun))), text)
    if not opened or not again:
        return text
    rest, white = text[again.end() :], opened[0][len(opened[0].rstrip()) :]
    while white and rest.startswith(white[0]):
        rest, white = rest[1:], white[1:]
    return rest


class _Word(msgspec.Struct):
    id: int
    content: str


class _File(msgspec.Struct):
    added_tokens: list[_Word] = []


_decode_file = msgspec.json.Decoder(_File).decode


def _added(said: Any) -> tokenizers.AddedToken | None:
    """Returns a token as tokenizer_config.json describes it, None if it is no description."""
    if not isinstance(said, dict) or not isinstance(said.get("content"), str):
        return None
    return tokenizers.AddedToken(
        said["content"], **{flag: said[flag] for flag in _FLAGS if type(said.get(flag)) is bool}
    )
