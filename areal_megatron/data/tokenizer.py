"""Text to token ids and back, from a model folder's tokenizer.json.

Imports no torch: the controller, the reward workers and the check of a config on a login node all tokenize. Chat
templates are rendered by transformers' module for them, which needs no torch either.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from areal_megatron.config import ConfigError
from areal_megatron.data.formats import Chat
from areal_megatron.errors import first_line, printable
from areal_megatron.json_input import parse_json

_ANSWER = "[answer 5f1d80ce]"
"""Placeholder for an answer whose tokens are known, rendered to find what the template puts after it."""


class Tokenizer:
    """The tokenizer and chat template of a Hugging Face model folder.

    Raises ConfigError if the folder has no usable tokenizer, no end token, or a chat template that does not parse.

    Example:
        tokenizer = Tokenizer("models/Qwen2.5-0.5B-Instruct")
        [tokens] = tokenizer.prompts(["What is 2 + 3?"])  # one user message, and the header of the answer
        tokenizer.decode(tokens, special=True)  # "<|im_start|>system…"
        tokenizer.stop_tokens  # [151645, 151643]
    """

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        file = self._folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"model.path: {file} is missing; save the tokenizer as a fast one (save_pretrained)")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises bare Exception for a broken file
            raise ConfigError(f"model.path: {file} is no tokenizer: {e}") from None
        self._settings = self._json("tokenizer_config.json")
        self._template = self._chat_template()
        self.stop_tokens = self._stop_tokens()
        """Token ids that end an answer, the tokenizer's own end token first."""

    def prompts(self, prompts: Sequence[str | Chat], places: Sequence[str] = ()) -> list[list[int]]:
        """Returns the token ids of each prompt.

        Messages are rendered by the model's chat template, and so is a text, as one user message. Without a template a
        text is tokenized unchanged. Raises ConfigError if the template refuses a prompt, or if a prompt is a list of
        messages and the model has no template; the error names the prompt by its entry in `places`.
        """
        named = zip(prompts, places or [str(self._folder)] * len(prompts), strict=True)
        if self._template is None:
            return [encoding.ids for encoding in self._tokenizer.encode_batch([_plain(*prompt) for prompt in named])]
        chats = [self._as_chat(*prompt) for prompt in named]
        return [encoding.ids for encoding in self._tokenizer.encode_batch(chats, add_special_tokens=False)]

    def responses(self, texts: list[str]) -> list[list[int]]:
        """Returns the token ids of each response, with the end token appended."""
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [[*encoding.ids, self.stop_tokens[0]] for encoding in encodings]

    @property
    def pad_token(self) -> int | None:
        """The token that fills up batches; None if the tokenizer has none, or it ends answers as well."""
        token = self._tokenizer.token_to_id(self._special("pad_token"))
        return None if token in self.stop_tokens else token

    def longest_token(self) -> int:
        """Returns an upper bound of the UTF-8 bytes of text that one token stands for. Reads the whole vocabulary."""
        return max(len(token.encode()) for token in self._tokenizer.get_vocab())

    def check_same(self, folder: str | Path, key: str) -> None:
        """Raises ConfigError, which names `key`, if the model of `folder` has other tokens than this one."""
        own, other = self._tokenizer.get_vocab(), Tokenizer(folder)._tokenizer.get_vocab()
        if own == other:
            return
        different = [token for token in own.keys() | other.keys() if own.get(token) != other.get(token)]
        example = min(different, key=lambda token: (own.get(token, other.get(token)), token))
        raise ConfigError(
            f"{key}: {folder} has another tokenizer than {self._folder}: {len(different)} tokens differ, such as "
            f"{example!r} ({other.get(example, 'missing')} and {own.get(example, 'missing')})"
        )

    def conversation(self, messages: Chat, tools: Sequence[Any] | None = None) -> list[int]:
        """Returns the token ids of a conversation, up to where the model starts its answer.

        Without a chat template the contents of the messages are concatenated. Raises ConfigError if the template
        refuses the messages.
        """
        return self._ids(self._rendered(messages, tools), special=self._template is None)

    def continuation(self, messages: Chat, answer: int, tools: Sequence[Any] | None = None) -> list[int]:
        """Returns the token ids between the content of messages[answer], an answer of the model, and its next answer.

        The first one is the end token if the template ends answers with it. Raises ConfigError if the template refuses
        the messages, or does not show the answer exactly once.
        """
        replaced = [*messages[:answer], {"role": "assistant", "content": _ANSWER}, *messages[answer + 1 :]]
        _, *after = self._rendered(replaced, tools).split(_ANSWER)
        if len(after) != 1:
            raise ConfigError(
                f"the chat template of {self._folder} shows an answer {len(after)} times when another message "
                "follows it, expected once"
            )
        return self._ids(after[0], special=False)

    def _ids(self, text: str, special: bool) -> list[int]:
        # A batch, unlike a single text, is encoded without the interpreter's lock: other threads go on.
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=special)
        return encoding.ids

    def _rendered(self, messages: Chat, tools: Sequence[Any] | None) -> str:
        if self._template is None:
            return "".join(message["content"] for message in messages)
        return self._as_chat(messages, "messages", tools)

    def decode(self, tokens: list[int], special: bool = False) -> str:
        """Returns the text of the tokens; `special` keeps special tokens in it."""
        [text] = self._tokenizer.decode_batch([tokens], skip_special_tokens=not special)
        return text

    def _as_chat(self, prompt: str | Chat, place: str, tools: Sequence[Any] | None = None) -> str:
        special = {key: self._special(key) for key in ("bos_token", "eos_token", "pad_token")}
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            [text] = _render([messages], self._template, add_generation_prompt=True, tools=tools, **special)
            return text
        except Exception as e:  # the template is the model's: it may fail in any way
            problem = " ".join(str(e).split()) or type(e).__name__
            raise ConfigError(f"{place}: the chat template of {self._folder} refuses the prompt: {problem}") from None

    def _chat_template(self) -> str | None:
        file = self._folder / "chat_template.jinja"
        try:
            source = file.read_text(encoding="utf-8") if file.is_file() else self._settings.get("chat_template")
            if isinstance(source, list):  # several named templates
                source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
            if not source:
                return None
            _render([], source)
        except (jinja2.TemplateError, RecursionError, ValueError, TypeError, KeyError, AttributeError) as e:
            raise ConfigError(
                f"model.path: {self._folder}: the chat template cannot be read: {first_line(e)}"
            ) from None
        return source

    def _stop_tokens(self) -> list[int]:
        stops = [self._tokenizer.token_to_id(self._special("eos_token"))]
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
        return known

    def _json(self, name: str) -> dict[str, Any]:
        file = self._folder / name
        try:
            found = parse_json(file.read_bytes()) if file.is_file() else {}
        except ValueError as e:
            raise ConfigError(f"model.path: {file} is not JSON: {e}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"model.path: {file} holds no JSON object")
        return found

    def _special(self, key: str) -> str:
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


def _render(chats: Sequence[Chat], template: str, **variables: Any) -> list[str]:
    # costs half a second and 25 MB, for models with a chat template only
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(chats, chat_template=template, **variables)
    return texts
