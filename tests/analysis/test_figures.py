"""Figures: file formats, SVG for pages, and every measured number at its position."""

import math
import xml.dom.minidom

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from refusals import refusing

from polyhead.analysis import canvas, figures

POINTS = np.random.default_rng(0).normal(size=(50, 2))


def texts(artists):
    return [artist.get_text() for artist in artists]


def one_panel(series, baselines=None, **options):
    """The axes of a figure of lines with a single panel."""
    return figures.lines([("", series, baselines or {})], x_label="x", **options).axes[0]


def line_by_label(labels):
    """The line of each label in a panel where each has one point."""
    axes = one_panel({label: {1: [0.5]} for label in labels})
    return {container.get_label(): container.lines[0] for container in axes.containers}


# --------------------------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_equal_figures_are_equal_files(tmp_path, ending, start):
    equal_figures = [figures.code_maps([("a", POINTS, np.arange(50) % 3)]) for _ in range(2)]
    files = [figures.save(figure, tmp_path / f"{i}.{ending}").read_bytes() for i, figure in enumerate(equal_figures)]
    assert files[0] == files[1]
    assert files[0].startswith(start)


def test_the_svg_of_a_page_has_its_text_as_it_is_and_inks_of_the_theme():
    panel = ("<b> $x_1$ 0.123456", np.eye(2), ["$$", "&"], ["\\$", "#24292f"])
    text = canvas.svg(figures.heat([panel]), "one")
    words = [node.firstChild.data for node in xml.dom.minidom.parseString(text).getElementsByTagName("text")]
    assert {"<b> $x_1$ 0.123456", "$$", "&", "\\$", "#24292f"} <= set(words)
    assert "fill: var(--ink, #24292f)" in text


def test_mistakes_are_one_line(tmp_path):
    point = {"HYLA": {1: [0.5]}}
    for draw, message in (
        (lambda: figures.results({"HYLA": []}), "results: every mechanism needs at least one measured score"),
        (lambda: figures.save(figures.results({"a": [0.5]}), tmp_path / "r.xyz"), "r.xyz cannot be written ("),
        (lambda: figures.heat([]), "heat: the list of panels is empty; give at least one"),
        (
            lambda: figures.heat([("a", np.zeros((2, 1)), ["x"], ["y"])]),
            "heat: (1, 1) names but values of shape (2, 1) in panel 'a'",
        ),
        (lambda: one_panel({}), "lines: every panel needs at least one series with at least one measured point"),
        (lambda: figures.lines([("", {"a": {0: [1.0]}}, {})], x_label="x", log_x=True), "must be above 0 but one is 0"),
        (lambda: one_panel(point | {"b": {1: []}}), "lines: every point needs at least one measured score"),
    ):
        with refusing(message):
            draw()


# ------------------------------------------------------------------------------------------------------- results, lines
def test_results_name_mechanisms_seeds_and_baselines():
    measured = {"Softmax": [0.5], "HYLA": [0.7, 0.8, 0.9], "Linear": [0.1, 0.2]}
    levels = {"Gaussian process": 0.78, "Exact ceiling": 1.0}
    figure = figures.results(measured, baselines=levels, errors={"Softmax": 0.05}, printed={"HYLA": (0.8, 0.1, 3)})
    axes = figure.axes[0]
    rows = ["Linear (n = 2)", "Softmax (n = 1)", "HYLA, the paper (n = 3)", "HYLA (n = 3)"]
    assert texts(axes.get_yticklabels()) == rows  # from below
    assert texts(figure.legends[0].get_texts()) == list(levels)
    bars = [tuple(container.lines[2][0].get_segments()[0][:, 0]) for container in axes.containers]
    means_and_errors = [(0.15, 0.05), (0.5, 0.05), (0.8, 0.1), (0.8, 0.1 / 3**0.5)]
    assert bars == [pytest.approx((m - e, m + e)) for m, e in means_and_errors]
    fills = {container.lines[0].get_markerfacecolor() for container in axes.containers}
    assert {"white", figures.COLOURS["HYLA"], figures.COLOURS["Softmax"]} <= fills
    lowest = figures.results({"Softmax": [0.5], "HYLA": [0.7]}, lower_is_better=True).axes[0]
    assert texts(lowest.get_yticklabels()) == ["HYLA (n = 1)", "Softmax (n = 1)"]
    diverged = figures.results({"A": [0.9], "HYLA": [0.7, float("nan")], "B": [0.5]}).axes[0]
    assert texts(diverged.get_yticklabels()) == ["B (n = 1)", "HYLA (n = 1, 1 not finite)", "A (n = 1)"]


def test_lines_go_through_means_with_the_seeds_standard_errors():
    levels = {"Gaussian process": {16: 0.1, 32: 0.3}, "Exact ceiling": 1.0}
    axes = one_panel({"HYLA": {32: [0.7, 0.8, 0.9], 16: [0.6, 0.4]}, "Softmax": {16: [0.5], 32: [0.3]}}, levels)
    hyla, softmax = axes.containers
    assert hyla.lines[0].get_xdata().tolist() == [16, 32]
    assert hyla.lines[0].get_ydata() == pytest.approx([0.5, 0.8])
    bars = [tuple(segment[:, 1]) for segment in hyla.lines[2][0].get_segments()]
    # deviations ±.1: variance .02, error sqrt(.02 / 2); deviations -.1 0 .1: variance .01, error sqrt(.01 / 3)
    assert bars == [pytest.approx((0.4, 0.6)), pytest.approx((0.8 - 0.0577, 0.8 + 0.0577), abs=1e-4)]
    assert not softmax.has_yerr
    dots = [tuple(dot) for c in axes.collections if isinstance(c, PathCollection) for dot in c.get_offsets().tolist()]
    assert sorted(dots) == [(16, 0.4), (16, 0.6), (32, 0.7), (32, 0.8), (32, 0.9)]
    process, ceiling = (line for line in axes.lines if line.get_label() in levels)
    assert (list(process.get_xdata()), list(process.get_ydata())) == ([16, 32], [0.1, 0.3])
    assert list(ceiling.get_ydata()) == [1.0, 1.0]


@pytest.mark.parametrize(("worst", "best"), [(-0.4, 0.9), (0.2, 1.1), (0.2, 0.9)])
def test_no_limit_hides_a_score(worst, best):
    low, high = one_panel({"HYLA": {16: [math.nan, worst], 32: [best, math.nan]}}, limits=(0.0, 1.02)).get_ylim()
    assert low < worst if worst < 0 else low == 0.0
    assert high > best if best > 1.02 else high == 1.02


def test_panels_share_the_vertical_axis_and_a_legend_within_the_figure():
    series = {f"a mechanism with a long name, {n}": {1: [float(n)]} for n in range(6)}
    figure = figures.lines([(name, series, {}) for name in "abc"], x_label=("heads", "steps", "skill"))
    assert [axes.get_xlabel() for axes in figure.axes] == ["heads", "steps", "skill"]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert texts(figure.legends[0].get_texts()) == list(series)
    assert figure.legends[0].get_window_extent().width <= figure.bbox.width


@pytest.mark.parametrize(("losses", "tick"), [((6.0, 0.5), "0.5"), ((5.9, 2.1), "4"), ((900.0, 0.01), "100")])
def test_a_logarithmic_axis_has_plain_numbers(losses, tick):
    """It was "$\\mathdefault{6\\times10^{0}}$", as the texts of figures are no formulas."""
    axes = one_panel({"HYLA": dict(enumerate([loss] for loss in losses))}, log_y=True)
    text = canvas.svg(axes.figure, "one")
    assert "mathdefault" not in text
    assert f">{tick}</text>" in text
    texts_of_svg = xml.dom.minidom.parseString(text).getElementsByTagName("text")
    assert all("fill: var(" in node.getAttribute("style") for node in texts_of_svg)  # black is invisible in the dark
    assert one_panel({"HYLA": {16: [0.5]}}, log_x=True).get_xlim() == (8, 32)


# ----------------------------------------------------------------------------------------------------------- heat, maps
def test_heat_draws_every_cell_under_its_name():
    values = np.array([[0.25, -0.5, np.nan], [0.001, 0.004, -0.001]])
    figure = figures.heat([("HYLA", values, ["layer 1", "layer 2"], ["1", "2", "all"])], label="drop")
    axes, bar = figure.axes
    assert texts(axes.get_xticklabels()) == ["1", "2", "all"]
    assert axes.images[0].get_array().filled(-9).tolist() == [[0.25, -0.5, -9], [0.001, 0.004, -0.001]]
    assert (axes.images[0].norm.vmin, axes.images[0].norm.vmax) == (-0.5, 0.5)
    assert texts(axes.get_yticklabels()) == ["layer 1", "layer 2"]
    colours = [(text.get_text(), text.get_color()) for text in axes.texts]
    assert colours[:2] == [(".25", "black"), ("−.50", "white")]  # they stand out from their cells
    assert texts(axes.texts[2:]) == [".00", ".00", ".00"]
    assert bar.get_ylabel() == "drop"


def test_code_maps_draw_every_point_once_and_name_their_classes():
    classes = np.arange(50) % 9
    classes[classes == 8] = 42  # alone it would look like class 0
    panels = [("by target", POINTS, POINTS[:, 0]), ("by rule", POINTS, classes)]
    figure = figures.code_maps(panels, names={"by rule": {0: "constant", 5: "sum"}})
    target, rule = (axes for axes in figure.axes if axes.get_title())
    assert len(target.collections[0].get_offsets()) == 50
    names = ["constant", *(f"class {i}" for i in range(1, 5)), "sum", *(f"class {i}" for i in (6, 7, 42))]
    assert texts(rule.get_legend().get_texts()) == names
    for i, dots in zip((*range(8), 42), rule.collections, strict=True):
        np.testing.assert_array_equal(dots.get_offsets(), POINTS[classes == i])
    styles = {(tuple(c.get_facecolor()[0]), c.get_paths()[0].vertices.tobytes()) for c in rule.collections}
    assert len(styles) == 9


# --------------------------------------------------------------------------------------------------------------- styles
@pytest.mark.parametrize(
    ("labels", "plain"),
    [
        (["Linear", "HYLA", "HYLA · lr 0.1"], ["Linear", "HYLA"]),
        (["HYLA · lr 0.3", "HYLA · lr 0.1", "Softmax 4 + HYLA 4"], ["HYLA · lr 0.3", "Softmax 4 + HYLA 4"]),
        (["Softmax + MoE", "Softmax"], ["Softmax"]),
    ],
)
def test_the_plain_variant_of_a_mechanism_keeps_its_colour(labels, plain):
    colours = {label: line.get_color() for label, line in line_by_label(labels).items()}
    assert [label for label in labels if colours[label] in figures.COLOURS.values()] == plain
    assert all(colours[label] == figures.COLOURS[label.split()[0]] for label in plain)


def test_an_untrained_network_has_the_style_of_its_model_but_dashed():
    trained, untrained = line_by_label(["HYLA + softmax", "HYLA + softmax, untrained"]).values()
    assert (trained.get_color(), trained.get_marker()) == (untrained.get_color(), untrained.get_marker())
    assert [line.get_linestyle() for line in (trained, untrained)] == ["-", "--"]
    assert [line.get_markerfacecolor() == "white" for line in (trained, untrained)] == [False, True]
