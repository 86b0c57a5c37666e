"""A stand-in for the W&B server, for the real wandb: GraphQL as far as a run asks for it, and the file stream. It keeps what runs uploaded.

A test chooses how it answers: `fault` is put before every request.
"""

from __future__ import annotations

import gzip
import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

API_KEY = "0123456789" * 4
"""wandb refuses a shorter one."""
HISTORY, SUMMARY = "wandb-history.jsonl", "wandb-summary.json"


@dataclass
class UploadedRun:
    """What the server knows of one run."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    """The latest variables of UpsertBucket that were not null: displayName, groupName, jobType, config, notes, tags, …"""
    lines: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    """File → line number → the line. A line that is sent again replaces itself, as in the real file stream."""
    complete: bool = False
    exit_code: int | None = None
    upserts: int = 0

    @property
    def config(self) -> dict[str, Any]:
        return {key: value["value"] for key, value in json.loads(self.fields.get("config") or "{}").items() if key != "_wandb"}

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The metric definitions, as wandb writes them: 1 is the name, 5 the number of its axis (counted from 1)."""
        found: list[dict[str, Any]] = json.loads(self.fields["config"])["_wandb"]["value"]["m"]
        return found

    @property
    def history(self) -> list[dict[str, Any]]:
        """The uploaded rows, in the order of their lines."""
        return [line for _, line in sorted(self.lines.get(HISTORY, {}).items())]

    @property
    def summary(self) -> dict[str, Any]:
        return self.lines.get(SUMMARY, {}).get(0, {})

    def take(self, name: str, offset: int, content: list[str]) -> None:
        known = self.lines.setdefault(name, {})
        if name == SUMMARY:
            known[0] = json.loads(content[-1])
            return
        known.update({offset + number: json.loads(text) for number, text in enumerate(content) if name == HISTORY})


Answer = tuple[int, Any]


@dataclass(frozen=True)
class Request:
    """One request, before it is answered."""

    path: str
    operation: str
    """Of a GraphQL request its name, else `file_stream` or `other`."""
    run: str


class WandbServer(http.server.ThreadingHTTPServer):
    """`fault(request)` returns an answer (status and JSON) that is given instead of the right one, or None; it may take its time."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int = 0) -> None:
        self.runs: dict[str, UploadedRun] = {}
        self.fault: Callable[[Request], Answer | None] = lambda request: None
        self.stopped: set[str] = set()
        """Runs whose Stop button was pressed."""
        self.requests: list[Request] = []
        self.streams: dict[str, list[dict[str, Any]]] = {}
        """Run → the bodies of its file stream."""
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        request = _request(path, body)
        self.requests.append(request)
        found = self.fault(request)
        if found is not None:
            return found
        with self._lock:
            if request.operation == "file_stream":
                self.streams.setdefault(request.run, []).append(body)
                return 200, self._stream(self.runs.setdefault(request.run, UploadedRun(request.run)), body)
            graphql = _QUERIES.get(request.operation)
            return 200, {"data": graphql(self, body.get("variables") or {}) if graphql else {}}

    def _stream(self, run: UploadedRun, body: dict[str, Any]) -> dict[str, Any]:
        for name, part in (body.get("files") or {}).items():
            run.take(name, part["offset"], part["content"])
        run.complete = bool(body.get("complete")) or (run.complete and "complete" not in body)
        if body.get("exitcode") is not None and body.get("complete"):
            run.exit_code = body["exitcode"]
        return {"exitcode": None, "limits": {}, "stopped": run.name in self.stopped}

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is no news."""


def _request(path: str, body: dict[str, Any]) -> Request:
    if path.endswith("/file_stream"):
        return Request(path, "file_stream", path.split("/")[-2])
    variables = body.get("variables") or {}
    operation = re.search(r"(?:query|mutation)\s+(\w+)", body.get("query", ""))
    return Request(path, operation.group(1) if operation else "other", str(variables.get("name") or variables.get("run") or ""))


def _viewer(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    return {"viewer": {"id": "u", "entity": "me", "username": "me", "email": "me@x.org", "flags": "{}", "teams": {"edges": []}}}


def _features(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    return {"serverInfo": {"features": []}}


def _bucket(run: UploadedRun) -> dict[str, Any]:
    return {
        "id": f"id-{run.name}", "name": run.name, "displayName": run.fields.get("displayName") or run.name, "description": "", "sweepName": None,
        "config": run.fields.get("config") or "{}", "historyLineCount": len(run.history), "project": _project(run.fields),
    }  # fmt: skip


def _project(fields: dict[str, Any]) -> dict[str, Any]:
    return {"id": "p", "name": fields.get("project") or "p", "entity": {"id": "e", "name": fields.get("entity") or "me"}}


def _upsert(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    name = variables["name"]
    inserted = name not in server.runs
    run = server.runs.setdefault(name, UploadedRun(name))
    run.fields |= {key: value for key, value in variables.items() if value is not None}
    run.upserts += 1
    bucket = {**_bucket(run), "historyLineCount": 0}  # wandb documents that a run opened without `resume` replaces one of its id
    return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}


def _resume_status(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    run = server.runs.get(variables["name"])
    model = {"id": "m", "name": variables.get("project"), "entity": {"id": "e", "name": variables.get("entity") or "me"}}
    if run is None:
        return {"model": {**model, "bucket": None}}
    tail = [json.dumps(line) for line in run.history[-1:]]
    return {
        "model": {
            **model,
            "bucket": {
                **_bucket(run), "summaryMetrics": json.dumps(run.summary), "logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]",
                "historyTail": json.dumps(tail), "tags": run.fields.get("tags") or [], "notes": None, "wandbConfig": json.dumps({"t": 1}),
            },
        }
    }  # fmt: skip


def _files(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    files = [{"name": name, "uploadUrl": f"{server.url}/upload/{name}"} for name in variables.get("files") or []]
    return {"createRunFiles": {"runID": "id", "uploadHeaders": [], "files": files}}


_QUERIES: dict[str, Callable[[WandbServer, dict[str, Any]], dict[str, Any]]] = {
    "Viewer": _viewer,
    "ServerFeaturesQuery": _features,
    "UpsertBucket": _upsert,
    "RunResumeStatus": _resume_status,
    "CreateRunFiles": _files,
    "MarkRunFilesUploaded": lambda server, variables: {"markRunFilesUploaded": {"success": True}},
}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            raw = gzip.decompress(raw)
        try:
            body = json.loads(raw or b"{}")
        except ValueError:
            body = {}
        status, data = self.server.answer(self.path, body)
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_PUT = do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    server = WandbServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
