"""Codecs: decoding restores the text, encoding is deterministic, and invalid tokenizer files are refused."""

import json
import random
import sys

import pytest

from polyhead import config
from polyhead.tasks import FuzzyLogic, Text
from polyhead.tasks.text import tokens as text_tokens
from polyhead.tasks.text.tokens import Bytes, Sentences, Subwords, Tiktoken, codec_of, existing, read

ENGLISH = ["the cat sat on the mat and the hen sat on the hat; " * 4, "naïve café, the cat again\n\n\tand again"] * 3


def any_text(count=400, seed=0):
    """Characters of all planes, and the white space that tokenizers like to change."""
    random_ = random.Random(seed)
    planes = [range(1, 128), range(128, 0x800), range(0x800, 0xD800), range(0xE000, 0x10000), range(0x10000, 0x11000)]
    drawn = [chr(random_.choice(random_.choice(planes))) for _ in range(count)]
    return "".join(drawn) + "  \n\n \t\r\n   x<|endoftext|>\u2028é"


@pytest.fixture(scope="module")
def trained():
    pytest.importorskip("tokenizers")
    return text_tokens.train(ENGLISH, 270)


def test_bytes_are_those_of_utf_8_and_any_text_comes_back():
    codec = Bytes()
    text = any_text()
    assert bytes(codec.encode(text)) == text.encode()
    assert codec.decode(codec.encode(text)) == text
    assert codec.encode_all(["a", "é"]) == [[97], [195, 169]]
    assert (codec.count, codec.end, codec.digest) == (256, 0, "bytes")
    assert codec.decode(codec.encode("\udcff")) == "\N{REPLACEMENT CHARACTER}"  # how Python holds a stray byte
    pytest.importorskip("tokenizers")
    other = Subwords(codec.to_json())  # the same tokens in a file
    assert (other.count, other.encode(text), other.decode(codec.encode(text))) == (256, codec.encode(text), text)


def test_a_trained_encoding_is_a_function_of_its_text(trained):
    again = text_tokens.train(iter(ENGLISH), 270)
    assert again.to_json() == trained.to_json()
    assert again.digest == trained.digest != text_tokens.train(ENGLISH, 269).digest
    assert (trained.count, trained.end) == (270, 0)
    text = any_text()
    assert trained.decode(trained.encode(text)) == text
    assert 0 not in trained.encode(text)  # what is written is no end
    assert trained.encode_all([text, "the"]) == [trained.encode(text), trained.encode("the")]
    assert len(trained.encode("the cat")) < 7
    assert all(isinstance(codec, text_tokens.Codec) for codec in (trained, Bytes()))
    with pytest.raises(ValueError, match=r"Text: the text gives \d+ tokens, not 5000; use tokenizer='bpe:\d+' or more"):
        text_tokens.train(ENGLISH, 5000)


def test_pieces_are_what_a_person_reads(trained):
    assert Bytes().pieces([97, 10, 195]) == ["a", "\\n", "\\xc3"]
    tokens = trained.encode("the cat\n")
    assert "".join(trained.pieces(tokens)) == "the cat\\n"
    assert trained.pieces([0, 300]) == ["<|endoftext|>", "\N{REPLACEMENT CHARACTER}"]


def test_a_tokenizer_file_neither_cuts_nor_pads(trained, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(trained.to_json())
    assert read(path).digest == trained.digest
    assert [codec and codec.count for codec in map(existing, (str(path), "bpe:270", "bytes"))] == [270, None, 256]
    parts = json.loads(trained.to_json())
    parts["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    parts["padding"] = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None}
    parts["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    path.write_text(json.dumps(parts))
    assert read(path).encode(ENGLISH[0]) == trained.encode(ENGLISH[0])
    assert read(path).digest != trained.digest


KIND = '{"kind": "sentencepiece"'


@pytest.mark.parametrize("content", ["{", "[]", "{}", KIND + "}", KIND + ', "model": "abc"}', None])
def test_what_is_no_tokenizer_says_so(content, tmp_path):
    path, reason = tmp_path / "tokenizer.json", "cannot be read" if content is None else "is no tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=rf"^Text: (tokenizer )?{path} {reason}[^\n]*$"):
        read(path)


class Encodings:
    """What `tiktoken` is without a network."""

    @staticmethod
    def list_encoding_names():
        return ["gpt2", "o200k_base"]

    @staticmethod
    def get_encoding(name):
        raise ConnectionError("HTTPSConnectionPool(host='...'): Max retries exceeded")


def test_tiktoken_without_a_network_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", Encodings)
    with pytest.raises(ValueError, match=r"tiktoken:gpt2: the vocabulary .* \(ConnectionError\); offline, 'bytes' and"):
        Tiktoken.named("gpt2")
    with pytest.raises(ValueError, match=r"no encoding 'gpt3' \(choose from gpt2, o200k_base\)"):
        Tiktoken.named("gpt3")


def test_a_tiktoken_encoding_is_kept_whole(tmp_path):
    library = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257}
    made = library.Encoding("mini", pat_str=r"\w+|\W", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 260})
    codec = Tiktoken(made)
    (tmp_path / "tokenizer.json").write_text(codec.to_json())
    again = read(tmp_path / "tokenizer.json")
    assert (again.digest, again.count, again.end) == (codec.digest, 261, 260)
    text = any_text()
    assert again.decode(again.encode(text)) == text
    assert again.encode("the") == [257]
    assert again.encode_all(["the", "a"]) == [[257], [97]]
    assert again.decode([259]) == "\N{REPLACEMENT CHARACTER}"  # a number that no token has


def test_a_sentencepiece_model_is_kept_whole(tmp_path):
    library = pytest.importorskip("sentencepiece")
    sentences = iter(["the cat sat", "a dog ran far"] * 30)
    files = {"sentence_iterator": sentences, "model_prefix": str(tmp_path / "tiny")}
    library.SentencePieceTrainer.train(**files, vocab_size=18, minloglevel=2)
    codec = read(tmp_path / "tiny.model")
    (tmp_path / "tokenizer.json").write_text(codec.to_json())
    again = read(tmp_path / "tokenizer.json")
    assert isinstance(again, Sentences)
    assert (again.digest, again.count, again.end) == (codec.digest, 18, 2)
    assert again.decode(again.encode("the cat")) == "the cat"
    assert "".join(again.pieces(again.encode("the cat"))) == " the cat"
    with pytest.raises(ValueError, match="is no SentencePiece model"):
        Sentences(b"no model")


def test_a_run_folder_is_enough_to_have_its_codec(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    data, folder = tmp_path / "text.txt", tmp_path / "run"
    data.write_text("".join(ENGLISH) * 20)
    folder.mkdir()
    model = config.TransformerConfig(config.Tokens(270), config.Logits(270), dim=8, heads=config.Softmax(1))
    run = config.Run(Text(str(data), tokenizer="bpe:270", length=16), model)
    run.task.keep(folder)
    whole = codec_of(run)
    data.unlink()
    kept = codec_of(run, folder)
    assert kept.digest == whole.digest
    assert kept.encode("the cat") == whole.encode("the cat")
    assert codec_of(Text(), folder / "none").count == 256
    other = text_tokens.train(ENGLISH, 269)
    (folder / "tokenizer.json").write_text(other.to_json())

    def refused(wanted, *given):
        with pytest.raises(ValueError, match=wanted):
            codec_of(*given)

    refused(f"tokenizer.json is {other.digest}, but the model was trained with {kept.digest}", run, folder)
    refused("the tokenizer has 256 tokens, but the model was made for 270", config.Run(Text(), model))
    refused("codec_of: FuzzyLogic is no text", FuzzyLogic())
    (folder / "data.json").write_text("{}")
    refused(r"data\.json cannot be read", run, folder)
