"""The tables of the README and the docs, from what the benchmarks measured last (benchmarks/results/).

python -m benchmarks.report           # the README's
python -m benchmarks.report --all     # everything about speed
python -m benchmarks.report --memory  # what the memory buys: docs/memory.md
"""

import json
import sys
from typing import Any

from benchmarks.measure import RESULTS
from lm.evaluation.babilong import parse_length


def spread(value: dict[str, float] | None) -> str:
    """Median and quartiles."""
    return f"{value['median']:.3f} ({value['low']:.2f}-{value['high']:.2f})" if value else ""


KEY = {
    "memory off over x-transformers XL": ("off", "over_xl"),
    "memory off over GPT-2": ("off", "over_gpt2"),
    "1 in 4, probe, over memory off": ("1 in 4, probe, both levels", "over_off"),
    "1 in 4, delta, over memory off": ("1 in 4, delta, both levels", "over_off"),
    "1 in 4, delta, long-term only, over memory off": ("1 in 4, delta, long-term only", "over_off"),
    "paper's arrangement over memory off": ("paper", "over_off"),
}
"""What is asked first, and where it stands in the results."""


def summary() -> list[str]:
    """Training speed in few lines."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("model_*.json"))]
    lines = [
        "| | " + " | ".join(f"`{result['preset']}`, {result['threads']} thread(s)" for result in results) + " |",
        "|---" * (1 + len(results)) + "|",
        "| rounds | " + " | ".join(rounds(result["rows"]) for result in results) + " |",
    ]
    for name, (contender, figure) in KEY.items():
        found = [next((row for row in result["rows"] if row["contender"] == contender), None) for result in results]
        lines.append(f"| {name} | " + " | ".join(spread(row[figure]) if row else "" for row in found) + " |")
    return lines


def rounds(rows: list[dict[str, Any]]) -> str:
    """In how many rounds rows were measured: fewest and most."""
    found = sorted({row["over_off"]["rounds"] for row in rows})
    return f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]}"


def training() -> list[str]:
    """Training speed of everything, as ratios of tokens/s."""
    lines = ["| preset, threads | contender | over memory off | over x-transformers XL | over GPT-2 |", "|---|---|---|---|---|"]
    for path in sorted(RESULTS.glob("model_*.json")):
        result: dict[str, Any] = json.loads(path.read_text())
        for row in result["rows"]:
            reference = "" if row["reference"] == "off" else " (both with 4 layers)"
            cells = (spread(row["over_off"]) + reference, spread(row["over_xl"]), spread(row["over_gpt2"]))
            lines.append(f"| {result['preset']}, {result['threads']} | {row['contender']} | {' | '.join(cells)} |")
    return lines


def stages() -> list[str]:
    """What the stages of ZeRO cost, as ratios of step time."""
    names = ["plain", "zero0", "zero1", "zero2", "zero3"]
    lines = ["| processes | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for path in sorted(RESULTS.glob("training_*.json")):
        ratios = json.loads(path.read_text())["ratios"]
        lines.append(f"| {path.stem.removeprefix('training_')} | 1 | " + " | ".join(spread(ratios[n]) for n in names[1:]) + " |")
    return lines


def streams() -> list[str]:
    """Decoding over long streams."""
    lines = [
        "| preset | tokens behind | latency over that at 1,000 | resident MB (at 1,000) | state bytes |",
        "|---|---|---|---|---|",
    ]
    for path in sorted(RESULTS.glob("stream_*.json")):
        result = json.loads(path.read_text())
        for mark in result["marks"]:
            resident = f"{mark['resident_mb']:.0f} ({result['resident_mb_at_1000']:.0f})"
            latency = spread(mark["latency_over_young"])
            lines.append(f"| {result['preset']} | {mark['tokens']:,} | {latency} | {resident} | {mark['state_bytes']:,} |")
        first = result["gpt2"][0]["ms_per_token"]
        for row in result["gpt2"]:
            latency = f"{row['ms_per_token'] / first:.2f}"
            lines.append(f"| GPT-2 of the same size | {row['tokens']:,} | {latency} | | {row['cache_bytes']:,} (KV cache) |")
    return lines


def texts() -> list[str]:
    """Loss on real text: each contender's by seed, and how much worse it is than the window alone."""
    lines = []
    for path in sorted(RESULTS.glob("memory_text_*.json")):
        result = json.loads(path.read_text())
        lines += [f"{result['data']}, {result['split']}, {result['steps']} steps", ""]
        lines += [
            "| | parameters | nats per token, by seed | over the window alone (95 %, documents in pairs) |",
            "|---" * 4 + "|",
        ]
        for row in result["rows"]:
            values = ", ".join(f"{x:.4f}" for x in row["nats_per_token"].values())
            gaps = "; ".join(
                f"{x['nats_per_token']:+.4f} ({x['low']:+.4f} to {x['high']:+.4f})" for x in row["against_off"].values()
            )
            lines.append(f"| {row['contender']} | {row['parameters']:,} | {values} | {gaps} |")
        lines.append("")
    return lines


def recalls() -> list[str]:
    """Recall at each distance, with Wilson intervals."""
    path = RESULTS / "memory_recall.json"
    if not path.is_file():
        return []
    result = json.loads(path.read_text())
    distances = result["distances"].split(",")
    lines = ["| | seed | " + " | ".join(f"at {distance}" for distance in distances) + " |", "|---" * (2 + len(distances)) + "|"]
    for row in result["rows"]:
        cells = " | ".join(f"{x['accuracy']:.3f} ({x['low']:.3f}-{x['high']:.3f})" for x in row["points"])
        lines.append(f"| {row['setup']} | {row['seed']} | {cells} |")
    return [*lines, ""]


def facts() -> list[str]:
    """BABILong at each length, exact match with Wilson intervals, beside the set's most frequent answer."""
    path = RESULTS / "memory_babilong.json"
    if not path.is_file():
        return []
    result = json.loads(path.read_text())
    lengths = list(dict.fromkeys(x["length"] for row in result["rows"] for x in row["asked"]))
    lengths.sort(key=parse_length)
    lines = ["| | parameters | steps | s | " + " | ".join(f"at {n}" for n in lengths) + " |", "|---" * (4 + len(lengths)) + "|"]
    for row in sorted(result["rows"], key=lambda row: (row["task"], ("on", "window", "rmt").index(row["contender"]))):
        asked = {x["length"]: f"{x['accuracy']:.3f} ({x['low']:.3f}-{x['high']:.3f}), {x['samples']}" for x in row["asked"]}
        name = f"{row['task']}, {row['contender']}" + (" (beside an earlier model)" if row.get("earlier") else "")
        cells = [name, f"{row['parameters']:,}", f"{row['steps']}", f"{row['seconds']:.0f}"]
        lines.append("| " + " | ".join([*cells, *(asked.get(n, "") for n in lengths)]) + " |")
    for task in dict.fromkeys(row["task"] for row in result["rows"]):
        usual = (f"{share:.3f}" if (share := result["usual"].get(f"{task} at {n}")) is not None else "" for n in lengths)
        lines.append(f"| {task}, most frequent answer | | | | " + " | ".join(usual) + " |")
    return [*lines, ""]


def stability() -> list[str]:
    """A million tokens in one session, stretch by stretch: above the same books read alone, and the memory's size."""
    path = RESULTS / "memory_stability.json"
    if not path.is_file():
        return []
    result = json.loads(path.read_text())
    alone, *sessions = result["rows"]
    count = len(alone["nats_per_token"])
    lines = [f"{result['tokens']:,} tokens of {result['books']} books", ""]
    lines += ["| | " + " | ".join(f"{i + 1}" for i in range(count)) + " |", "|---" * (1 + count) + "|"]
    lines.append(f"| {alone['reading']} | " + " | ".join(f"{x:.3f}" for x in alone["nats_per_token"]) + " |")
    for row in sessions:
        gaps = (f"{x - y:+.4f}" for x, y in zip(row["nats_per_token"], alone["nats_per_token"], strict=True))
        lines.append(f"| {row['reading']}: above that | " + " | ".join(gaps) + " |")
        lines.append(f"| {row['reading']}: memory's size | " + " | ".join(f"{x:.3f}" for x in row["memory_rms"]) + " |")
        if "tables_rms" in row:
            lines.append(
                f"| {row['reading']}: verbatim tables' size | " + " | ".join(f"{x:.3f}" for x in row["tables_rms"]) + " |"
            )
    return [
        *lines,
        "",
        "All numbers finite." if all(row["finite"] for row in result["rows"]) else "NOT all numbers are finite.",
        "",
    ]


def costs() -> list[str]:
    """Training speed with memory over that without."""
    lines = ["| preset | changed | precision, threads | memory on over off |", "|---" * 4 + "|"]
    for path in sorted(RESULTS.glob("memory_cost_*.json")):
        result = json.loads(path.read_text())
        how = f"{result['precision']}, {result['threads']}"
        lines.append(f"| `{result['preset']}` | {' '.join(result['changes'])} | {how} | {spread(result['ratio'])} |")
    return lines


if __name__ == "__main__":
    if "--memory" in sys.argv:
        print("\n".join([*texts(), *recalls(), *facts(), *stability(), *costs()]))
        sys.exit()
    print("\n".join([*([*training(), "", *stages()] if "--all" in sys.argv else summary()), "", *streams()]))
