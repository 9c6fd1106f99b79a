"""As much of the Hub, in this process, as huggingface_hub's own client asks for when it uploads."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub's API as an upload asks for; `server` holds what came and the answer about the card."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, self.headers["Authorization"], body))
        answer, status = {}, 200
        if self.path == "/api/repos/create":
            answer = {"url": f"{self.server.address}/me/draft"}
        elif self.path == "/api/validate-yaml":
            answer = {"errors": self.server.errors, "warnings": []}
            status = 400 if self.server.errors else 200
        elif "/preupload/" in self.path:
            answer = {
                "files": [
                    file | {"uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
                ]
            }
        elif "/commit/" in self.path:
            answer = {"commitUrl": f"{self.server.address}/me/draft/commit/1", "commitOid": "1" * 40, "success": True}
        payload = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def do_GET(self):
        payload = json.dumps({"id": "me/draft", "sha": "1" * 40, "siblings": []}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args):
        pass


@contextmanager
def hub(monkeypatch, *, errors=()):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.requests, server.errors, server.address = [], list(errors), f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def files_of(request: tuple[str, str, bytes]) -> dict[str, bytes]:
    """The files of a commit."""
    lines = [json.loads(line) for line in request[2].splitlines()]
    return {
        line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
    }
