"""Other people's models under our protocol: any Hugging Face causal LM on the same documents, with a sliding window.

    pmi eval-peer --model FOLDER --data data/enwik8 --split test --context 1024 --stride 512

Every token is predicted once: the first window predicts all of its tokens (from BOS), each later one its last `stride`, behind
up to `context - stride` tokens of context. stride = 1 gives every token the most context, at the most cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lm.data.tokenizer import FILE, Tokenizer, load_tokenizer
from lm.errors import UserError, collecting
from lm.evaluation.corpus import Corpus, InMemory, Item, open_corpus
from lm.evaluation.stream import HEAD_SCORES, StoppedError, Watch
from lm.evaluation.tally import Tally

CALL_TOKENS = 8_192


@dataclass(frozen=True)
class Peer:
    """A causal LM with what evaluating it needs."""

    model: Any
    name: str
    tokenizer: Any
    """A Hugging Face tokenizer, or None: the model reads our token ids."""
    own: Tokenizer | None
    """Our tokenizer, where the model was trained on our prepared data."""
    bos: int
    longest: int
    """Most tokens of a window."""


def load_peer(folder: Path, device: torch.device) -> Peer:
    """A Hugging Face model in a folder: with its own tokenizer, or with one of ours (`pmi data prepare`'s tokenizer.json)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise UserError(f"--model {folder}: no config.json there; give a folder that `save_pretrained` of transformers wrote")
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).to(device).eval()
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        why = str(error).splitlines()[0]
        raise UserError(
            f"--model {folder}: transformers cannot load it ({why}); save it again with save_pretrained, "
            "or use `pmi eval --checkpoint` for a model of ours"
        ) from error
    longest = int(getattr(model.config, "max_position_embeddings", 0) or 1 << 20)
    ours = folder / FILE
    if ours.is_file() and '"kind"' in ours.read_text()[:200]:
        own = load_tokenizer(folder)
        return Peer(model, model.config.model_type, None, own, own.bos, longest)
    try:
        theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"--model {folder}: no tokenizer there, neither theirs nor ours; put the one it was trained with"
        ) from error
    bos = next((i for i in (theirs.bos_token_id, theirs.eos_token_id) if i is not None), None)
    if bos is None:
        raise UserError(f"--model {folder}: its tokenizer has neither BOS nor EOS to stand before a document")
    return Peer(model, model.config.model_type, theirs, None, bos, longest)


def corpus_for(peer: Peer, data: Path, split: str, documents: list[str] | None) -> Corpus:
    """The documents as the peer reads them: our ids, or the text behind them in its own tokens."""
    if peer.own is not None:
        return open_corpus(data, split, peer.own, documents)
    from lm.data.prepared import MANIFEST
    from lm.data.tokenizer import ByteTokenizer

    source = load_tokenizer(data) if (data / MANIFEST).is_file() else ByteTokenizer()
    corpus = open_corpus(data, split, source, documents)
    if not source.lossless:
        note = f"the text was given back by the {source.kind} tokenizer, unknown words as it writes them"
        corpus = replace(corpus, not_comparable=[*corpus.not_comparable, note])
    items, notes = [], list(corpus.notes)
    for item in corpus.items:
        text = source.decode(item.read(0, item.length).tolist())
        tokens = np.array(peer.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
        if len(tokens):
            items.append(replace(item, length=len(tokens), read=InMemory(tokens)))
        else:
            notes.append(f"left out, no token of the peer's in it: {item.name}")
    if not items:
        raise UserError(f"{corpus.name}: no document there has a token of the peer's; there is nothing to predict")
    return replace(corpus, items=items, unknown=0, notes=notes)


def windows(length: int, context: int, stride: int) -> list[tuple[int, int, int]]:
    """(first input, first predicted, end) of each window; predicted tokens follow each other without gap or overlap.

    Inputs are counted with BOS as 0: the window's inputs are first .. end - 1, and input i predicts token i.
    """
    found, at = [], 0
    while at < length:
        end = min(length, context if at == 0 else at + stride)
        found.append((max(0, end - context), at, end))
        at = end
    return found


@torch.inference_mode()
def evaluate_peer(peer: Peer, items: Sequence[Item], context: int, stride: int, watch: Watch) -> None:
    """Read every document in sliding windows; `watch.done` gets each one's outcome."""
    with collecting() as problems:
        if not 2 <= context <= peer.longest:
            problems.append(f"--context {context}: must be 2 to {peer.longest:,}, the model's longest")
        if not 1 <= stride <= context:
            problems.append(f"--stride {stride}: must be 1 to the context, {context}")
    for item in items:
        tally = Tally(item, context)
        nats = np.zeros(item.length)
        tokens = np.concatenate([[peer.bos], item.read(0, item.length)]).astype(np.int64)
        cut = windows(item.length, context, stride)
        rows = max(1, min(CALL_TOKENS // context, HEAD_SCORES * 4 // (context * peer.model.config.vocab_size)))
        for first in range(0, len(cut), rows):
            if watch.stop():
                raise StoppedError([])
            _windows(peer, tokens, nats, cut[first : first + rows], context)
            watch.advanced(sum(end - at for _, at, end in cut[first : first + rows]))
        padded = np.zeros(len(tally.segments) * context)
        padded[: item.length] = nats
        tally.add(padded.reshape(-1, context).sum(1), nats)
        watch.done(tally.outcome())


def _windows(peer: Peer, tokens: Any, nats: Any, cut: list[tuple[int, int, int]], context: int) -> None:
    """One call: some windows of a document side by side, padded behind (which a causal model does not see)."""
    inputs = np.full((len(cut), min(context, max(end - first for first, _, end in cut))), peer.bos, dtype=np.int64)
    for row, (first, _, end) in enumerate(cut):
        inputs[row, : end - first] = tokens[first:end]
    device = peer.model.device
    logits = peer.model(torch.from_numpy(inputs).to(device)).logits
    for row, (first, at, end) in enumerate(cut):
        targets = torch.from_numpy(tokens[at + 1 : end + 1]).to(device)
        losses = torch.nn.functional.cross_entropy(logits[row, at - first : end - first].float(), targets, reduction="none")
        nats[at:end] = losses.double().cpu().numpy()
