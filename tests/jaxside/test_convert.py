"""Parameters converted from PyTorch and Haiku to Flax and back are exact, and training continues from them."""

import numpy as np
import pytest
import torch
from refusals import refusing
from safetensors.numpy import save_file

import polyhead as ph
from polyhead.compat import haiku as of_torch

jax = pytest.importorskip("jax", reason="jax is not installed (extra `jax`)")
flax = pytest.importorskip("flax", reason="flax is not installed (extra `flax`)")
jnp = jax.numpy

from polyhead.jaxside import convert, nnx  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_draws")

TASK = ph.tasks.FuzzyLogic(variables=3, length=8)
MODEL = ph.TransformerConfig(
    *TASK.ends,
    dim=16,
    heads=[ph.Hyla(2, dim=4, value_dim=4), ph.Softmax(1, dim=8, value_dim=8), ph.Relational(2, dim=4, value_dim=4)],
    feedforward=ph.Mlp(32, act="gelu_tanh"),
    positions=ph.RelativeBias(8),
    dropout=0.1,
    max_length=8,
    init="hyla",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of fuzzy logic that was trained for a few steps."""
    place = tmp_path_factory.mktemp("runs") / "a"
    train = ph.Train(steps=6, batch_size=32, lr=3e-3, warmup=2, evaluate=("iid",), eval_batches=1)
    ph.train.run(ph.Run(TASK, MODEL, train=train, folder=str(place), device="cpu"))
    return place


def test_a_checkpoint_of_fuzzy_logic_predicts_the_same_and_trains_on(folder, x64):
    """In float64: the rounding of float32 differs between processors."""
    model = convert.to_flax(folder / "checkpoint.safetensors", nnx.Transformer(MODEL, dtype=jnp.float64))
    _, theirs = ph.train.load_model(folder)
    data, theirs = TASK.batch("compositional", 64, seed=0, step=0), theirs.double()
    inputs, targets = data.inputs.double(), data.targets.numpy()
    graph, parameters, rest = flax.nnx.split(model, flax.nnx.Param, ...)

    def loss(parameters):
        predicted = flax.nnx.merge(graph, parameters, rest)(inputs.numpy())
        return jnp.square(predicted[:, -1] - targets[:, -1]).mean(), predicted

    @jax.jit
    def step(parameters):
        """The loss, the predictions, and the parameters after a step of gradient descent."""
        (gap, predicted), slopes = jax.value_and_grad(loss, has_aux=True)(parameters)
        return gap, predicted, jax.tree.map(lambda x, slope: x - 1e-2 * slope, parameters, slopes)

    before, predicted, trained = step(parameters)
    with torch.no_grad():
        wanted = theirs(inputs).numpy()
    assert wanted[:, -1].std() > 0.01
    np.testing.assert_allclose(predicted, wanted, rtol=0, atol=1e-12)
    after, _, _ = step(trained)
    assert after < before

    back = ph.Transformer(MODEL).double()
    flax.nnx.update(model, trained)
    back.load_state_dict({name: torch.from_numpy(array) for name, array in convert.from_flax(model).items()})
    with torch.no_grad():
        gap = np.square(back.eval()(inputs).numpy()[:, -1] - targets[:, -1]).mean()
    np.testing.assert_allclose(gap, after, rtol=1e-10)


def test_there_and_back_are_the_same_bits(folder, tmp_path):
    _, theirs = ph.train.load_model(folder)
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    model = convert.to_flax(state, nnx.Transformer(MODEL))
    back = convert.from_flax(model)
    assert back.keys() == state.keys()
    assert all(np.array_equal(back[name], state[name]) and back[name].dtype == np.float32 for name in state)
    save_file(back, tmp_path / "alone.safetensors")
    again = convert.from_flax(convert.to_flax(tmp_path / "alone.safetensors", nnx.Transformer(MODEL)))
    assert all(np.array_equal(again[name], state[name]) for name in state)
    back["blocks.0.attention.qkv.weight"][:] = 0
    assert np.abs(model.blocks[0].attention.qkv.weight[...]).max() > 0


def test_what_is_tied_stays_tied():
    settings = ph.TransformerConfig(ph.Tokens(5), ph.Logits(5, tied=True), dim=8, layers=1, heads=ph.Softmax(2))
    state = {name: tensor.numpy().copy() for name, tensor in ph.Transformer(settings).state_dict().items()}
    model = convert.to_flax(state, nnx.Transformer(settings))
    assert model.outputs.table.weight is model.inputs.table.weight
    assert convert.from_flax(model).keys() == state.keys()
    state["outputs.table.weight"][0, 0] += 1
    with refusing("to_flax: the state dict has another 'outputs.table.weight' than 'inputs."):
        convert.to_flax(state, model)
    with pytest.raises(TypeError, match="BFloat16"):  # NumPy has none: tables were said to differ
        convert.to_flax({name: torch.tensor(x).bfloat16() for name, x in state.items()}, model)
    del state["inputs.table.weight"]  # as safetensors.torch.save_model leaves out all names but one: it was missing
    convert.to_flax(state, model)
    np.testing.assert_array_equal(model.inputs.table.weight[...], state["outputs.table.weight"])


def test_a_model_without_arrays_is_filled():
    """`nnx.eval_shape` makes one without drawing parameters that a state replaces."""
    settings = ph.TransformerConfig(ph.Tokens(5), ph.Logits(5, tied=True), dim=8, layers=1, heads=ph.Softmax(2))
    state = {name: tensor.numpy() for name, tensor in ph.Transformer(settings).state_dict().items()}
    model = convert.to_flax(state, flax.nnx.eval_shape(lambda: nnx.Transformer(settings)))
    back = convert.from_flax(model)
    assert all(np.array_equal(back[name], state[name]) for name in state)
    assert model.outputs.table.weight is model.inputs.table.weight


def test_layers_of_a_block_are_built_alone():
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 6)
    rngs = flax.nnx.Rngs(0)
    for theirs, layer in (
        (ph.MlpLayer(6), nnx.MlpLayer(6, rngs=rngs)),
        (ph.SwigluLayer(6), nnx.SwigluLayer(6, rngs=rngs)),
        (ph.LayerNorm(6), nnx.Norm(6)),
        (ph.RMSNorm(6), nnx.Norm(6, kind="rms")),
    ):
        convert.to_flax({name: tensor.numpy() for name, tensor in theirs.state_dict().items()}, layer)
        np.testing.assert_allclose(layer(x), theirs(torch.tensor(x)).detach().numpy(), rtol=0, atol=2e-6)
    assert nnx.MlpLayer(6, dtype=jnp.bfloat16).up.bias.dtype == jnp.bfloat16


def test_states_that_do_not_fit_are_one_line():
    layer = nnx.MultiHeadAttention(8, ph.Softmax(2))
    state = convert.from_flax(layer)
    for said, other in {
        "lacks 1 parameters of the model, first 'qkv.weight'": {"out.weight": state["out.weight"]},
        "has 1 parameters the model lacks, first 'qkv.bias'": state | {"qkv.bias": np.zeros(24)},
        "has 'out.weight' of shape (8, 4) but the model wants (8, 8)": state | {"out.weight": np.zeros((8, 4))},
    }.items():
        with refusing(f"to_flax: the state dict {said}"):
            convert.to_flax(other, layer)
    with refusing("to_flax: a state dict or a file was wanted but a MultiHeadAttention came"):  # not all its parameters
        convert.to_flax(layer, layer)
    np.testing.assert_array_equal(layer.qkv.weight[...], state["qkv.weight"])
    other = {"qkv.weight": torch.ones(24, 8, requires_grad=True), "out.weight": 2 * state["out.weight"]}
    with pytest.raises(RuntimeError, match="requires grad"):  # it was said to be another than itself
        convert.to_flax(other, layer)
    np.testing.assert_array_equal(layer.out.weight[...], state["out.weight"])  # it was written before the error


def test_files_that_cannot_be_trusted_are_one_line(folder, tmp_path):
    whole, path = (folder / "checkpoint.safetensors").read_bytes(), tmp_path / "x.safetensors"
    for said, data in {"cannot be read": whole[:-40], "is damaged": whole[:-1] + bytes([whole[-1] ^ 1])}.items():
        path.write_bytes(data)
        with refusing(f"{path} {said} ("):
            convert.read(path)
    with refusing("nothing.safetensors does not exist"):
        convert.read(tmp_path / "nothing.safetensors")


# --------------------------------------------------------------------------------------------------------------- haiku
def tree(name="mha", dim=16):
    draw = np.random.default_rng(0)
    return {
        f"{name}/~/linear{n}": {
            "w": draw.standard_normal((dim, dim)).astype(np.float32),
            "b": draw.standard_normal(dim).astype(np.float32),
        }
        for n in ("", "_1", "_2", "_3")
    }


def test_haiku_trees_mean_the_same_on_both_sides_and_come_back_as_the_same_bits():
    x = np.random.default_rng(1).standard_normal((2, 5, 16)).astype(np.float32)
    given = tree("decoder/~/mha")
    ours = convert.from_haiku(given | tree("encoder/~/mha"), heads=4, name="decoder/~/mha")
    np.testing.assert_allclose(ours(x), of_torch.from_haiku(given, heads=4)(torch.tensor(x)).detach(), atol=2e-5)
    back = convert.to_haiku(ours, name="decoder/~/mha")
    assert list(back) == list(given)
    jax.tree.map(np.testing.assert_array_equal, back, given)


def test_modules_that_are_not_the_tutorials_are_one_line():
    """Trees that are not: tests/compat/test_haiku.py."""
    for heads, settings in (
        ([ph.Hyla(4)], {"bias": True}),
        ([ph.Softmax(2), ph.Softmax(2)], {"bias": True}),
        ([ph.Softmax(4, kv_heads=2)], {"bias": True}),
        ([ph.Softmax(4)], {}),
        ([ph.Softmax(4)], {"bias": True, "causal": True}),
        ([ph.Softmax(4)], {"bias": True, "positions": ph.Rotary()}),
        ([ph.Softmax(4)], {"bias": True, "qk_norm": True}),
    ):
        with refusing("but this one has not: width 16"):
            convert.to_haiku(nnx.MultiHeadAttention(16, heads, **settings))
