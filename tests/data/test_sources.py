"""Sources: every packing gives the same text; damaged, cut or hostile files are named, never read half."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest

from lm.data import sources
from lm.data.sources import BLOCK, Reading, decoded, texts
from lm.errors import UserError

TEXT = b"".join(b"line %d of a long enough text\n" % i for i in range(60_000))


def tar_of(members: dict[str, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def zip_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@lru_cache
def packed(name: str) -> bytes:
    return PACKINGS[name]()


MEMBERS = {"train/a.txt": TEXT, "test/b.txt": b"short"}
PACKINGS: dict[str, Callable[[], bytes]] = {
    "a.txt": lambda: TEXT,
    "a.txt.gz": lambda: gzip.compress(TEXT),
    "a.txt.xz": lambda: lzma.compress(TEXT),
    "a.txt.bz2": lambda: bz2.compress(TEXT),
    "all.zip": lambda: zip_of(MEMBERS),
    "all.tar": lambda: tar_of(MEMBERS),
    "all.tar.gz": lambda: tar_of(MEMBERS, "w:gz"),
    "all.tgz": lambda: tar_of(MEMBERS, "w:gz"),
    "all.tar.xz": lambda: tar_of(MEMBERS, "w:xz"),
    "all.tar.bz2": lambda: tar_of(MEMBERS, "w:bz2"),
}


def read(source: Path, pattern: str = "*") -> dict[str, bytes]:
    return {text.name: b"".join(Reading(text).blocks()) for text in texts(source, pattern)}


@pytest.mark.parametrize("name", PACKINGS)
def test_every_packing_gives_the_same_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(packed(name))
    expected = {"a.txt": TEXT} if name.startswith("a.") else MEMBERS
    assert read(tmp_path / name) == expected
    assert read(tmp_path) == expected


@pytest.mark.parametrize("name", [name for name in PACKINGS if name != "a.txt"])
@pytest.mark.parametrize("part", [0.3, 0.9, 0.99])
def test_a_file_cut_short_is_an_error_that_names_it(tmp_path: Path, name: str, part: float) -> None:
    content = packed(name)
    (tmp_path / name).write_bytes(content[: int(len(content) * part)])
    with pytest.raises(UserError, match=f"{name}: .*(cut short|damaged).* get the file again"):
        read(tmp_path / name)


def test_a_plain_tar_cut_between_two_members_is_an_error(tmp_path: Path) -> None:
    whole = tar_of({"a.txt": b"x" * 512, "b.txt": b"y" * 512})
    (tmp_path / "all.tar").write_bytes(whole[:1024])
    with pytest.raises(UserError, match="lacks its end mark"):
        read(tmp_path / "all.tar")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.xz", "all.zip", "all.tar.gz"])
def test_a_damaged_byte_is_an_error_that_names_the_file(tmp_path: Path, name: str) -> None:
    content = bytearray(packed(name))
    content[len(content) // 2] ^= 0xFF
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}: cut short or damaged"):
        read(tmp_path / name)


@pytest.mark.parametrize("member", ["../outside.txt", "/etc/outside.txt", "a/../../outside.txt", "..\\outside.txt", "C:\\x.txt"])
@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_a_member_that_points_outside_the_archive_is_refused(tmp_path: Path, member: str, pack: Callable) -> None:
    path = tmp_path / ("x.tar" if pack is tar_of else "x.zip")
    path.write_bytes(pack({member: b"text"}))
    with pytest.raises(UserError, match="points outside the archive"):
        read(path)


def test_a_link_in_a_tar_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        member = tarfile.TarInfo("train/a.txt")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(UserError, match=r"'train/a\.txt' is sparse, a link or a device"):
        read(tmp_path / "x.tar")


def test_a_sparse_member_whose_holes_would_be_read_as_zeros_is_refused(tmp_path: Path) -> None:
    member = tarfile.TarInfo("a.txt")
    member.type, member.size = tarfile.GNUTYPE_SPARSE, 0
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.addfile(member)
    with pytest.raises(UserError, match=r"'a\.txt' is sparse"):
        read(tmp_path / "x.tar")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.xz", "a.txt.bz2", "all.zip", "all.tar.xz"])
def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).write_bytes(packed(name))
    monkeypatch.setattr(sources, "SURE", len(TEXT) // 2)
    monkeypatch.setattr(sources, "EXPANSION", 1)
    with pytest.raises(UserError, match=f"{name}: unpacks to more than 1 times its size"):
        read(tmp_path / name)
    monkeypatch.setattr(sources, "SURE", 1 << 30)
    assert TEXT in read(tmp_path / name).values()


def test_a_line_too_long_to_be_held_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LONGEST_LINE", 2 * BLOCK)
    (tmp_path / "a.txt").write_bytes(b"x" * 2 * BLOCK + b"\n" + b"y" * 2 * BLOCK)
    assert sum(map(len, read(tmp_path).values())) == 4 * BLOCK + 1
    (tmp_path / "a.txt").write_bytes(b"x" * (2 * BLOCK + 1))
    with pytest.raises(UserError, match=r"'a\.txt' has a line of more than 2 MB; put newlines into it"):
        read(tmp_path)


def test_a_link_to_a_folder_is_refused_and_one_to_a_file_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/b.txt").write_bytes(b"text")
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.txt").symlink_to(tmp_path / "elsewhere/b.txt")
    assert read(tmp_path / "source") == {"a.txt": b"text"}
    (tmp_path / "source/train").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="train: a link to a folder"):
        read(tmp_path / "source")


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_hidden_members_are_left_out(tmp_path: Path, pack: Callable) -> None:
    path = tmp_path / ("x.tar" if pack is tar_of else "x.zip")
    path.write_bytes(pack({"./train/a.txt": b"text", "train/._a.txt": b"\xff", "__MACOSX/._a.txt": b"\xff"}))
    assert list(read(path)) == ["./train/a.txt"]


def test_hidden_files_and_files_of_another_pattern_are_left_out(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "INDEX.tsv", ".hidden/c.txt", "deep/er/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    assert list(read(tmp_path, "*.txt")) == ["a.txt", "b.txt", "deep/er/d.txt"]


def test_a_source_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: there is no such file or folder"):
        read(tmp_path / "nowhere")


def test_blocks_end_after_a_newline_and_are_about_a_megabyte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT)
    found = texts(tmp_path / "a.txt")
    text = next(found)
    blocks = list(Reading(text).blocks())
    assert b"".join(blocks) == TEXT
    assert all(block.endswith(b"\n") for block in blocks)
    assert max(map(len, blocks)) < BLOCK + 100


def test_a_text_without_a_newline_is_one_block(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * (3 * BLOCK))
    found = texts(tmp_path / "a.txt")
    text = next(found)
    reading = Reading(text)
    assert list(reading.blocks()) == [b"x" * (3 * BLOCK)]
    assert reading.size == 3 * BLOCK


def test_the_place_of_a_byte_that_is_not_utf8_is_named() -> None:
    with pytest.raises(UserError, match=r"book\.txt: byte 1,003 \(0xe9\) is not UTF-8; .*iconv"):
        decoded(b"caf\xe9 ", "book.txt", 1000)
