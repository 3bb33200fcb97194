"""Multi-head attention over any list of head groups: equations, positions, masks, causality, errors."""

import pytest
import torch
from torch.testing import assert_close

from polyhead import config
from polyhead.config import Alibi, Hyla, Linear, RelativeBias, Rotary, Softmax
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.block import TransformerBlock
from polyhead.layers.call import drawn_keep
from polyhead.layers.feedforward import MlpLayer
from polyhead.ops.latent_code import dense

F64 = torch.float64
MIXTURES = {
    "softmax": [Softmax(4)],
    "linear": [Linear(4)],
    "hyla": [Hyla(4)],
    "deep": [Hyla(4, value_depth=2, act="silu")],
    "all": [
        Softmax(2),
        Linear(2, normalise="rms_heads", act="relu"),
        Hyla(2, dim=4, value_dim=6),
        Hyla(2, normalise="softmax"),
    ],
    "compete": [Linear(2, normalise="softmax_heads"), Hyla(2, normalise="softmax_heads")],
    "grouped": [Softmax(4, kv_heads=2), Hyla(4, dim=6, value_dim=2, kv_heads=1)],
}
POSITIONS = {
    "none": None,
    "rotary": Rotary(),
    "t5": RelativeBias(),
    "t5_both": RelativeBias(8, bidirectional=True),
    "alibi": Alibi(),
}


def make(mixture, *, dim=64, **options):
    torch.manual_seed(0)
    attention = MultiHeadAttention(dim, MIXTURES[mixture], max_length=32, dtype=F64, **options)
    for parameter in attention.parameters():  # biases too: at zero their faults are invisible
        torch.nn.init.normal_(parameter, std=0.3)
    return attention.eval()


def act(name, x):
    return getattr(torch.nn.functional, name)(x) if name != "identity" else x


def code_of(group, scores, look):
    """(h, t, s) scores to the code, by the definitions."""
    if "softmax" in group.normalise:
        dim = 0 if group.normalise == "softmax_heads" else -1
        code = torch.softmax(scores.masked_fill(~look, -torch.inf), dim).nan_to_num(0.0)
    else:
        code = scores * look
    if "rms_heads" in group.normalise:
        code = code / (code.square().mean(0, keepdim=True) + 1e-6).sqrt()
    return code


def oracle(attention, x, context, look):
    """Three separate projections per head and explicit loops over groups, heads and pairs of one sequence."""
    nq, nk, _ = attention.widths
    weight, offset = attention.qkv.weight, attention.qkv.bias
    q_rows, k_rows, v_rows = weight[:nq], weight[nq : nq + nk], weight[nq + nk :]
    q_bias, k_bias, v_bias = offset[:nq], offset[nq : nq + nk], offset[nq + nk :]
    outputs, q0, k0, v0 = [], 0, 0, 0
    for group in attention.groups:
        size, d, e = group.sizes, group.sizes.dim, group.sizes.value_dim
        share = size.heads // size.kv_heads
        q = [
            x @ q_rows[q0 + i * d : q0 + (i + 1) * d].T + q_bias[q0 + i * d : q0 + (i + 1) * d]
            for i in range(size.heads)
        ]
        k = [context @ k_rows[k0 + i * d :][:d].T + k_bias[k0 + i * d :][:d] for i in range(size.kv_heads)]
        v = [context @ v_rows[v0 + i * e :][:e].T + v_bias[v0 + i * e :][:e] for i in range(size.kv_heads)]
        q0, k0, v0 = q0 + size.widths[0], k0 + size.widths[1], v0 + size.widths[2]
        scores = torch.stack([q[i] @ k[i // share].T / d**0.5 for i in range(size.heads)])
        code = code_of(group, scores, look)
        for i in range(size.heads):
            y = torch.zeros(len(x), e, dtype=F64)
            for t in range(len(x)):
                for s in range(len(context)):
                    y[t] += code[i, t, s] * _value(
                        group, code[:, t, s], [v[j // share][s] for j in range(size.heads)], i
                    )
            outputs.append(y)
    return torch.cat(outputs, -1) @ attention.out.weight.T + attention.out.bias


def _value(group, code, v, head):
    if group.kind != "hyla":
        return act(group.act, v[head])
    z = act(group.act, sum(a * row for a, row in zip(code, v, strict=True)))
    if group.depth == 2:
        z = act(group.act, sum(a * (w @ z) for a, w in zip(code, group.value_weight, strict=True)))
    return z


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_the_layer_is_its_equation(mixture, cross):
    attention = make(mixture, bias=True)
    x = torch.randn(2, 4, 64, dtype=F64)
    context = torch.randn(2, 5, 64, dtype=F64) if cross else None
    look = torch.rand(4, 5 if cross else 4) > 0.3
    look[1] = False
    got = attention(x, context, mask=look)
    for b in range(2):
        assert_close(got[b], oracle(attention, x[b], (context if cross else x)[b], look), atol=1e-9, rtol=1e-9)
    assert_close(got[:, 1], attention.out.bias.expand(2, -1), atol=0, rtol=0)


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("positions", POSITIONS)
def test_the_future_is_invisible(mixture, positions):
    attention = make(mixture, causal=True, positions=POSITIONS[positions])
    x = torch.randn(2, 9, 64, dtype=F64, requires_grad=True)
    y = attention(x)
    (gradient,) = torch.autograd.grad(y[:, 4].sum(), x)
    assert gradient[:, :5].abs().sum(-1).gt(0).all()
    assert gradient[:, 5:].eq(0).all()
    for i in range(9):
        assert_close(attention(x[:, : i + 1])[:, i], y[:, i], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_without_causal_the_future_is_visible(mixture):
    attention = make(mixture)
    x = torch.randn(1, 5, 64, dtype=F64, requires_grad=True)
    (gradient,) = torch.autograd.grad(attention(x)[:, 0].sum(), x)
    assert gradient.abs().sum(-1).gt(0).all()


@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_code_makes_the_output(mixture):
    attention = make(mixture, causal=True, positions=RelativeBias(), bias=True)
    x = torch.randn(2, 6, 64, dtype=F64)
    y, code = attention(x, return_code=True)
    taps = []
    assert_close(attention(x, taps=taps), y)
    assert code.shape == (2, attention.total_heads, 6, 6)
    assert code.triu(1).eq(0).all()
    assert_close(torch.cat([group.code() for group in taps[0].groups], 1), code)
    assert_close(taps[0].output, y)


def test_positions_by_hand_equal_positions_by_default():
    where = torch.arange(7)[None]
    x = torch.randn(2, 7, 64, dtype=F64)
    for positions in POSITIONS.values():
        attention = make("all", positions=positions, causal=True)
        assert_close(attention(x, positions=where), attention(x))
    rotary = make("all", positions=Rotary())
    assert_close(rotary(x, positions=where + 3), rotary(x))  # only distances count
    assert not torch.allclose(rotary(x, positions=where * 2), rotary(x))
    t5 = make("all", positions=RelativeBias())
    assert not torch.allclose(t5(x, positions=where * 2), t5(x))


@pytest.mark.parametrize("positions", ["none", "t5", "alibi"])
@pytest.mark.parametrize("window", [None, 3])
def test_causal_cross_attention_aligns_the_last_query_with_the_last_key(positions, window):
    attention = make("all", causal=True, positions=POSITIONS[positions], window=window)
    x = torch.randn(2, 7, 64, dtype=F64)
    assert_close(attention(x[:, -3:], x), attention(x)[:, -3:])


def test_biases_add_up_whatever_their_form():
    x = torch.randn(2, 5, 64, dtype=F64)
    attention = make("all", positions=RelativeBias())
    by_offset = torch.randn(attention.total_heads, 9, dtype=F64)
    assert_close(attention(x, bias=by_offset), attention(x, bias=dense(by_offset, 5, 5)[None]))
    assert not torch.allclose(attention(x, bias=by_offset), attention(x))
    plain = make("all")
    table = attention.relative(5, 5, offset=0)
    plain.load_state_dict({k: v for k, v in attention.state_dict().items() if "relative" not in k})
    assert_close(plain(x, bias=table), attention(x))


def test_a_mask_per_head_reaches_its_head():
    attention = make("all")
    x = torch.randn(2, 5, 64, dtype=F64)
    mask = torch.rand(2, attention.total_heads, 5, 5) > 0.4
    _, code = attention(x, mask=mask, return_code=True)
    assert code[~mask].eq(0).all()
    assert code[mask].ne(0).all()


def test_a_window_hides_distant_keys():
    attention = make("all", causal=True, window=3)
    x = torch.randn(1, 8, 64, dtype=F64)
    _, code = attention(x, return_code=True)
    near = torch.ones(8, 8).tril().bool() & ~torch.ones(8, 8).tril(-3).bool()
    assert code[0, :, near].ne(0).all()
    assert code[0, :, ~near].eq(0).all()


def test_a_window_narrows_a_mask_and_counts_positions():
    attention = make("all", window=2)
    x, mask = torch.randn(1, 6, 64, dtype=F64), torch.ones(6, dtype=torch.bool)
    mask[2] = False
    code = attention(x, mask=mask, return_code=True)[1]
    near = (torch.arange(6)[:, None] - torch.arange(6)).abs() < 2
    assert code[0].ne(0).any(0).equal(near & mask)
    code = attention(x, positions=torch.arange(6)[None] * 2, return_code=True)[1]
    assert code[0].ne(0).any(0).equal(torch.eye(6).bool())


@pytest.mark.parametrize("causal", [False, True])
def test_the_tail_of_a_block_with_a_window_is_the_end_of_the_whole(causal):
    block = TransformerBlock(make("all", window=3, causal=causal), MlpLayer(64, dtype=F64), dtype=F64)
    x = torch.randn(2, 7, 64, dtype=F64)
    assert_close(block(x, tail=2), block(x)[:, -2:])


def test_dropout_reaches_its_head():
    """One head of the second group is dropped: the output lacks that head and nothing else."""
    torch.manual_seed(0)
    attention = MultiHeadAttention(64, [Softmax(2, value_dim=3), Linear(2, value_dim=5)], dropout=0.5, dtype=F64)
    x, keep = torch.randn(2, 5, 64, dtype=F64), torch.ones(1, 4, 5, 5, dtype=F64)
    keep[:, 2] = 0
    attention._keep = lambda *_: keep
    dropped = attention(x)
    attention.eval()
    attention._keep = lambda *_: None
    with torch.no_grad():
        attention.out.weight[:, 6:11] = 0
    assert_close(dropped, attention(x))


@pytest.mark.parametrize("training", [False, True])
def test_a_given_keep_is_read_instead_of_the_draw(training):
    """Zero in a head takes that head away; a draw handed back gives what the layer's own draw gave."""
    torch.manual_seed(0)
    attention = MultiHeadAttention(64, [Softmax(2, value_dim=3), Linear(2, value_dim=5)], dropout=0.5, dtype=F64)
    attention.train(training)
    x, context = torch.randn(2, 5, 64, dtype=F64), torch.randn(2, 7, 64, dtype=F64)
    without = torch.ones(4, dtype=F64)
    without[2] = 0
    y = attention(x, context, keep=without.view(1, 4, 1, 1).expand(1, 4, 5, 7))
    torch.manual_seed(3)
    own = attention(x)
    torch.manual_seed(3)
    given = torch.ones(2, 4, 5, 5, dtype=F64) if not training else (torch.rand(2, 4, 5, 5) >= 0.5).to(F64) * 2
    assert_close(attention(x, keep=given), own)
    attention.eval()
    assert_close(attention(x, context, keep=torch.ones(1, 1, 5, 7, dtype=F64)), attention(x, context))
    with torch.no_grad():
        attention.out.weight[:, 6:11] = 0
    assert_close(y, attention(x, context))


@pytest.mark.parametrize("shared", [False, True])
def test_dropout_on_the_code(shared):
    attention = make("hyla", dropout=0.5, dropout_shared=shared)
    x = torch.randn(3, 6, 64, dtype=F64)
    assert_close(attention(x), attention(x), atol=0, rtol=0)  # off in eval
    keep = attention.train()._keep(x, 6)
    assert keep.shape == ((1, 1, 6, 6) if shared else (3, 4, 6, 6))
    assert set(keep.unique().tolist()) == {0.0, 2.0}
    torch.manual_seed(1)
    first = attention(x)
    torch.manual_seed(2)
    assert not torch.allclose(first, attention(x))
    torch.manual_seed(1)
    assert_close(attention(x), first, atol=0, rtol=0)


def test_dropout_drops_its_rate_and_scales_the_rest():
    attention, x = make("hyla", dropout=0.2).train(), torch.randn(40, 10, 64, dtype=F64)
    torch.manual_seed(0)
    keep = attention._keep(x, 10)  # 16,000 draws
    assert set(keep.unique().tolist()) == {0.0, 1 / (1 - 0.2)}
    assert keep.eq(0).double().mean().item() == pytest.approx(0.2, abs=0.016)  # five standard deviations


def test_a_small_rate_is_kept_by_every_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        keep = drawn_keep((400, 100), 0.001)
    finally:
        torch.set_default_dtype(torch.float32)
    assert keep.dtype == torch.bfloat16
    assert 20 < keep.eq(0).sum() < 60


def test_q_and_k_normalised_are_blind_to_their_scale():
    attention = make("softmax", qk_norm=True)
    x = torch.randn(2, 6, 64, dtype=F64)
    before = attention(x, return_code=True)[1]
    with torch.no_grad():
        attention.qkv.weight[: sum(attention.widths[:2])] *= 1000
    assert_close(attention(x, return_code=True)[1], before, atol=1e-4, rtol=1e-3)


def test_q_and_k_have_norms_of_their_own():
    """LayerNorm without bias, eps 1e-6 (the inputs are small enough to feel it), then the scores."""
    attention = make("softmax", qk_norm=True)
    x = torch.randn(2, 6, 64, dtype=F64) * 1e-3
    q, k = (part.unflatten(-1, (4, 16)) for part in attention.qkv(x).split(attention.widths, -1)[:2])
    gains = [norm.weight for norm in attention.qk_norms]
    q, k = (
        (a - a.mean(-1, keepdim=True)) / (a.var(-1, keepdim=True, correction=0) + 1e-6).sqrt() * gain
        for a, gain in zip((q, k), gains, strict=True)
    )
    wanted = (torch.einsum("bthd,bshd->bhts", q, k) / 4).softmax(-1)
    assert_close(attention(x, return_code=True)[1], wanted)


ERRORS = {
    "wrong width": (lambda a, x: a(x[..., :3]), "m = 64 but x (b t m) = (2, 5, 3)"),
    "context of another batch": (lambda a, x: a(x, x[:1]), "b = 2 in x but 1 in context (b s m) = (1, 5, 64)"),
    "float mask": (lambda a, x: a(x, mask=torch.ones(5, 5)), "mask must be boolean"),
    "mask of the wrong size": (
        lambda a, x: a(x, mask=torch.ones(4, 5).bool()),
        "mask must broadcast to (b h t s) = (2, 4, 5, 5)",
    ),
    "keep without its queries": (
        lambda a, x: a(x, keep=torch.ones(1, 4, 1, 1, dtype=F64)),
        "keep must be (b|1 h|1 t s), here (2, 4, 5, 5), but is (1, 4, 1, 1)",
    ),
    "keep of other heads": (lambda a, x: a(x, keep=torch.ones(2, 3, 5, 5, dtype=F64)), "but is (2, 3, 5, 5)"),
    "keep without its batch": (lambda a, x: a(x, keep=torch.ones(4, 5, 5, dtype=F64)), "but is (4, 5, 5)"),
    "context longer than the rotary table": (
        lambda a, x: make("hyla", positions=Rotary())(x, torch.zeros(2, 33, 64, dtype=F64)),
        "33 positions but max_length is 32",
    ),
    "more queries than the rotary table has, and a short context": (
        lambda a, x: make("hyla", positions=Rotary())(torch.zeros(2, 33, 64, dtype=F64), x),
        "33 positions but max_length is 32",
    ),
    "bias of the wrong size": (lambda a, x: a(x, bias=torch.ones(4, 8, dtype=F64)), "(h t+s-1) = (4, 9) but is (4, 8)"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_mistake_gives_one_clear_line(name):
    call, text = ERRORS[name]
    with pytest.raises(ValueError, match="MultiHeadAttention") as error:
        call(make("hyla"), torch.randn(2, 5, 64, dtype=F64))
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_mistakes_when_building():
    with pytest.raises(ValueError, match=r"Softmax: 3 heads do not divide the model width 10: give dim="):
        MultiHeadAttention(10, [Softmax(3)])
    strange = ([], r"is \[\]"), (["softmax"], "holds 'softmax'"), ([ph.Softmax], "holds <class"), (3, "is 3")
    for heads, came in strange:
        call = functools.partial(config.head_list, "layer", heads)
        refused(call, f"layer: heads must be mechanisms .*but {came}")
