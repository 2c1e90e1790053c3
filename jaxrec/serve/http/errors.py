"""Errors that clients get."""

from __future__ import annotations

from collections.abc import Mapping

RETRY_SECONDS = 1


class RequestError(Exception):
    """A request that is refused.

    Args:
        status: Status of the response.
        message: What is wrong, and what to do.
        headers: Headers of the response.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})


def invalid(message: str) -> RequestError:
    """Return the error of a request whose content is wrong."""
    return RequestError(400, message)


def busy(message: str) -> RequestError:
    """Return the error of a request that may be sent again later."""
    return RequestError(503, message, {"retry-after": str(RETRY_SECONDS)})
