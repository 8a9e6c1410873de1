"""Verbatim tables: against a plain transcription, token by token; what they hold, and for how long."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.config import ModelConfig, VerbatimConfig, load_model_config
from lm.config_files import override
from lm.errors import UserError
from lm.model import PMI, snapshot
from lm.model.verbatim import Recital, VerbatimWrite, addresses, addresses_at, look_up, recite
from lm.reasoning.config import load_reason_config
from tests.model.variants import BASE, build

IDENTITY = snapshot.Identity("m", "t")


def plainly(
    write: VerbatimWrite,
    config: VerbatimConfig,
    embedded: torch.Tensor,
    h: torch.Tensor,
    tokens: torch.Tensor,
    starts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `recite` does, one token after the other: `embedded` and `h [s, t, d]`, `tokens [s, t]`, `starts [s]` of one lane."""
    width = config.width
    tables = torch.zeros(len(config.contexts), config.rows, width, dtype=embedded.dtype)
    rows = addresses(tokens[None], config)[0]
    found = torch.zeros(*rows.shape, width, dtype=embedded.dtype)
    for s in range(len(tokens)):
        if starts[s]:
            tables = torch.zeros_like(tables)
        for c in range(len(tables)):
            found[s, c] = tables[c, rows[s, c]]
        tables = tables.clone()
        x = torch.nn.functional.layer_norm(embedded[s], embedded.shape[-1:])
        for t in range(1, tokens.shape[1]):
            values = write.value(x[t]).view(len(tables), width)
            strengths = write.strength(h[s, t]).sigmoid()
            for c in range(len(tables)):
                value = torch.nn.functional.normalize(values[c], dim=-1) * width**0.5
                row = rows[s, c, t - 1]
                tables[c, row] = tables[c, row] + strengths[c] * (value - tables[c, row])
    return found, tables


@given(seed=st.integers(0, 10_000), segments=st.integers(1, 4), length=st.integers(1, 9), rows=st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_a_recital_equals_one_token_after_the_other(seed: int, segments: int, length: int, rows: int) -> None:
    """Values and gradients, however often a wording comes again in a segment and wherever documents start."""
    torch.manual_seed(seed)
    config = VerbatimConfig(contexts=[1, 2, 3], rows=rows, width=4)
    write = VerbatimWrite(6, config).double()
    embedding = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 5, (2, segments, length))
    starts = torch.rand(2, segments) < 0.3
    starts[:, 0] = True
    reads = addresses(tokens, config)
    blank = torch.full((2, 3, rows, 4), 7.0, dtype=torch.float64)  # of an earlier document: nothing of it may be read
    h = torch.randn(2, segments, length, 6, dtype=torch.float64, requires_grad=True)
    every = seed % 2  # by the token, or by the id
    entries = write(embedding, h, reads, tokens) if every else write(embedding[tokens], h, reads)
    found, after = recite(blank, reads, entries, starts)
    weights = torch.randn_like(found), torch.randn_like(after)
    parameters = [embedding, h, *write.parameters()]
    loss = (found * weights[0]).sum() + (after * weights[1]).sum()
    slopes = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    plain = [plainly(write, config, embedding[tokens[b]], h[b], tokens[b], starts[b]) for b in range(2)]
    expected = [torch.stack(part) for part in zip(*plain, strict=True)]
    torch.testing.assert_close(found, expected[0])
    torch.testing.assert_close(after, expected[1])
    loss = embedding.sum() * 0 + sum((x * w).sum() for x, w in zip(expected, weights, strict=True))
    wanted = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    for slope, right in zip(slopes, wanted, strict=True):
        torch.testing.assert_close(slope, right)


def test_a_recitals_own_gradient_is_that_of_what_it_computes() -> None:
    torch.manual_seed(0)
    rows, reads = torch.randint(0, 5, (2, 3, 2, 5)), torch.randint(0, 5, (2, 3, 2, 6))
    last = ~(rows[..., :, None] == rows[..., None, :]).triu(1).any(-1)
    given = [
        torch.rand(*shape, dtype=torch.float64, requires_grad=True) for shape in [(2, 2, 5, 3), (2, 3, 2, 5), (2, 3, 2, 5, 3)]
    ]
    for starts in None, torch.tensor([[True, False, True], [False, True, False]]):

        def recital(tables: torch.Tensor, keep: torch.Tensor, add: torch.Tensor, starts: Any = starts) -> Any:
            return Recital.apply(tables, reads, rows, last, keep, add, starts)

        assert torch.autograd.gradcheck(recital, given)


def test_tables_given_to_a_recital_stay_as_they_were() -> None:
    model = build(["memory.verbatim={}"])
    tokens = torch.randint(0, 23, (1, 16))
    with torch.no_grad():
        _, state = model(tokens, model.initial_state(1))
        before = state.verbatim.clone()
        model(tokens.flip(1), state)
        model(tokens[:, :3], state)
    assert before.any()
    assert torch.equal(state.verbatim, before)


def test_a_table_remembers_what_followed_through_any_length_of_other_text() -> None:
    """Nothing fades: what is told once is found to the last bit a thousand segments later, if its wording did not come again."""
    config = VerbatimConfig(contexts=[1, 2], rows=64, width=8)
    write = VerbatimWrite(16, config)
    embedding = torch.randn(64, 16)
    with torch.no_grad():

        def read_on(tables: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            reads = addresses(tokens, config)
            return recite(tables, reads, write(embedding[tokens], embedding[tokens], reads), None)[1]

        told = torch.tensor([[[1, 2, 3, 4]]])
        tables = read_on(torch.zeros(1, 2, 64, 8), told)
        at_first = look_up(tables, addresses(told, config))
        after = read_on(tables, torch.randint(10, 64, (1, 1000, 4)))
        assert torch.equal(look_up(after, addresses(told, config))[:, :, 0], at_first[:, :, 0])  # of one token, no row is shared
        assert float(after.square().mean(-1).max()) <= 1 + 1e-5  # and no row outgrows what was written


def test_wordings_are_told_apart_by_all_their_tokens_and_by_nothing_else() -> None:
    config = VerbatimConfig(contexts=[1, 2, 3], rows=2**20, width=1)
    torch.manual_seed(0)
    tokens = torch.randint(0, 50_000, (1, 1, 4000))
    single, double, triple = addresses(tokens, config)[0, 0]
    assert single.tolist() == tokens.flatten().tolist()
    for rows in double, triple:
        assert 0 <= int(rows.min()) <= int(rows.max()) < 2**20
        assert len(set(rows.tolist())) > 3980  # of 4000: as many collisions as chance makes (8)
    again = torch.cat([torch.randint(0, 50_000, (1, 1, 2)), tokens[..., 7:]], -1)
    shifted = addresses(again, config)[0, 0]
    assert torch.equal(shifted[2, 4:], triple[9:])
    assert int((shifted[1, 2:3] == double[7:8]).sum()) == 0  # behind another token it is another wording
    beyond = addresses(tokens.view(1, 2, 2000), config)[0, 1]
    assert torch.equal(beyond[2, 2:], triple[2002:])
    assert not torch.equal(beyond[1, 0], double[2000])  # wordings end with their segment


def test_ids_of_32_bits_and_those_in_the_middle_of_a_segment_have_the_same_wordings() -> None:
    config = VerbatimConfig(contexts=[1, 2, 3], rows=1000, width=1)
    tokens = torch.randint(0, 50_000, (3, 1, 12))
    rows = addresses(tokens, config)
    assert torch.equal(addresses(tokens.int(), config), rows)
    offsets = torch.tensor([[0, 1, 2], [5, 6, 7], [9, 10, 11]])
    found = addresses_at(tokens[:, 0], offsets, config)
    assert torch.equal(found, rows.gather(-1, offsets[:, None, None].expand(-1, 1, 3, -1)))
    model = build(["memory.verbatim={}"])
    ids = torch.randint(0, 23, (1, 20))
    with torch.no_grad():
        assert torch.equal(model(ids, model.initial_state(1))[0], model(ids.int(), model.initial_state(1))[0])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{contexts: [2, 2]}", "names a length twice"),
        ("{contexts: [2, 8]}", "must be shorter"),
        ("{contexts: []}", "at least 1"),
        ("5", "mapping"),
    ],
)
def test_tables_that_cannot_be_are_refused_with_what_is_allowed(value: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_model_config("tiny", ["segment=8", f"memory.verbatim={value}"])


def test_tables_are_turned_off_as_memory_is() -> None:
    for word in "off", "null":
        memory = load_model_config("pg19-memory", [f"memory.verbatim={word}"]).memory
        assert memory is not None
        assert memory.verbatim is None


def test_fewer_rows_than_ids_are_shared() -> None:
    rows = addresses(torch.arange(100)[None, None], VerbatimConfig(contexts=[1], rows=7, width=1))
    assert set(rows.flatten().tolist()) == set(range(7))


def test_a_model_without_tables_has_the_snapshots_it_had() -> None:
    """Same parts, so the same bytes and sessions; with tables they are one part more."""
    parts = {}
    for changes in [], ["memory.verbatim={rows: 5, width: 3}"]:
        model = build(changes)
        with torch.no_grad():
            _, state = model(torch.arange(16)[None], model.initial_state(1))
        assert state.verbatim.any() == bool(changes)
        parts[len(changes)] = set(snapshot.capture(model, state, 0).tensors)
        data = snapshot.dump(model, state, 0, IDENTITY)
        assert torch.equal(snapshot.load_snapshot(model, data, IDENTITY).verbatim, state.verbatim)
    assert parts[1] - parts[0] == {"verbatim"}
    assert not parts[0] - parts[1]


def test_one_seed_gives_one_decoder_with_and_without_tables() -> None:
    models = []
    for changes in [], ["memory.verbatim={}"]:
        torch.manual_seed(3)
        models.append(PMI(ModelConfig.model_validate(override(BASE, changes))))
    without, having = (dict(model.named_parameters()) for model in models)
    assert {name for name in having if name not in without} == {
        *(f"verbatim.{part}" for part in ("value.weight", "strength.weight", "strength.bias")),
        *(f"memories.0.verbatim.{part}" for part in ("gate.weight", "gate.bias", "out.weight")),
    }
    assert all(torch.equal(having[name], x) for name, x in without.items() if name.startswith(("embedding", "blocks", "norm")))
    tokens = torch.randint(0, 23, (1, 30))
    first, second = (model(tokens, model.initial_state(1))[0] for model in models)
    torch.testing.assert_close(first, second)  # and what is read adds nothing yet


def test_an_encoder_has_no_wording() -> None:
    with pytest.raises(UserError, match="verbatim: what an encoder reads is a set"):
        load_reason_config("babi", "pmi-tr", "cpu", ["encoder.memory.verbatim={}"])
