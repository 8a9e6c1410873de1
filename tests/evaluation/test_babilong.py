"""BABILong: facts hidden in books, in order, at any length; and a model that reads them as a session."""

import json
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import lm.evaluation.babilong_eval as babilong_eval
from lm.cli import app
from lm.commands import run
from lm.config import load_model_config
from lm.data.tokenizer import ByteTokenizer
from lm.data.words import WordTokenizer
from lm.errors import UserError
from lm.evaluation.babilong import Books, Maker, parse_length, read_questions, sentences
from lm.evaluation.babilong_eval import Evaluation, generate, read_streams, spoken
from lm.evaluation.babilong_tasks import Tasks
from lm.evaluation.babilong_train import TrainingSamples
from lm.evaluation.tasks_report import wilson
from lm.evaluation.tasks_training import Seen, taught
from lm.model import PMI
from lm.model.pretrained import from_pretrained, save_pretrained
from lm.model.proofs import draw_zeros

ROOT = Path(__file__).parent.parent.parent
NAMES, PLACES = ("Mary", "John", "Daniel", "Sandra"), ("garden", "kitchen", "office", "hallway")


def story(rng: np.random.Generator) -> str:
    """A story in bAbI's own form: two facts, a question, twice and a half."""
    lines, where = [], {}
    for number in range(1, 13):
        if number % 3:
            name, place = str(rng.choice(NAMES)), str(rng.choice(PLACES))
            where[name] = (place, number)
            lines.append(f"{number} {name} went to the {place}.")
        else:
            name = list(where)[int(rng.integers(len(where)))]
            lines.append(f"{number} Where is {name}? \t{where[name][0]}\t{where[name][1]}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of bAbI files: tasks 1 and 2, in both of the namings there are."""
    folder = tmp_path_factory.mktemp("babi")
    for seed, name in enumerate(("qa1_test", "qa1_train", "qa2_two-supporting-facts_test")):
        rng = np.random.default_rng(seed)
        (folder / f"{name}.txt").write_text("".join(story(rng) for _ in range(10)))
    return folder


@pytest.fixture(scope="module")
def text() -> Path:
    return ROOT / "lm" / "data" / "text" / "moby-dick.txt"


@pytest.fixture(scope="module")
def books(text: Path) -> Books:
    return Books.open(text, "test")


@pytest.fixture(scope="module")
def told(text: Path) -> str:
    """The book in one line."""
    return " ".join(text.read_text().split())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte model whose every part does something."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    small = ["layers=1", "width=16", "heads=2", "feedforward=16", "memory.layers=[0]", "memory.heads=2"]
    save_pretrained(draw_zeros(PMI(load_model_config("tiny", small))), ByteTokenizer(), folder)
    return folder


def made(facts: Path, text: Path, out: Path, *options: object) -> Path:
    command = ["babilong", "make", "--facts", facts, "--text", text, "--tasks", "qa1,qa2", "--samples", 3, "--out", out, *options]
    assert run(app, [str(part) for part in command]) == 0
    return out


def test_babi_stories_become_questions_with_all_facts_told_before(facts: Path) -> None:
    questions = read_questions(facts, ["qa1", "qa2"], "test")
    assert [len(asked) for asked in questions.values()] == [40, 40]
    for question in questions["qa1"]:
        latest = [fact for fact in question.facts if question.question.split()[2].rstrip("?") in fact][-1]
        assert question.answer in latest
        assert [question.facts[i] for i in question.supporting] == [latest]
        assert not any("?" in fact for fact in question.facts)


@settings(max_examples=25, deadline=None)
@given(length=st.integers(400, 6_000), seed=st.integers(0, 2**31 - 1))
def test_a_sample_is_its_facts_in_order_at_borders_of_a_text_of_the_length_asked_for(
    facts: Path, books: Books, told: str, length: int, seed: int
) -> None:
    question = read_questions(facts, ["qa1"], "test")["qa1"][seed % 4]
    maker, sink = Maker(books, ByteTokenizer()), BytesIO()
    result = maker.make(question, length, np.random.default_rng(seed), sink)
    data = sink.getvalue()
    assert len(data) == result.tokens
    asked = question.question.encode() + b"\n"
    assert data.endswith(asked)
    assert length - 10 - 4 <= len(data) - len(asked) <= length
    assert result.facts == sorted(result.facts)
    for fact, at in zip(question.facts, result.facts, strict=True):
        line = fact.encode() + b"\n"
        assert data[at : at + len(line)] == line
        assert at == 0 or data[at - 1 : at] == b"\n"
    data.decode()
    background = [line for line in data.decode().splitlines()[:-1] if line not in question.facts]
    assert all(line in told for line in background)


def test_at_length_zero_a_sample_is_the_facts_alone(facts: Path, books: Books) -> None:
    question = read_questions(facts, ["qa1"], "test")["qa1"][3]
    sink = BytesIO()
    Maker(books, ByteTokenizer()).make(question, 0, np.random.default_rng(0), sink)
    assert sink.getvalue().decode().splitlines() == [*question.facts, question.question]


def test_facts_land_everywhere_in_the_text(facts: Path, books: Books) -> None:
    question = read_questions(facts, ["qa1"], "test")["qa1"][0]
    maker = Maker(books, ByteTokenizer())
    places = [maker.make(question, 4_000, np.random.default_rng(i), BytesIO()).facts for i in range(60)]
    first, last = np.array([x[0] for x in places]), np.array([x[-1] for x in places])
    # two places drawn evenly and sorted: their means are a third and two thirds
    assert 0.2 < first.mean() / 4_000 < 0.46 < 0.54 < last.mean() / 4_000 < 0.8


def test_sentences_are_cut_at_their_ends_not_at_titles_or_initials() -> None:
    text = 'Call me Ishmael. Mr. Starbuck and J. Smith came!  "Why?" he said. "Go."\n\nCHAPTER II\n\nSome years ago.'
    found = [" ".join(part.split()) for part in sentences(iter([text[:30], text[30:]]))]
    assert found[:2] == ["Call me Ishmael.", "Mr. Starbuck and J. Smith came!"]
    assert found[-2:] == ["CHAPTER II", "Some years ago."]
    assert "".join(sentences(iter([text[:30], text[30:]]))) == text


def test_books_in_folders_of_splits_are_kept_apart(tmp_path: Path) -> None:
    for name in ("train_core/a.txt", "test/b.txt", "test/c.txt", "index.tsv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"This is the text of {name}.")
    assert len(Books.open(tmp_path, "test").sizes) == 2
    assert Books.open(tmp_path, "train").read(0, 0, 99) == b"This is the text of train_core/a.txt."
    with pytest.raises(UserError, match="it has test, train: choose one with --text-split"):
        Books.open(tmp_path, "validation")


def test_prepared_data_of_any_tokenizer_gives_the_text_of_its_split(facts: Path, told: str, tmp_path: Path) -> None:
    source = tmp_path / "books"
    for name, at in (("train", 0), ("test", 50_000)):
        (source / name).mkdir(parents=True)
        (source / name / "a.txt").write_text(told[at : at + 30_000].replace(". ", ".\n"))
    command = ["data", "prepare", "text", "--source", source, "--out", tmp_path / "data", "--tokenizer", "pieces"]
    assert run(app, [str(part) for part in [*command, "--vocab-size", 400, "--processes", 1]]) == 0
    tasks = Tasks(made(facts, tmp_path / "data", tmp_path / "tasks", "--lengths", "2k", "--checkpoint", tmp_path / "data"))
    for sample in tasks.samples("qa1", "2k"):
        assert 1_980 < sample.tokens < 2_030, "counted in pieces"
        lines = tasks.tokenizer.decode(sample.read(0, sample.tokens).tolist()).splitlines()
        assert lines[-1] == sample.question
        book = [line for line in lines[:-1] if " went to the " not in line]
        assert sum(line in told[50_000:80_000] for line in book) == len(book) > 5


def test_the_same_seed_makes_the_same_tasks_whatever_else_is_made(facts: Path, text: Path, tmp_path: Path) -> None:
    a = made(facts, text, tmp_path / "a", "--lengths", "0k,1k,4k", "--seed", 5)
    b = made(facts, text, tmp_path / "b", "--lengths", "1k", "--seed", 5)
    made(facts, text, tmp_path / "b", "--lengths", "4k", "--seed", 5)  # added later
    c = made(facts, text, tmp_path / "c", "--lengths", "1k", "--seed", 6)
    for name in ("qa1-1k", "qa2-1k", "qa2-4k"):
        for suffix in (".bin", ".jsonl"):
            assert (a / (name + suffix)).read_bytes() == (b / (name + suffix)).read_bytes()
    assert (a / "qa1-1k.bin").read_bytes() != (c / "qa1-1k.bin").read_bytes()
    questions = [[sample.question for sample in Tasks(a).samples("qa1", length)] for length in ("0k", "1k", "4k")]
    assert questions[0] == questions[1] == questions[2]


def test_tasks_of_other_settings_are_not_mixed(
    facts: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(facts, text, tmp_path / "a", "--lengths", "1k", "--seed", 5)
    command = ["babilong", "make", "--facts", facts, "--text", text, "--out", tmp_path / "a", "--samples", 3, "--tasks", "qa1"]
    assert run(app, [str(part) for part in [*command, "--seed", 6]]) == 2
    assert "seed 5, now 6" in capsys.readouterr().err


def test_mistakes_are_named_all_at_once(facts: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["babilong", "make", "--facts", tmp_path / "none", "--text", text, "--out", tmp_path / "a"]
    assert run(app, [str(part) for part in [*command, "--tasks", "qa1,qa77", "--lengths", "1x,4k", "--split", "tes"]]) == 2
    err = capsys.readouterr().err
    for word in ("qa77", "'1x'", "'tes'", "none: there is no such"):
        assert word in err
    assert run(app, [str(part) for part in [*command[:3], facts, *command[4:], "--tasks", "qa1,qa4"]]) == 2
    assert "no test file of qa4; it has qa1, qa2" in capsys.readouterr().err
    assert run(app, [str(part) for part in [*command[:3], facts, *command[4:], "--tasks", "qa1", "--samples", 41]]) == 2
    assert "qa1 has 40 questions whose facts fit" in capsys.readouterr().err


def test_reading_in_calls_and_lanes_is_reading_at_once(facts: Path, text: Path, model: Path, tmp_path: Path) -> None:
    tasks = Tasks(made(facts, text, tmp_path / "a", "--lengths", "0k,1k"))
    loaded = from_pretrained(model).model
    samples = tasks.samples("qa1", "1k") + tasks.samples("qa1", "0k")  # of very different lengths
    with torch.inference_mode():
        *_, (_, state, last) = read_streams(loaded, samples, 256, call=4 * loaded.config.segment)
        said = generate(loaded, state, last, 6)
        for lane, sample in enumerate(samples):
            ids = torch.tensor([[256, *sample.read(0, sample.tokens).tolist()]])
            hidden, alone = loaded(ids, loaded.initial_state(1))
            torch.testing.assert_close(last[lane], hidden[0, -1], atol=1e-4, rtol=1e-4)
            assert generate(loaded, alone, hidden[:, -1], 6)[0] == said[lane]


def test_an_evaluation_goes_on_within_a_sample_and_gives_the_same_report(
    facts: Path, text: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = made(facts, text, tmp_path / "tasks", "--lengths", "0k,2k")
    command = ["babilong", "eval", "--checkpoint", model, "--tasks", tasks, "--lanes", 2, "--segments", 2]
    assert run(app, [str(part) for part in [*command, "--out", tmp_path / "whole"]]) == 0
    monkeypatch.setattr(babilong_eval, "SAVE_EVERY", 0.0)
    calls, forward = 0, PMI.forward

    def dying(self: PMI, *args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 70:  # within a sample of 2,000 tokens, 64 a call
            raise KeyboardInterrupt
        return forward(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(PMI, "forward", dying)
    assert run(app, [str(part) for part in [*command, "--out", tmp_path / "cut"]]) == 130
    position = json.loads((tmp_path / "cut" / "stream" / "at.json").read_text())["position"]
    assert position > 1_000
    monkeypatch.setattr(babilong_eval, "SAVE_EVERY", 60.0)
    before = calls
    assert run(app, [str(part) for part in [*command, "--out", tmp_path / "cut"]]) == 0
    assert (tmp_path / "cut" / "answers.jsonl").read_text() == (tmp_path / "whole" / "answers.jsonl").read_text()
    assert calls - before < 4 * (33 + 9) - position // 64
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("cut", "whole")]
    assert reports[0] == reports[1]
    assert [row["samples"] for row in reports[0]["results"]] == [3, 3, 3, 3]
    assert (tmp_path / "cut" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "cut" / "stream").exists()


def test_tasks_of_other_facts_are_another_evaluation_and_further_tasks_are_the_same(
    facts: Path, text: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = tmp_path / "others"
    others.mkdir()
    rng = np.random.default_rng(9)
    (others / "qa1_test.txt").write_text("".join(story(rng) for _ in range(10)))
    command = ["babilong", "eval", "--checkpoint", str(model), "--out", str(tmp_path / "out"), "--tasks"]
    tasks = made(facts, text, tmp_path / "a", "--lengths", "0k", "--tasks", "qa1")
    assert run(app, [*command, str(tasks)]) == 0
    assert run(app, [*command, str(made(others, text, tmp_path / "b", "--lengths", "0k", "--tasks", "qa1"))]) == 2
    assert "facts of qa1" in capsys.readouterr().err
    made(facts, text, tasks, "--lengths", "0k", "--tasks", "qa2")  # added later
    assert run(app, [*command, str(tasks)]) == 0
    assert [row["task"] for row in json.loads((tmp_path / "out" / "report.json").read_text())["results"]] == ["qa1", "qa2"]
    rng = np.random.default_rng(9)
    (others / "qa1_test.txt").unlink()
    (others / "qa2_test.txt").write_text("".join(story(rng) for _ in range(10)))
    assert run(app, [*command, str(made(others, text, tmp_path / "c", "--lengths", "0k", "--tasks", "qa2"))]) == 2
    assert "facts of qa2" in capsys.readouterr().err


def test_an_answer_is_the_line_that_follows_and_must_match_exactly() -> None:
    tokenizer = ByteTokenizer()
    assert spoken(tokenizer, tokenizer.encode("garden\nand so on")) == "garden"
    assert spoken(tokenizer, tokenizer.encode("gardens\n")) != "garden"
    assert spoken(tokenizer, tokenizer.encode("the garden")) != "garden"


def test_a_report_counts_the_answers_of_each_task_and_length(facts: Path, text: Path, model: Path, tmp_path: Path) -> None:
    tasks = Tasks(made(facts, text, tmp_path / "tasks", "--lengths", "1k"))
    evaluation = Evaluation(from_pretrained(model), tasks, tmp_path / "out", 3, 8, Console(quiet=True))
    rows = [
        {"task": task, "length": "1k", "sample": i, "tokens": 1, "answer": "garden", "right": task == "qa1" or i < 2}
        for task in ("qa1", "qa2") for i in range(3)
    ]  # fmt: skip
    (tmp_path / "out" / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"task": "qa1", "le')
    evaluation = Evaluation(from_pretrained(model), tasks, tmp_path / "out", 3, 8, Console(quiet=True))
    results = evaluation.run(tasks.sets)["results"]  # all is answered, nothing is read
    assert [(row["task"], row["right"], row["samples"], row["usual_share"]) for row in results] == [
        ("qa1", 3, 3, 1),
        ("qa2", 2, 3, 1),
    ]


def test_tasks_of_another_tokenizer_are_refused(
    facts: Path, text: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = made(facts, text, tmp_path / "tasks", "--lengths", "0k")
    other = WordTokenizer.build(["Where is Mary <unk>\n"])
    other.save(tasks)
    assert run(app, ["babilong", "eval", "--checkpoint", str(model), "--tasks", str(tasks)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    mine = ByteTokenizer().fingerprint()
    assert f"made with tokenizer {other.fingerprint()}, the model's is {mine}; make the tasks with" in told


def test_training_batches_ask_for_the_answer_and_nothing_else(facts: Path, books: Books) -> None:
    samples = TrainingSamples(read_questions(facts, ["qa1"], "train"), books, ByteTokenizer(), lanes=4, segment=32)
    batch = samples.draw(700, np.random.default_rng(3))
    assert batch.tokens.shape == batch.targets.shape == batch.mask.shape
    assert batch.starts.shape == (4, batch.tokens.shape[1] // 32)
    assert batch.starts[:, 0].all()
    assert not batch.starts[:, 1:].any()
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    for lane in range(4):
        text = bytes(batch.tokens[lane, 1 : batch.lengths[lane]].tolist()).decode()
        answer = bytes(batch.targets[lane][batch.mask[lane]].tolist()).decode()
        name = text[: -len(answer) + 1].splitlines()[-1].split()[-1].rstrip("?")
        latest = [line for line in text.splitlines() if line.startswith(f"{name} went to the ")][-1]
        assert answer == latest.split()[-1].rstrip(".") + "\n"
        assert int(batch.mask[lane].nonzero()[-1]) == int(batch.lengths[lane]) - 1
    again = samples.draw(700, np.random.default_rng(3))
    assert torch.equal(batch.tokens, again.tokens)


def test_questions_asked_on_the_way_have_the_answer_of_their_place_and_do_not_tell_it(facts: Path, books: Books) -> None:
    questions = read_questions(facts, ["qa1"], "train")
    samples = TrainingSamples(questions, books, ByteTokenizer(), lanes=8, segment=32, asked=2)
    batch = samples.draw(1_500, np.random.default_rng(0))
    on_the_way = 0
    for lane in range(8):
        ids = batch.tokens[lane, : batch.lengths[lane]].tolist()
        wanted = batch.mask[lane].nonzero().squeeze(1).tolist()
        for place in (place for place in wanted if bytes(ids[place : place + 1]) == b"\n"):
            told = bytes(ids[1 : place + 1]).decode().splitlines()
            name = told[-1].removeprefix("Where is ").rstrip("?")
            latest = [line for line in told if line.startswith(f"{name} went to the ")][-1]
            answer = latest.split()[-1].rstrip(".")
            assert int(batch.targets[lane, place]) == ord(answer[0])
            goes_on = bytes(ids[place + 1 : place + 1 + len(answer)]).decode()
            on_the_way += goes_on != answer
        assert batch.hints is not None
        assert not (batch.hints & batch.mask).any()
        other = batch.targets[lane, :-1] != batch.tokens[lane, 1:]
        assert not (other & ~(batch.mask | batch.hints)[lane, :-1])[: int(batch.lengths[lane]) - 1].any()
        for place in batch.hints[lane].nonzero().squeeze(1).tolist():
            line, rest = (bytes(part).decode() for part in (ids[1 : place + 1], ids[place + 1 :]))
            line = (line + rest.split("\n")[0]).splitlines()[-1]
            if not line.startswith("Where is"):  # a fact's last word is to bring back its first
                assert int(batch.targets[lane, place]) == ord(line[0])
    assert on_the_way > 8
    assert samples.stories[0][1][0] == samples.stories[0][0][0], "the second question stands behind the first of its story"


def test_a_step_holds_about_so_many_tokens_of_context(facts: Path, books: Books) -> None:
    questions = read_questions(facts, ["qa1"], "train")
    samples = TrainingSamples(questions, books, ByteTokenizer(), lanes=8, segment=32, tokens=4_000)
    lanes = [len(samples.draw(length, np.random.default_rng(0)).lengths) for length in (0, 400, 1_000, 9_000)]
    assert lanes == [8, 8, 4, 1]


def test_what_is_to_be_written_is_the_last_word_of_each_fact(facts: Path, books: Books) -> None:
    samples = TrainingSamples(read_questions(facts, ["qa1"], "train"), books, ByteTokenizer(), lanes=4, segment=32, asked=1)
    batch = samples.draw(600, np.random.default_rng(0))
    assert batch.facts is not None
    for lane in range(4):
        text = bytes(batch.tokens[lane, 1 : batch.lengths[lane]].tolist())
        places = (batch.facts[lane] >= 0).nonzero().squeeze(1).tolist()
        assert len(places) == text.count(b" went to the ")
        assert all(text[place - 1 :].split(b".")[0].decode().strip() in PLACES for place in places)


def test_a_memory_is_taught_to_write_facts_and_to_look_them_up_under_their_names() -> None:
    facts, asks = torch.tensor([[-1, 3, -1, 5, -1, -1]]), torch.tensor([[-1, -1, -1, -1, 5, 9]])  # 9 is told of nowhere
    wishes = torch.where(facts >= 0, 20.0, -20.0)[..., None]
    keys = torch.eye(6)[None, :, None]
    queries = keys.clone()
    queries[0, 4, 0] = keys[0, 3, 0]
    right = taught(Seen(wishes, wishes.sigmoid(), keys, queries), facts, asks)
    queries[0, 4, 0] = keys[0, 1, 0]
    astray = taught(Seen(wishes, wishes.sigmoid(), keys, queries), facts, asks)
    wishes[0, 0] = 20.0
    assert 0 <= right < 0.01 < astray < taught(Seen(wishes, wishes.sigmoid(), keys, queries), facts, asks)


def test_training_teaches_to_write_facts_and_nothing_else(facts: Path, text: Path, tmp_path: Path) -> None:
    small = ["layers=1", "width=16", "heads=2", "feedforward=16", "memory.layers=[0]", "memory.heads=2"]
    command = ["babilong", "train", "--facts", facts, "--text", text, "--lengths", "0k", "--steps", 25, "--lanes", 4]
    options = [*(part for setting in small for part in ("--set", setting)), "--everything", 0, "--lr", 1e-2, "--asked", 1]
    strengths = []
    for writing in (0, 10):
        out = tmp_path / str(writing)
        assert run(app, [str(part) for part in [*command, *options, "--writing", writing, "--out", out]]) == 0
        rows = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
        strengths.append(rows[-1]["strength"] / rows[0]["strength"])
    assert strengths[1] < 0.8 * strengths[0]  # most of a text in bytes is no fact's last word


def test_training_leaves_a_model_that_can_be_evaluated(facts: Path, text: Path, tmp_path: Path) -> None:
    small = ["layers=1", "width=16", "heads=2", "feedforward=16", "memory.layers=[0]", "memory.heads=2"]
    command = ["babilong", "train", "--facts", facts, "--text", text, "--lengths", "0k,400", "--steps", 4, "--lanes", 2]
    options = [part for setting in small for part in ("--set", setting)]
    assert run(app, [str(part) for part in [*command, *options, "--out", tmp_path / "run"]]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "training.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    tasks = made(facts, text, tmp_path / "tasks", "--lengths", "0k")
    assert run(app, ["babilong", "eval", "--checkpoint", str(tmp_path / "run" / "model"), "--tasks", str(tasks)]) == 0


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 500), data=st.data())
def test_wilson_intervals_hold_the_share_and_narrow_with_more_samples(count: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, count))
    low, high = wilson(right, count)
    assert 0 <= low <= right / count <= high <= 1
    wide, narrow = wilson(right, count), wilson(4 * right, 4 * count)
    assert narrow[1] - narrow[0] < wide[1] - wide[0]


def test_wilson_intervals_are_those_of_the_books() -> None:
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)


@pytest.mark.full
def test_ten_million_tokens_of_real_books_are_made_in_little_memory(real_data: Path, tmp_path: Path) -> None:
    books = real_data / "pg19" / "test.tar.xz"
    command = [
        "babilong",
        "make",
        "--facts",
        real_data / "babi",
        "--text",
        books,
        "--tasks",
        "qa1",
        "--lengths",
        "10M",
        "--samples",
        "2",
    ]
    # started by a small process: a child's peak counts what its parent held when it was forked
    measure = "import os, subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(os.wait4(p.pid, 0)[2].ru_maxrss)"
    started = [sys.executable, "-c", measure, sys.executable, "-m", "lm", *command, "--out", tmp_path / "a"]
    said = subprocess.run(started, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert int(said.split()[-1]) < 150_000  # KB; the interpreter alone takes a third of it
    (sample,) = Tasks(tmp_path / "a").samples("qa1", "10M")
    assert sample.tokens > 9_999_980
    assert sample.read(sample.supporting[0], sample.supporting[0] + 200).tobytes().split(b".")[0].endswith(sample.answer.encode())


def test_lengths_are_in_thousands_and_millions() -> None:
    assert [parse_length(name) for name in ("0k", "77", "4k", "10M")] == [0, 77, 4_000, 10_000_000]


@pytest.mark.parametrize("line", ["x Mary went home.", "2 Where is Mary? \thome", "2 Where is Mary? \thome\tone"])
def test_a_line_of_a_babi_file_that_is_none_is_refused_by_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "qa1_test.txt").write_text(f"1 Mary went home.\n{line}\n")
    with pytest.raises(UserError, match=r"qa1_test\.txt, line 2: .* is neither 'N fact' nor"):
        read_questions(tmp_path, ["qa1"], "test")
