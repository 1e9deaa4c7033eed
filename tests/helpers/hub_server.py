"""A small Hub on loopback: what huggingface_hub needs to create, fill and read repositories of models."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "loopback" * 4


class Hub(ThreadingHTTPServer):
    """Repositories in memory; `fail` maps (method, part of a path) to statuses that are answered next."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.objects, self.log, self.fail = {}, {}, [], []
        self.private, self.pull_requests, self.drop = set(), 0, 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"

    def files(self, repository, revision="main"):
        return self.repositories[repository][revision]["files"]


def commit_hash(files):
    return hashlib.sha1(
        repr(sorted((k, hashlib.sha1(v).hexdigest()) for k, v in files.items())).encode()
    ).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def body(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status=200, content=b"", **headers):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers.setdefault("Content-Type", "application/json")
        self.send_response(status)
        length = headers.pop("length", len(content))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle_any(self):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.log.append((self.command, path, self.headers.get("Authorization")))
        for failure in list(hub.fail):
            method, part, status = failure
            if method == self.command and part in path:
                hub.fail.remove(failure)
                self.body()
                return self.answer(status, {"error": "refused"})
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if path == "/api/repos/create":
            return self.create(json.loads(self.body()))
        if path == "/api/validate-yaml":
            self.body()
            return self.answer(200, {"errors": [], "warnings": []})
        if path.startswith("/lfs/"):
            return self.store(parts[1])
        if path.endswith("/info/lfs/objects/batch"):
            return self.batch(json.loads(self.body()))
        if parts[:2] == ["api", "models"]:
            return self.api("/".join(parts[2:4]), parts[4:])
        if parts[:2] == ["api", "datasets"]:
            return self.api("/".join(parts[1:4]), parts[4:])
        at = 3 if parts[0] == "datasets" else 2
        if len(parts) > at + 1 and parts[at] == "resolve":
            return self.resolve("/".join(parts[:at]), parts[at + 1], "/".join(parts[at + 2 :]))
        self.body()
        return self.answer(404, {"error": "no such address"}, X_Error_Code="RepoNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def create(self, wanted):
        hub = self.server
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        url = {"url": f"{hub.address}/{name}", "name": name, "id": name}
        if name in hub.repositories:
            return self.answer(409, {**url, "error": "exists"})
        hub.repositories[name] = {"main": {"files": {}}}
        if wanted.get("private") or wanted.get("visibility") == "private":
            hub.private.add(name)
        return self.answer(200, url)

    def api(self, name, rest):
        hub = self.server
        if name not in hub.repositories:
            self.body()
            return self.answer(404, {"error": "no repository"}, X_Error_Code="RepoNotFound")
        branches = hub.repositories[name]
        if rest[:1] == ["branch"]:
            self.body()
            branches.setdefault(rest[1], {"files": dict(branches["main"]["files"])})
            return self.answer(200, {})
        if rest[:1] == ["preupload"]:
            files = json.loads(self.body())["files"]
            return self.answer(200, {"files": [self.mode(f) for f in files]})
        if rest[:1] == ["commit"]:
            return self.commit(name, rest[1])
        revision = rest[1] if rest[:1] in (["revision"], ["tree"]) else "main"
        found = self.revision(branches, revision)
        if found is None:
            return self.answer(404, {"error": "no revision"}, X_Error_Code="RevisionNotFound")
        files = found["files"]
        if rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": p, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for p, c in files.items()
            ]
            return self.answer(200, entries)
        siblings = [{"rfilename": path} for path in files]
        info = {
            "id": name,
            "modelId": name,
            "sha": commit_hash(files),
            "siblings": siblings,
            "private": name in hub.private,
        }
        return self.answer(200, {**info, "tags": [], "downloads": 0, "likes": 0})

    def revision(self, branches, revision):
        return branches.get(revision) or next(
            (b for b in branches.values() if commit_hash(b["files"]) == revision), None
        )

    def mode(self, file):
        large = file["size"] > 20000 or file["path"].endswith(".safetensors")
        return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}

    def batch(self, request):
        hub, objects = self.server, []
        for wanted in request["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in hub.objects:
                entry["actions"] = {"upload": {"href": f"{hub.address}/lfs/{wanted['oid']}"}}
            objects.append(entry)
        return self.answer(
            200, {"transfer": "basic", "objects": objects}, Content_Type="application/vnd.git-lfs+json"
        )

    def store(self, oid):
        hub = self.server
        if hub.drop:
            hub.drop -= 1
            self.rfile.read(100)
            self.close_connection = True
            return self.connection.close()
        data = self.body()
        if hashlib.sha256(data).hexdigest() != oid:
            return self.answer(400, {"error": "hash"})
        hub.objects[oid] = data
        return self.answer(200)

    def commit(self, name, revision):
        hub, branches = self.server, self.server.repositories[name]
        lines = [json.loads(line) for line in self.body().splitlines() if line]
        pull_request = "create_pr=1" in self.path
        if pull_request:
            hub.pull_requests += 1
            revision = f"refs/pr/{hub.pull_requests}"
            branches[revision] = {"files": dict(branches["main"]["files"])}
        files = branches[revision]["files"]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        branches[revision].setdefault("commits", []).append(lines[0]["value"]["summary"])
        sha = commit_hash(files)
        answer = {
            "commitOid": sha,
            "commitUrl": f"{hub.address}/{name}/commit/{sha}",
            "hookOutput": "",
            "success": True,
        }
        if pull_request:
            answer["pullRequestUrl"] = f"{hub.address}/{name}/discussions/{hub.pull_requests}"
        return self.answer(200, answer)

    def resolve(self, name, revision, path):
        hub = self.server
        if name not in hub.repositories or (name in hub.private and not self.headers.get("Authorization")):
            return self.answer(404 if name not in hub.repositories else 401, b"", X_Error_Code="RepoNotFound")
        found = self.revision(hub.repositories[name], revision)
        if found is None:
            return self.answer(404, b"", X_Error_Code="RevisionNotFound")
        commit = commit_hash(found["files"])
        if path not in found["files"]:
            return self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        content = found["files"][path]
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        headers = {"Accept_Ranges": "bytes", "X_Repo_Commit": commit, "ETag": etag}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted:
            first, last = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
            headers["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
            return self.answer(206, content[first : last + 1], **headers)
        return self.answer(200, content, **headers)
