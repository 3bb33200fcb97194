"""The README as a package index shows it: links and pictures point to the repository, at the tag of this version."""

import pathlib
import re
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def absolute(text: str, source: str, version: str) -> str:
    """`text` with every relative link outside code made absolute: pages at GitHub, pictures as they are."""
    raw = source.replace("https://github.com/", "https://raw.githubusercontent.com/")

    def link(found: re.Match[str]) -> str:
        picture, words, path = found.groups()
        place = f"{raw}/v{version}" if picture else f"{source}/blob/v{version}"
        return f"{picture}[{words}]({place}/{path})"

    parts = re.split(r"^(```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)  # the odd ones are code
    return "".join(part if place % 2 else RELATIVE.sub(link, part) for place, part in enumerate(parts))


class Readme(MetadataHookInterface):
    """Called by hatchling."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = pathlib.Path(self.root, "README.md").read_text(encoding="utf-8")
        whole = absolute(text, metadata["urls"]["Source"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": whole}
