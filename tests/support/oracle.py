"""Every mechanism of attention, directly from its equation: plain einsum in float64, gradients by autograd.

    s_hij   = scale q_ih . k_jh + bias_hij                          query head h reads keys and values of h // (h / g)
    a_hij   = softmax_j | s | s / rms_h | softmax_j, then / rms_h | softmax_h,   0 if i may not attend to j
    softmax, linear     out_ih = sum_j a_hij act(v_jh)
    hyla                out_ih = sum_j a_hij act(sum_h a_hij v_jh), or act(sum_h a_hij W_h act(sum_h a_hij v_jh))
    relational          out_ih = sum_j a_hij symbols_jh + W_h sum_j a_hij act(q_rel_i . k_rel_j / sqrt(p))
    disentangled        out_ih = sum_j a_hij act(q_rel_ih . k_rel_jh / sqrt(p)) symbols_jh
    abstractor          out_ih = sum_j act(s_hij) symbols_jh
    pooled              out_ih = pool_j a_hij act(sum_h a_hij v_jh), or one network for a query or for a sequence

A bias of -inf hides a pair as a mask does.  A key that is hidden from all queries and heads of a sample may have any
value: it counts as 0.  The oracle shares no code with the package and does not import it.
tests/ops/test_equations.py and benchmarks/parity.py compare calls with it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Options = dict[str, Any]
EPS = 1e-6
"""Under the root of the mean square over heads."""


def relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), without an exponential that overflows."""
    return (1 + torch.tanh(x / 2)) / 2


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": relu,
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))) / 2,
    "silu": lambda x: x * sigmoid(x),
    "sigmoid": sigmoid,
    "tanh": torch.tanh,
}


def relative_positions(t: int, s: int) -> Tensor:
    """(t s): how far key j comes after query i; the last query has the position of the last key."""
    return torch.arange(s)[None, :] - (torch.arange(t)[:, None] + s - t)


def visible(shape: tuple[int, int, int, int], options: Options) -> Tensor:
    """(b h t s): may query i look at key j?"""
    _, _, t, s = shape
    allowed, after = torch.ones(shape, dtype=torch.bool), relative_positions(t, s)
    if options.get("causal"):
        allowed = allowed & (after <= 0)
    if options.get("window") is not None:
        allowed = allowed & (after.abs() < options["window"])
    if options.get("cu_seqlens") is not None:
        edges = options["cu_seqlens"]
        number = torch.tensor([sum(row >= edge for edge in edges.tolist()[1:]) for row in range(t)])
        allowed = allowed & (number[:, None] == number[None, :])
    if options.get("bias") is not None:
        allowed = allowed & (bias_by_pair(options["bias"], t, s) > -math.inf)
    return allowed if options.get("mask") is None else allowed & options["mask"]


def heads(x: Tensor, h: int) -> Tensor:
    """(... g w) as (... h w): what each query head reads."""
    return x[..., [i // (h // x.shape[-2]) for i in range(h)], :]


def softmax(x: Tensor, allowed: Tensor, dim: int) -> Tensor:
    """Over the entries that count; nothing but 0 where none does."""
    if x.shape[dim] == 0:
        return x
    top = torch.where(allowed, x, -math.inf).amax(dim, keepdim=True).detach()
    top = torch.where(top > -math.inf, top, torch.zeros_like(top))
    weight = torch.where(allowed, torch.exp(torch.where(allowed, x, top) - top), torch.zeros_like(x))
    total = weight.sum(dim, keepdim=True)
    return weight / torch.where(total > 0, total, torch.ones_like(total))


def scores(q: Tensor, k: Tensor, options: Options) -> Tensor:
    """(b h t s)."""
    (_, t, h, d), s = q.shape, k.shape[1]
    scale = 1 / math.sqrt(d) if options.get("scale") is None else options["scale"]
    result = scale * torch.einsum("bihc,bjhc->bhij", q, heads(k, h))
    if options.get("softcap") is not None:
        result = options["softcap"] * torch.tanh(result / options["softcap"])
    if options.get("bias") is None:
        return result
    bias = bias_by_pair(options["bias"], t, s)
    return result + torch.where(bias > -math.inf, bias, torch.zeros_like(bias))


def bias_by_pair(bias: Tensor, t: int, s: int) -> Tensor:
    """A bias by offset (h t+s-1) as (h t s): the number of key j for query i is in column j - i + t - 1."""
    return bias if bias.ndim == 4 else bias[:, relative_positions(t, s) + s - 1]


def code(q: Tensor, k: Tensor, allowed: Tensor, normalise: str, options: Options) -> Tensor:
    """(b h t s), before dropout; `options["code"]`, if it is given."""
    if options.get("code") is not None:
        return options["code"]
    a = scores(q, k, options)
    if options.get("sinks") is not None:  # one key more, whose code is dropped
        sinks = options["sinks"][:, None, None].expand(*a.shape[:3], 1)
        a = softmax(torch.cat((a, sinks), 3), torch.cat((allowed, torch.ones_like(allowed[..., :1])), 3), 3)[..., :-1]
    elif normalise in ("softmax", "softmax_rms_heads"):
        a = softmax(a, allowed, 3)
    elif normalise == "softmax_heads":
        a = softmax(a, allowed, 1)
    else:
        a = torch.where(allowed, a, torch.zeros_like(a))
    return a / torch.sqrt((a * a).mean(1, keepdim=True) + EPS) if "rms_heads" in normalise else a


def dropped(a: Tensor, options: Options) -> Tensor:
    return a if options.get("keep") is None else a * options["keep"]


def relation(inner: Tensor, act: str, allowed: Tensor) -> Tensor:
    return softmax(inner, allowed, 3) if act == "softmax" else ACTS[act](inner)


def read(a: Tensor, symbols: Tensor) -> Tensor:
    """The sums of symbols, by key (b s g e) or by offset (t+s-1 g e), weighted by (b h t s) codes."""
    _, h, t, s = a.shape
    symbols_of_heads = heads(symbols, h)
    if symbols.ndim == 4:
        return torch.einsum("bhij,bjhe->bihe", a, symbols_of_heads)
    return torch.einsum("bhij,ijhe->bihe", a, symbols_of_heads[relative_positions(t, s) + s - 1])


def linear(x: Options, allowed: Tensor, options: Options, normalise: str = "identity") -> Tensor:
    a = dropped(code(x["q"], x["k"], allowed, options.get("normalise", normalise), options), options)
    return read(a, ACTS[options.get("act", "identity")](x["v"]))


def hyla(x: Options, allowed: Tensor, options: Options) -> Tensor:
    a = dropped(code(x["q"], x["k"], allowed, options.get("normalise", "rms_heads"), options), options)
    act = ACTS[options.get("act", "relu")]
    z = act(torch.einsum("bhij,bjhe->bije", a, heads(x["v"], a.shape[1])))
    if options.get("value_weight") is not None:
        weight = options["value_weight"]
        parts = [a[:, n, :, :, None] * torch.einsum("bije,fe->bijf", z, weight[n]) for n in range(a.shape[1])]
        z = act(sum(parts[1:], parts[0]))
    return torch.einsum("bhij,bije->bihe", a, z)


def relational(x: Options, allowed: Tensor, options: Options) -> Tensor:
    a = dropped(code(x["q"], x["k"], allowed, "softmax", options), options)
    inner = torch.einsum("birp,bjrp->brij", x["q_rel"], x["k_rel"]) / math.sqrt(x["q_rel"].shape[-1])
    rel = relation(inner, options.get("relation_act", "identity"), allowed.any(1, keepdim=True))
    relations_by_code = torch.einsum("bhij,brij->bihr", a, rel)
    return read(a, x["symbols"]) + torch.einsum("her,bihr->bihe", x["relation_weight"], relations_by_code)


def disentangled(x: Options, allowed: Tensor, options: Options) -> Tensor:
    h = x["q"].shape[2]
    inner = torch.einsum("bihp,bjhp->bhij", x["q_rel"], heads(x["k_rel"], h)) / math.sqrt(x["q_rel"].shape[-1])
    rel = relation(inner, options.get("relation_act", "identity"), allowed)
    return read(dropped(code(x["q"], x["k"], allowed, "softmax", options) * rel, options), x["symbols"])


def abstractor(x: Options, allowed: Tensor, options: Options) -> Tensor:
    a = options.get("code")
    if a is None:
        a = relation(scores(x["q"], x["k"], options), options.get("act", "softmax"), allowed)
    return read(dropped(torch.where(allowed, a, torch.zeros_like(a)), options), x["symbols"])


def pool_keys(x: Tensor, allowed: Tensor, pool: str) -> Tensor:
    """(... j) pooled over the keys that count: their maximum, mean or sum; 0 of none."""
    count = allowed.sum(-1)
    if pool == "max":
        return torch.where(count > 0, torch.where(allowed, x, -math.inf).amax(-1), 0)
    total = torch.where(allowed, x, 0).sum(-1)
    return total / count.clamp(min=1) if pool == "mean" else total


def pooled(x: Options, allowed: Tensor, options: Options) -> Tensor:
    a = dropped(code(x["q"], x["k"], allowed, options.get("normalise", "rms_heads"), options), options)
    act, pool, network = ACTS[options.get("act", "relu")], options.get("pool", "max"), options.get("network", "pair")
    values = heads(x["v"], a.shape[1])
    if network == "pair":
        z = act(torch.einsum("bhij,bjhe->bije", a, values))
        return pool_keys(torch.einsum("bhij,bije->bihej", a, z), allowed.transpose(1, 2)[:, :, :, None], pool)
    code_of_query = pool_keys(a, allowed, pool)  # (b h i)
    if network == "sequence":
        sees_any = allowed.any(3)
        code_of_query = (code_of_query * sees_any).sum(2, keepdim=True) / sees_any.sum(2, keepdim=True).clamp(min=1)
    code_of_query = code_of_query / torch.sqrt((code_of_query * code_of_query).mean(1, keepdim=True) + EPS)
    weight = a * code_of_query[..., None] if network == "sequence" else a
    allowed_in_any_head = allowed.any(1)
    hidden = pool_keys(torch.einsum("bhij,bjhe->biej", weight, values), allowed_in_any_head[:, :, None], pool)
    out = torch.einsum("bhi,bie->bihe", code_of_query.expand(a.shape[:3]), act(hidden))
    return torch.where(allowed_in_any_head.any(2)[:, :, None, None], out, 0)


OPS: dict[str, Callable[..., Tensor]] = {
    "softmax": lambda x, allowed, options: linear(x, allowed, options, "softmax"),
    "linear": linear,
    "hyla": hyla,
    "relational": relational,
    "disentangled": disentangled,
    "abstractor": abstractor,
    "pooled": pooled,
}


def answer(op: str, tensors: Options, options: Options) -> Tensor:
    """(b t h e) of float64 tensors by name; options as the op takes them, all but `impl`."""
    (b, t, h, _), s = tensors["q"].shape, tensors["k"].shape[1]
    if options.get("mask") is not None:
        hidden = ~(torch.ones(b, h, t, s, dtype=torch.bool) & options["mask"]).any(2).any(1)
        by_key = [name for name in ("k", "v", "symbols", "k_rel") if name in tensors and tensors[name].ndim == 4]
        zeroed = {name: torch.where(hidden[:, :, None, None], 0, tensors[name]) for name in by_key}
        tensors = {**tensors, **zeroed}
    return OPS[op](tensors, visible((b, h, t, s), options), options)
