"""JSON and YAML files, read strictly: no field twice, no aliases, no tags that would build objects."""

import functools
import json
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from polyhead.spec.values import one_line


def read_values(path: str | pathlib.Path) -> Any:
    """The JSON or YAML values in a file.  Raises ValueError in one line if it cannot be read."""
    import yaml

    path = pathlib.Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.loads(text, object_pairs_hook=_unique)
        return yaml.load(text, Loader=_yaml_loader())
    except (OSError, RecursionError) as error:
        reason = getattr(error, "strerror", "it is nested too deeply")
        raise ValueError(f"{path}: cannot be read ({reason})") from None
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: not valid {path.suffix[1:].upper() or 'YAML'} ({one_line(error)})") from None


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these fields.  Raises ValueError for a field that is given twice: parsers keep the last value."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name!r} is given twice")
        values[name] = value
    return values


@functools.cache
def _yaml_loader() -> Any:
    """YAML in which 3e-4 is a number, as people write it, without aliases and fields that are given twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            # A few lines of aliases of aliases can stand for billions of values, or for a list that contains itself.
            if self.check_event(yaml.AliasEvent):
                raise ValueError("aliases are not read: write the value again")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            return _unique(self.construct_pairs(node, deep))

    number = re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, None)
    return Loader
