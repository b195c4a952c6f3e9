"""The results of `bench` as a picture; needs matplotlib."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from vllm_metal_lite.cli.bench.suite import Result
from vllm_metal_lite.cli.bench.table import COLUMNS, OURS, PEER
from vllm_metal_lite.cli.options import UsageError
from vllm_metal_lite.errors import MetalLiteError, install, one_line, shorten

_FORMATS = (".png", ".svg", ".pdf")
_STYLES = {OURS: "o-", PEER: "s--"}


def check_plot(name: str) -> None:
    """Test before long work that a picture can be made; UsageError if not."""
    if Path(name).suffix.lower() not in _FORMATS:
        raise UsageError(f"--plot must end in {', '.join(_FORMATS)}, got {shorten(name)}")
    if find_spec("matplotlib") is None:
        raise UsageError(f"--plot needs matplotlib: {install('bench')}")


def plot(name: str, results: Sequence[Result], title: str) -> None:
    """Write a picture: a panel for each column of the table, a line for each context and engine.

    Raises MetalLiteError, with the reason, if the file cannot be written.
    """
    from matplotlib.figure import Figure

    done = sorted((r for r in results if r.timings), key=lambda r: r.case.requests)
    contexts = sorted({r.case.context for r in done})
    figure = Figure(figsize=(12, 4), layout="constrained")
    figure.suptitle(title)
    for axes, (heading, field, factor, _) in zip(
        figure.subplots(1, len(COLUMNS)), COLUMNS, strict=True
    ):
        for color, context in enumerate(contexts):
            for engine, style in _STYLES.items():
                points = [
                    (r.case.requests, getattr(r.timings[engine], field))
                    for r in done
                    if r.case.context == context and engine in r.timings
                ]
                points = [(n, value * factor) for n, value in points if value is not None]
                if points:
                    label = f"{engine}, context {context:,}"
                    axes.plot(*zip(*points, strict=True), style, color=f"C{color}", label=label)
        axes.set(title=heading, xlabel="requests", xscale="log", yscale="log")
        counts = sorted({r.case.requests for r in done})
        axes.set_xticks(counts, labels=[str(n) for n in counts])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    try:
        figure.savefig(name)
    except (OSError, ValueError) as e:
        raise MetalLiteError(f"{shorten(name)}: {getattr(e, 'strerror', '') or one_line(e)}") from e
