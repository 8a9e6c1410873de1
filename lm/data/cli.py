"""`pmi data ...`: prepare and inspect data. Heavy imports stay inside the commands, so that --help is quick."""

from pathlib import Path
from typing import Annotated

import typer

from lm.commands import Commands

app = Commands(help="Prepare and inspect training data.")


@app.command()
def prepare(
    dataset: Annotated[str, typer.Argument(help="enwik8, wikitext103, wikitext2, pg19, or text (your own).")],
    out: Annotated[Path, typer.Option(help="Folder to write; run again to go on after an interruption.")],
    source: Annotated[
        Path | None,
        typer.Option(help="File or folder: plain, .gz, .xz, .bz2, .zip or .tar.*. Without it the original is fetched."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="bytes, words, pieces (SentencePiece), or a folder that has a tokenizer. Default: the data set's own."),
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Pieces of SentencePiece.")] = 32_000,
    model_type: Annotated[str, typer.Option(help="Type of SentencePiece: unigram or bpe.")] = "unigram",
    sample_megabytes: Annotated[int, typer.Option(help="How much of the training split SentencePiece learns from.")] = 32,
    articles: Annotated[bool, typer.Option("--articles", help="WikiText: one document per article.")] = False,
    split: Annotated[str | None, typer.Option(help="Put everything into this split: train, validation, test or dev.")] = None,
    holdout: Annotated[
        float | None,
        typer.Option(help="text without split folders: the share of validation and of test, cut from the end (0.05)."),
    ] = None,
    pattern: Annotated[str | None, typer.Option(help="Which files of a folder or archive to read, such as '*.md'.")] = None,
    processes: Annotated[int | None, typer.Option(help="Processes that tokenize. Default: one per core.")] = None,
    downloads: Annotated[Path, typer.Option(help="Where fetched originals are kept.")] = Path("~/.cache/pmi"),
    force: Annotated[bool, typer.Option("--force", help="Replace data prepared otherwise in --out.")] = False,
) -> None:
    """Turn a data set or your own text into token shards.

    Example: [bold]pmi data prepare text --source books/ --tokenizer bytes --out data/books[/bold]

    Your own text: files under train/, validation/ and test/ (or train.txt ...) go to those splits; otherwise the end of
    the text is held out. Interrupted, the same command goes on from the shards that are finished.
    """
    from rich.console import Console

    from lm.data.prepare import Request
    from lm.data.prepare import prepare as run
    from lm.data.report import summary

    console = Console(stderr=True, highlight=False)
    request = Request(
        dataset=dataset,
        out=out,
        source=source,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        model_type=model_type,
        sample_megabytes=sample_megabytes,
        articles=articles,
        split=split,
        holdout=holdout,
        pattern=pattern,
        processes=processes,
        downloads=downloads,
    )
    try:
        manifest = run(request, force=force, say=lambda line: console.print(line, markup=False, soft_wrap=True))
    except KeyboardInterrupt:
        console.print("\ninterrupted: the same command goes on from the shards that are finished")
        raise
    Console().print(summary(manifest))
    Console().print(f"next: pmi data inspect {out}", markup=False, soft_wrap=True)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="A prepared folder.")],
    segment: Annotated[int, typer.Option(help="Segment length T for which the share of padding is shown.")] = 512,
    longest: Annotated[int, typer.Option(help="How many of the longest documents to list.")] = 5,
    sample: Annotated[int, typer.Option(help="Tokens of the decoded sample.")] = 64,
    plot: Annotated[Path | None, typer.Option(help="Write a histogram of document lengths to this .png, .pdf or .svg.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and compare checksums.")] = False,
) -> None:
    """Show what a prepared folder holds.

    Example: [bold]pmi data inspect data/pg19 --segment 512 --plot lengths.png[/bold]
    """
    from rich.console import Console

    from lm.data.prepared import open_prepared
    from lm.data.report import plot_lengths, problems_of, show
    from lm.errors import UserError, collecting

    with collecting() as problems:
        problems += problems_of(segment, longest, sample, plot)
        try:
            data = open_prepared(folder, verify=verify)
        except UserError as error:
            problems += error.problems
    console = Console(highlight=False)
    show(data, console, segment=segment, longest=longest, sample=sample)
    if verify:
        console.print("checksums: all as in the manifest")
    if plot is not None:
        plot_lengths(data, plot)
        console.print(f"wrote {plot}", markup=False, soft_wrap=True)
