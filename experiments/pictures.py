"""The figures of the paper's grids. A title gives the message and the verdict that `judge` reached."""

import numpy as np

from experiments.claims import STALE, WORDS, curves, drop_from_peak, final, judge, mean_interval, seeds_of
from utils import METHODS, figure, method_style, save_figure

PLAIN, CLIPPED, WIDE = "reinforce", "rec-oneside-nois", "rec-oneside-nois (.6,2)"
CURVES = {  # figure → its claim, rows and settings, and the message that goes with one verdict
    "paper_rec": ("P2", (PLAIN, "reinforce-is", "grpo", "rec-oneside-is", CLIPPED, WIDE), STALE,
                  ("holds", "Stale data: plain REINFORCE falls behind; whatever clips or weighs by the ratio learns")),
    "paper_learning_rate": (
        "P4", (CLIPPED, "rec-oneside-nois 5×lr", WIDE), STALE,
        ("not resolved", "10 batches late, a wider clip beats a 5 times larger step; elsewhere it is open")),
    "paper_red": (
        "P6", (PLAIN, "red-drop", "red-weight-adaptive", "red-weight", "red-weight-oneside", "grpo"), ("(1,0)", *STALE),
        ("does not hold",
         "Stale data: dropping wrong answers, or adaptive weights, fall like REINFORCE; plain weights do not")),
    "paper_rep": ("P7", (PLAIN, "rep-opmd", "rep-asymre", CLIPPED), ("(1,0)", *STALE),
                  ("holds", "A penalty on the distance from the sampler stabilises REINFORCE on stale data, too")),
}


def titled(claims: dict, claim: str, message: tuple, seeds: int) -> str:
    """The message, if it was written for the verdict that the runs give; else the claim itself."""
    verdict = claims[claim]["verdict"]
    text = message[1] if message[0] == verdict else claims[claim]["claim"]
    return f"{text}\n{claim}: {verdict}; mean and 95 % interval of {seeds} seeds"


def draw_bands(axis, x, rows: dict) -> None:
    """row → values (seeds, len(x)): means with bands. Markers take turns, so that lines which coincide are seen."""
    for i, (row, values) in enumerate(rows.items()):
        mean, low, high = mean_interval(values)
        style = method_style(row, points=1) | {"markevery": (i % 3, 3)}
        axis.fill_between(x, low, high, color=style["color"], alpha=0.12, linewidth=0)
        axis.plot(x, mean, label=row, **style)


def legend_below(fig, axis, columns: int) -> None:
    fig.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=columns, fontsize=9, handlelength=3)


def draw_curves(grid, name: str, rows, settings, title: str, directory) -> None:
    """One panel per setting, one learning curve per row."""
    shape = (2, 2) if len(settings) == 4 else (len(settings), 1)
    height = 3.3 if len(settings) == 4 else 3.8
    fig, axes = figure(*shape, width=9.0 / shape[0], height=height, sharey=True, squeeze=False)
    for axis, setting in zip(axes.flat, settings):
        draw_bands(axis, curves(grid, rows[0], setting)[0], {row: curves(grid, row, setting)[1] for row in rows})
        ends = np.array([final(grid, row, setting).mean() for row in rows])
        together = max(((ends >= end) & (ends < end + 0.03)).sum() for end in ends)
        if together > 2:  # lines that lie on each other
            axis.text(0.03, 0.05, f"{together} of {len(rows)} end within .03 of each other", fontsize=9,
                      transform=axis.transAxes)
        axis.set(title=WORDS[setting], xlabel="training step", xticks=range(0, 121, 30))
    for axis in axes[:, 0]:
        axis.set_ylabel("held-out accuracy")
    legend_below(fig, axes.flat[-1], 4 if len(rows) == 4 else 3)
    fig.suptitle(title)
    save_figure(fig, directory, name)


def draw_shapes(grid, directory, title: str) -> None:
    """How far each shape of clipping ends from one-side clipping: the paired differences over seeds."""
    rows = {"rec-ring-nois": "ring", "rec-ring-is": "ring, with IS", "rec-twoside-nois": "two-side",
            "rec-twoside-is": "two-side, with IS"}
    fig, axes = figure(3, width=3.0, height=2.8, sharey=True, sharex=True)
    for axis, setting in zip(axes, STALE):
        axis.axvspan(-3, 3, color="0.92", zorder=0)
        axis.axvline(0, color="0.5", linewidth=1, linestyle="-", zorder=1)
        for i, row in enumerate(rows):
            difference = 100 * (final(grid, row, setting) - final(grid, CLIPPED, setting))
            mean, low, high = mean_interval(difference)
            style = method_style(row, points=1)
            axis.plot([low, high], [i, i], color=style["color"], linewidth=2.5, linestyle="-")
            axis.plot(mean, i, color=style["color"], marker=style["marker"], markersize=9)
            axis.text(mean, i - 0.2, f"{mean:+.1f}".replace("-", "−"), ha="center", fontsize=9)
        axis.set(title=WORDS[setting], yticks=range(4), ylim=(3.6, -0.7), xticks=range(-15, 6, 5), xlim=(-16, 6))
        axis.set_yticklabels(rows.values())
    fig.supxlabel("points of accuracy at the end, minus those of one-side clipping (grey: within the margin of 3)",
                  fontsize=10)
    fig.suptitle(title)
    save_figure(fig, directory, "paper_clip_shape")


def draw_kl(grid, directory) -> None:
    """Largest distance to the sampler against the accuracy lost from the peak, one point per run."""
    fig, axis = figure(width=8.0, height=4.6)
    limit, loss, points, colour = 0.1, 5, {}, method_style(PLAIN)["color"]
    hollow = {"s": 22, "facecolors": "white", "edgecolors": "0.45", "zorder": 2}
    filled = {"s": 60, "facecolors": colour, "edgecolors": "black", "zorder": 3}
    for setting, marker in zip(STALE, "s^D"):
        for row in METHODS:
            x = np.nanmax(curves(grid, row, setting, "kl_old")[1], axis=1)
            points[row, setting] = x, 100 * drop_from_peak(grid, row, setting), marker
    for (row, setting), (x, y, marker) in points.items():
        axis.scatter(x, y, marker=marker, linewidths=0.9, **(filled if row == PLAIN else hollow))
    for setting, marker in zip(STALE, "s^D"):
        axis.scatter([], [], marker=marker, s=40, color="0.45", label=WORDS[setting])
    axis.scatter([], [], label="filled: reinforce", **filled)
    axis.scatter([], [], label="hollow: the other rows", **hollow)
    axis.axvline(limit, color="black", linewidth=1, linestyle="--")
    axis.axhline(loss, color="black", linewidth=1, linestyle="--")
    x, y = (np.concatenate([p[i] for p in points.values()]) for i in (0, 1))
    for near, place in ((x <= limit, 0.011), (x > limit, 0.115)):
        text = f"{(near & (y > loss)).sum()} of {near.sum()} runs\nlost more than\n{loss} points"
        axis.text(place, 15, text, fontsize=12, va="center")
    axis.text(limit * 0.95, 23.3, "near the sampler", ha="right", fontsize=11)
    axis.text(limit * 1.05, 23.3, "far from it", fontsize=11)
    axis.set(xscale="log", xticks=[0.01, 0.1, 1], xticklabels=["0.01", "0.1", "1"], ylim=(-1, 25),
             xlabel="largest KL(sampler ‖ policy) on the way, nats per token",
             ylabel="points of accuracy lost since the peak")
    axis.set_title(f"Who stays near the sampler keeps what was learned ({len(x)} runs on stale data)", fontsize=12)
    legend_below(fig, axis, 3)
    save_figure(fig, directory, "paper_kl")


def draw_staleness(grid, directory, intervals, rows) -> None:
    fig, axis = figure(width=8.0, height=4.6)
    for row in rows:
        bands = np.array([mean_interval(final(grid, row, f"({i},0)")) for i in intervals])
        style = method_style(row, points=1) | {"markevery": 1}
        axis.fill_between(intervals, bands[:, 1], bands[:, 2], color=style["color"], alpha=0.1, linewidth=0)
        axis.plot(intervals, bands[:, 0], label=row, **style)
    plain, clipped = (np.array([final(grid, row, f"({i},0)").mean() for i in intervals]) for row in (PLAIN, CLIPPED))
    axis.set(xscale="log", xticks=intervals, xticklabels=intervals,
             xlabel="training steps between two refreshes of the sampler",
             ylabel="held-out accuracy at the end,\n95 % interval of 3 to 5 seeds")
    axis.minorticks_off()
    axis.set_title(
        f"Plain REINFORCE needs fresh data: {plain[0]:.2f} there, {plain.min():.2f} when refreshed every "
        f"{intervals[plain.argmin()]} steps.\nWith clipping it is never below {clipped.min():.2f}", fontsize=12)
    legend_below(fig, axis, 4)
    save_figure(fig, directory, "paper_staleness")


def draw_compare(grid, directory) -> None:
    """The picture on the front page: the argument in three rows and one setting."""
    rows, setting = (PLAIN, "grpo", CLIPPED), "(20,0)"
    fig, axes = figure(2, width=4.6, height=3.4)
    steps = curves(grid, PLAIN, setting)[0]
    draw_bands(axes[0], steps, {row: curves(grid, row, setting)[1] for row in rows})
    draw_bands(axes[1], steps[1:], {row: curves(grid, row, setting, "kl_old")[1][:, 1:] for row in rows})
    axes[0].axvspan(steps[-3] - 3, steps[-1] + 3, color="0.92", linewidth=0, zorder=0)
    axes[0].text(steps[-3], 0.25, "the end: mean\nof these three", fontsize=9)
    for axis, title in zip(axes, ("held-out accuracy", "KL(sampler ‖ policy), nats per token")):
        axis.set(title=title, xlabel="training step; sampler refreshed every 20", xticks=range(0, 121, 30))
    axes[1].set_ylim(bottom=0)
    axes[1].text(120, 0.035, "grpo and rec-oneside-nois coincide", fontsize=9, ha="right")
    start, *ends = [curves(grid, PLAIN, setting)[1][:, 0].mean(), *(final(grid, row, setting).mean() for row in rows)]
    legend_below(fig, axes[0], 3)
    fig.suptitle(
        f"On data up to 19 updates old, REINFORCE ends where it began ({start:.2f} → {ends[0]:.2f});\n"
        f"clipping learns on, with importance sampling (grpo {ends[1]:.2f}) or without ({ends[2]:.2f}); "
        f"{seeds_of(grid)} seeds, 95 % band")
    save_figure(fig, directory, "06_compare")


def draw_figures(grid, staleness, directory, *, intervals, rows) -> None:
    """All figures of the paper's grid. The staleness grid lacks the intervals that the paper's has."""
    claims, seeds = judge(grid), seeds_of(grid)
    for name, (claim, shown, settings, message) in CURVES.items():
        draw_curves(grid, name, shown, settings, titled(claims, claim, message, seeds), directory)
    message = ("not resolved", "Two-side clipping may cost points while the sampler is refreshed; the ring costs less")
    draw_shapes(grid, directory, titled(claims, "P5", message, seeds))
    draw_kl(grid, directory)
    draw_compare(grid, directory)
    draw_staleness(grid + staleness, directory, intervals, rows)
