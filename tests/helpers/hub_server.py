"""A small Hub on loopback: repos, branches and commits on disk, spoken to by `huggingface_hub`'s real client.

    with HubServer(folder) as hub:      # point HF_ENDPOINT to hub.url
        ...

Speaks what that client uses: create a repo, preupload, LFS upload, commit, pull requests, branches, listings, downloads
with ranges. Anyone may read public repos; private ones and every change need the token `TOKEN`.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_loopback"
LFS_BYTES = 2000
"""Files of this size and more go through LFS, smaller ones inside the commit."""


class HubServer:
    """Serves `folder` on a free port of 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[tuple[str, str, str | None]] = []
        """(method, path, Range header) of everything that was asked"""
        self.cut_after: dict[str, int] = {}
        """file name → bytes after which the next download of it breaks off"""
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._http.shutdown()
        self._http.server_close()

    # What is on disk: repos/<org>/<name>/repo.json {"private", "refs"}, repos/.../<commit>.json, blobs/<sha256>.

    def repo_folder(self, repo_id: str) -> Path:
        return self.folder / "repos" / repo_id

    def repo(self, repo_id: str) -> dict[str, Any] | None:
        path = self.repo_folder(repo_id) / "repo.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def save_repo(self, repo_id: str, repo: dict[str, Any]) -> None:
        self.repo_folder(repo_id).mkdir(parents=True, exist_ok=True)
        (self.repo_folder(repo_id) / "repo.json").write_text(json.dumps(repo))

    def commit(self, repo_id: str, revision: str) -> dict[str, Any] | None:
        """A commit by branch, pull request or hash."""
        repo = self.repo(repo_id) or {"refs": {}}
        path = self.repo_folder(repo_id) / f"{repo['refs'].get(revision, revision)}.json"
        return json.loads(path.read_text()) | {"id": path.stem} if path.is_file() else None

    def add_commit(self, repo_id: str, ref: str, files: dict[str, str], title: str, parent: str | None) -> str:
        """Files are path → sha256 of a blob; `ref` then points to the new commit."""
        date = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        content = {"files": files, "title": title, "parent": parent, "date": date}
        oid = hashlib.sha1(json.dumps(content).encode()).hexdigest()
        with self._lock:
            repo = self.repo(repo_id)
            assert repo is not None
            repo["refs"][ref] = oid
            self.save_repo(repo_id, repo)
        (self.repo_folder(repo_id) / f"{oid}.json").write_text(json.dumps(content))
        return oid

    def add_blob(self, content: bytes) -> str:
        name = hashlib.sha256(content).hexdigest()
        (self.folder / "blobs").mkdir(parents=True, exist_ok=True)
        (self.folder / "blobs" / name).write_bytes(content)
        return name

    def blob(self, name: str) -> Path:
        return self.folder / "blobs" / name


class _Error(Exception):
    def __init__(self, status: int, code: str) -> None:
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        url = urlsplit(self.path)
        self.query = url.query
        self.hub.requests.append((method, url.path, self.headers.get("Range")))
        self.body = self._read_body()
        for pattern, methods, handle in _ROUTES:
            if method in methods and (match := re.fullmatch(pattern, url.path)):
                try:
                    handle(self, **{name: unquote(value or "") for name, value in match.groupdict().items()})
                except _Error as error:
                    self._send(json.dumps({"error": error.code}).encode(), error.status, {"X-Error-Code": error.code})
                return
        self._send(b"{}", 404)

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send(
        self, content: bytes, status: int = 200, headers: dict[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def _json(self, content: Any) -> None:
        self._send(json.dumps(content).encode(), headers={"Content-Type": "application/json"})

    def _check_access(self, repo_id: str, write: bool = False) -> dict[str, Any]:
        repo, known = self.hub.repo(repo_id), self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo["private"] and not known):
            raise _Error(404 if known else 401, "RepoNotFound")
        if write and not known:
            raise _Error(403, "Forbidden")
        return repo

    def _commit(self, repo_id: str, revision: str) -> dict[str, Any]:
        commit = self.hub.commit(repo_id, revision)
        if commit is None:
            raise _Error(404, "RevisionNotFound")
        return commit

    def create(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise _Error(403, "Forbidden")
        asked = json.loads(self.body)
        repo_id = f"{asked.get('organization') or 'user'}/{asked['name']}"
        address = {"url": f"{self.hub.url}/{repo_id}", "id": repo_id}
        if self.hub.repo(repo_id) is not None:
            self._send(json.dumps(address).encode(), 409)
            return
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.hub.save_repo(repo_id, {"private": private, "refs": {}})
        self.hub.add_commit(repo_id, "main", {}, "initial commit", None)
        self._json(address)

    def validate_yaml(self) -> None:
        self._json({"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        self._check_access(repo, write=True)
        files = json.loads(self.body)["files"]
        modes = [{"path": f["path"], "uploadMode": "lfs" if f["size"] >= LFS_BYTES else "regular"} for f in files]
        self._json({"files": [mode | {"shouldIgnore": False} for mode in modes]})

    def lfs_batch(self, repo: str) -> None:
        self._check_access(repo, write=True)
        objects = json.loads(self.body)["objects"]
        for wanted in objects:
            if not self.hub.blob(wanted["oid"]).exists():
                wanted["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
        self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str) -> None:
        assert self.hub.add_blob(self.body) == oid
        self._send(b"")

    def make_commit(self, repo: str, revision: str) -> None:
        stored, parent = self._check_access(repo, write=True), self._commit(repo, revision)
        files, title = dict(parent["files"]), ""
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                title = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = self.hub.add_blob(base64.b64decode(value["content"]))
            elif item["key"] == "lfsFile":
                files[value["path"]] = value["oid"]
        ref, answer = revision, {}
        if "create_pr=1" in self.query:
            number = 1 + sum(name.startswith("refs/pr/") for name in stored["refs"])
            ref, answer = f"refs/pr/{number}", {"pullRequestUrl": f"{self.hub.url}/{repo}/discussions/{number}"}
        oid = self.hub.add_commit(repo, ref, files, title, parent["id"])
        self._json(answer | {"commitOid": oid, "commitUrl": f"{self.hub.url}/{repo}/commit/{oid}"})

    def branch(self, repo: str, branch: str) -> None:
        stored = self._check_access(repo, write=True)
        if branch in stored["refs"]:
            raise _Error(409, "Conflict")
        stored["refs"][branch] = stored["refs"]["main"]
        self.hub.save_repo(repo, stored)
        self._json({})

    def info(self, repo: str, revision: str = "main") -> None:
        stored, commit = self._check_access(repo), self._commit(repo, revision or "main")
        siblings = [{"rfilename": name} for name in commit["files"]]
        self._json({"id": repo, "sha": commit["id"], "private": stored["private"], "siblings": siblings, "tags": []})

    def tree(self, repo: str, revision: str) -> None:
        self._check_access(repo)
        files = self._commit(repo, revision)["files"]
        sizes = {blob: self.hub.blob(blob).stat().st_size for blob in files.values()}
        self._json(
            [
                {"type": "file", "path": name, "size": sizes[blob], "oid": blob}
                | ({"lfs": {"oid": blob, "size": sizes[blob], "pointerSize": 1}} if sizes[blob] >= LFS_BYTES else {})
                for name, blob in files.items()
            ]
        )

    def commits(self, repo: str, revision: str) -> None:
        self._check_access(repo)
        found: list[dict[str, Any]] = [self._commit(repo, revision)]
        while parent := found[-1]["parent"]:
            found.append(self._commit(repo, parent))
        self._json(
            [{"id": c["id"], "title": c["title"], "message": "", "authors": [], "date": c["date"]} for c in found]
        )

    def resolve(self, repo: str, revision: str, path: str) -> None:
        self._check_access(repo)
        commit = self._commit(repo, revision)
        headers = {"X-Repo-Commit": commit["id"], "Accept-Ranges": "bytes"}
        if path not in commit["files"]:
            self._send(b"", 404, headers | {"X-Error-Code": "EntryNotFound"})
            return
        blob = commit["files"][path]
        content, headers["ETag"] = self.hub.blob(blob).read_bytes(), f'"{blob}"'
        cut = self.hub.cut_after.pop(path, None) if self.command == "GET" else None
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            first = int(wanted[1])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            self._send(content[first:], 206, headers, cut)
        else:
            self._send(content, 200, headers, cut)


_REPO, _REVISION = r"(?P<repo>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
_ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    (r"/api/repos/create", "POST", _Handler.create),
    (r"/api/validate-yaml", "POST", _Handler.validate_yaml),
    (rf"/api/models/{_REPO}/preupload/{_REVISION}", "POST", _Handler.preupload),
    (rf"/api/models/{_REPO}/commit/{_REVISION}", "POST", _Handler.make_commit),
    (rf"/api/models/{_REPO}/branch/(?P<branch>[^/]+)", "POST", _Handler.branch),
    (rf"/api/models/{_REPO}/commits/{_REVISION}", "GET", _Handler.commits),
    (rf"/api/models/{_REPO}/tree/{_REVISION}/?", "GET", _Handler.tree),
    (rf"/api/models/{_REPO}/revision/{_REVISION}", "GET", _Handler.info),
    (rf"/api/models/{_REPO}", "GET", _Handler.info),
    (rf"/{_REPO}\.git/info/lfs/objects/batch", "POST", _Handler.lfs_batch),
    (r"/lfs/(?P<oid>[0-9a-f]{64})", "PUT", _Handler.lfs_put),
    (rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "GET HEAD", _Handler.resolve),
]
