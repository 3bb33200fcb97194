"""The definitions of a report's terms: general ones, and those of its task."""

from polyhead.config import Task
from polyhead.pages.report.headline import metric_name, split_name


def definitions(task: Task) -> list[tuple[str, str]]:
    """The terms of the report with their definitions."""
    words, named = task.words, metric_name(task.metric).capitalize()
    metric = words.metric or (named, f"The main metric of {task.name.replace('_', ' ')}.")
    if words.parts is not None:
        name = words.parts.name
        return [
            metric,
            ("iid", f"Fresh sequences of the training tasks: combinations of {name}s the model was trained on."),
            (
                "compositional",
                f"Combinations of {name}s that never occurred together in training, although each {name} did.",
            ),
            *words.terms,
            *_TERMS,
            *words.parts.terms,
            *_MEASURES,
        ]
    return [
        metric,
        ("iid", "New data from the training distribution."),
        *((split_name(split), f"{meaning.capitalize()}.") for split, meaning in words.splits.items()),
        *([_GUESSING] if hasattr(task, "floors") and task.better == "higher" else []),
        *words.terms,
        ("±", f"Standard error of the mean: over seeds where there are several, else over test {task.items}."),
        _TERMS[-1],
    ]


_GUESSING = ("Chance", "What guessing scores: every answer as likely as any other.")
_TERMS = (
    ("Ceiling", "The best possible answer: the Bayes estimate over all members of the task's family."),
    ("±", "Standard error of the mean: over seeds where there are several, else over test sequences."),
    ("Latent code", "The attention scores of one query-key pair after normalisation: one number per head."),
)
_MEASURES = (
    (
        "Chance",
        "Of a probe, the macro F1 of the same probe fitted on permuted labels: its score where nothing can be read. "
        "Of purity, the share of equal labels among all pairs of sequences.",
    ),
    (
        "Purity",
        "The share of the 10 nearest codes (Euclidean) with the same label, averaged over codes.",
    ),
)
