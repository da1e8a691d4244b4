# SPDX-License-Identifier: Apache-2.0
"""A server that speaks OpenAI's protocol, for tests: what it replies is a function of the request."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """An OpenAI-compatible stub: `reply(number, body)` gives a status and a body, `seen` holds what was asked."""

    def __init__(self, reply):
        self.reply, self.seen, self.headers = reply, [], []
        self.lock, self.in_flight, self.most_in_flight = threading.Lock(), 0, 0


def good(number, body, text=None, finish_reason="stop"):
    content = f"answer to {body['messages'][-1]['content']}" if text is None else text
    return 200, {"choices": [{"message": {"content": content}, "finish_reason": finish_reason}]}


@contextmanager
def serving(reply):
    server = Server(reply)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.seen.append((self.path, body))
                server.headers.append(dict(self.headers))
                server.in_flight += 1
                server.most_in_flight = max(server.most_in_flight, server.in_flight)
                number = len(server.seen)
            status, content = server.reply(number, body)
            payload = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            with server.lock:
                server.in_flight -= 1
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_port}/v1"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
