"""A small program answers what a scorer's supervisor and workers ask of an SGLang server: every token has the
log-prob -0.5.

python tests/fakes/scorer_server.py --model-path DIR --host HOST --port PORT …
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LOGPROB = -0.5


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model = ""

    def do_GET(self) -> None:
        shape = json.loads((Path(self.model) / "config.json").read_text())
        answers: dict[str, Any] = {
            "/ready": {},
            "/server_info": {"version": "0.5.23", "model_path": self.model, "max_req_input_len": 1 << 20},
            "/model_info": {"model_path": self.model, "architectures": shape["architectures"]},
        }
        self._say(answers.get(self.path, {"loads": []}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        read = body["input_ids"][body["logprob_start_len"] :]
        tokens = [[LOGPROB if at else None, id, None] for at, id in enumerate(read)]
        meta = {"input_token_logprobs": tokens, "prompt_tokens": len(body["input_ids"])}
        self._say({"meta_info": meta})

    def _say(self, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:  # as asked: a client that is not told would use the connection again
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


if __name__ == "__main__":
    options = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    Answers.model = options["--model-path"]
    server = ThreadingHTTPServer((options["--host"], int(options["--port"])), Answers)
    print(f"listens on {options['--port']}", flush=True)
    server.serve_forever()
