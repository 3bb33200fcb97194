"""Compiled beside eager over random calls of the Hugging Face models: equal, or refused in one line by both.

    python tests/field/campaign_huggingface.py [CALLS] [SEED]

Each call draws a model, packed or padded rows, positions or none, and one to four turns with a cache.
"""

import collections
import itertools
import random
import sys
import warnings

import torch
import transformers

import polyhead as ph
from polyhead.compat import huggingface as hf

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
VOCABULARY, RELATIVE = 40, ph.Relational(2, symbols=ph.RelativeSymbols(3))
OURS = {
    "softmax": {"heads": ph.Softmax(4)},
    "hyla": {"heads": ph.Hyla(4)},
    "linear": {"heads": ph.Linear(4)},
    "mixture": {"heads": (ph.Softmax(1), ph.Linear(1), ph.Hyla(2))},
    "places": {"heads": (ph.Softmax(2), ph.Relational(2, symbols=ph.PositionSymbols()))},
    "neighbours": {"heads": (ph.Softmax(2), ph.Relational(2, symbols=ph.RelationalSymbols()))},
    "relative": {"heads": (ph.Softmax(2), RELATIVE), "positions": ph.Learned()},
    "disentangled": {"heads": (ph.Disentangled(2), ph.Softmax(2))},
    "alibi": {"heads": ph.Softmax(4), "positions": ph.Alibi()},
    "buckets": {"heads": ph.Hyla(4), "positions": ph.RelativeBias(buckets=8)},
    "window": {"heads": ph.Hyla(4), "window": 3},
}
SWAPPED = {"swapped hyla": [ph.Softmax(2), ph.Hyla(2)], "swapped places": OURS["places"]["heads"]}
NAMED = ("polyhead_hyla", "polyhead_linear_rms")


def build(name):
    torch.manual_seed(0)
    if name in OURS:
        fields = {"dim": 16, "layers": 1, "causal": True, "max_length": 32, "positions": ph.Rotary(), **OURS[name]}
        settings = ph.TransformerConfig(ph.Tokens(VOCABULARY), ph.Logits(VOCABULARY), **fields)
        return hf.PolyheadForCausalLM(hf.PolyheadConfig(settings)).double().eval()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.3, **sizes)
    model = transformers.LlamaForCausalLM(config).double().eval()
    if name in SWAPPED:
        return hf.swap_heads(model, None, SWAPPED[name])
    model.set_attn_implementation(name)
    return model


def draw(rng, ours):
    """The arguments of one to four turns, and where their tokens are real."""
    b, t = rng.choice((1, 1, 2, 3)), rng.randint(3, 9)
    ids = torch.randint(1, VOCABULARY, (b, t), generator=torch.Generator().manual_seed(rng.randrange(2**30)))
    real = torch.ones(b, t, dtype=torch.long)
    padding = rng.choice(
        ("none", "ones", "left", "right", "gap", "numbers") if ours else ("none", "ones", "left", "right")
    )
    if padding in ("left", "right", "gap"):
        count = rng.randint(1, t - 2)
        first = {"left": 0, "right": t - count, "gap": rng.randint(1, t - count)}[padding]
        real[-1, first : first + count] = 0
    mask = None if padding == "none" else real.clone()
    if padding == "numbers":
        mask[-1, t // 2 :] = 2
    if mask is not None and rng.random() < 0.3:
        mask = mask.bool()
    places = rng.choice(
        ("none", "counted", "shifted", "packed", "packed wrongly", "gaps") if ours else ("none", "counted")
    )
    positions = None if places == "none" else (real.cumsum(1) - 1).clamp(min=0)
    if places == "shifted":
        positions = positions + rng.randint(1, 5)
    elif places == "gaps":
        positions = positions + (torch.arange(t) > t // 2)
    elif places.startswith("packed"):
        cut = rng.randint(1, t - 1)
        positions = torch.cat((torch.arange(cut), torch.arange(t - cut)))[None].expand(b, t) + ("wrong" in places)
    if positions is not None and rng.random() < 0.3:
        positions = positions[:1]
    num_turns = rng.choice((0, 0, 1, 2, 3, 4))
    if padding == "numbers" or places.startswith("packed"):
        num_turns = min(num_turns, 1)
    cuts = sorted(rng.sample(range(1, t), min(num_turns, t) - 1)) if num_turns > 1 else []
    edges = [0, *cuts, t]
    turns = []
    for first, last in itertools.pairwise(edges):
        turns.append({"input_ids": ids[:, first:last], "use_cache": num_turns > 0,
                      "attention_mask": None if mask is None else mask[:, :last],
                      "position_ids": None if positions is None else positions[:, first:last]})  # fmt: skip
    return turns, real.bool(), f"{padding}, {places}, {num_turns} turns, b {b}"


@torch.no_grad()
def run(model, turns):
    """The logits of all turns, or the line of the error."""
    name, cache, logits = hf.base.CACHE_NAME, None, []
    try:
        for turn in turns:
            output = model(**turn, **{name: cache})
            cache = output.get(name)
            logits.append(output.logits)
    except (ValueError, RuntimeError) as error:
        line = str(error).split("\n")[0] if "\n\nfrom user code" in str(error) else str(error)
        return f"{type(error).__name__}: {line}"
    return torch.cat(logits, 1)


def main(num_calls=300, seed=0):
    rng, results = random.Random(seed), collections.defaultdict(collections.Counter)
    names = [*OURS, *SWAPPED, *NAMED]
    torch._dynamo.config.cache_size_limit = torch._dynamo.config.accumulated_cache_size_limit = 100_000
    torch._dynamo.config.recompile_limit = 100_000
    for i in range(num_calls):
        name = names[i % len(names)]
        if i % len(names) == i:
            build_of = build(name)
            results[name]["model"] = 0
            models[name] = build_of, torch.compile(build_of, backend="eager", dynamic=True)
        model, compiled = models[name]
        if i % 10 == 9:
            print(i + 1, "calls", flush=True)
        turns, real, text = draw(rng, name in OURS)
        eager, graph = run(model, turns), run(compiled, turns)
        if isinstance(eager, str) != isinstance(graph, str):
            kind = "DIFFERENT"
        elif isinstance(eager, str):
            kind = (
                "refused" if "\n" not in graph and eager.split(": ", 1)[1] == graph.split(": ", 1)[1] else "OTHER LINE"
            )
        else:
            kind = "equal" if torch.allclose(eager[real], graph[real], rtol=1e-5, atol=1e-6) else "WRONG"
        results[name][kind] += 1
        if i % 20 == 19:
            print(i + 1, "calls", flush=True)
        if kind not in ("equal", "refused"):
            difference = (eager - graph)[real].abs().max() if kind == "WRONG" else (str(eager)[:150], str(graph)[:300])
            print(f"{kind}: {name}: {text}: {difference}", flush=True)
    for name, counts in results.items():
        print(name, dict(counts))
    return all(set(counts) <= {"equal", "refused", "model"} for counts in results.values())


models = {}
if __name__ == "__main__":
    sys.exit(not main(*map(int, sys.argv[1:])))
