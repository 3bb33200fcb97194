"""LoRA by PEFT, offline: adapters on one of our models, and on a Llama model whose heads were swapped.

    pip install 'polyhead[hf]' peft
    python examples/huggingface/lora.py

In the swapped model the new relational heads, which have parameters of their own, are trained and saved beside the
adapters by `modules_to_save=["polyhead"]`.
"""

import sys
import tempfile

import peft
import torch
import transformers

import polyhead as ph
from polyhead.compat import huggingface as hf

IDS = torch.arange(24).reshape(2, 12) % 7


def ours() -> torch.nn.Module:
    """A small model of ours."""
    ends = ph.Tokens(16), ph.Logits(16)
    settings = ph.TransformerConfig(*ends, dim=32, layers=2, heads=[ph.Softmax(2), ph.Hyla(2)], causal=True)
    return hf.PolyheadForCausalLM(hf.PolyheadConfig(settings))


def swapped() -> torch.nn.Module:
    """A Llama model whose last layer has relational heads."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, **sizes))
    return hf.swap_heads(llama, [-1], [ph.Softmax(2), ph.Relational(2)])


WAYS = {
    "ours": (ours, {"target_modules": "all-linear"}),
    "swapped": (swapped, {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["polyhead"]}),
}


def main(steps: int = 30) -> dict[str, tuple[float, float, float]]:
    """By model: the first loss and the last, and how far the logits are off that a saved adapter gives."""
    found = {}
    for name, (make, how) in WAYS.items():
        torch.manual_seed(0)
        model = peft.get_peft_model(make(), peft.LoraConfig(r=8, task_type="CAUSAL_LM", **how))
        optimiser = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        losses = []
        for _ in range(steps):
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            losses.append(loss.item())
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model.eval().save_pretrained(folder)
            torch.manual_seed(0)  # the same base
            again = peft.PeftModel.from_pretrained(make(), folder).eval()
            off = (again(input_ids=IDS).logits - model(input_ids=IDS).logits).abs().max().item()
        found[name] = (losses[0], losses[-1], off)
    return found


if __name__ == "__main__":
    for name, values in main(*map(int, sys.argv[1:])).items():
        print(name, *(f"{value:.4f}" for value in values))
