"""Generating with our models and swapped ones, offline: pipeline, a cache of fixed size, torch.compile.

    pip install 'polyhead[hf]'
    python examples/huggingface/generate.py

The models are new, so what they say means nothing; every way of decoding has to say the same.
"""

import torch
import transformers

import polyhead as ph
from polyhead.compat import huggingface as hf
from polyhead.compat.huggingface.tokens import tokenizer_of
from polyhead.tasks.text.tokens import Bytes

HOW = {"max_new_tokens": 12, "do_sample": False}


def ours() -> hf.PolyheadForCausalLM:
    """A byte-level model of one layer."""
    ends = ph.Tokens(256), ph.Logits(256, tied=True)
    settings = ph.TransformerConfig(*ends, dim=64, layers=1, heads=ph.Hyla(4), causal=True, positions=ph.Rotary())
    return hf.PolyheadForCausalLM(hf.PolyheadConfig(settings)).eval()


def swapped() -> torch.nn.Module:
    """A Llama model whose last layer has softmax and HYLA heads."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = transformers.LlamaConfig(vocab_size=256, **sizes, bos_token_id=None, eos_token_id=None)
    return hf.swap_heads(transformers.LlamaForCausalLM(llama).eval(), [-1], [ph.Softmax(2), ph.Hyla(2)])


def main(backend: str | None = "inductor") -> dict[str, str]:
    """What is said, by way of decoding; `backend` is what torch.compile compiles with (None: it does not)."""
    torch.manual_seed(0)
    tokenizer, model, llama = tokenizer_of(Bytes()), ours(), swapped()
    prompt = tokenizer("one two three one two", return_tensors="pt")
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    said = {
        "ours": model.generate(**prompt, **HOW),
        "swapped": llama.generate(**prompt, **HOW),
        "swapped, a cache of fixed size": llama.generate(**prompt, **HOW, cache_implementation="static"),
    }
    texts = {"ours, pipeline": pipe("one two three one two", **HOW)[0]["generated_text"]}
    if backend is not None:
        model.forward = torch.compile(model.forward, backend=backend)
        said["ours, compiled"] = model.generate(**prompt, **HOW)
    return texts | {way: tokenizer.decode(ids[0]) for way, ids in said.items()}


if __name__ == "__main__":
    for way, text in main().items():
        print(f"{way:32}{text!r}")
