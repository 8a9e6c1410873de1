"""The tasks' data: the same by the same seed, and right by other code than what made it."""

import io
import itertools
import json
import math
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lm.errors import UserError
from lm.reasoning.build import load_data
from lm.reasoning.pictures import samples, story
from lm.reasoning.tasks import clevr, triangles
from lm.reasoning.tasks.cifar import CLASSES
from lm.reasoning.tasks.dataset import Dataset, order
from tests.reasoning.conftest import tiny


def same(a: Dataset, b: Dataset) -> bool:
    arrays = [
        (x.splits[s].inputs | {"answers": x.splits[s].answers, "kinds": x.splits[s].kinds} for s in x.splits) for x in (a, b)
    ]
    return all(
        set(one) == set(other) and all(np.array_equal(one[key], other[key]) for key in one)
        for one, other in zip(*arrays, strict=True)
    ) and all(np.array_equal(a.tables[name], b.tables[name]) for name in a.tables)


@pytest.mark.parametrize("task", ["clevr", "triangles"])
def test_generated_data_are_a_function_of_the_seed_and_survive_the_cache(task: str, tmp_path: Path) -> None:
    first = load_data(tiny(task, "tr"), None, tmp_path)
    assert list(tmp_path.glob(f"{task}-*.safetensors"))
    assert same(first, load_data(tiny(task, "tr"), None, tmp_path))
    assert same(first, load_data(tiny(task, "tr"), None, None))
    assert not same(first, load_data(tiny(task, "tr", "data.seed=2"), None, tmp_path))
    next(tmp_path.glob(f"{task}-*.safetensors")).write_bytes(b"damaged")
    assert same(first, load_data(tiny(task, "tr"), None, tmp_path))


def answered(centres: list[tuple[int, int]], round_: list[bool], first: int, second: int, asked: int) -> str:
    """The nine questions, by plain geometry with math.dist and angles."""
    me, rest = centres[first], [i for i in range(6) if i != first]
    if asked == 0:
        return "circle" if round_[first] else "rectangle"
    if asked == 1:
        return "left" if me[0] <= 37 else "right"
    if asked == 2:
        return "top" if me[1] <= 37 else "bottom"
    far = sorted(rest, key=lambda i: math.dist(me, centres[i]))
    if asked == 3:
        return "circle" if round_[far[-1]] else "rectangle"
    if asked == 4:
        return list(clevr.COLOURS)[far[0]]
    if asked == 5:
        return str(sum(r == round_[first] for r in round_))
    other = centres[second]
    third = [centres[i] for i in rest if i != second]
    if asked == 6:
        return str(sum(all(min(a, b) < c < max(a, b) for a, b, c in zip(me, other, point, strict=True)) for point in third))

    def angle(at: tuple[int, int], p: tuple[int, int], q: tuple[int, int]) -> float:
        turn = math.atan2(p[1] - at[1], p[0] - at[0]) - math.atan2(q[1] - at[1], q[0] - at[0])
        return abs(math.remainder(turn, math.tau))

    if asked == 7:
        for point in third:  # height of the triangle over its base, by Heron's formula
            a, b, c = math.dist(me, other), math.dist(me, point), math.dist(other, point)
            s = (a + b + c) / 2
            height = 2 * math.sqrt(max(0.0, s * (s - a) * (s - b) * (s - c))) / a
            between = angle(me, other, point) < math.pi / 2 and angle(other, me, point) < math.pi / 2
            if between and height <= clevr.RADIUS:
                return "yes"
        return "no"
    corners = ((me, other, point) for point in third)
    obtuse = [max(angle(a, b, c), angle(b, a, c), angle(c, a, b)) > math.pi / 2 + 1e-9 for a, b, c in corners]
    return str(sum(obtuse))


def test_sort_of_clevr_answers_are_right_for_the_scene() -> None:
    data = load_data(tiny("clevr", "tr", "data.pictures=60"), None, None)
    split = data.splits["train"]
    assert len(split) == 60 * 30
    assert np.bincount(split.groups).tolist() == [600, 600, 600]
    ties = 0
    for place, question, answer in zip(split.inputs["at"], split.inputs["question"], split.answers, strict=True):
        centres = [tuple(map(int, c)) for c in data.tables["centres"][place]]
        distances = sorted(math.dist(centres[question[0]], c) for c in centres)
        if question[2] in (3, 4) and (distances[1] == distances[2] or distances[-1] == distances[-2]):
            ties += 1
            continue
        expected = answered(centres, data.tables["round"][place].astype(bool).tolist(), *map(int, question))
        assert data.answers[answer] == expected, clevr.question_text(question)
    assert ties < 30


def test_sort_of_clevr_pictures_show_the_scene() -> None:
    data = load_data(tiny("clevr", "tr"), None, None)
    corner = clevr.RADIUS
    for place, picture in enumerate(data.tables["pictures"]):
        for number, (colour, (x, y)) in enumerate(zip(clevr.COLOURS.values(), data.tables["centres"][place], strict=True)):
            assert tuple(picture[y, x]) == colour
            seen = bool((picture[y - corner, x - corner] == colour).all())  # a circle leaves its corners white
            assert seen != bool(data.tables["round"][place][number])
        assert (picture != 255).any(-1).sum() < 6 * 11 * 11 + 1
        for a, b in itertools.combinations(data.tables["centres"][place].astype(int), 2):
            assert np.abs(a - b).max() > 2 * clevr.RADIUS


def test_triangles_can_be_measured_in_the_picture() -> None:
    data = load_data(tiny("triangles", "tr", "data.pictures=60"), None, None)
    split = data.splits["train"]
    assert np.bincount(split.answers).tolist() == [30, 30]
    for row, answer in enumerate(split.answers):
        y, x = np.nonzero(split.inputs["picture"][row, ..., 0])
        points = np.stack([x, y], 1).astype(float)
        clusters: list[list[int]] = []
        for i in range(len(points)):  # points that are near each other, however the clusters were drawn
            near = [c for c in clusters if min(math.dist(points[i], points[j]) for j in c) < 5.5]
            clusters = [c for c in clusters if c not in near] + [[i, *itertools.chain(*near)]]
        assert len(clusters) == 3
        sides = triangles.lengths(np.stack([points[c].mean(0) for c in clusters]))
        ratio = sides.max() / sides.min()
        assert (ratio < 1.125) == bool(answer), ratio


def test_babi_stories_end_with_the_question_and_only_their_last_sentences_are_read(babi: Path, tmp_path: Path) -> None:
    data = load_data(tiny("babi", "tr"), babi, tmp_path / "cache")
    assert data.groups == ["1: Single Supporting Fact", "2: Two Supporting Facts"]
    assert data.answers == ["garden", "kitchen", "office"]
    assert any("task 1 is trained on 40 questions" in note for note in data.notes)
    assert any("before the last 6" in note for note in data.notes)
    lines = (babi / "qa2_test.txt").read_text().splitlines()[:10]
    row = int(np.flatnonzero(data.splits["test"].groups == 1)[0])
    told = [line.split(" ", 1)[1].lower().rstrip(".") for line in lines[3:9]]
    assert story(data, "test", row) == [*told, lines[9].split(" ", 1)[1].split("?")[0].lower()]
    assert data.answers[data.splits["test"].answers[row]] == lines[9].split("\t")[1]
    inputs, _ = data.batch("test", np.array([0, row]), torch.device("cpu"))
    assert inputs["story"].shape == (2, 6)
    assert inputs["story"][0].tolist()[:4] == [-1, -1, -1, -1]
    assert inputs["story"][0].min() == -1
    assert inputs["question"].min() >= 0


def test_babi_without_validation_files_holds_a_tenth_of_training_out(babi: Path) -> None:
    for path in babi.glob("*_valid.txt"):
        path.unlink()
    data = load_data(tiny("babi", "tr"), babi, None)
    assert [len(data.splits[split]) for split in ("train", "valid", "test")] == [72, 8, 24]
    assert any("held out" in note for note in data.notes)


def test_an_answer_that_training_lacks_counts_as_wrong(babi: Path) -> None:
    path = babi / "qa1_test.txt"
    path.write_text("1 Mary went to the moon.\n2 Where is Mary? \tmoon\t1\n" + path.read_text())
    data = load_data(tiny("babi", "tr"), babi, None)
    assert data.splits["test"].answers[0] == -1


def test_the_real_babi_says_that_task_3_is_the_small_version(real_data: Path) -> None:
    data = load_data(tiny("babi", "tr", "data.tasks=[3, 15]"), real_data / "babi" / "babi_en-valid-10k.tar.xz", None)
    assert len(data.splits["train"]) == 1_000 + 9_000
    assert "task 3 is trained on 1,000 questions (not the 10k version)" in data.notes
    assert not any("task 15 is trained" in note for note in data.notes)


def test_an_epoch_has_every_sample_once_and_pools_lie_sorted_by_length(babi: Path) -> None:
    data = load_data(tiny("babi", "tr"), babi, None)
    for pool in (1, 4):
        batches = order(data, 8, pool, seed=1, epoch=0)
        assert sorted(np.concatenate(batches).tolist()) == list(range(80))
        assert [b.tolist() for b in batches] == [b.tolist() for b in order(data, 8, pool, seed=1, epoch=0)]
        assert [b.tolist() for b in batches] != [b.tolist() for b in order(data, 8, pool, seed=1, epoch=1)]
    lengths = data.lengths("train")
    assert lengths is not None
    assert sum(lengths[b].max() for b in order(data, 8, 10, 1, 0)) < sum(lengths[b].max() for b in order(data, 8, 1, 1, 0))


def cifar_batches() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    return {name: (rng.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, 4)) for name in names}


def test_cifar_is_the_same_from_its_binary_and_its_png_form(tmp_path: Path) -> None:
    batches = cifar_batches()
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name, (pictures, labels) in batches.items():
            planes = pictures.transpose(0, 3, 1, 2).reshape(4, -1)
            content = np.concatenate([labels[:, None].astype(np.uint8), planes], 1).tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    folder = tmp_path / "png"
    folder.mkdir()
    for name, (pictures, _) in batches.items():
        Image.fromarray(pictures.reshape(4, 1024, 3)).save(folder / f"{name}.png")
    train = [int(x) for name in batches if name != "test_batch" for x in batches[name][1]]
    (folder / "train_lables.json").write_text(json.dumps(train))
    (folder / "test_lables.json").write_text(json.dumps(batches["test_batch"][1].tolist()))
    config = tiny("cifar", "vit")
    binary, png = (load_data(config, source, tmp_path / "cache") for source in (tmp_path / "cifar-10-binary.tar.gz", folder))
    assert same(binary, png)
    assert [len(png.splits[split]) for split in ("train", "valid", "test")] == [10, 10, 4]
    assert np.array_equal(png.splits["train"].inputs["picture"][5], batches["data_batch_2"][0][1])
    assert png.splits["test"].answers.tolist() == batches["test_batch"][1].tolist()
    assert png.answers == CLASSES


def test_cifar_refuses_pickles_and_damaged_files(tmp_path: Path) -> None:
    config = tiny("cifar", "vit")
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x04N.")
    with pytest.raises(UserError, match="unpickling runs code"):
        load_data(config, tmp_path, None)
    (tmp_path / "data_batch_1.bin").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="100 bytes are not records of 3073"):
        load_data(config, tmp_path, None)
    (tmp_path / "data_batch_1.bin").unlink()
    (tmp_path / "data_batch_1.png").write_bytes(b"no png")
    with pytest.raises(UserError, match="cannot be read as PNG"):
        load_data(config, tmp_path, None)


def test_samples_are_drawn_for_every_kind_of_task(babi: Path, tmp_path: Path) -> None:
    for task, source in (("babi", babi), ("clevr", None), ("triangles", None)):
        samples(load_data(tiny(task, "tr"), source, None), tmp_path / f"{task}.png", 4)
        assert (tmp_path / f"{task}.png").stat().st_size > 5_000
