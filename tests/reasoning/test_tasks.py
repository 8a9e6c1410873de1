"""The tasks' data: the same by the same seed, and right by other code than what made it."""

import io
import itertools
import json
import math
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save

from lm.errors import UserError
from lm.reasoning.build import load_data
from lm.reasoning.pictures import chosen, draw_sample, samples, story
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


def test_validation_questions_that_stand_in_training_too_are_taken_out_there(babi: Path) -> None:
    """As in the public archive, which has the training questions whole and cut in two. By chance alone they may be in both."""
    before = load_data(tiny("babi", "tr"), babi, None)
    (babi / "en-10k").mkdir()
    whole = (babi / "qa1_train.txt").read_text() + (babi / "qa1_valid.txt").read_text()
    (babi / "en-10k" / "qa1_train.txt").write_text(whole)
    first = (babi / "qa2_valid.txt").read_text().splitlines(keepends=True)[:10]
    (babi / "qa2_train.txt").write_text((babi / "qa2_train.txt").read_text() + "".join(first))
    data = load_data(tiny("babi", "tr"), babi, None)
    assert [len(data.splits[split]) for split in ("train", "valid", "test")] == [81, 24, 24]
    assert sorted(story(data, "train", row) for row in range(40)) == sorted(story(before, "train", row) for row in range(40))
    assert [note for note in data.notes if "taken out" in note] == [
        "task 1: its validation questions were also among those of training, and were taken out there"
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_data_in_folders_below_and_in_archives_are_told_apart_in_the_cache(packed: bool, babi: Path, tmp_path: Path) -> None:
    found = []
    for name in ("one", "other"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "other":
            for path in babi.glob("*.txt"):
                path.write_text(path.read_text().replace("kitchen", "cellar"))
        if packed:
            with tarfile.open(folder / "babi.tar.gz", "w:gz") as archive:
                archive.add(babi, "below")
        else:
            shutil.copytree(babi, folder / "below")
        found.append(load_data(tiny("babi", "tr"), folder, tmp_path / "cache").answers)
    assert found == [["garden", "kitchen", "office"], ["cellar", "garden", "office"]]


def test_a_cache_that_does_not_hold_what_was_written_is_made_again(tmp_path: Path) -> None:
    config = tiny("triangles", "tr")
    first = load_data(config, None, tmp_path)
    path = next(tmp_path.glob("triangles-*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    for damaged in (bytes(content), save({"a": np.zeros(3)}), save({"a": np.zeros(3)}, {"answers": "[]"})):
        path.write_bytes(damaged)
        assert same(first, load_data(config, None, tmp_path))
        assert same(first, load_data(config, None, tmp_path))


def test_the_longest_side_alone_tells_four_triangles_of_five() -> None:
    """What docs/reasoning.md says of the data: nobody should take 80 % for an understanding of equal sides."""
    data = load_data(tiny("triangles", "tr", "data.pictures=1000"), None, None)
    longest = np.array([triangles.lengths(corners).max() for corners in data.tables["corners"][:1000]])
    equal = data.splits["train"].answers == 1
    right = max(((longest < border) == equal).mean() for border in range(16, 60))
    assert 0.72 < right < 0.88


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


def test_questions_about_one_picture_stand_together_and_it_is_seen_once() -> None:
    data = load_data(tiny("clevr", "tr"), None, None)
    at = data.splits["train"].inputs["at"]
    batches = order(data, 20, 1, seed=1, epoch=0, together=10)
    assert sorted(np.concatenate(batches).tolist()) == list(range(180))
    assert batches[0].tolist() != order(data, 20, 1, seed=1, epoch=1, together=10)[0].tolist()
    for rows in batches:
        assert [len(set(at[rows[i : i + 10]].tolist())) for i in (0, 10)] == [1, 1]
        inputs, _ = data.batch("train", rows, torch.device("cpu"))
        assert len(inputs["picture"]) == len(set(at[rows].tolist()))
        assert torch.equal(inputs["picture"][inputs["at"]], torch.from_numpy(data.tables["pictures"][at[rows]]))


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
    png_form(folder)
    config = tiny("cifar", "vit")
    binary, png = (load_data(config, source, tmp_path / "cache") for source in (tmp_path / "cifar-10-binary.tar.gz", folder))
    assert same(binary, png)
    assert [len(png.splits[split]) for split in ("train", "valid", "test")] == [10, 10, 4]
    assert np.array_equal(png.splits["train"].inputs["picture"][5], batches["data_batch_2"][0][1])
    assert png.splits["test"].answers.tolist() == batches["test_batch"][1].tolist()
    assert png.answers == CLASSES


def png_form(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    batches = cifar_batches()
    for name, (pictures, _) in batches.items():
        Image.fromarray(pictures.reshape(4, 1024, 3)).save(folder / f"{name}.png")
    train = [int(x) for name in batches if name != "test_batch" for x in batches[name][1]]
    (folder / "train_lables.json").write_text(json.dumps(train))
    (folder / "test_lables.json").write_text(json.dumps(batches["test_batch"][1].tolist()))


@pytest.mark.parametrize(
    "labels", ["{}", "3", '"abc"', "[]", "[[1], [2]]", "[1.5, 2, 3, 4]", "[1, 2, 3, 10]", "[1, null]", "no", "[1, 2]"]
)
def test_cifar_refuses_what_are_no_labels(labels: str, tmp_path: Path) -> None:
    png_form(tmp_path)
    (tmp_path / "test_lables.json").write_text(labels)
    with pytest.raises(UserError, match=r"(test_lables.json|test_batch).*; get (the file|its files) again"):
        load_data(tiny("cifar", "vit"), tmp_path, None)


@pytest.mark.parametrize(
    ("shape", "told"), [((4, 512), "512 pixels wide"), ((5, 1024), "5 pictures"), ((180_000, 1024), "cannot be read")]
)
def test_cifar_refuses_pictures_of_another_size(shape: tuple[int, int], told: str, tmp_path: Path) -> None:
    png_form(tmp_path)
    Image.fromarray(np.zeros(shape, dtype=np.uint8)).save(tmp_path / "test_batch.png")
    with pytest.raises(UserError, match=f"test_batch.*{told}"):
        load_data(tiny("cifar", "vit"), tmp_path, None)


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


def test_rows_of_a_heat_map_can_be_found_in_the_sample_beside_it(babi: Path) -> None:
    from matplotlib.figure import Figure

    data = load_data(tiny("babi", "tr"), babi, None)
    axis = Figure().subplots()
    draw_sample(axis, data, "test", 0, ["S1", "S2", "Q"])
    assert [line.split("  ")[0] for line in axis.texts[0].get_text().splitlines()][:3] == ["S1", "S2", "Q"]
    data = load_data(tiny("clevr", "tr"), None, None)
    axis = Figure().subplots()
    draw_sample(axis, data, "test", 0, [*(f"P{i + 1}" for i in range(25)), "Q"])
    places = {text.get_text(): text.get_position() for text in axis.texts}
    assert len(places) == 25
    assert (places["P2"][0] - places["P1"][0], places["P6"][1] - places["P1"][1]) == pytest.approx((15, 15))
    assert axis.axison, "the frame shows where a picture ends"
    at = [int(data.splits["test"].inputs["at"][row]) for row in chosen(data, 3)]
    assert len(set(at)) == 3, "each of another picture"
