"""Stop strings against the naive cut, in every way of cutting the text into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.text.stop_strings import StopScanner, StopStrings


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Cut at the first stop string to be completed; of several that end there, at the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def scan(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    """Released pieces, what was left at the end included, and whether a stop string was found."""
    scanner = StopScanner(StopStrings(stops))
    released = []
    for piece in pieces:
        result = scanner.push(piece)
        released.append(result.text)
        if result.is_match:
            return released, True
    return [*released, scanner.flush()], False


STOPS = st.lists(st.text("ab\u00e9", min_size=1, max_size=8), max_size=5)


@given(st.lists(st.text("ab\u00e9", max_size=4), max_size=20), STOPS)
def test_pieces_add_up_to_the_naive_cut(pieces: list[str], stops: list[str]) -> None:
    released, is_match = scan(pieces, stops)
    assert ("".join(released), is_match) == naive("".join(pieces), stops)


@given(st.lists(st.text("ab", max_size=4), max_size=20), STOPS)
def test_only_what_may_become_a_stop_string_is_held(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(StopStrings(stops))
    seen = released = ""
    for piece in pieces:
        seen += piece
        result = scanner.push(piece)
        released += result.text
        if result.is_match:
            return
        held = seen.removeprefix(released)
        suffixes = [seen[start:] for start in range(len(seen) + 1)]
        longest = next(s for s in suffixes if not s or any(stop.startswith(s) for stop in stops))
        assert held == longest


TEXT = "The quick br\u00f6wn f\U0001f98ax stops; the stop is near. stop!"


@pytest.mark.parametrize("length", range(1, 9))
def test_a_stop_string_of_any_length_at_any_offset(length: int) -> None:
    for start in range(len(TEXT) - length + 1):
        stops = [TEXT[start : start + length]]
        expected = TEXT[: TEXT.index(stops[0])]
        for size in (1, 2, 3, 7, len(TEXT)):
            pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
            released, is_match = scan(pieces, stops)
            assert is_match
            assert "".join(released) == expected


def test_without_stop_strings_everything_passes() -> None:
    assert scan(["a", "b"], []) == (["a", "b", ""], False)


def test_after_a_match_nothing_passes() -> None:
    scanner = StopScanner(StopStrings(["b"]))
    assert scanner.push("abc").text == "a"
    assert scanner.push("def").text == ""
    assert scanner.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(["a", ""])


def test_cost_is_linear_in_the_text_for_self_similar_stop_strings() -> None:
    scanner = StopScanner(StopStrings(["a" * 1000 + "b"]))
    released = "".join(scanner.push("a").text for _ in range(50_000)) + scanner.flush()
    assert len(released) == 50_000
