"""nn.MultiheadAttention and ours with the same weights, its masks, and other heads in its place."""

import torch
from torch import nn

import polyhead as ph
from polyhead.compat.torch_mha import MultiheadAttention

F64 = torch.float64
B, T, S, DIM, HEADS = 2, 4, 5, 12, 4
KINDS = {"self": {}, "cross": {}, "widths": {"kdim": 7, "vdim": 10}, "no biases": {"bias": False}}
MIXED = {
    "mixture": [ph.Softmax(1), ph.Hyla(2), ph.Linear(1)],
    "deep": ph.Hyla(4, value_depth=2),
    "grouped": [ph.Softmax(2, kv_heads=1), ph.Hyla(2, kv_heads=1, value_dim=5)],
    "positions": [ph.Softmax(2), ph.Relational(2)],
    "relative": [ph.Relational(2, symbols=ph.RelativeSymbols(3)), ph.Softmax(2)],
    "library": ph.Disentangled(4, symbols=ph.SymbolicAttention(5)),
    "neighbours": [ph.Softmax(2), ph.Relational(2, symbols=ph.RelationalSymbols(causal=False))],
    "abstractor": ph.Abstractor(4, act="sigmoid"),
    "share": [ph.Softmax(2), ph.Hyla(2, share=True)],
}


def scrambled(module):
    """With random weights."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def pair(kind="self", **options):
    """PyTorch's and ours, with the same random weights."""
    options = {"dtype": F64, "batch_first": True, **KINDS[kind], **options}
    pytorch_module, drop_in = nn.MultiheadAttention(DIM, HEADS, **options), MultiheadAttention(DIM, HEADS, **options)
    drop_in.load_state_dict(scrambled(pytorch_module).state_dict())
    return pytorch_module, drop_in


def inputs(kind):
    """query, key, value, batch first; in "cross" and "widths" keys and values are different tensors."""
    if kind in ("self", "no biases"):
        return (torch.randn(B, S, DIM, dtype=F64, requires_grad=True),) * 3
    k, v = KINDS[kind].get("kdim", DIM), KINDS[kind].get("vdim", DIM)
    return tuple(torch.randn(B, n, m, dtype=F64, requires_grad=True) for n, m in ((T, DIM), (S, k), (S, v)))


def masks(name, t):
    """PyTorch's masks: True is hidden; key 0 is always visible, so that no row is NaN."""
    padding, pairs, per_head = torch.rand(B, S) > 0.6, torch.rand(t, S) > 0.6, torch.rand(B * HEADS, t, S) > 0.6
    padding[:, 0], pairs[:, 0], per_head[..., 0] = False, False, False
    added = torch.randn(t, S, dtype=F64).masked_fill(pairs, -torch.inf)
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "added padding": {"key_padding_mask": torch.zeros(B, S, dtype=F64).masked_fill(padding, -torch.inf)},
        "pairs": {"attn_mask": pairs},
        "added pairs": {"attn_mask": added},
        "per head": {"attn_mask": torch.randn(B * HEADS, t, S, dtype=F64).masked_fill(per_head, -torch.inf)},
        "both": {"key_padding_mask": padding, "attn_mask": pairs},
        "bool and added": {"key_padding_mask": torch.randn(B, S, dtype=F64), "attn_mask": added},
    }[name]


def own_layer(drop_in, heads):
    """Our own layer with the weights of the drop-in."""
    layer = ph.MultiHeadAttention(drop_in.embed_dim, heads, bias=True, dtype=F64)
    names = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias"}
    state = {names.get(name, name).replace("out_proj", "out"): x for name, x in drop_in.state_dict().items()}
    layer.load_state_dict(state)
    return layer


def rebuilt(taps, sample, query):
    """A row of the layer's output: the sum of its value networks over keys."""
    total = 0 if taps.b_out is None else taps.b_out
    for j in range(taps.context.shape[1]):
        for group in range(len(taps.groups)):
            network = ph.analysis.value_network(taps, query, j, sample=sample, group=group)
            total = total + network(taps.context[sample, j])
    return total
