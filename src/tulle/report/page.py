"""Draws the page: values of a run into `page.html`, with `page.css` inside: one file that needs no other."""

from pathlib import Path

import tulle.report.characteristics as characteristics
from tulle.errors import DataError
from tulle.report.folder import read
from tulle.report.records import Run
from tulle.whole_file import write_whole

TABLES_SHOWN = 8  # the others are folded away
ROWS_SHOWN = 12


def write(run: Path | Run, *, compare: Path | None = None, output: Path | None = None) -> Path:
    """Draw the report of a run as one HTML file without any outer reference.

    Args:
        run: the folder of a run, as `tulle run` leaves it, or what `read` made of it.
        compare: the folder of another run, whose curves are drawn as the baseline.
        output: the file to write; by default `report.html` in the run's folder.

    Returns:
        The file that was written.

    Raises:
        DataError: a folder is missing, holds no run, or one of its files is broken; or the packages that draw
            (`tulle[report]`) are not installed.
    """
    run = run if isinstance(run, Run) else read(run)
    output = run.folder / "report.html" if output is None else Path(output)
    if output.is_dir():
        raise DataError(f"{output} is a folder, expected a file for the report: {output / 'report.html'}, say")
    page = render(run, None if compare is None else read(Path(compare)))
    try:
        write_whole(output, page)
    except OSError as error:
        raise DataError(
            f"the report cannot be written to {output}: {error.strerror}. Give a file in a folder that exists."
        ) from error
    return output


def render(run: Run, baseline: Run | None = None) -> str:
    """Return the page of a run that was read already."""
    try:
        import tulle.report.breakdown as breakdown
        import tulle.report.choice as choice
        import tulle.report.headline as headline
        import tulle.report.panels as panels
        import tulle.report.predicted as predicted
        import tulle.report.sparsity as sparsity
        from tulle.report.template import fill
    except ImportError as error:
        raise DataError(
            f"a report is drawn with matplotlib and jinja2, but {error.name} is not installed. "
            "Install them: pip install 'tulle[report]'."
        ) from error
    tables = characteristics.observed_tables(run)
    return fill(
        "page.html",
        run=run,
        baseline=baseline,
        head=headline.headline(run),
        baseline_head=None if baseline is None else headline.headline(baseline),
        figures=headline.key_figures(run),
        loss=panels.loss_panel(run, baseline),
        throughput=panels.throughput_panel(run, baseline),
        time=panels.time_panel(run),
        rank_bars=breakdown.rank_bars(run),
        bytes=panels.bytes_panel(run),
        traffic_bars=breakdown.traffic_bars(run),
        traffic_at_the_start=breakdown.traffic_at_the_start(run),
        missing_traffic=panels.missing_traffic(run),
        sparsity=sparsity.sparsity(run, tables),
        choices=choice.choices(run, tables),
        planned=predicted.planned(run),
        texts=breakdown.logged_texts(run),
        values=breakdown.logged_values(run),
        tables_shown=TABLES_SHOWN,
        rows_shown=ROWS_SHOWN,
        links=headline.links(run),
        bucket=f"{run.plan.bucket_bytes / 2**20:g} MiB" if run.plan and run.plan.bucket_bytes else "",
        torn_lines=sum(log.torn_lines for log in run.ranks),
        odd_lines=sum(log.odd_lines for log in run.ranks),
    )
