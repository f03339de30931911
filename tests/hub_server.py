"""A stand-in for the Hugging Face Hub: one repository in memory, as far as uploads ask for it."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HubServer:
    """Takes commits until `close`. files: path -> contents, of the newest commit."""

    def __init__(self, files: dict[str, bytes], refuses: int = 0):
        self.files = dict(files)
        self.created: list[dict] = []  # what new repositories were asked to be
        self.tokens: set[str | None] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.tokens.add(self.headers.get("Authorization"))
                status, said = refuses or 200, hub.answer(self.path, body)
                data = json.dumps({"error": "not for you"} if refuses else said).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = answer

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def answer(self, path: str, body: bytes) -> object:
        """Return what the Hub says to a request."""
        if path.startswith("/api/repos/create"):
            self.created.append(json.loads(body))
            return {"url": f"{self.url}/me/mine"}
        if "/tree/" in path:
            entries = []
            for name, content in self.files.items():
                entries.append({"type": "file", "path": name, "oid": "0", "size": len(content)})
            return entries
        if "/preupload/" in path:
            asked = json.loads(body)["files"]
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{**one, **mode} for one in asked]}
        if "/commit/" in path:
            for line in body.splitlines():
                self.change(**json.loads(line))
            return {"commitUrl": f"{self.url}/me/mine/commit/1", "commitOid": "1"}
        return {}

    def change(self, key: str, value: dict) -> None:
        """Apply a line of a commit."""
        if key == "file":
            self.files[value["path"]] = base64.b64decode(value["content"])
        if key == "deletedFile":
            del self.files[value["path"]]

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
