"""The eight properties every model must have (docs/model.md), measured on any model; `pmi certify` runs them on a checkpoint.

Each proof returns the figure it measured beside its bound. Differences are the largest absolute difference of hidden features
divided by their root mean square. On a model whose added parts still start at zero, draw them at random first
(`draw_zeros`): otherwise a leak through them passes unseen.
"""

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lm.model import snapshot
from lm.model.decoder import PMI
from lm.model.delta import MAX_NORM
from lm.model.memory import MAX_RETENTION
from lm.model.state import State, map_tensors, named_tensors, tensors

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}
"""Largest relative difference that counts as equal, by the type the decoder computes in.

float32: rounding, a little amplified by recurrence. bfloat16: 8 bits of mantissa, and a top-k choice may flip between two ways of
computing the same features; what must be exact in any type (causality, lanes, position) is held to `EXACT`.
"""
EXACT = 0.0
LIVE = 10.0
"""A change that memory alone can carry must move later hidden features by this many tolerances (float32) at least."""
GROWTH = 1.75
"""Largest growth of memory from the second to the last quarter of a long stream; steady growth would double it."""
NATURAL = 1.0
"""Size (root mean square) of a memory slot: a gated mean of values within 1, or normalised."""
GRADIENT_FLOOR = 1e-6
"""Smallest gradient norm of a parameter, as a share of the median parameter's."""
IDENTITY = snapshot.Identity("proof", "proof")


@dataclass(frozen=True)
class Proof:
    """One property, measured."""

    name: str
    figure: float
    relation: str  # how the figure must stand to the bound: "<=" or ">="
    bound: float
    passed: bool
    detail: str = ""

    def row(self) -> dict[str, Any]:
        """As a JSON object; a figure that is not finite is null, for JSON has no word for it."""
        return {**asdict(self), "figure": self.figure if math.isfinite(self.figure) else None}


def prove(model: PMI, seed: int = 0, segments: int = 200, progress: Callable[[str], None] = lambda name: None) -> list[Proof]:
    """All proofs of `model` in evaluation mode; `segments` is the length of the boundedness stream."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for name, proof in PROOFS.items():
        progress(name)
        results.append(attempt(model, proof if proof is not boundedness else boundedness_over(segments), name, generator))
    return results


def attempt(model: PMI, proof: Callable[[PMI, torch.Generator], Proof], name: str, generator: torch.Generator) -> Proof:
    """One proof in evaluation mode; where the model refuses to be run, the proof has failed and says why."""
    training = model.training
    model.eval()
    try:
        return proof(model, generator)
    except ValueError as error:  # what checks.py and snapshot.py raise, above all results that are not finite
        return Proof(name, math.nan, *_bound(model, name), False, str(error))
    finally:
        model.train(training)


def _bound(model: PMI, name: str) -> tuple[str, float]:
    """What a proof that could not be run is held to."""
    if name in ("call cutting", "snapshot and tail"):
        return "<=", TOLERANCE[model.dtype]
    least = {"gradients": GRADIENT_FLOOR, "liveness": LIVE * TOLERANCE[torch.float32]}
    return (">=", least[name]) if name in least else ("<=", GROWTH if name == "boundedness" else EXACT)


def draw_zeros(model: PMI, seed: int = 0) -> PMI:
    """Give every projection that is all zero random values, as large as training would make them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not bool(parameter.any()):
                drawn = torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1])
                parameter.copy_(drawn)
    return model


def _below(name: str, figure: float, bound: float, detail: str = "") -> Proof:
    return Proof(name, figure, "<=", bound, figure <= bound, detail)


def _tokens(model: PMI, generator: torch.Generator, lanes: int, count: int) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (lanes, count), generator=generator).to(model.device)


def _again(tokens: Tensor, t: int, first: int, second: int) -> Tensor:
    """Tokens whose segment at `second` says again what that at `first` said: random text hardly comes back to a wording."""
    tokens[:, second : second + t] = tokens[:, first : first + t]
    return tokens


def _difference(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    difference = float((a - b).abs().max() / b.square().mean().sqrt().clamp(min=1e-12))
    return math.inf if math.isnan(difference) else difference  # max() would pass over NaN


def _other(model: PMI, token: Tensor) -> Tensor:
    return (token + model.config.vocab_size // 2) % model.config.vocab_size


@torch.no_grad()
def causality(model: PMI, generator: torch.Generator) -> Proof:
    """Changing token t changes no hidden feature before t, within a segment and across segments."""
    t = model.config.segment
    tokens = _tokens(model, generator, 1, 3 * t + max(1, t // 2))
    whole, _ = model(tokens, model.initial_state(1))
    worst, at = 0.0, 0
    places = {0, 1, t // 2, t - 1, t, t + t // 2, 2 * t - 1, 2 * t, 3 * t - 1, 3 * t, tokens.shape[1] - 1}
    for place in sorted(p for p in places if 0 < p < tokens.shape[1]):
        changed = tokens.clone()
        changed[0, place] = _other(model, changed[0, place])
        again, _ = model(changed, model.initial_state(1))
        difference = _difference(again[:, :place], whole[:, :place])
        worst, at = max((worst, at), (difference, place))
    return _below("causality", worst, EXACT, f"a change at token {at} reaches back" if worst else "")


@torch.no_grad()
def cutting(model: PMI, generator: torch.Generator) -> Proof:
    """The same text in one call, token by token, and cut at random gives the same hidden features and memory."""
    drawn, bound = generator.get_state(), TOLERANCE[model.dtype]
    figure = _cut(model, generator)
    memory = model.config.memory
    if figure <= bound or memory is None or (memory.top_k is None and memory.delta.top_k is None):
        return _below("call cutting", figure, bound)
    # which of two near equals is among the top k may hang on rounding; in float64 it hardly does, and a fault stays one
    generator.set_state(drawn)
    exact = _cut(copy.deepcopy(model).double(), generator)
    return _below(
        "call cutting", exact, bound * 1e-3, f"in float64; before {figure:.1e}, where rounding may choose among the top k"
    )


def _cut(model: PMI, generator: torch.Generator) -> float:
    """Largest difference between one call and several."""
    t = model.config.segment
    tokens = _again(_tokens(model, generator, 2, 3 * t + max(1, t // 3)), t, t, 2 * t)
    whole, after = model(tokens, model.initial_state(2))
    worst = 0.0
    for steps in (
        _singly(tokens.shape[1], 2 * t),
        _randomly(tokens.shape[1], t, generator),
        _randomly(tokens.shape[1], 2 * t, generator),
    ):
        state, pieces, first = model.initial_state(2), [], 0
        for step in steps:
            hidden, state = model(tokens[:, first : first + step], state)
            pieces.append(hidden)
            first += step
        worst = max(worst, _difference(torch.cat(pieces, 1), whole))
        remembered = zip(tensors(state.remembered), tensors(after.remembered), strict=True)
        worst = max([worst, *(_difference(a, b) for a, b in remembered)])
    return worst


def _singly(count: int, single: int) -> list[int]:
    return [1] * min(count, single) + ([count - single] if count > single else [])


def _randomly(count: int, most: int, generator: torch.Generator) -> list[int]:
    steps = []
    while count:
        steps.append(min(count, int(torch.randint(1, most + 1, (1,), generator=generator))))
        count -= steps[-1]
    return steps


@torch.no_grad()
def snapshot_and_tail(model: PMI, generator: torch.Generator) -> Proof:
    """A snapshot at the last boundary and the ids since continue as if never interrupted, at every offset (six where T > 32)."""
    t = model.config.segment
    tokens = _tokens(model, generator, 1, 4 * t)
    whole, _ = model(tokens, model.initial_state(1))
    _, state = model(tokens[:, : 2 * t], model.initial_state(1))
    stored = snapshot.dump(model, state, 0, IDENTITY)
    offsets = range(1, t + 1) if t <= 32 else sorted({1, 2, t // 3, t // 2, t - 1, t})
    worst = 0.0
    for tail in offsets:  # 1..t ids: the newest token always stays in the tail
        resumed = snapshot.load_snapshot(model, stored, IDENTITY)
        replayed, resumed = model(tokens[:, 2 * t : 2 * t + tail], resumed)
        onward, _ = model(tokens[:, 2 * t + tail :], resumed)
        worst = max(worst, _difference(torch.cat([replayed, onward], 1), whole[:, 2 * t :]))
    return _below("snapshot and tail", worst, TOLERANCE[model.dtype], f"{len(offsets)} offsets, {len(stored):,} bytes")


def gradients(model: PMI, generator: torch.Generator) -> Proof:
    """Every parameter gets gradient from three segments."""
    t = model.config.segment
    tokens = _again(_tokens(model, generator, 4, 3 * t + 1), t, t, 2 * t)
    # every cluster of an adaptive softmax must be hit for its parameters to be reached
    edges = [0, *model.config.cutoffs]
    tokens[0, : len(edges)] = torch.tensor(edges[: tokens.shape[1]], device=tokens.device)
    model.zero_grad(set_to_none=True)
    with torch.enable_grad():
        hidden, _ = model(tokens[:, :-1], model.initial_state(4))
        model.head.loss(hidden, tokens[:, 1:]).backward()
    norms = {name: float(p.grad.norm()) if p.grad is not None else 0.0 for name, p in model.named_parameters() if p.numel()}
    model.zero_grad(set_to_none=True)
    if bad := [name for name, norm in norms.items() if not math.isfinite(norm)]:
        return Proof("gradients", math.nan, ">=", GRADIENT_FLOOR, False, f"not finite: {', '.join(bad[:4])}")
    median = sorted(norms.values())[len(norms) // 2]
    least = min(norms, key=lambda name: norms[name])
    figure = norms[least] / median if median else 0.0
    return Proof("gradients", figure, ">=", GRADIENT_FLOOR, figure >= GRADIENT_FLOOR, f"least: {least}")


def boundedness_over(segments: int) -> Callable[[PMI, torch.Generator], Proof]:
    """The proof of boundedness over so many segments."""

    def bounded(model: PMI, generator: torch.Generator) -> Proof:
        return boundedness(model, generator, segments)

    return bounded


@torch.no_grad()
def boundedness(model: PMI, generator: torch.Generator, segments: int) -> Proof:
    """Over a long stream memory stays finite, below its ceiling, and its last quarter is hardly larger than its second."""
    if model.config.memory is None:
        return _below("boundedness", 0.0, GROWTH, "memory off")
    t, state = model.config.segment, model.initial_state(1)
    sizes: dict[str, list[float]] = {name: [] for name, x in named_tensors(state.remembered) if x.numel()}
    ceiling, step = dict.fromkeys(sizes, 0.0), max(1, segments // 32)
    for _ in range(0, segments, step):
        _, state = model(_tokens(model, generator, 1, step * t), state)
        for name, x in named_tensors(state.remembered):
            if x.numel():
                sizes[name].append(float(x.square().mean().sqrt()))
                ceiling[name] = max(ceiling[name], float(x.abs().max()))
    growth, grown = max((_growth(model, name, sizes[name], ceiling[name]), name) for name in sizes)
    return _below("boundedness", growth, GROWTH, f"{segments} segments, most: {grown}, largest element {ceiling[grown]:.3g}")


def _growth(model: PMI, level: str, sizes: list[float], largest: float) -> float:
    """How much larger a level of memory is in the last quarter of a stream than in the second; infinite beyond its ceiling."""
    memory = model.config.memory
    assert memory is not None
    associative = level.endswith("long_term") and memory.consolidation == "delta"
    # below the size that it always may have, coming and going is no growth: slots are of size 1, a matrix is cut at MAX_NORM
    natural = MAX_NORM if associative else NATURAL
    # working slots cannot pass theirs; a long-term element may stand out of its fragment
    highest = (NATURAL if level.endswith("working") else MAX_NORM) / (1 - MAX_RETENTION)
    if not largest < highest:
        return math.inf
    quarter = max(1, len(sizes) // 4)  # the first is still filling up
    early, late = statistics.median(sizes[quarter : 2 * quarter]), statistics.median(sizes[-quarter:])
    return late / max(early, natural)


@torch.no_grad()
def lanes(model: PMI, generator: torch.Generator) -> Proof:
    """Lanes do not influence each other, a reset lane equals a fresh one, padding changes nothing."""
    t = model.config.segment
    count = 2 * t + max(1, t // 2)
    tokens = _tokens(model, generator, 3, count)
    hidden, state = model(tokens, model.initial_state(3))
    changed = tokens.clone()
    changed[1] = _other(model, changed[1])
    others, others_state = model(changed, model.initial_state(3))
    company = max(
        _difference(others[[0, 2]], hidden[[0, 2]]), _state_difference(others_state.select([0, 2]), state.select([0, 2]))
    )
    fresh, _ = model(tokens, model.initial_state(3))
    _, used = model(changed, model.initial_state(3))
    reset, _ = model(tokens, model.reset(used, [0, 1, 2]))
    renewed = _difference(reset, fresh)
    lengths = torch.tensor([count, t + 1, 0], device=tokens.device)
    one, state_one = model(tokens, model.initial_state(3), lengths)
    filled = tokens.clone()
    filled[1, t + 1 :] = _other(model, filled[1, t + 1 :])
    filled[2] = _other(model, filled[2])
    two, state_two = model(filled, model.initial_state(3), lengths)
    padding = max(_difference(two, one), _state_difference(state_two, state_one))
    worst = max(company, renewed, padding)
    alone, _ = model(tokens[1:2, : t + 1], model.initial_state(1))
    apart = _difference(one[1:2, : t + 1], alone)
    passed = worst <= EXACT and apart <= TOLERANCE[model.dtype]
    detail = f"company {company:.1e}, reset {renewed:.1e}, padding {padding:.1e}; alone against batched {apart:.1e}"
    return Proof("lanes", worst, "<=", EXACT, passed, detail)


def _state_difference(a: State, b: State) -> float:
    worst = 0.0

    def compare(x: Tensor, y: Tensor) -> Tensor:
        nonlocal worst
        worst = max(worst, _difference(x, y)) if x.numel() else worst
        return x

    map_tensors(compare, a, b)
    return worst


@torch.no_grad()
def liveness(model: PMI, generator: torch.Generator) -> Proof:
    """A token beyond the reach of every window still moves later hidden features (its wording comes again): memory carries it."""
    config, t = model.config, model.config.segment
    needed = LIVE * TOLERANCE[torch.float32]
    if config.memory is None:
        return Proof("liveness", 0.0, ">=", 0.0, True, "memory off")
    # a window belongs to a segment's start, so from its end one layer reaches back by whole segments
    reach = config.layers * math.ceil(config.window / t) * t + t
    place = 2 * t + t // 2  # not in the first segment: a memory that takes in only its first write is not alive
    count = math.ceil((place + reach + 2) / t) * t
    tokens = _again(_tokens(model, generator, 1, count + t), t, 2 * t, count)
    changed = tokens.clone()
    around = slice(place - min(2, t // 4), place + 1)
    changed[0, around] = _other(model, changed[0, around])
    whole, _ = model(tokens, model.initial_state(1))
    again, _ = model(changed, model.initial_state(1))
    figure = _difference(again[:, count:], whole[:, count:])
    detail = f"{count - place} tokens later, windows reach {reach}"
    return Proof("liveness", figure, ">=", needed, figure >= needed, detail if figure >= needed else f"memory inert ({detail})")


@torch.no_grad()
def far_positions(model: PMI, generator: torch.Generator) -> Proof:
    """Ten million tokens further on, everything is bit for bit the same."""
    t = model.config.segment
    full = math.ceil(max(1, model.config.window) / t) * t
    tokens = _tokens(model, generator, 1, 3 * t + 1)
    _, state = model(_tokens(model, generator, 1, full), model.initial_state(1))
    far = state._replace(position=state.position + math.ceil(10**7 / t) * t)
    near_hidden, near = model(tokens, state)
    far_hidden, beyond = model(tokens, far)
    difference = _difference(far_hidden, near_hidden)
    moved = _state_difference(beyond._replace(position=near.position), near)
    return _below("far positions", max(difference, moved), EXACT, f"position {int(far.position[0]):,}")


PROOFS: dict[str, Callable[..., Proof]] = {
    "causality": causality,
    "call cutting": cutting,
    "snapshot and tail": snapshot_and_tail,
    "gradients": gradients,
    "boundedness": boundedness,
    "lanes": lanes,
    "liveness": liveness,
    "far positions": far_positions,
}
"""All of them by name, in the order in which they run."""
