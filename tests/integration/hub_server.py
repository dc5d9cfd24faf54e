"""A small Hugging Face hub in memory, which answers the requests of huggingface_hub.

All of its files are small ones, which need no LFS; everybody may read and write; tags are branches.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import errors, set_client_factory

HTTP = importlib.import_module(errors.HfHubHTTPError.__bases__[0].__module__.partition(".")[0])
"""The HTTP library of huggingface_hub, whatever its name."""


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


class Refused(Exception):  # noqa: N818
    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code, self.message = status, code, message


class Hub:
    """The repositories, and every request as ``GET /path``."""

    url = "https://huggingface.co"

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.refusal: Refused | None = None
        """The answer to everything."""

    def add(self, name: str, files: dict[str, bytes]) -> None:
        """Create a repository of one commit."""
        self.repos[name] = Repo()
        self.repos[name].commit("main", files)

    def downloads(self) -> list[str]:
        """Names of the files that were downloaded; each is asked for with HEAD first."""
        asked = [r for r in self.requests if r.startswith("HEAD") and "/resolve/" in r]
        return [r.partition("/resolve/")[2].partition("/")[2] for r in asked]

    def answer(self, request: Any) -> Any:
        path = request.url.path
        self.requests.append(f"{request.method} {path}")
        try:
            if self.refusal:
                raise self.refusal
            return self._route(request, path)
        except Refused as refused:
            codes = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            return _json({"error": refused.message}, refused.status, codes)

    def _found(self, name: str, revision: str) -> tuple[Repo, str]:
        """A repository, and the commit of its revision."""
        repo = self.repos.get(name)
        if repo is None:
            raise Refused(404, "RepoNotFound", "Repository not found")
        sha = repo.resolve(revision)
        if sha is None and (revision != "main" or repo.branches["main"]):
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, sha or "0" * 40

    def _route(self, request: Any, path: str) -> Any:
        parts = path.strip("/").split("/")
        if path == "/api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            given = json.loads(request.content)
            return self._create(f"{given['organization']}/{given['name']}", given)
        if path.startswith("/api/models/"):
            what, *value = parts[4:] or ("revision", "main")
            name, rest = "/".join(parts[2:4]), "/".join(value)
            if request.method == "GET":
                return self._read(name, what, rest)
            return self._write(name, what, rest, request.content)
        if parts[2:3] == ["resolve"]:
            return self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        raise Refused(404, "", f"no such page: {request.method} {path}")

    def _create(self, name: str, given: dict[str, Any]) -> Any:
        if name in self.repos:
            return _json({"error": "You already created this model repo", "url": name}, 409)
        private = given.get("private") is True or given.get("visibility") == "private"
        self.repos[name] = Repo(private)
        return _json({"url": f"{self.url}/{name}", "name": name})

    def _read(self, name: str, what: str, revision: str) -> Any:
        repo, sha = self._found(name, revision)
        files = repo.trees.get(sha, {})
        if what == "tree":
            return _json([
                {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}
                for path, content in files.items()
            ])  # fmt: skip
        return _json({
            "_id": "0", "id": name, "modelId": name, "sha": sha, "private": repo.private,
            "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": [],
            "siblings": [{"rfilename": file} for file in files],
        })  # fmt: skip

    def _write(self, name: str, what: str, branch: str, body: bytes) -> Any:
        repo = self.repos[name]
        if what == "branch":
            if branch in repo.branches:
                raise Refused(409, "", "Reference already exists")
            repo.branches[branch] = list(repo.branches["main"])
            return _json({})
        if what == "preupload":
            how = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            names = [file["path"] for file in json.loads(body)["files"]]
            return _json({"files": [{"path": path, **how} for path in names]})
        header, *files = (json.loads(line)["value"] for line in body.splitlines())
        content = {file["path"]: base64.b64decode(file["content"]) for file in files}
        sha = repo.commit(branch, content, header["summary"])
        url = f"{self.url}/{name}/commit/{sha}"
        return _json({"success": True, "commitOid": sha, "commitUrl": url})

    def _resolve(self, name: str, revision: str, path: str) -> Any:
        repo, sha = self._found(name, revision)
        if path not in repo.trees.get(sha, {}):
            raise Refused(404, "EntryNotFound", "Entry not found")
        content = repo.trees[sha][path]
        about = {"X-Repo-Commit": sha, "Accept-Ranges": "bytes", "ETag": f'"{_digest(content)}"'}
        return HTTP.Response(200, content=content, headers=about)


@contextmanager
def running() -> Iterator[Hub]:
    """A hub that answers until the end of the block."""
    hub, transport = Hub(), HTTP.MockTransport
    set_client_factory(lambda: HTTP.Client(transport=transport(hub.answer), timeout=None))
    try:
        yield hub
    finally:
        set_client_factory(lambda: HTTP.Client(follow_redirects=True, timeout=None))


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    return HTTP.Response(status, json=value, headers=headers)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
