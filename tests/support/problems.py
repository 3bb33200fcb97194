"""Random arguments of the ops: q, k, v, masks and other limits, relations and symbols; the options of each op."""

import itertools

import torch

from polyhead.ops.registry import IMPLS, TENSORS
from polyhead.spec import ACTS, NETWORKS, NORMALISE, POOLS, RELATION_ACTS

RELATIONS = [(1, 5, False), (3, 1, True), (8, 2, False)]
RELATED = [{"offset": o, "r": r, "p": p, "symmetric": y} for o in (False, True) for r, p, y in RELATIONS]
NETWORKS_IN_ORDER = NETWORKS[:2]
"""Networks that take causality, windows and packed sequences; test_sequence_network.py has the third."""

VARIANTS = {
    **{op: [{}] for op in IMPLS},
    "linear": [{"normalise": n, "act": a} for n, a in itertools.product(NORMALISE, ACTS)],
    "hyla": [
        {"normalise": n, "act": a, "deep": deep} for n, a, deep in itertools.product(NORMALISE, ACTS, (False, True))
    ],
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
    """`rows`: one query of sample 0 sees no key, in all heads; `plane`: one of every sample; `keys`: padding."""
    if kind is None:
        return None
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
    how = {"dtype": q.dtype, "requires_grad": True}
    symbols = torch.randn(t + s - 1, g, e, **how) if offset else v
    if op not in ("relational", "disentangled"):
        return [q, k, symbols]
    sent = r if op == "relational" else g
    q_rel = torch.randn(b, t, r if op == "relational" else h, p, **how)
    k_rel = q_rel if symmetric and q_rel.shape == (b, s, sent, p) else torch.randn(b, s, sent, p, **how)
    weight = [torch.randn(h, e, r, **how)] if op == "relational" else []
    return [q, k, q_rel, k_rel, symbols, *weight]


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
    if impl in ("chunked", "recurrent", "triton") and dice.random() < 0.9:  # what these implementations take
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
