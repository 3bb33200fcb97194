"""Our configuration as a configuration of transformers: JSON whose fields are all checked, and which runs no code."""

from typing import Any, ClassVar

import transformers

from polyhead import config as configs
from polyhead.config import Logits, TransformerConfig

WHERE = "PolyheadConfig: transformer"
SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    "tie_word_embeddings",
)
"""What transformers reads from a configuration, and `transformer` decides."""


class PolyheadConfig(transformers.PretrainedConfig):
    """A `TransformerConfig` for transformers: `transformer` holds its JSON, `settings` is the dataclass.

    >>> config = PolyheadConfig(TransformerConfig(Tokens(256), Logits(256), heads=Hyla(4), causal=True))
    >>> config.vocab_size, config.transformer["heads"][0]["kind"], config.settings.heads[0].act
    (256, 'Hyla', 'relu')

    Raises ValueError for an unknown field or kind, for a size that contradicts it, and without `transformer`.
    """

    model_type = "polyhead"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    def __init__(self, transformer: Any = None, **others: Any) -> None:
        if transformer is None:
            raise ValueError("PolyheadConfig: `transformer` must be the JSON of a TransformerConfig, got none")
        if not isinstance(transformer, TransformerConfig):
            transformer = configs.from_dict({"kind": "TransformerConfig", **transformer}, where=WHERE)
        self.transformer = configs.to_dict(transformer)
        others = {**self._sizes(), **others}  # a file repeats the sizes
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # the library reads these attributes
            others.setdefault(name, None)
        super().__init__(**others)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse another size than that of `transformer`, which would be ignored and saved."""
        if name in SIZES and "transformer" in vars(self):
            expected = self._sizes()[name]
            if value != expected:
                raise ValueError(f"PolyheadConfig: {name} must be {expected!r} as in its `transformer`, got {value!r}")
        super().__setattr__(name, value)

    def _sizes(self) -> dict[str, Any]:
        settings = self.settings
        num_heads = sum(group.heads for group in settings.layer_heads(0))
        is_tied = getattr(settings.outputs, "tied", False)
        num_tokens = getattr(settings.inputs, "count", 0)
        values = (num_tokens, settings.dim, settings.layers, num_heads, settings.max_length, is_tied)
        return dict(zip(SIZES, values, strict=True))

    @property
    def settings(self) -> TransformerConfig:
        """The transformer's configuration."""
        return configs.from_dict(self.transformer, where=WHERE)

    @property
    def logit_scale(self) -> float | None:
        """The factor of the logits after the output map."""
        outputs = self.settings.outputs
        if isinstance(outputs, Logits) and outputs.tied and outputs.scaled:
            return float(self.hidden_size) ** -0.5
        return None
