"""Half precision through every door: near what float32 gives, forward, backward and in cached steps.

The measure of "near" shares nothing with the code under test: what the same door gives in float32 when nothing but its
parameters is rounded to that precision.
"""

import copy
import functools

import pytest
import torch
from doors import DOORS

PRECISIONS = {
    "autocast bf16": (torch.bfloat16, True),
    "autocast fp16": (torch.float16, True),
    "pure bf16": (torch.bfloat16, False),
}
"""Name -> dtype, and whether autocast casts or the parameters are of that dtype."""

TIMES = 4
"""How often the error of rounded parameters may be made."""

TIMES_GRADIENT = 8
"""Of gradients: those of HYLA jump where a hidden value changes its sign."""

CASES = [pytest.param(door, kind, id=f"{door}-{kind}") for door, (_, kinds) in DOORS.items() for kind in kinds]


@functools.cache
def built(door, kind):
    torch.manual_seed(0)
    return DOORS[door][0](kind)


def measured(module, call):
    """Outputs, and the gradients of a random sum of them as one vector; a gradient has its parameter's dtype."""
    out = call(module)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    parameters = list(module.parameters())
    grads = torch.autograd.grad((out.float() * weights).sum(), parameters, allow_unused=True)
    for grad, parameter in zip(grads, parameters, strict=True):
        assert grad is None or grad.dtype == parameter.dtype
    vector = torch.cat(
        [torch.zeros(x.numel()) if g is None else g.flatten().float() for g, x in zip(grads, parameters, strict=True)]
    )
    return out.detach(), vector


@functools.cache
def exact(door, kind):
    """In float32, and there with rounded parameters, by dtype."""
    it, found = built(door, kind), {}
    for dtype in (None, torch.bfloat16, torch.float16):
        module = it.module if dtype is None else copy.deepcopy(it.module).to(dtype).float()
        found[dtype] = measured(module, it.call)
    return found


def off(came, wanted):
    return ((came.float() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize(("door", "kind"), CASES)
def test_steps_are_the_whole_in_float32(door, kind):
    it, (wanted, _) = built(door, kind), exact(door, kind)[None]
    with torch.no_grad():
        assert off(it.steps(it.module), wanted) < 1e-5


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("door", "kind"), CASES)
def test_half_precision(door, kind, precision):
    it, (dtype, autocast) = built(door, kind), PRECISIONS[precision]
    module = it.module if autocast else copy.deepcopy(it.module).to(dtype)
    wanted, rounded = exact(door, kind)[None], exact(door, kind)[dtype]
    with torch.autocast("cpu", dtype, enabled=autocast):
        out, grads = measured(module, it.call)
        with torch.no_grad():
            stepped = it.steps(module)
    assert out.dtype == stepped.dtype == dtype
    assert off(out, wanted[0]) <= TIMES * off(rounded[0], wanted[0])
    assert off(grads, wanted[1]) <= TIMES_GRADIENT * off(rounded[1], wanted[1])
    assert off(stepped, wanted[0]) <= TIMES * off(rounded[0], wanted[0])
