"""Codecs: decoding restores the text, encoding is deterministic, and invalid tokenizer files are refused."""

import json
import random

import pytest
from refusals import refused

from polyhead import config
from polyhead.tasks import Text
from polyhead.tasks.text import tokens as text_tokens
from polyhead.tasks.text.tokens import Bytes, codec_of, existing, read

ENGLISH = ["the cat sat on the mat and the hen sat on the hat; " * 4, "naïve café, the cat again\n\n\tand again"] * 3


def any_text(count=400, seed=0):
    """Characters of all planes, and the white space that tokenizers like to change."""
    random_ = random.Random(seed)
    planes = [range(1, 128), range(128, 0x800), range(0x800, 0xD800), range(0xE000, 0x10000), range(0x10000, 0x11000)]
    characters = [chr(random_.choice(random_.choice(planes))) for _ in range(count)]
    return "".join(characters) + "  \n\n \t\r\n   x<|endoftext|>\u2028é"


@pytest.fixture(scope="module")
def trained():
    pytest.importorskip("tokenizers")
    return text_tokens.train(ENGLISH, 270)


def test_bytes_are_those_of_utf_8_and_any_text_comes_back():
    codec = Bytes()
    text = any_text()
    assert bytes(codec.encode(text)) == text.encode()
    assert codec.decode(codec.encode(text)) == text
    assert (codec.count, codec.end, codec.digest) == (256, 0, "bytes")
    assert codec.decode(codec.encode("\udcff")) == "\N{REPLACEMENT CHARACTER}"  # how Python holds a stray byte


def test_a_trained_encoding_is_a_function_of_its_text(trained):
    again = text_tokens.train(iter(ENGLISH), 270)
    assert again.text == trained.text
    assert again.digest == trained.digest != text_tokens.train(ENGLISH, 269).digest
    assert (trained.count, trained.end) == (270, 0)
    text = any_text()
    assert trained.decode(trained.encode(text)) == text
    assert 0 not in trained.encode(text)  # what is written is no end
    assert trained.encode_all([text, "the"]) == [trained.encode(text), trained.encode("the")]
    with pytest.raises(ValueError, match=r"Text: the text gives \d+ tokens, not 5000; use tokenizer='bpe:\d+' or more"):
        text_tokens.train(ENGLISH, 5000)


def test_pieces_are_what_a_person_reads(trained):
    assert [Bytes().piece(token) for token in (97, 10, 195)] == ["a", "\n", "\\xc3"]
    assert "".join(trained.piece(token) for token in trained.encode("the cat\n")) == "the cat\n"
    assert trained.piece(0) == "<|endoftext|>"
    half = trained.encode("日")[0]
    assert trained.piece(half) == "\N{REPLACEMENT CHARACTER}"


def test_a_tokenizer_file_neither_cuts_nor_pads(trained, tmp_path):
    path = tmp_path / "tokenizer.json"
    parts = json.loads(trained.text)
    parts["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    parts["padding"] = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None}
    parts["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    path.write_text(json.dumps(parts))
    assert existing(str(path)).encode(ENGLISH[0]) == trained.encode(ENGLISH[0])
    assert read(path).digest != trained.digest
    path.unlink()
    refused(lambda: read(path), f"^Text: {path} cannot be read")


def test_a_run_folder_is_enough_to_have_its_codec(tmp_path):
    pytest.importorskip("tokenizers")
    data, folder = tmp_path / "text.txt", tmp_path / "run"
    data.write_text("".join(ENGLISH) * 20)
    folder.mkdir()
    model = config.TransformerConfig(config.Tokens(270), config.Logits(270), dim=8, heads=config.Softmax(1))
    run = config.Run(Text(str(data), tokenizer="bpe:270", length=16, folder=str(tmp_path / "cache")), model)
    run.task.keep(folder)
    from_text = codec_of(run, tmp_path)
    data.unlink()
    from_folder = codec_of(run, folder)
    assert from_folder.digest == from_text.digest
    assert from_folder.encode("the cat") == from_text.encode("the cat")
    other = text_tokens.train(ENGLISH, 269)
    (folder / "tokenizer.json").write_text(other.text)
    message = f"the tokenizer is {other.digest}, but the model was trained with {from_folder.digest}"
    refused(lambda: codec_of(run, folder), message)
    (folder / "data.json").write_text("[" * 100_000)
    refused(lambda: codec_of(run, folder), r"data\.json cannot be read")


def test_a_tokenizer_of_another_size_than_the_model_is_refused(tmp_path):
    model = config.TransformerConfig(config.Tokens(300), config.Logits(300), dim=8, heads=config.Softmax(1))
    refused(
        lambda: codec_of(config.Run(Text(), model), tmp_path),
        "the tokenizer has 256 tokens, but the model was made for 300",
    )
