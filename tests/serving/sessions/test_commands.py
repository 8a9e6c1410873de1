"""`pmi sessions`: what a user types, and what comes of it."""

import json
import shlex
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

import serving.cli  # noqa: F401  (mounts the commands)
from lm.cli import app
from lm.commands import run
from lm.data.pieces import PieceTokenizer
from lm.model.pretrained import save_pretrained
from serving.sessions.cli import app as sessions_app
from serving.sessions.cli import more_line
from serving.sessions.opening import default_file, open_store, store_url
from serving.sessions.states import read_again
from serving.sessions.store import Change, Settings, Snapshot
from tests.serving.sessions.conftest import SETTINGS
from tests.serving.sessions.test_files import MINE, TEXT, build, content


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite:///{tmp_path}/s.db"
    monkeypatch.setenv("PMI_STORE", url)
    monkeypatch.setenv("COLUMNS", "200")
    store = open_store(url)
    store.restore("local", "ada", content(keep_history=True))
    store.close()
    return url


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_pretrained(MINE.model, MINE.tokenizer, folder)
    return folder


def pmi(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> str:
    result = run(app, ["sessions", *map(str, args)])
    out, err = capsys.readouterr()
    assert result == code, out + err
    assert "Traceback" not in err
    return out if code == 0 else out + err


@pytest.mark.parametrize("command", [x.name for x in sessions_app.registered_commands])
def test_every_commands_help_shows_a_worked_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"Example: pmi sessions {command}" in " ".join(pmi(capsys, command, "--help").split())


def test_a_session_is_listed_shown_forked_taken_back_and_removed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "ada" in pmi(capsys, "ls")
    shown = json.loads(pmi(capsys, "show", "ada", "--json"))
    assert (shown["position"], shown["tail"], shown["settings"]["keep_history"]) == (len(TEXT), 4, True)
    pmi(capsys, "fork", "ada", "bob", "--position", 50)
    assert json.loads(pmi(capsys, "show", "bob", "--json"))["parent"] == "ada"
    store = open_store(url)
    lease = store.lease("local", "bob", "w")
    store.commit([Change(lease, 50, range(10), Snapshot(56, b"x"), turn=True)])
    assert "in use by 'w'" in pmi(capsys, "rollback", "bob", "--turn", code=2)
    store.release([lease])
    store.close()
    assert "position 50" in pmi(capsys, "rollback", "bob", "--turn")
    assert "49..50" in pmi(capsys, "rollback", "bob", 3, code=2)
    assert "either a POSITION or --turn" in pmi(capsys, "rollback", "bob", code=2)
    out = pmi(capsys, "rm", "bob", "nobody", code=2)
    assert "bob: deleted" in out
    assert "'nobody'" in out
    assert "sound: 1 sessions" in pmi(capsys, "verify")
    assert "evicted 1 sessions" in pmi(capsys, "evict", "--bytes", 10)


def test_a_damaged_session_is_removed_and_the_store_repaired(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(url)
    store.restore("local", "bob", content(TEXT[:40]))
    store.close()
    db = sqlite3.connect(url.removeprefix("sqlite:///"))
    db.execute("UPDATE bounds SET data = zeroblob(100) WHERE key = (SELECT key FROM sessions WHERE id = 'bob')")
    db.commit()
    db.close()
    out = pmi(capsys, "verify", "--repair", code=1)
    assert "DAMAGED session local/bob" in out
    assert "left as they are: 1 snapshots" in out
    pmi(capsys, "rm", "bob")
    assert "--repair" in pmi(capsys, "verify", code=1)
    out = pmi(capsys, "verify", "--repair")
    assert "repaired: 1 counts of references, of which 1 snapshots were removed" in out
    assert "sound: 1 sessions" in out
    assert "sound: 1 sessions" in pmi(capsys, "verify")


@pytest.mark.parametrize("args", [["--all"], ["--tenant", "zoe"], []], ids=["all", "tenant", "local"])
def test_the_line_that_says_how_to_see_more_works_when_pasted(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PMI_STORE", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "80")
    url = f"sqlite:///{tmp_path}/a store/s.db"
    store = open_store(url)
    names = [(tenant, f"s{i}") for tenant in ("local", "zoe") for i in range(5)]
    for tenant, name in names:
        store.create(tenant, name, SETTINGS)
    store.close()
    line = shlex.join(["pmi", "sessions", "ls", "--store", url, "--limit", "2", "--durability", "relaxed", *args])
    seen: list[str] = []
    while line:
        table, _, line = pmi(capsys, *shlex.split(line)[2:]).partition("more: ")
        seen += [word for word in table.split() if word.split("/")[-1] in {"s0", "s1", "s2", "s3", "s4"}]
    expected = {"--all": [f"{tenant}/{name}" for tenant, name in names]}
    assert seen == expected.get("".join(args), [f"s{i}" for i in range(5)])


def test_the_line_that_says_how_to_see_more_shows_no_password() -> None:
    line = more_line("local/a", "redis://me:secret@127.0.0.1:1/0", "local", True, 100, "full")
    assert line == "pmi sessions ls --store 'redis://me:***@127.0.0.1:1/0' --all --after local/a"


def test_a_session_is_carried_by_file_and_a_damaged_file_is_refused(
    url: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ada.session"
    pmi(capsys, "export", "ada", file)
    assert "--force" in pmi(capsys, "export", "ada", file, code=2)
    pmi(capsys, "import", file, "copy", "--checkpoint", folder, "--retain", 3)
    assert "exists" in pmi(capsys, "import", file, "copy", "--checkpoint", folder, code=2)
    store = open_store(url)
    assert replace(store.content("local", "copy"), settings=None) == replace(store.content("local", "ada"), settings=None)
    store.close()
    file.write_bytes(file.read_bytes()[:-5])
    assert "damaged" in pmi(capsys, "import", file, "copy2", "--checkpoint", folder, code=2)
    out = pmi(capsys, "import", tmp_path / "none", "copy2", "--checkpoint", tmp_path / "nowhere", code=2)
    assert "no such file" in out
    assert "no config.json" in out


def test_show_draws_the_memory_of_a_live_session(
    url: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = pmi(capsys, "show", "ada", "--checkpoint", folder, "--plot", tmp_path / "m.png", "--json")
    found = json.loads(out)["inspection"]
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    assert found["ids"] == TEXT[48:]
    assert "worst of times" in pmi(capsys, "show", "ada", "--checkpoint", folder)
    assert "needs --checkpoint" in pmi(capsys, "show", "ada", "--plot", tmp_path / "m.png", code=2)


def test_a_session_with_a_kept_history_is_migrated_to_another_model(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = build(7, "segment=4")
    save_pretrained(other.model, other.tokenizer, tmp_path / "other")
    pmi(capsys, "migrate", "ada", "--to", tmp_path / "other", "--as", "bob")
    pmi(capsys, "migrate", "ada", "--to", tmp_path / "other")
    store = open_store(url)
    expected = read_again(other, TEXT, content(keep_history=True).settings)
    assert store.content("local", "bob") == store.content("local", "ada") == expected
    assert store.get("local", "ada").version == 2
    assert store.get("local", "bob").settings.model == other.fingerprint
    store.create("local", "short", Settings(other.fingerprint, other.tokenizer.fingerprint(), 4))
    store.close()
    assert "keeps no history" in pmi(capsys, "migrate", "short", "--to", tmp_path / "other", code=2)


def test_a_session_is_migrated_to_a_model_with_another_tokenizer_by_its_text(
    url: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = MINE.tokenizer.decode(TEXT)
    pieces = PieceTokenizer.train([f"{text}\n" * 20], vocab_size=290, model_type="bpe", threads=1)
    other = build(7, "segment=4", tokenizer=pieces)
    save_pretrained(other.model, other.tokenizer, tmp_path / "other")
    assert "give --from" in pmi(capsys, "migrate", "ada", "--to", tmp_path / "other", code=2)
    wrong = build(5)
    save_pretrained(wrong.model, wrong.tokenizer, tmp_path / "wrong")
    out = pmi(capsys, "migrate", "ada", "--to", tmp_path / "other", "--from", tmp_path / "wrong", code=2)
    assert f"belongs to model {MINE.fingerprint}" in out
    pmi(capsys, "migrate", "ada", "--to", tmp_path / "other", "--from", folder)
    store = open_store(url)
    ids = store.history("local", "ada")
    assert ids == (pieces.bos, *pieces.encode(text))
    assert len(ids) < len(TEXT)
    assert pieces.decode(ids) == text
    assert store.content("local", "ada") == read_again(other, ids, content(keep_history=True).settings)
    assert store.get("local", "ada").settings.tokenizer == pieces.fingerprint()
    store.close()


@pytest.mark.parametrize(
    ("args", "messages"),
    [
        (["show", "nobody"], ["'nobody'", "pmi sessions ls"]),
        (["ls", "--store", "mysql://x"], ["mysql://x", "sqlite:///FILE", "redis://"]),
        (["ls", "--store", "redis://127.0.0.1:1/0?colour=red"], ["colour", "redis://"]),
        (["ls", "--store", "redis://127.0.0.1:99999/0"], ["redis://127.0.0.1:99999/0", "0-65535", "redis://HOST:PORT/DB"]),
        (["ls", "--store", "redis://127.0.0.1:abc/0"], ["redis://127.0.0.1:abc/0", "'abc'", "redis://HOST:PORT/DB"]),
        (["ls", "--store", "redis://127.0.0.1:1/zero"], ["'/zero'", "a number"]),
        (["ls", "--store", "redis://127.0.0.1:1/0#x"], ["'#x'", "redis://HOST:PORT/DB"]),
        (["ls", "--store", "sqlite:////tmp/none/a#b.db"], ["'#b.db'", "sqlite:///FILE"]),
        (["ls", "--store", "sqlite:////tmp/none/a.db?mode=ro"], ["'?mode=ro'", "sqlite:///FILE"]),
        (["show", "ada", "--plot", "m.foo"], ["m.foo", ".png"]),
        (["show", "ada", "--plot", "m"], ["--plot m", ".png"]),
        (["ls", "--limit", "0", "--store"], ["--store"]),
        (["ls", "--tenant", "a/b"], ["'a/b'", "letters"]),
        (["ls", "--durability", "some"], ["'some'", "full, relaxed"]),
        (["fork", "ada", "../x"], ["'../x'", "letters"]),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_a_mistake_is_answered_with_value_and_allowed_values(
    url: str, args: list[str], messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = pmi(capsys, *args, code=2)
    for message in messages:
        assert message in out


def test_the_store_is_the_flags_else_the_environments_else_the_users_own() -> None:
    assert store_url("redis://x", {"PMI_STORE": "y"}) == "redis://x"
    assert store_url(None, {"PMI_STORE": "y"}) == "y"
    assert store_url(None, {}) == "sqlite:///"
    assert default_file({"XDG_DATA_HOME": "/data"}) == Path("/data/pmi/sessions.db")
