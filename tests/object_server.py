"""A store on the loopback interface whose objects a test chooses, and whose answers it can spoil."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO

from pennypod.transfer import PullFile, PullPack


class ObjectServer:
    """Serves objects by name, and stands in for a `Bucket`. `cuts` has after how many bytes the next answers about a
    name break off, `status` what is answered in place of the object, `asked` the names that were asked for."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.status: dict[str, int] = {}
        self.cuts: dict[str, list[int]] = {}
        self.asked: list[str] = []
        store = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.partition("?")[0].strip("/")
                knock = "Range" in self.headers
                if not knock:
                    store.asked.append(name)
                status = store.status.get(name, 200 if name in store.objects else 404)
                body = store.objects.get(name, b"") if status == 200 else b"no"
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                cuts = store.cuts.get(name, [])
                end = cuts.pop(0) if cuts and not knock else len(body)
                self.wfile.write(body[:end])
                self.close_connection = True

            def log_message(self, *_args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/{name}?X-Amz-Signature=secret"

    def put(self, name: str, content: bytes) -> None:
        self.objects[name] = content

    def put_stream(self, name: str, content: IO[bytes]) -> None:
        self.put(name, content.read())

    def size(self, name: str) -> int | None:
        return len(self.objects[name]) if name in self.objects else None

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)

    def get_url(self, name: str, seconds: float) -> str:
        assert seconds > 0
        return self.url(name)

    def pack(self, name: str, files: dict[str, bytes], *, wanted: set[str] | None = None) -> PullPack:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path, content in files.items():
                info = tarfile.TarInfo(path)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        self.objects[name] = out.getvalue()
        rows = tuple(
            PullFile(path, len(content), hashlib.sha256(content).hexdigest(), path.endswith(".sh"), 1_700_000_000)
            for path, content in files.items()
            if wanted is None or path in wanted
        )
        return PullPack(name, self.url(name), len(out.getvalue()), rows)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
