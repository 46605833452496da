"""A hub on a free port of this machine that lies: its answers name files elsewhere."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Repo:
    """What the hub answers about one model."""

    files: Mapping[str, bytes]
    sha: str
    """The commit, where it describes the model."""
    commit: str
    """The commit, where it serves a file."""
    etags: Mapping[str, str] = field(default_factory=dict)
    """The checksums of files where they are not the true ones."""
    listed: tuple[str, ...] = ()
    """Further names in the list of files."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Files in the list that it does not serve, with the commit that it then names."""
    xet: bool = False
    """Whether the list names checksums by which the library downloads from another store."""


def etag(repo: Repo, name: str) -> str:
    return repo.etags.get(name) or hashlib.sha1(repo.files.get(name, b"")).hexdigest()


@contextmanager
def serving(repos: Mapping[str, Repo]) -> Iterator[str]:
    """Serve models by their names; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[:2] == ["api", "models"] and "/".join(parts[2:4]) in repos:
                repo = repos["/".join(parts[2:4])]
                self.send(json.dumps(described(repo, tree="tree" in parts[4:5])).encode())
            elif "/".join(parts[:2]) in repos and parts[2:3] == ["resolve"]:
                repo, name = repos["/".join(parts[:2])], "/".join(parts[4:])
                if name in repo.files and name not in repo.absent:
                    self.send(repo.files[name], repo.commit, etag(repo, name))
                else:
                    commit = repo.absent.get(name, repo.commit)
                    self.send(b"", commit, status=404, error="EntryNotFound")
            else:
                self.send(b"", status=404, error="RepoNotFound")

        def send(
            self, data: bytes, commit: str = "", etag: str = "", status: int = 200, error: str = ""
        ) -> None:
            self.send_response(status)
            named = {"X-Repo-Commit": commit, "ETag": f'"{etag}"' * bool(etag)}
            for name, value in {**named, "X-Error-Code": error}.items():
                if value:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def described(repo: Repo, *, tree: bool) -> object:
    names = [*repo.files, *repo.listed]
    if tree:
        return [
            {"type": "file", "path": name, "size": 1, "oid": "0" * 40} | _large(repo, name)
            for name in names
        ]
    siblings = [
        {"rfilename": name, "size": 1, "blobId": etag(repo, name)} | _large(repo, name)
        for name in names
    ]
    return {"id": "owner/model", "sha": repo.sha, "siblings": siblings}


def _large(repo: Repo, name: str) -> dict[str, object]:
    if not repo.xet:
        return {}
    lfs = {"oid": etag(repo, name), "sha256": etag(repo, name), "size": 1, "pointerSize": 1}
    return {"lfs": lfs, "xetHash": "0" * 64}
