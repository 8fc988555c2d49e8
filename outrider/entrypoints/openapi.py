"""The OpenAPI document: FastAPI's list of routes with what FastAPI cannot know, as the routes read their
bodies themselves: bodies, answers, headers, and every status an error may have."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from outrider.entrypoints.errors import TYPES
from outrider.entrypoints.protocol import (
    UNSERVED,
    AbortRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    WireModel,
)

Schema = dict[str, Any]
BODIES: dict[str, type[WireModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/abort_requests": AbortRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_HEADERS = {
    "X-Outrider-Speculation": (
        "Adds `speculation` to the answer, as `return_speculation` does",
        ["0", "1", "detailed"],
    ),
    "X-Outrider-Timing": (
        "1: chunks of a stream tell the seconds since the request came, `arrival_time`",
        ["0", "1"],
    ),
}
_BODY_ERRORS = (400, 404, 408, 413, 500, 503)
_ERRORS: dict[str, tuple[int, ...]] = {
    "/v1/chat/completions": (*_BODY_ERRORS, 429),
    "/v1/completions": (*_BODY_ERRORS, 429),
    "/v1/models": (503,),
    "/v1/models/{name}": (404, 503),
    "/v1/speculation": (503,),
    "/health": (503,),
}


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def _list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT: Schema = {"type": "string"}
_INT: Schema = {"type": "integer"}
_ANY_OBJECT: Schema = {"type": "object"}
_FINISH = _or_null({"enum": ["stop", "length", "tool_calls", "abort"]})
_CALL = _object(
    {"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT, "arguments": _TEXT})}
)
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _or_null(_TEXT)},
    {"reasoning_content": _TEXT, "tool_calls": _list_of(_CALL), "refusal": {"type": "null"}},
)
_CHOICE: Schema = {"index": _INT, "logprobs": _or_null(_ANY_OBJECT), "finish_reason": _FINISH}
_MORE: Schema = {
    "stop_reason": {"type": ["integer", "string", "null"]}, "token_ids": _list_of(_INT),
    "prompt_token_ids": _list_of(_INT), "token_sources": _list_of(_TEXT), "token_strs": _list_of(_TEXT),
    "prompt_logprobs": _list_of(_or_null(_ANY_OBJECT)),
}  # fmt: skip
_USAGE = _object(
    {"prompt_tokens": _INT, "completion_tokens": _INT, "total_tokens": _INT},
    {"prompt_tokens_details": _ANY_OBJECT, "completion_tokens_details": _ANY_OBJECT},
)


def _answer(kind: str, choice: Schema) -> Schema:
    head = {"id": _TEXT, "object": {"const": kind}, "created": _INT, "model": _TEXT}
    choices = _list_of(_object({**_CHOICE, **choice}, _MORE))
    return _object(
        {**head, "choices": choices, "usage": _USAGE},
        {"system_fingerprint": _TEXT, "seed": _INT, "speculation": _ANY_OBJECT},
    )


_MODEL = _object({"id": _TEXT, "object": {"const": "model"}, "created": _INT, "owned_by": _TEXT})
_ANSWERS: dict[str, Schema] = {
    "/v1/chat/completions": _answer("chat.completion", {"message": _MESSAGE}),
    "/v1/completions": _answer("text_completion", {"text": _TEXT}),
    "/v1/abort_requests": _object({"aborted": _list_of(_TEXT)}),
    "/tokenize": _object({"tokens": _list_of(_INT), "count": _INT, "max_model_len": _INT}),
    "/detokenize": _object({"prompt": _TEXT}),
    "/v1/models": _object({"object": {"const": "list"}, "data": _list_of(_MODEL)}),
    "/v1/models/{name}": _MODEL,
    "/v1/speculation": _ANY_OBJECT,
    "/health": _object({"status": {"const": "ready"}}),
    "/ping": _object({"status": {"const": "alive"}}),
    "/version": _object({"version": _TEXT}),
}
_ERROR = _object(
    {"error": _object({"message": _TEXT, "type": _TEXT, "param": _or_null(_TEXT), "code": _or_null(_TEXT)})}
)


def describe(app: FastAPI, *, has_keys: bool) -> Callable[[], Schema]:
    """What `app.openapi` should be. The document is made when first asked for."""
    routes = app.openapi

    def openapi() -> Schema:
        if app.openapi_schema is None:
            with warnings.catch_warnings():  # a route of two methods has one id: they get their own below
                warnings.simplefilter("ignore")
                document = routes()
            schemas: Schema = {"Error": _ERROR}
            document["components"] = {"schemas": schemas}
            if has_keys:
                document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                document["security"] = [{"key": []}]
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    operation["operationId"] = f"{method} {path}"
                    _complete(path, operation, schemas, has_keys)
        return app.openapi_schema or routes()

    return openapi


def _complete(path: str, operation: Schema, schemas: Schema, has_keys: bool) -> None:
    content: Schema = {"application/json": {"schema": _ANSWERS.get(path, _ANY_OBJECT)}}
    if path == "/metrics":
        content = {"text/plain": {"schema": _TEXT}}
    if path in BODIES:
        model = BODIES[path]
        operation["requestBody"] = {
            "required": True, "content": {"application/json": {"schema": _body(model, schemas)}}
        }  # fmt: skip
        if issubclass(model, GenerationRequest):
            content["text/event-stream"] = {"schema": _TEXT}
            operation["parameters"] = [
                {"name": name, "in": "header", "description": text, "schema": {"enum": values}}
                for name, (text, values) in _HEADERS.items()
            ]
    errors = _ERRORS.get(path, _BODY_ERRORS if path in BODIES else ())
    statuses = (*errors, 401) if has_keys else errors
    operation["responses"] = {"200": {"description": "The answer", "content": content}} | {
        str(status): {
            "description": TYPES[status],
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        for status in sorted(statuses)
    }


def _body(model: type[WireModel], schemas: Schema) -> Schema:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    if issubclass(model, GenerationRequest):
        # Fields of the OpenAI API that are taken only with values that ask for nothing.
        schema["properties"] |= {
            name: {"enum": [None, *values], "description": "not served: only these values are taken"}
            for name, values in UNSERVED.items()
        }
    schemas[model.__name__] = schema
    return {"$ref": f"#/components/schemas/{model.__name__}"}
