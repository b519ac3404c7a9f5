"""Finds stop strings in text that arrives in pieces.

Invariant: text is released exactly up to the longest suffix that could still grow into a stop
string, and no character of a stop string that was found is ever released. The first stop string to
be *completed* wins, and of several completed by the same character the longest, so that the result
depends on the text alone and never on how it was cut into pieces. An Aho-Corasick automaton makes
the cost linear in the text, whatever the stop strings are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scan:
    """Outcome of one piece of text: what may be released, and whether a stop string was completed
    in it.
    """

    text: str
    is_match: bool


class StopStrings:
    """Automaton of a set of stop strings: immutable, shared by all choices of a request.

    Node 0 is the root; the depth of a node is the number of characters that would begin a stop
    string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string: it would stop before the first character."""
        self._edges: list[dict[str, int]] = [{}]
        self._depths: list[int] = [0]
        self._matches: list[int] = [0]
        for stop in stops:
            if not stop:
                raise ValueError(
                    "stop string: expected at least one character, got an empty string"
                )
            self._add(stop)
        self._fallbacks = self._link()

    def __bool__(self) -> bool:
        return len(self._depths) > 1

    def _add(self, stop: str) -> None:
        node = 0
        for depth, character in enumerate(stop, start=1):
            following = self._edges[node].get(character)
            if following is None:
                following = self._edges[node][character] = len(self._edges)
                self._edges.append({})
                self._depths.append(depth)
                self._matches.append(0)
            node = following
        self._matches[node] = len(stop)

    def _link(self) -> list[int]:
        """Fallback of every node: the node of its longest proper suffix. Also hands match lengths
        down to it.
        """
        fallbacks = [0] * len(self._edges)
        queue = deque(self._edges[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._edges[node].items():
                fallback = fallbacks[node]
                while fallback and character not in self._edges[fallback]:
                    fallback = fallbacks[fallback]
                fallbacks[child] = self._edges[fallback].get(character, 0)
                queue.append(child)
            self._matches[node] = self._matches[node] or self._matches[fallbacks[node]]
        return fallbacks

    def step(self, node: int, character: str) -> int:
        """Node after ``character``."""
        while node and character not in self._edges[node]:
            node = self._fallbacks[node]
        return self._edges[node].get(character, 0)

    def match_length(self, node: int) -> int:
        """Length of the longest stop string that ends here; 0 when none does."""
        return self._matches[node]

    def depth(self, node: int) -> int:
        """Characters before this point that may belong to a stop string."""
        return self._depths[node]


class StopScanner:
    """Text of one choice on its way to the client."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node = 0
        self._held = ""
        self._is_over = False

    def push(self, text: str) -> Scan:
        """Scan the next piece. After a match every further piece is dropped."""
        if self._is_over:
            return Scan("", is_match=True)
        if not self._stops:
            return Scan(text, is_match=False)
        node = self._node
        for end, character in enumerate(text, start=1):
            node = self._stops.step(node, character)
            matched = self._stops.match_length(node)
            if matched:
                self._is_over = True
                seen = self._held + text[:end]
                self._held = ""
                return Scan(seen[: len(seen) - matched], is_match=True)
        self._node = node
        seen = self._held + text
        released = len(seen) - self._stops.depth(node)
        self._held = seen[released:]
        return Scan(seen[:released], is_match=False)

    def flush(self) -> str:
        """Text still held when the choice ends without a stop string."""
        held, self._held, self._node = self._held, "", 0
        return held
