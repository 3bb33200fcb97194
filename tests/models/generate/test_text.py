"""Text from tokens: whole characters, stop strings across token boundaries, and no lost text."""

import itertools

import pytest
import torch
from refusals import refused

import polyhead as ph
from polyhead.models.generate import text as module
from polyhead.models.generate.text import generate_text, stream_text
from polyhead.models.generate.tokens import generate
from polyhead.tasks.text.tokens import Bytes


class Words:
    """Tokens are words; the first of a text has no space before it."""

    count, end = 6, None
    words = ("a", "bc", "def", "é", "x\ny", "z")

    def encode(self, text):
        return [self.words.index(word) for word in text.split(" ")] if text else []

    def decode(self, tokens):
        return " ".join(self.words[token] for token in tokens)


def model_of(count):
    torch.manual_seed(0)
    settings = ph.TransformerConfig(
        ph.Tokens(count), ph.Logits(count), dim=16, layers=1, heads=ph.Softmax(2), positions=ph.Rotary(), causal=True
    )
    return ph.Transformer(settings).eval()


@pytest.fixture
def saying(monkeypatch):
    """Text as it comes from a model that says these rows of tokens."""

    def pieces(codec, rows, prompts, stop=()):
        steps = max(map(len, rows))

        def says(model, tokens, *, steps, stop, **options):
            assert tokens == [codec.encode(prompt) or [codec.end] for prompt in prompts]
            ended = [False] * len(rows)
            for step in itertools.islice(itertools.zip_longest(*rows), steps):
                for i, token in enumerate(step):
                    ended[i] = ended[i] or token is None or token in stop
                yield [None if ended[i] else token for i, token in enumerate(step)]

        monkeypatch.setattr(module, "stream", says)
        return list(stream_text(model_of(codec.count), codec, prompts, steps=steps, stop=stop))

    return pieces


def joined(pieces):
    return ["".join(piece or "" for piece in row) for row in zip(*pieces, strict=True)]


def test_characters_come_when_they_are_complete(saying):
    text = "né €: 𝄞!"
    pieces = saying(Bytes(), [list(text.encode())], ["x"])
    assert [piece for (piece,) in pieces if piece] == list(text)
    assert joined(pieces) == [text]


def test_tokens_are_read_with_those_before_them(saying):
    """The spaces between prompt and first word, and between all words, are there; the prompt is not repeated."""
    pieces = saying(Words(), [[1, 0, 3], [5, 5, 5]], ["a def", "z"])
    assert pieces == [[" bc", " z"], [" a", " z"], [" é", " z"], ["", ""]]


def test_stop_strings_end_a_row_wherever_tokens_cut_them(saying):
    text = "ab\ncd\n\nef"
    for stop, expected in (
        ("\n\n", "ab\ncd"),
        (["\n\n", "cd"], "ab\n"),
        (["b\ncd\n", "\n"], "ab"),  # which is complete first
        (["cd", "b\ncd"], "a"),  # and of two at once the longer one
        ("f", "ab\ncd\n\ne"),
        ("\n\n\n", text),
        ("fg", text),
        ("a", ""),
    ):
        pieces = saying(Bytes(), [list(text.encode())], ["x"], stop)
        assert joined(pieces) == [expected], stop
    pieces = saying(Bytes(), [list(text.encode())], ["x"], "\n\n")
    assert [piece for (piece,) in pieces] == ["a", "b", "", "\nc", "d", "", ""]
    assert joined(saying(Words(), [[1, 4, 5]], ["a"], "x\n")) == [" bc "]
    assert joined(saying(Words(), [[1, 4, 5]], ["a"], ["x\ny", "\n"])) == [" bc x"]


def test_rows_end_each_for_itself(saying):
    pieces = saying(Bytes(), [list(b"ab;cd"), list(b"abcde"), list(b"a\x00bcd")], ["x"] * 3, ";")
    assert joined(pieces) == ["ab", "abcde", "a"]
    assert [row[0] for row in pieces[3:]] == [None] * 3
    assert [row[2] for row in pieces] == ["a", "", None, None, None, None]
    assert len(saying(Bytes(), [list(b"ab;cd"), list(b";cde")], ["x"] * 2, ";")) == 3


def test_it_is_the_text_of_the_tokens():
    model, codec, options = model_of(256), Bytes(), {"steps": 12, "top_k": 40}
    prompts = ["def f(", "né"]
    tokens = generate(
        model, [codec.encode(p) for p in prompts], stop=0, generator=torch.Generator().manual_seed(1), **options
    )
    texts = generate_text(model, codec, prompts, generator=torch.Generator().manual_seed(1), **options)
    assert texts == [codec.decode(row) for row in tokens]
    stop = texts[1][7:9]
    stopped = generate_text(model, codec, prompts, generator=torch.Generator().manual_seed(1), stop=stop, **options)
    assert stopped == [text.partition(stop)[0] for text in texts]


def test_mistakes_are_one_line():
    model, codec = model_of(256), Bytes()
    for call, message in (
        (lambda: stream_text(model, Words(), ["a"], steps=1), "the tokenizer has 6 tokens but the model .* for 256"),
        (lambda: stream_text(model, codec, ["a"], steps=1, stop=["a", ""]), "a stop string must not be empty"),
        (lambda: stream_text(model, codec, "ab", steps=1), "prompts must be a list of texts, got one text"),
        (lambda: stream_text(model_of(6), Words(), ["a", ""], steps=1), "a prompt is empty, and the tokenizer has"),
    ):
        refused(call, f"^generate: {message}")
