"""A server on localhost that speaks the chat completions protocol, and fails in the ways that servers fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What the server sends for one request.

    Attributes:
        content: of the message.
        status: of the response.
        headers: more of them.
        body: instead of a completion.
        wait: seconds before it answers.
        usage: as the server reports it; None for no report.
        finish: why the answer ended.
    """

    content: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    wait: float = 0.0
    usage: dict[str, int] | None = field(
        default_factory=lambda: {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
    )
    finish: str = "stop"

    def encoded(self) -> bytes:
        if self.body is not None:
            return self.body
        if self.status != 200:
            return json.dumps({"error": {"message": "as asked for by the test", "type": "test"}}).encode()
        message = {"role": "assistant", "content": self.content}
        completion: dict[str, Any] = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": self.finish}],
        }
        return json.dumps(completion | ({"usage": self.usage} if self.usage else {})).encode()


@dataclass
class Server:
    """Where it listens, and what it was asked, with the time of each request."""

    base_url: str
    requests: list[dict[str, Any]]
    times: list[float]
    keys: list[str | None]


@contextmanager
def serving(reply: Callable[[int, dict[str, Any]], Reply]) -> Iterator[Server]:
    """A server that answers request i, counted from 0, by `reply(i, body)`."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(server.requests)
                server.requests.append(body)
                server.times.append(time.monotonic())
                server.keys.append(self.headers.get("Authorization"))
            answer = reply(number, body) if self.path == "/v1/chat/completions" else Reply(status=404)
            if answer.wait:
                stopped.wait(answer.wait)
            content = answer.encoded()
            try:
                self.send_response(answer.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
            except OSError:  # the client did not wait
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    stopped = threading.Event()
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = Server(f"http://127.0.0.1:{http.server_address[1]}/v1", [], [], [])
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        stopped.set()
        http.shutdown()
        thread.join()
        http.server_close()
