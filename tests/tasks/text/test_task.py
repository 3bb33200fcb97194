"""Language: windows of a row of tokens, each once per pass, and scores in bits per byte."""

import json
import lzma
import math
import zlib

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from polyhead import config
from polyhead.tasks import Text
from polyhead.tasks.record import OtherData
from polyhead.tasks.text import task as text_task
from polyhead.train import evaluate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A file of lines that are all different."""
    root = tmp_path_factory.mktemp("text")
    (root / "one.txt").write_text("".join(f"line {number} is é {number**2 % 977}\n" for number in range(1500)))
    return root


def task_of(folder, length=16, **fields):
    return Text(str(folder / "one.txt"), length=length, folder=str(folder / "cache"), **fields)


def row(task, split):
    return task._corpus.tokens[split].astype(np.int64)


# -------------------------------------------------------------------------------------------------------------- windows
def test_a_sequence_is_a_window_and_its_targets_are_one_further_on(folder):
    task = task_of(folder)
    for split in task.splits:
        text = row(task, split).astype(np.uint8).tobytes()
        batch = task.batch(split, 8, seed=0, step=0)
        assert batch.inputs.shape == batch.targets.shape == batch.scored.shape == (8, 16)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        assert batch.mask is None
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            assert bytes([*inputs.tolist(), int(targets[-1])]) in text
        assert torch.equal(batch.latents["bytes"], torch.full((8,), 16.0))
        before = batch.targets.clone()
        batch.inputs.zero_()
        assert torch.equal(batch.targets, before)  # they share no memory
    assert task.ends == (config.Tokens(256), config.Logits(256))
    sample = task.sample("iid", 20 * len(text), torch.Generator().manual_seed(0))
    assert sample.scored.all()
    windows = {text[start : start + 16] for start in range(len(text) - 16)}
    assert {bytes(tokens) for tokens in sample.inputs.unique(dim=0).tolist()} == windows  # a sample is from anywhere


def test_windows_for_training_begin_anywhere_in_the_text(folder):
    task = task_of(folder)
    tokens = row(task, "train")
    starts = task.batch("train", 20 * len(tokens), seed=3, step=0).inputs[:, :8]
    expected = np.unique(np.lib.stride_tricks.sliding_window_view(tokens[: len(tokens) - 9], 8), axis=0)
    assert np.array_equal(np.unique(starts.numpy(), axis=0), expected)


@pytest.mark.parametrize("length", [16, 7, 300])
def test_every_token_that_is_held_out_is_scored_once(length, folder):
    task, size = task_of(folder, length), 5
    for split in ("validation", "iid"):
        count, tokens = task.count(split), row(task, split)
        assert count == math.ceil((len(tokens) - 1) / length)
        batches = [task.batch(split, size, seed=9, step=step) for step in range(-(-count // size))]
        assert [len(batch.inputs) for batch in batches[:-1]] == [size] * (len(batches) - 1)
        assert sum(len(batch.inputs) for batch in batches) == count
        scored = torch.cat([batch.targets[batch.scored] for batch in batches])
        assert torch.equal(scored.sort().values, torch.from_numpy(np.sort(tokens[1:])))
        assert sum(batch.latents["bytes"].sum() for batch in batches) == len(tokens) - 1
        again = task.batch(split, size, seed=0, step=len(batches))
        assert torch.equal(again.inputs, batches[0].inputs)
        assert task.shared(split)
        if length == 16:
            windows = np.lib.stride_tricks.sliding_window_view(tokens, 16)
            inputs = torch.cat([batch.inputs for batch in batches]).numpy()
            starts = [int(np.flatnonzero((windows == window).all(axis=1))[0]) for window in inputs]
            assert starts != sorted(starts)  # a few batches say something about all of the text


# --------------------------------------------------------------------------------------------------------------- scores
def test_the_mean_over_a_split_is_its_bits_over_its_bytes(folder):
    """Whatever the length of the last window; and the standard error is that of such a mean."""
    task = task_of(folder, length=48)
    table = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    tokens = torch.from_numpy(row(task, "iid"))
    nats = F.cross_entropy(table[tokens[:-1]], tokens[1:], reduction="none")
    batch = task.batch("iid", task.count("iid"), seed=0, step=0)
    assert 0 < batch.scored.sum(1).min() < 40  # a short last window
    for parts in (1, 3):
        scores = evaluate(Bigrams(table), task, "iid", batches=1000, batch_size=9, accumulate=parts)
        assert scores["sequences"] == task.count("iid")
        assert scores["loss"] == pytest.approx(nats.mean().item(), rel=1e-6)
        assert scores["bits_per_byte"] == pytest.approx(nats.mean().item() / math.log(2), rel=1e-6)
        assert scores["perplexity"] == pytest.approx(nats.mean().exp().item(), rel=1e-6)
        correct = table[tokens[:-1]].argmax(1) == tokens[1:]
        assert scores["accuracy"] == pytest.approx(correct.double().mean().item())
    bits = task.metrics(table[batch.inputs], batch)["bits_per_byte"].double()
    sizes, n = batch.scored.sum(1).double(), len(bits)
    mean = (bits * sizes).sum() / sizes.sum()
    error = (n / (n - 1) * (sizes * (bits - mean)).square().sum()).sqrt() / sizes.sum()
    assert scores["bits_per_byte_se"] == pytest.approx(error.item(), rel=1e-6)


class Bigrams(torch.nn.Module):
    """Logits of the next byte from the last one alone."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, inputs, *, mask=None):
        return self.table[inputs]


def test_bits_of_tokens_are_spread_over_the_bytes_of_their_split(folder):
    pytest.importorskip("tokenizers")
    task = task_of(folder, tokenizer="bpe:300")
    assert task.ends == (config.Tokens(300), config.Logits(300))
    count = task.count("iid")
    batch = task.batch("iid", count, seed=0, step=0)
    bits = task.metrics(torch.zeros(count, 16, 300), batch)["bits_per_byte"]
    tokens = row(task, "iid")
    size = len(task.codec().decode(tokens.tolist()).encode()) + int((tokens[1:] == 0).sum())
    assert size == task._corpus.manifest["splits"]["iid"]["bytes"]
    expected = (len(tokens) - 1) * math.log2(300) / size
    torch.testing.assert_close(bits, torch.full((count,), expected))
    assert expected < math.log2(300)


def test_baselines_are_those_of_compressors(folder):
    task = task_of(folder)
    data = row(task, "iid")[1:].astype(np.uint8).tobytes()
    baselines = task.baselines("iid", sequences=20)
    assert baselines["zlib"].mean == pytest.approx(8 * len(zlib.compress(data, 9)) / len(data))
    assert baselines["lzma"].mean == pytest.approx(8 * len(lzma.compress(data, preset=9)) / len(data))


def test_of_a_text_that_is_too_long_compressors_pay_for_the_bytes_that_they_read(folder, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(text_task, "COMPRESSED_TOKENS", 320)
    task = task_of(folder, tokenizer="bpe:300")
    data = task.codec().decode(row(task, "iid")[1:321].tolist()).encode()
    assert task.baselines("iid")["zlib"].mean == 8 * len(zlib.compress(data, 9)) / len(data)


def test_a_tokenizer_that_loses_text_is_told_and_compressors_pay_for_what_it_loses(folder, capsys):
    """What it drops would cost no bits, but count as bytes."""
    library = pytest.importorskip("tokenizers")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.normalizer = library.normalizers.Replace(library.Regex("[a-zé ]"), "")
    tokenizer.train([str(folder / "one.txt")], library.trainers.BpeTrainer(vocab_size=200, show_progress=False))
    tokenizer.decoder = library.decoders.Fuse()
    tokenizer.save(str(folder / "digits.json"))
    task = task_of(folder, tokenizer=str(folder / "digits.json"))
    baselines = task.baselines("iid", sequences=10**6)
    printed = capsys.readouterr().err
    assert printed.count("digits.json' does not give") == 1
    assert "bits per byte may be too low" in printed
    text = task.codec().decode(row(task, "iid")[1:].tolist()).encode()
    size = task._corpus.manifest["splits"]["iid"]["bytes"]
    assert len(text) < 0.6 * size
    assert baselines["lzma"].mean == pytest.approx(8 * len(lzma.compress(text, preset=9)) / size, rel=0.01)


# ----------------------------------------------------------------------------------------------------------------- runs
def test_a_run_keeps_its_tokenizer_and_what_its_text_was(folder, tmp_path):
    pytest.importorskip("tokenizers")
    task = task_of(folder)
    for _ in range(2):
        task.keep(tmp_path)
    data = json.loads((tmp_path / "data.json").read_text())
    assert data["fingerprint"] == task.fingerprint()
    assert data["tokenizer"]["digest"] == "bytes"
    assert data["splits"]["train"]["tokens"] == len(row(task, "train"))
    assert not (tmp_path / "tokenizer.json").exists()
    with pytest.raises(OtherData, match=r"was begun with another text of .*one\.txt \(\w+, not \w+\)"):
        task_of(folder, held_out=0.1).keep(tmp_path)
    with pytest.raises(ValueError, match=r"was begun with another tokenizer of .*one\.txt \(bytes, not \w+\)"):
        task_of(folder, tokenizer="bpe:300").keep(tmp_path)
