# %% [markdown]
# # The tutorial in JAX: functions, Haiku, Flax
#
# `polyhead.jaxside` has the functions of [the tutorial](tutorial.py) for JAX: the same names, layouts and numbers.
# This page compares both sides, runs a Haiku module, and copies weights between PyTorch, Haiku and Flax. [The same
# heads in JAX](jax.md) is the reference page.
#
# The page is a script. It needs `pip install -e '.[jax]' dm-haiku flax`. Every `assert` holds.

# %%
import math
import pathlib
import runpy

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import polyhead as ph
from polyhead import jaxside
from polyhead.compat.haiku import MultiheadAttention, from_haiku, from_haiku_mask

rng = np.random.default_rng(0)


def arrays(*shape):
    """The same random numbers for PyTorch and for JAX."""
    drawn = rng.standard_normal(shape).astype(np.float32)
    return torch.from_numpy(drawn), jnp.asarray(drawn)


def same(x, y, tolerance=1e-5):
    """Whether two arrays, of either library, hold the same numbers."""
    return np.allclose(np.asarray(x), np.asarray(y), rtol=0, atol=tolerance)


# %% [markdown]
# ## Functions
#
# Every function takes JAX arrays `(b t h d)` and the same arguments as in PyTorch. Masks are True where attention is
# allowed.

# %%
b, t, h, d, m = 2, 12, 8, 8, 64
(qt, qj), (kt, kj), (vt, vj) = (arrays(b, t, h, d) for _ in range(3))
real = np.arange(t) < np.array([8, 12])[:, None]  # (b s): the first sequence has 8 real tokens
padding = real[:, None, None]  # (b 1 1 s)
decoder = jaxside.softmax_attention(qj, kj, vj, mask=jnp.asarray(padding), causal=True)  # (b t h e)
assert same(decoder, ph.ops.softmax_attention(qt, kt, vt, mask=torch.from_numpy(padding), causal=True))
nothing = jnp.zeros((b, 1, 1, t), bool)
assert jnp.abs(jaxside.softmax_attention(qj, kj, vj, mask=nothing)).max() == 0  # a query without any visible key

(q_rel, q_rel_j), (k_rel, k_rel_j) = (arrays(b, t, 4, 8) for _ in range(2))  # r = 4 relations, p = 8
(symbols, symbols_j), (w_rel, w_rel_j) = arrays(b, t, h, d), arrays(h, d, 4)
assert same(jaxside.hyla(qj, kj, vj), ph.ops.hyla(qt, kt, vt), 1e-4)
assert same(jaxside.linear_attention(qj, kj, vj), ph.ops.linear_attention(qt, kt, vt), 1e-4)
assert same(
    jaxside.relational_attention(qj, kj, q_rel_j, k_rel_j, symbols_j, w_rel_j),
    ph.ops.relational_attention(qt, kt, q_rel, k_rel, symbols, w_rel),
)

# %% [markdown]
# HYLA by hand, for comparison: the code has root mean square 1 over heads and mixes both layers of a value network.

# %%
a = jnp.einsum("bthd,bshd->bhts", qj, kj) / math.sqrt(d)
a = a / jnp.sqrt(jnp.square(a).mean(axis=1, keepdims=True) + 1e-6)
hidden = jax.nn.relu(jnp.einsum("bhts,bshe->btse", a, vj))
assert same(jnp.einsum("bhts,btse->bthe", a, hidden), jaxside.hyla(qj, kj, vj), 1e-4)
gradient = jax.jit(jax.grad(lambda v: jnp.square(jaxside.hyla(qj, kj, v, causal=True)).mean()))(vj)
print(gradient.shape)

# %% [markdown]
# ## A Haiku module
#
# JAX differentiates and compiles *pure functions*: everything that they depend on is an argument, parameters
# included. A module that contains parameters is not pure. `hk.transform` turns it into two pure functions:
#
# - `init(rng, *args)` runs the module once and returns its parameters as a tree.
# - `apply(params, rng, *args)` runs it with the parameters of a tree.
#
# `rng` is for random numbers, for example of dropout. This module uses none, and `hk.without_apply_rng` removes the
# argument: `apply(params, *args)`.
#
# `polyhead.compat.haiku` has the module of the tutorial "Yet Another (JAX) Transformer", written with our functions.
# Its example has 2 sequences of 12 vectors of width 64, 8 heads, and an integer mask of keys, in which 0 hides.

# %%
mha = hk.without_apply_rng(hk.transform(lambda *inputs: MultiheadAttention(64, 8, name="mha")(*inputs)))
first, second, third = jax.random.split(jax.random.key(0), 3)
q, k, v = jax.random.normal(first, (3, 2, 12, 64))
mask = jax.random.randint(second, (2, 1, 12), minval=0, maxval=2)
params = mha.init(third, q, k, v, mask)
out, attention = mha.apply(params, q, k, v, mask)
print("Out", out.shape, "Attention", attention.shape)
print({name: {key: x.shape for key, x in leaf.items()} for name, leaf in params.items()})

# %% [markdown]
# ## One set of weights in two libraries
#
# A tree is data, so it can be converted: here to a layer of PyTorch. That layer reads keys and values from one tensor,
# where the module takes two.

# %%
torch_layer = from_haiku(params, heads=8)
allowed = from_haiku_mask(np.asarray(mask))  # True where attention is allowed
x, context = (torch.tensor(np.asarray(array)) for array in (q, k))
out, _ = mha.apply(params, q, k, k, mask)
assert same(torch_layer(x, context=context, mask=allowed).detach(), out)

# %% [markdown]
# ## From PyTorch to Flax
#
# Flax NNX keeps parameters inside its modules, as PyTorch does, and takes them out where JAX needs a pure function
# (`nnx.split`, `nnx.jit`, `nnx.grad`). `examples/nnx_hyla.py` has HYLA heads as such a module. Layouts are the same on
# both sides, so its `load` copies a state dict.

# %%
here = pathlib.Path(__file__).parent if "__file__" in globals() else pathlib.Path("docs")
HylaAttention = runpy.run_path(str(here.parent / "examples" / "nnx_hyla.py"))["HylaAttention"]
torch.manual_seed(0)
torch_layer = ph.MultiHeadAttention(64, ph.Hyla(8), causal=True)
flax_layer = HylaAttention(64, 8, rngs=nnx.Rngs(0))
flax_layer.load({name: tensor.numpy() for name, tensor in torch_layer.state_dict().items()})
assert same(flax_layer(q), torch_layer(torch.tensor(np.asarray(q))).detach(), 1e-4)


@nnx.jit
def train_step(layer):
    """One step of gradient descent towards `v`; returns the loss before it."""
    loss, gradient = nnx.value_and_grad(lambda layer: jnp.square(layer(q) - v).mean())(layer)
    nnx.update(layer, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(layer, nnx.Param), gradient))
    return loss


before, after = train_step(flax_layer), train_step(flax_layer)
assert after < before
print(f"loss {before:.4f}, after one more step {after:.4f}")
