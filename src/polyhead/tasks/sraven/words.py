"""The words of reports on SRAVEN."""

from polyhead.config.words import Baseline, Parts, Words
from polyhead.tasks.classification import CHANCE

WORDS = Words(
    metric=("Accuracy", "The share of sequences in which every symbol of the last panel is right."),
    baselines={
        "chance": CHANCE,
        "symbol_counts": Baseline(
            "Symbol counts",
            "knows no rule, only where in the panels the training answers occurred",
            drawn=True,
            short="counts",
        ),
        "copy_left": Baseline("Copy", "copies the panel to the left of the last one", short="copy"),
        "same_slot": Baseline(
            "Same slot", "knows the rules, but not that columns permute their features", short="slot"
        ),
        "known_combinations": Baseline(
            "Known combinations only",
            "knows the family, but no combination of rules beyond the training ones",
            drawn=True,
            short="known",
        ),
        "ceiling": Baseline(
            "Exact ceiling", "knows all rules and gives the most probable answer for the shown panels", drawn=True
        ),
    },
    views={
        "last_row": "the last query token attending to the last feature of each panel to its left, on sequences whose "
        "columns permute nothing, so that all these tokens belong to one feature (the definition in the original code)",
    },
    terms=(
        (
            "Baselines",
            "Predictors that see the same panels and combine no rules that were not combined in training. A score that "
            "does not exceed them is no evidence of composition. Symbol counts know no rule. slot: same slot; known: "
            "known combinations, which on iid sequences are all there is to know.",
        ),
    ),
    parts=Parts(
        "rule",
        read="the rule behind the query token, and the symbol to predict,",
        maps=(
            "Each point is the code of the last query token of one of {count:,} sequences of unseen combinations. The "
            "same map is coloured by the symbol to predict and by the rule that gives it: clusters that follow the "
            "rule rather than the symbol mean that the code says what to compute."
        ),
        compare=(
            "Compare the rule with the target value, each above its own chance: which of the two a layer's code "
            "follows."
        ),
        terms=(
            (
                "Code maps",
                "Codes of the last query token on unseen combinations in two dimensions (t-SNE or PCA). Distances "
                "between far clusters of a t-SNE map mean nothing.",
            ),
            (
                "Probe F1",
                "Macro F1 of a logistic regression (scikit-learn's defaults on standardised codes) from the code to "
                "the rule of the last query token, or to its symbol, fitted on iid sequences and scored on "
                "compositional ones.",
            ),
        ),
    ),
)
