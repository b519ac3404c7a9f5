"""The index against a naive model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.prefix_index import ConversationPrefixes, PrefixIndex
from transfer.identity import Incarnation

WORKERS = tuple(Incarnation(instance=f"w{i}", nonce="0") for i in range(4))


def chain(*path: int) -> tuple[bytes, ...]:
    """Keys that depend on everything before them, as those of a hash chain do."""
    return tuple(bytes(path[: end + 1]).ljust(8, b".") for end in range(len(path)))


CHAINS = st.lists(st.integers(0, 1), max_size=5).map(lambda path: chain(*path))
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("insert", "remove", "forget")), st.integers(0, len(WORKERS) - 1), CHAINS
    ),
    max_size=25,
)


@given(STEPS, CHAINS)
def test_match_is_the_leading_run_that_a_worker_holds(
    steps: list[tuple[str, int, tuple[bytes, ...]]], query: tuple[bytes, ...]
) -> None:
    index = PrefixIndex()
    model: list[set[bytes]] = [set() for _ in WORKERS]
    for verb, number, keys in steps:
        if verb == "insert":
            index.insert(WORKERS[number], keys, 1000)
            model[number] |= set(keys)
        elif verb == "remove":
            index.remove(WORKERS[number], keys)
            model[number] -= set(keys)
        else:
            index.forget(WORKERS[number])
            model[number] = set()
        index.check()
    depths = index.match(query)
    for worker, held in zip(WORKERS, model, strict=True):
        expected = 0
        while expected < len(query) and query[expected] in held:
            expected += 1
        assert depths.get(worker, 0) == expected


def test_leaves_are_forgotten_before_roots_and_old_before_new() -> None:
    index = PrefixIndex()
    index.insert(WORKERS[0], chain(0, 1, 2, 3), 6)
    index.insert(WORKERS[0], chain(7, 8, 9), 6)
    assert index.match(chain(0, 1, 2, 3)) == {WORKERS[0]: 3}
    assert index.match(chain(7, 8, 9)) == {WORKERS[0]: 3}
    assert index.held_blocks(WORKERS[0]) == 6
    index.check()


def test_a_slot_of_a_forgotten_worker_is_used_again() -> None:
    index = PrefixIndex()
    index.insert(WORKERS[0], chain(0), 10)
    index.forget(WORKERS[0])
    index.insert(WORKERS[1], chain(5), 10)
    assert index.match(chain(0)) == {}
    assert index.match(chain(5)) == {WORKERS[1]: 1}
    assert len(index) == 1


@given(st.lists(st.tuples(st.sampled_from("abcdef"), CHAINS), max_size=30))
def test_counts_of_conversations_equal_a_recount(
    records: list[tuple[str, tuple[bytes, ...]]],
) -> None:
    prefixes = ConversationPrefixes(12)
    for conversation, keys in records:
        prefixes.record(conversation, keys)
        prefixes.check()


def test_a_preamble_is_what_many_conversations_have() -> None:
    prefixes = ConversationPrefixes(1000)
    for number in range(5):
        prefixes.record(f"c{number}", chain(1, 2, 10 + number))
    assert prefixes.shared_blocks(chain(1, 2, 10), 4) == 2
    assert prefixes.shared_blocks(chain(1, 2, 10), 5) == 0
    prefixes.record("c0", chain(1, 2, 10, 3))
    assert prefixes.shared_blocks(chain(1, 2, 10), 4) == 2
