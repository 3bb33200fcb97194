"""The words of reports on fuzzy logic."""

from polyhead.config.words import Baseline, Parts, Words

WORDS = Words(
    metric=(
        "R², per sequence",
        "1 − (prediction − target)² / v, where v is the population variance of all targets of the same sequence, "
        "averaged over sequences. 1 is perfect; predicting the mean of the examples scores slightly below 0.",
    ),
    baselines={
        "context_mean": Baseline("Context mean", "predicts the mean target of the examples", short="mean"),
        "nearest_neighbour": Baseline("Nearest neighbour", "copies the target of the closest example", short="1-NN"),
        "ridge": Baseline("Ridge regression", "fits a line to the examples"),
        "gaussian_process": Baseline(
            "Gaussian process", "interpolates smoothly between the examples", drawn=True, short="GP"
        ),
        "recall": Baseline("Recall", "weights the training functions by how well each fits the examples", drawn=True),
        "mix": Baseline("Mixture", "fits a linear combination of the training functions to the examples", drawn=True),
        "ceiling": Baseline(
            "Exact ceiling", "knows the whole family and averages all its functions that fit the examples", drawn=True
        ),
    },
    terms=(
        ("novel", "Combinations of terms that never occurred in training at all."),
        (
            "Baselines",
            "Predictors that see the same examples and compose nothing. A score that does not exceed them is no "
            "evidence of composition. GP: Gaussian process; 1-NN: nearest neighbour. recall and mix know the training "
            "functions, not their terms: one weighs them by how well they fit the examples, the other mixes them "
            "linearly.",
        ),
    ),
    parts=Parts(
        "term",
        read="each term of the function",
        maps=(
            "Each point is the code of one query attending to itself: {count} sequences of unseen combinations, all "
            "with the same context inputs. The same map is coloured several ways; clusters that follow the function or "
            "a term rather than the target mean that the code says what to compute."
        ),
        terms=(
            (
                "Code maps",
                "Codes of the query token attending to itself on unseen combinations, all with the same context "
                "inputs, in two dimensions (t-SNE or PCA). Distances between far clusters of a t-SNE map mean nothing.",
            ),
            (
                "Probe F1",
                "Macro F1 of a logistic regression (scikit-learn's defaults on standardised codes) from the code to a "
                "term, fitted on iid sequences and scored on compositional ones, with one query token for all of them "
                "or each its own. The terms of a function are sorted, so term 1 and term 2 have different "
                "frequencies: compare each with its own chance.",
            ),
        ),
    ),
)
