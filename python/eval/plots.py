"""The plots of a report, as matplotlib figures.

Each function takes plain numbers and returns a figure of one fixed width, so that a phone shows it at about its own size. Colours:
text and lines of the frame are INK and GRID, which page.py replaces in HTML by the page's own, for light and dark; series
colours are told apart on both, and by their markers.
"""
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import LogLocator, MaxNLocator, PercentFormatter  # noqa: E402

INK, GRID = "#1a2b3c", "#bac9d8"
COLORS = ["#3d85d1", "#e07b22", "#2aa37a", "#c0569f", "#8a7be0", "#b09020", "#d9534f", "#3aa6b9"]
MARKERS = "osD^vPX*"
WIDTH, HEIGHT = 4.2, 2.9



class Percent(PercentFormatter):
    """Shares as percents with as many decimals as the ticks need: rounded ones would repeat where an axis is short."""

    def __init__(self):
        super().__init__(1, decimals=0, symbol=" %")

    def format_ticks(self, values):
        self.decimals = next((n for n in range(4) if all(abs(round(100 * v, n) - 100 * v) < 1e-6 for v in values)), 4)
        return super().format_ticks(values)


plt.rcParams.update({
    "font.size": 10, "axes.labelsize": 10, "xtick.labelsize": 9.5, "ytick.labelsize": 9.5, "legend.fontsize": 9.5,
    "text.color": INK, "axes.edgecolor": GRID, "axes.labelcolor": INK, "xtick.color": GRID,
    "ytick.color": GRID, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.6, "axes.axisbelow": True, "figure.facecolor": "none",
    "axes.facecolor": "none", "savefig.facecolor": "none", "lines.linewidth": 1.8, "lines.markersize": 5.5,
})


def _figure(height=HEIGHT):
    figure, axis = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    return figure, axis


def _legend(figure, axis):
    handles, labels = axis.get_legend_handles_labels()
    if len(labels) > 1:
        columns = 2 if max(map(len, labels)) < 22 else 1
        rows = -(-len(labels) // columns)
        figure.set_figheight(figure.get_figheight() + 0.21 * rows)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=1.6,
                      columnspacing=1.2, labelspacing=0.35)


def _style(i):
    """The same colour again has another marker."""
    return {"color": COLORS[i % len(COLORS)], "marker": MARKERS[(i + i // len(COLORS)) % len(MARKERS)]}


def _plain(name):
    """Not as a formula."""
    return name.replace("$", r"\$")


def against_kept(series, label, log=False, share=False, reference=None):
    """series: {name: [(kept, value, error)]}; a point each, joined. Kept shares on a doubling scale, the full cache rightmost. log:
    where all values have a logarithm."""
    log = log and all(value > 0 for points in series.values() for _, value, _ in points)
    figure, axis = _figure()
    for i, (name, points) in enumerate(series.items()):
        kept, values, errors = zip(*sorted(points))
        axis.errorbar(kept, values, yerr=errors if any(errors) else None, label=_plain(name), capsize=2.5, elinewidth=1, **_style(i))
    shares = sorted({kept for points in series.values() for kept, _, _ in points})
    if shares[0] > 0 and shares[-1] / shares[0] > 1.5:
        axis.set_xscale("log", base=2)
        ticks = [t for t in (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1) if shares[0] / 1.3 <= t <= shares[-1] * 1.3]
        axis.set_xticks(ticks or shares)
        axis.minorticks_off()
    axis.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.3g} %")
    if reference is not None:
        axis.axhline(reference, color=INK, linewidth=1, linestyle=(0, (4, 3)), label="full cache")
    if log:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axis.yaxis.set_minor_formatter(lambda y, _: "")
    elif not share:
        axis.set_ylim(bottom=min(0, *(value for points in series.values() for _, value, _ in points)))
    if share:
        axis.yaxis.set_major_formatter(Percent())
    axis.set_xlabel("tokens kept, of the context")
    axis.set_ylabel(label)
    _legend(figure, axis)
    return figure


def by_layer(series, label):
    """series: {name: [value or None of each layer]}, shares."""
    figure, axis = _figure()
    for i, (name, values) in enumerate(series.items()):
        points = [(layer, value) for layer, value in enumerate(values) if value is not None]
        axis.plot(*zip(*points), label=_plain(name), **{**_style(i), "markersize": 3.5})
    axis.set_ylim(top=1.0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.yaxis.set_major_formatter(Percent())
    axis.set_xlabel("layer")
    axis.set_ylabel(label)
    _legend(figure, axis)
    return figure


def layer_map(rows, context, label, log=False):
    """rows: [layer][bin] (a row may be None), over positions 0 to context."""
    n_bins = max(len(row) for row in rows if row)
    grid = [row if row and len(row) == n_bins else [float("nan")] * n_bins for row in rows]
    figure, axis = _figure(min(max(2.2, 1.3 + 0.075 * len(rows)), 4.6))
    values = [value for row in grid for value in row if value == value]
    low = min((value for value in values if value > 0), default=1e-6)
    high = max(low, *values)
    norm = matplotlib.colors.LogNorm(max(low, high * 1e-4), high) if log else matplotlib.colors.Normalize(0, 1)
    image = axis.imshow(grid, aspect="auto", cmap="viridis", norm=norm, interpolation="nearest",
                        extent=(0, context, len(rows) - 0.5, -0.5))
    if log:
        image.cmap.set_bad("#440154")
    axis.grid(False)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.set_xlabel("position in the context")
    axis.set_ylabel("layer")
    bar = figure.colorbar(image, ax=axis, pad=0.02, fraction=0.05)
    bar.outline.set_visible(False)
    bar.set_label(label, fontsize=9.5)
    if log:
        bar.ax.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.2g} %")
    else:
        bar.ax.yaxis.set_major_formatter(Percent())
    return figure


def lane_map(rows):
    """rows: [layer][KV head], the share of the context each keeps."""
    widest = max(map(len, rows))
    grid = [row + [float("nan")] * (widest - len(row)) for row in rows]
    figure, axis = _figure(min(max(2.2, 1.3 + 0.075 * len(rows)), 4.6))
    image = axis.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    axis.grid(False)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("KV head")
    axis.set_ylabel("layer")
    bar = figure.colorbar(image, ax=axis, pad=0.02, fraction=0.05)
    bar.outline.set_visible(False)
    bar.set_label("kept", fontsize=9.5)
    bar.ax.yaxis.set_major_formatter(Percent())
    return figure


def sorted_scores(series, label):
    """series: {name: [score of each sample]}; from the worst to the best."""
    figure, axis = _figure()
    for i, (name, scores) in enumerate(series.items()):
        share = [j / len(scores) for j in range(len(scores) + 1)]
        axis.step(share, [min(scores), *sorted(scores)], where="pre", label=_plain(name), color=_style(i)["color"])
    axis.set_ylim(-0.02, 1.02)
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(Percent())
    axis.set_xlabel("samples, from the least alike")
    axis.set_ylabel(label)
    _legend(figure, axis)
    return figure


def grouped_bars(groups, label):
    """groups: {task: {name: (value, error)}}, shares; a horizontal bar each."""
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    height = 0.8 / len(names)
    figure, axis = _figure(max(1.8, 0.9 + len(groups) * (0.12 + 0.18 * len(names))))
    for i, name in enumerate(names):
        places = [g + i * height for g, bars in enumerate(groups.values()) if name in bars]
        values, errors = zip(*(bars[name] for bars in groups.values() if name in bars))
        axis.barh(places, values, height * 0.9, xerr=errors if any(errors) else None, label=_plain(name), color=_style(i)["color"],
                  error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2})
    axis.set_yticks([g + 0.4 - height / 2 for g in range(len(groups))], list(groups))
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.grid(axis="y", visible=False)
    axis.xaxis.set_major_formatter(Percent())
    axis.set_xlabel(label)
    _legend(figure, axis)
    return figure
