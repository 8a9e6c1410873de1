"""Fetching, against a server of our own: whole and checked, or not there; an interrupted fetch goes on."""

import base64
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from lm.data.fetch import fetch
from lm.data.originals import _fetch_pg19, _fetch_wikitext
from lm.errors import UserError

CONTENT = bytes(range(256)) * 10_000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `files`; can break off after some bytes, or know nothing of ranges."""

    files: ClassVar[dict[str, bytes]]
    break_after: ClassVar[int | None]
    ranges: ClassVar[bool]
    asked: ClassVar[list[str | None]]

    def do_GET(self) -> None:
        url = urllib.parse.urlparse(self.path)
        if url.path == "/listing":
            return self._answer(200, self._listing(urllib.parse.parse_qs(url.query)))
        content = self.files.get(url.path)
        if content is None:
            return self.send_error(404)
        wanted = self.headers.get("Range")
        self.asked.append(wanted)
        if wanted and self.ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                return self.send_error(416)
            return self._answer(206, content[start:])
        return self._answer(200, content)

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: self.break_after])

    def _listing(self, query: dict[str, list[str]]) -> bytes:
        """Two names a page, as the public bucket answers."""
        names = sorted(name[1:] for name in self.files if name.startswith("/" + query["prefix"][0]))
        start = int(query.get("pageToken", ["0"])[0])
        items = [
            {"name": name, "md5Hash": base64.b64encode(hashlib.md5(self.files["/" + name]).digest()).decode()}
            for name in names[start : start + 2]
        ]
        more = {"nextPageToken": str(start + 2)} if start + 2 < len(names) else {}
        return json.dumps({"items": items} | more).encode()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Server.files, Server.break_after, Server.ranges, Server.asked = {"/file": CONTENT}, None, True, []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_a_file_is_fetched_once(server: str, tmp_path: Path) -> None:
    for _ in range(2):
        assert fetch(f"{server}/file", tmp_path / "deep" / "file", MD5).read_bytes() == CONTENT
    assert Server.asked == [None]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file"]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_fetch_that_broke_off_goes_on_or_begins_anew(server: str, tmp_path: Path, ranges: bool) -> None:
    Server.break_after, Server.ranges = 1_000_000, ranges
    with pytest.raises(UserError, match="run again to go on"):
        fetch(f"{server}/file", tmp_path / "file", MD5)
    assert not (tmp_path / "file").exists()
    Server.break_after = None
    assert fetch(f"{server}/file", tmp_path / "file", MD5).read_bytes() == CONTENT
    assert Server.asked == [None, "bytes=1000000-"]


def test_a_part_that_is_whole_already_is_only_checked(server: str, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT)
    assert fetch(f"{server}/file", tmp_path / "file", MD5).read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing_behind(server: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"MD5 {MD5}, expected 0000; the download was removed"):
        fetch(f"{server}/file", tmp_path / "file", "0000")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_and_a_dead_server_name_the_way_out(server: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"answers 404 .* pass it with --source"):
        fetch(f"{server}/other", tmp_path / "other")
    with pytest.raises(UserError, match=r"cannot be reached .* pass it with --source"):
        fetch("http://127.0.0.1:9/file", tmp_path / "file")


def test_the_books_of_pg19_are_fetched_by_the_listing_and_only_what_is_missing(server: str, tmp_path: Path) -> None:
    books = {f"/train/{i}.txt": b"book %d" % i for i in range(5)}
    Server.files |= books | {"/validation/7.txt": b"v", "/test/8.txt": b"t", "/train/LICENSE": b"no book"}
    _fetch_pg19(tmp_path, listing=f"{server}/listing", base=f"{server}/")
    found = {f"/{path.relative_to(tmp_path / 'pg19')}": path.read_bytes() for path in tmp_path.rglob("*.txt")}
    assert found == books | {"/validation/7.txt": b"v", "/test/8.txt": b"t"}
    Server.asked.clear()
    (tmp_path / "pg19/train/3.txt").unlink()
    _fetch_pg19(tmp_path, listing=f"{server}/listing", base=f"{server}/")
    assert Server.asked == [None]


def test_wikitext_rows_become_the_original_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    text = " \n = Title = \n \n some words \n"
    rows = {"text": ["", " = Title = \n", "", " some words \n"]}
    published = dict.fromkeys(("train", "validation", "test"), rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments: published)
    folder = _fetch_wikitext("wikitext-2-v1")(tmp_path)
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"), text
    )

    def offline(*arguments: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert _fetch_wikitext("wikitext-2-v1")(tmp_path) == folder
    with pytest.raises(UserError, match=r"wikitext-103-v1: cannot be fetched \(no route\); .* --source"):
        _fetch_wikitext("wikitext-103-v1")(tmp_path)
