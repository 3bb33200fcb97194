"""timm's attention with any heads: parameters, state-dict keys and arguments stay timm's.

    model = timm.create_model("vit_small_patch16_224")
    torch_mha.replace(model, [ph.Softmax(3), ph.Hyla(3)])

timm is never imported: a module is recognised by the name of its class.  Masks are those of
`F.scaled_dot_product_attention`: True where attention is allowed, or added to the scores.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyhead import config
from polyhead.compat.foreign import check_mask, limits
from polyhead.compat.heads import Heads, OurHeads, added, plain
from polyhead.layers.call import LayerLimits
from polyhead.layers.projection import Rows
from polyhead.ops.call import AttentionCall

PLAIN = ("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention")
ROTARY = ("timm.layers.attention.AttentionRope", "timm.models.eva.EvaAttention")
"""Names of the classes that can be replaced: without rotary positions, and with them."""
PARTS = {
    *("qkv", "q_proj", "k_proj", "v_proj", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "attn_drop"),
    *("norm", "gate", "proj", "proj_drop"),
}
NUMBERS = {
    *("num_heads", "num_kv_heads", "num_kv_groups", "head_dim", "attn_dim", "kv_dim", "scale", "fused_attn"),
    *("num_prefix_tokens", "rotate_half", "qkv_bias_separate"),
}
"""All that these classes hold: a later timm may add something that our forward pass would ignore."""
_PYTORCH = set(vars(nn.Module()))


def name_of(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def is_attention(module: nn.Module) -> bool:
    """Whether a module is one of timm's that can be replaced."""
    return name_of(module) in (*PLAIN, *ROTARY)


def drop_in(old: nn.Module, heads: Heads = None, *, max_length: int = 512) -> "Attention":
    """Our module with the parts of one of timm's; both share the parameters and can be used side by side.

    Raises ValueError for heads of other widths or another number, a module with hooks, one with parts that are unknown
    here, and one with another scale, which timm uses without `fused_attn`.
    """
    if not is_attention(old):
        wanted = "nn.MultiheadAttention, or timm's Attention, AttentionRope or EvaAttention"
        raise ValueError(f"replace: {wanted} was wanted but {name_of(old)} came")
    if not plain(old):
        raise ValueError(f"replace: {type(old).__name__} as timm makes it was wanted but one with hooks came")
    held = {*vars(old), *old._modules, *old._parameters, *old._buffers} - _PYTORCH
    if unknown := sorted(held - PARTS - NUMBERS):
        raise ValueError(f"replace: {type(old).__name__} of a known timm was wanted but one with {unknown[0]} came")
    own = vars(old)
    if not own.get("fused_attn", True) and own["scale"] != (scale := own["head_dim"] ** -0.5):
        came = f"scale = head_dim ** -0.5 = {scale:.6g} but has {own['scale']:.6g}"
        raise ValueError(f"replace: {type(old).__name__} must have {came}")
    return (Attention if name_of(old) in PLAIN else AttentionRope)(old, heads, max_length)


class Attention(OurHeads):
    """timm's `Attention` with other heads; made by `replace`."""

    num_heads: int
    head_dim: int
    proj: nn.Module

    def __init__(self, old: nn.Module, heads: Heads, max_length: int) -> None:
        super().__init__()
        for name in NUMBERS & set(vars(old)):  # some models read them
            setattr(self, name, getattr(old, name))
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            getattr(self, kind).update(getattr(old, kind))
        who, like = type(old).__name__, next(old.parameters())
        groups = config.head_list("replace", config.Softmax(self.num_heads) if heads is None else heads)
        total, inner = sum(group.heads for group in groups), self.num_heads * self.head_dim
        if total != self.num_heads:
            raise ValueError(f"replace: {who} has {self.num_heads} heads but {total} came")
        weight, bias = self._values()
        symbolic = any(isinstance(group, config.SymbolHeads) for group in groups)
        if symbolic and (weight is None or tuple(weight.shape) != (inner, inner)):
            raise ValueError(f"replace: relational heads need values of the model's width {inner}, each head its own")
        self.add_groups(
            "replace",
            groups,
            inner,
            bias=bias is not None,
            max_length=max_length,
            device=like.device,
            dtype=like.dtype,
        )
        self.check_widths(self.head_dim)
        self.map_symbols(weight, bias)
        self.train(old.training)

    def part(self, name: str) -> nn.Module | None:
        """A part of timm's module; None if this one has none of that name."""
        return self._modules.get(name)

    def _values(self) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias of the values; None where a wrapper holds them."""
        joint, alone = self.part("qkv"), self.part("v_proj")
        rows, first = (joint, 2 * self.num_heads * self.head_dim) if alone is None else (alone, 0)
        if type(rows) is not nn.Linear:
            return None, None
        bias = rows.bias if rows.bias is None else rows.bias[first:]
        return rows.weight[first:], self._parameters.get("v_bias", bias)

    def values_of(self, i: int) -> tuple[Tensor | None, Tensor | None]:
        """The weight (h e m) and bias (h e) of the values of group `i`; None if they are symbols, or unknown."""
        first, last = self.heads_of[i]
        made = [None if a is None else a.detach().unflatten(0, (-1, self.head_dim)) for a in self._values()]
        if self.source_of[i] is not None or made[0] is None or len(made[0]) != self.num_heads:
            return None, None
        weight, bias = (a if a is None else a[first:last] for a in made)
        return weight, bias

    def output(self) -> nn.Module | None:
        """The map from the heads to the output; None if a norm or a gate lies between."""
        return self.proj if type(self.part("norm")) in (nn.Identity, type(None)) and not self.part("gate") else None

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """The output (b t m) for x (b t m).  Raises ValueError for a mask of another shape."""
        return self.attend(x, self.calls(x, attn_mask=attn_mask, is_causal=is_causal))

    def attend(self, x: Tensor, calls: Sequence[AttentionCall]) -> Tensor:
        """The outputs of the heads, through norm, gate and output projection."""
        y = self.outputs(calls)
        norm, gate, drop = (self.part(name) for name in ("norm", "gate", "proj_drop"))
        y = y if norm is None else norm(y)
        y = self.proj(y if gate is None else y * gate(x).sigmoid())
        return y if drop is None else drop(y)

    def calls(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> list[AttentionCall]:
        """The call of each group's op, for the arguments of `forward`."""
        b, t, _ = x.shape
        q, k, v = self._projected(x, rope)
        bias, look = self._limits(attn_mask, is_causal, b, t, q.dtype)
        rate = getattr(self.part("attn_drop"), "p", 0.0)
        limited = LayerLimits(bias, look, self.draw_keep(rate, b, t, t, x), is_causal)
        rows: list[Rows] = [{"q": q[:, :, i:j], "k": k[:, :, i:j], "v": v[:, :, i:j]} for i, j in self.heads_of]
        parts = zip(self.tensors(rows, x, x, x), self.heads_of, strict=True)
        return [limited.call(part, i, j) for part, (i, j) in parts]

    def _projected(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v (b t h d), normalised and rotated."""
        joint = self.part("qkv")
        if joint is not None:
            rows = joint(x)
            if self._parameters.get("q_bias") is not None:
                offsets = [getattr(self, f"{name}_bias") for name in "qkv"]
                rows = rows + torch.cat(offsets).to(rows.dtype)
            q, k, v = rows.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        else:
            maps = [getattr(self, f"{name}_proj") for name in "qkv"]
            q, k, v = (own(x).unflatten(-1, (-1, self.head_dim)) for own in maps)
        q, k = (x if norm is None else norm(x) for x, norm in ((q, self.part("q_norm")), (k, self.part("k_norm"))))
        if rope is not None:
            q, k = (self._rotated(x, rope).to(v.dtype) for x in (q, k))
        if k.shape[2] < self.num_heads:  # heads that share keys
            k, v = (x.repeat_interleave(self.num_heads // x.shape[2], dim=2) for x in (k, v))
        return q, k, v

    def _rotated(self, x: Tensor, rope: Tensor) -> Tensor:
        """x (b t h d) rotated by timm's [sine | cosine], (t 2d) or (b|1 1 t 2d); the first tokens have no position."""
        first = getattr(self, "num_prefix_tokens", 0)
        rest = x[:, first:].transpose(1, 2)
        sin, cos = rope.chunk(2, -1)
        if getattr(self, "rotate_half", False):
            one, other = rest.chunk(2, -1)
            turned = torch.cat((-other, one), -1)
        else:
            turned = torch.stack((-rest[..., 1::2], rest[..., ::2]), -1).flatten(-2)
        rest = (rest * cos + turned * sin).to(x.dtype).transpose(1, 2)
        return torch.cat((x[:, :first], rest), 1)

    def _limits(
        self, mask: Tensor | None, causal: bool, b: int, t: int, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        if mask is None:
            return None, None
        if causal:
            raise ValueError("Attention: attn_mask or is_causal was wanted but both came")
        check_mask("Attention: attn_mask", mask)
        whole, wanted = mask[(None,) * (4 - mask.ndim)], (b, self.num_heads, t, t)
        if whole.ndim != 4 or any(have not in (1, want) for have, want in zip(whole.shape, wanted, strict=True)):
            raise ValueError(f"Attention: attn_mask must broadcast to (b h t s) = {wanted} but is {tuple(mask.shape)}")
        bias, look = limits([whole], t, t, dtype)
        return added("Attention", self.own_groups(), bias), look


class AttentionRope(Attention):
    """timm's `AttentionRope` and `EvaAttention` with other heads; made by `replace`."""

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """The output (b t m) for x (b t m) with timm's rotary table `rope`."""
        return self.attend(x, self.calls(x, rope, attn_mask, is_causal))
