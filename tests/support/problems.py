"""Random arguments of the ops: q, k, v, masks and other limits, relations and symbols; the options of each op."""

import itertools

import torch

from polyhead.ops.registry import IMPLS
from polyhead.spec import ACTS, NETWORKS, NORMALISE, POOLS, RELATION_ACTS

RELATIONS = [(1, 5, False), (3, 1, True), (8, 2, False)]
RELATED = [{"offset": o, "r": r, "p": p, "symmetric": y} for o in (False, True) for r, p, y in RELATIONS]
NETWORKS_IN_ORDER = NETWORKS[:2]
"""Networks that take causality, windows and packed sequences; test_sequence_network.py has the third."""

VARIANTS = {
    **{op: [{}] for op in IMPLS},
    "linear": [{"normalise": n, "act": a} for n, a in itertools.product(NORMALISE, ACTS)],
    "hyla": [{"normalise": n, "act": a, "deep": d} for n, a, d in itertools.product(NORMALISE, ACTS, (False, True))],
    "relational": [{"relation_act": a, **x} for a, x in itertools.product(RELATION_ACTS, RELATED)],
    "disentangled": [{"relation_act": a, "offset": o} for a, o in itertools.product(RELATION_ACTS, (False, True))],
    "abstractor": [{"act": a, "offset": o} for a, o in itertools.product(RELATION_ACTS, (False, True))],
    "pooled": [
        {"normalise": NORMALISE[n % 5], "act": ACTS[n % 4], "pool": p, "network": w}
        for n, (p, w) in enumerate(itertools.product(POOLS, NETWORKS_IN_ORDER))
    ],
}
"""Op -> its options in all combinations; `deep` stands for a value_weight, `SHAPE` has what shapes the arguments."""

SHAPE = ("offset", "r", "p", "symmetric")


def shape_of(variant):
    """The part of a variant that shapes the arguments."""
    return {name: x for name, x in variant.items() if name in SHAPE}


def options_of(variant):
    """The part of a variant that the op takes by name."""
    return {name: x for name, x in variant.items() if name not in (*SHAPE, "deep")}


def draw(*shape, seed=0, dtype=torch.float64):
    """The same numbers in every dtype."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_bias(kind, b, h, t, s, dtype):
    shapes = {"offset": (h, t + s - 1), "dense": (1, h, t, s), "per_sample": (b, 1, t, s)}
    return None if kind is None else torch.randn(shapes[kind], dtype=dtype, requires_grad=True)


def make_mask(kind, b, h, t, s):
    """A Boolean mask of a kind, or None: "keys" is padding, "thin" has sizes of 1 anywhere.

    With "rows" one query of sample 0 sees no key in any head, with "plane" one query of every sample sees none.
    """
    if kind is None:
        return None
    if kind == "thin":
        shapes = [(b, 1, 1, 1), (b, 1, t, 1), (h, 1, s), (h, 1, 1), (t, 1), (s,), (1,)]
        shape = shapes[int(torch.randint(len(shapes), ()))]
        return (torch.arange(shape[0]) % 2 == 0).view(-1, *(1,) * (len(shape) - 1)).expand(shape)
    if kind == "keys":
        mask = torch.rand(b, 1, 1, s) > 0.3
        mask[..., -1] = True
        return mask
    mask = torch.rand((b, h, t, s) if kind == "rows" else (t, s)) > 0.4
    (mask[0] if kind == "rows" else mask)[..., t // 2, :] = False
    return mask


def make_problem(
    t, s, *, bias=None, mask=None, causal=False, window=None, edges=None, keep=False, b=2, h=4, g=2, d=3, e=5,
    dtype=torch.float64,
):  # fmt: skip
    """q, k, v and the options of a call; the caller seeds.  With `edges`, a single sample of packed sequences."""
    b = b if edges is None else 1
    q, k, v = (
        torch.randn(size, dtype=dtype, requires_grad=True) for size in ((b, t, h, d), (b, s, g, d), (b, s, g, e))
    )
    options = {
        "bias": make_bias(bias, b, h, t, s, dtype),
        "mask": make_mask(mask, b, h, t, s),
        "causal": causal,
        "window": window,
        "cu_seqlens": None if edges is None else torch.tensor(edges, dtype=torch.int32),
        "keep": (torch.rand(1, 1, t, s) > 0.3).to(dtype) / 0.7 if keep else None,
    }
    return (q, k, v), options


def make_arguments(op, qkv, *, offset=False, r=3, p=2, symmetric=False):
    """The tensors of an op, in order, for such q, k, v: with relations and symbols where it has them."""
    q, k, v = qkv
    (b, t, h, _), (_, s, g, e) = q.shape, v.shape
    tensor_options = {"dtype": q.dtype, "requires_grad": True}
    symbols = torch.randn(t + s - 1, g, e, **tensor_options) if offset else v
    if op not in ("relational", "disentangled"):
        return [q, k, symbols]
    sent = r if op == "relational" else g
    q_rel = torch.randn(b, t, r if op == "relational" else h, p, **tensor_options)
    k_rel = q_rel if symmetric and q_rel.shape == (b, s, sent, p) else torch.randn(b, s, sent, p, **tensor_options)
    weight = [torch.randn(h, e, r, **tensor_options)] if op == "relational" else []
    return [q, k, q_rel, k_rel, symbols, *weight]
