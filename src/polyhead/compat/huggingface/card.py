"""The README of an exported folder, which the Hub shows as the model card: heads, scores, how to load it."""

import pathlib

from polyhead.compat.huggingface.base import PolyheadPreTrainedModel
from polyhead.compat.huggingface.config import PolyheadConfig
from polyhead.config import TransformerConfig
from polyhead.train.store.folder import Result, read_config, read_result

_PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForSequenceClassification": "text-classification",
}

_CARD = """\
---
library_name: transformers
pipeline_tag: {pipeline}
tags:
- polyhead
---

# {name}

A {kind} with {parameters:,} parameters, trained with polyhead on the task {task}: {layers} of width {dim}.

{heads}
{scores}
## Loading it

polyhead must be installed: `pip install 'polyhead[hf]'`. One import tells transformers its classes.

```python
import polyhead.compat.huggingface
from transformers import {auto}

model = {auto}.from_pretrained("PATH")
```

Without that import, `{auto}.from_pretrained("PATH", trust_remote_code=True)` runs `modeling_polyhead.py` in
this folder, which holds nothing but an import of polyhead.
"""


def card(model: PolyheadPreTrainedModel, run: str | pathlib.Path) -> str:
    """The text of the card for an exported model and its run folder; `PATH` is a placeholder for its location."""
    config = model.config
    assert isinstance(config, PolyheadConfig)
    task, auto = read_config(run).task, _auto(config, type(model).__name__)
    count = config.num_hidden_layers
    return _CARD.format(
        pipeline=_PIPELINES[auto],
        name=read_config(run).name,
        kind=_PIPELINES[auto].replace("-", " ") + " model",
        parameters=model.num_parameters(),
        task=type(task).__name__,
        layers=f"{count} layer{'' if count == 1 else 's'}",
        dim=config.hidden_size,
        heads=_heads(config.settings),
        scores=_scores(read_result(run)),
        auto=auto,
    )


def _auto(config: PolyheadConfig, kind: str) -> str:
    return next(auto for auto, name in config.auto_classes().items() if name == kind)


def _heads(settings: TransformerConfig) -> str:
    """A table of the heads; layers with the same heads share a row."""
    rows: list[tuple[str, int, int]] = []
    for layer in range(settings.layers):
        heads = ", ".join(f"{type(group).__name__}({group.heads})" for group in settings.layer_heads(layer))
        first = rows.pop()[1] if rows and rows[-1][0] == heads else layer
        rows.append((heads, first, layer))
    lines = [f"| {first if first == last else f'{first} to {last}'} | {heads} |" for heads, first, last in rows]
    return "\n".join(("| layers | heads |", "|---|---|", *lines)) + "\n"


def _scores(result: Result | None) -> str:
    """The final scores of the run, by split; empty for an unfinished run."""
    if result is None:
        return ""
    lines = [
        f"| {split} | {name} | {value:.4g} |"
        for split, values in result.scores.items()
        for name, value in values.items()
        if not name.endswith("_se")
    ]
    return "\n".join(
        (f"## Scores after {result.steps:,} steps\n", "| split | metric | value |", "|---|---|---|", *lines, "")
    )
