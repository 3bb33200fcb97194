"""`polyhead generate`: text appears token by token; every mistake is one line."""

import io
import json
import sys
from dataclasses import replace

import pytest
import torch

import polyhead as ph
from polyhead.cli import dispatch as cli
from polyhead.cli.generate import print_pieces
from polyhead.models.generate import text as texts
from polyhead.tasks.text.task import Text
from polyhead.tasks.text.tokens import Bytes
from polyhead.train import load_model, read_config
from polyhead.train.store.folder import Result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of one step on a page of text."""
    root = tmp_path_factory.mktemp("generate")
    (root / "text").mkdir()
    for i in range(40):
        (root / "text" / f"{i}.txt").write_text(f"def number_{i}():\n    return {i}\n\n\n" * 4)
    task = Text(data=str(root / "text"), length=32, held_out=0.1, folder=str(root / "tokens"))
    model = ph.TransformerConfig(
        *task.ends, dim=16, layers=1, heads=ph.Hyla(2), positions=ph.Rotary(), max_length=32, causal=True
    )
    train = ph.Train(steps=1, batch_size=2, warmup=1, evaluate=("iid",), eval_batches=1)
    run = ph.Run(name="tiny", task=task, model=model, train=train, device="cpu", folder=str(root / "run"))
    assert isinstance(ph.train.run(run), Result)
    return root / "run"


def ask(capfdbinary, *arguments):
    code = cli.main(["generate", *map(str, arguments)])
    out, err = capfdbinary.readouterr()
    return code, out.decode(), err.decode()


def generated(folder, prompts, *, seed, **options):
    _, model = load_model(folder)
    return texts.generate_text(model, Bytes(), prompts, generator=torch.Generator().manual_seed(seed), **options)


def test_it_writes_what_the_model_says(folder, capfdbinary, monkeypatch):
    (text,) = generated(folder, ["def "], steps=20, temperature=0.8, seed=0)
    assert ask(capfdbinary, folder, "--prompt", "def ", "--steps", 20) == (0, f"def {text}\n", "")
    code, out, err = ask(capfdbinary, folder, "--prompt", "def ", "--steps", 20, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"run": str(folder), "prompt": "def ", "text": text}
    (text,) = generated(folder, ["né\n"], steps=20, temperature=1.5, top_k=90, top_p=0.9, seed=4)
    options = ["--steps", 20, "--temperature", 1.5, "--top-k", 90, "--top-p", 0.9, "--seed", 4]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("né\n".encode())))
    assert ask(capfdbinary, folder, "--prompt", "-", *options) == (0, f"né\n{text}\n", "")
    stop = text[5]
    cut = text.partition(stop)[0]
    assert ask(capfdbinary, folder, "--prompt", "né\n", *options, "--stop", stop)[1] == f"né\n{cut}\n"


def test_text_appears_as_it_comes_and_does_not_steer_a_terminal(monkeypatch, capsys):
    printed = []

    def pieces():
        for piece in ("a", "b", None):
            yield [piece]
            printed.append(capsys.readouterr().out)

    print_pieces(pieces(), "p:")
    assert [*printed, capsys.readouterr().out] == ["p:a", "b", "", "\n"]
    print_pieces(iter([["a\x1b[2J\tb\r\n"]]), "")
    assert capsys.readouterr().out == "a\x1b[2J\tb\r\n\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_pieces(iter([["a\x1b[2J\tb\n"]]), "")
    assert capsys.readouterr().out == "a\\x1b[2J\tb\n\n"


def test_ctrl_c_ends_it_quietly(folder, capfdbinary, monkeypatch):
    def interrupted(*_, **__):
        yield ["a"]
        raise KeyboardInterrupt

    monkeypatch.setattr(texts, "stream_text", interrupted)
    assert ask(capfdbinary, folder, "--prompt", "x") == (130, "xa\n", "")


def test_mistakes_are_one_line(folder, capfdbinary, monkeypatch, tmp_path):
    fuzzy = ph.tasks.FuzzyLogic(length=6)
    run = replace(read_config(folder), folder=None)
    settings = ph.TransformerConfig(*fuzzy.ends, dim=8, layers=1, heads=ph.Hyla(2))
    for name, other in (
        ("fuzzy", replace(run, task=fuzzy, model=settings)),
        ("both", replace(run, model=replace(run.model, causal=False))),
        ("new", run),
    ):
        (tmp_path / name).mkdir()
        ph.config.save(other, tmp_path / name / "config.json")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    for arguments, message in (
        ((folder, "--prompt", "-"), "the prompt must be UTF-8 (character 3 is not)"),
        ((folder, "--prompt", "caf\udce9"), "the prompt must be UTF-8 (character 3 is not)"),
        ((tmp_path / "fuzzy", "--prompt", "a"), "the run must train on text, but tiny learns fuzzy"),
        ((tmp_path / "both", "--prompt", "a"), "the model must not see later tokens, but tiny has causal"),
        ((tmp_path / "new", "--prompt", "a"), "none at all: train it first"),
        ((tmp_path / "nothing", "--prompt", "a"), "nothing"),
    ):
        code, out, err = ask(capfdbinary, *arguments)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert message in err
    other = Bytes()
    other.digest = "other"
    monkeypatch.setattr(Text, "codec", lambda self: other)
    code, _, err = ask(capfdbinary, folder, "--prompt", "a")
    assert code == 2
    assert "but the model was trained with bytes" in err
