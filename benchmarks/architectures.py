"""Which architectures of transformers take our heads, and what then works: each is made tiny, at random, and run.

    python benchmarks/architectures.py                      all: benchmarks/architectures.json, the table in the docs
    python benchmarks/architectures.py llama bloom          some: printed, nothing written

An architecture is refused if the first forward pass under `attn_implementation="polyhead_hyla"` is an error of ours,
one line with its name.  Else each column is a check of the model that has these heads in every layer:

    names         verify: every attention layer that is called is ours
    in layers     with_heads and swap_heads: a layer of HYLA heads, and the same model again from its configuration
    causal        another last token changes no logit before it by more than 1e-5 (of decoders; of others it must)
    gradients     of every attention weight that softmax attention gives one, not 0
    cache         generate with a cache and without: the same tokens
    padding       a sequence behind padding on the left: the logits it has alone
    bf16          a training step under autocast: logits are off those in float32 by at most twice what they are when
                  every result in float32 is rounded to bf16 (softmax heads of ours, and HYLA)
"""

import argparse
import copy
import inspect
import json
import pathlib
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import polyhead as ph
from polyhead.compat import huggingface as hf

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from doors import TIMES, Rounding, off  # noqa: E402

FILE, PAGE = ROOT / "benchmarks" / "architectures.json", ROOT / "docs" / "heads_elsewhere.md"
MARKS = ("<!-- architectures -->", "<!-- /architectures -->")
NAME = "polyhead_hyla"
COLUMNS = ("names", "in layers", "causal", "gradients", "cache", "padding", "bf16")

TINY = {
    32: ("hidden_size", "n_embd", "d_model", "embed_dim", "dim", "embedding_size", "word_embed_proj_dim"),
    2: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "num_key_value_heads"),
    48: ("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim", "d_inner"),
    64: ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
    8: ("head_dim", "d_kv", "d_head", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    50: ("vocab_size",),
    16: ("image_size", "moe_intermediate_size"),
    0: ("pad_token_id", "hidden_dropout", "attention_dropout"),
    1: ("bos_token_id", "decoder_start_token_id", "n_group", "topk_group", "first_k_dense_replace"),
}
OTHERS = {
    "num_decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "rotary_dim": 4,
    "patch_size": 8,
    "num_channels": 3,
    "attention_window": 4,
    "window_size": 4,
    "eos_token_id": 2,
    "attention_types": [[["global", "local"], 1]],
    "num_experts": 4,
    "num_local_experts": 4,
    "v_head_dim": 8,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
}
SIZES = {**{name: size for size, names in TINY.items() for name in names}, **OTHERS}
CAUSAL = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("olmo2", "granite", "smollm3", "starcoder2", "cohere", "cohere2", "phi", "phi3", "stablelm", "gpt2"),
    *("gpt_neox", "gpt_bigcode", "opt", "biogpt", "nemotron", "glm", "glm4", "helium", "ernie4_5", "gpt_oss"),
    *("deepseek_v3", "bloom", "codegen", "xglm", "falcon", "mpt", "gptj", "gpt_neo", "xlnet", "mamba"),
)
MASKED = ("bert", "roberta", "distilbert", "electra", "modernbert", "albert", "deberta", "deberta-v2", "longformer")
BOTH = ("t5", "bart", "marian", "pegasus")
IMAGES = ("vit", "dinov2", "deit")
SETTINGS = {"gpt_neo": {"num_layers": 2}, "gemma3_text": {"layer_types": None}}
SETTINGS["deit"] = {"architectures": ["DeiTForImageClassification"]}  # of two, and AutoModel asks which
ROUNDING = 2.0**-8  # of bf16, below which no error is told from another
DRAWS = 12  # models: in one of ten a rounding sends a token to another expert, which three would not average out
OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "query", "key", "value", "qkv", "c_attn", "q_lin", "k_lin", "v_lin")


def build(kind: str, name: str | None = "sdpa", draw: int = 0) -> Any:
    """A tiny model of random weights, in eval mode."""
    torch.manual_seed(draw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = transformers.CONFIG_MAPPING[kind]
        known = set(base().to_dict()) | set(base.attribute_map)
        own = {key: value for key, value in SIZES.items() if key in known}
        config = base(**{**own, **SETTINGS.get(kind, {})})
        model = _auto(kind).from_config(config, attn_implementation=name).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def _auto(kind: str) -> Any:
    if kind in CAUSAL:
        return transformers.AutoModelForCausalLM
    if kind in BOTH:
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForMaskedLM if kind in MASKED else transformers.AutoModelForImageClassification


def inputs(kind: str) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    if kind in IMAGES:
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=draw)}
    ids = torch.randint(3, 50, (2, 8), generator=draw)
    return {"input_ids": ids, **({"decoder_input_ids": ids.flip(0)} if kind in BOTH else {})}


def outputs(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    return model(**given).logits


def named(kind: str, model: Any) -> str:
    layers = hf.verify(model, inputs(kind)).layers
    return f"{sum(layer.ours for layer in layers)} of {len(layers)}"


def in_layers(kind: str, model: Any) -> str:
    """HYLA heads by configuration are those that are swapped in, with the same weights."""
    heads = [None, ph.Hyla(4)]
    hf.register(kind)
    plain = build(kind)
    config = hf.with_heads(plain.config, heads)
    held = transformers.AutoModelForCausalLM.from_config(config).eval()
    held.load_state_dict(plain.state_dict(), strict=False)
    before = outputs(plain, inputs(kind))
    swapped = hf.swap_heads(plain, [1], heads[1])
    with torch.no_grad():
        two, one = (outputs(m, inputs(kind)) for m in (swapped, held))
    assert hf.verify(swapped, inputs(kind)).layers[1].ours
    _same(one, two)
    assert (before - two).abs().max() > 1e-4
    return "yes"


def causal(kind: str, model: Any) -> str:
    """A later token changes no earlier logit, unless the architecture looks ahead; then it does."""
    if kind in IMAGES:
        return "-"
    which, given = ("decoder_input_ids" if kind in BOTH else "input_ids"), inputs(kind)
    changed = {**given, which: given[which].clone()}
    changed[which][:, -1] = (changed[which][:, -1] - 3 + 7) % 47 + 3
    with torch.no_grad():
        moved = (outputs(model, given) - outputs(model, changed)).abs().amax((0, 2))
    assert moved[-1] > 1e-4
    assert moved[:-1].max() > 1e-5 if kind in MASKED else moved[:-1].max() < 1e-5, f"moved by {float(moved[:-1].max())}"
    return "looks both ways" if kind in MASKED else "yes"


def gradients(kind: str, model: Any) -> str:
    """Every parameter that softmax attention gives a gradient has one here."""
    found = []
    for one in (build(kind), copy.deepcopy(model)):
        outputs(one, inputs(kind)).square().mean().backward()
        found.append({n for n, p in one.named_parameters() if p.grad is not None and p.grad.abs().max() > 1e-9})
    missing = sorted(n for n in found[0] - found[1] if any(part in n for part in OF_ATTENTION) and "bias" not in n)
    assert not missing, f"none for {missing[0]}"
    return "yes"


def cache(kind: str, model: Any) -> str:
    if kind not in CAUSAL and kind not in BOTH:
        return "-"
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    ids = inputs(kind)["input_ids"]
    mask = torch.ones_like(ids)
    model.generation_config.decoder_start_token_id = 1
    a, b = (model.generate(ids, attention_mask=mask, use_cache=use, **how) for use in (True, False))
    assert torch.equal(a, b)
    return "yes"


def padding(kind: str, model: Any) -> str:
    if kind not in CAUSAL:
        return "-"
    ids = inputs(kind)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    takes = "position_ids" in inspect.signature(model.forward).parameters
    where = {"position_ids": places} if takes else {}
    with torch.no_grad():
        together = model(ids.masked_fill(mask == 0, 0), attention_mask=mask, **where).logits[1, 3:]
        _same(together, model(ids[1:, 3:]).logits[0], 1e-4)
    return "yes"


def bf16(kind: str, model: Any) -> str:
    """Autocast costs our heads at most twice what they lose in float32 when every result is rounded to bf16, by the
    geometric mean over models: a hidden value of HYLA near 0 may change its sign under one of both."""
    for name in ("polyhead_softmax", NAME):
        found = torch.tensor([_rounded(kind, build(kind, name, draw)) for draw in range(DRAWS)])
        ours, rounded = found.clamp(min=ROUNDING).log().mean(0).exp().tolist()
        wanted = TIMES * rounded
        assert ours <= wanted, f"logits of {name} off by {ours:.3f}, at most {wanted:.3f} was wanted"
    return "yes"


def _rounded(kind: str, model: Any) -> tuple[float, float]:
    """By how much autocast changes the logits, and by how much the rounding of every result does, each relative to
    their norm."""
    given = inputs(kind)
    if kind in CAUSAL or kind in BOTH:
        given["use_cache"] = False  # which would make one dtype of all
    with torch.no_grad():
        exact = outputs(model, given)
        with Rounding(torch.bfloat16):
            rounded = outputs(copy.deepcopy(model).bfloat16().float(), given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = outputs(model, given).float()
    logits.log_softmax(-1)[..., 0].mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()), "a gradient is not finite"
    return off(logits.detach(), exact), off(rounded, exact)


def _same(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> None:
    error = float((a - b).abs().max() / b.abs().max())
    assert error < tolerance, f"off by {error:.1e}"


CHECKS: tuple[Callable[[str, Any], str], ...] = (named, in_layers, causal, gradients, cache, padding, bf16)


def try_one(kind: str) -> dict[str, str]:
    """The row of an architecture: what each check found, or one line that says why not."""
    try:
        model = build(kind, NAME)
        hf.verify(model, inputs(kind))
    except ValueError as error:
        if not str(error).startswith("polyhead: "):
            raise
        return {"refused": str(error)}
    row = {}
    for column, check in zip(COLUMNS, CHECKS, strict=True):
        if column == "in layers" and kind not in CAUSAL:
            row[column] = "-"
            continue
        try:
            row[column] = check(kind, model)
        except (ValueError, AssertionError, TypeError, RuntimeError) as error:
            row[column] = "no: " + (str(error).splitlines() or [type(error).__name__])[0]
    return row


def table(rows: dict[str, dict[str, str]]) -> str:
    """Of the docs: architectures that work, by what works, and those that are refused."""
    works = {kind: row for kind, row in rows.items() if "refused" not in row}
    refused = ", ".join(f"`{kind}`" for kind, row in rows.items() if "refused" in row)
    notes: list[str] = []
    lines = ["| architecture | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for kind, row in works.items():
        cells = []
        for column in COLUMNS:
            cell = row[column]
            if cell.startswith("no: "):
                note = re.sub(r"Polyhead\w+", "it", cell[4:])
                if note not in notes:
                    notes.append(note)
                cell = f"no ({notes.index(note) + 1})"
            cells.append(cell)
        lines.append(f"| `{kind}` | " + " | ".join(cells) + " |")
    said = [f"{i}. {note}" for i, note in enumerate(notes, 1)]
    return "\n".join([*lines, "", *said, *([""] if said else []), f"Refused, each by its name: {refused}."])


def page(found: dict[str, Any]) -> str:
    """The page with the table of what was found."""
    text = PAGE.read_text(encoding="utf-8")
    start, end = (text.index(mark) for mark in MARKS)
    head = f"transformers {found['transformers']}, {len(found['rows'])} architectures:"
    return f"{text[:start]}{MARKS[0]}\n{head}\n\n{table(found['rows'])}\n{text[end:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="which architectures of transformers take our heads")
    parser.add_argument("kinds", nargs="*", help="model types; by default all, and the files are written")
    kinds = parser.parse_args().kinds
    transformers.logging.set_verbosity_error()
    hf.register()
    rows = {}
    for kind in kinds or (*CAUSAL, *MASKED, *BOTH, *IMAGES):
        rows[kind] = try_one(kind)
        print(kind, rows[kind], flush=True)
    if not kinds:
        found = {"transformers": transformers.__version__, "rows": rows}
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
