"""Supervised fine-tuning by TRL, offline: its SFTTrainer with its defaults, on one of our models.

    pip install 'polyhead[hf]' trl
    python examples/huggingface/sft.py

A byte-level model with softmax and HYLA heads learns to answer with the colour of a thing.
"""

import sys
import tempfile

import datasets
import trl

import polyhead as ph
from polyhead.compat import huggingface as hf
from polyhead.compat.huggingface.tokens import tokenizer_of
from polyhead.tasks.text.tokens import Bytes

COLOURS = {"grass": "green", "snow": "white", "coal": "black", "blood": "red", "sky": "blue"}


def main(steps: int = 60) -> tuple[float, float, str]:
    """The first loss, the last, and what the model then says of snow."""
    ends = ph.Tokens(256), ph.Logits(256)
    settings = ph.TransformerConfig(
        *ends, dim=64, layers=2, heads=[ph.Softmax(2), ph.Hyla(2)], causal=True, positions=ph.Rotary()
    )
    model, tokenizer = hf.PolyheadForCausalLM(hf.PolyheadConfig(settings)), tokenizer_of(Bytes())
    rows = [{"prompt": f"{thing}: ", "completion": colour} for thing, colour in COLOURS.items()] * 20
    with tempfile.TemporaryDirectory() as folder:
        how = trl.SFTConfig(folder, max_steps=steps, learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True)
        trainer = trl.SFTTrainer(model, how, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer)
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    prompt = tokenizer("snow: ", return_tensors="pt")
    said = model.eval().generate(**prompt, max_new_tokens=8, do_sample=False, eos_token_id=0)
    return losses[0], losses[-1], tokenizer.decode(said[0], skip_special_tokens=True)


if __name__ == "__main__":
    print(*main(*map(int, sys.argv[1:])), sep="\n")
