"""Properties of all functions of jaxside: signatures, errors, imports, jit, vmap, sharding, memory."""

import functools
import inspect
import types

import numpy as np
import pytest
import signatures
import torch
from problems import make_arguments, make_problem
from refusals import refusing
from some import some

jax = pytest.importorskip("jax", reason="jax is not installed (extra `jax`)")
jnp = jax.numpy

from polyhead import jaxside, ops, spec  # noqa: E402
from polyhead.ops.registry import OPS as TORCH_OPS  # noqa: E402

ROWS = [pytest.param(row, id=row.op) for row in spec.MECHANISMS]
OPS = {op.name: folder for folder, op in TORCH_OPS.items()}


def arrays(op, t=5, s=5, dtype=torch.float32, **shape_options):
    """The tensors of an op and the same numbers as arrays of JAX."""
    torch.manual_seed(0)
    tensors = [x.detach() for x in make_arguments(OPS[op], make_problem(t, s, dtype=dtype)[0], **shape_options)]
    return tensors, [jnp.asarray(x.numpy()) for x in tensors]


# ------------------------------------------------------------------------------------------------------ specification
@pytest.mark.parametrize("row", ROWS)
def test_arguments_are_those_of_the_table(row):
    signatures.check(getattr(jaxside, row.op), row)


def test_what_ops_has_is_here_but_for_what_is_named():
    absent = {"chunked_cross_entropy", "linear_step", "rms_norm"}
    absent |= {"scaled_dot_product_attention", "silu", "softmax"}
    assert set(ops.__all__) - absent <= set(jaxside.__all__)
    for name in set(ops.__all__) - absent:
        jax_signature = inspect.signature(inspect.unwrap(getattr(jaxside, name)))
        torch_signature = inspect.signature(inspect.unwrap(getattr(ops, name)))
        torch_only = [option for row in spec.MECHANISMS if row.op == name for option in row.torch_only]
        assert [(p.name, p.default, p.kind) for p in jax_signature.parameters.values()] == [
            (p.name, p.default, p.kind) for p in torch_signature.parameters.values() if p.name not in torch_only
        ]


# ------------------------------------------------------------------------------------------------------------- errors
BAD = {
    "heads": lambda f, q, k, v: f(q, k[:, :, np.zeros(3, int)], v),
    "mask": lambda f, q, k, v: f(q, k, v, mask=q[0, :, 0, :1]),
    "mask size": lambda f, q, k, v: f(q, k, v, mask=(q[0, :, 0, :1] > 0)[1:]),
    "bias": lambda f, q, k, v: f(q, k, v, bias=q[0, 0]),
    "list": lambda f, q, k, v: f(q, [1.0], v),
    "window": lambda f, q, k, v: f(q, k, v, window=True),
    "impl": lambda f, q, k, v: f(q, k, v, impl="referenze"),
    "normalise": lambda f, q, k, v: f(q, k, v, normalise="rms_head", impl="blocked"),
    "packed": lambda f, q, k, v: f(q, k[:, :3], v[:, :3], cu_seqlens=PACKED[type(q)]),
    "edges": lambda f, q, k, v: f(q[:1], k[:1, : q.shape[1]], v[:1, : q.shape[1]], cu_seqlens=LENGTHS[type(q)]),
    "width": lambda f, q, k, v: f(q[..., :0], k[..., :0], v),
    "dtype": lambda f, q, k, v: f(q, k.astype(jnp.bfloat16) if isinstance(k, jax.Array) else k.bfloat16(), v),
}
PACKED = {torch.Tensor: torch.zeros(2, dtype=torch.int32), type(jnp.ones(1)): jnp.zeros(2, jnp.int32)}
LENGTHS = {kind: zeros + 2 for kind, zeros in PACKED.items()}
CALLED = {
    "hyla": lambda library, q, k, v, **options: library.hyla(q, k, v, **options),
    "latent_code": lambda library, q, k, v, **options: library.latent_code(q, k, normalise="softmax", **options),
    "relations": lambda library, q, k, v, **rest: library.relations(q[:, :, :2], k, relation_act="softmax", **rest),
}


def message_of(call):
    with pytest.raises(ValueError, match=": ") as error:
        call()
    return str(error.value).replace("torch.", "")


@pytest.mark.parametrize(
    ("name", "fault"),
    [("hyla", x) for x in BAD] + [(n, x) for n in list(CALLED)[1:] for x in ("window", "packed", "edges", "dtype")],
)
def test_errors_are_worded_alike(name, fault):
    tensors, jax_arrays = arrays("hyla")
    jax_message = message_of(lambda: BAD[fault](functools.partial(CALLED[name], jaxside), *jax_arrays))
    torch_message = message_of(lambda: BAD[fault](functools.partial(CALLED[name], ops), *tensors))
    cut = "(choose from" if fault == "impl" else "\n"  # each library has impls of its own
    assert jax_message.split(cut)[0] == torch_message.replace("a Tensor", "a Array or ndarray").split(cut)[0]


def test_a_scale_is_a_number_and_dtypes_are_one():
    with refusing("hyla: scale must be a number but has shape (2, 1); multiply q by it"):
        jaxside.hyla(*arrays("hyla")[1], scale=np.ones((2, 1), np.float32))
    with refusing("rope: theta must be above 0 but is -1"):
        jaxside.rope(np.ones((2, 4), np.float32), np.arange(2), theta=-1)
    q, k, v = arrays("hyla")[1]
    kinds = "bfloat16, bfloat16, bfloat16, float32"
    with refusing(f"hyla: q, k, v and value_weight must have one dtype but have {kinds}"):
        jaxside.hyla(*(x.astype("bfloat16") for x in (q, k, v)), value_weight=np.ones((4, 5, 5), np.float32))


# ----------------------------------------------------------------------------------------------- jit, vmap, causality
@pytest.mark.usefixtures("small_tiles")
def test_tiles_under_jit_and_vmap():
    """A batch of calls, of which one argument is shared; the scale is traced and learned."""
    _, (q, k, v) = arrays("hyla", 4, 5)
    queries = jnp.stack([q, 2 * q, q - 1])

    def values_and_gradients(impl):
        def sine_sum(q, scale):
            return jnp.sin(jaxside.hyla(q, k, v, scale=scale, normalise="softmax", impl=impl)).sum()

        return jax.jit(jax.vmap(jax.value_and_grad(sine_sum, (0, 1))))(queries, jnp.array([0.1, 0.2, 0.5]))

    actual, expected = (jax.tree.leaves(values_and_gradients(impl)) for impl in ("blocked", "reference"))
    for x, y in some(zip(actual, expected, strict=True)):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def test_options_are_static_and_nothing_is_read_off_the_data():
    _, (q, k, v) = arrays("hyla")
    count = types.SimpleNamespace(n=0)

    @jax.jit
    def attention(q, mask, scale, packed):
        count.n += 1
        return jaxside.hyla(q, k[:1], v[:1], mask=mask, scale=scale, cu_seqlens=packed)

    for n in (1, 3):
        attention(q[:1], jnp.arange(5) < n, 0.1 * n, jnp.array([0, n, 5], jnp.int32))
    assert count.n == 1


# ----------------------------------------------------------------------------------------- half precision, empty arrays
def test_the_scale_is_not_rounded_to_half_precision():
    """48 ** -0.5 in bfloat16 is 0.13 % too large, and so were all scores."""
    q = jax.random.normal(jax.random.key(0), (1, 128, 1, 48), jnp.bfloat16)
    exact = np.square(np.asarray(q, float)).sum() * 48**-0.5
    codes = [jaxside.latent_code(q, q, normalise="identity", scale=scale) for scale in (None, 48**-0.5)]
    for code in (*codes, jaxside.relations(q, q, relation_act="identity")):
        assert abs(np.asarray(code, float)[0, 0].trace() / exact - 1) < 4e-4


# ------------------------------------------------------------------------------------------------------------- memory
def temporary(impl, backward):
    """Bytes that a compiled call of HYLA needs beside its arguments and results."""
    x = jax.ShapeDtypeStruct((1, 2048, 8, 64), jnp.float32)

    def attention(q, k, v):
        return jaxside.hyla(q, k, v, causal=True, impl=impl)

    measured = jax.grad(lambda *a: attention(*a).sum(), (0, 1, 2)) if backward else attention
    return jax.jit(measured).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("backward", [False, True])
def test_tiles_need_a_hundredth_of_the_memory(backward):
    jax.config.update("jax_disable_most_optimizations", False)
    assert 100 * temporary("blocked", backward) <= temporary("reference", backward)
