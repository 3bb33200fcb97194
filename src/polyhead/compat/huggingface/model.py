"""Our transformers as models of Hugging Face's library: `from_pretrained`, `generate`, the `Trainer`, the Hub.

    model = from_run("runs/lm")                         or, untrained, PolyheadForCausalLM(PolyheadConfig(settings))
    to_folder("runs/lm", "exported")                    config.json, model.safetensors, the tokenizer
    AutoModelForCausalLM.from_pretrained("exported")    wherever this file has been imported

The configuration is our `TransformerConfig` as JSON, of which every field is checked; a file runs no code.  Parameters
are called as in ours, after "model.".
"""

import dataclasses
import pathlib
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.spec.optional import optional

with optional("polyhead.compat.huggingface", "polyhead[hf]"):
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification
    from transformers.modeling_outputs import CausalLMOutputWithPast, ImageClassifierOutput

    if int(transformers.__version__.split(".")[0]) < 5:  # which loads and ties in another way
        raise ImportError(f"version 5, not {transformers.__version__}", name="transformers")

from polyhead.compat.huggingface.cache import PolyheadCache
from polyhead.compat.huggingface.config import PolyheadConfig
from polyhead.compat.huggingface.tokens import tokenizer_of
from polyhead.config import Classes, Logits, Patches, Tokens
from polyhead.config.components import narrower
from polyhead.layers.positions import Constant
from polyhead.models.initialise import initialise
from polyhead.models.transformer import Transformer
from polyhead.tasks.text.tokens import codec_of
from polyhead.train.store.checkpoint import load_model
from polyhead.train.store.folder import read_config

UNKNOWN = ("inputs_embeds", "output_attentions", "output_hidden_states", "token_type_ids", "head_mask")
"""What models of the library may be given and ours do not take: it must not be passed over in silence."""


class _Polyhead(transformers.PreTrainedModel):
    """What both models share: `model`, our transformer, and how the library fills, ties, saves and checkpoints it."""

    config_class = PolyheadConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TransformerBlock"]  # noqa: RUF012 (as the library declares it)
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    model: Transformer

    def __init__(self, config: PolyheadConfig) -> None:
        super().__init__(config)
        self.model = Transformer(config.settings)
        self.gradient_checkpointing = config.settings.checkpoint
        self._tied_weights_keys = _twice(self.model)
        for tensor in self.model.state_dict(keep_vars=True).values():
            if not tensor.is_meta:  # filled by our own rules: the library's would fill it again
                tensor._is_hf_initialized = True
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Which names mean one parameter: the tokens' table and the logits', libraries of symbols."""
        return dict(self._tied_weights_keys or {})

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Fill what `from_pretrained`, which builds on the meta device, does not: constants, and what a file lacks."""
        if isinstance(module, Constant):
            module.to(module.value.device)  # makes the value anew
        elif any(module is own for own in self.modules()):
            self._fill()
        elif isinstance(module, nn.Embedding | nn.Linear):  # a table of another size
            settings = self.config.settings
            initialise(module, settings.init)
            if isinstance(module, nn.Linear) or self.config.tie_word_embeddings:  # a map to logits
                module.weight.mul_(narrower(settings.inputs, settings.outputs, settings.dim, settings.init))

    def _fill(self) -> None:
        """Give what is not filled the values of a new model: our rules look at a whole one."""
        missing = {n: p for n, p in self.model.state_dict(keep_vars=True).items() if not _filled(p)}
        fresh = Transformer(self.config.settings).state_dict() if missing else {}
        for name, tensor in missing.items():
            tensor.copy_(fresh[name])
            tensor._is_hf_initialized = True

    def save_pretrained(  # type: ignore[override]  # the rest goes on as it came
        self, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **options: Any
    ) -> None:
        """As in the library.  Libraries of symbols that layers share but that are not trained are written for each."""
        state = dict(self.state_dict() if state_dict is None else state_dict)
        buffers = {id(tensor): name for name, tensor in self.named_buffers()}
        for name, tensor in self.named_buffers(remove_duplicate=False):
            if name in state and buffers[id(tensor)] != name:
                state[name] = state[name].clone()
        super().save_pretrained(save_directory, is_main_process, state_dict=state, **options)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        """`checkpoint` of our configuration: blocks keep their inputs only."""
        if every_n_layers != 1:
            raise ValueError(f"{type(self).__name__}: every block is checkpointed or none, not each {every_n_layers}th")
        self.gradient_checkpointing = enable
        self.model.config = dataclasses.replace(self.model.config, checkpoint=enable)

    def _reject(self, others: dict[str, Any]) -> None:
        given = {name: others.pop(name, None) for name in UNKNOWN}
        strange = [name for name, value in given.items() if value is not None and value is not False]
        if strange:
            raise ValueError(f"{type(self).__name__}: it takes no {strange[0]}; polyhead.analysis.capture looks inside")


def _filled(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_hf_initialized", False)


def _twice(model: nn.Module) -> dict[str, str]:
    """Each further name of a parameter, and its first."""
    first: dict[Tensor, str] = {}
    names = [(f"model.{name}", p) for name, p in model.named_parameters(remove_duplicate=False)]
    return {name: first[p] for name, p in names if first.setdefault(p, name) != name}


class PolyheadForCausalLM(_Polyhead, transformers.GenerationMixin):
    """A causal language model: any heads, with `generate` on our cache.

    >>> settings = TransformerConfig(Tokens(256), Logits(256), dim=32, heads=Hyla(4), causal=True)
    >>> model = PolyheadForCausalLM(PolyheadConfig(settings)).eval()
    >>> model.generate(torch.tensor([[72, 105]]), max_new_tokens=3, do_sample=False).shape
    torch.Size([1, 5])

    Raises ValueError for a model that is not causal between tokens and logits, or that has an encoder.
    """

    def __init__(self, config: PolyheadConfig) -> None:
        settings = config.settings
        tokens = isinstance(settings.inputs, Tokens) and isinstance(settings.outputs, Logits)
        if not (tokens and settings.causal and settings.encoder is None):
            encoder = "with an encoder" if settings.encoder is not None else f"causal={settings.causal}"
            raise ValueError(
                "PolyheadForCausalLM: a causal model between Tokens and Logits, without an encoder, was wanted but it "
                f"is between {settings.inputs} and {settings.outputs}, {encoder}"
            )
        super().__init__(config)

    def _prepare_cache_for_generation(  # type: ignore[override]  # its last arguments differ between versions
        self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any
    ) -> None:
        """Our cache, whatever the library would take by default."""
        if (kind := generation_config.cache_implementation) not in (None, "dynamic"):
            raise ValueError(
                f"PolyheadForCausalLM: its cache is its own, so cache_implementation must be None, not {kind!r}"
            )
        if (given := model_kwargs.get("past_key_values")) is not None:
            given._is_user_defined = True
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = PolyheadCache(len(self.model.blocks))

    def get_input_embeddings(self) -> nn.Module:
        """The table of the tokens."""
        return self.model.inputs.table  # type: ignore[return-value]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Another table; tied logits take it, too."""
        self.model.inputs.table = value
        if self.config.tie_word_embeddings:
            self.model.outputs.table = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The linear map to the logits; None where they are tied to the tokens."""
        return None if self.config.tie_word_embeddings else self.model.outputs.linear  # type: ignore[return-value]

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Another linear map."""
        self.model.outputs.linear = new_embeddings

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **options: Any) -> Any:
        """As in the library: new tokens come last; `config` follows."""
        table = super().resize_token_embeddings(new_num_tokens, *args, **options)
        checkpoint = self.model.config.checkpoint
        self.model.config = dataclasses.replace(self.config.settings, checkpoint=checkpoint)
        return table

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: transformers.Cache | None = None,
        labels: Tensor | None = None,
        *,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """Logits (b t c), and with `labels` (b t; -100: not scored) the mean loss of each next token.

        `attention_mask` (b s), s counting the tokens in `past_key_values`, too, is 0 at padding, on either side.
        `others`: `position_ids` (b|1 t), by default the number of real tokens before each; those of one row (1 t) that
        begin anew, without a mask, are several sequences, which do not see each other.  All else goes to
        `loss_function`.
        """
        self._reject(others)
        if input_ids is None:
            raise ValueError("PolyheadForCausalLM: input_ids (b t) were wanted but none came")
        if use_cache and past_key_values is None:
            past_key_values = PolyheadCache(len(self.model.blocks))
        if past_key_values is not None and not isinstance(past_key_values, PolyheadCache):
            came = type(past_key_values).__name__
            raise ValueError(f"PolyheadForCausalLM: past_key_values must be a PolyheadCache but is a {came}")
        where = self._places(input_ids, attention_mask, others.pop("position_ids", None), past_key_values)
        few = isinstance(logits_to_keep, int) and logits_to_keep > 0
        logits = self.model(
            input_ids,
            **where,
            tail=min(int(logits_to_keep), input_ids.shape[1]) if few else None,
            cache=None if past_key_values is None else past_key_values.memory,
        )
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **others)
            if self.training:
                loss = loss + self.model.auxiliary_loss()
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
        return output.to_tuple() if return_dict is False else output

    def _places(
        self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, cache: PolyheadCache | None
    ) -> dict[str, Tensor | None]:
        """Which tokens are real and where they are; None of both where all are and they count from the first."""
        t, past = tokens.shape[1], 0 if cache is None else cache.get_seq_length()
        if mask is not None and mask.shape != (tokens.shape[0], past + t):
            raise ValueError(
                f"PolyheadForCausalLM: attention_mask must be (b s) = {(tokens.shape[0], past + t)}, the tokens before "
                f"included, but is {tuple(mask.shape)}"
            )
        if mask is not None and not torch.compiler.is_compiling() and bool(mask.all()):
            mask = None  # what hides nothing costs time
        if positions is not None and mask is None and cache is None and (positions.diff() <= 0).any():
            return {"cu_seqlens": _boundaries(positions)}
        if positions is None and mask is not None:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
        return {"mask": None if mask is None else mask[:, past:].bool(), "positions": positions}


def _boundaries(positions: Tensor) -> Tensor:
    """Where each of several sequences in one row begins, and the end."""
    if positions.shape[0] != 1:
        raise ValueError(
            f"PolyheadForCausalLM: sequences one after the other come in one row (1 t), but {positions.shape[0]} came"
        )
    starts = (positions[0].diff() != 1).nonzero()[:, 0] + 1
    ends = starts.new_tensor([positions.shape[1]])
    return torch.cat((torch.zeros_like(ends), starts, ends)).int()


class PolyheadForImageClassification(_Polyhead):
    """A classifier of images: patches, any heads, logits (b classes).

    Raises ValueError for a model that is not between patches and classes.
    """

    main_input_name = "pixel_values"
    input_modalities = "image"

    def __init__(self, config: PolyheadConfig) -> None:
        settings = config.settings
        if not (isinstance(settings.inputs, Patches) and isinstance(settings.outputs, Classes)):
            raise ValueError(
                "PolyheadForImageClassification: a model between Patches and Classes was wanted but it is between "
                f"{settings.inputs} and {settings.outputs}"
            )
        super().__init__(config)

    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        return_dict: bool | None = None,
        **others: Any,
    ) -> ImageClassifierOutput | tuple[Tensor, ...]:
        """Logits (b classes) of images (b channels height width), and with `labels` (b) the loss."""
        self._reject(others)
        if pixel_values is None:
            raise ValueError(
                "PolyheadForImageClassification: pixel_values (b c height width) were wanted but none came"
            )
        logits = self.model(pixel_values)[:, 0]
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **others)
            if self.training:
                loss = loss + self.model.auxiliary_loss()
        output = ImageClassifierOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output


AutoConfig.register(PolyheadConfig.model_type, PolyheadConfig, exist_ok=True)
AutoModelForCausalLM.register(PolyheadConfig, PolyheadForCausalLM, exist_ok=True)
AutoModelForImageClassification.register(PolyheadConfig, PolyheadForImageClassification, exist_ok=True)


def from_run(folder: str | pathlib.Path) -> PolyheadForCausalLM | PolyheadForImageClassification:
    """The trained model of a run folder, in eval mode on the CPU.  ValueError for a run of another kind of model."""
    run, trained = load_model(folder)
    settings = run.transformer
    kind = PolyheadForImageClassification if isinstance(settings.outputs, Classes) else PolyheadForCausalLM
    with torch.random.fork_rng(devices=[]):
        model = kind(PolyheadConfig(settings))
    model.model.load_state_dict(trained.state_dict())
    return model.eval()


def to_folder(run: str | pathlib.Path, path: str | pathlib.Path, **options: Any) -> None:
    """Write the model of a run folder into `path`, for `from_pretrained`, and of a run on text its tokenizer.

    `options` go to `save_pretrained`: `max_shard_size="1GB"`.  Raises ValueError for a tokenizer that the library
    cannot read (see `tokenizer_of`) or that is not the one the model was trained with.
    """
    model, config = from_run(run), read_config(run)
    if hasattr(config.task, "codec"):
        tokenizer = tokenizer_of(codec_of(config, run), max_length=model.config.max_position_embeddings)
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
        tokenizer.save_pretrained(path)
    model.save_pretrained(path, **options)
