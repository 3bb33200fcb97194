"""Static figures: file formats, and every measured number at its position."""

import io
import itertools
import pathlib
import sys

import matplotlib.image
import numpy as np
import pytest
import scipy.spatial
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgb
from refusals import refusing

from polyhead.analysis import figures
from polyhead.papers.hyla.rows import OURS, ROWS

POINTS = np.random.default_rng(0).normal(size=(9, 2))
KINDS = {
    "results": lambda: figures.results({"HYLA": [0.7, 0.8], "Softmax": [0.6]}, baselines={"GP": 0.78}),
    "lines": lambda: figures.lines([("a", {"HYLA": {1: [0.1, 0.2], 2: [0.3]}}, {"GP": {1: 0.1}})], x_label="N"),
    "heat": lambda: figures.heat([("a", np.array([[0.1, np.nan]]), ["x"], ["y", "z"])], label="code"),
    "code_maps": lambda: figures.code_maps([("a", POINTS, np.arange(9))], names={"a": {0: "sum"}}),
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """The figures that a test draws, in order."""
    figures_of_test: list = []

    def recording(draw):
        return lambda *panels, **options: figures_of_test.append(draw(*panels, **options))

    for kind in ("results", "lines", "heat", "code_maps"):
        monkeypatch.setattr(figures, kind, recording(getattr(figures, kind)))
    return figures_of_test


def named(panels: list) -> list[str]:
    return [text.get_text() for text in panels]


def line_of(drawn: list, labels: list[str]) -> dict:
    """The lines of one panel, by label; each has one point."""
    figures.lines([("", {label: {1: [0.5]} for label in labels}, {})], x_label="")
    return {c.get_label(): c.lines[0] for c in drawn[-1].axes[0].containers}


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("kind", "ending", "start"),
    [
        ("results", "png", b"\x89PNG"),
        ("lines", "svg", b"<?xml"),
        ("heat", "pdf", b"%PDF"),
        ("code_maps", "svg", b"<?xml"),
    ],
)
def test_formats_and_repeatability(tmp_path: pathlib.Path, kind: str, ending: str, start: bytes) -> None:
    files = [figures.save(KINDS[kind](), tmp_path / f"{name}.{ending}").read_bytes() for name in ("a", "b")]
    assert files[0].startswith(start)
    assert files[0] == files[1]


def test_results_say_mechanisms_seeds_and_floors(drawn: list) -> None:
    measured = {"Softmax": [0.5], "HYLA": [0.7, 0.8, 0.9], "Linear": [0.1, 0.2]}
    floors = {"Gaussian process": 0.78}
    figures.results(measured, baselines=floors, errors={"Softmax": 0.05}, score="accuracy on unseen shapes")
    axes = drawn[0].axes[0]
    assert axes.get_xlabel() == "accuracy on unseen shapes"
    assert named(axes.get_yticklabels()) == ["Linear (n = 2)", "Softmax (n = 1)", "HYLA (n = 3)"]
    assert named(axes.texts) == ["Gaussian process"]
    bars = [container.lines[2][0].get_segments()[0][:, 0] for container in axes.containers]
    wanted = [(0.15, 0.05), (0.5, 0.05), (0.8, 0.1 / 3**0.5)]
    assert [tuple(bar) for bar in bars] == [pytest.approx((m - e, m + e)) for m, e in wanted]
    assert next(line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1) == 0.78


def test_what_a_paper_prints_is_hollow_and_below_the_own_scores(drawn: list) -> None:
    measured = {"Softmax": [0.5, 0.6], "HYLA": [0.7, 0.8, 0.9]}
    figures.results(measured, printed={"HYLA": (0.81, 0.08, 3)})
    axes = drawn[0].axes[0]
    assert named(axes.get_yticklabels()) == ["Softmax (n = 2)", "HYLA, the paper (n = 3)", "HYLA (n = 3)"]
    fills = [container.lines[0].get_markerfacecolor() for container in axes.containers]
    assert fills == [figures.COLOURS["Softmax"], "white", figures.COLOURS["HYLA"]]
    (low, high) = axes.containers[1].lines[2][0].get_segments()[0][:, 0]
    assert (low, high) == pytest.approx((0.73, 0.89))


def test_code_maps_draw_every_point_once_and_name_their_classes(drawn: list) -> None:
    points = np.random.default_rng(0).normal(size=(50, 2))
    classes = np.arange(50) % 9
    panels = [("by target", points, points[:, 0]), ("by rule", points, classes)]
    figures.code_maps(panels, names={"by rule": {0: "constant", 5: "sum"}})
    target, term = (axes for axes in drawn[0].axes if axes.get_title())
    assert [target.get_title(), term.get_title()] == ["by target", "by rule"]
    names = ["constant", *(f"class {i}" for i in range(1, 5)), "sum", *(f"class {i}" for i in range(6, 9))]
    assert named(term.get_legend().get_texts()) == names
    assert len(target.collections[0].get_offsets()) == 50
    assert [len(c.get_offsets()) for c in term.collections] == np.bincount(classes).tolist()
    looks = {(tuple(c.get_facecolor()[0]), c.get_paths()[0].vertices.tobytes()) for c in term.collections}
    assert len(looks) == 9


def test_mistakes(tmp_path: pathlib.Path) -> None:
    point = {"HYLA": {1: [0.5]}}

    def lines(*series: dict) -> None:
        figures.lines([("", one, {}) for one in series], x_label="")

    for draw, line in (
        (lambda: figures.results({"HYLA": []}), "results: every mechanism needs at least one measured score"),
        (lambda: figures.save(figures.results({"a": [0.5]}), tmp_path / "r.xyz"), "r.xyz cannot be written ("),
        (lambda: figures.code_maps([]), "code_maps: the list of panels is empty; give at least one"),
        (lambda: figures.heat([]), "heat: the list of panels is empty; give at least one"),
        (
            lambda: figures.heat([("a", np.zeros((2, 1)), ["x"], ["y"])]),
            "heat: (1, 1) names but values of shape (2, 1) in panel 'a'",
        ),
        (lambda: lines({}), "lines: every panel needs at least one series with at least one measured point"),
        (lambda: lines(point, {"HYLA": {1: []}}), "lines: every point needs at least one measured score"),
    ):
        with refusing(line):
            draw()


def test_no_global_state_of_matplotlib(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # another library may have loaded it
    figures.save(figures.results({"HYLA": [0.5]}), tmp_path / "r.png")
    assert "matplotlib.pyplot" not in sys.modules


# --------------------------------------------------------------------------------------------------------------- lines
def test_lines_go_through_means_with_the_seeds_standard_errors(drawn: list) -> None:
    series = {"HYLA": {32: [0.7, 0.8, 0.9], 16: [0.6, 0.4]}, "Softmax": {16: [0.5], 32: [0.3]}}
    figures.lines([("70 %", series, {})], x_label="examples", y_label="R²")
    axes = drawn[0].axes[0]
    hyla, softmax = axes.containers
    assert hyla.lines[0].get_xdata().tolist() == [16, 32]
    assert hyla.lines[0].get_ydata() == pytest.approx([0.5, 0.8])
    bars = [segment[:, 1] for segment in hyla.lines[2][0].get_segments()]
    # deviations ±.1: variance .02, error sqrt(.02 / 2); deviations -.1 0 .1: variance .01, error sqrt(.01 / 3)
    assert [tuple(bar) for bar in bars] == [
        pytest.approx((0.4, 0.6)),
        pytest.approx((0.8 - 0.0577, 0.8 + 0.0577), abs=1e-4),
    ]
    assert not softmax.has_yerr
    dots = [
        tuple(map(float, dot)) for c in axes.collections if isinstance(c, PathCollection) for dot in c.get_offsets()
    ]
    assert sorted(dots) == [(16, 0.4), (16, 0.6), (32, 0.7), (32, 0.8), (32, 0.9)]
    assert named(axes.get_xticklabels()) == ["16", "32"]


def test_numbers_of_long_trainings_do_not_run_together(drawn: list) -> None:
    curve = {"HYLA": {step: [0.5] for step in range(500, 13_000, 500)}}
    figures.lines([("known", curve, {}), ("unseen", curve, {})], x_label="training step", y_label="R²")
    drawn[0].savefig(io.BytesIO(), format="svg")  # which places them
    for axes in drawn[0].axes:
        assert axes.get_xlabel() == "training step"
        ticks = [tick for tick in axes.get_xticklabels() if 0 <= tick.get_position()[0] <= 13_000]
        boxes = [tick.get_window_extent() for tick in ticks]
        assert len(boxes) > 2
        assert all(right.x0 - left.x1 > left.width for left, right in itertools.pairwise(boxes))


def test_floors_are_level_or_steps_half_way_to_the_next_place(drawn: list) -> None:
    series = {"HYLA": {16: [0.5], 32: [0.6], 64: [0.7]}}
    floors = {"Gaussian process": {16: 0.1, 64: 0.3}, "Exact ceiling": 1.0}
    for log in (False, True):
        figures.lines([("", series, floors)], x_label="examples", log_x=log)
    figures.lines([("", {"HYLA": {16: [0.5]}}, floors)], x_label="examples", log_x=True)
    linear, log, single = (figure.axes[0] for figure in drawn)
    levels = [line.get_ydata() for line in single.lines if line.get_linestyle() != "-"]
    assert levels == [[0.1, 0.1], [1.0, 1.0]]  # of a place alone, a step has no half-way
    assert single.get_xlim() == (8, 32)
    for axes, places in ((linear, [[8, 24], [48, 80]]), (log, np.array([[8, 16], [32, 64]]) * 2**0.5)):
        steps = [line for line in axes.lines if line.get_linestyle() == "--"]
        assert [list(line.get_ydata()) for line in steps] == [[0.1, 0.1], [0.3, 0.3]]
        np.testing.assert_allclose([line.get_xdata() for line in steps], places)
    assert [line.get_ydata()[0] for line in linear.lines if line.get_linestyle() == ":"] == [1.0]
    assert named(drawn[0].legends[0].get_texts()) == ["HYLA", "Gaussian process", "Exact ceiling"]


@pytest.mark.parametrize(("worst", "best"), [(-0.4, 0.9), (0.2, 1.1), (float("nan"), 0.9), (0.2, 0.9)])
def test_no_limit_hides_a_score(worst: float, best: float, drawn: list) -> None:
    series = {"HYLA": {16: [0.5, worst], 32: [best, 0.6]}}
    figures.lines([("", series, {})], x_label="tokens", limits=(0.0, 1.02))
    low, high = drawn[0].axes[0].get_ylim()
    assert low < worst if worst < 0 else low == 0.0
    assert high > best if best > 1.02 else high == 1.02


def test_panels_share_the_vertical_axis_and_the_looks(drawn: list) -> None:
    panels = [
        ("a", {"HYLA": {1: [0.1]}, "MoE": {1: [0.2]}}, {}),
        ("b", {"MoE": {1: [9.0]}}, {}),
        ("c", {"new": {1: [1.0]}}, {}),
    ]
    figures.lines(panels, x_label=("heads", "steps", "skill"), columns=2, limits=(0, None))
    first, second, third, empty = drawn[0].axes
    assert [axes.get_xlabel() for axes in (first, second, third)] == ["heads", "steps", "skill"]
    assert first.get_ylim() == second.get_ylim() == third.get_ylim()
    assert first.get_ylim()[0] == 0
    assert first.containers[1].lines[0].get_color() == second.containers[0].lines[0].get_color()
    assert [axes.get_title() for axes in (first, second, third)] == ["a", "b", "c"]
    assert not empty.axison
    assert named(drawn[0].legends[0].get_texts()) == ["HYLA", "MoE", "new"]
    looks = {(c.lines[0].get_color(), c.lines[0].get_marker()) for axes in (first, third) for c in axes.containers}
    assert len(looks) == 3


def test_a_legend_is_not_wider_than_the_figure(drawn: list) -> None:
    series = {f"a mechanism with a long name, {n}": {1: [float(n)]} for n in range(6)}
    figures.lines([(name, series, {}) for name in "abc"], x_label="heads")
    (legend,) = drawn[0].legends
    assert legend.get_window_extent().width <= drawn[0].bbox.width


# ---------------------------------------------------------------------------------------------------------------- heat
def test_heat_draws_every_cell_under_its_name_and_parts_the_groups(drawn: list) -> None:
    values = np.array([[0.25, -0.5, np.nan], [0.001, 0.004, -0.001]])
    groups = ("", np.full((2, 5), 0.25), ["1", "2"], ["sum", "sum", "+1", "+1", "+1"])
    figures.heat([("HYLA", values, ["layer 1", "layer 2"], ["1", "2", "all"]), groups], label="drop")
    axes, parted, bar = drawn[0].axes
    assert list(parted.get_xticks()) == [0.5, 3.0]
    assert named(parted.get_xticklabels()) == ["sum", "+1"]
    assert [line.get_xdata()[0] for line in parted.lines] == [1.5]
    (image,) = axes.images
    assert image.get_array().filled(-9).tolist() == [[0.25, -0.5, -9], [0.001, 0.004, -0.001]]
    assert (image.norm.vmin, image.norm.vmax) == (-0.5, 0.5)
    assert named(axes.get_yticklabels()) == ["layer 1", "layer 2"]
    assert named(axes.get_xticklabels()) == ["1", "2", "all"]
    assert {(*t.get_position(), t.get_text()) for t in axes.texts} == {
        (0, 0, ".25"),
        (1, 0, "−.50"),
        (0, 1, ".00"),
        (1, 1, ".00"),
        (2, 1, ".00"),
    }
    assert bar.get_ylabel() == "drop"


def test_names_of_rows_and_columns_are_no_formulas(tmp_path: pathlib.Path) -> None:
    """A token "$$" of a LaTeX text ended the drawing of all figures of a report."""
    panel = ("head 1", np.eye(2), ["$$", "$x_$"], ["\\$", "a$b$"])
    assert figures.save(figures.heat([panel], grouped=False), tmp_path / "a.svg").stat().st_size


def test_numbers_in_cells_stand_out_from_them_and_lose_only_a_leading_zero(drawn: list) -> None:
    values = np.array([[10.25, -10.4, 100.0, 0.5, -0.5, 20.5]])
    figures.heat([("", values, ["a"], [*"uvwxyz"])])
    figures.heat([("", np.array([[-1.0, 0.0, 1.0]]), ["a"], ["x", "y", "z"])], limits=(-1, 1))
    assert named(drawn[0].axes[0].texts) == ["10.25", "−10.40", "100.00", ".50", "−.50", "20.50"]
    assert [t.get_color() for t in drawn[1].axes[0].texts] == ["white", "black", "white"]


# --------------------------------------------------------------------------------------------------------------- looks
def test_names_of_floors_do_not_lie_on_each_other(drawn: list) -> None:
    floors = {"Exact ceiling": 1.0, "Chance": 0.04, "Copy": 0.038, "Known combinations": 0.09, "Same slot": 0.6}
    figures.results({"HYLA": [0.0], "Softmax": [1.0]}, baselines=floors)
    axes = drawn[0].axes[0]
    drawn[0].canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 5
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if a.overlaps(b)]
    assert {text.get_text(): text.xy[0] for text in axes.texts} == floors
    heights = {text.get_text(): box.y0 for text, box in zip(axes.texts, boxes, strict=True)}
    assert heights["Same slot"] == heights["Copy"] == heights["Exact ceiling"]


def test_table_a1_has_a_colour_for_each_model_and_names_of_floors_side_by_side(drawn: list) -> None:
    """Its long names of rows leave the axes half of the figure."""
    floors = {"Recall": 0.335, "Gaussian process": 0.497, "Mixture": 0.625, "Exact ceiling": 0.998}
    measured = {row.label: [0.25 + 0.02 * i] for i, row in enumerate((ROWS | OURS).values())}
    figures.results(measured, baselines=floors)
    drawn[0].canvas.draw()
    axes = drawn[0].axes[0]
    assert len({container.lines[0].get_color() for container in axes.containers}) == len(measured) >= 15
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if a.overlaps(b)]


@pytest.mark.parametrize(
    ("labels", "plain"),
    [
        (["Linear", "HYLA", "HYLA · lr 0.1"], ["Linear", "HYLA"]),
        (["HYLA · lr 0.3", "HYLA · lr 0.1", "Softmax 4 + HYLA 4"], ["HYLA · lr 0.3", "Softmax 4 + HYLA 4"]),
        (["Softmax + MoE", "Softmax"], ["Softmax"]),
    ],
)
def test_the_plain_variant_of_a_mechanism_keeps_its_colour(drawn: list, labels: list[str], plain: list[str]) -> None:
    found = {label: line.get_color() for label, line in line_of(drawn, labels).items()}
    assert [label for label in labels if found[label] in figures.COLOURS.values()] == plain
    assert all(found[label] == figures.COLOURS[label.split()[0]] for label in plain)


def test_an_untrained_network_has_the_look_of_its_model_but_dashed(drawn: list) -> None:
    labels = ["HYLA", "HYLA, untrained", "HYLA + softmax", "HYLA + softmax, untrained"]
    lines = [*line_of(drawn, labels).values()]
    assert [line.get_color() for line in lines[::2]] == [line.get_color() for line in lines[1::2]]
    assert [line.get_marker() for line in lines[::2]] == [line.get_marker() for line in lines[1::2]]
    assert lines[0].get_color() != lines[2].get_color()
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-", "--"]
    assert [line.get_markerfacecolor() == "white" for line in lines] == [False, True, False, True]


def test_no_two_of_twelve_models_have_one_colour(drawn: list) -> None:
    labels = ["Softmax", "Dual attention", "Dual attention, package start", "Relational heads only", "Softmax + RoPE"]
    labels += ["Softmax + T5 bias", "CoRelNet", "PrediNet", "Abstractor", "HYLA"]
    labels[4:4] = ["Dual attention, disentangled heads", "Dual attention, RCA heads"]
    colours = [to_rgb(line.get_color()) for line in line_of(drawn, labels).values()]
    apart = [max(abs(x - y) for x, y in zip(a, b, strict=True)) for a, b in itertools.combinations(colours, 2)]
    assert len(apart) == 66
    assert min(apart) > 0.15


def test_an_image_in_front_has_its_patches_numbered(drawn):
    """The panels follow it, and equal names next to each other each have a place of their own."""
    image = np.random.default_rng(0).random((4, 6, 3))
    panel = ("head 1", np.eye(3), ["4", "4", "x"], ["4", "4", "x"])
    figures.heat([panel], numbers=False, grouped=False, picture=(image, 2, 3))
    first, second = drawn[0].axes[:2]
    np.testing.assert_array_equal(first.images[0].get_array(), image)
    assert named(first.texts) == [str(i + 1) for i in range(6)]
    places = [(int(x), int(y)) for x, y in (text.get_position() for text in first.texts)]
    assert places == [(i % 3, i // 3) for i in range(6)]
    assert named(second.get_yticklabels()) == ["4", "4", "x"]
    assert len(second.lines) == 0
    np.testing.assert_array_equal(second.images[0].get_array(), np.eye(3))
    assert (second.images[0].norm.vmin, second.images[0].norm.vmax) == (0, 1)


def test_an_image_keeps_its_colours(tmp_path):
    """A table of 256 colours changed a tenth of the pixels, by up to a fifth of the range."""
    rows, columns = np.mgrid[0:32, 0:32] / 31
    image = np.stack([rows, columns, 0.5 + 0.5 * np.sin(9 * rows * columns)], axis=-1)
    values = np.random.default_rng(0).random((16, 16))
    panel = ("head 1", values, [*"abcdefghijklmnop"], [*"abcdefghijklmnop"])
    path = figures.save(figures.heat([panel], numbers=False, grouped=False, picture=(image, 4, 4)), tmp_path / "a.png")
    drawn = np.rint(255 * matplotlib.image.imread(path)[..., :3]).astype(int)
    shown = np.stack(np.unravel_index(np.unique(drawn @ (65536, 256, 1)), (256, 256, 256)), -1) / 255
    off, _ = scipy.spatial.cKDTree(shown).query(image.reshape(-1, 3), p=np.inf)
    assert (off > 2 / 255).mean() < 0.2  # but for colours below numbers and lines
    panel = ("head 1", values[:4, :4], [*"abcd"], [*"abcd"])
    few = matplotlib.image.imread(figures.save(figures.heat([panel]), tmp_path / "b.png"))
    assert len(np.unique(few.reshape(-1, few.shape[-1]), axis=0)) <= 256
