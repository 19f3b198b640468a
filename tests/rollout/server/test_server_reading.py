"""What is read from tokens as they come, against decoding and parsing all of them at the end."""

from hypothesis import given
from hypothesis import strategies as st

from c2.agent.chat import ByteTokenizer, ChatFormat
from c2.data import tokenizer as bpe
from c2.rollout.server.reading import Reader, Text
from c2.sandbox.tools.toolset import Toolset

BYTES = ByteTokenizer()
BPE = bpe.train(["a bc €€ 😀abc\n" * 9, "bca 😀 €a ba"], 300)
TOKENIZERS = st.sampled_from([BYTES, BPE])
STOPS = st.lists(st.text("ab c€", min_size=1, max_size=4), max_size=3)


def texts(tokenizer):
    """Tokens of texts with long characters, and of texts that are cut inside one."""
    ids = st.text("ab c€😀\n").map(tokenizer.encode).map(list)
    return st.lists(ids, max_size=4).map(lambda some: [i for ids in some for i in ids])


def read(text, ids):
    """All that is said, piece by piece, up to a stop string."""
    said = []
    for token in ids:
        said.append(text.add(token))
        if text.stopped:
            return said
    return [*said, text.end()]


@given(st.data(), TOKENIZERS)
def test_pieces_make_up_the_text(data, tokenizer):
    raw = st.lists(st.integers(0, 255 if tokenizer is BYTES else tokenizer.vocab_size - 1))
    ids = data.draw(texts(tokenizer) | raw)
    text = Text(tokenizer.decode)
    assert "".join(read(text, ids)) == tokenizer.decode(ids)
    assert text.length == len(tokenizer.decode(ids))


@given(st.data(), TOKENIZERS, STOPS)
def test_a_stop_string_ends_the_text_and_no_part_of_it_leaks(data, tokenizer, stops):
    ids = data.draw(texts(tokenizer))
    prefixes = [tokenizer.decode(ids[:k]) for k in range(len(ids) + 1)]
    found = next((k for k, p in enumerate(prefixes) if any(s in p for s in stops)), None)
    final = prefixes[-1]
    if found is not None:
        final = prefixes[found]
        final = final[: min(final.find(stop) for stop in stops if stop in final)]
    text = Text(tokenizer.decode, stops)
    said = read(text, ids)
    assert "".join(said) == final and text.stopped == (found is not None)
    assert len(said) == (len(ids) + 1 if found is None else found)
    longest = max(map(len, stops), default=1)
    for k in range(1, len(said)):  # no more is held back than could begin a stop string
        certain = prefixes[k].removesuffix("\ufffd")
        assert len("".join(said[:k])) > len(certain) - longest


def test_a_stop_string_over_several_tokens():
    said = read(Text(BYTES.decode, ["<end>", "nd"]), BYTES.encode("a<e<end> b"))
    assert said == ["a", "", "", "<e", "", "", "<e"]


class Served:
    """The marks and calls of a chat format, as the server sees them."""

    def __init__(self, chat):
        self.marks, self.stop = chat.marks, chat.stop

    def call(self, ids):
        return "", BYTES.decode(ids)


MARKS = [BYTES.special(name) for name in ("assistant", "think", "call")]
SECTIONS = st.lists(st.text(" \nab€").map(BYTES.encode) | st.sampled_from(MARKS).map(lambda i: [i]))


@given(SECTIONS)
def test_parts_make_up_what_the_chat_format_parses(sections):
    chat = ChatFormat(BYTES, Toolset({}))
    ids = [token for section in sections for token in section]
    reader = Reader(BYTES.decode, (), Served(chat))
    parts = [part for token in ids for part in reader.add(token)] + reader.end()
    expected = chat.parse(ids)

    def joined(kind):
        return "".join(part.text for part in parts if part.kind == kind)

    assert (joined("text"), joined("thinking")) == (expected.text, expected.thinking)
    calls = [BYTES.decode(part) for part in _calls(ids)]
    assert [part.text for part in parts if part.kind == "call"] == calls
    assert len(calls) == len(expected.requests)


def _calls(ids):
    sections, call = [], False
    for token in ids:
        if token in MARKS:
            call = token == BYTES.special("call")
            sections += [[]] if call else []
        elif call:
            sections[-1].append(token)
    return sections


def test_stop_strings_are_looked_for_in_text_and_thoughts_but_not_in_calls():
    chat = Served(ChatFormat(BYTES, Toolset({})))
    call = [BYTES.special("call"), *BYTES.encode('f {"a": "STOP"}')]
    reader = Reader(BYTES.decode, ["STOP"], chat)
    parts = [p for token in [*call, MARKS[1], *BYTES.encode("so STO")] for p in reader.add(token)]
    assert [(part.kind, part.text) for part in parts] == [
        ("call", 'f {"a": "STOP"}'), ("thinking", "s"), ("thinking", "o"),
    ]  # fmt: skip
    assert not reader.stopped
    assert reader.add(ord("P")) == [] and reader.stopped and reader.end() == []
