"""A hub of repositories on this machine, for ``HF_ENDPOINT``."""

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote


def commit_of(name: str) -> str:
    """Return a commit's number."""
    return hashlib.sha1(name.encode()).hexdigest()


@contextmanager
def serving(repositories: dict[str, dict[str, Path]]) -> Iterator[tuple[str, list[str]]]:
    """Serve folders and yield the address and the list of requested paths.

    Args:
        repositories: folder of each revision of each repository; names of data sets begin with ``datasets/``.
    """
    requested: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def _find(self, repository: str, revision: str) -> Path | None:
            revisions = repositories.get(repository, {})
            named = {commit_of(f"{repository}@{name}"): folder for name, folder in revisions.items()}
            return revisions.get(revision, named.get(revision))

        def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = unquote(self.path.split("?")[0])
            requested.append(path)
            words = path.strip("/").split("/")
            if words[:2] == ["api", "models"]:
                self._describe("/".join(words[2:4]), words[4:])
            elif words[:2] == ["api", "datasets"]:
                self._describe("/".join(words[1:4]), words[4:])
            elif "resolve" in words[2:4]:
                end = words.index("resolve")
                self._send("/".join(words[:end]), words[end + 1], "/".join(words[end + 2 :]))
            else:
                self._answer(404)

        def _describe(self, repository: str, words: list[str]) -> None:
            """Answer a question of the API about a repository: its files, some of its paths, or its commit."""
            question, revision = words[:2] if len(words) > 1 else ("commit", "main")
            folder = self._find(repository, revision)
            if folder is None:
                exists = repository in repositories
                self._answer(404, X_Error_Code="RevisionNotFound" if exists else "RepoNotFound")
                return
            name = next(n for n, f in repositories[repository].items() if f == folder)
            files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
            if question == "paths-info":
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                files = {path: file for path, file in files.items() if path in form["paths"]}
            rows = [
                {"type": "file", "path": path, "size": file.stat().st_size, "oid": "0" * 40}
                for path, file in files.items()
            ]
            body = {"id": repository.removeprefix("datasets/"), "sha": commit_of(f"{repository}@{name}")}
            body["siblings"] = [{"rfilename": path} for path in files]
            answer = rows if question in ("tree", "paths-info") else body
            self._answer(200, json.dumps(answer).encode(), Content_Type="application/json")

        def _send(self, repository: str, revision: str, name: str) -> None:
            """Send a file, or a range of its bytes."""
            folder = self._find(repository, revision)
            if folder is None or not (folder / name).is_file():
                unknown = "RevisionNotFound" if repository in repositories else "RepoNotFound"
                self._answer(404, X_Error_Code="EntryNotFound" if folder else unknown)
                return
            body = (folder / name).read_bytes()
            commit = revision if len(revision) == 40 else commit_of(f"{repository}@{revision}")
            headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X_Repo_Commit": commit}
            if (part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")) is None:
                self._answer(200, body, **headers)
                return
            first, last = int(part[1]), min(int(part[2] or len(body)), len(body) - 1)
            self._answer(206, body[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(body)}", **headers)

        do_HEAD = do_POST = do_GET

        def log_message(self, *args) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requested
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def lay_out(cache: Path, repository: str, revisions: dict[str, Path]) -> None:
    """Write revisions of a repository into a folder as the hub's cache lays them out."""
    root = cache / f"models--{repository.replace('/', '--')}"
    for name, folder in revisions.items():
        commit = commit_of(f"{repository}@{name}")
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / name).write_text(commit)
        snapshot = root / "snapshots" / commit
        shutil.copytree(folder, snapshot)
