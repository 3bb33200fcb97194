"""benchmarks/on_card.py on a CPU: every slice in tiny sizes; what it does when it is cut off or something is red."""

import importlib
import json
import pathlib
import stat

import pytest
import torch

from polyhead.ops import cards

pytestmark = pytest.mark.skipif(not cards.INTERPRETED, reason="needs triton's interpreter")
FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def on_card(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("POLYHEAD_TRITON", "check")
    return importlib.import_module("on_card")


def rows(folder, number):
    return [json.loads(line) for line in (folder / f"slice-{number}.jsonl").read_text().splitlines()]


@pytest.mark.campaign
@pytest.mark.compile
def test_every_slice_runs_and_is_reported(on_card, tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho ERROR SUMMARY: 0 errors\n")
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    folder = tmp_path / "rows"
    assert on_card.main(["--all", "--dry-run", "--repeats", "1", "--json", str(folder)]) == on_card.FINISHED
    found = {number: rows(folder, number) for number in on_card.ORDER}
    assert [len(found[number]) for number in sorted(found)] == [3, 3, 3, 5, 2, 4, 3]
    assert all("error" not in row for all_ in found.values() for row in all_)
    assert [row["key"] for row in found[1]] == ["hyla, fp32", "relational, r 1, fp32", "linear, tf32"]
    assert {"triton", "reference", "stock"} <= {*found[3][1]["sides"]}
    assert found[2][0]["tail"] == ["ERROR SUMMARY: 0 errors"]
    text = (folder / "report.md").read_text()
    assert all(f"## {number}. " in text for number in on_card.ORDER)
    assert "| hyla d 64, t 16, fp32, forward |" in text
    assert "('hyla', 'fp32', False): {" in text
    assert (folder / "slice-3.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("triton", "numpy", "runs"), [((3, 6), "2.4.0", False), ((3, 6), "2.3.5", True), ((3, 7), "2.5.5", True)]
)
def test_an_interpreter_too_old_for_numpy_is_named(on_card, faked, monkeypatch, capsys, tmp_path, triton, numpy, runs):
    faked()
    monkeypatch.setattr(on_card.cards, "VERSION", triton)
    monkeypatch.setattr(on_card.np, "__version__", numpy)
    assert go(on_card, tmp_path) == (on_card.FINISHED if runs else on_card.ERROR)
    told = f"interprets the kernels, for which triton 3.6 wants NumPy 2.3 or older, not {numpy}\n"
    assert capsys.readouterr().out.endswith(told) != runs


def side_by_side(op, d, t, s, way, triton, **others):
    taken = {"triton": triton, "stock": 0.1, **others}
    sides = {name: {"ms": ms} if ms else {"skipped": "no room"} for name, ms in taken.items()}
    return {"key": "", "op": op, "d": d, "t": t, "s": s, "dtype": "bf16", "pass": way, "sides": sides}


def test_the_record_of_a_card_says_from_where_on_kernels_are_faster(on_card):
    """Faster than all that computes the same, in both passes, at that length and at all larger ones."""
    rows = [
        *(side_by_side("hyla", 64, t, t, "forward", 1.0, blocked=2.0, reference=3.0) for t in (512, 2048, 1024)),
        *(side_by_side("hyla", 64, t, t, "both", 1.0, blocked=2.0 if t > 512 else 0.9) for t in (2048, 512, 1024)),
        side_by_side("hyla", 32, 512, 512, "forward", 0, blocked=1.0),
        *(side_by_side("hyla", 64, 1, 4096, "forward", ms, blocked=2.0) for ms in (1.0, 3.0)),
        side_by_side("hyla", 64, 1, 32768, "forward", 1.0, blocked=2.0),
        {"key": "plain product", "tflops": 3.0},
    ]
    wanted = {("hyla", "bf16", False): {64: 1024, 32: None}, ("hyla", "bf16", True): {64: 32768}}
    assert on_card.report.faster(rows) == wanted


@pytest.fixture
def faked(on_card, monkeypatch):
    """Slice 1 with three cheap rows, of which `calls` tells."""
    calls = []

    def make(**changes):
        def run(name):
            calls.append(name)
            if isinstance(changes.get(name), Exception):
                raise changes[name]
            return changes.get(name, {"errors": [0.0], "reference": [0.0], "first": 0.0, "second": 0.0})

        items = [on_card.Item(name, lambda name=name: run(name)) for name in ("a", "b", "c")]
        monkeypatch.setattr(on_card.slices, "SLICES", {1: lambda setting: iter(items)})
        return calls

    return make


def go(on_card, folder, *more):
    return on_card.main(["--slice", "1", "--dry-run", "--json", str(folder), *more])


def test_it_goes_on_after_the_last_whole_row(on_card, faked, tmp_path):
    calls = faked()
    assert go(on_card, tmp_path) == on_card.FINISHED
    path = tmp_path / "slice-1.jsonl"
    path.write_text(path.read_text()[:-9])
    assert go(on_card, tmp_path) == on_card.FINISHED
    assert calls == ["a", "b", "c", "c"]
    assert [row["key"] for row in rows(tmp_path, 1)] == ["a", "b", "c"]


def test_the_first_red_row_stops_it_and_the_inputs_are_kept(on_card, faked, tmp_path):
    red = {"errors": [0.5], "reference": [0.1], "first": 0.0, "second": 0.0, "red": [0], "inputs": torch.ones(3)}
    calls = faked(b=red)
    assert go(on_card, tmp_path) == on_card.RED
    assert calls == ["a", "b"]
    assert torch.load(tmp_path / "red-1.pt").equal(torch.ones(3))
    assert "inputs" not in rows(tmp_path, 1)[1]
    assert go(on_card, tmp_path) == on_card.RED  # of the row that is there
    assert calls == ["a", "b", "c"]


def test_any_other_error_is_a_row_and_the_rest_goes_on(on_card, faked, tmp_path):
    calls = faked(a=KeyError("who"), b=torch.OutOfMemoryError("much"))
    assert go(on_card, tmp_path) == on_card.ERROR
    assert calls == ["a", "b", "c"]
    first, second, _ = rows(tmp_path, 1)
    assert (first["error"], second["skipped"]) == ("KeyError: 'who'", "out of memory")
    assert go(on_card, tmp_path) == on_card.ERROR


def test_it_stops_when_its_minutes_are_over(on_card, faked, tmp_path):
    calls = faked()
    assert go(on_card, tmp_path, "--minutes", "-1") == on_card.UNFINISHED
    assert not calls
    (tmp_path / "slice-1.jsonl").write_text('{"key": "a", "red": [0]}\n')
    assert go(on_card, tmp_path, "--minutes", "-1") == on_card.RED  # of the row that is there


@pytest.mark.parametrize("count", [1, 2])
def test_what_a_process_does_once_is_not_in_the_step_of_a_population(on_card, monkeypatch, count):
    slices, now = on_card.slices, [0.0]

    def trained(runs, *_, **__):
        run = runs[0] if isinstance(runs, list) else runs
        now[0] += (0.0 if now[0] else 50.0) + 0.2 * run.train.steps  # 50 seconds: kernels are compiled, and so on

    monkeypatch.setattr(slices, "train", trained)
    monkeypatch.setattr(slices.population, "train", trained)
    monkeypatch.setattr(slices.time, "perf_counter", lambda: now[0])
    row = slices.grown("hyla", count, on_card.Setting(torch.device("cpu"), True, 1))
    assert row["ms_a_step"] == pytest.approx(200)
    assert row["ms_a_step_and_member"] == pytest.approx(200 / count)


def test_a_kernel_that_is_off_is_red(on_card, monkeypatch):
    case = importlib.import_module("card.case")
    setting = case.Setting(torch.device("cpu"), True, 1)
    shape = case.Shape("hyla", b=1, t=3, s=3, h=2, g=2, d=4, options=(("causal", True), ("act", "identity")))
    assert "red" not in case.parity(shape, "fp32", setting, impl="blocked")
    right = case.both

    def off(op, impl, *rest):
        out = right(op, impl, *rest)
        return [x * 1.001 if impl == "blocked" and n == 1 else x for n, x in enumerate(out)]

    monkeypatch.setattr(case, "both", off)
    row = case.parity(shape, "fp32", setting, impl="blocked")
    assert row["red"] == [1]
    assert row["inputs"]["shape"] == shape


def test_distances_are_those_of_a_tensor_and_of_its_worst_row(on_card):
    case = importlib.import_module("card.case")
    x, y = torch.tensor([[3.0, 4.0], [0.0, 12.0]]), torch.zeros(2, 2, dtype=torch.float64)
    assert case.distances(x, y) == (13, 12)
    assert case.distances(x * torch.nan, y)[0] == torch.inf
    assert case.farthest([[x], [2 * x]], [y]) == [(26, 24)]


@pytest.mark.parametrize("kind", ["bf16", "tf32"])
def test_of_what_is_0_by_cancellation_roundings_are_the_yardstick(on_card, kind):
    """One key: the gradient of the scores is 0, in the reference too; a kernel's is a difference of roundings."""
    case = importlib.import_module("card.case")
    shape = case.Shape("relational", b=1, t=3, s=1, h=2, g=2, d=4, r=2, options=(("relation_act", "identity"),))
    made, options = case.tensors(shape, torch.bfloat16, torch.device("cpu"))
    made = [x.double() for x in made]
    dout = torch.ones(1, 3, 2, 4).double()
    exact = case.both("relational", "reference", made, options, dout)
    moved = case.farthest(case.rounded("relational", kind, made, options, dout), exact)
    assert exact[1].norm() < 1e-12
    assert 1e-4 < moved[1][0] < 1


def test_tf32_cuts_the_factors_of_a_product_with_one_term(on_card, monkeypatch):
    """One query and one key: what a card makes of it is green, and what is a little farther off is red."""
    case = importlib.import_module("card.case")
    setting = case.Setting(torch.device("cpu"), True, 1)
    shape = case.Shape("relational", b=1, t=1, s=1, h=1, g=1, d=8, r=2, options=(("relation_act", "identity"),))
    right, gradient, scale = case.both, 5, 1.0  # of the symbols: that of the output, times a weight of 1

    def card(op, impl, *rest):
        out = right(op, impl, *rest)
        return [cut(x) * scale if impl == "blocked" and n == gradient else x for n, x in enumerate(out)]

    def cut(x):
        return (x.view(torch.int32) & -0x2000).view(torch.float32)

    monkeypatch.setattr(case, "both", card)
    assert "red" not in case.parity(shape, "tf32", setting, impl="blocked")
    scale = 1.003
    assert case.parity(shape, "tf32", setting, impl="blocked")["red"] == [gradient]
