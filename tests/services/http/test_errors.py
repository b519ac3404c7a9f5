"""Every bad request gets 400 (or the status that says it better) in OpenAI's envelope, and none
reaches the cluster.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from services.http.errors import ApiError
from services.http.schemas import parse_chat, parse_completion
from services.http.settings import HttpSettings
from services.orchestration.api import InvalidRequest, NotReady, Overloaded
from tests.services.http.conftest import FrontEnd, StartFrontEnd

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "hi"}


def check(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, after its envelope was checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    content = response.json()
    assert set(content) == {"error"}
    error: dict[str, Any] = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [USER], **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hi", **fields}


BROKEN_BODIES: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("cut short", b'{"model": "tiny", "messages": [{"role"'),
    ("not JSON", b"hello"),
    ("a list", b"[1, 2]"),
    ("a string", b'"hi"'),
    ("null", b"null"),
    ("a number", b"3"),
    ("trailing text", b'{"model": "tiny"} x'),
    ("NaN", b'{"model": "tiny", "messages": [], "temperature": NaN}'),
    ("Infinity", b'{"model": "tiny", "temperature": -Infinity}'),
    ("not UTF-8", b'{"model": "\xff\xfe"}'),
    ("leading surrogate", b'{"model": "tiny", "prompt": "\\ud800"}'),
    ("trailing surrogate", b'{"model": "tiny", "prompt": "a\\udc00b"}'),
    ("swapped surrogates", b'{"model": "tiny", "prompt": "\\udc00\\ud800"}'),
    ("deep list", b'{"model": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
    ("deep object", b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
    ("huge number", b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 10_000 + b"}"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_body_that_is_no_json_object(greeter: FrontEnd, path: str) -> None:
    for name, body in BROKEN_BODIES:
        response = await greeter.client.post(
            path, content=body, headers={"content-type": "application/json"}
        )
        error = check(response, 400)
        assert error["type"] == "invalid_request_error", name
        assert error["code"] in ("invalid_json", "missing_required_parameter"), name
    assert greeter.service.requests == []
    answer = await greeter.client.post(CHAT, json=chat())
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
async def test_a_wrong_content_type(greeter: FrontEnd, content_type: str) -> None:
    response = await greeter.client.post(
        CHAT, content=json.dumps(chat()), headers={"content-type": content_type}
    )
    assert check(response, 400)["code"] == "invalid_content_type"


async def test_content_types_of_json(greeter: FrontEnd) -> None:
    for content_type in ("application/json; charset=utf-8", "Application/JSON", "a/b+json"):
        response = await greeter.client.post(
            CHAT, content=json.dumps(chat()), headers={"content-type": content_type}
        )
        assert response.status_code == 200
    assert (await greeter.client.post(CHAT, content=json.dumps(chat()))).status_code == 200


async def test_a_compressed_body_is_refused(greeter: FrontEnd) -> None:
    response = await greeter.client.post(CHAT, json=chat(), headers={"content-encoding": "gzip"})
    assert check(response, 400)["code"] == "invalid_content_encoding"


async def test_a_body_that_is_too_large(start: StartFrontEnd) -> None:
    async with start(settings=HttpSettings(max_body_bytes=10_000)) as served:
        big = json.dumps(completion(prompt="a" * 20_000)).encode()
        assert check(await served.client.post(COMPLETIONS, content=big), 413)["code"] == (
            "body_too_large"
        )

        async def parts() -> Any:
            for at in range(0, len(big), 1000):
                yield big[at : at + 1000]

        # Without a content-length the size shows only while the body is read.
        check(await served.client.post(COMPLETIONS, content=parts()), 413)
        assert (await served.client.post(COMPLETIONS, json=completion())).status_code == 200


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"model": "tiny"}, "messages"),
    ({"messages": [USER]}, "model"),
    (chat(model=""), "model"),
    (chat(model=7), "model"),
    (chat(messages=[]), "messages"),
    (chat(messages="hi"), "messages"),
    (chat(messages=None), "messages"),
    (chat(messages=["hi"]), "messages[0]"),
    (chat(messages=[{"content": "hi"}]), "messages[0].role"),
    (chat(messages=[{"role": "robot", "content": "hi"}]), "messages[0].role"),
    (chat(messages=[{"role": "user", "content": None}]), "messages[0].content"),
    (chat(messages=[{"role": "user", "content": 7}]), "messages[0].content"),
    (chat(messages=[USER, {"role": "user", "content": ["x"]}]), "messages[1].content[0]"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        "messages[0].content[0]",
    ),
    (
        chat(messages=[{"role": "user", "content": [{"type": "text"}]}]),
        "messages[0].content[0].text",
    ),
    (chat(temperature=-0.1), "temperature"),
    (chat(temperature=2.1), "temperature"),
    (chat(temperature="1"), "temperature"),
    (chat(temperature=1e999), "temperature"),
    (chat(top_p=1.5), "top_p"),
    (chat(top_k=-2), "top_k"),
    (chat(top_k=1.5), "top_k"),
    (chat(min_p=2), "min_p"),
    (chat(n=0), "n"),
    (chat(n=17), "n"),
    (chat(n=10**6), "n"),
    (chat(n=True), "n"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(max_tokens=-1), "max_tokens"),
    (chat(max_tokens="7"), "max_tokens"),
    (chat(max_tokens=7.5), "max_tokens"),
    (chat(max_completion_tokens=0), "max_completion_tokens"),
    (chat(max_tokens=3, max_completion_tokens=4), "max_tokens"),
    (chat(presence_penalty=3), "presence_penalty"),
    (chat(frequency_penalty=-3), "frequency_penalty"),
    (chat(repetition_penalty=0), "repetition_penalty"),
    (chat(repetition_penalty=1e-37), "repetition_penalty"),
    (chat(repetition_penalty=1e-300), "repetition_penalty"),
    (chat(repetition_penalty=1e300), "repetition_penalty"),
    (chat(temperature=1e300), "temperature"),
    (chat(min_p=1e300), "min_p"),
    (chat(presence_penalty=1e300), "presence_penalty"),
    (chat(frequency_penalty=-1e300), "frequency_penalty"),
    (chat(logit_bias={"1": -1e300}), "logit_bias"),
    (chat(stop=7), "stop"),
    (chat(stop=""), "stop"),
    (chat(stop=["a", ""]), "stop"),
    (chat(stop=["a", 7]), "stop[1]"),
    (chat(stop=["a"] * 17), "stop"),
    (chat(stop="a" * 513), "stop"),
    (chat(stop_token_ids=[10**9]), "stop_token_ids"),
    (chat(stop_token_ids=["a"]), "stop_token_ids[0]"),
    (chat(min_tokens=5, max_tokens=4), "min_tokens"),
    (chat(logit_bias={"a": 1}), "logit_bias"),
    (chat(logit_bias={"-1": 1}), "logit_bias"),
    (chat(logit_bias={"\u0663": 1}), "logit_bias"),
    (chat(logit_bias={"999999": 1}), "logit_bias"),
    (chat(logit_bias={"1": 101}), "logit_bias"),
    (chat(logit_bias={"1": "x"}), "logit_bias.1"),
    (chat(logit_bias=[1]), "logit_bias"),
    (chat(logprobs=5), "logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(top_logprobs=2), "top_logprobs"),
    (chat(seed="x"), "seed"),
    (chat(stream="yes"), "stream"),
    (chat(stream_options={"include_usage": True}), "stream_options"),
    (chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (chat(user=7), "user"),
    (chat(cache_salt=""), "cache_salt"),
    (chat(tools=[{"type": "function"}]), "tools"),
    (chat(tools=["x"], tool_choice="none"), "tools[0]"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(chat_template_kwargs={"messages": []}), "messages"),
    (chat(response_format={"type": "json_object"}), "response_format"),
    (chat(functions=[{"name": "f"}]), "functions"),
    (chat(modalities=["audio"]), "modalities"),
    (chat(store=True), "store"),
    (chat(echo=True), "echo"),
    (chat(prompt_logprobs=-1), "prompt_logprobs"),
    (chat(web_search_options={}), "web_search_options"),
    (chat(guided_json={"type": "object"}), "guided_json"),
    (chat(chat_template="{{ 1 }}"), "chat_template"),
]

BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"model": "tiny"}, "prompt"),
    (completion(prompt=None), "prompt"),
    (completion(prompt=""), "prompt"),
    (completion(prompt=[]), "prompt"),
    (completion(prompt=[[]]), "prompt"),
    (completion(prompt=[""]), "prompt"),
    (completion(prompt=["a", ""]), "prompt"),
    (completion(prompt=["a", 7]), "prompt"),
    (completion(prompt=7), "prompt"),
    (completion(prompt={"text": "a"}), "prompt"),
    (completion(prompt=[1, "a"]), "prompt"),
    (completion(prompt=[True]), "prompt"),
    (completion(prompt=[1.0]), "prompt"),
    (completion(prompt=[-1]), "prompt"),
    (completion(prompt=[10**6]), "prompt"),
    (completion(prompt=[10**30]), "prompt"),
    (completion(prompt=[[1], [None]]), "prompt"),
    (completion(prompt=["a"] * 129), "prompt"),
    (completion(prompt=["a"] * 65, n=2), "prompt"),
    (completion(logprobs=True), "logprobs"),
    (completion(logprobs=-1), "logprobs"),
    (completion(logprobs=21), "logprobs"),
    (completion(best_of=2), "best_of"),
    (completion(suffix="x"), "suffix"),
    (completion(echo=True), "echo"),
    (completion(max_tokens=0), "max_tokens"),
    (completion(prompt_embeds="AAAA"), "prompt_embeds"),
    (completion(n=10**6), "n"),
]


async def test_bad_values_are_refused_by_name(greeter: FrontEnd) -> None:
    table = [(CHAT, *row) for row in BAD_CHATS] + [(COMPLETIONS, *row) for row in BAD_COMPLETIONS]
    for path, body, param in table:
        response = await greeter.client.post(
            path,
            content=json.dumps(body).replace("Infinity", "1e999"),
            headers={"content-type": "application/json"},
        )
        error = check(response, 400)
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, (body, error)
    assert greeter.service.requests == []


async def test_parameters_that_ask_for_nothing_are_accepted(greeter: FrontEnd) -> None:
    nothing: dict[str, Any] = {
        "audio": None,
        "bad_words": [],
        "echo": False,
        "function_call": "none",
        "functions": [],
        "length_penalty": 1.0,
        "logit_bias": None,
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "n": None,
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "seed": None,
        "service_tier": "auto",
        "skip_special_tokens": True,
        "stop": None,
        "store": False,
        "stream": False,
        "stream_options": None,
        "suffix": None,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": None,
        "no_such_parameter": {"at": "all"},
    }
    assert (await greeter.client.post(CHAT, json=chat(**nothing))).status_code == 200
    body = completion(best_of=1, suffix="", echo=False, logprobs=None, max_tokens=None, nothing=1)
    assert (await greeter.client.post(COMPLETIONS, json=body)).status_code == 200


async def test_unknown_model_path_and_method(greeter: FrontEnd) -> None:
    error = check(await greeter.client.post(CHAT, json=chat(model="gpt")), 404)
    assert (error["code"], error["param"]) == ("model_not_found", None)
    assert "`gpt`" in error["message"]
    check(await greeter.client.get("/v1/models/gpt"), 404)
    assert check(await greeter.client.get("/v1/nothing"), 404)["code"] == "unknown_url"
    response = await greeter.client.get(CHAT)
    assert check(response, 405)["code"] == "method_not_supported"
    assert "POST" in response.headers["allow"]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "is_served"),
    [
        (255, None, True),
        (255, 1, True),
        (256, None, False),
        (257, None, False),
        (2560, None, False),
        (200, 56, True),
        (200, 57, False),
        (1, 10**9, False),
    ],
)
async def test_context_length(
    greeter: FrontEnd, prompt: int, max_tokens: int | None, *, is_served: bool
) -> None:
    body = completion(prompt=[5] * prompt, max_tokens=max_tokens)
    response = await greeter.client.post(COMPLETIONS, json=body)
    if is_served:
        assert response.status_code == 200
        return
    error = check(response, 400)
    assert error["code"] == "context_length_exceeded"
    assert "256" in error["message"]
    assert str(prompt) in error["message"]


async def test_a_conversation_beyond_the_context(greeter: FrontEnd) -> None:
    long = chat(messages=[{"role": "user", "content": "x" * 300}])
    error = check(await greeter.client.post(CHAT, json=long), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens"):
        await greeter.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x" * 300}]
        )


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "code", "retry_after"),
    [
        (Overloaded("full", 7), 429, "rate_limit_exceeded", "7"),
        (NotReady(("no worker",)), 503, "not_ready", "1"),
        (
            InvalidRequest("context_length_exceeded", "too long"),
            400,
            "context_length_exceeded",
            None,
        ),
    ],
)
async def test_refusals_of_the_cluster(
    start: StartFrontEnd,
    refusal: Exception,
    status: int,
    code: str,
    retry_after: str | None,
    *,
    is_stream: bool,
) -> None:
    async with start(refusal=refusal) as served:
        response = await served.client.post(CHAT, json=chat(stream=is_stream))
        assert check(response, status)["code"] == code
        assert response.headers.get("retry-after") == retry_after


async def test_a_template_that_refuses(start: StartFrontEnd) -> None:
    async with start(template="{{ raise_exception('roles must alternate') }}") as served:
        error = check(await served.client.post(CHAT, json=chat()), 400)
        assert "roles must alternate" in error["message"]
        assert error["param"] == "messages"
    async with start(template=None) as served:
        assert (
            "/v1/completions" in check(await served.client.post(CHAT, json=chat()), 400)["message"]
        )


async def test_a_bug_is_a_500_without_details(start: StartFrontEnd) -> None:
    async with start(refusal=RuntimeError("secret")) as served:
        response = await served.client.post(CHAT, json=chat())
        error = check(response, 500)
        assert error["type"] == "server_error"
        assert "secret" not in response.text
        assert served.metric("pageferry_http_requests_total", endpoint=CHAT, status="500") == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, completion(prompt="x" * 100_000, max_tokens=7)),
        (COMPLETIONS, completion(prompt=["hi", "x" * 100_000], max_tokens=7)),
        (CHAT, chat(messages=[{"role": "user", "content": "x" * 100_000}], max_tokens=7)),
        (CHAT, chat(messages=[USER] * 1_000, max_tokens=7)),
    ],
)
async def test_what_cannot_fit_is_refused_before_it_is_tokenized(
    greeter: FrontEnd, path: str, body: dict[str, Any]
) -> None:
    error = check(await greeter.client.post(path, json=body), 400)
    param = "messages" if path == CHAT else "prompt"
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "maximum context length is 256 tokens" in error["message"]
    assert f"in the {param}, 7 in the completion" in error["message"]
    assert "at least" in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        (CHAT, "messages", chat(messages=[USER] * 41)),
        (CHAT, "messages", chat(messages=[7] * 41)),
        (
            CHAT,
            "messages[1].content",
            chat(messages=[USER, {**USER, "content": [{"type": "text", "text": "a"}] * 41}]),
        ),
        (CHAT, "tools", chat(tools=[{}] * 41)),
        (CHAT, "logit_bias", chat(logit_bias={str(token): 0 for token in range(41)})),
        (COMPLETIONS, "stop_token_ids", completion(stop_token_ids=[1] * 41)),
        (COMPLETIONS, "stop", completion(stop=["a"] * 41)),
        (COMPLETIONS, "nobody_knows_this", completion(nobody_knows_this=[1] * 41)),
    ],
)
async def test_lists_that_would_take_long_to_check_are_refused_by_length(
    start: StartFrontEnd, path: str, field: str, body: dict[str, Any]
) -> None:
    async with start(settings=HttpSettings(max_items=40)) as served:
        error = check(await served.client.post(path, json=body), 400)
        assert (error["code"], error["param"]) == ("too_many_items", field)
        assert "at most 40 items, got 41" in error["message"]


async def test_prompts_are_bounded_by_the_model_and_not_by_the_length_of_lists(
    start: StartFrontEnd,
) -> None:
    async with start(settings=HttpSettings(max_items=40, max_choices=2)) as served:
        fits = await served.client.post(COMPLETIONS, json=completion(prompt=[5] * 200))
        assert fits.status_code == 200
        # Nobody looks at what the lists hold: None is neither a token nor a prompt.
        ids = check(
            await served.client.post(COMPLETIONS, json=completion(prompt=[None] * 300)), 400
        )
        assert (ids["code"], ids["param"]) == ("context_length_exceeded", "prompt")
        texts: list[Any] = ["a", None, None]
        several = check(await served.client.post(COMPLETIONS, json=completion(prompt=texts)), 400)
        assert (several["code"], several["param"]) == ("integer_above_max_value", "prompt")


@pytest.mark.parametrize(
    "messages",
    [
        [{**USER, "tool_calls": [1] * 41}],
        [{**USER, "tool_calls": [1] * 21}, {**USER, "content": [{}] * 21}],
        [{**USER, "nobody_knows_this": dict.fromkeys(map(str, range(41)))}],
    ],
)
async def test_items_within_messages_are_bounded_in_all(
    start: StartFrontEnd, messages: list[dict[str, Any]]
) -> None:
    async with start(settings=HttpSettings(max_items=40)) as served:
        error = check(await served.client.post(CHAT, json=chat(messages=messages)), 400)
        assert error["code"] == "too_many_items"
        assert error["param"].startswith("messages[")


@pytest.mark.parametrize(
    ("path", "field", "value", "param"),
    [
        (CHAT, "messages", [{**USER, "tool_calls": [1] * 40}], "messages[0].tool_calls[0]"),
        (CHAT, "messages", [7] * 40, "messages[0]"),
        (CHAT, "tools", [7] * 40, "tools[0]"),
        (COMPLETIONS, "stop_token_ids", ["x"] * 40, "stop_token_ids[0]"),
        (COMPLETIONS, "stop", [7] * 40, "stop[0]"),
    ],
)
async def test_the_first_bad_item_is_told_and_no_other_looked_at(
    greeter: FrontEnd, path: str, field: str, value: Any, param: str
) -> None:
    body = chat(**{field: value}) if path == CHAT else completion(**{field: value})
    assert check(await greeter.client.post(path, json=body), 400)["param"] == param
    with pytest.raises(ApiError) as caught:
        (parse_chat if path == CHAT else parse_completion)({"model": "tiny", **body})
    cause = caught.value.__context__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() <= 2  # a union has one for each of its branches
