"""The README of an exported folder, which the Hub shows as the model card: heads, and how to load it."""

import pathlib

from polyhead.compat.huggingface.base import PolyheadPreTrainedModel
from polyhead.train.store.folder import read_config

PIPELINES = {
    "PolyheadForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "PolyheadForImageClassification": ("AutoModelForImageClassification", "image-classification"),
    "PolyheadForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
}

CARD = """\
---
library_name: transformers
pipeline_tag: {pipeline}
tags:
- polyhead
---

# {name}

A model with {parameters:,} parameters, trained with polyhead on the task {task}.

| layer | heads |
|---|---|
{heads}

polyhead must be installed: `pip install 'polyhead[hf]'`. One import tells transformers its classes.

```python
import polyhead.compat.huggingface
from transformers import {auto}

model = {auto}.from_pretrained("PATH")
```

Without that import, `trust_remote_code=True` runs `modeling_polyhead.py` in this folder, which only imports polyhead.
"""


def card(model: PolyheadPreTrainedModel, run: str | pathlib.Path) -> str:
    """The text of the card for an exported model and its run folder; `PATH` is a placeholder for its location."""
    auto, pipeline = PIPELINES[type(model).__name__]
    config, settings = read_config(run), model.config.settings
    rows = []
    for layer in range(settings.layers):
        heads = ", ".join(f"{type(group).__name__}({group.heads})" for group in settings.layer_heads(layer))
        rows.append(f"| {layer} | {heads} |")
    return CARD.format(
        pipeline=pipeline,
        name=config.name,
        parameters=model.num_parameters(),
        task=type(config.task).__name__,
        heads="\n".join(rows),
        auto=auto,
    )
