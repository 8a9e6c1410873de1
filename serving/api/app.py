"""The ASGI application: routes, errors as OpenAI objects, an OpenAPI document that says what is true."""

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from lm.errors import UserError
from serving.api import completions, sessions
from serving.api.errors import ApiError, as_api_error
from serving.api.http import ClientGoneError, Front, error_response, log
from serving.api.service import Service
from serving.metrics import PrometheusSink

DESCRIPTION = (
    "Language models with a real memory. Completions and chat as OpenAI's clients know them; with a `session_id` the prompt is "
    "what is new, and the session goes on where it stopped, at the same cost however long it is."
)


def make_app(service: Service) -> FastAPI:
    """The application over a service."""
    app = FastAPI(title="pmi", version="1", description=DESCRIPTION)
    routers = [completions.routes(service), sessions.routes(service)]
    for router in routers:
        app.include_router(router)
    paths = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]

    @app.get("/health", include_in_schema=False)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    if isinstance(service.metrics.sink, PrometheusSink):
        sink = service.metrics.sink

        @app.get("/metrics", include_in_schema=False)
        async def metrics() -> Response:
            return Response(sink.text(), media_type="text/plain; version=0.0.4")

    async def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGoneError):
            raise error
        problem = as_api_error(error)
        if problem.code == "internal_error":
            log.error("failed", exc_info=error, extra={"facts": request.state.facts})
        service.note(problem)
        request.state.facts["code"] = problem.code
        return error_response(problem)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await failed(request, _invalid(error))

    async def plain(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        answer = await failed(request, ApiError(error.status_code, code, f"{request.method} {request.url.path}: {error.detail}"))
        if error.status_code == 405:
            allowed = {m for route in paths if route.path_regex.match(request.url.path) for m in route.methods or ()}
            answer.headers["Allow"] = ", ".join(sorted(allowed))
        return answer

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, plain)
    app.add_exception_handler(Exception, failed)
    for kind in (ApiError, UserError):
        app.add_exception_handler(kind, failed)
    app.add_middleware(
        Front, tenant=service.tenant, count=service.metrics, settings=service.config.http, local=service.keys is None,
        before_import=service.before_import,
    )  # fmt: skip
    app.openapi = lambda: _document(app, service.keys is not None)  # type: ignore[method-assign]
    return app


def _invalid(error: RequestValidationError) -> ApiError:
    """All mistakes in one message: where, and what is allowed; never the value itself, which may be long or private."""
    problems, first = [], None
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"][1:] if isinstance(part, (str, int)))
        if item["type"] == "json_invalid":
            where = "body"
        first = first or where or None
        message = "unknown field" if item["type"] == "extra_forbidden" else str(item["msg"]).removeprefix("Value error, ")
        problems.append(f"{where or 'body'}: {message}")
    shown = problems[:8] + ([f"and {len(problems) - 8} more"] if len(problems) > 8 else [])
    return ApiError(400, "invalid_request", "; ".join(shown)[:2000], first)


def _document(app: FastAPI, keys: bool) -> dict[str, Any]:
    """The OpenAPI document; mistakes in a request are 400 here, never FastAPI's 422."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        if keys:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        app.openapi_schema = document
    return app.openapi_schema
