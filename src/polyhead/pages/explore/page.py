"""The HTML of an explore page: its text, and the equations of its numbers."""

import base64
import zlib

from markupsafe import Markup

from polyhead.pages.document import HtmlPage, render, resource
from polyhead.pages.explore.data import PageContents

SCORE = "q<sub>h,i</sub> · k<sub>h,j</sub> / √d"
# The equation of the code of a pair, by `normalise`.
CODES = {
    "softmax": f"softmax over j of {SCORE}: the share of head h that token i gives to token j; the shares of a head "
    "add up to 1 over the tokens it may look at, with sinks to less; a soft cap limits the scores before",
    "rms_heads": f"{SCORE}, divided by its root mean square over the heads: tokens do not compete, only the pattern "
    "over heads counts",
    "identity": f"{SCORE}: the score itself, of either sign and any size",
    "softmax_rms_heads": f"softmax over j of {SCORE}, then divided by its root mean square over the heads",
    "softmax_heads": f"softmax over h of {SCORE}: the heads compete for the pair, and its code adds up to 1",
    "act": f"act({SCORE}), a function of the score alone: tokens do not compete",
    "own": "what the function that these heads were given makes of q<sub>h,i</sub> and k<sub>h,j</sub>",
}
# What is different in a model's scores.
MORE = {
    "bias": "To the scores of this model a bias of the pair is added, for example of its positions.",
    "scale": "In the scores of this model another factor is in the place of 1 / √d.",
}
RELATIONS = (
    "relation<sub>r</sub>(i → j) = act(q<sub>r,i</sub> · k<sub>r,j</sub> / √p): how the two tokens compare; relational "
    "heads read these and symbols, not what token j holds."
)
SYMBOLS = "symbols(j): how much of each learned symbol stands for token j, by head of symbolic attention."
HYLA = "In HYLA heads the code is what makes the value network of the pair: pairs with one code are treated alike."


def explore_page(contents: PageContents, title: str = "") -> HtmlPage:
    """The whole page; `title`: the name of the model."""
    heading = f"What {title or 'the model'} reads"
    values = {
        "heading": heading,
        "contents": contents,
        "equations": map(Markup, _equations(contents)),
        "explored": {"tokens": contents.tokens, "causal": contents.causal, "layers": contents.layers},
        "numbers": base64.b64encode(zlib.compress(contents.numbers, 9)).decode(),
        "script": Markup(resource("explore/explore.js")),
    }
    return render("pages/explore/explore.html", values, title=heading, style="explore/explore.css")


def _equations(contents: PageContents) -> list[str]:
    """The equations of the model's codes, and what the page says of relations, symbols and HYLA."""
    lines = []
    for key in contents.normalised:
        if key in CODES:
            lines.append(f"code<sub>h</sub>(i → j) = {CODES[key]}.")
    for key, text in MORE.items():
        if key in contents.normalised:
            lines.append(text)
    # Each sentence once, however many groups have it.
    sentences: dict[str, None] = {}
    for group in contents.groups:
        if group["relations"]:
            sentences[RELATIONS] = None
        if group["symbols"]:
            sentences[SYMBOLS] = None
        if group["kind"] == "hyla":
            sentences[HYLA] = None
    return [*lines, *sentences]
