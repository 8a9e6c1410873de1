"""The model for lm-evaluation-harness (package `lm_eval`, extra `eval`), registered as `pmi`; this runs the harness with it:

    python -m lm.evaluation.harness run --model pmi --model_args pretrained=runs/demo/model --tasks TASK --include_path FOLDER

Nothing is ever truncated: a text of any length is read with carried memory and window, behind BOS.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from lm.errors import UserError
from lm.evaluation.corpus import InMemory, Item
from lm.evaluation.stream import CALL_TOKENS, HEAD_SCORES, Watch, evaluate
from lm.evaluation.tally import Outcome
from lm.evaluation.variants import variant
from lm.generation.sampling import Sampling
from lm.generation.stream import stream
from lm.model.pretrained import Checkpoint, from_pretrained, resolve_device

GENERATED = 256
"""Most tokens of `generate_until` where the task does not say."""
MEMORY = {"on": True, "off": False, "True": True, "False": False}
"""What `memory` may be; the harness itself makes booleans of true and false on its command line."""


@register_model("pmi")
class PmiLM(LM):  # type: ignore[misc]
    """A PMI checkpoint. Arguments: pretrained (a model folder), memory (on or off), segment, window, dtype."""

    def __init__(
        self,
        pretrained: str,
        memory: str | bool = "on",
        segment: int | None = None,
        window: int | None = None,
        dtype: str = "float32",
        device: str = "auto",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if (carried := MEMORY.get(str(memory))) is None:
            raise UserError(
                f"memory={memory}: must be one of {', '.join(MEMORY)}; `pmi eval --memory` knows reset and shuffled too"
            )
        # the harness says cuda:0 wherever the user says nothing
        loaded = from_pretrained(Path(pretrained), resolve_device(device if torch.cuda.is_available() else "cpu"))
        self.tokenizer, self.call_tokens = loaded.tokenizer, CALL_TOKENS
        self.model = variant(loaded, carried, segment, window, dtype)
        self.checkpoint = Checkpoint(self.model, loaded.tokenizer, loaded.fingerprint)

    @property
    def tokenizer_name(self) -> str:
        """What tells cached requests of different tokenizers apart."""
        return self.tokenizer.fingerprint()

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text as a whole, memory carried over all of it."""
        items = [_item(i, self.tokenizer.encode(request.args[0])) for i, request in enumerate(requests)]
        found: dict[int, float] = {item.number: 0.0 for item in items if not item.length}

        def done(outcome: Outcome) -> None:
            found[outcome.number] = -outcome.nats
            self.cache_hook.add_partial("loglikelihood_rolling", requests[outcome.number].args, -outcome.nats)

        read = [item for item in items if item.length]
        if read:
            evaluate(self.model, read, "on", self.tokenizer.bos, Watch(done=done), call_tokens=self.call_tokens)
        return [found[i] for i in range(len(requests))]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-probability of each continuation behind its context, and whether greedy decoding would give it."""
        found: dict[int, tuple[float, bool]] = {}
        pairs = {i: self._pair(*request.args) for i, request in enumerate(requests)}
        order = sorted(pairs, key=lambda i: -len(pairs[i][0]))
        while order:
            longest = -(-len(pairs[order[0]][0]) // self.model.config.segment) * self.model.config.segment
            lanes = max(1, self.call_tokens // longest)
            batch, order = order[:lanes], order[lanes:]
            for i, answer in zip(batch, self._score([pairs[i] for i in batch]), strict=True):
                found[i] = answer
                self.cache_hook.add_partial("loglikelihood", requests[i].args, answer)
        return [found[i] for i in range(len(requests))]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """All tokens behind BOS, and how many of them are the context: those that it has in common with the whole."""
        whole, before = self.tokenizer.encode(context + continuation), self.tokenizer.encode(context)
        common = next((i for i, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b), min(len(whole), len(before)))
        return whole, common

    @torch.inference_mode()
    def _score(self, pairs: list[tuple[list[int], int]]) -> Iterable[tuple[float, bool]]:
        model, t = self.model, self.model.config.segment
        segments = max(1, max(-(-len(tokens) // t) for tokens, _ in pairs))
        inputs = np.full((len(pairs), segments * t), self.tokenizer.bos, dtype=np.int64)
        for row, (tokens, _) in enumerate(pairs):
            inputs[row, 1 : len(tokens)] = tokens[:-1]
        starts = torch.zeros(len(pairs), segments, dtype=torch.bool, device=model.device)
        starts[:, 0] = True
        hidden, _ = model(torch.from_numpy(inputs).to(model.device), model.initial_state(len(pairs)), starts=starts)
        step = max(1, HEAD_SCORES // model.config.vocab_size)
        for row, (tokens, context) in enumerate(pairs):
            total, greedy = 0.0, True
            for first in range(context, len(tokens), step):
                targets = torch.tensor(tokens[first : first + step], device=model.device)
                logits = model.head.logits(hidden[row, first : first + len(targets)]).double()
                total += float(logits.log_softmax(-1).gather(-1, targets[:, None]).sum())
                greedy &= bool((logits.argmax(-1) == targets).all())
            yield total, greedy

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """A continuation of each context, up to the first of the stop strings."""
        results = []
        for request in requests:
            context, options = request.args
            until = options.get("until") or []
            stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
            temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
            limit, text = int(options.get("max_gen_toks", GENERATED)), ""
            for piece in stream(self.checkpoint, context, limit, Sampling(temperature=temperature)):
                text += piece
                if any(stop in text for stop in stops):
                    break
            text = text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]
            self.cache_hook.add_partial("generate_until", request.args, text)
            results.append(text)
        return results


def _item(number: int, tokens: list[int]) -> Item:
    return Item(number, str(number), len(tokens), 0, 0, InMemory(np.array(tokens, dtype=np.int64)))


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
