"""Bare gunicorn: a plain WSGI function reads the body and answers a constant."""

from collections.abc import Callable, Iterable
from typing import Any

BODY = b'{"name": "Monstera", "tag": "indoor"}'


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Any request."""
    environ["wsgi.input"].read()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(BODY)))]
    start_response("200 OK", headers)
    return [BODY]
