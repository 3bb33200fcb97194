"""Language models under lm-evaluation-harness, offline: train one, export it, score it on tasks of one's own.

    pip install 'polyhead[eval]'
    python examples/huggingface/evaluate.py

A small byte-level model learns to count in words.  Two tasks ask it to: one offers four next words, one lets it write
until the end of the line.  For tasks that the harness brings along, give their names to its own command line:

    python -c "import polyhead.compat.huggingface, lm_eval.__main__ as m; m.cli_evaluate()" run \
        --model hf --model_args pretrained=exported --tasks lambada_openai
"""

import json
import pathlib
import sys
import tempfile

import transformers
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import polyhead as ph
from polyhead.compat.huggingface import to_folder  # and registers our models with AutoModelForCausalLM
from polyhead.config import Run, Train

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def count(first: int, words: int) -> str:
    return " ".join(WORDS[(first + i) % len(WORDS)] for i in range(words))


def train(folder: pathlib.Path, steps: int) -> None:
    """A model with softmax and HYLA heads that has read lines of a few numbers each, exported to `folder`/exported."""
    lines = [count(i % len(WORDS), 3 + i % 5) for i in range(4000)]
    (folder / "counting.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    task = ph.tasks.Text(str(folder / "counting.txt"), 64, held_out=0.1, folder=str(folder / "tokens"))
    heads = (ph.Softmax(2), ph.Hyla(2))
    model = ph.TransformerConfig(*task.ends, dim=64, layers=2, heads=heads, causal=True, positions=ph.Rotary())
    how = Train(steps=steps, batch_size=16, lr=3e-3, warmup=20, evaluate=("iid",), eval_batches=2)
    ph.train.run(Run(task, model, train=how, folder=str(folder / "run")))
    to_folder(folder / "run", folder / "exported")


def tasks(folder: pathlib.Path) -> list[dict[str, object]]:
    """The two tasks, on questions in a file."""
    rows = [
        {"text": count(i, 3), "answer": count(i + 3, 1), "choices": [count(i + j, 1) for j in (5, 3, 8, 1)]}
        for i in range(len(WORDS))
    ]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    choice = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": 1}
    write = {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [" ", "\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    return [
        {"task": "next_number", **source, **choice},
        {"task": "count_on", **source, **write, "doc_to_text": "{{text}} "},
    ]


def main(steps: int = 300, batch_size: int = 4) -> dict[str, dict[str, float]]:
    """Scores by task."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        train(folder, steps)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "exported")
        scored = simple_evaluate(
            HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal"),
            tasks=tasks(folder),
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
        )
        return scored["results"]


if __name__ == "__main__":
    for task, scores in main(*map(int, sys.argv[1:])).items():
        print(task, {name: float(value) for name, value in scores.items() if isinstance(value, float)})
