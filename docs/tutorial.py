# %% [markdown]
# # Tutorial: from one head to HYLA and dual attention
#
# This page introduces attention heads step by step: one head, many heads, masks, heads as hypernetworks, HYLA,
# relational heads. Each is written by hand, compared with the library's function, and drawn. [A second
# page](tutorial_jax.py) does the same in JAX.
#
# The page is a script. Run it in the environment of `make demo` (elsewhere: `pip install -e '.[report]'`), or open
# `docs/tutorial.py` as a notebook (with Jupytext, or an editor that supports `# %%` cells). Every `assert` holds.
#
# Letters: b sequences, t queries, s keys, h heads, d the width of queries and keys, e of values, m of the model.

# %%
import math

import matplotlib.pyplot as plt
import numpy as np
import torch

import polyhead as ph
from polyhead.tasks.sraven.ambiguity import correspondences
from polyhead.tasks.sraven.task import RULES, draw_instances

torch.manual_seed(0)


def draw(panels, rows, columns, across=("key", "query")):
    """Matrices side by side: {title: matrix}; negative is red, 0 white, positive blue."""
    _, grid = plt.subplots(1, len(panels), figsize=(3 * len(panels), 2.8), layout="constrained", squeeze=False)
    for axes, (title, matrix) in zip(grid[0], panels.items(), strict=True):
        assert matrix.shape == (len(rows), len(columns))
        most = float(matrix.abs().max())
        axes.imshow(matrix.numpy(), cmap="RdBu", vmin=-most, vmax=most)
        axes.set(title=title, xlabel=across[0], ylabel=across[1])
        axes.set_xticks(range(len(columns)), columns, fontsize=7)
        axes.set_yticks(range(len(rows)), rows, fontsize=7)


# %% [markdown]
# ## One head
#
# A head computes a weighted mean over tokens. Token t has a *query* $q_t$. Every token s has a *key* $k_s$ and a
# *value* $v_s$. The better a key matches the query, the larger the weight of its value:
#
# $$a_{ts} = \mathrm{softmax}_s\left(\frac{q_t \cdot k_s}{\sqrt{d}}\right) \qquad y_t = \sum_s a_{ts} v_s$$
#
# In this example queries and keys encode letters, so equal letters attend to each other. The library's functions take
# batches of many heads, `(b t h d)`. One head of one sequence has two axes of length 1.

# %%
letters = "abacba"
table = 3 * torch.eye(3)
q = k = table[["abc".index(letter) for letter in letters]]  # (t d)
v = torch.randn(6, 4)  # (s e)
scores = q @ k.T / math.sqrt(q.shape[-1])
a = torch.softmax(scores, dim=-1)
y = a @ v
draw({"scores": scores, "after the softmax: a": a}, letters, letters)
out = ph.ops.softmax_attention(q[None, :, None], k[None, :, None], v[None, :, None])  # (b t h e)
assert torch.allclose(out[0, :, 0], y, atol=1e-6)

# %% [markdown]
# ## Many heads
#
# With h heads, each head has its own attention weights. The model's vector $x_t$ of width m is projected to h small
# queries, keys and values. The outputs of the heads are projected back to width m. "Concatenate, then multiply by one
# matrix" is the same as "multiply each head by its own output matrix, then add up". The second form is used below:
#
# $$y_t = \mathrm{concat}(\mathrm{head}_1, \ldots, \mathrm{head}_h) W = \sum_h W^{\mathrm{out}}_h \mathrm{head}_{th}$$
#
# `ph.MultiHeadAttention` is the layer with these projections.

# %%
b, t, h, d, m = 2, 12, 8, 8, 64
q, k, v = torch.randn(3, b, t, h, d)
heads = ph.ops.softmax_attention(q, k, v)  # (b t h e)
w = torch.randn(h, m, d)
joined = heads.flatten(2) @ w.transpose(1, 2).flatten(0, 1)  # concatenated, then one matrix (h e, m)
assert torch.allclose(joined, torch.einsum("hme,bthe->btm", w, heads), atol=1e-4)

layer = ph.MultiHeadAttention(m, ph.Softmax(h))
x = torch.randn(b, t, m)
print(layer(x).shape, {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()})

# %% [markdown]
# ## Masks: encoders and decoders
#
# A mask states which query may attend to which key. In the whole library, **True means that attention is allowed**.
# (In other libraries it is often the opposite: [a table](translations.md#polarity-of-masks).) There are three cases:
#
# - An **encoder** reads whole sequences. Only padding is masked: one row of the mask per sequence, the same for all
#   queries and heads.
# - A **decoder** generates text, so token t sees tokens up to t (`causal=True`). If it saw later tokens, it could copy
#   the answer in training.
# - **Cross-attention** of a decoder to an encoder: queries are the decoder's, keys the encoder's. The mask is the
#   padding of the encoder's tokens, and it is not causal.

# %%
real = torch.arange(t) < torch.tensor([8, 12])[:, None]  # (b s): the first sequence has 8 real tokens
padding = real[:, None, None]  # (b 1 1 s)
decoder = ph.ops.softmax_attention(q, k, v, mask=padding, causal=True)
seen = [ph.ops.latent_code(q, k, normalise="softmax", mask=padding, causal=causal)[0, 0] for causal in (False, True)]
draw({"encoder, head 1": seen[0], "decoder, head 1": seen[1]}, range(1, t + 1), range(1, t + 1))

# %% [markdown]
# To test a mask, change the hidden tokens: the output must not change. What is the output of a query without any
# visible key? A softmax over nothing is 0/0. If a library fills masked scores with -1e9, the output is the mean of
# all hidden values; with -inf it is NaN. Here the output is 0, and so is its gradient.

# %%
changed = v.clone()
changed[:, 6:] += 100
past = ph.ops.softmax_attention(q, k, changed, mask=padding, causal=True)[:, :6]
assert torch.equal(past, decoder[:, :6])
nothing = torch.zeros(b, 1, 1, t, dtype=torch.bool)
assert ph.ops.softmax_attention(q, k, v, mask=nothing).abs().max() == 0

# %% [markdown]
# ## The latent code of a pair of tokens
#
# In the second form above, the value is linear in the other token's vector, $v_{sh} = W^{\mathrm{value}}_h x_s$. So
#
# $$y_t = \sum_h W^{\mathrm{out}}_h \sum_s a_{hts} W^{\mathrm{value}}_h x_s
#       = \sum_s \left(\sum_h a_{hts} W^{\mathrm{out}}_h W^{\mathrm{value}}_h\right) x_s$$
#
# For every *pair* of tokens, the h numbers $a_{1ts}, \ldots, a_{hts}$ combine h shared matrices into one matrix,
# which is applied to $x_s$. These numbers are the **latent code** of the pair. The sum in brackets is a linear
# **hypernetwork**: a network whose output is the weights of another network, the **value network** (Schug et al.
# 2024). `value_network` returns it:

# %%
taps = []
y = layer(x, taps=taps)
networks = [ph.analysis.value_network(taps[0], -1, s) for s in range(t)]  # of the last query and each key
assert torch.allclose(sum(network(x[0, s]) for s, network in enumerate(networks)), y[0, -1], atol=1e-5)
code = ph.analysis.codes(taps[0], [-1] * t, list(range(t)))[0].detach()  # (s h)
draw({"codes of the last query, softmax heads": code.T}, range(1, h + 1), range(1, t + 1), ("key", "head"))

# %% [markdown]
# ### Hypernetworks and fast weights
#
# Without the softmax, $a_{hts} = q_{th} \cdot k_{sh} / \sqrt{d}$, the sum can also be taken over *time* first:
#
# $$\mathrm{head}_{th} = \left(\sum_s v_{sh} k_{sh}^{\top}\right) \frac{q_{th}}{\sqrt{d}}$$
#
# The matrix in brackets depends on the *sequence* and is applied to the *query*. It is known as **fast weights**
# (Schmidhuber 1992; Schlag et al. 2021). The matrix of the hypernetwork depends on the *pair* and is applied to the
# *other token*. For linear attention both forms give the same output. With a nonlinearity in the value network the sum
# over time cannot be taken first, so there is no state of constant size.

# %%
fast = torch.einsum("bshe,bshd->bhed", v, k)  # one matrix per head, from the whole sequence
read = torch.einsum("bhed,bthd->bthe", fast, q) / math.sqrt(d)
assert torch.allclose(ph.ops.linear_attention(q, k, v), read, atol=1e-4)

# %% [markdown]
# ## HYLA: value networks with a hidden layer
#
# If the latent code generates a network, this network need not be linear. HYLA makes two changes. First, the code of
# a pair is normalised over its *heads*, not over keys: its root mean square is 1, so that it is a direction. Second,
# the value network has a nonlinearity between its two layers, and the same code mixes both layers. Side by side, for
# one pair:
#
# ```text
#     softmax attention                              HYLA
#
#     score[h]  = q[t,h] · k[s,h] / sqrt(d)          score[h]  = q[t,h] · k[s,h] / sqrt(d)
#     a[h]      = softmax over s (score[h])          a[h]      = score[h] / rms over h (score)
#
#     for each h:                                    hidden    = sum over h (a[h] value[s,h])
#         hidden[h] = value[s,h]                     hidden    = relu(hidden)
#     y[t]     += sum over h                         y[t]     += sum over h
#                   W_out[h] (a[h] hidden[h])                      W_out[h] (a[h] hidden)
# ```


# %%
def softmax_layer(q, k, v, w_out):
    a = torch.softmax(torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1]), dim=-1)
    return torch.einsum("bhts,bshe,hme->btm", a, v, w_out)


def hyla_layer(q, k, v, w_out):
    a = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    a = a / (a.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()
    hidden = torch.relu(torch.einsum("bhts,bshe->btse", a, v))
    return torch.einsum("bhts,btse,hme->btm", a, hidden, w_out)


for written, function in ((softmax_layer, ph.ops.softmax_attention), (hyla_layer, ph.ops.hyla)):
    heads = function(q, k, v)  # (b t h e), before the output projection
    assert torch.allclose(torch.einsum("bthe,hme->btm", heads, w), written(q, k, v, w), atol=1e-3)

# %% [markdown]
# `hyla_layer` creates an array over b, t, s and e. The library's functions do not: they work in tiles, and tests
# compare them with this equation ([speed](speed.md)). The codes of a HYLA layer, and the value network of one pair:

# %%
layer = ph.MultiHeadAttention(m, ph.Hyla(h))
taps = []
y = layer(x, taps=taps)
code = ph.analysis.codes(taps[0], [-1] * t, list(range(t)))[0].detach()
assert torch.allclose(code.square().mean(dim=1), torch.ones(t), atol=1e-3)
draw({"codes of the last query, HYLA": code.T}, range(1, h + 1), range(1, t + 1), ("key", "head"))
networks = [ph.analysis.value_network(taps[0], -1, s) for s in range(t)]
print([tuple(matrix.shape) for matrix in networks[0]], "with", networks[0].act, "between")
assert torch.allclose(sum(network(x[0, s]) for s, network in enumerate(networks)), y[0, -1], atol=1e-4)

# %% [markdown]
# ## Relational heads and dual attention
#
# All heads so far retrieve the *content* of the other token. Some questions are not about content. Is this number
# larger than that one? Is this shape the same as that one? A relational head has the attention weights of a softmax
# head, but it retrieves two other things: a *symbol* $\sigma_s$, which identifies the other token, and r *relations*,
# inner products of both tokens under projections that all heads share:
#
# $$y_{th} = \sum_s a_{hts} \left(\sigma_{sh} + W^{\mathrm{rel}}_h \mathrm{rel}_{ts}\right) \qquad
# \mathrm{rel}_{tsr} = \frac{q^{\mathrm{rel}}_{tr} \cdot k^{\mathrm{rel}}_{sr}}{\sqrt{p}}$$
#
# An example: six objects, two of each of three kinds. Then the same six objects in a rotated world, where one
# rotation is applied to every vector. The vectors are new, but their inner products, and so the relations, are the
# same. The output of relational heads does not change; that of softmax heads does.

# %%
q_rel, k_rel = torch.randn(2, b, t, 4, 8)  # r = 4 relations, p = 8
symbols, w_rel = torch.randn(b, t, h, d), torch.randn(h, d, 4)
a = torch.softmax(torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(d), dim=-1)
rel = torch.einsum("btrp,bsrp->btsr", q_rel, k_rel) / math.sqrt(8)
by_hand = torch.einsum("bhts,bshe->bthe", a, symbols) + torch.einsum("bhts,btsr,her->bthe", a, rel, w_rel)
assert torch.allclose(ph.ops.relational_attention(q, k, q_rel, k_rel, symbols, w_rel), by_hand, atol=1e-5)

objects = torch.randn(3, 16)[[0, 1, 0, 2, 1, 2]]  # (s m)
rotation = torch.linalg.qr(torch.randn(16, 16)).Q
worlds = [(x / x.norm(dim=1, keepdim=True))[None, :, None] for x in (objects, objects @ rotation)]  # (1 s 1 16)
places = torch.randn(1, 6, 1, 4)
content = [ph.ops.softmax_attention(x, x, x) for x in worlds]
relational = [ph.ops.relational_attention(x, x, x, x, places, torch.ones(1, 4, 1)) for x in worlds]
assert not torch.allclose(*content, atol=0.1)
assert torch.allclose(*relational, atol=1e-5)
seen = [ph.ops.relations(x, x, relation_act="identity")[0, 0] for x in worlds]  # (t s) of the one relation
draw({"relations": seen[0], "in the rotated world": seen[1]}, "ABACBC", "ABACBC")

# %% [markdown]
# Relational heads alone carry no content. Relational heads beside softmax heads are *dual attention* (Altabaa and
# Lafferty 2024). In this library a layer is a list of groups of heads, so dual attention is one list among others:

# %%
dual = [ph.Softmax(4), ph.Relational(4)]
config = ph.TransformerConfig(ph.Tokens(32), ph.Logits(32), dim=64, heads=dual, layers=2, causal=True, max_length=16)
model = ph.Transformer(config)
logits = model(torch.randint(32, (2, 16)))
print(tuple(logits.shape), f"{sum(x.numel() for x in model.parameters()):,} parameters")

# %% [markdown]
# ## A task for compositional generalisation: SRAVEN
#
# Do hypernetworks recombine what they learned? SRAVEN tests this. A puzzle is a 3 × 3 grid of panels with M symbols
# each; the last panel is missing. Each of M hidden *features* follows one rule along all rows (constant, counting up,
# a sum, ...). The test has *combinations* of rules that are not in training, although each rule is.
#
# A difficulty is the **correspondence**. Each column shows the features in its own order, the same in all rows. Which
# symbol of the first column belongs to which symbol of the second and third follows from the rules only. So a solver
# must find rules and correspondence together. There are $(M!)^{2}$ correspondences:

# %%
task = ph.tasks.Sraven()
print([(M, correspondences(ph.tasks.Sraven(features=M))) for M in (1, 2, 3, 4)])
instances = draw_instances(task, torch.tensor([[0, 1, 5, 7]]), torch.Generator().manual_seed(1))
rules, order, panels = (array[0] for array in instances)
_, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
for row, column in np.ndindex(3, 3):
    for slot, feature in enumerate(order[column].tolist()):
        text = "?" if row == column == 2 else str(int(panels[row, column, slot]))
        axes.text(column * 5 + slot, -row, text, color=colours[feature], ha="center", va="center", fontsize=13)
    axes.add_patch(plt.Rectangle((column * 5 - 0.6, -row - 0.42), 4.2, 0.84, fill=False, edgecolor="#9aa2ab"))
for feature, rule in enumerate(rules.tolist()):
    axes.text(feature * 4 - 0.5, -2.8, RULES[rule], color=colours[feature], fontsize=9)
axes.set(xlim=(-1, 14), ylim=(-3.1, 0.7))
axes.set_axis_off()

# %% [markdown]
# The colours show the features; a solver does not see them. It sees 36 tokens in reading order and predicts each
# symbol of the last panel. The latent code of two tokens can say whether they share a feature, and how the rule of the
# feature relates them. [The results](results/hyla.md) compare HYLA, softmax and
# linear heads.
#
# ## Train a model
#
# A few steps on another task, fuzzy logic:

# %%
torch.manual_seed(0)
task = ph.tasks.FuzzyLogic(length=16)
model = ph.Transformer(ph.TransformerConfig(*task.ends, dim=32, heads=ph.Hyla(4), layers=1))
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(60):
    batch = task.batch("train", 64, seed=0, step=step)
    losses.append(task.loss(model(batch.inputs), batch))
    losses[-1].backward()
    optimiser.step(), optimiser.zero_grad()
print(f"loss {losses[0]:.3f}, after {len(losses)} steps {sum(losses[-5:]) / 5:.3f}")

# %% [markdown]
# ## Where next
#
# - [The tutorial in JAX](tutorial_jax.py): the same functions, a Haiku module, Flax, weights from PyTorch.
# - [Mechanisms](mechanisms/index.md): a page for each kind of heads, with its cost and when to use it.
# - [Swap a mechanism](howto/swap.md) in your model, and [read its codes](howto/codes.md).
# - [Results](results/index.md): what we measured.
