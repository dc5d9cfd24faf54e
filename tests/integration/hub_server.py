"""A small Hugging Face hub in memory, which answers the requests of huggingface_hub.

All of its files are small ones, which need no LFS; everybody may read and write; tags are branches.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import errors

HTTP = importlib.import_module(errors.HfHubHTTPError.__bases__[0].__module__.partition(".")[0])
"""The HTTP library of huggingface_hub, whatever its name."""
URL = "https://huggingface.co"
NOTHING = "0" * 40
"""The commit of an empty repository."""


@dataclass
class Repo:
    """A repository, whose commits have all of their files."""

    private: bool = False
    branches: dict[str, str] = field(default_factory=lambda: {"main": NOTHING})
    """Their last commits."""
    trees: dict[str, dict[str, bytes]] = field(default_factory=lambda: {NOTHING: {}})
    """Files by commit."""
    messages: list[str] = field(default_factory=list)

    def files(self, branch: str = "main") -> dict[str, bytes]:
        return self.trees[self.branches[branch]]

    def commit(self, branch: str, files: dict[str, bytes], message: str = "") -> str:
        sha = f"{len(self.trees):040}"
        self.trees[sha] = self.files(branch) | files
        self.branches[branch] = sha
        self.messages.append(message)
        return sha


class Refused(Exception):  # noqa: N818
    """A status, a message, and the hub's name of the error, if any."""


class Hub:
    """The repositories, and every request as ``GET /path``."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.refusal: Refused | None = None
        """The answer to everything."""

    def client(self) -> Any:
        """A client of the HTTP library that sends its requests to this hub."""
        return HTTP.Client(transport=HTTP.MockTransport(self._answer), timeout=None)

    def add(self, name: str, files: dict[str, bytes]) -> None:
        """Create a repository of one commit."""
        self.repos[name] = Repo()
        self.repos[name].commit("main", files)

    def downloads(self) -> list[str]:
        """Names of the files that were downloaded; each is asked for with HEAD first."""
        asked = [r for r in self.requests if r.startswith("HEAD") and "/resolve/" in r]
        return [r.partition("/resolve/")[2].partition("/")[2] for r in asked]

    def _answer(self, request: Any) -> Any:
        self.requests.append(f"{request.method} {request.url.path}")
        try:
            if self.refusal:
                raise self.refusal
            parts = request.url.path.strip("/").split("/")
            found = self._route(request.method, parts, request.content)
        except Refused as refused:
            status, message, *code = refused.args
            headers = {"X-Error-Code": "".join(code), "X-Error-Message": message}
            return HTTP.Response(status, json={"error": message}, headers=headers)
        return found if isinstance(found, HTTP.Response) else HTTP.Response(200, json=found)

    def _route(self, method: str, parts: list[str], body: bytes) -> Any:
        match method, parts:
            case "POST", ["api", "validate-yaml"]:
                return {"errors": [], "warnings": []}
            case "POST", ["api", "repos", "create"]:
                return self._create(json.loads(body))
            case "GET", ["api", "models", user, name, "tree", *revision]:
                repo, sha = self._found(f"{user}/{name}", "/".join(revision))
                return [
                    {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}
                    for path, content in repo.trees[sha].items()
                ]
            case "GET", ["api", "models", user, name, *revision]:
                repo, sha = self._found(f"{user}/{name}", "/".join(revision[1:]) or "main")
                siblings = [{"rfilename": file} for file in repo.trees[sha]]
                about = {"id": f"{user}/{name}", "sha": sha, "private": repo.private}
                return about | {"siblings": siblings}
            case "POST", ["api", "models", user, name, what, *branch]:
                return self._write(f"{user}/{name}", what, "/".join(branch), body)
            case _, [user, name, "resolve", revision, *file]:
                repo, sha = self._found(f"{user}/{name}", revision)
                content = repo.trees[sha].get("/".join(file))
                if content is None:
                    raise Refused(404, "Entry not found", "EntryNotFound")
                about = {"X-Repo-Commit": sha, "ETag": f'"{_digest(content)}"'}
                return HTTP.Response(200, content=content, headers=about)
        raise Refused(404, f"no such page: {method} {parts}")

    def _found(self, name: str, revision: str) -> tuple[Repo, str]:
        """A repository, and the commit of its revision."""
        if name not in self.repos:
            raise Refused(404, "Repository not found", "RepoNotFound")
        repo = self.repos[name]
        sha = repo.branches.get(revision, revision)
        if sha not in repo.trees:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repo, sha

    def _create(self, given: dict[str, Any]) -> Any:
        name = f"{given['organization']}/{given['name']}"
        status = 409 if name in self.repos else 200
        private = given.get("private") is True or given.get("visibility") == "private"
        self.repos.setdefault(name, Repo(private))
        return HTTP.Response(status, json={"url": f"{URL}/{name}", "name": name})

    def _write(self, name: str, what: str, branch: str, body: bytes) -> Any:
        repo = self.repos[name]
        if what == "branch":
            if branch in repo.branches:
                raise Refused(409, "Reference already exists")
            repo.branches[branch] = repo.branches["main"]
            return {}
        if what == "preupload":
            how = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": file["path"], **how} for file in json.loads(body)["files"]]}
        header, *files = (json.loads(line)["value"] for line in body.splitlines())
        content = {file["path"]: base64.b64decode(file["content"]) for file in files}
        sha = repo.commit(branch, content, header["summary"])
        return {"success": True, "commitOid": sha, "commitUrl": f"{URL}/{name}/commit/{sha}"}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
