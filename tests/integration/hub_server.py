"""A small Hugging Face hub: the endpoints that huggingface_hub calls to push and to download.

Repositories live in memory. Large files (``*.safetensors``) go through the LFS endpoints and are
served, as by the real hub, after a redirect. ``me`` has the token ``hf_good``; tags are branches.
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
        above = self.branches[branch][-1] if self.branches[branch] else None
        tree = {**(self.trees[above] if above else {}), **files}
        sha = hashlib.sha1(f"{above}{branch}{len(self.trees)}".encode()).hexdigest()
        self.trees[sha] = tree
        self.branches[branch].append(sha)
        self.messages.append(message)
        return sha

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch or commit."""
        if revision in self.trees:
            return revision
        commits = self.branches.get(revision)
        return commits[-1] if commits else None


class Hub(ThreadingHTTPServer):
    """The server and what it holds."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
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
        for content in files.values():
            self.blobs[hashlib.sha256(content).hexdigest()] = content
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


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gz", ".png"))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._handle()

    do_GET = do_POST = do_PUT = do_HEAD  # noqa: N815

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length) if length else self._chunks()
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        try:
            if self.server.down:
                raise _Refused(503, "", "down for maintenance")
            self._route(path)
        except _Refused as refused:
            self._send(
                refused.status,
                json.dumps({"error": refused.message}).encode(),
                **{"X-Error-Code": refused.code, "X-Error-Message": refused.message},
            )

    def _chunks(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return b""
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    # --- who ---

    def _user(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not token:
            return None
        if token not in TOKENS:
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        return TOKENS[token]

    def _readable(self, name: str) -> Repo:
        user, repo = self._user(), self.server.repos.get(name)
        if repo is None or (repo.private and user != name.partition("/")[0]):
            raise _Refused(401 if user is None else 404, "RepoNotFound", "Repository not found")
        return repo

    def _writable(self, name: str) -> None:
        user = self._user()
        if user is None:
            raise _Refused(401, "", "Invalid username or password.")
        if user != name.partition("/")[0]:
            raise _Refused(403, "", f"You don't have the rights to write to {name}")

    def _commit_of(self, repo: Repo, revision: str) -> str:
        sha = repo.resolve(revision)
        if sha is None and not (revision == "main" and not repo.branches["main"]):
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha or "0" * 40

    # --- what ---

    def _route(self, path: str) -> None:
        parts = path.strip("/").split("/")
        if path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create()
        elif path.startswith("/api/models/"):
            self._api("/".join(parts[2:4]), parts[4:])
        elif path.endswith("/info/lfs/objects/batch"):
            self._batch("/".join(parts[:2]).removesuffix(".git"))
        elif parts[0] == "lfs":
            self.server.blobs[hashlib.sha256(self.body).hexdigest()] = self.body
            self._send(200)
        elif parts[0] == "cdn":
            self._cdn(parts[1])
        elif parts[2:3] == ["resolve"]:
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            raise _Refused(404, "", f"no such page: {self.command} {path}")

    def _create(self) -> None:
        given = json.loads(self.body)
        name = f"{given['organization']}/{given['name']}"
        self._writable(name)
        if name in self.server.repos:
            self._json({"error": "You already created this model repo", "url": name}, 409)
            return
        private = given.get("private") is True or given.get("visibility") == "private"
        self.server.repos[name] = Repo(private)
        self._json({"url": f"{self.server.url}/{name}", "name": name})

    def _api(self, name: str, rest: list[str]) -> None:
        what, value = (rest[0], "/".join(rest[1:])) if rest else ("revision", "main")
        if self.command == "GET":
            repo = self._readable(name)
            if what == "revision":
                self._json(self._info(name, repo, self._commit_of(repo, value)))
            elif what == "tree":
                tree = repo.trees.get(self._commit_of(repo, value), {})
                self._json([self._file(path, content) for path, content in tree.items()])
            else:
                raise _Refused(404, "", "no such page")
            return
        self._writable(name)
        repo = self.server.repos[name]
        if what == "branch":
            if value in repo.branches:
                raise _Refused(409, "", "Reference already exists")
            repo.branches[value] = list(repo.branches["main"])
            self._json({})
        elif what == "preupload":
            self._json(
                {
                    "files": [
                        {
                            "path": file["path"],
                            "uploadMode": "lfs" if _is_large(file["path"]) else "regular",
                            "shouldIgnore": False,
                            "oid": None,
                        }
                        for file in json.loads(self.body)["files"]
                    ]
                }
            )
        elif what == "commit":
            self._add_commit(name, repo, value)

    def _info(self, name: str, repo: Repo, sha: str) -> dict[str, Any]:
        files = repo.trees.get(sha, {})
        return {
            "_id": "0",
            "id": name,
            "modelId": name,
            "sha": sha,
            "private": repo.private,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [{"rfilename": file} for file in files],
        }

    def _file(self, path: str, content: bytes) -> dict[str, Any]:
        sha256 = hashlib.sha256(content).hexdigest()
        large = {"lfs": {"oid": sha256, "size": len(content), "pointerSize": 134}}
        return {
            "type": "file",
            "path": path,
            "size": len(content),
            "oid": hashlib.sha1(content).hexdigest(),
            **(large if _is_large(path) else {}),
        }

    def _batch(self, name: str) -> None:
        self._writable(name)
        objects = json.loads(self.body)["objects"]
        for one in objects:
            if one["oid"] not in self.server.blobs:
                one["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{one['oid']}"}}
        self._json({"transfer": "basic", "objects": objects})

    def _add_commit(self, name: str, repo: Repo, branch: str) -> None:
        files, message = {}, ""
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
        for content in files.values():
            self.server.blobs[hashlib.sha256(content).hexdigest()] = content
        sha = repo.commit(branch, files, message)
        url = f"{self.server.url}/{name}/commit/{sha}"
        self._json({"success": True, "commitOid": sha, "commitUrl": url})

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repo = self._readable(name)
        sha = self._commit_of(repo, revision)
        if path not in repo.trees.get(sha, {}):
            raise _Refused(404, "EntryNotFound", "Entry not found")
        content = repo.trees[sha][path]
        headers = {"X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if _is_large(path):
            sha256 = hashlib.sha256(content).hexdigest()
            cdn = self.server.url.replace("127.0.0.1", "localhost")  # another host
            self._send(
                302,
                Location=f"{cdn}/cdn/{sha256}",
                **headers,
                **{"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(content))},
            )
        else:
            self._send(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', **headers)

    def _cdn(self, oid: str) -> None:
        content = self.server.blobs[oid]
        self._send(200, content, ETag=f'"{oid}"')
