"""The access log: one line for each request, which no request can forge, without secrets."""

import contextlib
import json
from datetime import timedelta
from typing import Any
from urllib.parse import quote

from gunicorn.glogging import Logger


class AccessLogger(Logger):
    """gunicorn's logger with an access log of our own."""

    def debug(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Log nothing: gunicorn's own lines for debugging have raw heads, with tokens in them."""

    def access(self, resp: Any, req: Any, environ: dict[str, Any], request_time: timedelta) -> None:
        """Write a line, but not for a /healthz that succeeds: platforms ask every few seconds."""
        path, status = environ.get("PATH_INFO", ""), str(resp.status)[:3]
        if not self.access_log_enabled or (path == "/healthz" and status == "200"):
            return
        request = f"{environ['REQUEST_METHOD']} {quote(path)}"[:2000].rstrip()
        line = (
            f"{environ['REMOTE_ADDR'] or '-'} - {environ.get('REMOTE_USER') or '-'} {self.now()} "
            f'"{request}" {status} {resp.sent} {request_time.total_seconds():.4f}s '
            f"{environ.get('plants.request_id')}"
        )
        if reason := environ.get("plants.reason"):
            line += f" {json.dumps(reason)}"
        handlers = self.access_log.handlers
        if len(handlers) != 1 or not hasattr(handlers[0], "_gunicorn"):
            self.access_log.info("%s", line)
            return
        # Directly: logging takes ten times as long. What can't be written must not fail a request.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            handlers[0].stream.write(f"{line[:4000]}\n")  # a pipe takes no more in one piece
            handlers[0].stream.flush()
