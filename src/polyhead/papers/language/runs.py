"""Language models: the study of HYLA on C4 (Schug et al. 2024, Fig. 6), that of dual attention on FineWeb-Edu (Altabaa
and Lafferty 2024), and ours on the Python standard library's sources, as functions that return runs.

Each takes a scale, `small` (two CPU cores, minutes, no download) or `paper`; `polyhead reproduce lm-bytes` trains the
runs, or goes on with them, and writes figure, table and verdicts beside the papers' numbers.

Models that are compared see the same tokens in the same order and have as many parameters as softmax heads, within 1 %.
`models.py` has models and sizes.  Scores are compared where all runs read the same text only: two Pythons have two
standard libraries.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from polyhead.config import Rotary, Run, SymbolicAttention, TransformerConfig
from polyhead.models.size import match, parameters
from polyhead.papers import sizes as scales
from polyhead.papers.language.models import CLOSE, ROWS, Shape, feedforward, model
from polyhead.papers.sizes import Setting
from polyhead.spec.shapes import one_of

SPLITS = ("validation", "iid")
GB = 10**9
LIBRARY = SymbolicAttention(count=64, heads=4, trainable=False)
LARGE = SymbolicAttention(count=1024, heads=8, trainable=False)

SIZES: dict[str, dict[str, Shape]] = {
    "paper": {
        "bytes": Shape(
            *(512, 1344, 6, 8, 64, 20_000, 64, (1e-3,), (0.1,), (500,), 1.0, 32, 3, Rotary(), (0.9, 0.99)),
            length=1024,
            precision="bf16",
        ),
        "c4": Shape(
            *(512, 2048, 6, 8, 64, 991_821, 256, (1e-3, 3e-3), (0.1, 0.03), (1000,), None, 32, 1, Rotary()),
            act="gelu_tanh",
            data="hub:allenai/c4/en",
            limit=640 * GB,
            held_out=1e-4,
            tokenizer="bpe:32000",
            length=512,
            norm="layer",
            tied=True,
            init="hyla",
            evaluations=100,
            precision="bf16",
        ),
        "dual": Shape(
            *(1024, 4096, 24, 16, 64, 19_073, 512, (6e-4,), (0.1,), (715,), 1.0, 20, 1, Rotary(), (0.9, 0.95)),
            act="gelu_tanh",
            data="hub:HuggingFaceFW/fineweb-edu/sample-10BT",
            limit=60 * GB,
            held_out=1e-3,
            tokenizer="tiktoken:gpt2",
            length=1024,
            norm="layer",
            tied=True,
            init="hyla",
            kv_heads=4,
            relations=64,
            symbols=LARGE,
            evaluations=76,
            precision="bf16",
            accumulate=16,
        ),
        "parts": Shape(
            *(512, 1344, 4, 16, 32, 20_000, 64, (1e-3,), (0.1,), (500,), 1.0, 32, 3, Rotary(), (0.9, 0.95)),
            data="hub:roneneldan/TinyStories",
            limit=3 * GB,
            held_out=0.01,
            tokenizer="bpe:10000",
            precision="bf16",
        ),
    },
    "small": {
        "bytes": Shape(
            *(128, 320, 4, 8, 16, 1275, 8, (4e-3,), (0.1,), (50,), 1.0, 24, 1, Rotary(), (0.9, 0.99)),
            length=256,
            evaluations=8,
            symbols=LIBRARY,
        ),
        "c4": Shape(
            *(128, 512, 4, 8, 16, 300, 16, (3e-3,), (0.1,), (30,), 1.0, 10, 3, Rotary(), (0.9, 0.99)),
            act="gelu_tanh",
            tokenizer="bpe:2048",
            length=128,
            norm="layer",
            tied=True,
            init="hyla",
            evaluations=6,
        ),
        "dual": Shape(
            *(64, 256, 4, 8, 8, 400, 16, (4e-3,), (0.1,), (30,), 1.0, 8, 3, Rotary(), (0.9, 0.95)),
            act="gelu_tanh",
            tokenizer="bpe:2048",
            length=128,
            norm="layer",
            tied=True,
            init="hyla",
            symbols=LIBRARY,
        ),
        "parts": Shape(
            *(96, 256, 4, 4, 24, 500, 16, (4e-3,), (0.1,), (30,), 1.0, 16, 3, Rotary(), (0.9, 0.99)),
            length=128,
            evaluations=4,
        ),
    },
    "smoke": {
        what: Shape(
            *(16, 32, 2, 4, 4, 4, 4, (1e-3,), (0.1,), (1,), 1.0, 2, 2, Rotary()),
            length=16,
            act="swiglu" if what in ("bytes", "parts") else "gelu_tanh",
            tokenizer="bytes" if what in ("bytes", "parts") else "bpe:300",
            symbols=SymbolicAttention(count=4, trainable=False),
        )
        for what in ("bytes", "c4", "dual", "parts")
    },
}
"""What the four kinds of studies train: of kinds of heads, of Fig. 6, of dual attention, of a model's other parts."""

COMPARED = ("softmax", "hyla", "dual", "mixture", "linear")
ACTS = ("swiglu", "silu", "relu")
ORDERS = ("pre", "post")
RATES = {"paper": (3e-4, 1e-3, 3e-3, 1e-2), "small": (1e-3, 3e-3, 1e-2, 3e-2), "smoke": (1e-3, 1e-2)}
"""Learning rates of `norms`."""


def size(scale: str, what: str) -> Shape:
    """The size named `scale` of a study."""
    return SIZES[one_of("recipes", "scale", scale, SIZES)][what]


def lm_bytes(scale: str = "small") -> tuple[Run, ...]:
    """Bytes of the standard library's sources, one model per kind of heads.

    polyhead reproduce lm-bytes.  Small: width 128, 4 layers, 8 heads of width 16, SwiGLU, RMSNorm, RoPE, 1275 updates
    of 8 x 256 bytes, rate 4e-3: 2.6 MB of 10.  One run for each core; with `--workers 1` one after the other, on all
    cores; 5 to 12 minutes of one core a model.  Softmax heads: 1.71 bits per byte of held-out files, where zlib takes
    1.90.  Paper scale (no paper has this study): width 512, 6 layers, 20,000 updates of 64 x 1024 bytes.
    """
    return _compared("bytes", COMPARED, size(scale, "bytes"))


def lm_long(scale: str = "small") -> tuple[Run, ...]:
    """The softmax model of `lm-bytes`, larger and longer: below the 1.81 bits per byte of zlib.

    polyhead reproduce lm-long.  Small: width 192, 512 bytes, 1360 updates of 8: 5.6 MB.
    """
    return _compared("long", ("softmax",), long_of(size(scale, "bytes")))


def long_of(shape: Shape) -> Shape:
    """Half as wide again, twice the context, a fifteenth more updates, so that it sees twice the tokens."""
    steps = 16 * shape.steps // 15
    return replace(shape.wider(1.5), length=2 * shape.length, steps=steps, lrs=(0.75 * shape.lrs[0],))


def fig_6(scale: str = "small") -> tuple[Run, ...]:
    """Fig. 6: loss on C4 in the course of training; softmax, linear, HYLA.

    polyhead reproduce fig-6.  Paper: 6 layers of width 512, 8 heads of width 64, MLP of 2048, RoPE, tied output, mixed
    precision, vocabulary of 32,000, 130 B tokens in batches of 256; rates 1e-3 and 3e-3, decay 0.1 and 0.03, 1000
    warm-up updates; 72 to 100 hours on 16 TPU v5e a run.  Small: the standard library in 2048 byte pairs, width 128, 4
    layers, 8 heads, 0.6 M tokens, the one rate 3e-3, three seeds.

    Where the paper is silent (the alternative in brackets): 512 tokens in a sequence, so 991,821 updates [nanodo's
    default; not said]; byte pairs trained on the spot [SentencePiece: `--task.tokenizer FILE.model`]; GELU of tanh form
    and no biases, as nanodo has them [SwiGLU, as in the released code for WikiText]; tied and without biases these are
    35 M parameters, the paper says 50 M.
    """
    return _compared("c4", ("hyla", "softmax", "linear"), size(scale, "c4"))


def dual_lm(scale: str = "small") -> tuple[Run, ...]:
    """Dual attention beside softmax heads in language, by size: how many tokens each needs to reach a perplexity.

    polyhead reproduce dual-lm.  Paper: FineWeb-Edu 10BT in GPT-2's tokens, 24 layers of width 1024, 1536, 2048 with
    heads of width 64, half of them relational, grouped keys (of dual attention alone), 64 or 128 relations, a library
    of 1024 or 2048 frozen symbols; 19,073 updates of 524,288 tokens, rate 6e-4 with 715 of warm-up and a cosine to a
    tenth, decay 0.1, clip 1, betas 0.9 and 0.95; one run a size.  Small: the standard library in 2048 byte pairs,
    widths 64 and 128, 4 layers, 8 heads, 64 symbols, one relation per head, three seeds, parameters made equal.

    Our output projection reads all heads at once, the released one each kind for itself: 356, 762 and 1323 M parameters
    where the paper has 343, 734 and 1270, beside 354, 757 and 1311 of softmax heads.
    """
    runs: list[Run] = []
    for shape in dual_sizes(scale):
        runs += _compared(f"dual-lm-{shape.dim}", ("dual", "softmax"), shape, matched=scale != "paper")
    return tuple(runs)


def dual_sizes(scale: str) -> tuple[Shape, ...]:
    """The sizes that are compared, by width."""
    base = size(scale, "dual")
    if scale != "paper":
        return base, base.wider(2.0)
    middle = replace(base, dim=1536, hidden=6144, heads=24, kv_heads=6)
    largest = replace(base, dim=2048, hidden=8192, heads=32, kv_heads=8, relations=128)
    return base, middle, replace(largest, symbols=replace(LARGE, count=2048, heads=16))


def swiglu(scale: str = "small") -> tuple[Run, ...]:
    """SwiGLU beside feed-forward layers without a gate, SiLU and ReLU, at equal parameters.

    polyhead reproduce swiglu.  Paper scale is Stanford's CS336: TinyStories in 10,000 byte pairs, 4 layers of width
    512, 16 heads, 256 tokens, 328 M of them.  Small: the standard library's bytes, width 96, 4 layers, 1 MB, three
    seeds.
    """
    shape = size(scale, "parts")
    gated = model("softmax", shape)
    models = {"swiglu": gated}
    for act in ACTS[1:]:
        plain = replace(gated, feedforward=feedforward(act, shape.hidden))
        models[act] = match(plain, parameters(gated), field="hidden", tolerance=CLOSE)
    every = itertools.product(range(shape.seeds), shape.grid(), ACTS)
    return tuple(_run(f"parts-{act}-{seed}", models[act], shape, setting, seed) for seed, setting, act in every)


def norms(scale: str = "small") -> tuple[Run, ...]:
    """Norms before or after what a layer adds, over learning rates.

    polyhead reproduce norms.  The models of `swiglu`, four rates from one to thirty, two seeds; small: 300 updates.
    """
    base = size(scale, "parts")
    shape = replace(base, seeds=2, lrs=RATES[scale], steps=300 if scale == "small" else base.steps)
    models = {order: model("softmax", replace(shape, norm_order=order)) for order in ORDERS}
    every = itertools.product(range(shape.seeds), shape.grid(), ORDERS)
    return tuple(
        _run(f"norms-{order}-{setting.lr:g}-{seed}", models[order], shape, setting, seed)
        for seed, setting, order in every
    )


def single(row: str) -> Callable[[], Run]:
    """The recipe of one language model of bytes."""

    def recipe() -> Run:
        (run,) = _compared("lm", (row,), size("small", "bytes"))
        return replace(run, name=f"lm-{row}")

    recipe.__doc__ = f"""{ROWS[row].label}: a language model of the Python standard library's sources, byte by byte.

    polyhead train lm-{row}.  1275 updates of 8 x 256 bytes; with as many parameters as all of `lm-bytes`.
    """
    return recipe


def _compared(what: str, rows: Sequence[str], shape: Shape, *, matched: bool = True) -> tuple[Run, ...]:
    """Every model with every setting and seed of `shape`."""
    models = {row: model(row, shape, matched=matched) for row in rows}
    every = itertools.product(range(shape.seeds), rows, shape.grid())
    return tuple(_run(f"{what}-{row}-{seed}", models[row], shape, setting, seed) for seed, row, setting in every)


def _run(name: str, settings: TransformerConfig, shape: Shape, setting: Setting, seed: int) -> Run:
    """Scored on held-out text in the course of training and at its end."""
    train = replace(
        scales.training(shape, setting, SPLITS),
        eval_every=max(shape.steps // shape.evaluations, 1),
        precision=shape.precision,
        accumulate=shape.accumulate,
    )
    return Run(name=name, task=shape.task, model=settings, train=train, seed=seed)
