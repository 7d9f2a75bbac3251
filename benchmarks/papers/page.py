"""PAPERS.md: its sections, and the plots in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import write_section

PAGE = Path(__file__).resolve().parents[1] / "PAPERS.md"
PLOTS = PAGE.parent / "plots"
HEAD = """# What the two papers claim, tested at our size

AD-PSGD for acoustic models (Cui, Zhang et al., arXiv 2110.11199; Lian et al., 1710.06952) and DASO (Coquelin et al., 2104.05588).
A verdict a claim, then the table and the plot it rests on. Every section is written by the script it names; raw figures lie in `results/`.
"""
COLOURS = {
    "synchronous": "#444444",
    "ring": "#1f77b4",
    "random-ring": "#17a2a2",
    "delay-by-one": "#d95f02",
    "daso": "#7b3fa0",
    "node-ring": "#c2185b",
    "node-delay-by-one": "#b58900",
}


def section(name: str, text: str) -> None:
    """Put a section onto the page."""
    if not PAGE.exists():
        PAGE.write_text(HEAD)
    write_section(name, text, path=PAGE)
    print(f"{PAGE.name}: {name}")


def plot(
    name: str,
    draw: Callable[[Any], None],
    *,
    alt: str,
    panels: int = 2,
    size: tuple[float, float] = (10, 4),
) -> str:
    """An SVG with panels side by side, and the line that shows it; without matplotlib nothing."""
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: no plot")
        return ""
    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams |= {
        "svg.hashsalt": name,
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.grid": True,
    }
    matplotlib.rcParams |= {
        "grid.alpha": 0.25,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    figure, axes = pyplot.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    draw(axes[0])
    PLOTS.mkdir(exist_ok=True)
    figure.savefig(PLOTS / f"papers-{name}.svg", metadata={"Date": None})
    pyplot.close(figure)
    return f"![{alt}](plots/papers-{name}.svg)"
