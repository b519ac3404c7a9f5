"""The demo's conversation, against a front end over fake workers."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from services.demo import QUESTIONS, chat
from services.errors import CommandError
from services.membership import MembershipUpdate
from services.serve import ReadyService
from tests.services.launch.test_frontend import raw_front_end, settings, tokenizer_folder, workers

__all__ = ["tokenizer_folder"]


async def test_shows_answers_and_what_each_turn_took(tokenizer_folder: Path) -> None:
    async with workers() as addresses, raw_front_end(settings(tokenizer_folder)) as front_end:
        front_end.tell(MembershipUpdate(workers=addresses))
        await asyncio.wait_for(front_end.ready(), 20)
        port = int(front_end.url.rsplit(":", 1)[1])
        output = io.StringIO()
        service = ReadyService(host="127.0.0.1", port=port, model="fake-model")
        await asyncio.to_thread(chat, service, output)
    shown = output.getvalue()
    for question in QUESTIONS:
        assert f"you: {question}" in shown
    assert shown.count("tokens, ") == len(QUESTIONS)
    assert shown.count("transferred ") == len(QUESTIONS)
    assert "first token 0 ms" not in shown


def test_a_service_that_is_gone_is_a_clear_error() -> None:
    service = ReadyService(host="127.0.0.1", port=1, model="fake-model")
    with pytest.raises(CommandError, match="the connection to the service broke"):
        chat(service, io.StringIO())
