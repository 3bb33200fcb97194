"""The NNX modules beside the PyTorch ones, with the same parameters: all kinds of heads, positions, masks, blocks."""

import dataclasses

import numpy as np
import pytest
import torch
import zoo
from refusals import refusing

import polyhead as ph

jax = pytest.importorskip("jax", reason="jax is not installed (extra `jax`)")
flax = pytest.importorskip("flax", reason="flax is not installed (extra `flax`)")
jnp = jax.numpy

from polyhead.jaxside import convert, nnx  # noqa: E402
from polyhead.jaxside.nnx import components  # noqa: E402
from polyhead.jaxside.nnx.model import TokenInput  # noqa: E402
from polyhead.jaxside.nnx.positions import LearnedPositions, SinusoidalPositions  # noqa: E402
from polyhead.jaxside.nnx.symbols import PositionSymbols  # noqa: E402

DIM, B, T, S = 16, 2, 6, 9


def random_state(module, seed=0):
    """The parameters as arrays, all random, also those whose initial value is 0 or 1."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for value in dict.fromkeys(module.state_dict(keep_vars=True).values()):
            value.normal_(std=0.4)
    return {name: value.numpy() for name, value in module.state_dict().items()}


def drawn(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(module, *arrays, **given):
    """The output of an NNX module, compiled once."""
    graph, state = flax.nnx.split(module)
    return jax.jit(lambda state, arrays, given: flax.nnx.merge(graph, state)(*arrays, **given))(state, arrays, given)


def tensors(arrays):
    return {name: torch.tensor(array) for name, array in arrays.items()}


def close(came, wanted, atol=1e-12):
    """In 64 bits: in 32, gradients of some mixtures are off by up to 1e-5 on either side."""
    wanted = wanted.detach().numpy()
    assert came.dtype == wanted.dtype
    np.testing.assert_allclose(came, wanted, rtol=0, atol=atol * max(1.0, float(np.abs(wanted).max())))


@dataclasses.dataclass(frozen=True)
class Even(ph.Softmax):
    """A user's mechanism, whose code is torch's."""

    def code(self, own, q, k, **limits):
        return torch.full((*q.shape[:1], q.shape[2], q.shape[1], k.shape[1]), 1 / k.shape[1])


@dataclasses.dataclass(frozen=True)
class Eight(ph.Softmax):
    """A user's settings of a mechanism of ours."""

    heads: int = 2


LOOK = np.random.default_rng(7).integers(0, 2, (B, 1, T, T)).astype(bool)
LOOK[0, :, 2] = False
PLACES = np.array([[0, 1, 2, 4, 5, 7], [3, 4, 5, 6, 9, 10]])
OFFSETS = ph.RelativeSymbols(distance=2)
FEW = [  # RelationalSymbols exist in PyTorch only
    dataclasses.replace(group, symbols=OFFSETS)
    if isinstance(getattr(group, "symbols", None), ph.RelationalSymbols)
    else group
    for group in zoo.FEW["all 3"]
]
WINDOW = {"positions": ph.RelativeBias(8, 20, bidirectional=True), "bias": True, "window": 4}
MIXTURES = {
    "all, causal": (
        zoo.FEW["all 1"],
        {"positions": ph.Rotary(layout="half"), "causal": True, "qk_norm": True, "bias": True},
        {"mask": LOOK, "positions": PLACES},
    ),
    "several, in a window": (FEW[::2], WINDOW, {"bias": drawn(1, sum(group.heads for group in FEW[::2]), T, T)}),
    "the others, in a window": (FEW[1::2], WINDOW, {"bias": drawn(1, sum(group.heads for group in FEW[1::2]), T, T)}),
    "offsets, shared": (
        [ph.Relational(4, symmetric=True, relation_act="softmax"), ph.Softmax(3, value_dim=5), ph.Hyla(3, share=True)],
        {"positions": ph.Alibi(), "window": 3, "qk_norm": True},
        {
            "bias": drawn(10, 2 * T - 1),
            "positions": PLACES,
            "mask": LOOK[0, 0, 0],
            "keep": (drawn(B, 10, T, T) > 0) * 2.0,
        },
    ),
}


@pytest.mark.thinned(3)
@pytest.mark.usefixtures("quick_draws", "x64")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.campaign] * n.startswith("the others")) for n in MIXTURES]
)
def test_mixtures_of_heads_equal_those_of_pytorch(name):
    heads, how, given = MIXTURES[name]
    heads = [dataclasses.replace(group, dim=4, value_dim=group.value_dim or 6) for group in heads]
    given = {key: value.astype(float) if value.dtype.kind == "f" else value for key, value in given.items()}
    how = {**how, "max_length": 12}
    theirs = ph.MultiHeadAttention(DIM, heads, **how).double()
    ours = convert.to_flax(random_state(theirs), nnx.MultiHeadAttention(DIM, heads, dtype=jnp.float64, **how))
    x = drawn(B, T, DIM).astype(float)
    graph, state = flax.nnx.split(ours)

    @jax.jit
    def graded(state, x):
        def loss(state, x):
            y, code = flax.nnx.merge(graph, state)(x, return_code=True, **given)
            return jnp.square(y).mean(), (y, code)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)(state, x)

    (_, (y, code)), (slopes, slope) = graded(state, x)
    source = torch.tensor(x, requires_grad=True)
    wanted, codes = theirs(source, return_code=True, **tensors(given))
    wanted.square().mean().backward()
    close(y, wanted)
    close(code, codes)
    close(slope, source.grad)
    flax.nnx.update(ours, slopes)
    mine = dict(convert.named(ours))
    for key, parameter in theirs.named_parameters():
        close(mine[key][...], parameter.grad)


@pytest.mark.usefixtures("quick_draws")
@pytest.mark.parametrize(("causal", "positions"), [(False, None), (True, None), (False, np.arange(2, 8)[None])])
def test_attention_to_another_sequence(causal, positions):
    """Given positions are those of queries."""
    heads, mask = [ph.Hyla(2), ph.Relational(2, relation_init="package")], np.arange(S) < np.array([[[[5]]], [[[9]]]])
    how = {"positions": ph.Rotary(), "max_length": S, "own_symbols": False, "causal": causal}
    theirs = ph.MultiHeadAttention(DIM, heads, **how)
    ours = convert.to_flax(random_state(theirs), nnx.MultiHeadAttention(DIM, heads, **how))
    x, context, symbols = drawn(B, T, DIM), drawn(B, S, DIM, seed=2), drawn(1, S, DIM, seed=3)
    given = {"mask": mask} | ({} if positions is None else {"positions": positions})
    came = run(ours, x, context, symbols=[None, symbols], **given)
    close(came, theirs(*map(torch.tensor, (x, context)), symbols=torch.tensor(symbols), **tensors(given)), 2e-6)


@pytest.mark.usefixtures("quick_draws")
@pytest.mark.parametrize("positions", [ph.Alibi(), ph.RelativeBias(4, 100)])
def test_positions_are_numbers_of_any_integer_type(positions):
    """Differences of unsigned ones, and indices of short ones, overflowed without a word."""
    layer, x = nnx.MultiHeadAttention(DIM, ph.Softmax(2), positions=positions), drawn(B, T, DIM)
    wanted = layer(x, positions=9 * PLACES)
    for dtype in (np.uint8, np.int8, np.uint32):
        np.testing.assert_array_equal(layer(x, positions=(9 * PLACES).astype(dtype)), wanted)


@pytest.mark.usefixtures("quick_draws")
def test_given_positions_count_where_there_are_more_rows_than_positions():
    x, where = drawn(1, 6, 8), np.array([[0, 1, 2, 0, 1, 2]])
    apart = np.kron(np.eye(2, dtype=bool), np.ones((3, 3), bool))
    layer = nnx.MultiHeadAttention(8, Eight(), positions=ph.Rotary(), max_length=3)
    y, code = layer(x, mask=apart, positions=where, return_code=True)
    for rows in (slice(0, 3), slice(3, 6)):
        alone, own = layer(x[:, rows], return_code=True)
        np.testing.assert_allclose(y[:, rows], alone, rtol=0, atol=1e-6)
        np.testing.assert_allclose(code[:, :, rows, rows], own, rtol=0, atol=1e-6)
    with refusing("6 positions but max_length is 3"):
        layer(x, x, positions=where)  # those of the context are counted
    settings = ph.TransformerConfig(ph.Vectors(8), ph.Values(1), dim=8, heads=Eight(), layers=1, positions=ph.Learned())
    model = nnx.Transformer(dataclasses.replace(settings, max_length=3))
    assert np.isfinite(model(x, positions=where)).all()
    with refusing("6 positions but max_length is 3"):
        model(x)


@pytest.mark.usefixtures("quick_draws")
def test_one_array_of_symbols_is_that_of_all_groups():
    """It was read as a list of tables by offset, one for each sample."""
    layer = nnx.MultiHeadAttention(DIM, [ph.Softmax(2), ph.Relational(2)], own_symbols=False)
    x, symbols = drawn(2, 5, DIM), drawn(2, 5, DIM, seed=2)
    np.testing.assert_array_equal(layer(x, symbols=symbols), layer(x, symbols=[None, symbols]))


@pytest.mark.usefixtures("quick_draws")
def test_layers_of_nothing_return_nothing_and_nothing_to_look_at_is_0():
    heads = [ph.Softmax(1), ph.Relational(2, symbols=ph.SymbolicAttention(count=4)), ph.Hyla(1)]
    layer, x = nnx.MultiHeadAttention(DIM, heads, positions=ph.Rotary()), drawn(2, 3, DIM)
    run = flax.nnx.jit(lambda layer, *given: layer(*given))  # a program each, and not one for each of its operations
    assert run(layer, x[:, :0]).shape == run(layer, x[:, :0], x).shape == (2, 0, DIM)
    assert run(layer, x[:0]).shape == (0, 3, DIM)
    assert not run(layer, x, x[:, :0]).any()


DUAL = [ph.Softmax(2), ph.Relational(1, symbols=ph.SymbolicAttention(count=6)), ph.Hyla(1, normalise="softmax")]
MODELS = {
    "language": ph.TransformerConfig(
        *(ph.Tokens(11, scaled=True), ph.Logits(11, tied=True, scaled=True)),
        dim=16,
        heads=DUAL,
        positions=ph.Rotary(),
        causal=True,
        norm="rms",
        feedforward=ph.Swiglu(24),
        max_length=T,
        window=4,
    ),
    "post-norm, sources of each layer": ph.TransformerConfig(
        *(ph.Vectors(3), ph.Values(2)),
        dim=16,
        heads=[
            [ph.Disentangled(4, symbols=ph.SymbolicAttention(count=4, shared=False, tied=True))],
            [ph.Abstractor(2, symbols=ph.SymbolicAttention(count=4, shared=False, tied=True)), ph.Relational(2)],
        ],
        positions=ph.Learned(),
        norm_order="post",
        final_norm=True,
        feedforward=ph.Mlp(20, act="gelu_tanh"),
        init="hyla",
        max_length=T,
    ),
    "asked once": ph.TransformerConfig(
        *(ph.Vectors(3, bias=False), ph.Logits(4, bias=True)),
        dim=16,
        heads=[ph.Relational(2, symbols=ph.SymbolicAttention(count=4, once=True)), ph.Linear(2)],
        positions=ph.Sinusoidal(),
        feedforward=ph.Swiglu(8, bias=True),
        max_length=T,
    ),
}


@pytest.mark.usefixtures("quick_draws", "x64")
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_those_of_pytorch(name):
    settings = MODELS[name]
    theirs, ours = ph.Transformer(settings).eval().double(), nnx.Transformer(settings, dtype=jnp.float64)
    state = random_state(theirs)
    assert {key: tuple(value.shape) for key, value in convert.named(ours)} == {k: v.shape for k, v in state.items()}
    convert.to_flax(state, ours)
    tokens = isinstance(settings.inputs, ph.Tokens)
    inputs = np.random.default_rng(0).integers(0, 11, (B, T)) if tokens else drawn(B, T, 3).astype(float)
    mask = np.arange(T) >= np.array([[0], [2]])
    places = np.maximum(np.arange(T) - np.array([[0], [2]]), 0)
    graph, state = flax.nnx.split(ours)

    @jax.jit
    def both(state, inputs, mask, places):
        model = flax.nnx.merge(graph, state)
        return model(inputs, mask=mask, positions=places), model(inputs, tail=2)

    came, tail = both(state, inputs, mask, places)
    close(came, theirs(torch.tensor(inputs), mask=torch.tensor(mask), positions=torch.tensor(places)))
    close(tail, theirs(torch.tensor(inputs), tail=2))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("preset", ["cs336", "hyla"])
def test_parameters_begin_as_those_of_pytorch(preset):
    """The spread of each is compared; a fault in one matrix of many would not show in a loss."""
    kinds = ph.Softmax(4, dim=8), ph.Relational(4, kv_heads=2, symbols=ph.RelativeSymbols()), ph.Hyla(4, value_depth=2)
    settings = ph.TransformerConfig(
        *(ph.Tokens(50), ph.Logits(50)), dim=96, layers=1, heads=kinds, init=preset, positions=ph.RelativeBias(32)
    )
    torch.manual_seed(0)
    wanted = {k: v.numpy() for k, v in ph.Transformer(settings).state_dict().items()}
    mine = nnx.Transformer(settings, rngs=flax.nnx.Rngs(3))
    for key, variable in convert.named(mine):
        a, b = np.asarray(variable[...]), wanted[key]
        if "relation_weight" not in key:  # see below
            assert abs(a.std() - b.std()) <= 0.12 * b.std(), key
            assert abs(np.abs(a).max() - np.abs(b).max()) <= 0.35 * np.abs(b).max(), key
    other = nnx.Transformer(settings, rngs=flax.nnx.Rngs(4))
    assert not np.array_equal(mine.outputs.linear.weight[...], other.outputs.linear.weight[...])


@pytest.mark.parametrize("source", [ph.PositionSymbols(), ph.RelativeSymbols()], ids=["position", "relative"])
def test_relation_weights_are_balanced_as_those_of_pytorch(source):
    """The spread of many layers is compared, because each is balanced on few random numbers."""
    heads = ph.Relational(4, symbols=source, relation_act="relu")
    settings = ph.TransformerConfig(ph.Vectors(2), ph.Values(1), dim=32, layers=16, heads=heads, max_length=9)
    torch.manual_seed(0)
    theirs = [block.attention.groups[0].relation_weight.std().item() for block in ph.Transformer(settings).blocks]
    ours = [block.attention.groups[0].relation_weight[...].std() for block in nnx.Transformer(settings).blocks]
    wanted, came = np.mean(theirs), np.mean(ours)
    assert abs(came - wanted) < 0.2 * wanted


@pytest.mark.usefixtures("quick_draws")
def test_dropout_is_there_with_rngs_only():
    settings, tokens = dataclasses.replace(MODELS["language"], layers=1), np.zeros((B, T), int)
    model = nnx.Transformer(dataclasses.replace(settings, dropout=0.4, residual_dropout=0.2))
    layer = nnx.MultiHeadAttention(DIM, ph.Linear(4), dropout=0.5, dropout_shared=True, bias=False)
    x, keys = drawn(1, 40, DIM), jax.random.split(jax.random.key(0), 40)

    @jax.jit
    def f(keys):
        kept = jax.vmap(lambda key: layer(x, rngs=flax.nnx.Rngs(dropout=key)))(keys).mean(0)
        dropped = jax.vmap(lambda key: model(tokens, rngs=flax.nnx.Rngs(dropout=key)))(keys[jnp.array([0, 0, 1])])
        return model(tokens), nnx.Transformer(settings)(tokens), dropped, kept, layer(x)

    plain, without, (first, again, other), kept, whole = (np.asarray(x) for x in f(keys))
    np.testing.assert_allclose(plain, without, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - plain).max() > 1e-3 < np.abs(first - other).max()
    assert np.abs(kept - whole).mean() < 0.35 * np.abs(whole).mean()  # the mean is kept


MISTAKES = {
    "polyhead.jaxside.nnx.Transformer: feedforward=Experts() exists in PyTorch only": {"feedforward": ph.Experts()},
    "polyhead.jaxside.nnx.Transformer: inputs=Patches() exists": {"inputs": ph.Patches((1, 4, 4), (2, 2))},
    "polyhead.jaxside.nnx.Transformer: outputs=Classes() exists": {"outputs": ph.Classes(3)},
    "polyhead.jaxside.nnx.Transformer: checkpoint=True exists in PyTorch only: use nnx.remat": {"checkpoint": True},
    "polyhead.jaxside.nnx.Transformer: encoder= exists": {"encoder": ph.TransformerConfig(ph.Tokens(3), ph.Values(1))},
    "polyhead.jaxside: heads=Mechanism() exists": {"heads": ph.Mechanism(4)},
    "polyhead.jaxside: heads=Even() exists in PyTorch only": {"heads": Even(4)},
    "polyhead.jaxside: symbols=RelationalSymbols() exists": {"heads": ph.Relational(symbols=ph.RelationalSymbols())},
    "polyhead.jaxside.nnx.Transformer: symbols with once=True and shared=False exist": {
        "heads": ph.Relational(symbols=ph.SymbolicAttention(once=True, shared=False))
    },
    "polyhead.jaxside.nnx.Transformer: tied logits need Tokens(9) as inputs": {"outputs": ph.Logits(9, tied=True)},
    "Softmax: 7 heads do not divide the model width 128": {"heads": ph.Softmax(7)},
    "MultiHeadAttention: Softmax(share=True) needs a group before it": {"heads": ph.Softmax(share=True)},
    "RelativePositionBias: buckets must be at least 2 but is 1": {"positions": ph.RelativeBias(1)},
    "softmax_attention: unknown impl 'triton'": {"heads": ph.Softmax(impl="triton"), "layers": 1},
}


@pytest.mark.usefixtures("quick_draws")
@pytest.mark.parametrize("said", MISTAKES)
def test_settings_of_pytorch_alone_and_wrong_ones_are_named(said):
    settings = ph.TransformerConfig(**{"inputs": ph.Vectors(2), "outputs": ph.Values(1)} | MISTAKES[said])
    with refusing(said):
        nnx.Transformer(settings)(drawn(1, 2, 2))


@pytest.mark.usefixtures("quick_draws")
def test_bad_calls_are_one_line():
    layer, x = nnx.MultiHeadAttention(DIM, ph.Softmax(4), positions=ph.Rotary(), max_length=8), drawn(B, T, DIM)
    symbols = nnx.MultiHeadAttention(DIM, [ph.Softmax(2), ph.Relational(2)], own_symbols=False)
    learned = nnx.Transformer(MODELS["post-norm, sources of each layer"])
    model = nnx.Transformer(MODELS["language"])
    tokens = np.zeros((B, T), int)
    for said, call in {
        "m = 16 but x (b t m) = (2, 6, 3)": lambda: layer(x[..., :3]),
        "m = 16 but x (b t m) = (6, 16)": lambda: layer(x[0]),
        "mask must be boolean and broadcast to (b h t s) = ": lambda: layer(x, mask=x[0, 0, :6]),
        "but is bool (5,)": lambda: layer(x, mask=np.ones(5, bool)),
        "bias must be": lambda: layer(x, bias=x),
        "keep must be": lambda: layer(x, keep=drawn(1, 1, 1, T)),
        "9 positions but max_length is 8": lambda: layer(drawn(B, 9, DIM)),
        "positions must be integers (b|1 t) = (2, 6) but are int": lambda: layer(x, positions=np.zeros((1, 1), int)),
        "a table of relative symbols has 2 distance + 1 rows": lambda: symbols(x, symbols=[None, x[0]]),
        "group 1 takes symbols, of width 16, but there are none": lambda: symbols(x),
        "symbols must be (b|1 s m) = (2, 6, 16) or, if relative, a table": lambda: symbols(x, symbols=x[:, :5]),
        "symbols must be one array (or None) a group: 2, not 1": lambda: symbols(x, symbols=[x]),
        "Transformer: positions must be integers (b|1 t)": lambda: learned(x[:, :, :3], positions=PLACES[0]),
        "MultiHeadAttention: unknown init 'cs33'": lambda: nnx.MultiHeadAttention(8, ph.Softmax(2), init="cs33"),
        "positions must be Rotary": lambda: nnx.MultiHeadAttention(8, ph.Hyla(), positions=ph.Learned()),
        "window must be an integer of at least 1 but is": lambda: nnx.MultiHeadAttention(8, ph.Softmax(2), window=True),
        "Attention: dropout must be in [0, 1) but is 1": lambda: nnx.MultiHeadAttention(8, ph.Softmax(2), dropout=1.0),
        "Block: dropout must be in [0, 1) but is 1.5": lambda: nnx.TransformerBlock(layer, layer, dropout=1.5),
        "Norm: eps must be a finite number but is inf": lambda: nnx.TransformerBlock(layer, layer, norm_eps=np.inf),
        "nnx.Transformer: integer tokens (b t) were wanted": lambda: model(x),
        "nnx.Transformer: mask must be boolean (b t)": lambda: model(tokens, mask=x[0]),
        "nnx.Transformer: tail must be 1 to 6": lambda: model(tokens, tail=7),
    }.items():
        with refusing(said):
            call()


@pytest.mark.usefixtures("quick_draws")
def test_shared_dropout_is_drawn_once_for_all_heads_and_samples(monkeypatch):
    plain, shapes = jax.random.bernoulli, []
    monkeypatch.setattr(jax.random, "bernoulli", lambda key, p, shape: shapes.append(shape) or plain(key, p, shape))
    for shared in (True, False):
        how = {"dropout": 0.5, "dropout_shared": shared}
        layer = nnx.MultiHeadAttention(8, [ph.Softmax(2)], rngs=flax.nnx.Rngs(0), **how)
        jax.eval_shape(lambda x, layer=layer: layer(x, rngs=flax.nnx.Rngs(0)), drawn(2, 3, 8))  # traced, not compiled
    assert shapes == [(1, 1, 3, 3), (2, 2, 3, 3)]


def test_what_is_not_in_a_table_is_nan():
    """PyTorch raises.  JAX cannot raise for traced numbers; it would take the last row, or count from the end."""
    draw, x = components.Initialiser(None), drawn(1, 3, 4)
    symbols = PositionSymbols(4, 5, draw)
    for look_up in (
        TokenInput(ph.Tokens(5), 4, draw),
        LearnedPositions(5, 4, draw),
        SinusoidalPositions(5, 4),
        lambda positions: symbols(x, positions),
    ):
        found = np.isnan(look_up(jnp.array([[-1, 0, 4, 5, -100]]))).all(-1)
        assert found.tolist() == [[True, False, False, True, True]]
        assert not np.isnan(look_up(jnp.array([[0, 4]]))).any()
