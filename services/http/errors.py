"""Errors in OpenAI's shape, whatever went wrong and wherever.

``{"error": {"message", "type", "param", "code"}}``. Codes are stable; messages say what was
expected, what came and what to do. Failures of the cluster keep their status: 429 and 503 carry
Retry-After, so that clients back off and come back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from services.http.request_id import request_id_of
from services.orchestration.api import Failed, InvalidRequest, NotReady, Overloaded
from services.text.chat_template import ChatTemplateError

INVALID_REQUEST: Final = "invalid_request_error"
SERVER_ERROR: Final = "server_error"
RATE_LIMIT: Final = "rate_limit_error"


class ApiError(Exception):
    """An error answer. Raised anywhere before the first byte of the answer, it becomes it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.error_type = error_type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def envelope(self) -> dict[str, dict[str, str | None]]:
        """The body of the answer, also sent as the last event of a stream that fails."""
        return {
            "error": {
                "message": self.message,
                "type": self.error_type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The answer."""
        return json_response(self.envelope(), status=self.status, headers=self.headers)


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request can never be served as it is."""
    return ApiError(400, message, param=param, code=code)


def model_not_found(model: str, served: str) -> ApiError:
    """404: another model was asked for."""
    return ApiError(
        404,
        f"The model `{model}` does not exist or you do not have access to it; this server serves"
        f" `{served}`.",
        code="model_not_found",
    )


def context_length_exceeded(limit: int, prompt: int, output: int, *, param: str) -> ApiError:
    """400 with the code and both numbers that clients look for."""
    return _beyond_context(limit, f"{prompt + output} tokens ({prompt}", output, param)


def context_certainly_exceeded(limit: int, least: int, output: int, *, param: str) -> ApiError:
    """The same of a prompt that was not tokenized: it has ``least`` tokens, or more."""
    return _beyond_context(
        limit, f"at least {least + output} tokens (at least {least}", output, param
    )


def _beyond_context(limit: int, requested: str, output: int, param: str) -> ApiError:
    return invalid(
        f"This model's maximum context length is {limit} tokens. However, you requested"
        f" {requested} in the {param}, {output} in the completion). Please reduce the length of"
        f" the {param} or completion.",
        param=param,
        code="context_length_exceeded",
    )


def of_refusal(error: Overloaded | NotReady | InvalidRequest | ChatTemplateError) -> ApiError:
    """The answer to a request that was never started."""
    match error:
        case Overloaded():
            return _retryable(429, str(error), "rate_limit_exceeded", error.retry_after_s)
        case NotReady():
            return _retryable(503, str(error), "not_ready", error.retry_after_s)
        case InvalidRequest():
            return invalid(error.message, code=error.code or None)
        case ChatTemplateError():
            return invalid(str(error), param="messages", code="invalid_messages")


def of_failure(failure: Failed) -> ApiError:
    """The answer to a request that was started and ended badly."""
    if failure.retry_after_s is not None or failure.http_status in (429, 503):
        return _retryable(
            failure.http_status, failure.message, failure.code, failure.retry_after_s or 1
        )
    return ApiError(
        failure.http_status,
        failure.message,
        error_type=INVALID_REQUEST if failure.http_status < 500 else SERVER_ERROR,
        code=failure.code or None,
        # OpenAI's clients ask again after any 5xx unless they are told that it is of no use.
        headers={"x-should-retry": "false"} if failure.code == "bad_logits" else None,
    )


def internal_error() -> ApiError:
    """500: a bug. Says nothing about it to the client; the log does."""
    return ApiError(
        500,
        "The server had an error while processing your request. Sorry about that!",
        error_type=SERVER_ERROR,
        code="internal_error",
    )


def _retryable(status: int, message: str, code: str, retry_after_s: int) -> ApiError:
    return ApiError(
        status,
        message,
        error_type=RATE_LIMIT if status == 429 else SERVER_ERROR,
        code=code or None,
        headers={"retry-after": str(max(1, retry_after_s))},
    )


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def encode_json(content: Mapping[str, Any]) -> bytes:
    """Compact JSON in UTF-8, on one line."""
    return _ENCODER.encode(content).encode()


def json_response(
    content: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer of compact JSON in UTF-8."""
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Response(
        body.encode(),
        status_code=status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


def install_error_handlers(app: FastAPI) -> None:
    """Give every error of ``app`` the same shape, those of the framework included."""

    async def of_api(_request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def of_service(_request: Request, error: Exception) -> Response:
        assert isinstance(error, Overloaded | NotReady | InvalidRequest | ChatTemplateError)
        return of_refusal(error).response()

    async def of_framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _of_framework(request, error).response()

    async def of_bug(request: Request, _error: Exception) -> Response:
        # This handler runs outside of the middleware that adds the id to every other answer.
        response = internal_error().response()
        response.headers["x-request-id"] = request_id_of(request.scope)
        return response

    app.add_exception_handler(ApiError, of_api)
    for refusal in (Overloaded, NotReady, InvalidRequest, ChatTemplateError):
        app.add_exception_handler(refusal, of_service)
    app.add_exception_handler(HTTPException, of_framework)
    app.add_exception_handler(Exception, of_bug)


def _of_framework(request: Request, error: HTTPException) -> ApiError:
    if error.status_code == 404:
        message = f"Unknown request URL: {request.method} {request.url.path}. Check it for typos."
        code = "unknown_url"
    elif error.status_code == 405:
        message = f"Not allowed to {request.method} on {request.url.path}; use another method."
        code = "method_not_supported"
    else:
        message, code = str(error.detail), "http_error"
    return ApiError(error.status_code, message, code=code, headers=error.headers)
