"""Decoding: one token after the other, greedy or sampled, for one sequence or a batch of different lengths.

Sequences of different lengths are padded on the left; each gets the same result as alone.  With the cache a step
computes only its own token.  Logits agree up to rounding and draws are the same, so the tokens are the same as without
the cache.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, SupportsIndex

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from polyhead import config
from polyhead.layers.cache import Cache
from polyhead.layers.taps import looking
from polyhead.models.generate.sampling import SamplingOptions, row_draws
from polyhead.models.transformer import Transformer
from polyhead.spec.shapes import shaped

Prompts = Sequence[Sequence[int]] | Int[Tensor, "b t"]


def generate(
    model: Transformer,
    prompts: Prompts,
    *,
    steps: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Sequence[int] = (),
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> list[list[int]]:
    """The continuation of each prompt: up to `steps` tokens, without the prompt and without the final token of `stop`.

    `temperature`, `top_k`, `top_p`: see `sampling.SamplingOptions`; temperature 0 takes the most likely token.  Row i
    draws from its own random stream, seeded from `generator`: it does not depend on the other rows, on `steps` or on
    the cache.

    >>> model = Transformer(TransformerConfig(Tokens(9), Logits(9), dim=32, heads=Softmax(4), causal=True))
    >>> said = generate(model, [[1, 2, 3], [4]], steps=5, top_k=3, generator=torch.Generator().manual_seed(0))
    >>> [len(tokens) for tokens in said]
    [5, 5]

    Raises ValueError unless the model is causal, reads tokens, and returns logits over the same tokens.  A model with
    an encoder raises it, too: use `greedy`.  So does a prompt that exceeds the model's positions together with `steps`.
    """
    rows: list[list[int]] = []
    for new_tokens in stream(
        model, prompts, steps=steps, temperature=temperature, top_k=top_k, top_p=top_p, stop=stop,
        generator=generator, use_cache=use_cache,
    ):  # fmt: skip
        rows = rows or [[] for _ in new_tokens]
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
    use_cache: bool = True,
) -> Iterator[list[int | None]]:
    """`generate` as a stream: yields per step the token of each row, None after the end of a row.

    Wrong arguments raise ValueError in this call, before the first step.
    """
    check_model("generate", model, steps)
    if model.encoder is not None:
        raise ValueError("generate: the model has an encoder, so it wants a source: use greedy(model, start, source=)")
    stops = stops_of("generate", stop)
    choice = SamplingOptions(float(temperature), top_k, None if top_p is None else float(top_p))
    padded = left_padded(prompts, model)
    check_length("generate", model.config, padded.tokens.shape[1], steps)
    rows, device = len(padded.tokens), padded.tokens.device
    draws = torch.zeros(rows, 1) if temperature == 0 else row_draws(rows, steps, generator)
    draws = draws.to(device, torch.float32 if device.type == "mps" else None).expand(-1, steps)
    loop = _steps(model, padded, steps, lambda logits, n: choice(logits, draws[:, n]), stops, use_cache=use_cache)

    def told() -> Iterator[list[int | None]]:
        for new, ended in loop:
            new_tokens = zip(new.tolist(), ended.tolist(), strict=True)
            yield [None if over or token in stops else token for token, over in new_tokens]

    return told()


@shaped
def greedy(
    model: Transformer,
    start: Int[Tensor, "b t"],
    *,
    source: Tensor | None = None,
    source_mask: Bool[Tensor, "b s"] | None = None,
    steps: int,
    stop: int | None = None,
    use_cache: bool = True,
) -> Int[Tensor, "b _"]:
    """`start` followed by up to `steps` most likely tokens, without dropout or gradients; `source` is the input of an
    encoder.

    A sequence that has reached `stop` is filled with `stop`; when all have, decoding ends.

    >>> model = Transformer(TransformerConfig(Tokens(9), Logits(9), dim=32, heads=Softmax(4), causal=True))
    >>> greedy(model, torch.tensor([[1], [2]]), steps=5).shape
    torch.Size([2, 6])

    Raises ValueError unless the model is causal, reads tokens and returns finite logits over the same tokens.
    """
    check_model("greedy", model, steps)
    check_length("greedy", model.config, start.shape[1], steps)
    with looking(model):
        encoded = None if source is None else model.encode(source, source_mask)
    stops, likeliest = stops_of("greedy", stop), SamplingOptions(temperature=0.0)
    loop = _steps(
        model,
        Padded(start),
        steps,
        lambda logits, _: likeliest(logits, logits[:, 0]),  # no draw decides
        stops,
        encoded=encoded,
        source_mask=source_mask,
        use_cache=use_cache,
    )
    return torch.cat([start, *(new[:, None].to(start.dtype) for new, _ in loop)], dim=1)


def stops_of(caller: str, stop: SupportsIndex | Iterable[SupportsIndex] | None) -> tuple[int, ...]:
    """The tokens that end a sequence, as numbers.  Raises ValueError unless it is a token, tokens or None."""
    stops = () if stop is None else stop if isinstance(stop, Iterable) and getattr(stop, "ndim", True) else (stop,)
    try:
        return tuple(map(operator.index, stops))  # type: ignore[arg-type]  # an array without dimensions is one token
    except TypeError:
        raise ValueError(f"{caller}: stop must be a token or a list of tokens but is {stop!r:.60}") from None


class Padded(NamedTuple):
    """Sequences (b t), padded on the left, with the mask of real tokens and their positions; None without padding."""

    tokens: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None

    def then(self, new: Tensor, *, alone: bool) -> "Padded":
        """The sequences with one more token each, `new` (b 1); `alone`: only that token, as a cache has the others."""
        tokens = new if alone else torch.cat((self.tokens, new), dim=1)
        if self.positions is None:
            return Padded(tokens)
        position = self.positions[:, -1:] + 1
        if alone or self.mask is None:  # the cache holds the padding mask
            return Padded(tokens, None, position)
        mask = torch.cat((self.mask, torch.ones_like(self.mask[:, :1])), dim=1)
        return Padded(tokens, mask, torch.cat((self.positions, position), dim=1))


def left_padded(prompts: Prompts, model: Transformer) -> Padded:
    """`prompts` as one batch on the model's device.

    Raises ValueError without prompts, for an empty prompt, for texts and for tokens outside the vocabulary.
    """
    rows_given = prompts.tolist() if isinstance(prompts, Tensor) else list(prompts)
    if isinstance(prompts, str) or any(isinstance(row, str) or not hasattr(row, "__iter__") for row in rows_given):
        expected = "tokens, as [[1, 2], [3]]; for texts there is models.generate.generate_text"
        raise ValueError(f"generate: prompts must be lists of {expected}, but {prompts!r:.60} came")
    rows: list[list[int]] = [list(row) for row in rows_given]
    if not rows or not all(rows):
        raise ValueError(f"generate: {'an empty prompt' if rows else 'no prompt'} came: each needs at least one token")
    assert isinstance(model.config.inputs, config.Tokens)
    count, longest = model.config.inputs.count, max(map(len, rows))
    for token in (token for row in rows for token in row):
        if not 0 <= token < count:
            raise ValueError(f"generate: tokens must be 0 to {count - 1} but {token} came")
    device = next(model.parameters()).device
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    real = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows], device=device)
    if all(len(row) == longest for row in rows):
        return Padded(tokens)
    return Padded(tokens, real, (real.cumsum(1) - 1).clamp(min=0))


def _steps(
    model: Transformer,
    sequences: Padded,
    steps: int,
    choose: Callable[[Tensor, int], Tensor],
    stops: tuple[int, ...],
    *,
    encoded: Tensor | None = None,
    source_mask: Tensor | None = None,
    use_cache: bool,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens (b,) that `choose` takes from logits (b c), and which rows had ended before.

    A row that has reached one of `stops` is filled with the first of them; when all have, decoding ends.
    """
    cache = Cache(model.config.layers) if use_cache else None
    assert isinstance(model.config.inputs, config.Tokens)
    stops = tuple(stop for stop in stops if 0 <= stop < model.config.inputs.count)  # the others never come
    ended = torch.zeros(len(sequences.tokens), dtype=torch.bool, device=sequences.tokens.device)
    last = torch.tensor(stops, device=ended.device)
    for step in range(steps):
        with looking(model):
            logits = model(
                sequences.tokens, mask=sequences.mask, positions=sequences.positions, source_mask=source_mask, tail=1,
                encoded=encoded, cache=cache,
            )[:, 0]  # fmt: skip
            new = choose(logits, step)
        if stops:
            new = new.masked_fill(ended, stops[0])
        yield new, ended
        if stops:
            ended = torch.isin(new, last)
            if bool(ended.all()):
                return
        sequences = sequences.then(new[:, None].to(sequences.tokens.dtype), alone=use_cache)


def check_model(caller: str, model: Transformer, steps: int) -> None:
    """Raise ValueError unless the model can generate `steps` tokens."""
    ends = (model.config.inputs, model.config.outputs)
    if not (isinstance(ends[0], config.Tokens) and isinstance(ends[1], config.Logits) and model.config.causal):
        raise ValueError(
            f"{caller}: a causal model between Tokens and Logits was wanted but it is between {ends[0]} and {ends[1]}, "
            f"causal={model.config.causal}"
        )
    if ends[0].count < ends[1].count:
        raise ValueError(f"{caller}: the model knows {ends[0].count} tokens but gives logits of {ends[1].count}")
    if steps < 1:
        raise ValueError(f"{caller}: steps must be at least 1 but is {steps}")


def reach(settings: config.TransformerConfig) -> int | None:
    """The most tokens a model can read; None if it has no limit: without positions, with relative bias or ALiBi."""
    ending: tuple[type, ...] = (config.Rotary, config.Learned, config.Sinusoidal)
    heads = [group for layer in range(settings.layers) for group in settings.layer_heads(layer)]
    sources = [group.symbols for group in heads if isinstance(group, config.SymbolHeads)]
    ends = (
        isinstance(settings.positions, ending)
        or hasattr(settings.positions, "vectors")
        or any(
            isinstance(source, config.PositionSymbols)
            or (isinstance(source, config.RelativeSymbols) and source.distance is None)
            for source in sources
        )
    )
    return settings.max_length if ends else None


def check_length(caller: str, settings: config.TransformerConfig, prompt: int, steps: int) -> None:
    """Raise ValueError unless the model can read `prompt` tokens and all generated tokens but the last."""
    context = reach(settings)
    if context is None or prompt + steps - 1 <= context:
        return
    if prompt <= context:
        advice = f"at most {context - prompt + 1} steps"
    else:  # a longer prompt leaves no room for `steps`
        advice = f"a prompt of at most {max(1, context - steps + 1)} tokens"
    raise ValueError(
        f"{caller}: {prompt} tokens and {steps} steps more go beyond the model's context of {context} (max_length): "
        f"give {advice}"
    )
