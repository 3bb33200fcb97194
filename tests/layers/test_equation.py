"""A layer is its equation, for every mechanism and mixture; taps show all parts of it.

The equation here: a map for each head, norms, rotation, the steps of the table (support/referee.py), one output map.
"""

import pytest
import referee
import torch
import zoo
from torch.nn import functional as F
from torch.testing import assert_close

import polyhead as ph
from polyhead import spec
from polyhead.layers.heads.symbolic import SymbolGroup

F64 = torch.float64
M, B, T = 48, 2, 4
SEVEN = ph.PositionSymbols(dim=7)
SIZES = [
    ph.Softmax(2, dim=6, value_dim=3),
    ph.Linear(1, dim=2, value_dim=5),
    ph.Hyla(4, dim=4, value_dim=7, kv_heads=2),
    ph.Relational(4, dim=6, value_dim=3, kv_heads=2, relations=3, relation_dim=5, symbols=SEVEN),
    ph.Disentangled(4, dim=6, value_dim=3, kv_heads=2, relation_dim=2, symbols=SEVEN),
    ph.Abstractor(4, dim=6, value_dim=3, kv_heads=1, hidden=9, act="sigmoid", symbols=SEVEN),
]
WEIGHTS = ("value_weight", "relation_weight")
MIXTURES = zoo.EVERY | {"sizes": SIZES}


def by_head(x, weight, bias, heads):
    """(b s heads d): each head has its own rows of the weight."""
    maps = weight.chunk(heads)
    return torch.stack([x @ head_weight.T for head_weight in maps], -2) + (0 if bias is None else bias.view(heads, -1))


def normalised_and_rotated(x, norm):
    """Queries or keys, normalised and turned."""
    return ph.ops.rope(F.layer_norm(x, x.shape[-1:], norm.weight, eps=1e-6), torch.arange(x.shape[1])[:, None])


def symbol_arguments(group, x, source, symbols):
    """The arguments that heads with symbols compute by maps of their own."""
    tensors = {}
    if group.hidden is not None:
        x, source = (F.gelu(group.hidden.features(tokens)) for tokens in (x, source))
        for name, tokens, heads in (("q", x, group.sizes.heads), ("k", source, group.sizes.kv_heads)):
            linear = getattr(group.hidden, name)
            tensors[name] = by_head(tokens, linear.weight, linear.bias, heads)
    if group.q_rel is not None:
        tensors["q_rel"] = by_head(x, group.q_rel.weight, None, group.related[0])
        k_rel = group.q_rel if group.k_rel is None else group.k_rel
        tensors["k_rel"] = by_head(source, k_rel.weight, None, group.related[1])
    if symbols.ndim == 2:  # a table by clipped offset
        distance = len(symbols) // 2
        symbols = symbols[torch.arange(1 - x.shape[1], source.shape[1]).clamp(-distance, distance) + distance]
    else:
        symbols = symbols.expand(B, -1, -1)
    return tensors | {"symbols": by_head(symbols, group.value.weight, group.value.bias, group.sizes.kv_heads)}


def arguments(layer, x, source):
    """Those of each group's op.  The rows of `qkv` are queries of all groups, then keys, then values."""
    widths = [size.widths[part] for part in range(3) for size in layer.sizes]
    rows = list(zip(layer.qkv.weight.split(widths), layer.qkv.bias.split(widths), strict=True))
    tensors, n = {}, len(layer.sizes)
    for i, (group, size) in enumerate(zip(layer.groups, layer.sizes, strict=True)):
        previous, tensors = tensors, {}
        for part, (name, tokens) in enumerate((("q", x), ("k", source), ("v", source))):
            if name in size.takes:
                tensors[name] = by_head(tokens, *rows[part * n + i], size.heads if name == "q" else size.kv_heads)
        if isinstance(group, SymbolGroup):
            tensors |= symbol_arguments(group, x, source, layer.symbols[layer.source_of[i]](source))
        for name, norm in zip("qk", layer.qk_norms[2 * i :], strict=False):
            tensors[name] = previous[name] if layer.shared[i] else normalised_and_rotated(tensors[name], norm)
        for name in WEIGHTS:
            if getattr(group, name, None) is not None:
                tensors[name] = getattr(group, name)
        yield tensors


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_a_layer_is_its_equation(mixture, cross):
    heads = MIXTURES[mixture]
    layer = zoo.make_layer(heads, positions=ph.Rotary(), qk_norm=True)
    x, context = torch.randn(B, T, M, dtype=F64), torch.randn(B, T + 1, M, dtype=F64) if cross else None
    source = x if context is None else context
    mask, keep = (torch.rand(B, layer.total_heads, T, source.shape[1], dtype=F64) > share for share in (0.3, 0.4))
    mask[:, :, 1], keep, taps = False, keep.double() * 2, []
    y, code = layer(x, context, mask=mask, keep=keep, return_code=True, taps=taps)
    assert_close(y[:, 1], layer.out.bias.expand(B, -1), rtol=0, atol=0)
    assert code[~mask].eq(0).all()
    assert_close(layer(x, context, mask=mask, return_code=True)[1], code)  # before dropout

    outputs = []
    for i, (tensors, mechanism, (first, last)) in enumerate(
        zip(arguments(layer, x, source), heads, layer.heads_of, strict=True)
    ):
        row = next(row for row in spec.MECHANISMS if row.config == type(mechanism).__name__)
        arrays = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
        limits = {"mask": mask[:, first:last].numpy(), "keep": keep[:, first:last].numpy()}
        options = {name: getattr(mechanism, name) for name in row.options}
        if isinstance(mechanism, ph.Softmax):
            sinks = layer.groups[i].sinks
            options |= {"softcap": mechanism.softcap, "sinks": None if sinks is None else sinks.detach().numpy()}
        output = torch.from_numpy(referee.run(row.op, arrays, options=options, **limits))
        if getattr(mechanism, "gate", False):
            gate = layer.gates[str(i)]
            output = output * by_head(x, gate.weight, gate.bias, mechanism.heads).sigmoid()
        outputs.append(output)
    joint = torch.cat([output.flatten(2) for output in outputs], -1)
    assert_close(y, joint @ layer.out.weight.T + layer.out.bias, rtol=1e-9, atol=1e-9)

    groups = taps[0].groups
    assert_close(sum(torch.einsum("hme,bthe->btm", group.w_out, group.output) for group in groups) + taps[0].b_out, y)
    for group in groups:
        if group.w_value is not None:
            assert_close(torch.einsum("gem,bsm->bsge", group.w_value, source) + group.b_value, group.v)
    y.square().sum().backward()
    for name, parameter in (*layer.groups.named_parameters(), *layer.qkv.named_parameters()):
        assert parameter.numel() == 0 or parameter.grad.any(), name
