"""Heads of all kinds for the drop-in of nn.MultiheadAttention, and our own layer with its weights."""

import torch

import polyhead as ph


def own_layer(ours, heads):
    """Our own layer with the weights of the drop-in."""
    layer = ph.MultiHeadAttention(ours.embed_dim, heads, bias=True, dtype=torch.float64)
    names = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias"}
    state = {names.get(name, name).replace("out_proj", "out"): x for name, x in ours.state_dict().items()}
    layer.load_state_dict(state)
    return layer


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
