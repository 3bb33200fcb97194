"""The equation of every op as Python loops over explicit indices, in float64, without polyhead.

`answer` gives the output of an op; a mechanism has the method that is named as its folder.
"""

import itertools
import math

import numpy as np
import torch

LIMITS = ("bias", "mask", "causal", "window", "cu_seqlens", "scale", "keep")
"""Options that every op has; the others are those of its equation."""

ACTS = {
    "identity": lambda x: x,
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "tanh": math.tanh,
}


class Loops:
    """Reads its arguments one number at a time."""

    def __init__(
        self, q, k, v, *, bias=None, mask=None, causal=False, window=None, cu_seqlens=None, scale=None, keep=None
    ):
        self.q, self.k, self.v = (x.detach().double().numpy() for x in (q, k, v))
        (self.b, self.t, self.h, self.d), (_, self.s, self.g, _) = self.q.shape, self.k.shape
        self.e = self.v.shape[-1]
        self.bias = None if bias is None else bias.detach().double().numpy()
        self.mask = None if mask is None else np.broadcast_to(mask.numpy(), (self.b, self.h, self.t, self.s))
        self.keep = None if keep is None else np.broadcast_to(keep.numpy(), (self.b, self.h, self.t, self.s))
        self.causal, self.scale = causal, 1 / math.sqrt(self.d) if scale is None else scale
        # Rows behind the last edge form one more sequence.
        self.window, self.edges = window, None if cu_seqlens is None else [*cu_seqlens.tolist(), self.t]

    def sees(self, b, h, i, j):
        behind = (self.s - 1 - j) - (self.t - 1 - i)  # how many places the key comes before the query
        past = not self.causal or behind >= 0
        near = self.window is None or -self.window < behind < self.window
        own = self.edges is None or any({i, j} <= {*range(*ends)} for ends in itertools.pairwise(self.edges))
        return past and near and own and (self.mask is None or bool(self.mask[b, h, i, j]))

    def any_sees(self, b, r, i, j):
        """Does any head?  For a relation, which all heads share."""
        return any(self.sees(b, h, i, j) for h in range(self.h))

    def score(self, b, h, i, j):
        group = h // (self.h // self.g)
        s = self.scale * sum(self.q[b, i, h, c] * self.k[b, j, group, c] for c in range(self.d))
        if self.bias is None:
            return s
        if self.bias.ndim == 2:
            return s + self.bias[h, j - i + self.t - 1]
        return s + self.bias[min(b, self.bias.shape[0] - 1), min(h, self.bias.shape[1] - 1), i, j]

    def code(self, normalise):
        """a[b, h, i, j], before dropout."""
        a = np.zeros((self.b, self.h, self.t, self.s))
        for b, i in np.ndindex(self.b, self.t):
            for h in range(self.h):
                seen = {j: self.score(b, h, i, j) for j in range(self.s) if self.sees(b, h, i, j)}
                if normalise in ("softmax", "softmax_rms_heads") and seen:
                    top = max(seen.values())
                    total = sum(math.exp(s - top) for s in seen.values())
                    seen = {j: math.exp(s - top) / total for j, s in seen.items()}
                for j, s in seen.items():
                    a[b, h, i, j] = s
            if normalise == "softmax_heads":
                for j in range(self.s):
                    seen = [h for h in range(self.h) if self.sees(b, h, i, j)]
                    total = sum(math.exp(a[b, h, i, j]) for h in seen)
                    a[b, seen, i, j] = [math.exp(a[b, h, i, j]) / total for h in seen]
            if "rms_heads" in normalise:
                for j in range(self.s):
                    square = sum(a[b, h, i, j] ** 2 for h in range(self.h)) / self.h
                    a[b, :, i, j] = [a[b, h, i, j] / math.sqrt(square + 1e-6) for h in range(self.h)]
        return a

    def dropped(self, normalise):
        return self.code(normalise) if self.keep is None else self.code(normalise) * self.keep

    def softmax(self):
        return self.linear("softmax")

    def linear(self, normalise="identity", act="identity"):
        """sum_j a act(v)."""
        a, out = self.dropped(normalise), np.zeros((self.b, self.t, self.h, self.e))
        for b, i, h, c in np.ndindex(*out.shape):
            group = h // (self.h // self.g)
            out[b, i, h, c] = sum(a[b, h, i, j] * ACTS[act](self.v[b, j, group, c]) for j in range(self.s))
        return out

    def hyla(self, normalise="rms_heads", act="relu", value_weight=None):
        """Each pair builds its matrices from its code and runs them."""
        a, out = self.dropped(normalise), np.zeros((self.b, self.t, self.h, self.e))
        for b, i, j in np.ndindex(self.b, self.t, self.s):
            pair = [a[b, h, i, j] for h in range(self.h)]
            own = [self.v[b, j, h // (self.h // self.g)] for h in range(self.h)]
            z = [ACTS[act](sum(pair[h] * own[h][c] for h in range(self.h))) for c in range(self.e)]
            if value_weight is not None:
                w = value_weight.detach().numpy()
                mix = [[sum(pair[h] * w[h, o, c] for h in range(self.h)) for c in range(self.e)] for o in range(self.e)]
                z = [ACTS[act](sum(mix[o][c] * z[c] for c in range(self.e))) for o in range(self.e)]
            for h in range(self.h):
                out[b, i, h] += np.array([pair[h] * x for x in z])
        return out

    def pooled(self, normalise="rms_heads", act="relu", pool="max", network="pair"):
        """The outputs of the pairs' networks, pooled; or the network of a query, made of pooled codes."""
        bring = {"sum": sum, "max": max, "mean": lambda each: sum(each) / len(each)}[pool]
        if network == "sequence":
            return self.pooled_by_sequence(normalise, act, bring)
        a, out = self.dropped(normalise), np.zeros((self.b, self.t, self.h, self.e))
        every = range(self.h)
        for b, i, c in np.ndindex(self.b, self.t, self.e):
            seen = [[j for j in range(self.s) if self.sees(b, h, i, j)] for h in every]
            any_sees = sorted(set().union(*seen))
            hidden = {j: sum(a[b, h, i, j] * self.v[b, j, h // (self.h // self.g), c] for h in every) for j in any_sees}
            if network == "pair":
                for h in every:
                    out[b, i, h, c] = bring([a[b, h, i, j] * ACTS[act](hidden[j]) for j in seen[h]]) if seen[h] else 0
            elif any_sees:
                own = [bring([a[b, h, i, j] for j in seen[h]]) if seen[h] else 0.0 for h in every]
                size = math.sqrt(sum(x**2 for x in own) / self.h + 1e-6)
                for h in every:
                    out[b, i, h, c] = own[h] / size * ACTS[act](bring(list(hidden.values())))
        return out

    def pooled_by_sequence(self, normalise, act, bring):
        """One network for all queries of a sample, made of the mean of their pooled codes."""
        a, out = self.dropped(normalise), np.zeros((self.b, self.t, self.h, self.e))
        for b in range(self.b):
            codes = []
            for h in range(self.h):
                pooled_codes = []
                for i in range(self.t):
                    keys = [j for j in range(self.s) if self.sees(b, h, i, j)]
                    if keys:
                        pooled_codes.append(bring([a[b, h, i, j] for j in keys]))
                codes.append(sum(pooled_codes) / max(len(pooled_codes), 1))
            size = math.sqrt(sum(code**2 for code in codes) / self.h + 1e-6)
            codes = [code / size for code in codes]
            for i, c in np.ndindex(self.t, self.e):
                mixed = []
                for j in range(self.s):
                    if self.any_sees(b, 0, i, j):
                        values = [self.v[b, j, h // (self.h // self.g), c] for h in range(self.h)]
                        mixed.append(sum(codes[h] * a[b, h, i, j] * values[h] for h in range(self.h)))
                if mixed:
                    out[b, i, :, c] = np.array(codes) * ACTS[act](bring(mixed))
        return out

    def symbol(self, b, h, i, j):
        """By key, or by offset."""
        group = h // (self.h // self.g)
        return self.v[b, j, group] if self.v.ndim == 4 else self.v[j - i + self.t - 1, group]

    def relations(self, q_rel, k_rel, act, sees):
        """(b r t s) from (b t r p) and (b s r p); `sees(b, r, i, j)` says what a softmax runs over."""
        q_rel, k_rel = (x.detach().double().numpy() for x in (q_rel, k_rel))
        r, p = q_rel.shape[2:]
        rel = np.zeros((self.b, r, self.t, self.s))
        for b, c, i, j in np.ndindex(*rel.shape):
            rel[b, c, i, j] = sum(q_rel[b, i, c, n] * k_rel[b, j, c, n] for n in range(p)) / math.sqrt(p)
            if act != "softmax":
                rel[b, c, i, j] = ACTS[act](rel[b, c, i, j])
        if act == "softmax":
            for b, c, i in np.ndindex(self.b, r, self.t):
                seen = [j for j in range(self.s) if sees(b, c, i, j)]
                total = sum(math.exp(rel[b, c, i, j]) for j in seen)
                for j in range(self.s):
                    rel[b, c, i, j] = math.exp(rel[b, c, i, j]) / total if j in seen else 0.0
        return rel

    def relational(self, q_rel, k_rel, weight, relation_act="identity"):
        """sum_j a symbols_j + W sum_j a rel_j."""
        a, out = self.dropped("softmax"), np.zeros((self.b, self.t, self.h, self.e))
        rel = self.relations(q_rel, k_rel, relation_act, self.any_sees)
        weight = weight.detach().double().numpy()
        for b, i, h, j in np.ndindex(self.b, self.t, self.h, self.s):
            out[b, i, h] += a[b, h, i, j] * (self.symbol(b, h, i, j) + weight[h] @ rel[b, :, i, j])
        return out

    def disentangled(self, q_rel, k_rel, relation_act="identity"):
        """sum_j a rel_j symbols_j, a relation per head."""
        a, out = self.dropped("softmax"), np.zeros((self.b, self.t, self.h, self.e))
        rel = self.relations(q_rel, k_rel.repeat_interleave(self.h // self.g, 2), relation_act, self.sees)
        for b, i, h, j in np.ndindex(self.b, self.t, self.h, self.s):
            out[b, i, h] += a[b, h, i, j] * rel[b, h, i, j] * self.symbol(b, h, i, j)
        return out

    def abstractor(self, act="softmax"):
        """sum_j act(score_j) symbols_j."""
        a = self.dropped("softmax" if act == "softmax" else "identity")
        out = np.zeros((self.b, self.t, self.h, self.e))
        for b, i, h, j in np.ndindex(self.b, self.t, self.h, self.s):
            if act != "softmax":
                keep = 1.0 if self.keep is None else self.keep[b, h, i, j]
                a[b, h, i, j] = ACTS[act](self.score(b, h, i, j)) * keep if self.sees(b, h, i, j) else 0.0
            out[b, i, h] += a[b, h, i, j] * self.symbol(b, h, i, j)
        return out


def answer(op, tensors, options):
    """The output (b t h e) of an op, given its tensors in order and its options by name."""
    q, k, *more = tensors
    values = more.pop(2 if op in ("relational", "disentangled") else 0)
    limits = {name: x for name, x in options.items() if name in LIMITS}
    own = {name: x for name, x in options.items() if name not in LIMITS}
    return torch.tensor(getattr(Loops(q, k, values, **limits), op)(*more, **own))
