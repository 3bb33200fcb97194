"""The base of our models in transformers: tied parameters, saving, and the common part of `forward`."""

import dataclasses
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from polyhead.compat.huggingface.cache import PolyheadCache
from polyhead.compat.huggingface.config import PolyheadConfig
from polyhead.compat.huggingface.inputs import place_tokens
from polyhead.config import Tokens
from polyhead.layers.positions import Constant
from polyhead.models.inputs_outputs import TiedOutput
from polyhead.models.transformer import Transformer

_NEW_NAME = "cache" in BaseModelOutputWithPast.__dataclass_fields__
CACHE_NAME = "cache" if _NEW_NAME else "past_key_values"
"""The name of the cache among arguments and outputs of transformers' models: it changed in version 5.24."""


class PolyheadPreTrainedModel(transformers.PreTrainedModel):
    """`model`, our transformer, and how the library loads, ties, saves and checkpoints it.

    In every class, parameters have our names after "model."; so each class reads what another has saved.
    """

    config_class = PolyheadConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TransformerBlock"]  # noqa: RUF012 (as the library declares it)
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    config: PolyheadConfig
    model: Transformer

    def __init__(self, config: PolyheadConfig, *, outputs: bool = True) -> None:
        settings = config.settings
        if not isinstance(settings.inputs, Tokens) or settings.encoder is not None:
            name = type(self).__name__
            raise ValueError(f"{name}: the model must read Tokens, without an encoder, got {settings.inputs}")
        super().__init__(config)
        self.model = Transformer(settings, outputs=outputs)
        # A backbone reads the file of a whole model, and does not miss its outputs.
        if not outputs:
            self._keys_to_ignore_on_load_unexpected = [r"^model\.outputs\."]
        self.gradient_checkpointing = settings.checkpoint
        # Further names of a parameter -> its first name: the table of tokens and logits, or what a user's layers share.
        self._tied_weights_keys = {}
        first_names: dict[Tensor, str] = {}
        for name, parameter in self.model.named_parameters(prefix="model", remove_duplicate=False):
            if first_names.setdefault(parameter, name) != name:
                self._tied_weights_keys[name] = first_names[parameter]
        for tensor in self.model.state_dict(keep_vars=True).values():
            if not tensor.is_meta:  # already initialised by our own rules
                tensor._is_hf_initialized = True

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Further names of tied parameters -> their first names."""
        return dict(self._tied_weights_keys or {})

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Compute constants again, which `from_pretrained` leaves empty.

        Raises ValueError for parameters that no file has filled.
        """
        if isinstance(module, Constant):
            module.to(module.value.device)  # recomputes the value
        for name, parameter in module.named_parameters(recurse=False):
            is_on_disk = parameter.is_meta
            if not is_on_disk and not getattr(parameter, "_is_hf_initialized", False):
                raise ValueError(f"{type(self).__name__}: the file must have {name} of each {type(module).__name__}")

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: object = None, every_n_layers: int = 1
    ) -> None:
        """Set `checkpoint` of our configuration: activation checkpointing of all blocks."""
        if every_n_layers != 1:
            raise ValueError(f"{type(self).__name__}: every_n_layers must be 1 but is {every_n_layers}")
        self.gradient_checkpointing = enable
        self.model.config = dataclasses.replace(self.model.config, checkpoint=enable)

    # ---------------------------------------------------------------------------------------------------- embeddings
    def get_input_embeddings(self) -> nn.Module:
        """The token table."""
        return self.model.inputs.table  # type: ignore[return-value]

    def get_output_embeddings(self) -> nn.Module | None:
        """The output map with `weight` and `bias`, or None; its logits are multiplied by `config.logit_scale`."""
        outputs = self.model.outputs
        return outputs if isinstance(outputs, TiedOutput) else getattr(outputs, "linear", None)

    # -------------------------------------------------------------------------------------------------------- forward
    def _requested(self, options: dict[str, Any], known: tuple[str, ...]) -> list[list[Any] | None]:
        """Take `output_hidden_states` and `output_attentions` out of `options`: lists to fill, None if not requested.

        What an option does not say, the configuration does.  Raises ValueError for an argument that no part of the
        model reads, unless it is None or False.
        """
        lists: list[list[Any] | None] = []
        for name in ("output_hidden_states", "output_attentions"):
            requested = options.pop(name, None)
            if requested is None:
                requested = getattr(self.config, name, False)
            lists.append([] if requested else None)
        for name, value in options.items():
            if name not in known and value is not None and value is not False:
                raise ValueError(f"{type(self).__name__}: it takes no argument {name}")
        return lists

    def _read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        caches: tuple[object, object],
        inputs_embeds: Tensor | None,
        position_ids: Tensor | None,
        use_cache: bool | None,
        options: dict[str, Any],
        known: tuple[str, ...],
        *,
        tail: int | None = None,
        lazy: bool = False,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Our transformer's output for tokens or embeddings, and further fields of transformers' outputs: the cache,
        the stream before each block and the final one, and the latent codes of all pairs (b h t s).

        `caches`: what came as `cache` and as `past_key_values`.  `options` may have no names but the `known`.
        `tail`: only the last positions.  `lazy`: the stream after the last norm in place of the outputs.
        """
        name = type(self).__name__
        states, taps = self._requested(options, known)
        inputs = inputs_embeds if input_ids is None else input_ids
        if inputs is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError(f"{name}: give input_ids (b t) or inputs_embeds (b t m)")
        cache = select_cache(name, *caches)
        if use_cache and cache is None:
            cache = PolyheadCache(len(self.model.blocks))
        placement = place_tokens(name, inputs, attention_mask, position_ids, cache)
        # A requested stream must be complete, and so must packed sequences: then the tail is cut out afterwards.
        model_tail = None
        if tail is not None and states is None and placement.cu_seqlens is None:
            model_tail = min(tail, inputs.shape[1])
        stream = [] if lazy and states is None else states
        result = self.model(
            inputs,
            mask=placement.mask,
            positions=placement.positions,
            cu_seqlens=placement.cu_seqlens,
            tail=model_tail,
            cache=None if cache is None else cache.memory,
            taps=taps,
            stream=stream,
            lazy=lazy,
        )
        if lazy and stream is not None:
            result = stream[-1]
        if tail is not None:
            result = result[:, -tail:]
        fields: dict[str, Any] = {CACHE_NAME: cache}
        if states is not None:
            fields["hidden_states"] = tuple(states)
        if taps is not None:
            codes = []
            for layer in taps:
                codes.append(torch.cat([group.code() for group in layer.groups], dim=1))
            fields["attentions"] = tuple(codes)
        return result, fields


def select_cache(model: str, cache: object, past_key_values: object) -> PolyheadCache | None:
    """The cache, under its name of today or of before.  Raises ValueError for a cache of another kind."""
    if cache is not None and past_key_values is not None:
        raise ValueError(f"{model}: cache and past_key_values are the same argument, but both came")
    if cache is None:
        cache = past_key_values
    if cache is not None and not isinstance(cache, PolyheadCache):
        raise ValueError(f"{model}: the cache must be a PolyheadCache but is a {type(cache).__name__}")
    return cache
