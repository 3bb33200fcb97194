"""Single inputs in a report, with the attention, relations and symbols of every layer.

They show the first finished run of each mechanism, on sequences that neither training nor evaluation uses.
"""

from collections.abc import Sequence

import numpy as np

from polyhead.analysis import figures
from polyhead.analysis.probe import draws
from polyhead.analysis.relations import LayerLook, look
from polyhead.pages.report.runs import Entry, SeedGroup, in_order
from polyhead.pages.report.section import Draft, Section, slug
from polyhead.spec.values import one_line
from polyhead.tasks.base import Task
from polyhead.train import load_model

EXAMPLES = 2
# Of longer sequences the last tokens are shown.
MAX_TOKENS = 32
# In one figure.
MAX_MATRICES = 16
Panel = tuple[str, np.ndarray, Sequence[str], Sequence[str]]


def attention_section(groups: Sequence[SeedGroup], draft: Draft) -> Section | None:
    """Figures of each mechanism; the notes get a line for each run of which none can be drawn."""
    section = Section("attention", "What do the heads attend to?")
    for group in groups:
        # The first of several seeds.
        for entry in group.finished[:1]:
            draft.tell(f"attention of {entry.folder.name}")
            try:
                drawings = _drawings(entry, group.label, draft)
            except (ValueError, OSError) as error:
                draft.notes.append(f"{entry.folder.name}: no attention maps ({one_line(error)})")
                continue
            section.details.append((f"{group.label}, seed {entry.run.seed}", drawings))
            section.text = (
                "A row is a token that attends, a column the token it attends to; attention is the latent code of the "
                f"pair. Inputs: {group.task.split_name(_split(group.task))}. Of inputs longer than {MAX_TOKENS} "
                "tokens the last ones are shown."
            )
    if not section.details:
        return None
    return section


def _split(task: Task) -> str:
    """The most informative split, which need not be among those that were scored."""
    return in_order(task.splits)[0]


def _drawings(entry: Entry, label: str, draft: Draft) -> list:
    """The figures of the examples of one run: one for each layer and kind of matrix."""
    run, model = load_model(entry.folder)
    (batch,) = draws(run.task, _split(run.task), EXAMPLES, seed=run.seed, purpose="look")
    drawings = []
    for i in range(EXAMPLES):
        for layer in look(model, batch, sample=i, task=run.task):
            for kind, panels in matrices(layer).items():
                for _, values, _, _ in panels:
                    if not np.isfinite(values).all():
                        raise ValueError("its numbers are not finite")
                title = f"Input {i + 1}, {layer.name}: {kind}."
                if len(panels) > MAX_MATRICES:
                    title += f" The first {MAX_MATRICES} of {len(panels)}."
                first_panels = panels[:MAX_MATRICES]
                figure = figures.heat(first_panels, label=kind, columns=3, numbers=False)
                name = slug(label, entry.run.seed, "example", i + 1, layer.name, kind)
                drawings.append(draft.add(name, figure, title))
    return drawings


def matrices(layer: LayerLook) -> dict[str, list[Panel]]:
    """All matrices of a layer by kind: attention of each head, relations, symbols of each symbolic head."""
    attention: list[Panel] = []
    relations: list[Panel] = []
    symbols: list[Panel] = []
    queries, keys = layer.receivers[-MAX_TOKENS:], layer.senders[-MAX_TOKENS:]
    for group in layer.groups:
        for values in group.attention[:, -MAX_TOKENS:, -MAX_TOKENS:]:
            attention.append((f"head {len(attention) + 1} ({group.kind})", values, queries, keys))
        if group.relations is not None:
            for values in group.relations[:, -MAX_TOKENS:, -MAX_TOKENS:]:
                relations.append((f"relation {len(relations) + 1}", values, queries, keys))
        if group.assignments is not None:
            for values in group.assignments.transpose(1, 0, 2):
                numbers = [""] * values.shape[1]  # a name for the first symbol and each eighth
                for i in (0, *range(7, len(numbers), 8)):
                    numbers[i] = str(i + 1)
                symbols.append((f"symbols, head {len(symbols) + 1}", values[-MAX_TOKENS:], keys, numbers))
    panels = {"attention": attention, "relations": relations, "symbols": symbols}
    return {kind: of_kind for kind, of_kind in panels.items() if of_kind}
