"""The HTML of an explore page: its text, and the equations of its numbers."""

import base64
import zlib

from polyhead.pages.document import document, escape, resource
from polyhead.pages.explore.data import PageContents

SCORE = "q<sub>h,i</sub> · k<sub>h,j</sub> / √d"
LEAD = """<p class="lead">Point at a token i: colours show which tokens j it reads, and the table the <b>latent code</b>
of a pair, one number per head: how token i reads token j.</p>"""
CODES = {
    "softmax": f"softmax over j of {SCORE}: the share of head h that token i gives to token j; the shares of a head "
    "add up to 1 over the tokens it may look at",
    "rms_heads": f"{SCORE}, divided by its root mean square over the heads: tokens do not compete, only the pattern "
    "over heads counts",
    "identity": f"{SCORE}: the score itself, of either sign and any size",
    "softmax_rms_heads": f"softmax over j of {SCORE}, then divided by its root mean square over the heads",
    "softmax_heads": f"softmax over h of {SCORE}: the heads compete for the pair, and its code adds up to 1",
    "act": f"act({SCORE}), a function of the score alone: tokens do not compete",
    "own": "what the function that these heads were given makes of q<sub>h,i</sub> and k<sub>h,j</sub>",
}
"""The equation of the code of a pair, by `normalise`."""
MORE = {
    "bias": "To the scores of this model a bias of the pair is added, for example of its positions.",
    "scale": "In the scores of this model another factor is in the place of 1 / √d.",
}
"""What is different in a model's scores."""
RELATIONS = (
    "relation<sub>r</sub>(i → j) = act(q<sub>r,i</sub> · k<sub>r,j</sub> / √p): how the two tokens compare; relational "
    "heads read these and symbols, not what token j holds."
)
SYMBOLS = "symbols(j): how much of each learned symbol stands for token j, by head of symbolic attention."
HYLA = "In HYLA heads the code is what makes the value network of the pair: pairs with one code are treated alike."


def html(found: PageContents, title: str = "") -> str:
    """The whole HTML."""
    heading = f"What {title or 'the model'} reads"
    held = {"tokens": found.tokens, "causal": found.causal, "layers": found.layers}
    body = [
        f'<header><div><p class="kicker">polyhead explore</p><h1>{escape(heading)}</h1>',
        f'<p class="meta">{escape(found.facts)}. {escape(found.note)}</p>{LEAD}</div>{_words(found)}</header>',
        "<noscript><p>This page needs JavaScript.</p></noscript>",
        resource("explore/explore.html"),
    ]
    numbers = base64.b64encode(zlib.compress(found.numbers, 9)).decode()
    script = resource("explore/explore.js")
    data = {"explored": held}
    return document(heading, body, style="explore/explore.css", data=data, numbers=numbers, scripts=[script])


def _words(found: PageContents) -> str:
    """The explanation of the page, with the equations of its model."""
    groups = [group for layer in found.layers for group in layer["groups"]]
    lines = [f"code<sub>h</sub>(i → j) = {CODES[way]}." for way in found.normalised if way not in MORE]
    lines += [text for way, text in MORE.items() if way in found.normalised]
    lines += [RELATIONS] * any(group["relations"] for group in groups)
    lines += [SYMBOLS] * any(group["symbols"] for group in groups)
    lines += [HYLA] * any(group["kind"] == "hyla" for group in groups)
    return f'<ul class="equations">{"".join(f"<li>{line}</li>" for line in lines)}</ul>'
