"""timm's `Attention` written from its equations, and the class that the docs derive from it: for tests without timm."""

import functools
import pathlib
import re
import sys
import types
from unittest import mock

import torch
from torch import nn

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "heads_elsewhere.md"


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v, head by head, a norm, an output map."""

    def __init__(self, dim, num_heads=8, qkv_bias=False, qk_norm=False, scale_norm=False):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.norm = nn.LayerNorm(dim) if scale_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x, attn_mask=None, is_causal=False):
        q, k, v = (rows.unflatten(-1, (-1, self.head_dim)) for rows in self.qkv(x).chunk(3, -1))
        scores = torch.einsum("bthd,bshd->bhts", self.q_norm(q), self.k_norm(k)) / self.head_dim**0.5
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        heads = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)
        return self.proj_drop(self.proj(self.norm(heads.flatten(2))))


@functools.cache
def snippet(op="hyla"):
    """The names that the snippet of the docs defines, with another op of `polyhead.ops` in it."""
    section = PAGE.read_text(encoding="utf-8").partition("## Models of timm")[2]
    code = re.search(r"```py\n(.*?)```", section, re.DOTALL).group(1)
    library = types.SimpleNamespace(Attention=Attention, register_notrace_module=lambda cls: cls)
    module = types.ModuleType(f"timm_snippet_{op}")
    sys.modules[module.__name__] = module  # torch.compile imports it by its name
    with mock.patch.dict(sys.modules, {"timm": types.ModuleType("timm"), "timm.layers": library}):
        exec(code.replace("ph.ops.hyla", f"ph.ops.{op}"), vars(module))
    return vars(module)
