"""The pictures of 06: curves of a run, runs compared, the map of the family."""

import pathlib

import torch

from utils import figure, method_style, save_figure


def plot_run(history: list, out: pathlib.Path, *, title: str) -> None:
    """curves.png: accuracy, distance to the sampler, clipping and entropy of one run."""
    fig, axes = figure(4, height=3.0, width=3.6)
    plot_series(axes[0], history, "reward", label="training reward", color="0.7", linestyle="-")
    plot_series(axes[0], history, "eval_accuracy", label="held-out accuracy, 95 %", color="black", linestyle="-")
    evaluations = [line for line in history if "eval_accuracy" in line]
    axes[0].fill_between(*([line[key] for line in evaluations] for key in ("step", "eval_low", "eval_high")), color="0.85")
    axes[0].legend()
    for axis, key, name in zip(axes[1:], ("kl_old", "clip_fraction", "entropy"),
                               ("KL(sampler ‖ policy) per token", "share of tokens clipped", "entropy (nats per token)")):
        plot_series(axis, history, key)
        axis.set_title(name)
    axes[0].set_title(f"{title}: accuracy {evaluations[0]['eval_accuracy']:.2f} → {evaluations[-1]['eval_accuracy']:.2f}")
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
    ends = {name: [line["eval_accuracy"] for line in history if "eval_accuracy" in line] for name, history in histories.items()}
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


def draw_map(directory, families: dict, weight) -> None:
    """--map: 06_family.png, the weight on ∇log π against ρ, of every row. Rows with the same curve share a panel.

    families: REC, REP, … → {name: algorithm}; weight(algorithm, ratio, advantages): gradient_weight with 06's loss filled in.
    """
    ratio, shapes = torch.logspace(-1, 0.7, 500, dtype=torch.float64), {}
    for family, rows in families.items():
        for name, algorithm in rows.items():
            lines = torch.stack([weight(algorithm, ratio, torch.full_like(ratio, a)) for a in (1.0, -1.0)])
            key = tuple(lines.mul(1e6).round().flatten().tolist())
            shapes.setdefault(key, (family, lines, []))[2].append(name)
    columns, count = 4, len(shapes)
    fig, axes = figure(columns, -(-count // columns), width=2.9, height=2.1, sharey=True)
    for axis, (family, lines, names) in zip(axes.flat, shapes.values()):
        for line, label, dash in zip(lines, ("A = 1", "A = −1"), ("-", "--")):
            axis.plot(ratio, line, color="black", linestyle=dash, label=label)
        axis.axvline(1, color="0.8", linewidth=0.8, linestyle="-", zorder=0)
        axis.axhline(0, color="0.8", linewidth=0.8, linestyle="-", zorder=0)
        shown = [", ".join(names[i: i + 2]) for i in range(0, len(names), 2)]
        axis.set_title(f"{family}: " + ",\n".join(shown), fontsize=9)
        axis.set(xscale="log", ylim=(-3.2, 3.2), yticks=[-2, 0, 2])
        axis.set_xticks([0.1, 0.5, 1, 2, 5], [".1", ".5", "1", "2", "5"])
        axis.minorticks_off()
    for axis in axes.flat[count:]:
        axis.axis("off")
    axes.flat[0].legend(loc="lower left", fontsize=8)
    fig.supxlabel("ratio ρ = π/π_old of a response of one token")
    fig.supylabel("weight on ∇log π")
    rows = sum(map(len, families.values()))
    fig.suptitle(f"{rows} rows of the family are {count} shapes of one weight; what else they change is data, baseline or mean")
    save_figure(fig, directory, "06_family")
