"""The base of our models in transformers: initialisation, tied parameters, saving, and outputs of a forward pass."""

import dataclasses
import os
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from polyhead.compat.huggingface.cache import PolyheadCache, own
from polyhead.compat.huggingface.config import PolyheadConfig
from polyhead.config import Logits, Tokens, TransformerConfig
from polyhead.config.components import narrower
from polyhead.layers.positions import Constant, places_in
from polyhead.layers.taps import Taps
from polyhead.models.initialise import initialise
from polyhead.models.inputs_outputs import TiedOutput, TokenInput
from polyhead.models.transformer import Transformer

Options = dict[str, Any]
"""Further keyword arguments of a forward pass, from the library or its users."""

UNKNOWN = ("token_type_ids", "head_mask", "encoder_hidden_states")
"""Arguments of the library's models that ours do not support; they are refused, never ignored."""


class PolyheadPreTrainedModel(transformers.PreTrainedModel):
    """`model`, our transformer, and how the library initialises, ties, saves and checkpoints it.

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
        super().__init__(config)
        self.model = Transformer(config.settings, outputs=outputs)
        if not outputs:
            self._keys_to_ignore_on_load_unexpected = [r"^model\.outputs\."]
        self.gradient_checkpointing = config.settings.checkpoint
        self._tied_weights_keys = _twice(self.model)
        for tensor in self.model.state_dict(keep_vars=True).values():
            if not tensor.is_meta:  # already initialised by our own rules
                tensor._is_hf_initialized = True

    @classmethod
    def register_for_auto_class(cls, auto_class: object = "AutoModel") -> None:
        """Does nothing: a saved folder finds this class through its shim and needs no copy of the source."""

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Names of tied parameters: the tables of tokens and logits, libraries of symbols."""
        return dict(self._tied_weights_keys or {})

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the constants, and the parameters missing in a file, which `from_pretrained` leaves on the meta
        device."""
        settings = self.config.settings
        if isinstance(module, Constant):
            module.to(module.value.device)  # recomputes the value
        elif any(module is own for own in self.model.modules()) or module is self:
            self._fill()
        elif isinstance(module, nn.Embedding | nn.Linear):  # a table of another size
            initialise(module, settings.init)
            if isinstance(module, nn.Linear) or self.config.tie_word_embeddings:  # a map to logits
                module.weight.mul_(narrower(settings.inputs, settings.outputs, settings.dim, settings.init))

    def _fill(self) -> None:
        """Copy missing parameters from a newly initialised model, because our rules need a whole model."""
        missing = {n: p for n, p in self.model.state_dict(keep_vars=True).items() if not _filled(p)}
        fresh = Transformer(self.config.settings).state_dict() if missing else {}
        for name, tensor in missing.items():
            tensor.copy_(fresh[name])
            tensor._is_hf_initialized = True

    def save_pretrained(  # type: ignore[override]  # other arguments are passed on
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **options: Any,
    ) -> None:
        """As in the library.  A shared, untrained library of symbols is written once per layer."""
        state = dict(self.state_dict() if state_dict is None else state_dict)
        buffers = {id(tensor): name for name, tensor in self.named_buffers()}
        for name, tensor in self.named_buffers(remove_duplicate=False):
            if name in state and buffers[id(tensor)] != name:
                state[name] = state[name].clone()
        super().save_pretrained(save_directory, is_main_process, state_dict=state, **options)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: object = None, every_n_layers: int = 1
    ) -> None:
        """Set `checkpoint` of our configuration: activation checkpointing of the blocks."""
        if every_n_layers != 1:
            raise ValueError(f"{type(self).__name__}: every block is checkpointed or none, not each {every_n_layers}th")
        self.gradient_checkpointing = enable
        self.model.config = dataclasses.replace(self.model.config, checkpoint=enable)

    # ---------------------------------------------------------------------------------------------------- embeddings
    def get_input_embeddings(self) -> nn.Module:
        """The token table or, for images, the map of patches."""
        inputs = self.model.inputs
        return inputs.table if isinstance(inputs, TokenInput) else inputs.linear

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the table; tied logits use it, too."""
        self.model.inputs.add_module("table", value)
        if isinstance(self.model.outputs, TiedOutput):
            self.model.outputs.tie()

    def get_output_embeddings(self) -> nn.Module | None:
        """The output map with `weight` and `bias`, or None; its logits are multiplied by `config.logit_scale`."""
        outputs = self.model.outputs
        if isinstance(outputs, TiedOutput):
            return outputs
        return getattr(outputs, "linear", None) if isinstance(self.config.settings.outputs, Logits) else None

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output map; tied logits follow the token table instead."""
        if not isinstance(self.model.outputs, TiedOutput):
            self.model.outputs.linear = new_embeddings

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As in the library: new tokens are appended, and `config` is updated."""
        table = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        checkpoint = self.model.config.checkpoint
        self.model.config = dataclasses.replace(self.config.settings, checkpoint=checkpoint)
        return table

    # -------------------------------------------------------------------------------------------------------- forward
    def _look(self, others: Options) -> "_Looks":
        """Take the options of requested outputs from `others`.  Raises ValueError for unknown options."""
        if strange := [name for name in UNKNOWN if others.pop(name, None) is not None]:
            raise ValueError(f"{type(self).__name__}: it takes no {strange[0]}")
        wanted = {}
        for name in ("output_hidden_states", "output_attentions"):
            asked = others.pop(name, None)
            wanted[name] = getattr(self.config, name, False) if asked is None else asked is not False
        return _Looks([] if wanted["output_hidden_states"] else None, [] if wanted["output_attentions"] else None)

    def _read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        past_key_values: transformers.Cache | None,
        inputs_embeds: Tensor | None,
        *,
        looks: "_Looks",
        others: Options,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        tail: int | None = None,
        lazy: bool = False,
    ) -> tuple[Tensor, PolyheadCache | None]:
        """Our transformer's output for tokens or embeddings, and its cache.

        `lazy`: return the stream after the last norm in place of the outputs; no logits are computed.
        """
        who = type(self).__name__
        if (input_ids is None) == (inputs_embeds is None):
            came = "none" if input_ids is None else "both"
            raise ValueError(f"{who}: input_ids (b t) or inputs_embeds (b t m) were wanted but {came} came")
        if use_cache and past_key_values is None:
            past_key_values = PolyheadCache(len(self.model.blocks))
        past_key_values = own(who, past_key_values)
        if others.get("cu_seq_lens_q") is not None and position_ids is None:
            raise ValueError(f"{who}: position_ids that restart in each sequence were wanted, not only cu_seq_lens_q")
        inputs = inputs_embeds if input_ids is None else input_ids
        assert inputs is not None
        where = self._places(inputs, attention_mask, position_ids, past_key_values)
        few = tail is not None and looks.stream is None  # the requested stream must be complete
        stream = [] if lazy and looks.stream is None else looks.stream
        cache = None if past_key_values is None else past_key_values.memory
        answer = self.model(
            inputs,
            **where,
            tail=min(int(tail or 0), inputs.shape[1]) if few else None,
            cache=cache,
            taps=looks.taps,
            stream=stream,
            lazy=lazy,
        )
        if lazy and stream is not None:
            return stream[-1], past_key_values
        return answer if few or tail is None else answer[:, -tail:], past_key_values

    def _images(self, pixel_values: Tensor | None, looks: "_Looks") -> Tensor:
        """Our transformer's output for images."""
        if pixel_values is None:
            raise ValueError(f"{type(self).__name__}: pixel_values (b c height width) were wanted but none came")
        if pixel_values.is_floating_point():
            pixel_values = pixel_values.to(self.dtype)  # image processors return float32
        return self.model(pixel_values, taps=looks.taps, stream=looks.stream)

    def _places(
        self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, cache: PolyheadCache | None
    ) -> dict[str, Tensor | None]:
        """The mask of real tokens and their positions; None for both if all are real and positions are 0, 1, ..."""
        (b, t), past = tokens.shape[:2], 0 if cache is None else cache.get_seq_length()
        if mask is not None and mask.shape != (b, past + t):
            raise ValueError(
                f"{type(self).__name__}: attention_mask must be (b s) = {(b, past + t)}, the tokens before included, "
                f"but is {tuple(mask.shape)}"
            )
        if positions is not None and tuple(positions.shape) not in ((b, t), (1, t)):
            wanted = f"position_ids must be (b|1 t) = {(b, t)}"
            raise ValueError(f"{type(self).__name__}: {wanted} but is {tuple(positions.shape)}")
        if mask is not None and not torch.compiler.is_compiling():
            mask = self._padding(mask, past, cache)
        if positions is not None and mask is None:
            kept = cache is not None and "positions" in cache.memory[0]
            if not kept and (positions == torch.arange(past, past + t, device=positions.device)).all():
                positions = None  # the model counts these itself
            elif (positions.diff() <= 0).any():
                if cache is not None:
                    raise ValueError(f"{type(self).__name__}: sequences one after the other must come without a cache")
                return {"cu_seqlens": self._boundaries(positions)}
        if positions is not None and mask is not None and not torch.compiler.is_compiling():
            self._check_order(positions, mask[:, past:].bool())
        if positions is None and mask is not None:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
        return {"mask": None if mask is None else mask[:, past:].bool(), "positions": positions}

    def _padding(self, mask: Tensor, past: int, cache: PolyheadCache | None) -> Tensor | None:
        """The mask, or None if all tokens are real.  Raises ValueError for other numbers than 0 and 1, and for a mask
        that contradicts the earlier one of tokens in the cache."""
        who, real = type(self).__name__, mask.bool()
        if mask.dtype != torch.bool and (strange := mask[mask != real]).numel():
            raise ValueError(f"{who}: attention_mask must be 1 at tokens and 0 at padding but has {strange[0].item()}")
        if cache is not None and past:
            layer = cache.memory[0]
            before, held = real[:, layer.gone : past], layer.real
            if not (before.all() if held is None else torch.equal(before, held[:, : before.shape[1]])):
                raise ValueError(f"{who}: attention_mask must be as before at the {past} tokens in the cache")
        return None if bool(real.all()) else real  # a mask of True only costs time

    def _check_order(self, positions: Tensor, real: Tensor) -> None:
        """Raise ValueError for packed sequences beside padding: the positions of real tokens do not increase."""
        before = torch.where(real, positions, -1).cummax(-1).values[:, :-1]
        if (real[:, 1:] & (positions[:, 1:] <= before)).any():
            raise ValueError(f"{type(self).__name__}: sequences one after the other must come without padding")

    def _boundaries(self, positions: Tensor) -> Tensor:
        """The edges (`cu_seqlens`) of several sequences packed in one row."""
        if positions.shape[0] != 1:
            who, rows = type(self).__name__, positions.shape[0]
            raise ValueError(f"{who}: sequences one after the other come in one row (1 t), but {rows} came")
        starts = (positions[0].diff() <= 0).nonzero()[:, 0] + 1
        ends = starts.new_tensor([positions.shape[1]])
        edges = torch.cat((torch.zeros_like(ends), starts, ends)).int()
        if (places_in(edges, positions.shape[1]) != positions).any():
            raise ValueError(
                f"{type(self).__name__}: position_ids must count from 0 in each of the sequences in a row but are "
                f"{positions[0].tolist()}"
            )
        return edges

    def _loss(
        self, labels: Tensor | None, share: Tensor | float = 1.0, compared: Tensor | None = None, **given: object
    ) -> Tensor | None:
        """The loss by `loss_function`, plus `share` of the load-balance loss of mixtures of experts in training.

        `compared`: the labels of the logits, if not all of `labels`; the loss is 0 if none of them is scored.
        """
        if labels is None:
            return None
        loss: Tensor = self.loss_function(labels=labels, **given)
        if not labels.is_floating_point():  # a mean over no label is 0 / 0: a micro-batch without labels adds nothing
            loss = torch.where(((labels if compared is None else compared) != -100).any(), loss, 0.0)
        return loss + share * self.model.auxiliary_loss() if self.training else loss


@dataclasses.dataclass
class _Looks:
    """The optional outputs that a forward pass collects."""

    stream: list[Tensor] | None
    taps: list[Taps] | None

    @property
    def states(self) -> tuple[Tensor, ...] | None:
        """The stream before each block, and the final, normalised one."""
        return None if self.stream is None else tuple(self.stream)

    @property
    def codes(self) -> tuple[Tensor, ...] | None:
        """Each layer's latent code of all pairs (b h t s), all groups concatenated."""
        return None if self.taps is None else tuple(_code(layer) for layer in self.taps)


def _code(taps: Taps) -> Tensor:
    codes = [group.code() for group in taps.groups]
    return codes[0] if len(codes) == 1 else torch.cat(codes, dim=1)


def reads_tokens(settings: TransformerConfig) -> bool:
    """Whether a model reads tokens and has no encoder."""
    return isinstance(settings.inputs, Tokens) and settings.encoder is None


def reads(settings: TransformerConfig) -> str:
    """The inputs of a model, as the end of an error message."""
    return f"it reads {settings.inputs}{'' if settings.encoder is None else ', with an encoder'}"


def _filled(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_hf_initialized", False)


def _twice(model: nn.Module) -> dict[str, str]:
    """Further names of a parameter -> its first name."""
    first: dict[Tensor, str] = {}
    names = [(f"model.{name}", p) for name, p in model.named_parameters(remove_duplicate=False)]
    return {name: first[p] for name, p in names if first.setdefault(p, name) != name}
