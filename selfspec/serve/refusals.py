"""What is refused, in the shape that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from selfspec.errors import InvalidOption, InvalidPrompt, ModelChanged, SelfspecError


class Refused(Exception):
    """A request that gets an error in place of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """`field`: what of the request is wrong."""
        super().__init__(message)
        self.status, self.field, self.code = status, field, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """`{"error": {...}}`."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.field,
                "code": self.code,
            }
        }


_FIELDS = {
    "json_schema": "response_format",
    "grammar": "tools",
    "SequenceBiasLogitsProcessor": "logit_bias",
}
"""Fields of a request, by what the runtime calls them at the beginning of an error."""


def of_error(error: BaseException, field: str) -> Refused:
    """For what a request made the model raise; `field` is where its prompt stands."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, InvalidPrompt):
        return Refused(400, str(error), field=field)
    if isinstance(error, InvalidOption):
        name, _, rest = str(error).partition(" ")
        if name not in _FIELDS:
            return Refused(400, str(error))
        return Refused(400, f"{_FIELDS[name]} {rest}", field=_FIELDS[name])
    if isinstance(error, ModelChanged):
        return Refused(503, str(error))
    if isinstance(error, SelfspecError):
        return Refused(500, str(error))
    return Refused(500, "the answer failed by a fault of the server. Its log says more")


def of_validation(error: ValidationError) -> Refused:
    """What a body has wrong: of several, the one that is furthest inside it."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    found = max(errors, key=lambda one: len(one["loc"]))
    field, said = _path(found["loc"]), found["msg"].removeprefix("Value error, ")
    if found["type"] == "extra_forbidden":
        message = f"{field} is not supported here. Leave it out"
    elif found["type"] == "missing":
        message = f"{field} is missing"
    elif not field:
        message = f"the body is wrong: {said}"
    else:
        message = f"{field} is wrong: {said}"
    return Refused(400, message, field=field or None)


def _path(places: tuple[int | str, ...]) -> str:
    """`messages[0].content`; names of types, which pydantic puts in between, are left out."""
    text = ""
    for place in places:
        if isinstance(place, int):
            text += f"[{place}]"
        elif place.isidentifier() and place not in _TYPES:
            text += f".{place}" if text else place
    return text


_TYPES = frozenset({"str", "bool", "int", "float", "list", "dict", "Text", "Speculation", "Chosen"})
