"""From tokens, as they come, to what people read: text, thoughts and calls.

Nothing is said that a later token could change: neither a part of a character, nor the beginning of
a stop string, nor white space that may turn out to be the end. So what a client has got is the
beginning of what it gets, however tokens are grouped on their way.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from c2.rollout.server.protocol import FunctionSchema, Message

Kind = Literal["text", "thinking", "call"]
Decode = Callable[[Sequence[int]], str]
_INCOMPLETE = "\ufffd"  # what decoding gives for a character whose bytes are not all there


class Tokenizer(Protocol):
    """A lossless tokenizer."""

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""


class Chat(Protocol):
    """The format of a conversation.

    Attributes:
      stop: the tokens that end an assistant's turn.
      marks: the tokens that open a section inside it, with its kind; it begins as "text".
    """

    stop: Sequence[int]
    marks: Mapping[int, Kind]

    def prompt(self, messages: Sequence[Message], tools: Sequence[FunctionSchema]) -> list[int]:
        """The tokens behind which an assistant's turn is sampled.

        Raises:
          ConfigError: if the format cannot express it.
        """

    def call(self, ids: Sequence[int]) -> tuple[str, str]:
        """Name and JSON arguments of the call that a section's tokens are, as good as they are."""


class Part(NamedTuple):
    """A piece of what was said; of a call, `text` is the arguments."""

    kind: Kind
    text: str
    name: str = ""


class Text:
    """The text of tokens, up to a stop string."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        self.length = 0  # characters decoded so far
        self._decode, self._stops = decode, stops
        self._ids: list[int] = []  # a few of the newest, as context
        self._whole = 0  # of these, tokens whose characters are complete
        self._shown = ""  # text of these that `_held` has got
        self._held = ""

    def add(self, token: int) -> str:
        """What is now certain to be text."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.endswith(_INCOMPLETE):
            new = text[len(self._shown) :]
            self._ids = self._ids[self._whole :]
            self._whole, self._shown = len(self._ids), self._decode(self._ids)
            return self._say(new)
        text = text.removesuffix(_INCOMPLETE)
        new, self._shown = text[len(self._shown) :], max(self._shown, text, key=len)
        return self._say(new)

    def end(self) -> str:
        """The rest, when no more tokens come."""
        said = self._say(self._decode(self._ids)[len(self._shown) :])
        return said if self.stopped else said + self._held

    def _say(self, new: str) -> str:
        self.length += len(new)
        text = self._held + new
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text could be the beginning of a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Reader:
    """The parts of one completion.

    Without a chat format all is text, as it is. With one, text and thoughts are stripped section by
    section, a call is one part, and stop strings are not looked for in calls.

    Attributes:
      stopped: a stop string has been found; nothing comes behind it.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), chat: Chat | None = None) -> None:
        self.stopped = False
        self._decode, self._stops, self._chat = decode, stops, chat
        self._spoken: set[Kind] = set()  # of which there was a section
        self._open("text")

    @property
    def length(self) -> int:
        """Characters of the section so far, those held back included."""
        return self._text.length

    def add(self, token: int) -> list[Part]:
        """What one more token makes certain."""
        if self._chat and token in self._chat.marks:
            parts = self.end()
            if not self.stopped:
                self._open(self._chat.marks[token])
            return parts
        if self._kind == "call":
            self._call.append(token)
            return []
        parts = self._parts(self._text.add(token))
        self.stopped = self._text.stopped
        return parts

    def end(self) -> list[Part]:
        """What is certain when the section, or the completion, is over."""
        if self.stopped:
            return []
        if self._kind == "call":
            name, arguments = self._chat.call(self._call)
            return [Part("call", arguments, name)]
        parts = self._parts(self._text.end())
        self.stopped = self._text.stopped
        return parts

    def _open(self, kind: Kind) -> None:
        self._kind, self._call = kind, []
        self._text, self._blank, self._begun = Text(self._decode, self._stops), "", False

    def _parts(self, text: str) -> list[Part]:
        text = self._stripped(text) if self._chat else text
        return [Part(self._kind, text)] if text else []

    def _stripped(self, new: str) -> str:
        text = self._blank + new if self._begun else new.lstrip()
        said = text.rstrip()
        self._blank = text[len(said) :]
        if said and not self._begun:
            self._begun = True
            said = "\n" + said if self._kind in self._spoken else said
            self._spoken.add(self._kind)
        return said
