"""The choice of float32 products: the check, the requests in a process, and resumed runs."""

import functools
import re
import threading
from dataclasses import replace

import pytest
import torch
from run_folders import losses, same
from tiny_runs import interrupted

from polyhead.cli.dispatch import main
from polyhead.train import fast_products, products, read_config, read_result, run
from polyhead.train.products import Products
from polyhead.train.store import checkpoint, saving
from polyhead.train.store.checkpoint import read_metadata
from polyhead.train.world import World

CPU = torch.device("cpu")
YES, NO = Products(True, "2.1 times as fast"), Products(False, "they are not faster here")

pytestmark = pytest.mark.skipif(products.SWITCH is None, reason="this torch has no switch")


def state():
    return str(products.SWITCH.fp32_precision)


@pytest.fixture(autouse=True)
def _as_it_was():
    before = state()
    products._found.cache_clear()
    yield
    products._found.cache_clear()
    assert (state(), products._wishes) == (before, [])


@pytest.fixture
def machine(monkeypatch):
    """A machine whose products with the switch on are those of `multiply`, `speed` times as fast."""

    def build(multiply, speed):
        now = [0.0]

        def product(x, y):
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
def able(monkeypatch):
    """A machine with this result of the check."""
    return lambda found: monkeypatch.setattr(products, "_found", functools.cache(lambda: found))


# ------------------------------------------------------------------------------------------------------------ the check
def in_other_order(x, y):
    """Exact to float32, by other sums."""
    half = x.shape[-1] // 2
    return x[..., :half] @ y[..., :half, :] + x[..., half:] @ y[..., half:, :]


def loose(x, y):
    """Some roundings off."""
    return x @ y * (1 + 1e-6)


def lost(x, y):
    return x @ y * float("nan")


def only_heads(x, y):
    return loose(x, y) if x.ndim == 3 else in_other_order(x, y)


def only_a_gradient(x, y):
    return loose(x, y) if x.shape[0] == products.SHAPE[2] else in_other_order(x, y)


def broken(x, y):
    raise RuntimeError("no primitive\nat line 3")


CHECKED = {
    "exact": (in_other_order, 2.0, r"2\.0 times as fast here, error \d\.\de-0[78]"),
    "slow": (in_other_order, 1.1, r"they are not faster here: 1\.10 times"),
    "equal": (torch.matmul, 2.0, "the switch changes nothing on this processor"),
    "broken": (broken, 2.0, "the check failed: no primitive"),
    **{
        multiply.__name__: (multiply, 100.0, "they would round: error .*")
        for multiply in (loose, only_heads, only_a_gradient, lost)
    },
}


@pytest.mark.parametrize("name", CHECKED)
def test_only_faster_and_exact_products_are_taken(machine, name):
    """Autocast and the number of threads do not matter, and stay."""
    multiply, speed, why = CHECKED[name]
    machine(multiply, speed)
    torch.set_num_threads(2)
    with torch.autocast("cpu", torch.bfloat16):
        found = products.found()
    assert torch.get_num_threads() == 2
    assert re.fullmatch(why, found.why)
    assert bool(found) == (name == "exact")


def test_the_clock_is_asked_again_where_it_leaves_a_doubt(monkeypatch):
    """Turns that others disturb: the first five of the stock side are slow, its sixth is not."""
    asked = []

    def seconds(precision, pairs):
        asked.append(precision)
        return 1.0 if precision == "bf16" or asked.count("ieee") > 5 else 1.3

    monkeypatch.setattr(products, "_seconds", seconds)
    assert products._gain([]) == 1.0
    assert asked[:4] == ["ieee", "bf16", "ieee", "bf16"]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("_rounds", lambda: True, "it would round to bfloat16: the processor has AMX"),
        ("SWITCH", None, f"torch {torch.__version__} has no such switch"),
    ],
)
def test_machines_without_a_check(machine, monkeypatch, name, value, why):
    machine(in_other_order, 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(products, name, value)
        with fast_products() as found:
            assert found == Products(False, why)


def test_the_real_check_of_this_machine():
    """The products that it lets through are exact."""
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


def test_a_setting_of_other_code_is_left_alone(machine):
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
def test_the_inner_wish_holds_and_all_is_put_back(able):
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
    with pytest.raises(KeyboardInterrupt), fast_products():
        raise KeyboardInterrupt
    assert state() == before


@pytest.mark.parametrize("wanted", [True, False])
def test_threads_may_leave_in_any_order(able, wanted):
    """The first to enter leaves first: the wish of the second holds, and afterwards the value before both."""
    able(YES)
    before, seen = state(), []
    entered, left = threading.Event(), threading.Event()

    def other():
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
@pytest.fixture
def rough(able, monkeypatch):
    """A machine whose fast products can be told from the others by the losses."""
    able(YES)
    plain = torch.nn.functional.linear

    def linear(x, w, *bias):
        return plain(x, w, *bias) * (1.001 if state() == "bf16" else 1.0)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)


def test_a_run_takes_them_and_says_so(rough, tiny, tmp_path):
    done = [run(tiny(tmp_path / name, steps=2, fast_products=name == "on"), progress=False) for name in ("on", "off")]
    said = [result.environment["products"] for result in done]
    assert said == ["oneDNN (2.1 times as fast)", "stock (not wanted)"]
    assert losses(tmp_path / "on") != losses(tmp_path / "off")
    kept = [read_metadata(tmp_path / name / "checkpoint.safetensors")["fast_products"] for name in ("on", "off")]
    assert kept == [True, False]


@pytest.mark.parametrize("first", [YES, NO])
def test_a_resumed_run_keeps_its_products(rough, tiny, tmp_path, able, first, capsys, monkeypatch):
    """Stopped after step 4 and resumed when the check gives another answer: only from no to yes is it the same.

    A checkpoint from before there was a choice has no such entry; it was made with the stock products.
    """
    able(first)
    whole, cut = tiny(tmp_path / "whole", steps=5), tiny(tmp_path / "cut", steps=5)
    run(whole, progress=False)
    interrupted(cut, 4)
    able(NO if first else YES)
    if not first:
        monkeypatch.setitem(saving.READ, ".safetensors", _silent)
    run(cut, progress=False, resume=True)
    result = read_result(tmp_path / "cut")
    told = capsys.readouterr().err
    if first:
        assert result.environment["products"] == f"stock ({NO.why})"
        assert told.count("began with fast products") == 1
        assert losses(tmp_path / "whole") != losses(tmp_path / "cut")
    else:
        assert result.environment["products"] == "stock (the run began with them)"
        assert "products" not in told
        same(tmp_path / "whole", tmp_path / "cut")


def _silent(*what):
    return {name: value for name, value in checkpoint.restore(*what).items() if name != "fast_products"}


def test_the_choice_of_a_run(able, tiny, tmp_path):
    able(YES)
    config = tiny(tmp_path)
    assert products.of_run(config, CPU)
    assert products.of_run(config, CPU, True)
    assert not products.of_run(config, torch.device("meta"))
    assert not products.of_run(tiny(tmp_path, compile=True), CPU, True)


@pytest.mark.parametrize(("others", "fast"), [(2, True), (1, False)])
def test_processes_of_a_run_agree(monkeypatch, others, fast):
    monkeypatch.setattr(World, "sum", lambda self, values: values + others)
    world = World(0, 3, 0, CPU)
    assert products.agreed(YES, world).fast is fast
    assert products.agreed(NO, world) == NO
    assert products.agreed(YES, World.alone()) == YES


# ---------------------------------------------------------------------------------------------------- the command line
def test_evaluation_takes_them_unless_the_run_does_not(whole, monkeypatch):
    asked: list[bool] = []
    monkeypatch.setattr("polyhead.train.fast_products", lambda on=True: asked.append(on) or fast_products(on))
    mine = read_config(whole)
    for config in (mine, replace(mine, fast_products=False)):
        monkeypatch.setattr(checkpoint, "read_config", lambda folder, config=config: config)
        assert main(["eval", str(whole), "--splits", "iid", "--batches", "1", "--batch-size", "4"]) == 0
    assert asked == [True, False]
