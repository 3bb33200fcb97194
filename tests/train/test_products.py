"""The choice of float32 products: the check, the requests in a process, and resumed runs."""

import json
import math
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from run_folders import rows, same

import polyhead as ph
from polyhead.cli.verbs import main
from polyhead.scale.population import training as population
from polyhead.timing.measure import command
from polyhead.timing.options import Options
from polyhead.train import fast_products, products, read_config, read_result, run
from polyhead.train.products import Products
from polyhead.train.store import checkpoint, saving
from polyhead.train.store.checkpoint import read_metadata
from polyhead.train.world import World

Tiny = Callable[..., Any]
CPU = torch.device("cpu")
YES, NO = Products(True, "2.1 times as fast"), Products(False, "they are not faster here")

pytestmark = pytest.mark.skipif(products.SWITCH is None, reason="this torch has no switch")


def state() -> str:
    return str(products.SWITCH.fp32_precision)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = state()
    products._found.cache_clear()
    yield
    products._found.cache_clear()
    assert (state(), products._wishes) == (before, [])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine whose products with the switch on are those of `multiply`, so many times as fast."""

    def build(multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], speed: float) -> None:
        now = [0.0]

        def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            fast = state() == "bf16"
            now[0] += 1 / speed if fast else 1.0
            products.SWITCH.fp32_precision = products.STOCK  # this processor may really round with the switch on
            came = multiply(x, y) if fast else x @ y
            products.SWITCH.fp32_precision = products.FAST if fast else products.STOCK
            return came

        monkeypatch.setattr(products, "_multiply", product)
        monkeypatch.setattr(products, "_clock", lambda: now[0])
        monkeypatch.setattr(products, "_rounds", lambda: False)

    return build


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> Callable[[Products], None]:
    """A machine of which the check has found so."""
    return lambda found: monkeypatch.setattr(products, "_found", _cached(found))


def _cached(found: Products) -> Any:
    call: Any = lambda: found  # noqa: E731
    call.cache_clear = lambda: None
    return call


# ------------------------------------------------------------------------------------------------------------ the check
def in_other_order(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Exact to float32, by other sums."""
    half = x.shape[-1] // 2
    return x[..., :half] @ y[..., :half, :] + x[..., half:] @ y[..., half:, :]


def narrow(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.bfloat16() @ y.bfloat16()).float()


def split(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Each number as the sum of two in bfloat16: 17 bits, where float32 has 24."""
    high, low = x.bfloat16().float(), y.bfloat16().float()
    return high @ low + (x - high).bfloat16().float() @ low + high @ (y - low).bfloat16().float()


def loose(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Some roundings off."""
    return x @ y * (1 + 1e-6)


def lost(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y * float("nan")


def only_heads(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return narrow(x, y) if x.ndim == 3 else in_other_order(x, y)


def only_a_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return narrow(x, y) if x.shape[0] == products.SHAPE[2] else in_other_order(x, y)


def test_faster_and_as_exact_is_taken(machine: Any):
    machine(in_other_order, 2.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            found = products.found()
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert found
    assert found.why.startswith("2.0 times as fast here, error ")
    assert float(found.why.split()[-1]) < 1e-6


@pytest.mark.parametrize("multiply", [narrow, split, loose, only_heads, only_a_gradient, lost])
def test_what_rounds_is_refused_however_fast(machine: Any, multiply: Any):
    machine(multiply, 100.0)
    found = products.found()
    assert not found
    assert found.why.startswith("they would round: error ")


def test_what_is_no_faster_is_refused(machine: Any):
    machine(in_other_order, 1.1)
    assert products.found() == Products(False, "they are not faster here: 1.10 times")


def test_the_clock_is_asked_again_where_it_leaves_a_doubt(monkeypatch: pytest.MonkeyPatch):
    """Turns that others disturb: the first five of the stock side are slow, its sixth is not."""
    asked = []

    def seconds(precision: str, pairs: object) -> float:
        asked.append(precision)
        return 1.0 if precision == "bf16" or asked.count("ieee") > 5 else 1.3

    monkeypatch.setattr(products, "_seconds", seconds)
    assert products._gain([]) == 1.0
    assert asked[:4] == ["ieee", "bf16", "ieee", "bf16"]


def test_other_refusals(machine: Any, monkeypatch: pytest.MonkeyPatch):
    machine(lambda x, y: x @ y, 2.0)
    assert products.found().why == "the switch changes nothing on this processor"
    machine(in_other_order, 2.0)
    for name, value, why in (
        ("_rounds", lambda: True, "it would round to bfloat16: the processor has AMX"),
        ("SWITCH", None, f"torch {torch.__version__} has no such switch"),
    ):
        products._found.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(products, name, value)
            with fast_products() as found:
                assert found == Products(False, why)

    def broken(x: object, y: object) -> torch.Tensor:
        raise RuntimeError("no primitive\nat line 3")

    products._found.cache_clear()
    monkeypatch.setattr(products, "_multiply", broken)
    assert products.found() == Products(False, "the check failed: no primitive")


def test_the_real_check_of_this_machine():
    """Whatever it says here, what it lets through is exact."""
    torch.manual_seed(3)
    x, w = torch.randn(300, 70, requires_grad=True), torch.randn(50, 70, requires_grad=True)
    torch.manual_seed(4)
    wanted = torch.rand(2)
    torch.manual_seed(4)
    with torch.device("meta"):
        found = products.found()
    assert torch.equal(torch.rand(2), wanted)
    assert "fail" not in found.why
    with fast_products() as given:
        assert given == found == products.in_force()
        assert (state() == "bf16") == found.fast
        gradients = torch.autograd.grad((x @ w.t()).square().sum(), (x, w))
    a, b = (y.detach().double().requires_grad_() for y in (x, w))
    for came, exact in zip(gradients, torch.autograd.grad((a @ b.t()).square().sum(), (a, b)), strict=True):
        torch.testing.assert_close(came.double(), exact, rtol=1e-5, atol=1e-3)


def test_a_setting_of_somebody_else_is_left_alone(machine: Any):
    machine(in_other_order, 2.0)
    products.SWITCH.fp32_precision = "tf32"
    try:
        with fast_products() as found:
            assert (found.fast, state()) == (False, "tf32")
            assert "set to tf32" in found.why
    finally:
        products.SWITCH.fp32_precision = "none"
    assert products.found()


# ----------------------------------------------------------------------------------------------------------- the switch
def test_the_inner_wish_holds_and_all_is_put_back(able: Any):
    able(YES)
    before = state()
    with fast_products() as outer:
        assert (outer, str(outer), state()) == (YES, "oneDNN (2.1 times as fast)", "bf16")
        with fast_products(wanted=False) as inner:
            assert (bool(inner), state()) == (False, before)
            with fast_products():
                assert state() == "bf16"
            assert state() == before
        assert state() == "bf16"
    assert state() == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_put_back_after_an_error(able: Any, error: type[BaseException]):
    able(YES)
    before = state()

    @fast_products()
    def fail() -> None:
        assert state() == "bf16"
        raise error

    with pytest.raises(error):
        fail()
    assert state() == before


@pytest.mark.parametrize("wanted", [True, False])
def test_threads_may_leave_in_any_order(able: Any, wanted: bool):
    """The first to come is the first to go: what the second wants holds on, and then what was before both."""
    able(YES)
    before, seen = state(), []
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with fast_products(wanted):
            entered.set()
            left.wait(60)
            seen.append(state())

    thread = threading.Thread(target=other)
    with fast_products():
        thread.start()
        assert entered.wait(60)
    left.set()
    thread.join()
    assert (seen, state()) == (["bf16" if wanted else before], before)


# --------------------------------------------------------------------------------------------------------------- a run
def losses(folder: pathlib.Path) -> list[float]:
    return [row["loss"] for row in rows(folder, "train")]


@pytest.fixture
def rough(able: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose fast products can be told from the others by the losses."""
    able(YES)
    plain = torch.nn.functional.linear

    def linear(x: torch.Tensor, w: torch.Tensor, *bias: Any) -> torch.Tensor:
        return plain(x, w, *bias) * (1.001 if state() == "bf16" else 1.0)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)


def test_a_run_takes_them_and_says_so(rough: None, tiny: Tiny, tmp_path: pathlib.Path):
    on, off = (tiny(tmp_path / name, steps=2, fast_products=name == "on") for name in ("on", "off"))
    assert ph.digest(on) == ph.digest(off)
    run(on, progress=False)
    run(off, progress=False)
    said = [json.loads((tmp_path / name / "result.json").read_text())["environment"] for name in ("on", "off")]
    assert [each["products"] for each in said] == ["oneDNN (2.1 times as fast)", "stock (not wanted)"]
    assert losses(tmp_path / "on") != losses(tmp_path / "off")
    kept = [read_metadata(tmp_path / name / "checkpoint.safetensors")["fast_products"] for name in ("on", "off")]
    assert kept == [True, False]


@pytest.mark.parametrize("first", [YES, NO])
def test_a_run_that_goes_on_keeps_its_products(
    rough: None,
    tiny: Tiny,
    tmp_path: pathlib.Path,
    at_step: Any,
    able: Any,
    first: Products,
    capsys: Any,
    monkeypatch: Any,
):
    """Stopped at step 3 and gone on with after the check has changed its mind: only from no to yes is it the same.

    A checkpoint of before there was a choice was made with the stock products and does not say so.
    """
    able(first)
    whole, cut = tiny(tmp_path / "whole", steps=5), tiny(tmp_path / "cut", steps=5)
    run(whole, progress=False)
    at_step(3, _interrupt)
    with pytest.raises(ph.train.Interrupted):
        run(cut, progress=False)
    able(NO if first else YES)
    if not first:
        monkeypatch.setitem(saving.READ, ".safetensors", _silent)
    run(cut, progress=False, resume=True)
    result = read_result(tmp_path / "cut")
    assert result is not None
    told = capsys.readouterr().err
    if first:
        assert result.environment["products"] == f"stock ({NO.why})"
        assert told.count("began with fast products") == 1
        assert losses(tmp_path / "whole") != losses(tmp_path / "cut")
    else:
        assert result.environment["products"] == "stock (the run began with them)"
        assert "products" not in told
        same(tmp_path / "whole", tmp_path / "cut")


def _silent(*what: Any) -> dict[str, Any]:
    return {name: value for name, value in checkpoint.restore(*what).items() if name != "fast_products"}


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_population_takes_them_and_keeps_them(rough: None, tiny: Tiny, tmp_path: pathlib.Path, able: Any):
    """A member that began otherwise is trained by itself."""
    runs = [tiny(tmp_path / "x", steps=2, residual_dropout=0.0, seed=seed, name=f"m{seed}") for seed in (1, 2)]
    done = population.train(runs, tmp_path / "all", progress=False)
    said = [outcome.environment for outcome in done]  # type: ignore[union-attr]
    assert [each["products"] for each in said] == ["oneDNN (2.1 times as fast)"] * 2
    assert [each["population"] for each in said] == [2, 2]
    kept = [read_metadata(outcome.folder / "checkpoint.safetensors")["fast_products"] for outcome in done]
    assert kept == [True] * 2
    assert all(math.isfinite(loss) for outcome in done for loss in losses(outcome.folder))
    config = replace(runs[0], name="other", fast_products=False, folder=str(tmp_path / "other"))
    run(config, progress=False)
    places = [replace(one, folder=str(outcome.folder)) for one, outcome in zip(runs, done, strict=True)]
    assert [len(part) for part in population._of_one_step([*places, config], {})] == [2, 1]


def test_what_decides_for_a_run(able: Any, tiny: Tiny, tmp_path: pathlib.Path):
    able(YES)
    config = tiny(tmp_path)
    whys = {
        "on": products.of_run(config, CPU),
        "on meta": products.of_run(config, torch.device("meta")),
        "compiled": products.of_run(tiny(tmp_path, compile=True), CPU, True),
        "resumed": products.of_run(config, CPU, True),
    }
    assert {name: found.fast for name, found in whys.items()} == {
        "on": True,
        "on meta": False,
        "compiled": False,
        "resumed": True,
    }


@pytest.mark.parametrize(("others", "fast"), [(2, True), (1, False)])
def test_processes_of_a_run_agree(monkeypatch: pytest.MonkeyPatch, others: int, fast: bool):
    monkeypatch.setattr(World, "sum", lambda self, values: values + others)
    world = World(0, 3, 0, CPU)
    assert products.agreed(YES, world).fast is fast
    assert products.agreed(NO, world) == NO
    assert products.agreed(YES, World.alone()) == YES


# ---------------------------------------------------------------------------------------------------- the command line
def test_evaluation_takes_them_unless_the_run_does_not(whole: pathlib.Path, monkeypatch: Any, capsys: Any):
    asked: list[bool] = []
    plain = products.fast_products
    monkeypatch.setattr(products, "fast_products", lambda wanted=True: asked.append(wanted) or plain(wanted))
    mine = read_config(whole)
    for config in (mine, replace(mine, fast_products=False)):
        monkeypatch.setattr(checkpoint, "read_config", lambda folder, config=config: config)
        assert main(["eval", str(whole), "--splits", "iid", "--batches", "1", "--batch-size", "4"]) == 0
    assert asked == [True, False]


def test_off_on_the_command_line():
    assert command(Options("hyla", fast_products=False)) == "polyhead bench hyla --no-fast-products"
