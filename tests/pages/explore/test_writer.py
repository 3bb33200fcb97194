"""The explore page: its numbers against the reference, the output of the command, and errors."""

import base64
import json
import math
import pathlib
import re
import shutil
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from explored import DUAL, TEXT, batch_of, model_of
from refusals import refusing

import polyhead as ph
from polyhead.analysis import capture, look
from polyhead.cli import dispatch as cli
from polyhead.pages.explore import data as explore_data, writer as explore
from polyhead.pages.explore.data import gather, visible_text
from polyhead.pages.explore.page import CODES, MORE, explore_page
from polyhead.spec import NORMALISE
from polyhead.tasks.base import Batch
from polyhead.tasks.text.tokens import Bytes


def read_page(path: pathlib.Path) -> tuple[dict[str, Any], bytes]:
    """What a page holds: its JSON and its numbers."""
    page = path.read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="explored">(.*?)</script>', page, re.S)
    numbers = re.search(r'<script type="text/plain" id="numbers">(.*?)</script>', page, re.S)
    return json.loads(data[1]), zlib.decompress(base64.b64decode(numbers[1]))


def unpacked(array: dict[str, Any], numbers: bytes, size: int) -> np.ndarray:
    """The planes of an array, `size` numbers each."""
    raw = numbers[array["start"] : array["start"] + array["planes"] * size]
    if array["signed"]:
        root = np.frombuffer(raw, dtype=np.int8).astype(float) / 127
    else:
        root = np.frombuffer(raw, dtype=np.uint8).astype(float) / 255
    return (array["limit"] * np.sign(root) * root**2).reshape(array["planes"], size)


# -------------------------------------------------------------------------------------------------------------- numbers
HIDDEN = "A mask or a window hides some pairs: they are shown as not visible, without numbers."


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 4), (False, 4), (True, 30)])
def test_all_pairs_are_those_of_the_reference(causal: bool, window: int | None, tmp_path: pathlib.Path) -> None:
    """Pairs outside a window were numbers, 0: looked at and ignored.  They are hidden."""
    model, batch = model_of((ph.Hyla(4),), DUAL, causal=causal, window=window), batch_of(TEXT[:30])
    path = explore.explore(model, TEXT[:30], Bytes(), tmp_path / "page.html", progress=False)
    page, numbers = read_page(path)
    t = len(page["tokens"])
    i, j = np.tril_indices(t) if causal else np.indices((t, t)).reshape(2, -1)
    hidden = abs(i - j) >= (window or t)
    assert page["causal"] == causal
    assert (HIDDEN in path.read_text()) == hidden.any()
    stored = 0
    for layer, expected_layer in zip(page["layers"], look(model, batch), strict=True):
        for group, expected_group in zip(layer["groups"], expected_layer.groups, strict=True):
            for name, matrices in (("code", expected_group.attention), ("relations", expected_group.relations)):
                assert (group[name] is None) == (matrices is None)
                if matrices is not None:
                    restored = unpacked(group[name], numbers, len(i))
                    np.testing.assert_allclose(restored, matrices[:, i, j], atol=group[name]["limit"] / 125)
                    assert np.abs(matrices[:, i, j]).max() > 0.5
                    stored += restored.size
            if group["symbols"]:
                restored = unpacked(group["symbols"], numbers, t * 5).reshape(-1, t, 5)
                np.testing.assert_allclose(restored, expected_group.assignments.transpose(1, 0, 2), atol=1 / 250)
                stored += restored.size
            assert (group["hidden"] is not None) == hidden.any()
            if group["hidden"]:
                start = group["hidden"]["start"]
                assert (group["hidden"]["planes"], group["hidden"]["row"]) == (1, len(i))
                assert numbers[start : start + len(i)] == hidden.astype(np.uint8).tobytes()
                stored += len(i)
    assert stored == len(numbers)


def test_a_long_text_is_cut_and_the_page_says_so(tmp_path, capsys, monkeypatch):
    model = model_of((ph.Hyla(2),), DUAL)
    whole_page, _ = read_page(explore.explore(model, TEXT[:20], Bytes(), tmp_path / "whole.html"))
    assert re.fullmatch(r"explore: \d+ kB, 20 tokens, 2 layers, 6 heads\.\n", capsys.readouterr().err)
    monkeypatch.setattr(explore, "TOKENS", 20)
    path = explore.explore(model, TEXT, Bytes(), tmp_path / "cut.html")
    message = f"Of {len(TEXT.encode())} tokens the first 20 are shown."
    assert message in capsys.readouterr().err
    assert message in path.read_text()
    assert read_page(path)[0]["layers"] == whole_page["layers"]
    monkeypatch.setattr(explore_data, "TOKENS", 7)
    taps = capture(model, batch_of(TEXT[:20]))
    assert len(gather(taps, list(TEXT[:20])).tokens) == 7
    # 2 + 4 heads and 3 relations of t (t + 1) / 2 pairs; beside them 4 heads of 5 symbols
    monkeypatch.setattr(explore_data, "NUMBERS", 9 * 15)
    explored = gather(taps, list(TEXT[:20]))
    assert (len(explored.tokens), len(explored.numbers)) == (5, 9 * 15 + 20 * 5)
    monkeypatch.setattr(explore_data, "NUMBERS", 9 * 15 - 1)
    assert len(gather(taps, list(TEXT[:20])).tokens) == 4


def test_a_foreign_mask_says_what_is_causal() -> None:
    layer = capture(model_of((ph.Softmax(2),)), batch_of("abcd"))[0]
    full = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    band = full.tril() & full.triu(-1)
    for mask, causal, size in ((full, False, 32), (full.tril(1), False, 48), (full.tril(), True, 20), (band, True, 30)):
        explored = gather([replace(layer, groups=(replace(layer.groups[0], causal=False, mask=mask),))], "abcd")
        assert (explored.causal, len(explored.numbers)) == (causal, size)  # the last: 2 heads, and what is hidden


def test_each_head_may_have_its_own_mask() -> None:
    layer = capture(model_of((ph.Softmax(2),)), batch_of("abcd"))[0]
    mask = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    mask[0, 1, :, 0] = False  # padding, for one head
    taps = [replace(layer, groups=(replace(layer.groups[0], mask=mask),))]
    explored = gather(taps, "abcd")
    place_of_hidden = explored.layers[0]["groups"][0]["hidden"]
    hidden = np.frombuffer(explored.numbers[place_of_hidden["start"] :], np.uint8).reshape(2, 10)
    assert hidden.tolist() == [[0] * 10, [1, 1, 0, 1, 0, 0, 1, 0, 0, 0]]
    assert explored.note == HIDDEN


@pytest.mark.parametrize(
    ("heads", "options", "normalised"),
    [
        (ph.Abstractor(2, act="sigmoid"), {}, ("act",)),  # the page said "the score itself"
        (ph.Abstractor(2), {}, ("softmax",)),
        (ph.Hyla(2), {"positions": ph.Alibi()}, ("rms_heads", "bias")),
        (ph.Linear(2), {}, ("identity",)),
    ],
)
def test_the_equations_of_a_page_are_those_of_its_model(heads: Any, options: dict[str, Any], normalised: tuple) -> None:
    taps = capture(model_of((heads,), **options), batch_of("abcd"))
    explored = gather(taps, "abcd")
    assert explored.normalised == normalised
    assert all((CODES | MORE)[name] in explore_page(explored).text for name in normalised)
    scaled = [replace(taps[0], groups=(replace(taps[0].groups[0], scale=1.0),))]
    assert MORE["scale"] in explore_page(gather(scaled, "abcd")).text
    assert MORE["scale"] not in explore_page(explored).text


def test_no_token_ends_a_script(tmp_path: pathlib.Path) -> None:
    taps = capture(model_of((ph.Hyla(2),)), batch_of("abc"))
    tokens = ["</script><script>hacked()</script>", "<!--<script>", "]]> &lt; \u2028 \ud800"]
    path = explore.write(taps, tokens, tmp_path / "page.html", title="</title><script>hack()</script>", progress=False)
    assert read_page(path)[0]["tokens"] == [visible_text(token) for token in tokens]
    page = path.read_text()
    assert "<script>hacked" not in page
    assert "<!--" not in page
    assert page.count("<script") == page.count("</script>") == 3


def test_tokens_can_be_seen() -> None:
    ids = Bytes().encode("é\n ")
    assert [visible_text(piece) for piece in explore.pieces(Bytes(), ids)] == ["\\xc3", "\\xa9", "⏎", "·"]
    assert set(CODES) == {*NORMALISE, "act", "own"}

    class Sentence:
        """Drops the blank a text begins with, as SentencePiece does."""

        def decode(self, tokens: list[int]) -> str:
            return "".join([" the", "x", ""][token] for token in tokens).removeprefix(" ")

        def convert_ids_to_tokens(self, token: int) -> str:
            return ["▁the", "x", "<2>"][token]

    assert explore.pieces(Sentence(), [0, 1, 2]) == [" the", "x", "<2>"]

    class ByteLevel:
        """Of bytes, called as byte-level tokenizers call them."""

        def decode(self, tokens: list[int]) -> str:
            return bytes([0x20, 0xE6, 0x97, 0xA5][token] for token in tokens).decode("utf-8", "replace")

        def convert_ids_to_tokens(self, token: int) -> str:
            return "ĠæĹ¥"[token]

    assert explore.pieces(ByteLevel(), [0, 1]) == [" ", "\N{REPLACEMENT CHARACTER}"]  # a part of a character


# ------------------------------------------------------------------------------------------------------------- mistakes
def test_mistakes_are_one_line(tmp_path: pathlib.Path) -> None:
    model, path, heads = model_of((ph.Softmax(2),), max_length=16), tmp_path / "page.html", (ph.Softmax(2),)
    of_99_tokens = ph.Transformer(ph.TransformerConfig(ph.Tokens(99), ph.Logits(99), dim=8, heads=heads, causal=True))
    vectors = ph.Transformer(ph.TransformerConfig(ph.Vectors(3), ph.Logits(2), dim=8, heads=heads))
    taps, ids = capture(model, batch_of("abcd")), torch.zeros(2, 4, dtype=torch.long)
    of_two_sequences = capture(model, Batch(ids, ids, None, torch.ones(2, 4), {}))
    group = taps[0].groups[0]
    broken = [replace(taps[0], groups=(replace(group, q=group.q * math.nan),))]
    (tmp_path / "file").write_text("")
    for call, line in (
        (lambda: explore.explore(model, "", Bytes(), path), "but is empty"),
        (lambda: explore.explore(model, "x" * 17, Bytes(), path), "at most 16 tokens, the model's context, got 17"),
        (lambda: explore.explore(of_99_tokens, "abc", Bytes(), path), "99 tokens but the text has token 99"),
        (lambda: explore.explore(vectors, "a", Bytes(), path), "must take only tokens, got Vectors"),
        (lambda: explore.write(taps, "abc", path), "layer 1 must look at the 3 tokens but has t = 4 and s = 4"),
        (lambda: explore.write(taps, [], path), "but is empty"),
        (lambda: explore.write([], "abcd", path), "at least one layer"),
        (lambda: explore.write(of_two_sequences, "abcd", path), "of one sequence, got a batch of 2"),
        (lambda: explore.write(broken, "abcd", path), "layer 1 must have finite codes"),
        (lambda: explore.write(taps, "abcd", tmp_path / "file" / "x.html"), "x.html: cannot be written (File exists)"),
    ):
        with refusing(line):
            call()
    assert not path.exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ph.Run:
    """A finished run on a small text."""
    root = tmp_path_factory.mktemp("language")
    (root / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 300)
    task = ph.tasks.Text(data=str(root / "text.txt"), length=32)
    model = ph.TransformerConfig(*task.ends, dim=8, layers=2, heads=(ph.Hyla(2),), causal=True, max_length=32)
    train = ph.Train(steps=2, batch_size=2, warmup=1, eval_batches=1, log_every=1, evaluate=("iid",))
    finished = ph.Run(name="small", task=task, model=model, train=train, device="cpu", folder=str(root / "run"))
    ph.train.run(finished, progress=False)
    return finished


def test_the_command_writes_a_page_on_a_run(run: ph.Run, tmp_path: pathlib.Path, capsys: Any) -> None:
    out = tmp_path / "new" / "page.html"
    assert cli.main(["explore", str(run.folder), "--text", "def f(a):\n", "--out", str(out), "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"explore: {out}\n"
    page, _ = read_page(out)
    assert page["tokens"] == [*"def·f(a):⏎"]
    assert [layer["groups"][0]["kind"] for layer in page["layers"]] == ["hyla", "hyla"]
    assert "What small reads" in out.read_text()


def test_runs_it_cannot_show_are_named(run: ph.Run, tmp_path: pathlib.Path) -> None:
    unfinished = pathlib.Path(shutil.copytree(str(run.folder), tmp_path / "unfinished"))
    (unfinished / "result.json").unlink()
    with refusing(f"polyhead resume {unfinished} finishes"):
        explore.explore_folder(unfinished, "a", tmp_path / "x")
    task = ph.tasks.FuzzyLogic()
    model = ph.TransformerConfig(*task.ends, dim=8, layers=1, heads=(ph.Hyla(2),), max_length=task.length)
    (tmp_path / "fuzzy").mkdir()
    ph.config.save(ph.Run(name="fuzzy", task=task, model=model), tmp_path / "fuzzy" / "config.json")
    for name, line in (("fuzzy", "must be trained on text but is on fuzzy logic"), ("nothing", "does not exist")):
        with refusing(line):
            explore.explore_folder(tmp_path / name, "a", tmp_path / "x")


# --------------------------------------------------------------------------------------------------------- Hugging Face
def test_any_causal_model_of_hugging_face(tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers")
    from polyhead.compat.huggingface.tokens import tokenizer_of

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 24, "bos_token_id": 0, "eos_token_id": 0}
    settings = transformers.GPT2Config(vocab_size=256, attn_implementation="eager", initializer_range=0.5, **sizes)
    model = transformers.GPT2LMHeadModel(settings).eval()
    model.save_pretrained(tmp_path / "gpt")
    tokenizer_of(Bytes()).save_pretrained(tmp_path / "gpt")
    path = explore.explore_folder(tmp_path / "gpt", "to be or\nnot é", tmp_path / "page.html", progress=False)
    page, numbers = read_page(path)
    assert page["tokens"][:9] == [*"to·be·or⏎"]
    assert page["causal"]
    t = len(page["tokens"])
    ids = torch.tensor([list("to be or\nnot é".encode())])
    for layer, attention in zip(page["layers"], model(ids, output_attentions=True).attentions, strict=True):
        codes = unpacked(layer["groups"][0]["code"], numbers, t * (t + 1) // 2)
        np.testing.assert_allclose(codes, attention[0].detach().numpy()[:, *np.tril_indices(t)], atol=1 / 250)
    with refusing("at most 24 tokens"):
        explore.explore_folder(tmp_path / "gpt", "x" * 25, tmp_path / "x")
    model.config.vocab_size = 99
    with refusing("must have the model's 99 tokens"):
        explore.explore(model, "abc", Bytes(), tmp_path / "x")


def test_a_notebook_shows_the_page_of_taps():
    ids = torch.tensor([[3, 1, 4]])
    taps = capture(model_of((ph.Hyla(4),)), Batch(ids, ids, None, torch.ones(1, 3), {}))
    assert explore.taps_page(taps, [7, "<b>", "c"])._repr_html_().startswith("<iframe srcdoc=")
