"""What codes say of a text: labels by hand; rows are those of the one probe; the script runs on a tiny model."""

import json

import numpy as np
import pytest
import torch
from refusals import refusing
from scripts import loaded

import polyhead as ph
from polyhead.analysis import capture, codes, probe, probe_text, purity, text_labels
from polyhead.analysis.language import KINDS, PLACES
from polyhead.config import Batch
from polyhead.tasks.text.tokens import Bytes

TEXT = "def add_1(a, b2):\n    return a + b2  # 17 of them\n" * 40
PLACE = range(4, 16, 4)


@pytest.fixture
def model():
    torch.manual_seed(0)
    heads, ends = (ph.Softmax(2), ph.Hyla(3)), (ph.Tokens(256), ph.Logits(256))
    return ph.Transformer(ph.TransformerConfig(*ends, dim=20, layers=2, heads=heads, causal=True)).eval()


def windows():
    ids = torch.tensor(Bytes().encode(TEXT))[: 96 * 16].view(96, 16)
    return ids[:64], ids[64:]


def texts(ids):
    return [chr(i) for i in ids]


def test_labels_by_hand():
    labels = text_labels([*"a_1 \t\n(é2345", "\0", "", "\N{REPLACEMENT CHARACTER}", " the", "re", " x."])
    kinds = (KINDS.index(kind) for kind in ("letter", "punctuation", "digit", "space", "space", "newline"))
    letter, punctuation, digit, *_ = known = [*kinds]
    wanted = [*known, punctuation, letter, *[digit] * 4, -1, -1, -1, *map(KINDS.index, ("space", "letter", "space"))]
    assert labels["this"].tolist() == wanted
    assert labels["next"].tolist() == [*wanted[1:], -1]
    assert labels["place"].tolist() == [1, 2, 3, 0, 0, 0, 0, 1, 2, 3, 3, 4, -1, -1, -1, 3, 4, 0]
    assert len(PLACES) == 5


def test_it_is_the_probe_of_every_layer(model):
    fit, held = windows()
    rows = probe_text(lambda ids: capture(model, Batch(ids, ids, None, ids, {})), fit, held, texts, places=PLACE)
    read = ("self", "previous", "input", "input, directions")
    assert {(row["layer"], row["of"]) for row in rows} == {
        *((f"layer {i}", of) for i in (1, 2) for of in read),
        ("text", "token"),
    }
    place = list(PLACE)
    for of, keys in (("self", place), ("previous", [i - 1 for i in place])):
        x, z = (
            codes(capture(model, Batch(ids, ids, None, ids, {}))[1], place, keys).flatten(0, 1).numpy()
            for ids in (fit, held)
        )
        y, w = (np.concatenate([text_labels(texts(row))["next"][place] for row in ids.tolist()]) for ids in (fit, held))
        both = np.concatenate([x, z]), np.concatenate([y, w])
        wanted = probe(*both, train=slice(0, len(x)), test=slice(len(x), len(both[0])))
        (row,) = [r for r in rows if (r["layer"], r["of"], r["target"]) == ("layer 2", of, "next")]
        assert {name: row[name] for name in wanted.scores} == wanted.scores
        assert (row["purity"], row["by_chance"]) == purity(z, w)


def test_the_reference_knows_the_token(model):
    fit, held = windows()
    rows = probe_text(lambda ids: capture(model, Batch(ids, ids, None, ids, {})), fit, held, texts, places=PLACE)
    (row,) = [row for row in rows if row["of"] == "token" and row["target"] == "this"]
    assert row["f1"] > 0.95
    assert row["purity"] is None


@pytest.mark.parametrize("places", [(0, 4), (4, 16), ()])
def test_places_that_are_not_there(model, places):
    fit, held = windows()
    with refusing("probe_text: place"):
        probe_text(lambda ids: capture(model, Batch(ids, ids, None, ids, {})), fit, held, texts, places=places)


def test_the_script_on_a_foreign_model_and_two_texts(tmp_path):
    transformers = pytest.importorskip("transformers")
    from polyhead.compat.huggingface.tokens import tokenizer_of

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=256, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt")
    tokenizer_of(Bytes()).save_pretrained(tmp_path / "gpt")
    (tmp_path / "fit.txt").write_text(TEXT)
    (tmp_path / "held.txt").write_text(TEXT[17:])
    script = loaded("benchmarks", "codes_of_language.py")
    sizes = ["--blocks", "2", "--windows", "24", "--length", "16", "--into", str(tmp_path / "found.json")]
    script.main([str(tmp_path / "gpt"), "--texts", str(tmp_path / "fit.txt"), str(tmp_path / "held.txt"), *sizes])
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["measured"]) == {"trained", "untrained"}
    assert found["command"].endswith(" ".join(sizes))
    assert (tmp_path / "found.png").exists()
    for network in found["measured"].values():
        (layer,) = network["self"]
        assert {len(network["self"][layer][target]["f1"]) for target in ("next", "place")} == {2}
