"""The table of mechanisms, executed: `spec.MECHANISMS[...].steps` in NumPy, to test PyTorch and JAX against."""

import math

import numpy as np

from polyhead import spec

ACTS = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
}


def softmax(x, look, axis):
    """Over what may look; zeros where nothing may."""
    e = np.where(look, np.exp(x - x.max()), 0)
    total = e.sum(axis, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


def sight(b, h, t, s, *, mask=None, causal=False, window=None, edges=None):
    """(b h t s), True where attention is allowed, as spec.AXES and spec.CAUSAL say."""
    i, j = np.arange(s - t, s)[:, None], np.arange(s)
    look = np.ones((b, h, t, s), bool) if mask is None else np.broadcast_to(mask, (b, h, t, s)).copy()
    look &= j <= i if causal else True
    look &= np.abs(i - j) < window if window is not None else True
    if edges is not None:
        number = np.searchsorted(edges[1:], np.arange(t), side="right")
        look &= number[:, None] == number
    return look


def by_pair(x, t, s, axis):
    """A tensor by offset along `axis`, expanded to (t, s) there."""
    return np.take(x, np.arange(s) - np.arange(t)[:, None] + t - 1, axis)


def code_of(scores, look, how):
    """Normalised, or through an activation."""
    if how in ACTS:
        return np.where(look, ACTS[how](scores), 0)
    code = softmax(scores, look, 3) if how in ("softmax", "softmax_rms_heads") else np.where(look, scores, 0)
    code = softmax(scores, look, 1) if how == "softmax_heads" else code
    square = np.square(code).mean(1, keepdims=True)
    return code / np.sqrt(square + spec.RMS_HEADS_EPS) if "rms_heads" in how else code


def pooled(axes, x, pool, look):
    """One key in place of all that are visible, by their maximum, mean or sum; 0 in place of none."""
    s = axes.index("s")
    if x.shape[s] != look.shape[3]:
        return x  # pooled before
    look = look if "h" in axes else look.any(1, keepdims=True)
    size = [x.shape[n] if a in "bhts" else 1 for n, a in enumerate(axes)]
    seen = np.einsum(f"bhts->{''.join(a for a in axes if a in 'bhts')}", look) if "h" in axes else look[:, 0]
    seen, count = seen.reshape(size), seen.reshape(size).sum(s, keepdims=True)
    if pool == "max":
        return np.where(count > 0, np.where(seen, x, -np.inf).max(s, keepdims=True), 0)
    return x.sum(s, keepdims=True) / (1 if pool == "sum" else np.maximum(count, 1))


def run(
    op, tensors, *, options=None, bias=None, mask=None, causal=False, window=None, edges=None, keep=None, scale=None,
    code=None,
):  # fmt: skip
    """The output (b t h e) of an op for float64 arrays by name; what is optional is skipped where it is not given.

    With a `code` (b h t s), it is taken instead of what the table makes of q and k.
    """
    row = spec.mechanism(op)
    options = {**row.options, **(options or {})}
    (b, t, h, d), s = tensors["q"].shape, tensors["k"].shape[1]
    look = sight(b, h, t, s, mask=mask, causal=causal, window=window, edges=edges)
    for_all = look.any(1, keepdims=True)
    arrays = {name: np.repeat(x, h // x.shape[2], 2) if "g" in row.tensors.get(name, "") else x
              for name, x in tensors.items() if name != "symbols"}  # fmt: skip
    if "symbols" in tensors:
        arrays["symbols"] = np.repeat(tensors["symbols"], h // tensors["symbols"].shape[-2], -2)
    done = {}
    for step in row.steps:
        if any(name in row.optional and name not in arrays for name in step.reads):
            continue
        given = [done[name] if name in done else arrays[name] for name in step.reads]
        subscripts = step.einsum
        if "symbols" in step.reads and arrays["symbols"].ndim == 3:
            given[-1], subscripts = by_pair(arrays["symbols"], t, s, 0), subscripts.replace("b s h e", "t s h e")
        out = np.einsum(subscripts.replace(" ", ""), *given)
        if step.then == "code" and code is not None:
            out = code * (1 if keep is None else keep)
        elif step.then == "code":
            scores = out * (d**-0.5 if scale is None else scale)
            scores = scores + (0 if bias is None else by_pair(bias, t, s, 1) if bias.ndim == 2 else bias)
            how = options.get("normalise", options.get("act") if row.config == "Abstractor" else row.normalise)
            out = code_of(scores, look, how) * (1 if keep is None else keep)
        elif step.then in ("pool", "network"):
            axes = step.einsum.split("->")[1].split()
            if step.then == "pool" or options["network"] == "query":
                out = pooled(axes, out, options["pool"], look)
            if step.result == "code" and options["network"] == "query":
                out = out / np.sqrt(np.square(out).mean(1, keepdims=True) + spec.RMS_HEADS_EPS)
            if step.result == "out":
                out = out[:, :, 0]
        elif step.then:
            act = options[step.then]
            out = out * tensors["q_rel"].shape[-1] ** -0.5 if step.then == "relation_act" else out
            where = look if out.shape[1] == h and "h" in step.einsum.split("->")[1] else for_all
            out = softmax(out, np.broadcast_to(where, out.shape), 3) if act == "softmax" else ACTS[act](out)
        done[step.result] = done[step.result] + out if (step.result == "out" and "out" in done) else out
    return done["out"]
