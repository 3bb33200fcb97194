"""Greedy decoding: each next token is the likeliest one."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from polyhead import config
from polyhead.layers.cache import Cache
from polyhead.models.transformer import Transformer
from polyhead.shapes import shaped


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
    """`start` and up to `steps` tokens after it, without dropout or gradients; `source` is what an encoder reads.

    A sequence that has said `stop` goes on with `stop`; when all have, decoding ends.  With `use_cache` every step
    computes its own token only: the same tokens as without.

    >>> model = Transformer(TransformerConfig(Tokens(9), Logits(9), dim=32, heads=Softmax(4), causal=True))
    >>> greedy(model, torch.tensor([[1], [2]]), steps=5).shape
    torch.Size([2, 6])

    Raises ValueError unless the model is causal, reads tokens and gives logits of as many.
    """
    _check(model, steps)
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            encoded = None if source is None else model.encode(source, source_mask)
            return _decode(model, start, encoded, source_mask, steps, stop, use_cache=use_cache)
    finally:
        for module, mode in modes.items():
            module.training = mode


def _decode(
    model: Transformer,
    start: Tensor,
    encoded: Tensor | None,
    source_mask: Tensor | None,
    steps: int,
    stop: int | None,
    *,
    use_cache: bool,
) -> Tensor:
    cache = Cache(model.config.layers) if use_cache else None
    ended = torch.zeros(start.shape[0], dtype=torch.bool, device=start.device)
    said, new = start, start
    for _ in range(steps):
        seen = said if cache is None else new
        logits = model(seen, tail=1, encoded=encoded, source_mask=source_mask, cache=cache)
        new = logits.argmax(-1).to(start.dtype)
        if stop is not None:
            new = new.masked_fill(ended[:, None], stop)
            ended = new[:, 0] == stop
        said = torch.cat((said, new), dim=1)
        if stop is not None and ended.all():
            break
    return said


def _check(model: Transformer, steps: int) -> None:
    ends = (model.config.inputs, model.config.outputs)
    if not (isinstance(ends[0], config.Tokens) and isinstance(ends[1], config.Logits) and model.config.causal):
        raise ValueError(
            f"greedy: a causal model between Tokens and Logits was wanted but it is between {ends[0]} and {ends[1]}, "
            f"causal={model.config.causal}"
        )
    if ends[0].count < ends[1].count:
        raise ValueError(f"greedy: the model knows {ends[0].count} tokens but gives logits of {ends[1].count}")
    if steps < 1:
        raise ValueError(f"greedy: steps must be at least 1 but is {steps}")
