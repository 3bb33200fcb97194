"""`polyhead bench`: its output, refusal of invalid options, and skipping of what does not fit into memory."""

import functools
import importlib
import json
import pathlib
import shlex
import subprocess
import sys
import time
from typing import Any

import pytest
import scipy.stats
import torch
from commands import mistake
from compilers import IMPLS

from polyhead.cli import dispatch as cli
from polyhead.ops.dispatch import BACKENDS, resolve
from polyhead.timing import measure as bench, sides as bench_sides
from polyhead.timing.options import Options
from polyhead.timing.sides import PASSES

DRAW = bench.draw
SMALL = "--heads 2 --dim 4 --relations 2 --repeats 2"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Parity and the probe of memory at a few tokens, in an empty folder; no figures, no interpreter of kernels."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(bench, "SMALL", 9)
    monkeypatch.setattr(bench, "PROBE", 4)
    monkeypatch.setattr(bench, "draw", lambda *given: None)


def ask(command: str) -> int:
    return cli.main(["bench", *shlex.split(command)])


def measured(op: str, command: str) -> dict[str, Any]:
    """The result that the command wrote; it must succeed."""
    assert ask(f"{op} {command}") == 0
    return json.loads((pathlib.Path("runs/bench") / f"{op}.json").read_text())


def rows(result: dict[str, Any]) -> dict[tuple[int, str, str], dict[str, Any]]:
    return {(row["t"], row["side"], row["pass"]): row for row in result["rows"]}


# ------------------------------------------------------------------------------------------------------------ the whole
@pytest.mark.thinned(3)
@pytest.mark.parametrize("op", BACKENDS)
def test_the_whole_command(op: str, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    if op == "relational":
        monkeypatch.setattr(bench, "draw", DRAW)
    result = measured(op, f"--lengths 16 8 {SMALL}")
    said = capsys.readouterr().out
    taking = {side for _, side, _ in rows(result)}
    assert taking | set(result["left_out"]) >= {*BACKENDS[op], "stock"}
    assert {"reference", "stock"} <= taking
    assert list(rows(result)) == [(t, side, which) for t in (8, 16) for side in names(result) for which in PASSES]
    for row in rows(result).values():
        assert 0 < row["seconds"]["min"] <= row["seconds"]["median"]
        assert row["memory"] >= row["t"] * 2 * 4 * 4  # of the output alone
        other = rows(result)[row["t"], "reference", row["pass"]]
        assert row["reference_over"]["time"] == pytest.approx(other["seconds"]["min"] / row["seconds"]["min"])
        assert row["reference_over"]["memory"] == pytest.approx(other["memory"] / row["memory"])
    assert set(result["parity"]["errors"]) == taking - {"stock"}
    assert max(result["parity"]["errors"].values()) < 1e-5
    assert result["command"] == f"polyhead bench {op} --lengths 16 8 {SMALL}"
    assert result["environment"]["torch"] == torch.__version__
    assert result["environment"]["threads"] == 1
    assert "no others were requested" not in result["environment"]["products"]
    assert result["options"]["dtype"] == "float32"
    assert result["matrix_tflops"] is None
    assert f"{op}, causal, b 1, h 2, d 4" in said
    assert all(f"│ {side} " in said for side in taking)
    assert all(f"left out: {impl} {reason}" in said for impl, reason in result["left_out"].items())
    if op != "relational":
        return
    files = {path.name for path in pathlib.Path("runs/bench").iterdir()}
    assert files == {f"{op}.json"} | {f"{op}-{what}.{kind}" for what in ("time", "memory") for kind in ("png", "svg")}
    assert r"10^{" in pathlib.Path(f"runs/bench/{op}-time.svg").read_text()  # logarithmic


def names(result: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["side"] for row in result["rows"]))


def test_the_authors_package_takes_part_where_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("dual_attention")
    result = measured("relational", f"--lengths 8 {SMALL} --no-causal")
    assert result["parity"]["errors"]["dual-attention"] < 1e-5
    monkeypatch.setitem(sys.modules, "dual_attention.relational_attention", None)
    absent = measured("relational", f"--lengths 8 {SMALL}")["left_out"]["dual-attention"]
    assert absent == "is not installed (pip install dual-attention)"


def test_every_side_computes_what_was_asked_for():
    for limits in ({"causal": True, "window": 3}, {"causal": True}, {"causal": False}):
        options = Options("softmax", heads=2, dim=4, **limits).settled()
        given = bench_sides.tensors(options, 9)
        wanted = resolve("softmax", "reference")(given["q"], given["k"], given["v"], **limits)
        found, absent = bench_sides.sides(options, given)
        assert [side.name for side in found] == ["reference", *IMPLS["softmax"][:-1], "stock"]
        assert not absent
        for side in found if "window" not in limits else found[:-1]:  # stock attention has no window
            torch.testing.assert_close(side.forward(given), wanted)


def test_what_an_impl_refuses_leaves_it_out(capsys: Any):
    result = measured("relational", f"--lengths 8 {SMALL} --window 3")
    assert result["left_out"]["dual-attention"] == "takes no window"
    assert "window 3" in capsys.readouterr().out
    said = mistake(capsys, f"bench relational --lengths 8 {SMALL} --window 3 --sides dual-attention")
    assert said == "bench: relational dual-attention takes no window"


def test_only_chosen_sides():
    result = measured("linear", f"--lengths 8 {SMALL} --sides chunked stock")
    assert names(result) == ["chunked", "stock"]
    assert all("reference_over" not in row and "stock_over" in row for row in result["rows"])
    assert set(result["parity"]["errors"]) > {"chunked"}


@pytest.mark.compile
def test_the_compiled_reference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    result = measured("softmax", f"--lengths 8 9 {SMALL} --compile True")
    assert names(result)[-1] == "compiled"
    assert all("skipped" not in row for row in result["rows"])
    for sides, wanted in (("compiled", ["compiled"]), ("stock --compile True", ["stock", "compiled"])):
        assert names(measured("softmax", f"--lengths 8 {SMALL} --sides {sides}")) == wanted


@pytest.mark.parametrize(
    ("side", "error", "told"),
    [
        ("compiled", "no compiler\nlong story", "cannot be compiled: no compiler"),
        ("blocked", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes", "out of memory"),
        ("blocked", "no compiler", None),
    ],
)
def test_a_side_that_fails_is_left_out_with_its_reason_or_raises(side: str, error: str, told: str | None):
    def broken(*given: Any) -> Any:
        raise RuntimeError(error)

    options = Options("hyla", lengths=(4,), heads=2, dim=4).settled()
    measuring = bench._Bench(options, [bench_sides.Side(side, broken, ("q",))], lambda *told: None)
    if told is None:
        with pytest.raises(RuntimeError, match=error):
            measuring.length(4)
    else:
        assert [row["skipped"] for row in measuring.length(4)] == [told] * 2


def test_python_dash_m():
    done = subprocess.run([sys.executable, "-m", "polyhead", "bunch"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("polyhead: unknown command 'bunch'; did you mean 'bench'")


# -------------------------------------------------------------------------------------------------------------- refusal
@pytest.mark.parametrize("fault", ["output", "gradient"])
def test_a_red_parity_is_not_timed(fault: str, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    blocked: Any = importlib.import_module("polyhead.ops.hyla.blocked")
    right = blocked.forward

    def wrong(x: Any, twice: bool = False) -> Any:
        out = right(x, twice)
        return out * (1 + 1e-3) if fault == "output" else out + 1e-3 * (x.k - x.k.detach()).sum()

    monkeypatch.setattr(blocked, "forward", wrong)
    assert ask(f"hyla --lengths 8 {SMALL}") == 1
    said = capsys.readouterr()
    what = "the output" if fault == "output" else "the gradient of k"
    assert said.err.startswith(
        f"polyhead: bench: parity of hyla fails, so nothing is timed: {what} of blocked is off by "
    )
    assert len(said.err.splitlines()) == 1
    assert not said.out
    assert not pathlib.Path("runs").exists()


def test_parity_in_half_precision_allows_twice_the_error_of_the_reference():
    options = Options("hyla", heads=4, dim=8, dtype="bfloat16").settled()
    small = bench_sides.tensors(options, 40, 2)
    found, _ = bench_sides.sides(options, small)
    errors = bench.parity(options, found, small)
    assert 1e-3 < errors["blocked"] < 2e-2
    coarse = found[0].run
    worse = bench_sides.Side(
        "worse", lambda *x: coarse(*(y.half().bfloat16() * (1 + 2**-5) for y in x)), found[0].takes
    )
    with pytest.raises(bench.ParityError, match="of worse is off by"):
        bench.parity(options, [found[0], worse], small)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("hyla --lengths 256 0", "bench: lengths must be at least 1 but one is 0"),
        ("hyla --dtype float23", "bench: unknown dtype 'float23'; did you mean 'float32'? (choose from "),
        ("hyla --heads 0", "bench: heads must be at least 1 but is 0"),
        ("hyla --window 0", "bench: window must be at least 1 but is 0"),
        ("hyla --repeats 0", "bench: repeats must be at least 1 but is 0"),
        ("hyla --memory 0", "bench: memory must be above 0 GiB but is 0.0"),
        ("relational --relations 7", "bench: relations must divide heads x dim = 512 but are 7"),
        ("hyla --sides xyz", "bench: unknown side 'xyz' (choose from reference, "),
        ("hylo", "bench: unknown op 'hylo'; did you mean 'hyla'? (choose from softmax, "),
        ("", "polyhead bench: OP is missing"),
    ],
)
def test_bad_input_is_one_line(command: str, said: str, capsys: Any):
    assert mistake(capsys, f"bench {command}").startswith(said)


# --------------------------------------------------------------------------------------------------------------- memory
def test_a_reference_that_would_not_fit_is_skipped(capsys: Any):
    result = measured("hyla", f"--lengths 8 256 {SMALL} --memory 0.001")
    skipped = {at: row["skipped"] for at, row in rows(result).items() if "skipped" in row}
    assert list(skipped) == [(256, "reference", which) for which in PASSES]
    assert all(text.startswith("would take 0.0") and text.endswith(" GiB of 0.0") for text in skipped.values())
    assert "would take" in capsys.readouterr().out
    assert rows(result)[256, "blocked", "forward"]["memory"] > 0
    assert "reference_over" not in rows(result)[256, "blocked", "forward"]


def test_one_thread_is_timed_in_cpu_time_and_several_in_elapsed_time(capsys: Any):
    cpu, told = torch.device("cpu"), []
    assert [bench.Clock(cpu, threads).now for threads in (1, 2)] == [time.process_time, time.perf_counter]
    for threads in (1, 2):
        measured("softmax", f"--lengths 8 {SMALL} --sides reference stock --threads {threads}")
        told += [line for line in capsys.readouterr().out.splitlines() if line.startswith("softmax, ")]
    assert ["1 thread, CPU time" in told[0], "2 threads, elapsed time" in told[1]] == [True, True]


def test_memory_is_the_growth_of_the_peak():
    def call() -> torch.Tensor:
        x = torch.ones(1000, 1000)  # 4 MB
        y = x + x  # 8 MB
        del x
        return y[:500] + 1  # 6 MB

    for _ in range(2):
        assert 8e6 <= bench.peak(torch.device("cpu"), call) < 8.01e6


def test_tiles_grow_with_t_and_the_reference_with_its_square():
    options = Options("hyla", lengths=(512,), heads=4, dim=8).settled()
    found, _ = bench_sides.sides(options, bench_sides.tensors(options, 4))
    growth = {}
    for side in found:
        given = [bench_sides.tensors(options, t) for t in (512, 1024)]
        small, large = (bench.peak(torch.device("cpu"), lambda g=g, side=side: side.both(g)) for g in given)
        growth[side.name] = large / small
    assert growth["blocked"] < 2.2
    assert growth["reference"] > 3.8


# ----------------------------------------------------------------------------------------------------------------- work
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 9])
def test_pairs_are_those_that_may_look(causal: bool, window: int | None):
    from polyhead.ops.latent_code import visible

    for t in (1, 2, 7):
        look = visible(None, causal, t, t, torch.device("cpu"), window=window)
        options = Options("hyla", causal=causal, window=window)
        assert bench_sides.pairs(options, t) == (t * t if look is None else int(look.sum()))


@pytest.mark.parametrize(
    ("op", "adds"),
    [
        ("softmax", lambda t: 2 * t * t * 32),
        ("hyla", lambda t: 3 * t * t * 32),
        ("linear", lambda t: 2 * t * 4 * 8 * 8),
        ("relational", lambda t: t * t * (32 + 32 + 2 * 16 + 4 * 2) + t * 4 * 8 * 2),
        ("disentangled", lambda t: t * t * 3 * 32),
        ("abstractor", lambda t: t * t * 2 * 32),
    ],
)
def test_work_by_hand(op: str, adds: Any):
    options = Options(op, batch=3, heads=4, dim=8, relations=2, causal=False)
    assert bench_sides.operations(options, 10, "forward") == 2 * 3 * adds(10)
    assert bench_sides.operations(options, 10, "forward+backward") == 6 * 3 * adds(10)


@pytest.mark.parametrize("n", [6, 14, 20, 40, 150])
def test_the_interval_of_a_median_holds_it_in_95_of_100_cases(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the speed benchmarks, whose values here are their own places in order."""
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[2] / "benchmarks" / "speed"))
    median, low, high = importlib.import_module("training").median_interval(range(n))
    below = scipy.stats.binom(n, 0.5).cdf  # how many of them lie below the true median
    assert median == (low + high) / 2
    assert below(high) - below(low) >= 0.95
    assert below(high - 1) - below(low + 1) < 0.95  # a narrower one would not do
