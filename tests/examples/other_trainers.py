"""Fixtures: other people's trainers, which live in an environment of their own, and a built-in model for them."""

import json
import os
import pathlib
import shutil
import subprocess

import pytest
from conftest import ROOT

BENCH = ROOT / ".venv-bench" / "bin" / "python"


@pytest.fixture(scope="session")
def ask():
    """(script beside this file, argument, …) → the JSON object that it prints, run where TRL, verl and Trinity are."""
    def run(script, *arguments):
        if not BENCH.exists():
            pytest.skip("needs TRL, verl and Trinity-RFT in an environment of their own: make .venv-bench/ready")
        result = subprocess.run([BENCH, "-W", "ignore", pathlib.Path(__file__).parent / script, *map(str, arguments)],
                                capture_output=True, text=True, timeout=600,
                                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
        assert result.returncode == 0, result.stderr[-2000:]
        return json.loads(result.stdout.splitlines()[-1])
    return run


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A --cache-dir that holds the built-in model of 2-digit additions: the one already made, where there is one."""
    from under_the_hood.models import built_in_model

    kept, folder = ROOT / "cache", tmp_path_factory.mktemp("cache")
    if kept.is_dir():
        for made in kept.glob("tiny-2-digits-*"):
            shutil.copytree(made, folder / made.name)
    built_in_model(2, folder)
    return folder
