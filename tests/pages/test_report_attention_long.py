"""The report's section on single inputs: which runs are shown, and how long inputs are cut."""

import dataclasses
import pathlib
from typing import Any

import numpy as np
from tests.pages.test_report_attention import GAMES, fabricate, model_of

from polyhead.analysis import look
from polyhead.analysis.probe import draws
from polyhead.pages.report import attention as report_looks
from polyhead.pages.report.attention_section import _packed, section
from polyhead.pages.report.page import STEPS, Page
from polyhead.pages.report.runs import groups, read
from polyhead.train import load_model


def test_the_first_run_of_a_mechanism_is_looked_at_with_inputs_of_its_own_seed(tmp_path: pathlib.Path) -> None:
    made = [fabricate(tmp_path, GAMES, model_of(GAMES), seed=seed) for seed in (1, 2)]
    (one,) = report_looks.looks(groups(read(made)), lambda line: None)
    assert one.entry.folder == made[0]
    _, model = load_model(made[0])
    (batch,) = draws(GAMES, "novel", 3, seed=1, purpose="look")
    for i, example in enumerate(one.examples):
        wanted = look(model, batch, sample=i)[0].groups[0].attention
        np.testing.assert_array_equal(example.layers[0].groups[0].attention, wanted)


def test_of_long_inputs_the_end_is_shown_and_less_of_it_where_there_is_much(tmp_path: pathlib.Path, monkeypatch: Any):
    (found,) = groups(read([fabricate(tmp_path, GAMES, model_of(GAMES))]))
    (whole,) = report_looks.looks([found], lambda line: None)
    section(out := Page(), [whole])
    assert "are shown" not in "".join(out.parts)
    for most, cells, examples in ((8, 3 * 480, 3), (8, 479, 1), (6, 3 * 300 - 1, 2)):
        monkeypatch.setattr(report_looks, "TOKENS", most)
        monkeypatch.setattr(report_looks, "CELLS", cells)  # 5 matrices of most by most, and most by 4 by 5 symbols
        (cut,) = report_looks.looks([found], lambda line: None)
        assert len(cut.examples) == examples
        left = most // 2 if cells == 479 else most
        out = Page()
        section(out, [cut])
        assert f"Of sequences longer than {left} tokens the last {left} are shown." in "".join(out.parts)
        for example, full in zip(cut.examples, whole.examples, strict=False):
            (layer,), (all_of,) = example.layers, full.layers
            assert layer.receivers == layer.senders == all_of.receivers[-left:]
            for part, group in zip(layer.groups, all_of.groups, strict=True):
                np.testing.assert_array_equal(part.attention, group.attention[:, -left:, -left:])
            related, symbols = layer.groups[1].relations, layer.groups[1].assignments
            np.testing.assert_array_equal(related, all_of.groups[1].relations[:, -left:, -left:])
            np.testing.assert_array_equal(symbols, all_of.groups[1].assignments[-left:])
    below = dataclasses.replace(layer.groups[1], relations=-np.abs(related))
    mapped = report_looks.maps(dataclasses.replace(layer, groups=(below,)))["relations"]
    assert [one.limit for one in mapped] == [np.abs(related).max()] * 3


def test_small_numbers_keep_their_size() -> None:
    """A limit of 1.4e-6 was written as 1e-6, and all numbers of the matrix with it."""
    values = np.array([[1.4e-6, -0.7e-6]])
    found = report_looks.Map("relation 1", values, ("a",), ("b", "c"), 1.4e-6, signed=True)
    (packed,) = _packed({"relations": [found]})["relations"]
    np.testing.assert_allclose(np.array(packed["z"]) * packed["limit"] / STEPS, values, rtol=1e-3)
