"""The runs of language models: the papers' settings.  Those of small runs are in their digests (test_results.py)."""

import itertools
from dataclasses import replace

import pytest

import polyhead as ph
from polyhead.models.size import parameters
from polyhead.papers.language.kinds import COMPARED
from polyhead.papers.language.models import LANGUAGE, ROWS
from polyhead.papers.recipes import FIGURES, RECIPES, STUDIES

LM = {name: runs for name, runs in STUDIES.items() if FIGURES[name].paper is LANGUAGE}


def test_every_kind_of_heads_is_a_recipe():
    for row in ROWS:
        run = RECIPES[f"lm-{row}"]()
        assert (run.name, LANGUAGE.row_of(run), run.threads) == (f"lm-{row}", row, None)
        assert f"polyhead train lm-{row}" in RECIPES[f"lm-{row}"].__doc__
        if row in COMPARED:
            like = next(r for r in LM["lm-bytes"]("small") if LANGUAGE.row_of(r) == row)
            assert replace(run, name=like.name) == like
    assert {"softmax", "hyla", "dual"} <= set(COMPARED)


def test_figure_6_is_the_papers():
    runs = LM["fig-6"]("paper")
    assert {LANGUAGE.row_of(run) for run in runs} == {"softmax", "linear", "hyla"}
    assert {(run.train.lr, run.train.weight_decay) for run in runs} == set(itertools.product((1e-3, 3e-3), (0.1, 0.03)))
    run = next(run for run in runs if LANGUAGE.row_of(run) == "hyla")
    assert run.model.heads == (ph.Hyla(8, 64, 64),)
    sizes = (run.model.dim, run.model.layers, run.model.feedforward.hidden, run.model.inputs.count)
    assert sizes == (512, 6, 2048, 32_000)
    assert run.model.outputs == ph.Logits(32_000, tied=True, scaled=True)
    assert run.model.positions == ph.Rotary()
    assert (run.train.warmup, run.train.batch_size, run.train.precision) == (1000, 256, "bf16")
    assert run.train.steps * run.train.batch_size * run.task.length == pytest.approx(130e9, rel=1e-4)
    assert "TPU" in FIGURES["fig-6"].gpu


def test_dual_attention_in_language_is_the_papers():
    runs = {(run.model.dim, LANGUAGE.row_of(run)): run for run in LM["dual-lm"]("paper")}
    assert {dim for dim, _ in runs} == {1024, 1536, 2048}
    for run in runs.values():
        train = run.train
        assert train.steps * train.batch_size * run.task.length == pytest.approx(10e9, rel=1e-3)
        assert (train.batch_size * run.task.length, train.accumulate, train.precision) == (524_288, 16, "bf16")
        assert (train.lr, train.final, train.warmup, train.clip, train.betas) == (6e-4, 0.1, 715, 1.0, (0.9, 0.95))
        assert (run.model.layers, run.model.feedforward) == (24, ph.Mlp(4 * run.model.dim, "gelu_tanh", bias=False))
        assert run.train.eval_every * train.batch_size * run.task.length == pytest.approx(0.131e9, rel=0.01)
    library = ph.SymbolicAttention(count=1024, heads=8, trainable=False)
    assert runs[1024, "dual"].model.heads == (
        ph.Softmax(8, 64, 64, kv_heads=4),
        ph.Relational(8, 64, 64, kv_heads=4, relations=64, symbols=library),
    )
    assert runs[1536, "dual"].model.layer_heads(0)[0] == ph.Softmax(12, 64, 64, kv_heads=6)
    assert runs[2048, "dual"].model.layer_heads(0)[1].symbols == replace(library, count=2048, heads=16)
    assert runs[1024, "softmax"].model.heads == (ph.Softmax(16, 64, 64),)
    millions = {place: round(parameters(run.model) / 1e6) for place, run in runs.items()}
    assert [millions[dim, "dual"] for dim in (1024, 1536, 2048)] == [356, 762, 1323]
    assert [millions[dim, "softmax"] for dim in (1024, 1536, 2048)] == [354, 757, 1311]
