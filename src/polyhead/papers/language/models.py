"""The language models: one per kind of heads, all with as many parameters as softmax heads."""

import functools
from dataclasses import dataclass, replace

from polyhead import config
from polyhead.config import Mechanism, Mlp, Softmax, Swiglu, SymbolicAttention, TransformerConfig
from polyhead.models.size import match, parameters
from polyhead.papers.dual.models import CLOSE
from polyhead.papers.sizes import Scale
from polyhead.papers.study import ModelRow, Paper
from polyhead.spec.shapes import one_of
from polyhead.tasks import Text

# Name -> model.
ROWS: dict[str, ModelRow] = {
    "softmax": ModelRow("Softmax"),
    "linear": ModelRow("Linear"),
    "hyla": ModelRow("HYLA"),
    "dual": ModelRow(
        "Dual attention", choice="half of the heads are softmax, half relational, which read symbols from a library"
    ),
    "disentangled": ModelRow("Softmax + disentangled", choice="half of the heads each, symbols from a library"),
    "abstractor-heads": ModelRow("Softmax + Abstractor heads", choice="half of the heads each, symbols from a library"),
    "mixture": ModelRow(
        "Softmax + HYLA + relational", choice="half of the heads are softmax, a quarter each of the others"
    ),
}

LANGUAGE = Paper("language models", ROWS)
label = LANGUAGE.label

COUNTS = {"bytes": 256, "hub:openai-community/gpt2": 50_257}


@dataclass(frozen=True, kw_only=True)
class LanguageScale(Scale):
    """A language model, its text and its training."""

    data: str = "stdlib"
    tokenizer: str = "bytes"
    length: int = 256
    limit: int | None = None
    held_out: float = 0.05
    norm: str = "rms"
    tied: bool = False
    init: str = "cs336"
    kv_heads: int | None = None
    """For each half of the dual model."""
    relations: int | None = None
    symbols: SymbolicAttention = SymbolicAttention(trainable=False)  # noqa: RUF009 (frozen)
    evaluations: int = 10
    precision: str = "fp32"
    accumulate: int = 1
    """The number of parts of a batch for gradient accumulation."""

    @property
    def task(self) -> Text:
        return Text(self.data, self.length, self.tokenizer, self.held_out, self.limit)

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary, without reading the text."""
        kind, _, count = self.tokenizer.partition(":")
        if kind == "bpe":
            return int(count)
        return COUNTS[self.tokenizer]


# The scale `smoke` of bytes.
SMOKE = LanguageScale(
    dim=16, hidden=32, layers=2, heads=4, head_dim=4, positions=config.Rotary(), length=16,
    symbols=SymbolicAttention(count=4, trainable=False), steps=4, batch_size=4, clip=1.0,
    lrs=(1e-3,), decays=(0.1,), warmups=(1,), seeds=2, eval_batches=2,
)  # fmt: skip

# The scale `smoke` of BPE tokens.
SMOKE_PAIRS = replace(SMOKE, act="gelu_tanh", tokenizer="bpe:300")


def heads_by_row(shape: LanguageScale) -> dict[str, tuple[Mechanism, ...]]:
    """The heads of every model; all have the same width."""
    count, width, symbols = shape.heads, shape.head_dim, shape.symbols
    half, quarter = count // 2, count // 4
    softmax = Softmax(half, width, width)
    relational = config.Relational(half, width, width, symbols=symbols, relations=shape.relations)
    return {
        "softmax": (Softmax(count, width, width),),
        "linear": (config.Linear(count, width, width),),
        "hyla": (config.Hyla(count, width, width),),
        "dual": (replace(softmax, kv_heads=shape.kv_heads), replace(relational, kv_heads=shape.kv_heads)),
        "disentangled": (softmax, config.Disentangled(half, width, width, symbols=symbols)),
        "abstractor-heads": (softmax, config.Abstractor(half, width, width, symbols=symbols)),
        "mixture": (softmax, config.Hyla(quarter, width, width), replace(relational, heads=quarter)),
    }


@functools.cache
def model(row: str, shape: LanguageScale, *, matched: bool = True) -> TransformerConfig:
    """The model `row`; `matched`: its feed-forward width gives it the parameter count of softmax heads."""
    heads = heads_by_row(shape)
    feedforward = Swiglu(shape.hidden) if shape.act == "swiglu" else Mlp(shape.hidden, shape.act, bias=False)
    settings = TransformerConfig(
        inputs=config.Tokens(shape.vocabulary),
        outputs=config.Logits(shape.vocabulary, tied=shape.tied, scaled=shape.tied),
        dim=shape.dim,
        layers=shape.layers,
        heads=heads[one_of("recipes", "model", row, heads)],
        feedforward=feedforward,
        positions=shape.positions,
        max_length=shape.length,
        causal=True,
        norm=shape.norm,
        init=shape.init,
    )
    if row == "softmax" or not matched:
        return settings
    return match(settings, parameters(model("softmax", shape)), field="hidden", tolerance=CLOSE)
