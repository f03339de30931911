"""An OpenAI-compatible server on 127.0.0.1 whose replies a test decides.

    with JudgeServer(lambda question: "Score: 7") as server:
        server.url        # http://127.0.0.1:PORT/v1

A reply is the text of the message; a Reply for another status, header or body; NO_REPLY, to keep
the connection open and say nothing; or HANG_UP, to close it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NO_REPLY = object()
HANG_UP = object()
PROBE = "Reply with the word yes."


def between(question: str, tag: str) -> str:
    """What a question has between <tag> and </tag>."""
    return re.search(f"<{tag}>\n(.*)\n</{tag}>", question, re.DOTALL)[1]


def longer(question: str) -> str:
    """A fair judge of pairs: the longer answer is better."""
    a, b = (len(between(question, f"answer_{place}")) for place in "ab")
    better = "A" if a > b else "B"
    verdict = "tie" if a == b else better
    return f"They differ.\nVerdict: {verdict}"


@dataclass(frozen=True)
class Reply:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None  # None: a chat completion of `text`
    text: str | None = ""
    finish_reason: str = "stop"

    def content(self) -> bytes:
        if self.body is not None:
            return self.body
        message = {"role": "assistant", "content": self.text}
        return json.dumps(
            {"choices": [{"message": message, "finish_reason": self.finish_reason}]}
        ).encode()


class JudgeServer:
    """questions, bodies, headers: of all requests but the probe of a start, in order. most_at_once:
    of requests. probe_reply: what it says to the probe.
    """

    def __init__(self, reply: Callable[[str], object], *, probe_reply: object = "yes"):
        self.reply = reply
        self.probe_reply = probe_reply
        self.bodies: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        handler = type("Handler", (_Handler,), {"judge": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    @property
    def questions(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.bodies]

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, headers: dict[str, str], body: dict) -> object:
        """What to say to one request."""
        question = body["messages"][0]["content"]
        with self._lock:
            self.paths.append(path)
            self.headers.append(headers)
            if question == PROBE:
                return self.probe_reply
            self.bodies.append(body)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            said = self.reply(question)
        finally:
            with self._lock:
                self._at_once -= 1
        return said

    def hold(self) -> None:
        """Return when the server ends."""
        self._is_over.wait()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections that wait to be accepted

    def handle_error(self, *_):
        """A client that has gone is no error of a test."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        size = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(size))
        said = self.judge.answer(self.path, dict(self.headers), body)
        if said is NO_REPLY:
            self.judge.hold()
        if said in (NO_REPLY, HANG_UP):
            self.close_connection = True
            return
        reply = said if isinstance(said, Reply) else Reply(text=said)
        content = reply.content()
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass
