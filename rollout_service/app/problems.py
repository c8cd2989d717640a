"""Every error as an RFC 9457 problem document with one sentence that says what to do."""

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from protocol.errors import AprilError
from protocol.messages import PROBLEM_MEDIA_TYPE, Problem

log = logging.getLogger(__name__)


def problem(status: int, slug: str, detail: str) -> JSONResponse:
    """A problem response; `slug` names the kind for programs."""
    body = Problem(type=f"urn:april:problem:{slug}", title=HTTPStatus(status).phrase, status=status, detail=detail)
    return JSONResponse(body.model_dump(), status, media_type=PROBLEM_MEDIA_TYPE)


def add_problem_handlers(app: FastAPI) -> None:
    """Answer our errors, bad requests and everything unexpected with problem documents."""

    async def april_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, AprilError), "registered for this class"
        return problem(error.status, error.slug, str(error))

    async def bad_request(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError), "registered for this class"
        faults = [f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in error.errors()]
        return problem(422, "request", "; ".join(faults) + "; see /openapi.json")

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException), "registered for this class"
        return problem(
            error.status_code, "http", f"{request.method} {request.url.path}: {error.detail}; see /openapi.json"
        )

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem(500, "internal", "the service failed to answer; its log says why")

    app.add_exception_handler(AprilError, april_error)
    app.add_exception_handler(RequestValidationError, bad_request)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)
