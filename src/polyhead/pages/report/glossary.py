"""What the words of a report mean, for each task."""

from polyhead.config import Task
from polyhead.pages.report.headline import PARTS, WHERE, metric_name, part, split_name


def definitions(task: Task) -> list[tuple[str, str]]:
    """Terms of the report, each with its meaning."""
    task_name, metric = task.name, task.metric
    if task_name not in PARTS:
        return _plain_definitions(task)
    name = part(task_name)
    return [
        _METRICS.get(metric, (metric_name(metric), f"The score of {task_name.replace('_', ' ')}.")),
        ("iid", f"Fresh sequences of the training tasks: combinations of {name}s the model was trained on."),
        (
            "compositional",
            f"Combinations of {name}s that never occurred together in training, although each {name} did.",
        ),
        *([("novel", "Combinations of terms that never occurred in training at all.")] if name == "term" else []),
        _FLOORS.get(task_name, _FLOORS["fuzzy_logic"]),
        *_TERMS,
        _CODE_MAPS.get(task_name, _CODE_MAPS["fuzzy_logic"]),
        _PROBE.get(task_name, _PROBE["fuzzy_logic"]),
        *_MEASURES,
    ]


def _plain_definitions(task: Task) -> list[tuple[str, str]]:
    """Those of tasks whose codes are neither probed nor mapped."""
    splits = {split: words for (name, split), words in _PAIRS if name == task.name}
    metric = _ANSWERS.get(task.metric, f"The headline metric of {task.name.replace('_', ' ')}.")
    return [
        (metric_name(task.metric).capitalize(), metric),
        ("iid", "Fresh data of the kind that was trained on."),
        *((split_name(split), f"{words.capitalize()}.") for split, words in splits.items()),
        *([_GUESSING] if hasattr(task, "floors") and task.better == "higher" else []),
        *_WITHOUT_RELATIONS.get(task.name, ()),
        ("±", f"Standard error of the mean: over seeds where there are several, else over test {task.items}."),
        _TERMS[-1],
    ]


_GUESSING = ("Chance", "What guessing scores: every answer as likely as any other.")


_BY_OBJECT = (
    "Known objects",
    "One number for each object, its mean place in training; objects are put into the order of these numbers, so that "
    "none is compared with another.",
)
_WITHOUT_RELATIONS = {
    "relational_games": (("Known pairs", "Knows the class of the pairs of objects that training images show."),),
    "pairwise_order": (
        ("Known pairs", "Knows the pairs of training and their reverses, and guesses the others."),
        _BY_OBJECT,
    ),
    "object_sorting": (_BY_OBJECT,),
    "set_cards": (
        (
            "Known pairs",
            "Knows the pairs of cards that sets of training have: no other set has them, so others remain.",
        ),
    ),
    "images": (("No other floor", "A class of images is made of no parts or relations that a learner could lack."),),
    "maths": (("No floor", "Answers are written freely, and nearly none comes twice: guessing scores about 0."),),
}
"""What a learner reaches that knows no relation; or why there is no such floor."""


_PAIRS = [(key, words) for key, words in WHERE.items() if isinstance(key, tuple)]
_ANSWERS = {
    "accuracy": "The share of answers that are right.",
    "exact_match": "The share of answers that are right to the last character, their end included.",
    "bits_per_byte": "What a byte of held-out text costs if the model codes it, whatever its tokens are: lower is "
    "better. A compressor knows none of the training text, but all of a file.",
}
_METRICS = {
    "r2": (
        "R², per sequence",
        "1 − (prediction − target)² / v, where v is the population variance of all targets of the same sequence, "
        "averaged over sequences. 1 is perfect; predicting the mean of the examples scores slightly below 0.",
    ),
    "accuracy": ("Accuracy", "The share of sequences in which every symbol of the last panel is right."),
}
_FLOORS = {
    "fuzzy_logic": (
        "Floors",
        "Predictors that see the same examples and compose nothing. A score that does not exceed them is no evidence "
        "of composition. GP: Gaussian process; 1-NN: nearest neighbour. recall and mix know the training functions, "
        "not their terms: one weighs them by how well they fit the examples, the other mixes them linearly.",
    ),
    "sraven": (
        "Floors",
        "Predictors that see the same panels and combine no rules that were not combined in training. A score that "
        "does not exceed them is no evidence of composition. Symbol counts know no rule. slot: same slot; known: known "
        "combinations, which on iid sequences are all there is to know.",
    ),
}
_TERMS = (
    ("Ceiling", "The best possible answer: all members of the family that fit what is shown, weighed by probability."),
    ("±", "Standard error of the mean: over seeds where there are several, else over test sequences."),
    ("Latent code", "The attention scores of one query-key pair after normalising: one number per head."),
)
_CODE_MAPS = {
    "fuzzy_logic": (
        "Code maps",
        "Codes of the query token attending to itself on unseen combinations, all with the same context inputs, in two "
        "dimensions (t-SNE or PCA). Distances between far clusters of a t-SNE map mean nothing.",
    ),
    "sraven": (
        "Code maps",
        "Codes of the last query token on unseen combinations in two dimensions (t-SNE or PCA). Distances between far "
        "clusters of a t-SNE map mean nothing.",
    ),
}
_PROBE = {
    "fuzzy_logic": (
        "Probe F1",
        "Macro F1 of a logistic regression (scikit-learn's defaults on standardised codes) from the code to a term, "
        "fitted on iid sequences and scored on compositional ones, with one query token for all of them or each its "
        "own. The terms of a function are sorted, so term 1 and term 2 have different frequencies: compare each with "
        "its own chance.",
    ),
    "sraven": (
        "Probe F1",
        "Macro F1 of a logistic regression (scikit-learn's defaults on standardised codes) from the code to the rule "
        "of the last query token, or to its symbol, fitted on iid sequences and scored on compositional ones.",
    ),
}
_MEASURES = (
    (
        "Chance",
        "Of a probe, the exact expected macro F1 of guessing each class with its frequency in the fitting sequences; a "
        "probe that finds nothing names the commonest classes only, which macro F1 puts below chance. Of purity, the "
        "share of equal labels among all pairs of sequences.",
    ),
    (
        "Purity",
        "The share of the 10 nearest codes (Euclidean) with the same label, averaged over codes.",
    ),
)
