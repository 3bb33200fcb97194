"""Decoding: one token after the other, the likeliest or sampled, for a batch of sequences of different lengths.

Sequences of different lengths are padded on the left; each gets the same result as alone.  With the cache a step
computes only its own token.  Logits agree up to rounding and draws are the same, so the tokens are the same as without
the cache.
"""

import numbers
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypedDict, Unpack

import torch
from jaxtyping import Int
from torch import Tensor

from polyhead import config
from polyhead.layers.cache import Cache
from polyhead.layers.taps import looking
from polyhead.models.generate.sampling import SamplingOptions, row_draws
from polyhead.models.transformer import Transformer
from polyhead.spec.shapes import check_count

Prompts = Sequence[Sequence[int]] | Int[Tensor, "b t"]


class Decoding(TypedDict, total=False):
    """How tokens are chosen, see `stream`, where the defaults are."""

    temperature: float
    top_k: int | None
    top_p: float | None
    generator: torch.Generator | None
    source: Tensor | None
    source_mask: Tensor | None
    use_cache: bool


def generate(
    model: Transformer, prompts: Prompts, *, steps: int, stop: int | Sequence[int] = (), **decoding: Unpack[Decoding]
) -> list[list[int]]:
    """The continuation of each prompt: up to `steps` tokens, without the prompt and without the final token of `stop`.

    The other arguments, and the errors, are those of `stream`.

    >>> model = Transformer(TransformerConfig(Tokens(9), Logits(9), dim=32, heads=Softmax(4), causal=True))
    >>> said = generate(model, [[1, 2, 3], [4]], steps=5, top_k=3, generator=torch.Generator().manual_seed(0))
    >>> [len(tokens) for tokens in said]
    [5, 5]
    """
    rows: list[list[int]] = [[] for _ in prompts]
    for new_tokens in stream(model, prompts, steps=steps, stop=stop, **decoding):
        for row, token in zip(rows, new_tokens, strict=True):
            if token is not None:
                row.append(token)
    return rows


def stream(
    model: Transformer,
    prompts: Prompts,
    *,
    steps: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Sequence[int] = (),
    generator: torch.Generator | None = None,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
    use_cache: bool = True,
) -> Iterator[list[int | None]]:
    """`generate` as a stream: yields per step the token of each row, None after the end of a row.

    Row i draws from its own random stream, which does not depend on the other rows, on `steps` or on the cache.

    Args:
        temperature: With 0 the most likely token is taken, see `sampling.SamplingOptions`.
        top_k: How many of the most likely tokens may be chosen; None: no cut.
        top_p: The least probability of the nucleus; None: no cut.
        stop: Tokens that end a row.
        generator: Seeds the random streams of the rows.
        source: The input of an encoder, a row for each prompt.
        source_mask: True at real tokens of the source.

    Raises:
        ValueError: Before the first step, unless the model is causal, reads tokens, and returns logits over the same
            tokens.  Also for an encoder without a source, and if a prompt and `steps` exceed the model's positions.
    """
    check_model(model)
    check_count("generate", "steps", steps)
    if isinstance(stop, (int, numbers.Integral)):  # NumPy's, too
        stop = (int(stop),)
    if isinstance(stop, str):
        raise ValueError(f"generate: stop must be tokens, got {stop!r:.60}; for texts there is generate_text")
    stops = tuple(map(operator.index, stop))
    choice = SamplingOptions(temperature, top_k, top_p)
    padded = left_padded(prompts, model)
    check_length(model.config, padded.tokens.shape[1], steps)
    encoded = None
    if model.encoder is not None and source is None:
        raise ValueError("generate: the model has an encoder, so it wants a source: give source=")
    if source is not None:
        with looking(model):
            encoded = model.encode(source, source_mask)
    draws = torch.zeros(len(padded.tokens), steps)
    if temperature > 0:
        draws = row_draws(len(padded.tokens), steps, generator)
    if padded.tokens.device.type == "mps":  # it has no float64
        draws = draws.float()
    draws = draws.to(padded.tokens.device)
    return _steps(model, padded, choice, draws, stops, encoded, source_mask, use_cache=use_cache)


def _steps(
    model: Transformer,
    sequences: "Padded",
    choice: SamplingOptions,
    draws: Tensor,
    stops: tuple[int, ...],
    encoded: Tensor | None,
    source_mask: Tensor | None,
    *,
    use_cache: bool,
) -> Iterator[list[int | None]]:
    cache = None
    if use_cache:
        cache = Cache(len(model.blocks))
    ended: set[int] = set()
    for step in range(draws.shape[1]):
        with looking(model):
            tokens, mask, positions = sequences
            logits = model(
                tokens, mask=mask, positions=positions, source_mask=source_mask, tail=1, encoded=encoded, cache=cache
            )
            new = choice(logits[:, 0], draws[:, step])
        # A row that has ended goes on in the batch, unseen.
        next_tokens: list[int | None] = new.tolist()
        for row, token in enumerate(next_tokens):
            if token in stops:
                ended.add(row)
            if row in ended:
                next_tokens[row] = None
        yield next_tokens
        if len(ended) == len(next_tokens):
            return
        sequences = sequences.then(new[:, None].to(sequences.tokens.dtype), has_cache=use_cache)


class Padded(NamedTuple):
    """Sequences (b t), padded on the left, with the mask of real tokens and their positions; None without padding."""

    tokens: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None

    def then(self, new: Tensor, *, has_cache: bool) -> "Padded":
        """The sequences with one more token each, `new` (b 1); only that token if a cache has the others."""
        position = None
        if self.positions is not None:
            position = self.positions[:, -1:] + 1
        if has_cache:  # it holds the padding mask, too
            return Padded(new, None, position)
        tokens = torch.cat((self.tokens, new), dim=1)
        if self.positions is None or self.mask is None or position is None:
            return Padded(tokens)
        mask = torch.cat((self.mask, torch.ones_like(self.mask[:, :1])), dim=1)
        return Padded(tokens, mask, torch.cat((self.positions, position), dim=1))


def left_padded(prompts: Prompts, model: Transformer) -> Padded:
    """`prompts` as one batch on the model's device.

    Raises:
        ValueError: Without prompts, for an empty prompt, for texts and for tokens outside the vocabulary.
    """
    assert isinstance(model.config.inputs, config.Tokens)
    count = model.config.inputs.count
    rows: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str) or not isinstance(prompt, Iterable):
            expected = "tokens, as [[1, 2], [3]]; for texts there is models.generate.generate_text"
            raise ValueError(f"generate: prompts must be lists of {expected}, got {prompts!r:.60}")
        try:
            row = list(map(operator.index, prompt))
        except TypeError:
            raise ValueError(f"generate: prompts must be lists of whole numbers, got {prompts!r:.60}") from None
        if not row:
            raise ValueError("generate: each prompt must have at least one token")
        if min(row) < 0 or max(row) >= count:
            strange = max(row) if max(row) >= count else min(row)
            raise ValueError(f"generate: tokens must be 0 to {count - 1}, got {strange}")
        rows.append(row)
    if not rows:
        raise ValueError("generate: there must be at least one prompt")
    longest = max(map(len, rows))
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    real = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, longest - len(row) :] = torch.tensor(row)
        real[i, longest - len(row) :] = True
    device = next(model.parameters()).device
    if real.all():
        return Padded(tokens.to(device))
    # Positions count real tokens only; padding is at 0, which is in range, and is masked.
    positions = (real.cumsum(1) - 1).clamp(min=0)
    return Padded(tokens.to(device), real.to(device), positions.to(device))


def check_model(model: Transformer) -> None:
    """Raise ValueError unless the model can generate tokens."""
    if not isinstance(model, Transformer):
        raise ValueError(f"generate: the model must be a Transformer, got {type(model).__name__}")
    ends = (model.config.inputs, model.config.outputs)
    if not (isinstance(ends[0], config.Tokens) and isinstance(ends[1], config.Logits) and model.config.causal):
        raise ValueError(
            f"generate: the model must be causal between Tokens and Logits, got {ends[0]}, {ends[1]}, "
            f"causal={model.config.causal}"
        )
    if ends[0].count < ends[1].count:
        raise ValueError(f"generate: the model knows {ends[0].count} tokens but gives logits of {ends[1].count}")


def check_length(settings: config.TransformerConfig, prompt: int, steps: int) -> None:
    """Raise ValueError unless the model can read `prompt` tokens and all generated tokens but the last."""
    context = settings.context
    if context is None or prompt + steps - 1 <= context:
        return
    fit = max(0, context - prompt + 1)
    raise ValueError(
        f"generate: the model reads {context} tokens (max_length): after {prompt} tokens at most {fit} steps fit, "
        f"but steps is {steps}"
    )
