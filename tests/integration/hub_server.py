"""A small Hugging Face hub: the endpoints that huggingface_hub calls to push and to download.

Repositories live in memory, and all of their files are small ones, which need no LFS. ``me`` has
the token ``hf_good``; tags are branches.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKENS = {"hf_good": "me", "hf_user": "user", "hf_read": "reader"}


@dataclass
class Repo:
    """A repository: a list of commits per branch, each with all of its files."""

    private: bool = False
    branches: dict[str, list[str]] = field(default_factory=lambda: {"main": []})
    trees: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files by commit."""
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str = "") -> str:
        above = self.resolve(branch)
        sha = hashlib.sha1(f"{above}{branch}{len(self.trees)}".encode()).hexdigest()
        self.trees[sha] = {**self.trees.get(above or "", {}), **files}
        self.branches[branch].append(sha)
        self.messages.append(message)
        return sha

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch or commit."""
        commits = [revision] if revision in self.trees else self.branches.get(revision)
        return commits[-1] if commits else None


class Hub(ThreadingHTTPServer):
    """The server and what it holds."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        """``GET /path`` of every request."""
        self.down = False
        """Answer everything with 503."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, name: str, files: dict[str, bytes], *, private: bool = False) -> Repo:
        """Create a repository of one commit."""
        repo = self.repos[name] = Repo(private)
        repo.commit("main", files)
        return repo

    def downloads(self) -> list[str]:
        """Names of the files that were downloaded; each is asked for with HEAD first."""
        asked = [r for r in self.requests if r.startswith("HEAD") and "/resolve/" in r]
        return [r.partition("/resolve/")[2].partition("/")[2] for r in asked]


@contextmanager
def running() -> Iterator[Hub]:
    """A hub that serves until the end of the block."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Refused(Exception):  # noqa: N818
    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length) if length else self._chunks()
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        try:
            if self.server.down:
                raise _Refused(503, "", "down for maintenance")
            self._route(path)
        except _Refused as refused:
            codes = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            self._json({"error": refused.message}, refused.status, **codes)

    do_GET = do_POST = do_HEAD  # noqa: N815

    def _chunks(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return b""
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object, status: int = 200, **headers: str) -> None:
        kind = {"Content-Type": "application/json"}
        self._send(status, json.dumps(value).encode(), **kind, **headers)

    # --- who ---

    def _user(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in TOKENS:
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        return TOKENS.get(token)

    def _readable(self, name: str, revision: str) -> tuple[Repo, str]:
        """A repository, and the commit of its revision."""
        user, repo = self._user(), self.server.repos.get(name)
        if repo is None or (repo.private and user != name.partition("/")[0]):
            raise _Refused(401 if user is None else 404, "RepoNotFound", "Repository not found")
        sha = repo.resolve(revision)
        if sha is None and (revision != "main" or repo.branches["main"]):
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, sha or "0" * 40

    def _check_writable(self, name: str) -> None:
        if self._user() != name.partition("/")[0]:
            raise _Refused(403, "", f"You don't have the rights to write to {name}")

    # --- what ---

    def _route(self, path: str) -> None:
        parts = path.strip("/").split("/")
        if path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create()
        elif path.startswith("/api/models/"):
            what, *value = parts[4:] or ("revision", "main")
            act = self._read if self.command == "GET" else self._write
            act("/".join(parts[2:4]), what, "/".join(value))
        elif parts[2:3] == ["resolve"]:
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            raise _Refused(404, "", f"no such page: {self.command} {path}")

    def _create(self) -> None:
        given = json.loads(self.body)
        name = f"{given['organization']}/{given['name']}"
        self._check_writable(name)
        if name in self.server.repos:
            self._json({"error": "You already created this model repo", "url": name}, 409)
            return
        private = given.get("private") is True or given.get("visibility") == "private"
        self.server.repos[name] = Repo(private)
        self._json({"url": f"{self.server.url}/{name}", "name": name})

    def _read(self, name: str, what: str, revision: str) -> None:
        repo, sha = self._readable(name, revision)
        files = repo.trees.get(sha, {})
        if what == "tree":
            self._json([
                {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}
                for path, content in files.items()
            ])  # fmt: skip
            return
        self._json({
            "_id": "0", "id": name, "modelId": name, "sha": sha, "private": repo.private,
            "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": [],
            "siblings": [{"rfilename": file} for file in files],
        })  # fmt: skip

    def _write(self, name: str, what: str, branch: str) -> None:
        self._check_writable(name)
        repo = self.server.repos[name]
        if what == "branch":
            if branch in repo.branches:
                raise _Refused(409, "", "Reference already exists")
            repo.branches[branch] = list(repo.branches["main"])
            self._json({})
        elif what == "preupload":
            how = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            names = [file["path"] for file in json.loads(self.body)["files"]]
            self._json({"files": [{"path": path, **how} for path in names]})
        elif what == "commit":
            header, *files = (json.loads(line)["value"] for line in self.body.splitlines())
            content = {file["path"]: base64.b64decode(file["content"]) for file in files}
            sha = repo.commit(branch, content, header["summary"])
            url = f"{self.server.url}/{name}/commit/{sha}"
            self._json({"success": True, "commitOid": sha, "commitUrl": url})

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repo, sha = self._readable(name, revision)
        if path not in repo.trees.get(sha, {}):
            raise _Refused(404, "EntryNotFound", "Entry not found")
        content = repo.trees[sha][path]
        about = {"X-Repo-Commit": sha, "Accept-Ranges": "bytes", "ETag": f'"{_digest(content)}"'}
        self._send(200, content, **about)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
