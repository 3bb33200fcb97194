"""Attention with timm's names of classes, parts and arguments, written from its equations: for tests without timm."""

import torch
from torch import nn


class Norm(nn.LayerNorm):
    """A norm with an affine map, as timm's models give it."""


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v, head by head, a norm, a gate, an output map."""

    __module__, rotary = "timm.layers.attention", False

    def __init__(self, dim, num_heads=8, attn_head_dim=None, dim_out=None, qkv_bias=False, qk_norm=False, **more):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, attn_head_dim or dim // num_heads
        self.attn_dim, self.scale = num_heads * self.head_dim, self.head_dim**-0.5
        self.fused_attn = True
        self.project(dim, qkv_bias, more)
        self.q_norm, self.k_norm = (Norm(self.head_dim) if qk_norm else nn.Identity() for _ in "qk")
        self.attn_drop, self.proj_drop = nn.Dropout(more.get("attn_drop", 0.0)), nn.Dropout(more.get("proj_drop", 0.0))
        self.norm = Norm(self.attn_dim) if more.get("scale_norm") else nn.Identity()
        self.gate = nn.Linear(dim, self.attn_dim, bias=qkv_bias) if more.get("gated") else None
        self.proj = nn.Linear(self.attn_dim, dim_out or dim, bias=more.get("proj_bias", True))

    def project(self, dim, bias, more):
        self.qkv = nn.Linear(dim, 3 * self.attn_dim, bias=bias)

    def rows(self, x):
        return self.qkv(x).chunk(3, -1)

    def rotated(self, x, rope):
        return x

    def forward(self, x, attn_mask=None, is_causal=False, rope=None):
        q, k, v = (rows.unflatten(-1, (-1, self.head_dim)) for rows in self.rows(x))
        q, k = self.rotated(self.q_norm(q), rope), self.rotated(self.k_norm(k), rope)
        heads = []
        for h in range(self.num_heads):
            g = h * k.shape[2] // self.num_heads
            scores = torch.einsum("btd,bsd->bts", q[:, :, h], k[:, :, g]) / self.head_dim**0.5
            if attn_mask is not None:
                mask = attn_mask.expand(len(x), self.num_heads, *scores.shape[1:])[:, h]
                scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
            if is_causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            heads.append(self.attn_drop(scores.softmax(-1)) @ v[:, :, g])
        y = self.norm(torch.cat(heads, -1))
        return self.proj_drop(self.proj(y if self.gate is None else torch.sigmoid(self.gate(x)) * y))


class AttentionRope(Attention):
    """With rotary positions, of which the first tokens have none, and separate maps."""

    __module__, rotary = "timm.layers.attention", True

    def project(self, dim, bias, more):
        self.num_prefix_tokens, self.rotate_half = more.get("num_prefix_tokens", 1), more.get("rotate_half", False)
        self.num_kv_heads = more.get("num_kv_heads") or self.num_heads
        self.num_kv_groups, self.kv_dim = self.num_heads // self.num_kv_heads, self.head_dim * self.num_kv_heads
        self.qkv = self.q_proj = self.k_proj = self.v_proj = None
        if more.get("qkv_fused", True):
            super().project(dim, bias, more)
        else:
            self.q_proj = nn.Linear(dim, self.attn_dim, bias=bias)
            self.k_proj, self.v_proj = (nn.Linear(dim, self.kv_dim, bias=bias) for _ in "kv")

    def rows(self, x):
        return super().rows(x) if self.qkv is not None else (self.q_proj(x), self.k_proj(x), self.v_proj(x))

    def rotated(self, x, rope):
        """Pairs of features as complex numbers, turned by the table's angles."""
        if rope is None:
            return x
        first, rest = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        sin, cos = (part[:, None] for part in rope.chunk(2, -1))
        half = x.shape[-1] // 2
        places = [(i, i + half) if self.rotate_half else (2 * i, 2 * i + 1) for i in range(half)]
        turned = torch.empty_like(rest)
        for i, j in places:
            pair = torch.complex(rest[..., i], rest[..., j]) * torch.complex(cos[..., i], sin[..., i])
            turned[..., i], turned[..., j] = pair.real, pair.imag
        return torch.cat((first, turned), 1)

    def forward(self, x, rope=None, attn_mask=None, is_causal=False):
        return super().forward(x, attn_mask, is_causal, rope)


class EvaAttention(AttentionRope):
    """With a joint map whose keys have no bias."""

    __module__ = "timm.models.eva"

    def project(self, dim, bias, more):
        super().project(dim, False, more)
        del self.num_kv_heads, self.num_kv_groups, self.kv_dim
        self.qkv_bias_separate = more.get("qkv_bias_separate", False)
        self.q_bias = self.k_bias = self.v_bias = None
        if bias and self.qkv is not None:
            del self.q_bias, self.k_bias, self.v_bias
            self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(self.attn_dim)) for _ in "qv")
            self.register_buffer("k_bias", torch.zeros(self.attn_dim), persistent=False)

    def rows(self, x):
        rows = super().rows(x)
        if self.q_bias is None:
            return rows
        return [row + bias for row, bias in zip(rows, (self.q_bias, self.k_bias, self.v_bias), strict=True)]
