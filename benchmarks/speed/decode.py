"""Tokens a second on a CPU: our transformer with each kind of heads beside transformers' Llama of the same size.

    OMP_NUM_THREADS=1 python benchmarks/speed/decode.py --json decode.json

6 layers, width 512, 8 heads, SwiGLU, rotary positions, RMS norms, 8,192 tokens, random weights, float32, one sequence,
the likeliest token each time.  Llama has its static cache.  Ours with softmax heads has as many parameters as Llama;
other heads have what their mechanism adds.  A rate is that of `--steps` further tokens: the time of a call that makes
1 + steps tokens less that of a call that makes one.  All take turns; the ratio is that of CPU times within a round.
"""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from polyhead.config import (
    Hyla,
    Linear,
    Logits,
    Mechanism,
    Relational,
    Rotary,
    Softmax,
    Swiglu,
    Tokens,
    TransformerConfig,
)
from polyhead.models.build import build
from polyhead.models.generate.tokens import generate

DIM, HEADS, LAYERS, VOCABULARY, HIDDEN = 512, 8, 6, 8192, 1408
MIXTURES: dict[str, tuple[Mechanism, ...]] = {
    "softmax": (Softmax(HEADS),),
    "hyla": (Hyla(HEADS),),
    "linear": (Linear(HEADS),),
    "relational": (Softmax(HEADS // 2), Relational(HEADS // 2)),
}

Decode = Callable[[int], object]
"""So many tokens after the prompt."""


def ours(heads: tuple[Mechanism, ...], prompt: torch.Tensor, longest: int) -> tuple[Decode, int]:
    """What decodes, and its parameters."""
    model = build(
        TransformerConfig(
            Tokens(VOCABULARY), Logits(VOCABULARY), DIM, LAYERS, heads, feedforward=Swiglu(HIDDEN),
            positions=Rotary(), max_length=longest, causal=True, norm="rms",
        )
    ).eval()  # fmt: skip
    return lambda n: generate(model, prompt, steps=n, temperature=0.0), sum(p.numel() for p in model.parameters())


def llama(prompt: torch.Tensor, longest: int) -> tuple[Decode, int]:
    """The same of transformers' Llama."""
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=DIM, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, max_position_embeddings=longest, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    mask = torch.ones_like(prompt)

    def decode(n: int) -> object:
        # The cache has room for all that a call makes, as `generate` of transformers asks for it.
        return model.generate(
            prompt, attention_mask=mask, max_new_tokens=n, min_new_tokens=n, do_sample=False,
            cache_implementation="static", disable_compile=True,
        )  # fmt: skip

    return decode, sum(p.numel() for p in model.parameters())


def seconds(decode: Decode, steps: int) -> float:
    """Of `steps` further tokens."""
    took = []
    for n in (1, 1 + steps):
        start = time.process_time()
        decode(n)
        took.append(time.process_time() - start)
    return took[1] - took[0]


@torch.no_grad()
def rows(prompt: int, steps: int, rounds: int) -> list[dict[str, object]]:
    """One for each side."""
    text, longest = torch.randint(1, VOCABULARY, (1, prompt)), prompt + steps + 1
    sides = {"Llama of transformers": llama(text, longest)}
    sides |= {f"ours, {name}": ours(heads, text, longest) for name, heads in MIXTURES.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for n in range(rounds + 1):
        for name, (decode, _) in sides.items():
            took = seconds(decode, steps)
            if n:  # the first round warms up
                times[name].append(took)
    found, first = [], next(iter(times.values()))
    for name, (_, parameters) in sides.items():
        ratios = [x / y for x, y in zip(first, times[name], strict=True)]
        row: dict[str, object] = {
            "prompt": prompt,
            "side": name,
            "parameters": parameters,
            "tokens a second": round(steps / statistics.median(times[name]), 1),
            "times Llama": round(statistics.median(ratios), 2),
            "from": round(min(ratios), 2),
            "to": round(max(ratios), 2),
        }
        found.append(row)
        print(json.dumps(row), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=(32, 1024))
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    found = [row for prompt in options.prompts for row in rows(prompt, options.steps, options.rounds)]
    if options.json:
        about = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": options.threads}
        options.json.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
