"""The pictures of 06: curves of a run, runs compared, the map of the family."""

import math
import pathlib
import textwrap

import torch

from utils import METHODS, figure, method_style, save_figure


def plot_run(history: list, out: pathlib.Path, *, title: str) -> None:
    """curves.png: accuracy, distance to the sampler, clipping and entropy of one run."""
    fig, axes = figure(4, height=3.0, width=3.6)
    plot_series(axes[0], history, "reward", label="training reward", color="0.7", linestyle="-")
    plot_series(axes[0], history, "eval_accuracy", label="held-out accuracy, 95 %", color="black", linestyle="-")
    evaluations = [line for line in history if "eval_accuracy" in line]
    band = ([line[key] for line in evaluations] for key in ("step", "eval_low", "eval_high"))
    axes[0].fill_between(*band, color="0.85")
    axes[0].legend()
    shown = {"kl_old": "KL(sampler ‖ policy) per token", "clip_fraction": "share of tokens clipped",
             "entropy": "entropy (nats per token)"}
    for axis, (key, name) in zip(axes[1:], shown.items()):
        plot_series(axis, history, key)
        axis.set_title(name)
    before, after = (evaluations[i]["eval_accuracy"] for i in (0, -1))
    axes[0].set_title(f"{title}: accuracy {before:.2f} → {after:.2f}")
    for axis in axes:
        axis.set_xlabel("training step")
        axis.set_ylim(bottom=0)
    save_figure(fig, out, "curves")


def plot_series(axis, history: list, key: str, **style) -> None:
    points = [(line["step"], line[key]) for line in history if key in line]
    axis.plot(*zip(*points), **style)


def plot_comparison(histories: dict, out: pathlib.Path, *, setting: str) -> None:
    """compare.png: the rows of --compare, overlaid."""
    fig, axes = figure(3, height=3.6, width=4.4)
    keys = {"eval_accuracy": "held-out accuracy", "kl_old": "KL(sampler ‖ policy) per token",
            "clip_fraction": "share of tokens clipped"}
    for axis, (key, label) in zip(axes, keys.items()):
        for name, history in histories.items():
            plot_series(axis, history, key, label=name, **method_style(name, points=6))
        axis.set_title(label)
        axis.set_xlabel("training step")
        axis.set_ylim(bottom=0)
    axes[0].legend()
    ends = {name: [line["eval_accuracy"] for line in history if "eval_accuracy" in line]
            for name, history in histories.items()}
    fig.suptitle(f"{setting}: accuracy " + ", ".join(f"{name} {a[0]:.2f} → {a[-1]:.2f}" for name, a in ends.items()))
    save_figure(fig, out, "compare")


def gradient_weight(policy_loss, red_weight, token_advantages, algorithm, ratio, advantages):
    """−∂L/∂log π of one-token responses, by autograd through 06's policy_loss, (N,), (N,) → (N,).

    What a row does outside this formula (other data, other rewards, a second batch) is not in it.
    """
    mask = torch.ones(len(ratio), 1, dtype=torch.bool)
    logprobs = ratio.log()[:, None].requires_grad_()
    if algorithm.shaping == "weight":
        advantages = advantages * red_weight(advantages, temperature=algorithm.weight_temperature)
    groups = advantages[:, None]
    advantages = token_advantages(groups, groups, logprobs, torch.ones_like(groups), mask, algorithm=algorithm)
    loss, _ = policy_loss(logprobs, torch.zeros_like(logprobs), advantages, mask, algorithm=algorithm,
                          weights=mask.to(ratio.dtype))
    return -torch.autograd.grad(loss, logprobs)[0][:, 0]


def panel_of(family: str, algorithm) -> str:
    """Which panel of the map shows a row: what it does to the weight, or that it belongs to the friends."""
    if algorithm.level == "sequence":
        return "REC, one ratio for a response"
    if algorithm.tau or algorithm.beta:
        return "REP: a penalty"
    if algorithm.shaping != "none":
        return "RED: shaped data"
    if family == "REC":
        return {"none": "no clipping", "one_side": "REC, one-side clipping", "two_side": "REC, two-side clipping",
                "ring": "REC, ring clipping"}[algorithm.clip]
    return "friends: a bounded weight" if algorithm.clip == "none" else "friends: other bounds"


def draw_map(directory, families: dict, weight) -> None:
    """--map: 06_family.png, the weight on ∇log π against ρ, of every row. Rows with the same curve share a line.

    families: REC, REP, … → {name: algorithm}; weight(algorithm, ratio, advantages): gradient_weight, with 06's loss.
    """
    wide, narrow = torch.logspace(-1, 0.7, 800).double(), torch.linspace(0.999, 1.001, 801, dtype=torch.float64)
    ratio, panels, place = torch.cat([wide, narrow]).sort().values, {}, {}
    for family, rows in families.items():
        for name, algorithm in rows.items():
            panel = panel_of(family, algorithm)
            lines = torch.stack([weight(algorithm, ratio, torch.full_like(ratio, a)) for a in (1.0, -1.0)])
            curve = tuple(lines.mul(1e6).round().flatten().tolist())
            lines[:, 1:][lines.diff().abs() > 0.15] = math.nan  # a jump is a gap, not a wall
            panel = place.setdefault(curve, panel)  # a friend with the curve of a row before it is named there
            panels.setdefault(panel, {}).setdefault(curve, (lines, []))[1].append(name)
    fig, axes = figure(3, -(-len(panels) // 3), width=3.4, height=3.5, sharey=True)
    for axis, (title, shapes) in zip(axes.flat, panels.items()):
        axis.axhspan(0, 3.4, color="0.95", zorder=0)
        axis.axvline(1, color="0.7", linewidth=0.8, linestyle="-", zorder=1)
        for i, (lines, names) in enumerate(shapes.values()):  # friends are grey, wider lines below: many coincide
            friend = {"color": ("0.8", "0.5", "0.25", "0")[i % 4], "linewidth": (7, 3.5, 2, 1)[i % 4],
                      "linestyle": "-" if i < 4 else "--"}
            style = method_style(names[0]) if names[0] in METHODS else friend
            label = textwrap.fill(", ".join(names), 42, break_on_hyphens=False)
            axis.plot(ratio, lines[0], label=label, **style)
            axis.plot(ratio, lines[1], **style)
        axis.set(title=title, ylim=(-4.4, 3.4), yticks=[-4, -2, -1, 0, 1, 2])
        limits, ticks = {"REC, one ratio for a response": ((0.999, 1.001), ("0.9997", "1.0004")),
                         "friends: other bounds": ((0.5, 1.7), (".67", ".8", "1.2", "1.49"))}.get(
                             title, ((0.1, 5), (".1", ".4", ".8", "1.2", "3")))
        axis.set(xscale="log", xlim=limits)
        axis.set_xticks([float(tick) for tick in ticks], ticks)
        axis.minorticks_off()
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), fontsize=8)
    for axis in axes.flat[len(panels):]:
        axis.axis("off")
    axes.flat[0].text(0.11, 2.8, "right answer, A = 1", fontsize=9)
    axes.flat[0].text(0.11, -4.1, "wrong answer, A = −1", fontsize=9)
    fig.supxlabel("ratio ρ = π/π_old of a response of one token: how far the policy has moved since the sampler")
    fig.supylabel("weight on ∇log π: 0 stops learning from this token")
    rows = sum(map(len, families.values()))
    fig.suptitle(f"{rows} algorithms, {len(place)} shapes of one weight: clipping cuts it to 0, a penalty moves it, "
                 "shaping scales it")
    save_figure(fig, directory, "06_family")
