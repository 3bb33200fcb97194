"""Does every implementation compute its equation?  Fresh random calls against tests/support/oracle.py.

    python benchmarks/parity.py --ops 5000 --native 2000 --jax 500 --models 1000 --cache 1000 --seed 0

    ops      every op and implementation of PyTorch beside the oracle: output and gradients
    native   the same for native code, in float64 and float32
    jax      the JAX functions beside the oracle, in float64
    models   models of random mixtures: impl="auto" beside "reference", and a batch beside its samples
    cache    decoding such models in pieces with a cache beside the whole sequence

In float64 the largest error must be below 1e-9 of the largest number of its row, see `row_error` and `float64_limit`.
In other dtypes the error, as a norm, must be at most three times that of the reference in the same dtype, plus SLACK or
some roundings.  A failure is printed with the options that repeat it, such as `--ops 1 --first 123`; the exit code is
then 1.
"""

import argparse
import dataclasses
import itertools
import os
import pathlib
import random
import sys
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "support"))

import oracle
import torch
from problems import NETWORKS_IN_ORDER, make_arguments, make_problem

import polyhead as ph
from polyhead.layers.cache import Cache
from polyhead.ops.native import library
from polyhead.ops.registry import IMPLS, OPS, TENSORS, resolve
from polyhead.spec import ACTS, NORMALISE, POOLS, RELATION_ACTS

SLACK = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
NATIVE_OPS = [op for op, impls in IMPLS.items() if "native" in impls]
VOCABULARY = 11


def row_error(result, expected, scale=0.0):
    """The largest difference, relative to the largest number of its row; rows near 0 count as 1e-4 of the tensor.

    A gradient that is 0 by cancellation has no size: a hundredth of `scale` counts as its norm.  Numbers below 1e-6
    count as 1e-6: an error of 1e-15 is a rounding of numbers near 1, all that a saturated activation leaves of them.
    """
    if expected.numel() == 0:
        return 0.0
    row_size = expected.abs().amax(-1, keepdim=True) if expected.ndim else expected.abs()
    floor = max(1e-4 * expected.abs().max().item(), 1e-2 * scale / expected.numel() ** 0.5, 1e-6)
    return torch.nan_to_num((result - expected).abs() / row_size.clamp(min=floor), nan=torch.inf).max().item()


def output_and_gradients(function, tensors, options, cotangent):
    """The output and the gradients of all that learns, and the scale of each: see `row_error`."""
    out = function(tensors, options)
    leaves = [x for x in (*tensors.values(), *options.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    gradients = torch.autograd.grad(out, leaves, cotangent.to(out.dtype), materialize_grads=True)
    out = out.detach()
    scale = (out.norm() * cotangent.norm()).item()
    return [out, *gradients], [0.0, *(scale / max(leaf.detach().norm().item(), 1e-30) for leaf in leaves)]


def draw_call(dice, op, impl, dtype):
    """Tensors and options of a call; most of them an implementation takes."""
    h = dice.choice((1, 2, 3, 4, 8))
    sizes = {"h": h, "g": dice.choice([n for n in range(1, h + 1) if h % n == 0]), "b": dice.choice((1, 2, 3, 5))}
    sizes |= {"d": dice.choice((1, 2, 3, 8, 16)), "e": dice.choice((1, 2, 5, 8, 17))}
    t, s = dice.choice((1, 2, 5, 17, 40, 70)), dice.choice((1, 3, 8, 16, 33, 70))
    limits = {"causal": dice.random() < 0.5, "window": dice.choice((None, None, 1, 3, 20))}
    limits["bias"] = dice.choice((None, None, "offset", "dense", "per_sample"))
    limits["mask"] = dice.choice((None, None, "keys", "rows", "plane"))
    limits["keep"] = dice.random() < 0.15
    if impl == "triton":  # its interpreter is slow
        t, s, h, sizes = min(t, 17), min(s, 17), min(h, 4), sizes | {"h": min(h, 4), "g": 1}
    if dice.random() < 0.2:
        t = s
        limits |= {"edges": (0, *sorted(dice.choices(range(t + 1), k=3)), t)}
    options = {"scale": dice.choice((None, None, 0.3, -0.4))}
    if op in ("linear", "hyla", "pooled"):
        options |= {"normalise": dice.choice(NORMALISE), "act": dice.choice(ACTS)}
    elif op in ("relational", "disentangled"):
        options["relation_act"] = dice.choice(RELATION_ACTS)
    elif op == "abstractor":
        options["act"] = dice.choice(RELATION_ACTS)
    if op == "pooled":
        options |= {"pool": dice.choice(POOLS), "network": dice.choice(NETWORKS_IN_ORDER)}
    if impl in ("chunked", "triton") and dice.random() < 0.9:  # what these implementations take
        options |= {"normalise": "identity", "act": "identity"}
        limits |= {"bias": None, "keep": False, "window": None, "mask": dice.choice((None, "keys"))}
    qkv, masks = make_problem(t, s, **limits, **sizes, dtype=dtype)
    by_offset = "symbols" in TENSORS[op] and dice.random() < 0.3
    r, p = dice.choice((1, 2, 5)), dice.choice((1, 2, 8))
    tensors = dict(zip(TENSORS[op], make_arguments(op, qkv, offset=by_offset, r=r, p=p), strict=True))
    if op == "hyla" and dice.random() < 0.2:
        e = sizes["e"]
        options["value_weight"] = (0.5 * torch.randn(qkv[0].shape[2], e, e)).to(dtype).requires_grad_()
    return tensors, masks | options


def in_dtype(values, dtype):
    """Tensors of floating numbers in a dtype, as new leaves where they learn."""
    converted = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.detach().to(dtype).requires_grad_(value.requires_grad)
        converted[name] = value
    return converted


def draw_model(dice, causal):
    """The configuration of a model of one or two layers with a random mixture of heads."""
    groups = []
    for _ in range(dice.choice((1, 2, 3))):
        kinds = ph.Softmax, ph.Linear, ph.Hyla, ph.Relational, ph.Disentangled, ph.Abstractor, ph.Pooled
        kind, heads = dice.choice(kinds), dice.choice((1, 2, 4))
        more = {"normalise": dice.choice(NORMALISE), "act": dice.choice(ACTS)} if kind in (ph.Linear, ph.Hyla) else {}
        groups.append(kind(heads, dim=dice.choice((2, 4, 6)), value_dim=dice.choice((1, 3, 5)), **more))
    positions = dice.choice((None, ph.Rotary(), ph.Alibi(), ph.Learned(), ph.Sinusoidal(), ph.RelativeBias(8, 16)))
    if isinstance(positions, ph.RelativeBias) and not causal:
        positions = ph.RelativeBias(8, 16, bidirectional=True)
    return ph.TransformerConfig(
        ph.Tokens(VOCABULARY), ph.Logits(VOCABULARY), dim=24, layers=dice.choice((1, 2)), heads=groups, max_length=48,
        causal=causal, positions=positions, window=dice.choice((None, None, 2, 7)), norm=dice.choice(("layer", "rms")),
    )  # fmt: skip


def build_model(settings, seed):
    """A model far from its initial parameters, where attention is nearly uniform."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are blind to the order of their tokens
        model = ph.Transformer(settings, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def float64_limit(op, tensors, options, cotangent, exact, scales):
    """1e-9, or ten times the error that the oracle itself has of arguments that were rounded once more.

    Such a rounding decides a result where terms cancel before a norm, as codes of one head that sum to 0.
    """
    generator = torch.Generator().manual_seed(0)
    nudged = {}
    for name, x in tensors.items():
        rounding = torch.empty_like(x).uniform_(-1, 1, generator=generator) * torch.finfo(torch.float64).eps
        nudged[name] = (x * (1 + rounding)).detach().requires_grad_(x.requires_grad)
    moved, _ = output_and_gradients(lambda *call: oracle.answer(op, *call), nudged, options, cotangent)
    return max(1e-9, 10 * max(map(row_error, moved, exact, scales)))


def check_op(number, seed, native=False):
    """Compare an implementation with the oracle; returns what is wrong, or None."""
    dice = random.Random(f"{'native' if native else 'ops'} {seed} {number}")
    torch.manual_seed(dice.randrange(2**31))
    op = dice.choice(NATIVE_OPS if native else list(OPS))
    impl = "native" if native else dice.choice(("auto", *IMPLS[op]))
    if impl == "triton" and dice.random() < 0.7:  # its interpreter is slow
        impl = "auto"
    dtypes = [torch.float64] * 3 + [torch.float32] + [torch.bfloat16, torch.float16] * (not native)
    dtype = torch.float64 if impl == "triton" else dice.choice(dtypes)
    tensors, options = draw_call(dice, op, impl, dtype)
    torch.set_num_threads(dice.choice((1, 1, 2)) if native else 1)
    words = f"{op} {impl} {dtype} { {name: tuple(x.shape) for name, x in tensors.items()} }"
    b, t, h = tensors["q"].shape[:3]
    values = tensors.get("symbols", tensors.get("v"))
    cotangent = torch.randn(b, t, h, values.shape[-1], dtype=torch.float64)

    def call(which):
        return lambda tensors, options: resolve(op, which)(*tensors.values(), **options)

    try:
        results, _ = output_and_gradients(call(impl), tensors, options, cotangent)
    except ValueError as error:
        is_one_line = f"impl {impl!r} takes" in str(error) and "\n" not in str(error)
        return None if is_one_line else f"{words}: {error}"
    exact_call = in_dtype(tensors, torch.float64), in_dtype(options, torch.float64)
    exact, scales = output_and_gradients(lambda *call: oracle.answer(op, *call), *exact_call, cotangent)
    if dtype == torch.float64:
        worst = max(map(row_error, results, exact, scales))
        if worst <= 1e-9:
            return None
        limit = float64_limit(op, tensors, options, cotangent, exact, scales)
        return f"{words}: {worst:.1e} > {limit:.1e}" if not worst <= limit else None
    plain, _ = output_and_gradients(call("reference"), tensors, options, cotangent)
    if dtype == torch.float16 and not all(reference.isfinite().all() for reference in plain):
        return None  # terms beyond the largest number of float16
    for n, (result, reference, expected, scale) in enumerate(zip(results, plain, exact, scales, strict=True)):
        # The gradient of a softmax over one key is 0: terms of the size `scale` cancel, up to roundings of float32, and
        # of the dtype where they are stored between two steps.  PyTorch's kernels of softmax store its probabilities.
        stored = torch.finfo(dtype).eps / (2 if op == "softmax" else 16)
        rounding = max(16 * torch.finfo(torch.float32).eps, stored) * scale
        size = max(expected.norm().item(), 1e-2 * scale)
        limit = 3 * (reference.double() - expected).norm() + max(SLACK[dtype] * size, rounding)
        limit += torch.finfo(dtype).tiny * expected.numel() ** 0.5  # numbers below it may count as 0
        error = (result.double() - expected).norm()
        if not error <= limit and expected.abs().max() < torch.finfo(dtype).max:
            return f"{words}: result {n} is {error:.1e} off, {limit:.1e} are allowed"
    return None


def check_jax(number, seed):
    """Compare a JAX function with the oracle, in float64."""
    import jax
    import jax.numpy as jnp

    from polyhead import jaxside

    jax.config.update("jax_disable_most_optimizations", True)
    dice = random.Random(f"jax {seed} {number}")
    torch.manual_seed(dice.randrange(2**31))
    op = dice.choice(list(OPS))
    impl = dice.choice(("auto", "blocked", "reference"))
    tensors, options = draw_call(dice, op, "auto", torch.float64)
    values = tensors.get("symbols", tensors.get("v"))
    cotangent = torch.randn(*tensors["q"].shape[:3], values.shape[-1], dtype=torch.float64)
    exact, scales = output_and_gradients(lambda *call: oracle.answer(op, *call), tensors, options, cotangent)
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(x.detach().numpy()) for name, x in tensors.items()}
        fixed = {n: jnp.asarray(x.detach().numpy()) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        function = getattr(jaxside, OPS[op].name)

        @jax.jit
        def both(arrays, cotangent):
            out, pull = jax.vjp(lambda arrays: function(**arrays, **fixed, impl=impl), arrays)
            return out, pull(cotangent)[0]

        out, gradients = both(arrays, jnp.asarray(cotangent.numpy()))
        results = [torch.tensor(out.tolist(), dtype=torch.float64).view(exact[0].shape)]
        results += [torch.tensor(gradients[n].tolist(), dtype=torch.float64).view(x.shape) for n, x in tensors.items()]
    worst = max(map(row_error, results, exact, scales))
    if worst <= 1e-9:
        return None
    limit = float64_limit(op, tensors, options, cotangent, exact, scales)
    return f"{op} {impl}: {worst:.1e} > {limit:.1e}" if not worst <= limit else None


def check_model(number, seed):
    """Compare a model with that of reference implementations, and a batch with its samples."""
    dice = random.Random(f"models {seed} {number}")
    settings = draw_model(dice, causal=dice.random() < 0.5)
    plain_heads = [dataclasses.replace(group, impl="reference") for group in settings.heads]
    model, plain = build_model(settings, number), build_model(dataclasses.replace(settings, heads=plain_heads), number)
    tokens = torch.randint(VOCABULARY, (dice.choice((1, 2, 3)), dice.choice((1, 5, 16, 31))))
    outs = model(tokens), plain(tokens)
    gradients = [torch.autograd.grad(out.square().sum(), list(m.parameters()), allow_unused=True)
                 for out, m in zip(outs, (model, plain), strict=True)]  # fmt: skip
    scale = outs[1].square().sum().item()
    errors = [row_error(outs[0], outs[1]), row_error(torch.cat([model(row[None]) for row in tokens]), outs[1])]
    errors += [row_error(x.flatten(), y.flatten(), scale) for x, y in zip(*gradients, strict=True) if y is not None]
    worst = max(errors)
    return f"{settings}: {worst:.1e} > 1e-9" if not worst <= 1e-9 else None


@torch.no_grad()
def check_cache(number, seed):
    """Compare decoding in pieces with the whole sequence."""
    dice = random.Random(f"cache {seed} {number}")
    settings = draw_model(dice, causal=True)
    model, t = build_model(settings, number), dice.choice((1, 2, 9, 17, 40))
    tokens = torch.randint(VOCABULARY, (dice.choice((1, 2, 3)), t))
    edges = sorted({0, t, *dice.choices(range(t + 1), k=dice.choice((1, 3, t)))})
    cache, parts = Cache(settings.layers), []
    for first, last in itertools.pairwise(edges):
        parts.append(model(tokens[:, first:last], cache=cache))
    worst = row_error(torch.cat(parts, 1), model(tokens))
    return f"{settings}, pieces {edges}: {worst:.1e} > 1e-9" if not worst <= 1e-9 else None


def main():
    checks = {"ops": check_op, "native": lambda *case: check_op(*case, native=True)}
    checks |= {"jax": check_jax, "models": check_model, "cache": check_cache}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind in checks:
        parser.add_argument(f"--{kind}", type=int, default=0, help="number of cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    library.COMPUTE_DTYPES[torch.float64] = torch.float64  # native code, compiled once more for float64
    num_failures = 0
    for kind, check in checks.items():
        start, count, kind_failures = time.monotonic(), getattr(options, kind), 0
        for number in range(options.first, options.first + count):
            try:
                reason = check(number, options.seed)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            if reason is not None:
                kind_failures += 1
                print(f"--{kind} 1 --first {number} --seed {options.seed}: {reason[:400]}", flush=True)
        if count:
            print(f"{kind}: {count} cases, {kind_failures} failed, {time.monotonic() - start:.0f} s", flush=True)
        num_failures += kind_failures
    sys.exit(num_failures > 0)


if __name__ == "__main__":
    main()
