"""Our configuration as a configuration of transformers: JSON whose fields are all checked, and which runs no code."""

from typing import Any, ClassVar

import transformers

from polyhead import config as configs
from polyhead.config import Logits, TransformerConfig

WHERE = "PolyheadConfig: transformer"


class PolyheadConfig(transformers.PretrainedConfig):
    """A `TransformerConfig` for transformers: `transformer` holds its JSON, `settings` is the dataclass.

    >>> config = PolyheadConfig(TransformerConfig(Tokens(256), Logits(256), heads=Hyla(4), causal=True))
    >>> config.vocab_size, config.transformer["heads"][0]["kind"], config.settings.heads[0].act
    (256, 'Hyla', 'relu')

    The sizes that transformers reads, such as `vocab_size`, are those of `transformer`, whatever else a file says.
    Raises ValueError for an unknown field or kind, and without `transformer`.
    """

    model_type = "polyhead"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    def __init__(self, transformer: Any = None, **others: Any) -> None:
        if not isinstance(transformer, TransformerConfig):
            transformer = configs.from_dict(transformer, where=WHERE)
        self.transformer = configs.to_dict(transformer)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # the library reads these attributes
            others.setdefault(name, None)
        others |= {
            "vocab_size": getattr(transformer.inputs, "count", 0),
            "hidden_size": transformer.dim,
            "num_hidden_layers": transformer.layers,
            "num_attention_heads": sum(group.heads for group in transformer.layer_heads(0)),
            "max_position_embeddings": transformer.max_length,
            "tie_word_embeddings": getattr(transformer.outputs, "tied", False),
        }
        super().__init__(**others)

    @property
    def settings(self) -> TransformerConfig:
        """The transformer's configuration."""
        return configs.from_dict(self.transformer, where=WHERE)

    @property
    def logit_scale(self) -> float | None:
        """The factor of the logits after the output map."""
        settings = self.settings
        if isinstance(settings.outputs, Logits) and settings.outputs.tied and settings.outputs.scaled:
            return float(settings.dim) ** -0.5
        return None
