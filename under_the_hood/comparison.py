"""--compare: train several rows from one base, overlay them, and say in one line how each ended."""

import json
import pathlib
from dataclasses import replace

from under_the_hood.errors import require
from under_the_hood.pictures import plot_comparison
from under_the_hood.runs import read_metrics, store_config, write_text


def compare(config, train) -> None:
    """Train the rows of --compare one after the other, each in its own folder under --out, and overlay them."""
    out, results = pathlib.Path(config.out or "runs/compare"), {}
    require(not (out / "metrics.jsonl").exists(), f"{out} holds a single run; choose another --out for --compare")
    store_config(out, config)
    for name in config.compare.split(","):
        run = replace(config, algorithm=name, out=str(out / name), compare=None,
                      resume=config.resume and (out / name / "config.json").exists())
        results[name] = train(run)
        print_result(results[name], run)
    histories = {name: read_metrics(out / name) for name in results}
    plot_comparison(histories, out, setting=f"{config.task}, {staleness_text(config)}")
    write_text(out / "compare.json", json.dumps(results, indent=1))
    summary = ", ".join(f"{name} {r['before']:.3f} → {r['after']:.3f}" for name, r in results.items())
    print(f"accuracy before → after: {summary}; {sum(r['seconds'] for r in results.values()):.0f} s; "
          f"{out / 'compare.png'}")


def print_result(result: dict, config) -> None:
    if result:
        print(f"{config.algorithm}: accuracy {result['before']:.3f} → {result['after']:.3f} "
              f"(95 % {result['low']:.3f}–{result['high']:.3f}) in {result['seconds']:.0f} s, "
              f"run directory {config.out}")


def staleness_text(config) -> str:
    """How stale the data of a run are, in words."""
    if config.offline:
        return "never refreshed"
    late = f", {config.sync_offset} batches late" if config.sync_offset else ""
    fresh = config.sync_interval == 1 and not late
    return "fresh" if fresh else f"refreshed every {config.sync_interval} steps{late}"
