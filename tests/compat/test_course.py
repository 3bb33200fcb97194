"""The adapters that the course's tests call, at their shapes and tolerances, against NumPy; and the page for students.

The shapes are those of the course's fixtures: 4 sequences, 12 queries, 16 keys, 4 heads of width 16.
"""

import importlib
import pathlib
import re
import runpy

import course_oracle as oracle
import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyhead.ops import textbook

ROOT = pathlib.Path(__file__).parents[2]
ADAPTERS = runpy.run_path(str(ROOT / "examples" / "cs336_adapters.py"))
B, T, S, H, D, FF, VOCAB, LAYERS, CONTEXT, THETA = 4, 12, 16, 4, 64, 128, 500, 3, 16, 1e4
WEIGHTS = oracle.state_dict(VOCAB, LAYERS, D, FF)
BLOCK = oracle.of_layer(WEIGHTS, 0)
PROJECTIONS = [BLOCK[f"attn.{name}_proj.weight"] for name in ("q", "k", "v", "output")]
FEEDFORWARD = [BLOCK[f"ffn.w{i}.weight"] for i in (1, 2, 3)]
X = oracle.draw(4, B, T, D)
Q, K, V = oracle.draw(1, B, T, D), oracle.draw(2, B, S, D), oracle.draw(3, B, S, D)
MASK = oracle.draw(5, B, T, S) > 0.5
MASK[..., 0] = True
TOKENS = torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(6))
POSITIONS = torch.arange(T)

CALLS = {
    "run_linear": (D, FF, FEEDFORWARD[0], X),
    "run_embedding": (VOCAB, D, WEIGHTS["token_embeddings.weight"], TOKENS),
    "run_silu": (X,),
    "run_swiglu": (D, FF, *FEEDFORWARD, X),
    "run_rmsnorm": (D, 1e-5, BLOCK["ln1.weight"], X),
    "run_softmax": (X + 100, -1),
    "run_rope": (D, THETA, T, X, POSITIONS),
    "run_scaled_dot_product_attention": (Q, K, V, MASK),
    "run_multihead_self_attention": (D, H, *PROJECTIONS, X),
    "run_multihead_self_attention_with_rope": (D, H, CONTEXT, THETA, *PROJECTIONS, X, POSITIONS[None]),
    "run_transformer_block": (D, H, FF, CONTEXT, THETA, BLOCK, X),
    "run_transformer_lm": (VOCAB, CONTEXT, D, LAYERS, H, FF, THETA, WEIGHTS, TOKENS),
}
NUMPY = {
    "run_linear": lambda d_in, d_out, w, x: oracle.f64(x) @ oracle.f64(w).T,
    "run_embedding": lambda count, dim, w, tokens: oracle.f64(w)[tokens.numpy()],
    "run_silu": lambda x: oracle.silu(oracle.f64(x)),
    "run_swiglu": lambda d, ff, w1, w2, w3, x: oracle.swiglu(*map(oracle.f64, (x, w1, w2, w3))),
    "run_rmsnorm": lambda d, eps, w, x: oracle.rms(oracle.f64(x), oracle.f64(w), eps),
    "run_softmax": lambda x, dim: oracle.softmax(oracle.f64(x), dim),
    "run_rope": lambda d, theta, length, x, positions: oracle.turn(oracle.f64(x), positions.tolist(), theta),
    "run_scaled_dot_product_attention": lambda q, k, v, mask: oracle.attend(*map(oracle.f64, (q, k, v)), mask.numpy()),
    "run_multihead_self_attention": lambda d, h, q, k, v, o, x: oracle.mha(*map(oracle.f64, (x, q, k, v, o)), h),
    "run_multihead_self_attention_with_rope": lambda d, h, length, theta, wq, wk, wv, wo, x, positions: oracle.mha(
        oracle.f64(x), *map(oracle.f64, (wq, wk, wv, wo)), h, positions[0].tolist(), theta
    ),
    "run_transformer_block": lambda d, h, ff, length, theta, w, x: oracle.block(oracle.f64(x), w, h, theta),
    "run_transformer_lm": lambda c, length, d, n, h, ff, theta, w, ids: oracle.lm(ids, w, n, h, theta),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_adapter_gives_what_numpy_gives(name):
    expected = NUMPY[name](*CALLS[name])
    atol = 1e-4 if name == "run_transformer_lm" else 2e-6
    np.testing.assert_allclose(ADAPTERS[name](*CALLS[name]).numpy(), expected, rtol=1e-4, atol=atol)


# Of the course's tests/adapters.py, which imports ours with its last line.
NOT_OURS = (
    *("run_get_batch", "run_cross_entropy", "run_gradient_clipping", "get_adamw_cls", "run_get_lr_cosine_schedule"),
    *("run_save_checkpoint", "run_load_checkpoint", "get_tokenizer", "run_train_bpe"),
)


def test_the_courses_file_gets_our_adapters_and_keeps_the_other_nine(tmp_path, monkeypatch):
    """As docs/course.md says: our file beside the course's file, and one line at its end."""
    line = "from .polyhead_adapters import *"
    assert f"```text\n{line}\n```" in (ROOT / "docs" / "course.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / "cs336_adapters.py").read_text(encoding="utf-8")
    assert line in example
    package = tmp_path / "assignment"
    package.mkdir()
    (package / "__init__.py").touch()
    stubs = [f"def {name}(*arguments): raise NotImplementedError\n" for name in (*CALLS, *NOT_OURS)]
    (package / "adapters.py").write_text("".join(stubs) + line + "\n", encoding="utf-8")
    (package / "polyhead_adapters.py").write_text(example, encoding="utf-8")

    monkeypatch.syspath_prepend(tmp_path)
    adapters = importlib.import_module("assignment.adapters")
    modules = {name: getattr(adapters, name).__module__ for name in (*CALLS, *NOT_OURS)}
    ours = dict.fromkeys(CALLS, "assignment.polyhead_adapters")
    assert modules == ours | dict.fromkeys(NOT_OURS, "assignment.adapters")


def test_one_product_gives_what_three_give():
    w_q, w_k, w_v, w_o = PROJECTIONS
    joint = torch.cat((w_q, w_k, w_v))
    y = textbook.self_attention_one_product(X, joint, w_o, H, POSITIONS, THETA)
    torch.testing.assert_close(y, textbook.self_attention(X, *PROJECTIONS, H, POSITIONS, THETA), rtol=1e-5, atol=1e-5)


def test_glu_is_a_sigmoid_times_a_map():
    w1, w2 = FEEDFORWARD[0], FEEDFORWARD[2]
    gate = 1 / (1 + np.exp(-oracle.f64(X) @ oracle.f64(w1).T))
    np.testing.assert_allclose(textbook.glu(X, w1, w2), oracle.f64(X) @ oracle.f64(w2).T * gate, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------- equal to PyTorch's, stable, any dtype
def rms_norm(x):
    return textbook.rms_norm(x, torch.ones(x.shape[-1], dtype=x.dtype))


def attention(x):
    """PyTorch's, written out: the gradient of its fused kernel is inexact at scores of 1e8 from 2.14 on."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(x, x, x)


FUNCTIONS = {
    "softmax": (lambda x: textbook.softmax(x, -1), lambda x: torch.softmax(x, -1)),
    "silu": (textbook.silu, F.silu),
    "rms_norm": (rms_norm, lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-5)),
    "attention": (lambda x: textbook.scaled_dot_product_attention(x, x, x), attention),
}


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_equals_pytorchs_to_rounding(name, dtype, scale):
    """At 1e4, where exponentials of the numbers, squares and products overflow in half precision, too."""
    function, torch_function = FUNCTIONS[name]
    x = (oracle.draw(7, 3, 5, 8).clamp(-2, 2) * scale).to(dtype).requires_grad_()
    rounding = 8 * torch.finfo(dtype).eps
    results = []
    reference_dtype = torch.promote_types(dtype, torch.float32)
    for y in (function(x), torch_function(x.to(reference_dtype)).to(dtype)):
        results.append((y, torch.autograd.grad(y.sin().sum(), x)[0]))
    for result, expected in zip(*results, strict=True):
        assert result.isfinite().all()
        largest = max(1.0, expected.abs().max().item()) if scale == 1.0 else expected.abs().max().item()
        torch.testing.assert_close(result, expected, rtol=rounding, atol=rounding * largest)


# ------------------------------------------------------------------------------------------------------------ the page
def test_the_code_of_the_page_is_the_code_of_the_file():
    page = (ROOT / "docs" / "course.md").read_text(encoding="utf-8")
    code = pathlib.Path(textbook.__file__).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    functions = [block for block in blocks if block.startswith(("def ", "@shaped"))]
    names = set()
    for function in functions:
        assert function.rstrip() in without_docstrings(code)
        names.update(re.findall(r"^def (\w+)", function, re.M))
    assert names >= {name for name in re.findall(r"^def (\w+)", code, re.M) if not name.startswith("check")}


def without_docstrings(code):
    """The file without the docstrings of its functions: the page says in words what they say."""
    return re.sub(r'^    """.*?"""\n', "", code, flags=re.DOTALL | re.MULTILINE)
