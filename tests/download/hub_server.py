"""A small server that speaks the Hugging Face hub's protocol, on this machine's own address.

It answers model info with the files' sizes and checksums, and serves files with the headers that
huggingface_hub reads (commit, ETag), by ranges.
"""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LARGE_BYTES = 4096
"""files from this size on are in Git LFS, and their ETag is a SHA-256"""


def git_hash(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub:
    """Models by id: each has commits, the newest last, and files by name.

    Attributes:
        requests: (method, path, range) of each request.
        cut: names of files whose first answer breaks off in the middle.
        spoiled: names of files that are served with other bytes than their checksum says.
    """

    def __init__(self):
        self.models, self.requests, self.cut, self.spoiled = {}, [], set(), set()
        self.gated = set()
        self.server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self})
        )
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def commit(self, repo, files):
        """Add a commit and return its name."""
        name = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.models.setdefault(repo, {})[name] = files
        return name

    def find(self, repo, revision):
        commits = self.models.get(repo, {})
        name = [*commits][-1] if revision == "main" and commits else revision
        return name, commits.get(name)

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def _describe(name, content):
    digest = {"oid": hashlib.sha256(content).hexdigest()}
    digest |= {"sha256": digest["oid"], "size": len(content), "pointerSize": 130}
    sibling = {"rfilename": name, "size": len(content), "blobId": git_hash(content)}
    return sibling | ({"lfs": digest} if len(content) >= LARGE_BYTES else {})


class _Handler(BaseHTTPRequestHandler):
    hub = None
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        self.hub.requests.append((self.command, self.path, self.headers.get("Range")))
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self.send_info(found[1], found[2] or "main")
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.send_file(*found.groups(), with_body)
        return self.fail(404, "EntryNotFound")

    def fail(self, code, word):
        self.send_response(code)
        self.send_header("X-Error-Code", word)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_info(self, repo, revision):
        if repo in self.hub.gated:
            return self.fail(403, "GatedRepo")
        name, files = self.hub.find(repo, revision)
        if files is None:
            word = "RevisionNotFound" if repo in self.hub.models else "RepoNotFound"
            return self.fail(404, word)
        siblings = [_describe(*each) for each in sorted(files.items())]
        body = json.dumps({"id": repo, "sha": name, "siblings": siblings, "tags": []}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def send_file(self, repo, revision, name, with_body):
        commit, files = self.hub.find(repo, revision)
        if files is None or name not in files:
            return self.fail(404, "EntryNotFound")
        content = files[name]
        info = _describe(name, content)
        if name in self.hub.spoiled:
            content = bytes(len(content) - 1) + b"!"
        first = int((self.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0])
        self.send_response(206 if self.headers.get("Range") else 200)
        self.send_header("ETag", f'"{info["lfs"]["sha256"] if "lfs" in info else info["blobId"]}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - first))
        if self.headers.get("Range"):
            total = len(content)
            self.send_header("Content-Range", f"bytes {first}-{total - 1}/{total}")
        self.end_headers()
        if not with_body:
            return None
        if name in self.hub.cut:
            self.hub.cut.discard(name)
            self.wfile.write(content[first : first + (len(content) - first) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return None
        self.wfile.write(content[first:])
        return None
