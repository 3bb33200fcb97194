"""Triton kernels that compute wrong numbers, or cannot be launched, are found at their first use.

Failures are faked in the interpreter, which is watched here as a card is.
"""

import warnings

import pytest
import torch
from rules import KERNELS_RUN
from torch.testing import assert_close

from polyhead.ops import hyla
from polyhead.ops.call import AttentionCall
from polyhead.ops.hyla import triton
from polyhead.ops.hyla.triton import first_use
from polyhead.ops.registry import OPS

pytestmark = pytest.mark.skipif(not KERNELS_RUN, reason="needs triton's interpreter")


@pytest.fixture(autouse=True)
def _watched(monkeypatch):
    """As on a card: "auto" takes the kernels, and their first use is checked."""
    monkeypatch.setattr(triton, "forward_pass", None)
    kernel = OPS["hyla"].backends["triton"]
    monkeypatch.setattr(first_use, "VERDICTS", {})
    monkeypatch.setattr(
        kernel, "forward_pass", lambda call: first_use.checked_forward(lambda part: triton.launch_forward(part), call)
    )
    monkeypatch.setattr(
        kernel,
        "backward_pass",
        lambda call, grads: first_use.checked_backward(
            lambda part, part_grads: triton.launch_backward(part, part_grads), call, grads
        ),
    )
    for impl, backend in OPS["hyla"].backends.items():
        monkeypatch.setattr(backend, "preferred", lambda call, impl=impl: impl == "triton")


def small_call(impl="auto", t=3, s=5):
    """Output and gradients of a small call with a bias."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 3).requires_grad_() for n in (t, s, s))
    bias = torch.randn(2, t + s - 1).requires_grad_()
    out = hyla(q, k, v, bias=bias, causal=True, impl=impl)
    return [out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias))]


def test_right_kernels_are_checked_once():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [small_call() for _ in range(2)]
    assert list(first_use.VERDICTS.values()) == [None, None]
    assert_close(results[1], small_call("reference"), rtol=1e-4, atol=1e-5)


def wrong_output(launch):
    return lambda call: [1.01 * launch(call)[0]]


def wrong_gradient(launch):
    def run(call, grad_outputs):
        gradients = launch(call, grad_outputs)
        return gradients | {"k": 1.01 * gradients["k"]}

    return run


def no_room(launch):
    def run(call):
        from triton.runtime.errors import OutOfResources

        raise OutOfResources(180224, 166912, "shared memory")

    return run


FAULTS = [
    ("launch_forward", wrong_output, r"is wrong on this card: the output is 1.0e-02 off, "),
    ("launch_backward", wrong_gradient, r"is wrong on this card: k is 1.0e-02 off, "),
    ("launch_forward", no_room, r"cannot be launched on this card \(OutOfResources: "),
]


@pytest.mark.parametrize(("name", "change", "reason"), FAULTS)
def test_a_wrong_kernel_is_reported_once_and_replaced(monkeypatch, name, change, reason):
    monkeypatch.setattr(triton, name, change(getattr(triton, name)))
    with pytest.warns(RuntimeWarning, match=f"impl 'triton' {reason}.*tiles of the reference compute it") as record:
        results = small_call()
    assert len(record) == 1
    assert_close(results, small_call("reference"), rtol=1e-4, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(small_call(), results, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=f"impl 'triton' {reason}.*; use impl='auto' or"):
        small_call("triton")


def test_any_other_error_is_raised(monkeypatch):
    monkeypatch.setattr(triton, "launch_forward", lambda call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        small_call()


def test_lengths_are_no_configuration_but_long_ones_and_layouts_are():
    small_call()
    count = len(first_use.VERDICTS)
    small_call(t=7, s=9)
    assert len(first_use.VERDICTS) == count
    x = torch.randn(2, 5, 2, 4)[..., :3]
    hyla(x, x, x)
    hyla(x.contiguous(), x, x)
    assert len(first_use.VERDICTS) == count + 2
    long = first_use.ROWS + 1
    shapes = [(torch.zeros(1, t, 2, 3), torch.zeros(1, s, 2, 3)) for t, s in ((3, 5), (1, 5), (3, long), (long, long))]
    assert len({first_use.configuration("forward", AttentionCall(q, k, k)) for q, k in shapes}) == 4
