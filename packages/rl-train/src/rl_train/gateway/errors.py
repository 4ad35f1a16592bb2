"""`ApiError`: an error of a request, in OpenAI's form."""

from __future__ import annotations

import logging
from typing import Any

# The field "type" of an error with this HTTP status.
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class ApiError(Exception):
    """An error that a client gets.

    Args:
        status: The HTTP status. OpenAI's clients repeat calls after 408, 409, 429 and 5xx.
        message: What is wrong, and the fix.
        param: The field of the request; None if no field is at fault.
        code: A short name of the error for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @classmethod
    def of(cls, error: Exception, call: str) -> ApiError:
        """Return an error in this form. Another one, such as the engine's, is logged in a line with the call's id."""
        if isinstance(error, ApiError):
            return error
        message = f"{type(error).__name__}: {error}"
        logging.getLogger(__name__).error("the call %s failed by %s", call, " ".join(message.split()))
        return cls(500, message)

    def to_json(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def unsupported(param: str, message: str) -> ApiError:
    """Return the error of a field, or of a value of a field, that the endpoint does not offer."""
    return ApiError(400, message, param, "unsupported_value")


def invalid(param: str, message: str) -> ApiError:
    """Return the error of a field with a wrong value."""
    return ApiError(400, message, param, "invalid_value")


def episode_ended() -> ApiError:
    """Return the error of a call in an episode that has ended."""
    return ApiError(403, "the episode has ended; it takes no further calls", code="episode_ended")
