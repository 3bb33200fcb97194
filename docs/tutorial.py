# %% [markdown]
# # Tutorial: from one head to HYLA and dual attention
#
# One head, many heads, masks, a Haiku module, heads that are hypernetworks, heads that see relations: each written down
# by hand, compared with the library's function, and drawn. PyTorch and JAX stand side by side throughout: same names,
# same layouts, same numbers.
#
# This page is a script, for the environment of `make demo` (elsewhere: `pip install -e '.[flax]' dm-haiku`). Open
# `docs/tutorial.py` as a notebook (Jupytext, or an editor that knows `# %%` cells), or run it: every `assert` holds.
#
# Letters: b sequences, t queries, s keys, h heads, d the width of queries and keys, e of values, m of the model.

# %%
import math
import pathlib
import runpy

import haiku as hk
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch
from flax import nnx

import polyhead as ph
from polyhead import jaxside
from polyhead.compat import haiku as torch_haiku
from polyhead.jaxside import convert, nnx as heads_nnx
from polyhead.tasks.sraven.ambiguity import correspondences
from polyhead.tasks.sraven.task import RULES

rng = np.random.default_rng(0)


def arrays(*shape):
    """The same random numbers for PyTorch and for JAX."""
    drawn = rng.standard_normal(shape).astype(np.float32)
    return torch.from_numpy(drawn), jnp.asarray(drawn)


def same(x, y, tolerance=1e-5):
    """Whether two arrays, of either library, hold the same numbers."""
    return np.allclose(np.asarray(x), np.asarray(y), rtol=0, atol=tolerance)


def draw(panels, rows, columns, across=("key", "query")):
    """Matrices side by side: {title: matrix}; negative is red, 0 white, positive blue."""
    _, grid = plt.subplots(1, len(panels), figsize=(3 * len(panels), 2.8), layout="constrained", squeeze=False)
    for axes, (title, matrix) in zip(grid[0], panels.items(), strict=True):
        assert matrix.shape == (len(rows), len(columns))
        most = np.abs(np.asarray(matrix)).max()
        axes.imshow(np.asarray(matrix), cmap="RdBu", vmin=-most, vmax=most)
        axes.set(title=title, xlabel=across[0], ylabel=across[1])
        axes.set_xticks(range(len(columns)), columns, fontsize=7)
        axes.set_yticks(range(len(rows)), rows, fontsize=7)


# %% [markdown]
# ## One head
#
# A head lets every token ask all others a question. Token t asks with a *query* $q_t$; token s answers to it as well as
# its *key* $k_s$ fits; what it then hands over is its *value* $v_s$:
#
# $$a_{ts} = \mathrm{softmax}_s\left(\frac{q_t \cdot k_s}{\sqrt{d}}\right) \qquad y_t = \sum_s a_{ts} v_s$$
#
# Six letters, whose queries and keys are what the letter is, so that equal letters find each other. The library's
# functions take whole batches of many heads, `(b t h d)`: one head of one sequence has two axes of length 1.

# %%
letters = "abacba"
table = 3 * torch.eye(3)
q = k = table[["abc".index(letter) for letter in letters]]  # (t d)
v, _ = arrays(6, 4)  # (s e)
scores = q @ k.T / math.sqrt(q.shape[-1])
a = torch.softmax(scores, dim=-1)
y = a @ v
draw({"scores": scores, "after the softmax: a": a}, letters, letters)
out = ph.ops.softmax_attention(q[None, :, None], k[None, :, None], v[None, :, None])  # (b t h e)
twin = jaxside.softmax_attention(*(jnp.asarray(x.numpy())[None, :, None] for x in (q, k, v)))
assert same(out[0, :, 0], y)
assert same(twin, out)

# %% [markdown]
# ## Many heads
#
# One head asks one question. With h heads, each looks at the sequence in its own way: the model's vector $x_t$ of width
# m is mapped to h small queries, keys and values, and what comes back is mapped to width m again. "Concatenate, then
# one matrix" is the same as giving each head an output matrix of its own and adding up, which matters below:
#
# $$y_t = \mathrm{concat}(\mathrm{head}_1, \ldots, \mathrm{head}_h) W = \sum_h W^{\mathrm{out}}_h \mathrm{head}_{th}$$
#
# The layer has the maps in it. Both sides call parameters by the same names, so weights move over as they are.

# %%
b, t, h, d, m = 2, 12, 8, 8, 64
(qt, qj), (kt, kj), (vt, vj) = (arrays(b, t, h, d) for _ in range(3))
heads = ph.ops.softmax_attention(qt, kt, vt)  # (b t h e)
w, _ = arrays(h, m, d)
joined = heads.flatten(2) @ w.transpose(1, 2).flatten(0, 1)  # concatenated, then one matrix (h e, m)
assert same(joined, torch.einsum("hme,bthe->btm", w, heads), 1e-4)

torch.manual_seed(0)
layer = ph.MultiHeadAttention(m, ph.Softmax(h))
state = {name: x.numpy() for name, x in layer.state_dict().items()}
twin = convert.to_flax(state, heads_nnx.MultiHeadAttention(m, ph.Softmax(h), rngs=nnx.Rngs(0)))
xt, xj = arrays(b, t, m)
assert same(layer(xt).detach(), twin(xj))
print({name: x.shape for name, x in state.items()})

# %% [markdown]
# ## Masks: encoders and decoders
#
# A mask says who may look where; **True is where looking is allowed**, in the whole library. (Elsewhere it is often the
# other way round: [a table](glossary.md#polarity-of-masks).) There are three kinds of looking:
#
# - An **encoder** reads whole sequences. All it must not see is padding: one row of the mask per sequence, for all
#   queries and heads the same.
# - A **decoder** writes: token t sees tokens up to t, or it would be trained to copy the answer: `causal=True`.
# - A decoder that **reads an encoder** (cross-attention) has queries of its own and the other's keys: the mask is the
#   source's padding, and nothing is causal.

# %%
real = torch.arange(t) < torch.tensor([8, 12])[:, None]  # (b s): the first sequence has 8 real tokens
padding = real[:, None, None]  # (b 1 1 s)
decoder = ph.ops.softmax_attention(qt, kt, vt, mask=padding, causal=True)
assert same(jaxside.softmax_attention(qj, kj, vj, mask=jnp.asarray(padding.numpy()), causal=True), decoder)
seen = [ph.ops.latent_code(qt, kt, normalise="softmax", mask=padding, causal=causal)[0, 0] for causal in (False, True)]
draw({"encoder, head 1": seen[0], "decoder, head 1": seen[1]}, range(1, t + 1), range(1, t + 1))

# %% [markdown]
# Whether a mask does what it should is better tried than believed: change what must not be seen, and nothing may
# change. And a query that may look nowhere? A softmax over nothing is 0/0. Filling with -1e9 gives the mean of all
# values (of those that were to be hidden), -inf gives NaN. Here the answer is 0, and so is its gradient.

# %%
changed = vt.clone()
changed[:, 6:] += 100
past = ph.ops.softmax_attention(qt, kt, changed, mask=padding, causal=True)[:, :6]
assert torch.equal(past, decoder[:, :6])
nobody = torch.zeros(b, 1, 1, t, dtype=torch.bool)
assert ph.ops.softmax_attention(qt, kt, vt, mask=nobody).abs().max() == 0
assert jnp.abs(jaxside.softmax_attention(qj, kj, vj, mask=jnp.asarray(nobody.numpy()))).max() == 0

# %% [markdown]
# ## The same as a Haiku module
#
# JAX differentiates and compiles *pure functions*: everything they depend on is an argument, parameters included. A
# module with parameters inside is not pure. `hk.transform` makes it two functions that are:
#
# - `init(rng, *args)` runs the module once, notes every parameter it asks for, and returns them as a tree.
# - `apply(params, rng, *args)` runs it with the parameters of a tree.
#
# `rng` is for what is random in every call, dropout for one. This module has nothing of the kind, and
# `hk.without_apply_rng` takes the argument away: `apply(params, *args)`.
#
# `examples/haiku_attention.py` has the module of the tutorial "Yet Another (JAX) Transformer" over our functions. Its
# example: 2 sequences of 12 vectors of width 64, 8 heads, and a mask of keys in integers, of which any but 0 attends.
#
# A tree is data, and can be moved. Flax NNX keeps parameters inside its modules, as PyTorch does, and takes them out
# where JAX needs a pure function (`nnx.split`, `nnx.jit`, `nnx.grad`). Below, three libraries have one set of weights.

# %%
here = pathlib.Path(__file__).parent if "__file__" in globals() else pathlib.Path("docs")
MultiheadAttention = runpy.run_path(str(here.parent / "examples" / "haiku_attention.py"))["MultiheadAttention"]
mha = hk.without_apply_rng(hk.transform(lambda *given: MultiheadAttention(64, 8, name="mha")(*given)))
first, second, third = jax.random.split(jax.random.key(0), 3)
q, k, v = jax.random.normal(first, (3, 2, 12, 64))
mask = jax.random.randint(second, (2, 1, 12), minval=0, maxval=2)
params = mha.init(third, q, k, v, mask)
out, attention = mha.apply(params, q, k, v, mask)
print("Out", out.shape, "Attention", attention.shape)
print({name: {key: x.shape for key, x in leaf.items()} for name, leaf in params.items()})

flax_layer = convert.from_haiku(params, heads=8)
torch_layer = torch_haiku.from_haiku({name: dict(leaf) for name, leaf in params.items()}, heads=8)
look = torch_haiku.from_haiku_mask(np.asarray(mask))  # True where looking is allowed
mine, context = (torch.tensor(np.asarray(x)) for x in (q, k))
out, _ = mha.apply(params, q, k, k, mask)
assert same(torch_layer(mine, context=context, mask=look).detach(), out)
assert same(flax_layer(q, context=k, mask=jnp.asarray(look.numpy())), out)

# %% [markdown]
# ## What the heads say together: the latent code
#
# Take the second reading above and write a head out. The value is linear in the other token's vector, $v_{sh} =
# W^{\mathrm{value}}_h x_s$, so
#
# $$y_t = \sum_h W^{\mathrm{out}}_h \sum_s a_{hts} W^{\mathrm{value}}_h x_s
#       = \sum_s \left(\sum_h a_{hts} W^{\mathrm{out}}_h W^{\mathrm{value}}_h\right) x_s$$
#
# For every *pair* of tokens the h numbers $a_{1ts}, \ldots, a_{hts}$ pick, from h shared matrices, one matrix that is
# applied to $x_s$. They are the pair's **latent code**, and the sum in brackets is a linear **hypernetwork**: a network
# whose output is the weights of another, the **value network** (Schug et al. 2024). `value_network` returns it:

# %%
taps = []
y = layer(xt, taps=taps)
networks = [ph.analysis.value_network(taps[0], -1, s) for s in range(t)]  # of the last query and each key
assert same(sum(network(xt[0, s]) for s, network in enumerate(networks)).detach(), y[0, -1].detach())
code = ph.analysis.codes(taps[0], [-1] * t, list(range(t)))[0].detach()  # (s h)
draw({"codes of the last query, softmax heads": code.T}, range(1, h + 1), range(1, t + 1), ("key", "head"))

# %% [markdown]
# ### Hypernetworks and fast weights
#
# Without the softmax the sum can be bracketed in yet another way, over *time* in place of heads. With scores as they
# are, $a_{hts} = q_{th} \cdot k_{sh} / \sqrt{d}$:
#
# $$\mathrm{head}_{th} = \left(\sum_s v_{sh} k_{sh}^{\top}\right) \frac{q_{th}}{\sqrt{d}}$$
#
# The matrix in brackets is a network that the *sequence* writes and that is applied to the *query*: **fast weights**
# (Schmidhuber 1992; Schlag et al. 2021). The hypernetwork's matrix is written by the *pair* and applied to the *other
# token*. Both are exact readings of linear attention. They part ways as soon as something nonlinear stands inside: a
# value network with a hidden layer has no sum over time to be taken out, and so no state of fixed size.

# %%
fast = torch.einsum("bshe,bshd->bhed", vt, kt)  # per head, written by the whole sequence
read = torch.einsum("bhed,bthd->bthe", fast, qt) / math.sqrt(d)
assert same(ph.ops.linear_attention(qt, kt, vt), read, 1e-4)
assert same(jaxside.linear_attention(qj, kj, vj), read, 1e-4)

# %% [markdown]
# ## HYLA: value networks with a hidden layer
#
# If the code programs a network, why a linear one? HYLA makes two changes. The code is normalised over the *heads* of
# a pair (root mean square 1) and no longer over keys: a direction that says what to compute. And the value network gets
# a nonlinearity between its two maps, both mixed by the same code. Side by side, for one pair:
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


for written, function in ((softmax_layer, "softmax_attention"), (hyla_layer, "hyla")):
    heads = getattr(ph.ops, function)(qt, kt, vt)  # (b t h e), before the output map
    assert same(torch.einsum("bthe,hme->btm", heads, w), written(qt, kt, vt, w), 1e-3)
    assert same(getattr(jaxside, function)(qj, kj, vj), heads, 1e-4)

# %% [markdown]
# The functions never make the array over b, t, s and e that `hyla_layer` makes: they work tile by tile, and are held to
# this equation ([speed](speed.md)). What the code looks like now, and the network of one pair:

# %%
layer = ph.MultiHeadAttention(m, ph.Hyla(h))
taps = []
y = layer(xt, taps=taps)
code = ph.analysis.codes(taps[0], [-1] * t, list(range(t)))[0].detach()
assert same(code.square().mean(dim=1), np.ones(t), 1e-3)
draw({"codes of the last query, HYLA": code.T}, range(1, h + 1), range(1, t + 1), ("key", "head"))
networks = [ph.analysis.value_network(taps[0], -1, s) for s in range(t)]
print([tuple(matrix.shape) for matrix in networks[0]], "with", networks[0].act, "between")
assert same(sum(network(xt[0, s]) for s, network in enumerate(networks)).detach(), y[0, -1].detach(), 1e-4)

# %% [markdown]
# ## Relational heads and dual attention
#
# All heads so far hand over what the other token *contains*. Some questions are not about contents: is this number
# larger than that one, is this shape the same as that? A relational head looks as a softmax head does but returns two
# other things: a *symbol* $\sigma_s$, that says which token was meant, and r *relations*, inner products of the two
# tokens under maps that all heads share:
#
# $$y_{th} = \sum_s a_{hts} \left(\sigma_{sh} + W^{\mathrm{rel}}_h \mathrm{rel}_{ts}\right) \qquad
# \mathrm{rel}_{tsr} = \frac{q^{\mathrm{rel}}_{tr} \cdot k^{\mathrm{rel}}_{sr}}{\sqrt{p}}$$
#
# What this buys is quickly shown. Six objects, two of each of three kinds; then the same six in another world, where
# every vector is turned by the same rotation. The objects are new, how they compare is not: inner products stay.

# %%
(q_rel, q_rel_j), (k_rel, k_rel_j) = (arrays(b, t, 4, 8) for _ in range(2))  # r = 4 relations, p = 8
(symbols, symbols_j), (w_rel, w_rel_j) = arrays(b, t, h, d), arrays(h, d, 4)
a = torch.softmax(torch.einsum("bthd,bshd->bhts", qt, kt) / math.sqrt(d), dim=-1)
rel = torch.einsum("btrp,bsrp->btsr", q_rel, k_rel) / math.sqrt(8)
by_hand = torch.einsum("bhts,bshe->bthe", a, symbols) + torch.einsum("bhts,btsr,her->bthe", a, rel, w_rel)
assert same(ph.ops.relational_attention(qt, kt, q_rel, k_rel, symbols, w_rel), by_hand)
assert same(jaxside.relational_attention(qj, kj, q_rel_j, k_rel_j, symbols_j, w_rel_j), by_hand)
objects = arrays(3, 16)[0][[0, 1, 0, 2, 1, 2]]  # (s m)
rotation = torch.linalg.qr(arrays(16, 16)[0]).Q
worlds = [(x / x.norm(dim=1, keepdim=True))[None, :, None] for x in (objects, objects @ rotation)]  # (1 s 1 16)
places, _ = arrays(1, 6, 1, 4)
content = [ph.ops.softmax_attention(x, x, x) for x in worlds]
relational = [ph.ops.relational_attention(x, x, x, x, places, torch.ones(1, 4, 1)) for x in worlds]
assert not same(*content, 0.1)
assert same(*relational)
seen = [ph.ops.relations(x, x, relation_act="identity")[0, 0] for x in worlds]  # (t s) of the one relation
draw({"relations": seen[0], "in the other world": seen[1]}, "ABACBC", "ABACBC")

# %% [markdown]
# A relational head alone is blind to contents; beside heads that are not, it is *dual attention* (Altabaa and
# Lafferty). In this library that is nothing special: a layer is a list of groups of heads, and any mixture is a model.

# %%
dual = [ph.Softmax(4), ph.Relational(4)]
config = ph.TransformerConfig(ph.Tokens(32), ph.Logits(32), dim=64, heads=dual, layers=2, causal=True, max_length=16)
model = ph.Transformer(config)
state = {name: x.numpy() for name, x in model.state_dict().items()}
model_in_jax = convert.to_flax(state, heads_nnx.Transformer(config))
tokens = rng.integers(0, 32, (2, 16))
logits = model(torch.from_numpy(tokens)).detach()
assert same(nnx.jit(lambda model, tokens: model(tokens))(model_in_jax, jnp.asarray(tokens)), logits)
print(logits.shape, f"{sum(x.size for x in state.values()):,} parameters")

# %% [markdown]
# ## A task made for this: SRAVEN and its correspondences
#
# Do networks that write networks recombine what they know? SRAVEN asks that: a 3 × 3 grid of panels, each of M symbols,
# the last panel missing. Each of M hidden *features* follows one rule along all rows (constant, counting up, a sum,
# ...), and what is held out is *combinations* of rules whose parts have all been seen.
#
# The catch is the **correspondence**. Every column shows its features in an order of its own, the same in all rows.
# Which symbol of the first column belongs with which of the second and third is told by nothing but the rules
# themselves: a solver must find rules and correspondence together. There are $(M!)^{2}$ correspondences:

# %%
task = ph.tasks.Sraven()
print([(M, correspondences(ph.tasks.Sraven(features=M))) for M in (1, 2, 3, 4)])
batch = task.of_rules(torch.tensor([[0, 1, 5, 7]]), torch.Generator().manual_seed(1))
rules, order, panels = (batch.latents[name][0] for name in ("rules", "permutations", "panels"))
_, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
for row, column in np.ndindex(3, 3):
    for slot, feature in enumerate(order[column].tolist()):
        said = "?" if row == column == 2 else str(int(panels[row, column, slot]))
        axes.text(column * 5 + slot, -row, said, color=colours[feature], ha="center", va="center", fontsize=13)
    axes.add_patch(plt.Rectangle((column * 5 - 0.6, -row - 0.42), 4.2, 0.84, fill=False, edgecolor="#9aa2ab"))
for feature, rule in enumerate(rules.tolist()):
    axes.text(feature * 4 - 0.5, -2.8, RULES[rule], color=colours[feature], fontsize=9)
axes.set(xlim=(-1, 14), ylim=(-3.1, 0.7))
axes.set_axis_off()

# %% [markdown]
# Colours are what a solver does not get: it sees 36 tokens in reading order, and must give each token of the last panel
# its symbol. Two tokens of different columns belong together or do not, and what is to be done with them depends on the
# rule: that is what the code of the pair can say. Whether it does, and how HYLA, softmax and linear heads compare, is
# measured in [the results](results/hyla.md).
#
# ## Train there, go on here
#
# A few steps on fuzzy logic in PyTorch, then one in JAX from the same weights and on the same batch:

# %%
torch.manual_seed(0)
task = ph.tasks.FuzzyLogic(length=16)
config = ph.TransformerConfig(*task.ends, dim=32, heads=ph.Hyla(4), layers=1)
model = ph.Transformer(config)
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(60):
    batch = task.batch("train", 64, seed=0, step=step)
    losses.append(task.loss(model(batch.inputs), batch))
    losses[-1].backward()
    optimiser.step(), optimiser.zero_grad()
print(f"PyTorch: loss {losses[0]:.3f}, after {len(losses)} steps {sum(losses[-5:]) / 5:.3f}")
state = {name: x.numpy() for name, x in model.state_dict().items()}
model_in_jax = convert.to_flax(state, heads_nnx.Transformer(config))
inputs, targets, scored = (jnp.asarray(x.numpy()) for x in (batch.inputs, batch.targets, batch.scored))
assert same(nnx.jit(lambda model: model(inputs))(model_in_jax), model(batch.inputs).detach())


@nnx.jit
def step_in_jax(model):
    """One step on the task's loss, the mean squared error over what is scored; the loss before it."""
    loss, gradient = nnx.value_and_grad(lambda model: jnp.square(model(inputs) - targets)[scored].mean())(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.01 * g, nnx.state(model, nnx.Param), gradient))
    return loss


before, after = step_in_jax(model_in_jax), step_in_jax(model_in_jax)
assert same(before, task.loss(model(batch.inputs), batch).item())
assert after < before
print(f"JAX: loss {before:.4f}, after one more step {after:.4f}")

# %% [markdown]
# ## Where next
#
# - [Mechanisms](mechanisms/index.md): a page for each kind of heads, with its cost and when to use it.
# - [Swap a mechanism](howto/swap.md) in a model of your own, and [read its codes](howto/codes.md).
# - [The same heads in JAX](jax.md): what is equal, what differs, memory of the tiles.
# - [Results](results/index.md): what of all this we could measure.
