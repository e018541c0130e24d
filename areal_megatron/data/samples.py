"""Training samples of conversations: texts as the model will see them, of which what it is to say is trained.

1. What comes before a trained message in its sample is what the chat template gives the model when it asks for this
   message, to the character.
2. Trained is the rest of the rendered message, up to the word that ends it. Where the template marks what the assistant
   says (`{% generation %}`), exactly that is trained.
3. One sample has several trained messages where each one's beginning continues the sample before it. A template that
   rewrites the past, such as one that drops earlier thinking, so gives several samples.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from areal_megatron.config import ConfigError
from areal_megatron.data.chat_template import Span
from areal_megatron.data.control_words import Hidden
from areal_megatron.data.conversations import Conversation, Message
from areal_megatron.data.tokenizer import Tokenizer

_OPENED = re.compile(r"(?:</?[A-Za-z_][\w-]*>\s*)+\Z")
"""Tags with which a template begins the answer."""
_UNCLOSED = re.compile(r"<([\w-]*(?:think|thought|reason)[\w-]*)>\s*\Z")
"""The tag with which a template has the model begin to think. Another, such as <assistant>, says who speaks."""
_TAIL = 128
"""The last characters of a question, in which these are looked for: searching takes the square of their number."""
_INLINE = re.compile(r"\s*<think>(.*?)</think>(.*)\Z", re.DOTALL)
_RESULT = "<tool_response>", "</tool_response>"
_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Where templates look for the thinking of a message."""


@dataclass(frozen=True)
class RenderedText:
    """A rendered text, of which messages are trained."""

    text: str
    """Control words from outside are hidden in it, by `hidden`."""
    hidden: Hidden
    messages: list[list[Span]]
    """The parts of the text that each trained message is."""

    def continued(self, other: RenderedText) -> RenderedText:
        """Returns a text that continues this one, with the trained messages of both."""
        done = self.messages[-1][-1][1]  # a template may mark several messages as one part
        new = [[(max(begin, done), end) for begin, end in own if end > done] for own in other.messages]
        return RenderedText(other.text, other.hidden, self.messages + new)


@dataclass(frozen=True)
class ShownConversation:
    """A conversation as a chat template gets it."""

    said: list[Message]
    """The messages of the row, with their thinking apart."""
    messages: list[Message]
    """The same for the template, with control words hidden, as in `tools`."""
    tools: list[Any] | None
    hidden: Hidden


class ConversationRenderer:
    """Makes samples of conversations by a tokenizer's chat template.

    Example:
        renderer = ConversationRenderer(tokenizer)
        conversation = conversation_of(row, "data.jsonl:1", turns="all")
        renderer.samples(conversation, "data.jsonl:1")  # one, or several where the template drops earlier thinking
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def samples(self, conversation: Conversation, where: str) -> list[RenderedText]:
        """Returns the samples of a conversation. Raises ConfigError, which names the row (`where`), for the reasons
        that `shown` and `answer` do."""
        shown = self.shown(conversation, where, self._tokenizer.hide())
        found: list[RenderedText] = []
        seen = 0
        for number in conversation.trained:
            new = self.answer(shown, number, where)
            before = shown.messages[:number]
            self._tokenizer.check_shown(before, shown.tools, new.text, where, shown.hidden, seen)
            seen = number
            if not any(new.messages):  # the template marks nothing of it, such as a call
                continue
            if found and new.text.startswith(found[-1].text):
                found[-1] = found[-1].continued(new)
            else:
                found.append(new)
        if not found:
            raise ConfigError(
                f"{where}: the chat template marks nothing of its trained messages as the assistant's: leave the row "
                "out, or give the model another chat template"
            )
        return found

    def shown(self, conversation: Conversation, where: str, hidden: Hidden) -> ShownConversation:
        """Returns a conversation as the template gets it. Raises ConfigError if there is no template, or it shows no
        tools and the row has some, or a message is rendered already."""
        if self._tokenizer.template is None:
            raise ConfigError(
                f"{where}: the row is a conversation, but the model has no chat template; give it one "
                "(chat_template.jinja), or make the prompt and the response texts"
            )
        if conversation.tools and not self._shows_tools:
            raise ConfigError(f"{where}: has tools, and the chat template shows none: say them in the system's message")
        for number, message in enumerate(conversation.messages, 1):
            self._tokenizer.check_unrendered(message["content"], f"{where}: message {number}")
        said = [self._split(message) for message in conversation.messages]
        messages = [self._tokenizer.written(self._shown(message), hidden, message["role"]) for message in said]
        return ShownConversation(said, messages, hidden(conversation.tools), hidden)

    def answer(self, shown: ShownConversation, number: int, where: str, by_marks: bool = True) -> RenderedText:
        """Returns the text of a conversation up to message `number`, from 0, of which that is trained: by the
        template's marks where it has some, unless `by_marks` is false.

        Raises ConfigError if the template refuses the messages, does not show the message's content, thinking or calls,
        or shows the messages before it otherwise than when it asks for this one.
        """
        place, marks, said, hidden = f"{where}: message {number + 1}", [], shown.said[number], shown.hidden
        if not number:
            raise ConfigError(f"{place} is the assistant's and answers nothing: begin with what it is asked")
        asked = self._tokenizer.rendered(shown.messages[:number], shown.tools, where)
        whole = self._tokenizer.rendered(shown.messages[: number + 1], shown.tools, where, asks=False, marks=marks)
        text, continues = self._continued(asked, whole, said, place, hidden)
        template = self._tokenizer.template
        if continues and by_marks and template and template.marks(shown.tools):
            own = [(begin, end) for begin, end in marks if end > max(begin, len(asked))]
        else:
            text = self._ended(text, len(asked), said)
            own = [(len(asked), len(text))]
        shown_from = min(len(asked), own[0][0]) if own else len(asked)  # a mark may begin inside what is shown
        if what := self._not_shown(said, text[shown_from:], hidden):
            raise ConfigError(
                f"{place} has {what}, and the chat template has no place for it there: take it out, or give the model "
                "another chat template"
            )
        return RenderedText(text, hidden, [own])

    def _continued(self, asked: str, whole: str, message: Message, place: str, hidden: Hidden) -> tuple[str, bool]:
        """Returns the text with the answer, and whether it is `whole`, as the template has it.

        It is another one where only the question begins the answer with a tag, or the template has no place for
        thinking but that tag.
        """
        thought = self._tokenizer.written(message.get("thinking", "").strip(), hidden)
        tail = max(0, len(asked) - _TAIL)
        opened, tag = _OPENED.search(asked, tail), _UNCLOSED.search(asked, tail)
        begin = len(asked) if whole.startswith(asked) else opened.start() if opened else -1
        if begin < 0 or not whole.startswith(asked[:begin]):
            raise ConfigError(
                f"{place} is answered after another text than the chat template shows before it: what the model would "
                "be trained on is not what it will see"
            )
        if thought and not tag and begin < len(asked):
            raise ConfigError(
                f"{place} has thinking, and the chat template asks for an answer without any: take it out, or give the "
                "model another chat template"
            )
        rest = whole[begin:]
        is_missing = bool(tag and thought and self._not_shown(message, rest, hidden))
        if begin == len(asked) and not is_missing:
            return whole, True
        if not tag or rest.lstrip().startswith(f"</{tag[1]}>"):
            return asked + (thought if is_missing else "") + rest, False
        return f"{asked}{thought}\n</{tag[1]}>\n\n{rest}", False

    def _ended(self, text: str, begin: int, message: Message) -> str:
        """Returns the text up to the word that ends the answer, which begins at `begin`; with it if it is missing."""
        if (end := self._tokenizer.answer_end(text)) > begin:
            return text[:end]
        return text + self._tokenizer.next_words["tool" if message.get("tool_calls") else "user"]

    def _not_shown(self, message: Message, answer: str, hidden: Hidden) -> str:
        """Returns what of a message is not in the text that is trained: its thinking, content and calls, in this order,
        since thinking may have the words of the content."""
        thought, at = message.get("thinking", ""), 0
        said = [("thinking", thought), ("content", message["content"])]
        called = [call["function"]["name"] for call in message.get("tool_calls", [])]
        for what, text in [*said, *((f"a call of {name!r}", name) for name in called)]:
            written = self._tokenizer.written(text.strip(), hidden)
            found = answer.find(written, at)
            if found < 0:
                return "thinking" if thought and not self._form else what
            at = found + len(written)
        return ""

    def _split(self, message: Message) -> Message:
        """Returns a message without what the template writes too: an end token after an answer, and tags around a
        tool's result. Thinking with which an answer begins is apart, if the template knows of thinking."""
        begin, end = _RESULT
        said = message["content"].strip()
        if message["role"] == "tool" and said.startswith(begin) and said.endswith(end) and self._says(begin):
            return message | {"content": said.removeprefix(begin).removesuffix(end).strip()}
        if message["role"] == "assistant":
            message = message | {"content": self._tokenizer.unended(message["content"])}
        inline = _INLINE.match(message["content"]) if message["role"] == "assistant" else None
        if not inline or message.get("thinking") or not self._says_think:
            return message
        return message | {"thinking": inline[1].strip("\n"), "content": inline[2].lstrip("\n")}

    def _shown(self, message: Message) -> dict[str, Any]:
        """Returns a message with its thinking where the template looks for it."""
        thought = message.get("thinking")
        rest = {key: value for key, value in message.items() if key != "thinking"}
        return self._with_thought(rest, thought, self._form) if thought else rest

    @staticmethod
    def _with_thought(message: Message, thought: str, form: str) -> dict[str, Any]:
        if form == "keys":
            return message | dict.fromkeys(_KEYS, thought)
        if form == "content":
            return message | {"content": f"<think>\n{thought.strip()}\n</think>\n\n{message['content']}"}
        return message

    @cached_property
    def _form(self) -> str:
        """Where the template takes the thinking of a message from: `keys` or `content`; empty: nowhere."""
        for form in ("keys", "content") if self._says_think else ("keys",):
            place = self._tokenizer.hide().place
            answer = self._with_thought({"role": "assistant", "content": "1"}, place, form)
            if place in self._rendered([{"role": "user", "content": "1"}, answer]):
                return form
        return ""

    def _says(self, word: str) -> bool:
        return self._tokenizer.template is not None and self._tokenizer.template.says(word)

    @cached_property
    def _says_think(self) -> bool:
        return self._says("think>")

    @cached_property
    def _shows_tools(self) -> bool:
        place = self._tokenizer.hide().place
        function = {"name": place, "description": "1", "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": function}]
        return place in self._rendered([{"role": "user", "content": "1"}], tools)

    def _rendered(self, messages: Sequence[Message], tools: list[Any] | None = None) -> str:
        """Returns the text of a conversation, empty if the template refuses it."""
        try:
            return self._tokenizer.rendered(messages, tools, "", asks=False)
        except ConfigError:
            return ""
