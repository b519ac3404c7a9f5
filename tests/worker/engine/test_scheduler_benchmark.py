"""The benchmark of the scheduler measures what it says."""

from __future__ import annotations

from benchmarks.scheduler import decoding


def test_every_sequence_decodes_while_steps_are_measured() -> None:
    engine = decoding(8, 300, 100)
    before = engine.decode_tokens
    for _ in range(10):
        engine.turn()
    assert engine.decode_tokens - before == 80
    pairs = zip(engine.scheduler_ns, engine.turn_ns, strict=True)
    assert all(0 < scheduler <= turn for scheduler, turn in pairs)
