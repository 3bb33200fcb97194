"""The table of mechanisms, executed: `spec.MECHANISMS[...].steps`, to test PyTorch and JAX against.

What the table names and does not spell out, such as masks, a softmax and activations, is the oracle's (oracle.py).
"""

import einops
import torch
from oracle import ACTS, heads, places, softmax, spelled, visible

from polyhead import spec


def sight(b, h, t, s, *, mask=None, causal=False, window=None, edges=None):
    """(b h t s), True where attention is allowed, as spec.AXES and spec/table.py say."""
    limits = {"mask": mask if mask is None else torch.from_numpy(mask), "causal": causal, "window": window}
    edges = None if edges is None else torch.tensor(edges)
    return visible((b, h, t, s), {**limits, "cu_seqlens": edges}).numpy()


def code_of(scores, look, how):
    """Normalised, or through an activation."""
    if how in ACTS:
        return torch.where(look, ACTS[how](scores), 0)
    code = softmax(scores, look, 3) if how in ("softmax", "softmax_rms_heads") else torch.where(look, scores, 0)
    code = softmax(scores, look, 1) if how == "softmax_heads" else code
    return over_heads(code) if "rms_heads" in how else code


def over_heads(code):
    return code / torch.sqrt(code.square().mean(1, keepdim=True) + spec.RMS_HEADS_EPS)


def pooled(axes, x, pool, look):
    """One key in place of all that are visible, by their maximum, mean or sum; 0 in place of none."""
    s = axes.index("s")
    if x.shape[s] != look.shape[3]:
        return x  # pooled before
    seen = einops.reduce(look, f"b h t s -> {' '.join(a if a in 'bhts' else '1' for a in axes)}", "any")
    count = seen.sum(s, keepdim=True)
    if pool == "max":
        return torch.where(count > 0, torch.where(seen, x, -torch.inf).amax(s, keepdim=True), 0)
    return x.sum(s, keepdim=True) / (1 if pool == "sum" else count.clamp(min=1))


def code_of_sequence(code, pool, look):
    """(b h 1 1): the mean of pooled codes over the queries that see a key, divided by its rms over heads."""
    num_queries = look.any(3, keepdim=True).sum(2, keepdim=True).clamp(min=1)
    return over_heads(pooled("bhts", code, pool, look).sum(2, keepdim=True) / num_queries)


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
    look = torch.from_numpy(sight(b, h, t, s, mask=mask, causal=causal, window=window, edges=edges))
    bias, keep, code = (x if x is None else torch.from_numpy(x) for x in (bias, keep, code))
    arrays = {name: torch.from_numpy(x) for name, x in tensors.items()}
    arrays = {name: heads(x, h) if "g" in row.tensors.get(name, "") else x for name, x in arrays.items()}
    done = {}
    for step in row.steps:
        if any(name in row.optional and name not in arrays for name in step.reads):
            continue
        network = options.get("network")
        given = [done[name] if name in done else arrays[name] for name in step.reads]
        subscripts = step.einsum
        if "symbols" in step.reads and arrays["symbols"].ndim == 3:
            given[-1] = arrays["symbols"][places(t, s) + s - 1]
            subscripts = subscripts.replace("b s h e", "t s h e")
        if network == "sequence" and step.result == "z" and step.then == "network":
            given[0] = given[0] * code_of_sequence(given[0], options["pool"], look)
        out = torch.einsum(subscripts, *given)
        if step.then == "code":
            scores = out * (d**-0.5 if scale is None else scale)
            if options.get("softcap"):
                scores = options["softcap"] * torch.tanh(scores / options["softcap"])
            scores = scores + (0 if bias is None else spelled(bias, t, s))
            how = options.get("normalise", options.get("act") if row.config == "Abstractor" else row.normalise)
            if options.get("sinks") is not None:  # one key more, whose code is dropped
                sinks = torch.from_numpy(options["sinks"])[None, :, None, None].expand(b, h, t, 1)
                code = softmax(torch.cat((scores, sinks), 3), torch.cat((look, look[..., :1] | True), 3), 3)[..., :-1]
            out = (code_of(scores, look, how) if code is None else code) * (1 if keep is None else keep)
        elif step.then in ("pool", "network"):
            if network == "sequence" and step.result == "code":
                out = code_of_sequence(out, options["pool"], look).expand(b, h, t, 1)
            elif step.then == "pool" or network != "pair":
                out = pooled(step.einsum.split("->")[1].split(), out, options["pool"], look)
            if step.result == "code" and network == "query":
                out = over_heads(out)
            if step.result == "out":
                out = out[:, :, 0]
        elif step.then:
            assert step.then in options, f"{op}: a step to {step.then!r}, which has no branch here"
            act = options[step.then]
            out = out * arrays["q_rel"].shape[-1] ** -0.5 if step.then == "relation_act" else out
            own = out.shape[1] == h and "h" in step.einsum.split("->")[1]
            where = look if own else look.any(1, keepdim=True)
            out = softmax(out, where, 3) if act == "softmax" else ACTS[act](out)
        done[step.result] = done[step.result] + out if (step.result == "out" and "out" in done) else out
    return done["out"].numpy()
