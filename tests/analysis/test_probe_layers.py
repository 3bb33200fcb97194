"""Probes of any label in every layer equal probes fitted by hand."""

import numpy as np
import pytest
import torch
from refusals import refusing

import polyhead as ph
from polyhead.analysis import codes, probe, probe_layers

B, T = 24, 5
PAIRS = [0, 2, -1], [1, 2, 0]


@pytest.fixture
def batches():
    """(taps of two layers, labels of three pairs) of two batches; a pair's label is the token its query stands on."""
    torch.manual_seed(0)
    table, layers = torch.randn(3, 8), [ph.MultiHeadAttention(8, [ph.Softmax(2), ph.Hyla(2)]) for _ in range(2)]
    found = []
    for count in (B, B // 2):
        tokens, taps = torch.randint(3, (count, T)), []
        with torch.no_grad():
            for layer in layers:
                layer(table[tokens], taps=taps)
        found.append((taps, tokens[:, PAIRS[0]]))
    return found


def split(batches):
    return [taps for taps, _ in batches], [labels for _, labels in batches]


def test_it_is_the_probe_of_every_layer_on_whole_sequences(batches):
    taps, labels = split(batches)
    labels[0][20, 1] = labels[0][0, 0] = -1  # no label
    rows = probe_layers(iter(taps), iter(labels), *PAIRS, test=0.25)
    assert [row["layer"] for row in rows] == [0, 1]
    y = torch.cat(labels).numpy()
    held = np.repeat(np.arange(36) >= 27, 3).reshape(36, 3)[y >= 0]
    for layer, row in enumerate(rows):
        x = torch.cat([codes(seen[layer], *PAIRS) for seen in taps]).numpy()[y >= 0]
        wanted = probe(x, y[y >= 0], train=~held, test=held)
        assert (row["f1"], row["chance"], row["n"], row["classes"]) == (wanted.f1, wanted.chance, 27, 3)


def test_one_pair_has_one_label_per_sequence(batches):
    taps, labels = split(batches)
    rows = probe_layers(taps, [tokens[:, 1] for tokens in labels], 2, 2)
    assert rows[0]["n"] == 18
    assert rows[0]["f1"] > rows[0]["chance"]


def test_mistakes(batches):
    taps, labels = split(batches)
    for given, share, line in (
        ((taps, labels, -1, -1), 0.5, "probe_layers: (24,) codes in batch 0 but labels of shape (24, 3)"),
        (([], [], -1, -1), 0.5, "probe_layers: taps must be of at least one batch, got none"),
        (([taps[0], taps[1][:1]], labels, *PAIRS), 0.5, "probe_layers: 2 layers in batch 0 but 1 others in batch 1"),
        ((taps, labels, *PAIRS), 1.0, "probe_layers: test must be a share between 0 and 1 but is 1.0"),
    ):
        with refusing(line):
            probe_layers(*given, test=share)
