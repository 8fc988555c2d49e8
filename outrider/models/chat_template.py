"""Chat messages -> prompt text, with the model's own Jinja template in a sandbox.

What a template may rely on is what Hugging Face's tokenizers give it: trimmed blocks, loop controls,
`{% generation %}`, `tojson` without ASCII escapes, `raise_exception`, `strftime_now`, the names of
special tokens, and None for `tools` and `documents` that were not given.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

# Ends the message that is to be continued. The blank behind it tells whether the template keeps trailing
# blanks: it survives only then.
_CONTINUE_HERE = "\ue000continue\ue001"


class ChatTemplateError(ValueError):
    """A template that does not compile, or that refuses the messages; the message says which."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any],
) -> str:
    """The prompt for `messages`.

    With `add_generation_prompt` the text ends where an answer begins; with `continue_final_message` it
    ends inside the last message instead, so that the model goes on with it.
    """
    if continue_final_message and add_generation_prompt:
        raise ChatTemplateError("continue_final_message cannot be combined with add_generation_prompt")
    from jinja2 import TemplateError  # imported late: a tenth of the start-up time, and not always needed

    prepared = copy.deepcopy([dict(message) for message in messages])
    if continue_final_message:
        _mark_end(prepared)
    context = {"tools": None, "documents": None, **variables}
    context.update(messages=prepared, add_generation_prompt=add_generation_prompt)
    try:
        text = _compile(template).render(**context)
    except ChatTemplateError:
        raise
    except TemplateError as error:
        raise ChatTemplateError(f"the chat template refused the messages: {error}") from error
    except Exception as error:  # a template is a program: it can fail like any
        raise ChatTemplateError(
            f"the chat template failed on these messages: {type(error).__name__}: {error}"
        ) from error
    return _cut_at_mark(text) if continue_final_message else text


def _mark_end(messages: list[dict[str, Any]]) -> None:
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _CONTINUE_HERE + " "
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _CONTINUE_HERE + " "
            return
    raise ChatTemplateError("continue_final_message needs a last message with text content")


def _cut_at_mark(text: str) -> str:
    before, mark, after = text.rpartition(_CONTINUE_HERE)
    if not mark:
        raise ChatTemplateError(
            "continue_final_message is set, but the chat template drops the end of the last message"
        )
    return before if after.startswith(" ") else before.rstrip()


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> Any:
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(template)
    except TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
        ) from error


@functools.lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what an assistant said, for training; here its body is all that counts."""

        tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        allowed = {k: v for k, v in options.items() if k in ("indent", "separators", "sort_keys")}
        return json.dumps(value, ensure_ascii=ensure_ascii, **allowed)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
