"""YAML as plain data, from files that nobody vouches for: small, shallow, every key once, nothing that refers to itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

# What a file may have, counted as if every alias stood written out. A rule is some eight values.
BYTES, VALUES, DEPTH = 1 << 18, 10_000, 20
_MERGE = "tag:yaml.org,2002:merge"


class PlainDataError(ValueError):
    """What is wrong with a file: the words behind its name."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, but for keys that stand twice, of which it would silently take the last, and for merges."""

    def flatten_mapping(self, node: MappingNode) -> None:
        """Puts merged keys in front of a mapping's own, the first merge last: of two equal keys the later one stands.

        YAML 1.1's order. PyYAML 6.0.4 has another where a merged mapping itself merges, or several have the same key.
        """
        own: list[tuple[Node, Node]] = []
        merged: list[list[tuple[Node, Node]]] = []
        for key, value in node.value:
            if key.tag != _MERGE:
                own.append((key, value))
                continue
            for part in value.value if isinstance(value, SequenceNode) else [value]:
                if not isinstance(part, MappingNode):
                    line = part.start_mark.line + 1
                    raise PlainDataError(f": a {part.id} is merged in line {line}; only mappings can be")
                self.flatten_mapping(part)
                merged.append(part.value)
        node.value = [pair for pairs in reversed(merged) for pair in pairs] + own

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            # Before merges are put in, which a key of one's own may well overrule.
            name = "<<" if key.tag == _MERGE else self.construct_object(key, deep=True)
            if not isinstance(name, (str, int, float, bool, type(None))):
                raise PlainDataError(f": the key in line {key.start_mark.line + 1} is no plain word")
            if name in seen:
                raise PlainDataError(f": key {name!r} stands twice (line {key.start_mark.line + 1}); write every key once")
            seen.add(name)
        return super().construct_mapping(node, deep)


def _check(values: int, depth: int) -> None:
    if values > VALUES:
        raise PlainDataError(
            f" has more than {VALUES:,} values, aliases written out, where a rule has some eight; write globs"
        )
    if depth > DEPTH:
        raise PlainDataError(f" is nested deeper than {DEPTH} levels, aliases written out; a policy has four")


def _check_size(text: str) -> None:
    """Values and levels as they stand there, before any of them is built: libyaml counts ten times as fast as they are."""
    values = depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        values += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent)
        # A value in a list is a level deeper than the list.
        _check(values, depth + isinstance(event, (yaml.ScalarEvent, yaml.AliasEvent)))
        depth -= isinstance(event, yaml.CollectionEndEvent)


def _children(node: Node) -> list[Node]:
    if isinstance(node, MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, SequenceNode) else []


def _written_out(node: Node, known: dict[int, tuple[int, int]], above: set[int]) -> tuple[int, int]:
    """Values and levels of a node with its aliases written out. No recursion is deeper than composing was, or the limit."""
    if id(node) in known:
        return known[id(node)]
    if id(node) in above:
        raise PlainDataError(f": the anchor in line {node.start_mark.line + 1} refers to itself")
    _check(0, len(above))
    above.add(id(node))
    parts = [_written_out(child, known, above) for child in _children(node)]
    above.remove(id(node))
    found = 1 + sum(values for values, _ in parts), 1 + max((depth for _, depth in parts), default=0)
    _check(*found)
    known[id(node)] = found
    return found


def read_plain(path: Path) -> Any:
    """The content of a YAML or JSON file; None where it is empty.

    Raises:
        PlainDataError: more than 256 kB, 10,000 values or 20 levels, a key twice, a tag that builds an object, an anchor
            that refers to itself, no YAML, or no UTF-8. OSError: it cannot be opened.
    """
    with path.open("rb") as file:
        content = file.read(BYTES + 1)
    if len(content) > BYTES:
        raise PlainDataError(f" is larger than {BYTES // 1024} kB, which no policy is; is it the right file?")
    try:
        text = content.decode("utf-8")
        _check_size(text)
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None or (isinstance(node, ScalarNode) and not node.value):
            return None
        _written_out(node, {}, set())
        return loader.construct_document(node)
    except PlainDataError:
        raise
    except yaml.constructor.ConstructorError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise PlainDataError(
            f": {error.problem} (line {line}); a policy is plain data: no tags that build Python objects"
        ) from None
    except UnicodeDecodeError as error:
        raise PlainDataError(f" is no text in UTF-8 ({error})") from None
    except yaml.YAMLError as error:
        raise PlainDataError(f" is no YAML: {error}") from None
    except ValueError as error:  # of a date that is none, or of a number of ten thousand digits
        raise PlainDataError(f": a value cannot be read: {error}") from None
