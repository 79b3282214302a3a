"""A hub of model repositories on this machine, for ``HF_ENDPOINT``."""

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


def commit_of(name: str) -> str:
    """Return a commit's number."""
    return hashlib.sha1(name.encode()).hexdigest()


@contextmanager
def serving(repositories: dict[str, dict[str, Path]]) -> Iterator[tuple[str, list[str]]]:
    """Serve folders and yield the address and the list of requested paths.

    Args:
        repositories: folder of each revision of each repository.
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
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = unquote(self.path.split("?")[0])
            requested.append(path)
            words = path.strip("/").split("/")
            if words[:2] == ["api", "models"]:
                repository, revision = "/".join(words[2:4]), words[5] if len(words) > 5 else "main"
                folder = self._find(repository, revision)
                if folder is None:
                    exists = repository in repositories
                    self._answer(404, X_Error_Code="RevisionNotFound" if exists else "RepoNotFound")
                    return
                name = next((n for n, f in repositories[repository].items() if f == folder), revision)
                files = sorted(file for file in folder.rglob("*") if file.is_file())
                if len(words) > 4 and words[4] == "tree":
                    rows = [{"type": "file", "path": str(f.relative_to(folder)), "size": f.stat().st_size, "oid": "0" * 40} for f in files]  # fmt: skip
                    self._answer(200, json.dumps(rows).encode(), Content_Type="application/json")
                    return
                body = {"id": repository, "sha": commit_of(f"{repository}@{name}")}
                body["siblings"] = [{"rfilename": str(file.relative_to(folder))} for file in files]
                self._answer(200, json.dumps(body).encode(), Content_Type="application/json")
                return
            if len(words) > 4 and words[2] == "resolve":
                repository, revision = "/".join(words[:2]), words[3]
                folder, name = self._find(repository, revision), "/".join(words[4:])
                if folder is not None and (folder / name).is_file():
                    body = (folder / name).read_bytes()
                    commit = revision if len(revision) == 40 else commit_of(f"{repository}@{revision}")
                    self._answer(200, body, ETag=f'"{hashlib.sha256(body).hexdigest()}"', X_Repo_Commit=commit)
                    return
                self._answer(404, X_Error_Code="EntryNotFound" if folder else "RepoNotFound")
                return
            self._answer(404)

        do_HEAD = do_GET

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
