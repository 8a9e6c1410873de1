"""Lanes: every token once per epoch, streams that depend on nothing but their definition, exact resumption."""

import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_data import BOS, made

from lm.data.lanes import Lanes, deal, merge_states, shuffled
from lm.data.prepared import Prepared
from lm.errors import UserError


@st.composite
def corpora(draw: st.DrawFn) -> dict[str, object]:
    """Random documents, segment length, lanes that the documents can fill, and a seed."""
    segment = draw(st.integers(1, 7))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=30))
    segments = sum(-(-length // segment) for length in lengths)
    lanes = draw(st.integers(1, min(segments, 9)))
    return {
        "lengths": lengths,
        "shard": draw(st.integers(1, 60)),
        "segment": segment,
        "lanes": lanes,
        "seed": draw(st.integers(0, 2**40)),
    }


@contextmanager
def opened(corpus: dict) -> Iterator[tuple[Prepared, dict]]:
    with tempfile.TemporaryDirectory() as folder:
        data = made(Path(folder), corpus["lengths"], corpus["shard"])
        yield data, {key: corpus[key] for key in ("lanes", "segment", "seed")}


def ranks(data: Prepared, options: dict, world: int) -> list[Lanes]:
    return [Lanes(data, "train", **options, rank=rank, world=world) for rank in range(world)]


def take(readers: list[Lanes], k: int, times: int = 1) -> dict[int, list[tuple]]:
    """What each lane reads, as one (tokens, targets, starts) per segment, padding cut off."""
    found: dict[int, list[tuple]] = defaultdict(list)
    for _ in range(times):
        for reader in readers:
            batch = reader.next_batch(k)
            segment = reader.segment
            for row, lane in enumerate(batch.lanes.tolist()):
                for i in range(k):
                    cut = slice(i * segment, i * segment + int(batch.lengths[row, i]))
                    pad = slice(cut.stop, (i + 1) * segment)
                    assert (batch.tokens[row, pad] == BOS).all()
                    assert (batch.targets[row, pad] == BOS).all()
                    item = (
                        batch.tokens[row, cut].tolist(),
                        batch.targets[row, cut].tolist(),
                        bool(batch.starts[row, i]),
                    )
                    found[lane].append(item)
            assert torch.equal(batch.mask(), batch.targets != BOS)
    return found


def epoch_of(reader: Lanes, lane: int) -> int:
    return reader.state_dict()["cursors"][str(lane)][0]


@settings(max_examples=60, deadline=None)
@given(corpora(), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=4))
def test_every_token_of_an_epoch_is_a_target_exactly_once_whatever_the_ranks_and_stops(
    corpus: dict, runs: list[tuple[int, int]]
) -> None:
    """`runs`: how many ranks read, and how many steps until they stop; over and over until two epochs are read."""
    with opened(corpus) as (data, options):
        seen: dict[int, Counter] = defaultdict(Counter)
        state = None
        most = 20 * sum(corpus["lengths"])  # of runs: an epoch that never ends fails here instead of running on
        for world, steps in islice(cycle(runs), most):
            readers = ranks(data, options, min(world, options["lanes"]))
            for reader in readers:
                if state is not None:
                    reader.load_state_dict(state)
                for _ in range(steps):
                    epochs = {lane: epoch_of(reader, lane) for lane in reader.own}
                    for lane, segments in take([reader], 1).items():
                        seen[epochs[lane]].update(segments[0][1])
            state = json.loads(json.dumps(merge_states(reader.state_dict() for reader in readers)))
            if all(epoch >= 2 for epoch, _, _ in state["cursors"].values()):
                break
        expected = Counter(range(sum(corpus["lengths"])))
        assert seen[0] == expected
        assert seen[1] == expected


@settings(max_examples=60, deadline=None)
@given(corpora(), st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 4))
def test_a_stop_anywhere_continues_exactly_also_at_another_number_of_ranks(
    corpus: dict, steps: list[int], world: int, new_world: int
) -> None:
    with opened(corpus) as (data, options):
        world, new_world = min(world, options["lanes"]), min(new_world, options["lanes"])
        unbroken = take(ranks(data, options, 1), 1, sum(steps) + 8)
        readers = ranks(data, options, world)
        found: dict[int, list] = defaultdict(list)
        for k in steps:
            for lane, segments in take(readers, k).items():
                found[lane] += segments
            state = json.loads(json.dumps(merge_states(reader.state_dict() for reader in readers)))
            readers = ranks(data, options, new_world)
            for reader in readers:
                reader.load_state_dict(state)
            world, new_world = new_world, world
        for lane, segments in take(readers, 2, 4).items():
            found[lane] += segments
        assert found == unbroken


@settings(max_examples=60, deadline=None)
@given(corpora(), st.integers(1, 6))
def test_inputs_are_the_targets_one_step_earlier_behind_a_bos_where_a_document_starts(corpus: dict, k: int) -> None:
    with opened(corpus) as (data, options):
        starts_of_documents = set(data.split("train").index[:, 0].tolist())
        cut = len(corpus["lengths"]) < 4 * options["lanes"]
        for segments in take(ranks(data, options, 1), k, 4).values():
            previous = None
            for tokens, targets, start in segments:
                assert targets == list(range(targets[0], targets[0] + len(targets)))
                assert tokens[1:] == targets[:-1]
                assert tokens[0] == (BOS if start else previous)
                assert start or targets[0] == previous + 1
                if start and not cut:
                    assert targets[0] in starts_of_documents
                if targets[0] in starts_of_documents:
                    assert start
                previous = targets[-1]
            assert segments[0][2]


@settings(max_examples=60, deadline=None)
@given(corpora())
def test_lanes_are_balanced_by_length(corpus: dict) -> None:
    with opened(corpus) as (data, options):
        sizes = []
        for lane, reader in enumerate(ranks(data, options, options["lanes"])):
            size = 0
            while epoch_of(reader, lane) == 0:
                reader.next_batch()
                size += 1
            sizes.append(size)
        cut = len(corpus["lengths"]) < 4 * options["lanes"]
        longest = max(-(-length // options["segment"]) for length in corpus["lengths"])
        assert max(sizes) - min(sizes) <= (1 if cut else longest)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=8, max_size=60), st.integers(1, 8), st.integers(0, 9))
def test_no_lane_has_more_than_another_by_more_than_its_shortest_document(sizes: list[int], lanes: int, seed: int) -> None:
    hands = deal(np.asarray(sizes), shuffled(len(sizes), seed, 0), lanes)
    assert sorted(document for hand in hands for document in hand) == list(range(len(sizes)))
    least = min(sum(sizes[document] for document in hand) for hand in hands)
    for hand in hands:
        own = [sizes[document] for document in hand]
        assert sum(own) - min(own) <= least


def test_documents_are_cut_where_they_are_fewer_than_four_per_lane(tmp_path: Path) -> None:
    """One document of 100 segments and some of 1: cut, the lanes share it; whole, one lane alone has it."""
    for documents, alone in ((15, False), (16, True)):
        (tmp_path / str(documents)).mkdir()
        lanes = Lanes(made(tmp_path / str(documents), [1000, *[10] * (documents - 1)]), "train", lanes=4, segment=10)
        lanes.next_batch(99)
        assert [epoch_of(lanes, lane) == 0 for lane in lanes.own].count(True) == alone


def test_one_long_document_gives_each_lane_one_contiguous_part(tmp_path: Path) -> None:
    data = made(tmp_path, [1003])
    lanes = Lanes(data, "train", lanes=4, segment=10)
    found = take([lanes], 25)
    targets = [[target for _, part, _ in found[lane] for target in part] for lane in range(4)]
    assert targets == [list(range(250 * i, 250 * (i + 1))) for i in range(4)]
    assert [[start for _, _, start in found[lane]] for lane in range(4)] == [[True] + [False] * 24] * 4


def test_many_documents_are_never_cut(tmp_path: Path) -> None:
    data = made(tmp_path, [25] * 16)
    found = take(ranks(data, {"lanes": 4, "segment": 10}, 2), 12)
    firsts = [targets[0] for segments in found.values() for _, targets, start in segments if start]
    assert sorted(firsts) == [25 * i for i in range(16)]


def test_each_epoch_has_its_own_order_and_each_seed_too(tmp_path: Path) -> None:
    orders = {tuple(shuffled(20, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert all(sorted(order) == list(range(20)) for order in orders)


def test_the_shuffle_is_the_same_on_every_machine_and_version() -> None:
    assert shuffled(8, seed=1, epoch=0).tolist() == [3, 5, 2, 4, 1, 0, 6, 7]
    assert shuffled(8, seed=-1, epoch=3).tolist() == [3, 2, 0, 1, 5, 6, 4, 7]


def test_documents_dealt_with_one_giant_leave_it_alone_on_its_lane() -> None:
    hands = deal(torch.tensor([100, 1, 1, 1, 1, 1, 1, 1]).numpy(), shuffled(8, 0, 0), 2)
    assert [0] in hands


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lanes": 11, "segment": 10}, "11 lanes: must be 1 to 10"),
        ({"lanes": 0, "segment": 10}, "0 lanes"),
        ({"lanes": 2, "segment": 0}, "segment 0: must be at least 1"),
        ({"lanes": 2, "segment": 10, "rank": 2, "world": 2}, "rank 2 of 2"),
        ({"lanes": 2, "segment": 10, "rank": 0, "world": 3}, "rank 0 of 3"),
    ],
)
def test_impossible_lanes_are_refused_with_what_is_allowed(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Lanes(made(tmp_path, [100]), "train", **options)


def test_an_unknown_split_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no split 'test'; it has: train"):
        Lanes(made(tmp_path, [100]), "test", lanes=1, segment=10)


def test_a_state_of_another_stream_is_refused(tmp_path: Path) -> None:
    data = made(tmp_path, [100])
    state = Lanes(data, "train", lanes=4, segment=10, seed=1).state_dict()
    with pytest.raises(UserError, match="the saved state has seed 1, this run 2"):
        Lanes(data, "train", lanes=4, segment=10, seed=2).load_state_dict(state)
    one_rank = Lanes(data, "train", lanes=4, segment=10, seed=1, rank=0, world=2).state_dict()
    with pytest.raises(UserError, match=r"lacks lane 2 .* merge_states"):
        Lanes(data, "train", lanes=4, segment=10, seed=1).load_state_dict(one_rank)
    with pytest.raises(UserError, match="different runs"):
        merge_states([state, Lanes(data, "train", lanes=4, segment=10, seed=2).state_dict()])


def test_a_million_tokens_in_documents_of_all_sizes_are_each_read_once(tmp_path: Path) -> None:
    lengths = [1 + (i * i * 7919) % 5000 for i in range(400)]
    data = made(tmp_path, lengths, shard=300_000)
    assert sum(lengths) > 950_000
    lanes = Lanes(data, "train", lanes=16, segment=128, seed=3)
    seen = torch.zeros(sum(lengths), dtype=torch.int64)
    while any(epoch_of(lanes, lane) == 0 for lane in lanes.own):
        first = torch.tensor([epoch_of(lanes, lane) == 0 for lane in lanes.own])
        batch = lanes.next_batch()
        seen += torch.bincount(batch.targets[first][batch.mask()[first]], minlength=len(seen))
    assert (seen == 1).all()


MEASURE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from made_data import made
from lm.data.lanes import Lanes
def resident():
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) // 1024
lanes = Lanes(made(Path(sys.argv[1]), [int(sys.argv[2])], shard=1 << 24), "train", lanes=16, segment=512)
lanes.next_batch()
before, most = resident(), 0
for _ in range(int(sys.argv[2]) // (16 * 512 * 64)):
    lanes.next_batch(64)
    most = max(most, resident())
print(most - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_resident_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    tokens = 100_000_000  # 400 MB on disk
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(tokens), str(Path(__file__).parent)]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < 120, f"reading 400 MB left {grown} MB resident"
