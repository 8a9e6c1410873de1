"""BABILong, trained at up to 4,000 tokens and asked at up to a million: memory, the window alone, and RMT.

    python -m benchmarks.memory.babilong --facts babi.tar.xz --text data/pg19 --runs runs/memory/babilong
    python -m benchmarks.memory.babilong --report       # the table of what is done so far

(--tokenizer data/babilong-2k takes the pieces of data prepared before; docs/memory.md says which were measured.)

One process, one core. What is done stays done: the same command goes on where it was ended. Contenders see the same samples in
the same order (the curriculum's stages are those that `on` reached) and have the same number of parameters, within one unit of
their feed-forward networks:

on       configs/model/babilong.yaml
window   the same without memory, its feed-forward network wider
rmt      the package recurrent-memory-transformer-pytorch: memory tokens behind each segment, and the segment before
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import RESULTS, save
from lm import machine
from lm.config import ModelConfig, OptimiserConfig, load_model_config
from lm.data.files import write_atomically
from lm.data.pieces import PieceTokenizer
from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.evaluation import babilong_tasks, babilong_train
from lm.evaluation.babilong import Books, parse_length, read_questions
from lm.evaluation.babilong_eval import Evaluation, spoken
from lm.evaluation.babilong_tasks import Sample, Tasks
from lm.evaluation.babilong_train import TrainingSamples
from lm.evaluation.tasks_report import wilson
from lm.evaluation.tasks_training import STATE, Curriculum, train
from lm.model import PMI
from lm.model.pretrained import from_pretrained, save_pretrained

CONTENDERS = ("on", "window", "rmt")
LENGTHS = {"qa1": "4k,64k,1M", "qa2": "4k,64k", "qa3": "4k,64k"}
SAMPLES = {"4k": 200, "64k": 100, "1M": 30}
STAGES = {"qa1": "0k,250,1k,2k,4k", "qa2": "0k,250,1k,2k,4k", "qa3": "0k,1k,2k,4k"}
STEPS = {"qa1": 1200, "qa2": 1200, "qa3": 800}
LANES, TOKENS, ASKED, WRITING, LR, WARMUP = 24, 8_000, 3, 0.3, 4e-3, 50
VOCABULARY, BOOKS_FOR_IT = 2048, 8 << 20
RMT_SEGMENT, RMT_MEMORY = 512, 16
console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", type=Path, help="bAbI: a folder or archive")
    parser.add_argument("--text", type=Path, help="PG-19: a folder or archive with splits")
    parser.add_argument("--tokenizer", type=Path, help="prepared data whose pieces are used. Default: pieces learned here")
    parser.add_argument("--runs", type=Path, default=Path("runs/memory/babilong"))
    parser.add_argument("--tasks", nargs="+", choices=[*LENGTHS], default=[*LENGTHS])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--lengths", nargs="+", choices=[*SAMPLES], default=[*SAMPLES])
    parser.add_argument("--steps", type=int, help="instead of each task's own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="only the table of what is done")
    args = parser.parse_args()
    machine.keep_pages()
    if not args.report:
        if args.facts is None or args.text is None:
            parser.error("--facts and --text are needed")
        bench = Bench(args.runs, args.facts, args.text, args.seed, args.steps, args.tokenizer)
        for task in args.tasks:
            for name in (name for name in CONTENDERS if name in args.contenders):
                bench.train(task, name)
                for length in (length for length in LENGTHS[task].split(",") if length in args.lengths):
                    bench.evaluate(task, name, length)
                    report(args.runs)
    report(args.runs)


@dataclass
class Bench:
    """The runs of one seed, in one folder."""

    runs: Path
    facts: Path
    text: Path
    seed: int
    steps: int | None
    pieces: Path | None

    def tokenizer(self) -> Tokenizer:
        """Pieces of PG-19's train split and of bAbI's training files."""
        folder = self.runs / "tokenizer"
        if not (folder / "tokenizer.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            if self.pieces is not None:
                load_tokenizer(self.pieces).save(folder)
                return load_tokenizer(folder)
            console.print(f"learning {VOCABULARY:,} pieces")
            PieceTokenizer.train(["\n".join(self._spelled())], VOCABULARY, "unigram", 1).save(folder)
        return load_tokenizer(folder)

    def _spelled(self) -> Iterator[str]:
        for asked in read_questions(self.facts, [*LENGTHS], "train").values():
            for question in asked:
                yield from (question.question, question.answer, *question.facts[-2:])
        size = 0
        for line in Books.open(self.text, "train").lines(np.random.default_rng(0)):
            yield line
            if (size := size + len(line)) > BOOKS_FOR_IT:
                return

    def train(self, task: str, name: str) -> None:
        """One contender, to its folder."""
        out = self.folder(task, name)
        if (out / "about.json").is_file():
            return
        tokenizer, books = self.tokenizer(), Books.open(self.text, "train")
        config = load_model_config("babilong")
        lengths = [parse_length(length) for length in STAGES[task].split(",")]
        steps = self.steps or STEPS[task]
        began = time.process_time()
        console.print(f"{out}: training")
        if name == "on":
            outcome = babilong_train.run(
                config, tokenizer, self.facts, books, [task], lengths, steps=steps, lanes=LANES, lr=LR, everything=0.0,
                seed=self.seed, out=out, device=torch.device("cpu"), console=console, asked=ASKED, tokens=TOKENS, writing=WRITING,
            )  # fmt: skip
            if outcome is None:
                raise KeyboardInterrupt
            model: nn.Module = from_pretrained(out / "model").model
        else:
            torch.manual_seed(self.seed)
            size = sum(p.numel() for p in PMI(config).parameters())
            model = PMI(without_memory(config, size)) if name == "window" else RMT(config, size)
            rows = _rows(self.folder(task, "on") / "training.jsonl")
            questions = read_questions(self.facts, [task], "train")
            samples = TrainingSamples(questions, books, tokenizer, LANES, config.segment, ASKED, TOKENS)
            optimisation = OptimiserConfig(lr=LR, warmup=WARMUP)
            same = Followed(lengths, reached=[lengths[0], *(row["reached"] for row in rows)])
            out.mkdir(parents=True, exist_ok=True)
            if (out / STATE).is_file():
                same.step = torch.load(out / STATE, weights_only=True)["step"]
            # RMT has what training asks of a model
            if not train(model, samples.draw, same, optimisation, len(rows), self.seed, out, console):  # type: ignore[arg-type]
                raise KeyboardInterrupt
            if isinstance(model, PMI):
                save_pretrained(model, tokenizer, out / "model")
            else:
                torch.save(model.state_dict(), out / "weights.pt")
        rows = _rows(out / "training.jsonl")
        about = {
            "task": task, "contender": name, "seed": self.seed, "parameters": sum(p.numel() for p in model.parameters()),
            "steps": len(rows), "reached": rows[-1]["reached"], "seconds": time.process_time() - began,
            "last": {key: sum(row[key] for row in rows[-50:]) / len(rows[-50:]) for key in ("loss", "accuracy", "strength")},
        }  # fmt: skip
        write_atomically(out / "about.json", json.dumps(about).encode())

    def evaluate(self, task: str, name: str, length: str) -> None:
        """Answer the samples of a length, as far as they are not answered yet."""
        out = self.folder(task, name) / f"at-{length}"
        if (out / "done.json").is_file():
            return
        tasks, count = self.tasks(task, length), SAMPLES[length]
        began = time.process_time()
        console.print(f"{out}: asking")
        if name == "rmt":
            model = RMT(config := load_model_config("babilong"), sum(p.numel() for p in PMI(config).parameters()))
            model.load_state_dict(torch.load(self.folder(task, name) / "weights.pt", weights_only=True))
            samples = tasks.samples(task, length)[:count]
            said = rmt_answers(model, samples, tasks.tokenizer)
            rows = [{"answer": sample.answer, "right": a == sample.answer} for sample, a in zip(samples, said, strict=True)]
        else:
            checkpoint = from_pretrained(self.folder(task, name) / "model")
            found = Evaluation(checkpoint, tasks, out, 50 if count > 50 else 10, 64, console)
            found.run([(task, length)], count)
            rows = [row for row in found.rows if row["sample"] < count]
        answers = [row["answer"] for row in rows]
        right = sum(row["right"] for row in rows)
        low, high = wilson(right, len(rows))
        usual = max(answers.count(answer) for answer in answers) / len(rows)
        result = {
            "task": task, "contender": name, "length": length, "samples": len(rows), "right": right,
            "accuracy": right / len(rows), "low": low, "high": high, "usual": usual, "seconds": time.process_time() - began,
        }  # fmt: skip
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "done.json", json.dumps(result).encode())

    def tasks(self, task: str, length: str) -> Tasks:
        """The samples of a length: facts and books of the test splits."""
        folder = self.runs / "tasks" / length
        if not (folder / f"{task}-{length}.jsonl").is_file():
            babilong_tasks.make(
                self.facts, self.text, [task], [length], SAMPLES[length], 0, "test", self.tokenizer(), folder, console, None
            )
        return Tasks(folder)

    def folder(self, task: str, name: str) -> Path:
        return self.runs / f"{task}-{name}-{self.seed}"


@dataclass
class Followed(Curriculum):
    """The stages of another run."""

    reached: list[int] = field(default_factory=list)
    """Before each step."""
    step: int = 0

    def draw(self, rng: np.random.Generator) -> int:
        """What that run drew: with the same generator at the same stage it is the same."""
        self.stage = self.stages.index(self.reached[self.step])
        return super().draw(rng)

    def note(self, accuracy: float) -> None:
        """Only to be looked at."""
        self.recent, self.step = [*self.recent, accuracy][-self.over :], self.step + 1


def without_memory(config: ModelConfig, size: int) -> ModelConfig:
    """The window alone, with a feed-forward network that makes up for the parameters of memory."""
    off = ModelConfig.model_validate({**config.model_dump(), "memory": None})
    missing = size - sum(p.numel() for p in PMI(off).parameters())
    unit = 2 * config.width * config.layers
    return ModelConfig.model_validate({**off.model_dump(), "feedforward": config.feedforward + round(missing / unit)})


class RMT(nn.Module):
    """The package's transformer as a model that `lm.evaluation.tasks_training` can train: segment by segment, with gradient
    through the memory tokens of all segments; the segment before is seen as well (its XL memories)."""

    def __init__(self, config: ModelConfig, size: int) -> None:
        super().__init__()
        from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer

        def built(mult: float) -> Any:
            # rotary positions, like ours; one residual stream is an ordinary one; no damping of the embedding's gradient
            return RecurrentMemoryTransformer(
                config.width, num_tokens=config.vocab_size, depth=config.layers, num_memory_tokens=RMT_MEMORY,
                seq_len=RMT_SEGMENT, dim_head=config.width // config.heads, heads=config.heads, ff_mult=mult,
                abs_pos_emb=False, rotary_pos_emb=True, num_residual_streams=1, emb_gradient_frac=1.0,
            )  # fmt: skip

        def made(mult: float) -> Any:
            core = built(mult)
            core.to_logits = nn.Identity()  # features for the head below, so that only answers become logits
            return core

        # embedding and output are tied, as ours are; its feed-forward networks take up what is left of the size
        unit = 3 * config.width * config.layers
        least = sum(p.numel() for p in made(1.5 * 3 / 2 / config.width).parameters())
        inner = 1 + max(0, round((size - least) / unit))
        self.core = made((inner + 0.5) * 3 / 2 / config.width)
        nn.init.normal_(self.core.token_emb.weight, std=config.embedding_std)
        self.scale = 1 / (config.embedding_std * math.sqrt(config.width))  # logits of unit variance at the start
        self.config = config

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def head(self) -> "RMT":
        return self

    def initial_state(self, lanes: int) -> Any:
        """What is carried from segment to segment: memory tokens and XL memories."""
        return None, None

    def forward(self, tokens: Tensor, state: Any, starts: Tensor | None = None) -> tuple[Tensor, Any]:
        """Features of `tokens [b, t]`, each call from a segment's start."""
        memory, earlier = state
        hidden = []
        for part in tokens.split(RMT_SEGMENT, 1):
            features, memory, earlier = self.core(part, memory, xl_memories=earlier)
            hidden.append(features)
        return torch.cat(hidden, 1), (memory, earlier)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden * self.scale, self.core.token_emb.weight)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(hidden), targets, reduction="sum")


@torch.inference_mode()
def rmt_answers(model: RMT, samples: list[Sample], tokenizer: Tokenizer, longest: int = 4) -> list[str]:
    """What RMT says: all samples side by side, each finished on its own from the segment in which its question ends."""
    model.eval()
    said = [""] * len(samples)
    lengths = [1 + sample.tokens for sample in samples]
    lanes, state = list(range(len(samples))), model.initial_state(len(samples))
    for first in track(range(0, max(lengths), RMT_SEGMENT), "reading", console=console):
        for i in [i for i in lanes if lengths[i] <= first + RMT_SEGMENT]:
            lane = lanes.index(i)
            own = (None, None) if state[0] is None else (state[0][[lane]], [x[:, [lane]] for x in state[1]])
            ids = [*([tokenizer.bos] if not first else []), *samples[i].read(max(0, first - 1), samples[i].tokens).tolist()]
            found: list[int] = []
            for _ in range(longest):  # reads the open segment again for every token
                hidden, _ = model(torch.tensor([ids + found]), own)
                found.append(int(model.logits(hidden[0, -1]).argmax()))
            said[i] = spoken(tokenizer, found)
        kept = [lane for lane, i in enumerate(lanes) if lengths[i] > first + RMT_SEGMENT]
        if len(kept) < len(lanes):
            lanes = [lanes[lane] for lane in kept]
            state = state if state[0] is None else (state[0][kept], [x[:, kept] for x in state[1]])
        if not lanes:
            break
        tokens = np.full((len(lanes), RMT_SEGMENT), tokenizer.bos, dtype=np.int64)
        for lane, i in enumerate(lanes):
            ids_ = samples[i].read(max(0, first - 1), first + RMT_SEGMENT - 1)
            tokens[lane, RMT_SEGMENT - len(ids_) :] = ids_
        _, state = model(torch.from_numpy(tokens), state)
    return said


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def report(runs: Path) -> None:
    """The table of what is done, and benchmarks/results/memory_babilong.json. What that has and `runs` has not stays in it,
    marked where it was measured beside another model."""
    trained = [json.loads(path.read_text()) for path in sorted(runs.glob("*/about.json"))]
    if not trained:
        console.print(f"{runs}: nothing is done yet")
        return
    asked = [json.loads(path.read_text()) for path in sorted(runs.glob("*/at-*/done.json"))]
    table = Table("task", "contender", "parameters", "steps", "minutes", *SAMPLES, title="BABILong, exact match (95 %)")
    for about in sorted(trained, key=lambda row: (row["task"], CONTENDERS.index(row["contender"]))):
        own = {row["length"]: row for row in asked if all(row[key] == about[key] for key in ("task", "contender"))}
        cells = [
            f"{row['accuracy']:.3f} ({row['low']:.3f}-{row['high']:.3f})" if row else "" for row in (own.get(n) for n in SAMPLES)
        ]
        about["asked"] = list(own.values())
        table.add_row(
            about["task"],
            about["contender"],
            f"{about['parameters']:,}",
            str(about["steps"]),
            f"{about['seconds'] / 60:.1f}",
            *cells,
        )
    console.print(table)
    usual = {f"{row['task']} at {row['length']}": row["usual"] for row in asked}
    console.print("the usual answer alone: " + ", ".join(f"{name} {share:.3f}" for name, share in usual.items()))
    settings = {
        "lanes": LANES, "tokens": TOKENS, "asked": ASKED, "writing": WRITING, "lr": LR, "warmup": WARMUP, "stages": STAGES,
        "vocabulary": VOCABULARY, "rmt": {"segment": RMT_SEGMENT, "memory": RMT_MEMORY},
        "model": load_model_config("babilong").model_dump(mode="json"),
    }  # fmt: skip
    path = RESULTS / "memory_babilong.json"
    had = json.loads(path.read_text()) if path.is_file() else {"settings": settings, "usual": {}, "rows": []}
    done = {(row["task"], row["contender"]) for row in trained}
    kept = [row for row in had["rows"] if (row["task"], row["contender"]) not in done]
    for row in kept:
        row["earlier"] = row.get("earlier", False) or had["settings"] != settings
    save("memory_babilong", {"settings": settings, "usual": had["usual"] | usual, "rows": [*trained, *kept]})


if __name__ == "__main__":
    main()
