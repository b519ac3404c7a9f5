"""The official client against a real server."""

from __future__ import annotations

from tests.services.http.conftest import FrontEnd


async def test_chat(greeter: FrontEnd) -> None:
    answer = await greeter.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}]
    )
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(greeter.ids("hello")) + 1


async def test_chat_stream(greeter: FrontEnd) -> None:
    stream = await greeter.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None


async def test_completion(greeter: FrontEnd) -> None:
    answer = await greeter.openai.completions.create(model="tiny", prompt="hi")
    assert answer.choices[0].text == "hello"
