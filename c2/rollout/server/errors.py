"""Errors in OpenAI's form."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from c2.config import ConfigError
from c2.rollout.engine import EngineError


def body(status: int, message: str) -> dict[str, Any]:
    """The body of an error. A message that begins with the name of a field says which it is."""
    kinds = {404: "not_found_error", 429: "rate_limit_error"}
    kind = "server_error" if status >= 500 else kinds.get(status, "invalid_request_error")
    field, colon, _ = message.partition(":")
    param = field if colon and field.replace(".", "").replace("_", "").isalnum() else None
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


async def _bad_request(_: Request, error: ConfigError) -> Response:
    return JSONResponse(body(400, str(error)), 400)


async def _refused(_: Request, error: HTTPException) -> Response:
    status = error.status_code
    return JSONResponse(body(status, error.detail), status, error.headers)


async def _unavailable(_: Request, error: EngineError) -> Response:
    return JSONResponse(body(503, str(error)), 503)


async def _left(*_: object) -> Response:
    return Response(status_code=400)  # nobody gets it


async def _failed(_: Request, error: Exception) -> Response:
    """Starlette raises it again for the log of the process."""
    return JSONResponse(body(500, f"{type(error).__name__} in the server; see its log"), 500)


HANDLERS = {
    ConfigError: _bad_request,
    HTTPException: _refused,
    EngineError: _unavailable,
    ClientDisconnect: _left,
    Exception: _failed,
}
