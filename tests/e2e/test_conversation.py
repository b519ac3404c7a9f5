"""A ten-turn chat: what was computed is not computed again, what was transferred not sent again."""

from __future__ import annotations

import pytest

from tests.e2e.client import Client

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.timeout(300)]

BLOCK = 64
TURNS = 10
# SmolLM2 in float32: 30 layers, K and V, 3 heads of 64.
BLOCK_BYTES = BLOCK * 30 * 2 * 3 * 64 * 4


def test_ten_turns_compute_and_transfer_only_what_is_missing(client: Client) -> None:
    messages: list[dict[str, str]] = []
    previous_prompt: list[int] = []
    held: list[int] = []
    late_dials = client.total("pageferry_transfer_late_dials")
    assert client.by_instance("pageferry_transfer_pairs") == {"context-0": 1, "generation-0": 1}
    for turn in range(TURNS):
        messages.append(
            {"role": "user", "content": f"Turn {turn}: tell me one more thing about the sea."}
        )
        answer = client.chat(
            messages,
            max_tokens=24,
            temperature=0,
            cache_salt="ten turns",
            return_token_ids=True,
            user="ten turns",
        )
        prompt = answer["prompt_token_ids"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= len(previous_prompt) - BLOCK
        assert cached < len(prompt)

        # The generation worker holds the last prompt and all but the last token of its answer.
        common = next(
            (i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b),
            min(len(held), len(prompt)),
        )
        missing_blocks = -(-len(prompt) // BLOCK) - common // BLOCK
        sent = answer["pageferry"]["transferred_bytes"]
        assert sent <= missing_blocks * BLOCK_BYTES
        assert sent >= (-(-len(prompt) // BLOCK) - -(-len(held) // BLOCK)) * BLOCK_BYTES
        if turn == 0:
            assert sent == missing_blocks * BLOCK_BYTES

        previous_prompt = prompt
        output = answer["choices"][0]["token_ids"]
        held = [*prompt, *output[:-1]]
        messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        )
    assert client.total("pageferry_transfer_late_dials") == late_dials
    assert client.total("pageferry_transfer_busy_bytes") > 0
    assert client.total("pageferry_transfer_busy_seconds") > 0
