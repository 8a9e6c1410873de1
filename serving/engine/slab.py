"""The lanes that decode together: one preallocated state, and per lane its last token, sampling settings and recent ids.

Active lanes are always the first ones, so a step reads and writes views of the slab; a lane that retires is filled with the
last one.
"""

import torch
from torch import Tensor

from lm.generation.sampling import BLANK, RECENT, Batch, Sampling, logprobs, remember, sample
from lm.model import PMI, State
from lm.model.checks import NotFiniteError
from lm.model.state import map_tensors, tensors
from serving.engine.request import Logprobs


class Slab:
    """Up to `lanes` sequences that decode side by side. To be used under inference mode, by one thread."""

    def __init__(self, model: PMI, lanes: int, bos: int) -> None:
        self.model, self.lanes, self.bos = model, lanes, bos
        self.active = 0
        self._views: dict[int, State] = {}
        self.clear()

    def clear(self) -> None:
        """Forget everything: all lanes are free, nothing of what they held is left."""
        device = self.model.device
        self.active = 0
        self.state = self.model.initial_state(self.lanes)
        self.token = torch.zeros(self.lanes, dtype=torch.int64, device=device)
        self.recent = torch.full((self.lanes, RECENT), BLANK, device=device)
        self.settings = Batch.of([Sampling()] * self.lanes, device)
        self._views = {}

    def admit(self, state: State, settings: Batch, recent: Tensor, token: Tensor) -> int:
        """Take in a sequence (each argument with one lane); returns its lane."""
        lane = self.active
        self.active += 1
        self._put(lane, state, settings, recent, token)
        return lane

    def retire(self, lane: int) -> int:
        """Free a lane; returns the lane that was moved into its place (itself, if none had to be)."""
        self.active -= 1
        last = slice(self.active, self.active + 1)
        if lane != self.active:
            view = map_tensors(lambda x: x[last], self.state)
            self._put(lane, view, Batch(*(x[last] for x in self.settings)), self.recent[last], self.token[last])
        return self.active

    def _put(self, lane: int, state: State, settings: Batch, recent: Tensor, token: Tensor) -> None:
        map_tensors(lambda mine, theirs: mine[lane : lane + 1].copy_(theirs), self.state, state)
        for mine, theirs in zip(self.settings, settings, strict=True):
            mine[lane] = theirs[0]
        self.recent[lane], self.token[lane] = recent[0], token[0]

    def step(self) -> tuple[Tensor, NotFiniteError | None]:
        """Read every active lane's last token and choose its next one; returns the logits [active, vocabulary].

        Where lanes are lost (an imported state may be finite and yet overflow), the error names them; the others have gone on.
        """
        n = self.active
        if n not in self._views:
            self._views[n] = map_tensors(lambda x: x[:n], self.state)
        view = self._views[n]
        lost = None
        try:
            hidden, after = self.model(self.token[:n, None], view, donate=True)
        except NotFiniteError as error:
            lost, after, hidden = error, error.state, error.hidden.nan_to_num(0)
        for mine, new in zip(tensors(view), tensors(after), strict=True):
            if mine.data_ptr() != new.data_ptr():  # what the model could not write in place
                mine.copy_(new)
        logits = next_logits(self.model, hidden, self.bos)
        chosen = sample(logits, Batch(*(x[:n] for x in self.settings)), self.recent[:n], view.position)
        remember(self.recent[:n], view.position, chosen)
        self.token[:n] = chosen
        return logits, lost


def next_logits(model: PMI, hidden: Tensor, bos: int) -> Tensor:
    """Scores [b, v] of the token after the last one read; BOS, which is never a target in training, cannot come."""
    logits = model.head.logits(hidden[:, -1])
    logits[:, bos] = -torch.inf
    return logits


def likeliest(logits: Tensor, chosen: Tensor, count: int) -> list[Logprobs]:
    """Log-probabilities of lanes, as values."""
    own, ids, values = logprobs(logits, chosen, count)
    rows = zip(own.tolist(), ids.tolist(), values.tolist(), strict=True)
    return [Logprobs(mine, tuple(zip(best, scores, strict=True))) for mine, best, scores in rows]
