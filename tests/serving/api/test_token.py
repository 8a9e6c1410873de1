"""Ray's ports ask for a token, without anyone having to think of it."""

import os
from pathlib import Path

import pytest

from lm.errors import UserError
from serving.local_ray import token


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"XDG_DATA_HOME": str(tmp_path)}


def test_a_token_is_made_once_and_readable_by_nobody_else(home: dict[str, str], tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = token(home)
    finally:
        os.umask(before)
    path = tmp_path / "pmi" / "ray-token"
    assert made == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert len(text) == 64
    assert token(home) == made
    assert path.read_text() == text
    assert os.listdir(path.parent) == ["ray-token"]


def test_a_given_token_or_none_at_all_is_respected(home: dict[str, str], tmp_path: Path) -> None:
    assert token(home | {"RAY_AUTH_TOKEN": "a" * 64}) == {"RAY_AUTH_MODE": "token"}
    assert token(home | {"RAY_AUTH_MODE": "disabled"}) == {}
    (tmp_path / "own").write_text("b" * 64)
    assert token(home | {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "own")})["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "own")
    assert not (tmp_path / "pmi").exists()


@pytest.mark.parametrize(
    ("given", "content", "mode", "problem"),
    [
        ({"RAY_AUTH_TOKEN": " "}, None, 0, "RAY_AUTH_TOKEN is empty"),
        ({"RAY_AUTH_MODE": "tokens"}, None, 0, "must be token"),
        ({"RAY_AUTH_TOKEN_PATH": "{here}/pmi/nowhere"}, None, 0, "no such file"),
        ({}, "", 0o600, "empty"),
        ({}, "a" * 64, 0o644, "mode 644 lets others read it"),
    ],
)
def test_a_token_that_cannot_be_used_is_a_clear_error(
    home: dict[str, str], tmp_path: Path, given: dict[str, str], content: str | None, mode: int, problem: str
) -> None:
    if content is not None:
        path = tmp_path / "pmi" / "ray-token"
        path.parent.mkdir()
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(UserError, match=problem):
        token(home | {name: value.format(here=tmp_path) for name, value in given.items()})
