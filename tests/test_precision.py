"""Half precision: near what float32 gives, forward, backward and in cached steps, for ops, a layer and a model.

What "near" means shares nothing with the rules under test: the same module computes in float32, and the result of every
elementary operation, forward and backward, is rounded to that precision.  Twice the error of this run is the bound.

Of one model the ratio of both has heavy tails: a hidden value of HYLA near 0 changes its sign under one of them and not
the other, or one badly conditioned row is most of the error.  So the bound holds for geometric means over six modules.
"""

import copy
import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import polyhead as ph
from polyhead import ops
from polyhead.layers.cache import Cache, LayerCache
from polyhead.spec import MECHANISMS

B, T, HEADS, D, VOCAB = 2, 7, 8, 4, 40
SIZES = {"b": B, "t": T, "s": T, "h": HEADS, "g": 2, "d": D, "e": D, "r": 3, "p": 4}
SPANS = (slice(0, 4), slice(4, 5), slice(5, T))
"""What cached calls are given, one after the other."""

TIMES, DRAWS = 2, 6
"""The bound, times the error of rounding; modules whose errors are taken together."""

PRECISIONS = {
    "autocast bf16": (torch.bfloat16, True),
    "autocast fp16": (torch.float16, True),
    "pure bf16": (torch.bfloat16, False),
}
"""Name -> dtype, and whether autocast casts or the parameters are of that dtype."""


# ------------------------------------------------------------------------------------------------------------- modules
def op(row):
    """(parameters that are the arguments of a function, its call)."""
    axes = {**row.tensors, **row.optional}
    module = nn.ParameterDict({name: torch.randn([SIZES[x] for x in axes[name].split()]) for name in axes})
    bias = torch.randn(HEADS, 2 * T - 1)
    return module, lambda module: getattr(ops, row.op)(**dict(module.items()), bias=bias, causal=True)


def every_kind():
    """Heads of all mechanisms, many of each: rms over few heads divides by what is nearly 0."""
    return [getattr(ph, row.config)(HEADS // 2) for row in MECHANISMS]


WIDTH = D * HEADS // 2 * len(MECHANISMS)


def attention():
    """(a layer of all mechanisms with rotary positions and normalised queries and keys, its call)."""
    layer = ph.MultiHeadAttention(WIDTH, every_kind(), causal=True, positions=ph.Rotary(), qk_norm=True, max_length=T)
    x = torch.randn(B, T, WIDTH)

    def call(layer, span=slice(0, T), cache=None):
        return layer(x[:, span].to(next(layer.parameters()).dtype), cache=cache)

    return layer, call


def language_model():
    """(a language model of two layers, its call)."""
    ends = ph.Tokens(VOCAB), ph.Logits(VOCAB, tied=True)
    parts = {"positions": ph.Rotary(), "feedforward": ph.Swiglu(32)}
    settings = ph.TransformerConfig(*ends, dim=WIDTH, heads=every_kind(), max_length=T, causal=True, **parts)
    tokens = torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(3))
    return ph.Transformer(settings), lambda model, span=slice(0, T), cache=None: model(tokens[:, span], cache=cache)


MODULES = {row.folder: functools.partial(op, row) for row in MECHANISMS}
MODULES |= {"layer": attention, "transformer": language_model}
CACHES = {"layer": LayerCache, "transformer": lambda: Cache(2)}


# ------------------------------------------------------------------------------------------------------------ measures
@functools.cache
def built(name, draw=0):
    torch.manual_seed(draw)
    return MODULES[name]()


def output_and_gradients(module, call):
    """Outputs, and the gradients of a random sum of them as one vector; a gradient has its parameter's dtype."""
    out = call(module)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    parameters = [p for p in module.parameters() if p.requires_grad]
    grads = torch.autograd.grad((out.float() * weights).sum(), parameters, materialize_grads=True)
    assert [grad.dtype for grad in grads] == [parameter.dtype for parameter in parameters]
    return out.detach(), torch.cat([grad.flatten().float() for grad in grads])


class Rounding(TorchDispatchMode):
    """The result of every operation in float32 is rounded to `dtype`."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out if function._schema.is_mutable or function.is_view else tree_map(self.rounded, out)

    def rounded(self, x):
        return x.to(self.dtype).float() if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x


def relative_error(actual, expected):
    return ((actual.float() - expected).norm() / expected.norm()).item()


def geometric_means(errors):
    return torch.tensor(errors).log().mean(0).exp()


# --------------------------------------------------------------------------------------------------------------- tests
@pytest.mark.thinned(3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODULES)
def test_half_precision(name, precision):
    """Outputs, gradients, and outputs in cached steps."""
    dtype, autocast = PRECISIONS[precision]
    errors, bounds = [], []
    for draw in range(DRAWS):
        exact, call = built(name, draw)
        outputs, grads = output_and_gradients(exact, call)
        with Rounding(dtype):
            rounded, rounded_grads = output_and_gradients(copy.deepcopy(exact).to(dtype).float(), call)
        output_bound, gradient_bound = relative_error(rounded, outputs), relative_error(rounded_grads, grads)
        bounds.append([output_bound, gradient_bound, output_bound])
        module = exact if autocast else copy.deepcopy(exact).to(dtype)
        with torch.autocast("cpu", dtype, enabled=autocast):
            actual, actual_grads = output_and_gradients(module, call)
            stepped = actual
            if name in CACHES:
                cache = CACHES[name]()
                with torch.no_grad():
                    stepped = torch.cat([call(module, span, cache) for span in SPANS], 1)
        assert actual.dtype == stepped.dtype == dtype
        pairs = ((actual, outputs), (actual_grads, grads), (stepped, outputs))
        errors.append([relative_error(x, exact_x) for x, exact_x in pairs])
    assert (geometric_means(errors) <= TIMES * geometric_means(bounds)).all()


def test_float64_stays_under_autocast_and_mixed_dtypes_do_not_pass_without():
    q, k, v = torch.randn(3, 1, 5, 2, 4)
    for run in (ops.hyla, ops.softmax_attention, ops.linear_attention):
        with torch.autocast("cpu", torch.bfloat16):
            assert run(q.double(), k.double(), v.double()).dtype == torch.float64
            assert run(q=q, k=k.half(), v=v.bfloat16()).dtype == torch.bfloat16
            with pytest.raises(ValueError, match=r"must have one dtype but have torch\.float64, torch\.bfloat16"):
                run(q.double(), k, v)
        with pytest.raises(ValueError, match=r"must have one dtype but have torch\.float32, torch\.bfloat16"):
            run(q, k.bfloat16(), v)


def test_states_and_biases_keep_their_dtype():
    """A bias of 1001 and one of 1000 are one number in bfloat16; so are sums of many tokens and those of one more."""
    q, k, v = torch.randn(3, 1, 3, 2, 4)
    bias = 1000 + torch.arange(9.0).view(1, 1, 3, 3).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.softmax_attention(q, k, v, bias=bias, impl="reference")
        assert relative_error(out, ops.softmax_attention(q.double(), k.double(), v.double(), bias=bias.double())) < 0.02
        _, state = ops.linear_step(q, k, v)
        assert state.dtype == torch.float32
        assert ops.linear_step(q, k, v, 1e6 * torch.ones_like(state))[1].max() != 1e6
    assert torch.autograd.grad(out.float().square().sum(), bias)[0].dtype == torch.float32


@pytest.mark.compile
def test_one_graph_under_autocast():
    q, k, v = torch.randn(3, 1, 5, 2, 4)

    def run(q, k, v):
        return torch.cat((ops.hyla(q, k.bfloat16(), v, causal=True), ops.linear_attention(q, k.bfloat16(), v)))

    with torch.autocast("cpu", torch.bfloat16):
        actual = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual, run(q, k, v))


def test_activation_checkpoints_under_autocast():
    """Blocks are computed again, in the same precision."""
    model, call = built("transformer")
    again = copy.deepcopy(model)
    again.config = dataclasses.replace(again.config, checkpoint=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(output_and_gradients(again, call), output_and_gradients(model, call))
