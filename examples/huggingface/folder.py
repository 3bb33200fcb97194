"""From a run folder to the Auto classes, offline: a language model, its backbone, and the Trainer.

pip install 'polyhead[hf]'
python examples/huggingface/folder.py
"""

import pathlib
import tempfile

import torch
import transformers

import polyhead as ph
from polyhead.compat import huggingface as hf
from polyhead.config import Run, Train

TEXT = "one two, buckle my shoe; three four, knock at the door;\n"


def train(folder: pathlib.Path, steps: int) -> None:
    """A byte-level model of rhymes, exported to `folder`/exported."""
    (folder / "rhyme.txt").write_text(TEXT * 100, encoding="utf-8")
    task = ph.tasks.Text(str(folder / "rhyme.txt"), 32, held_out=0.1, folder=str(folder / "tokens"))
    heads = [ph.Softmax(2), ph.Hyla(2)]
    model = ph.TransformerConfig(*task.ends, dim=32, layers=1, heads=heads, causal=True, positions=ph.Rotary())
    how = Train(steps=steps, batch_size=8, lr=1e-2, warmup=5, evaluate=("iid",), eval_batches=1)
    ph.train.run(Run(task, model, train=how, folder=str(folder / "run")))
    hf.to_folder(folder / "run", folder / "exported")


def tune(folder: pathlib.Path, steps: int) -> tuple[float, float]:
    """The loss of another text before and after the Trainer has seen it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "exported")
    ids = tokenizer("five six, pick up sticks;", return_tensors="pt")["input_ids"][0]
    data = [{"input_ids": ids, "labels": ids}] * 8
    how = transformers.TrainingArguments(
        folder / "tuned", max_steps=steps, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = transformers.Trainer(model, how, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return before, trainer.evaluate()["eval_loss"]


def main(steps: int = 60) -> dict[str, object]:
    """What each class gives."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        train(folder, steps)
        config = transformers.AutoConfig.from_pretrained(folder / "exported")
        backbone = transformers.AutoModel.from_pretrained(folder / "exported")
        out = backbone(torch.arange(97, 105)[None], output_hidden_states=True, output_attentions=True)
        return {
            "AutoConfig": config.settings.heads,
            "AutoModel": (tuple(out.last_hidden_state.shape), len(out.hidden_states), tuple(out.attentions[0].shape)),
            "Trainer": tune(folder, steps),
        }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:12}{value}")
