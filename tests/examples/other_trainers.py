"""Fixtures: other people's trainers, which live in an environment of their own, and a built-in model for them."""

import json
import os
import pathlib
import subprocess

import pytest
from conftest import ROOT

BENCH = ROOT / ".venv-bench" / "bin" / "python"


@pytest.fixture(scope="session")
def ask():
    """("verl_side.py", argument, …) → the JSON object that this script prints, run by a Python that has verl."""
    def run(script, *arguments):
        package = script.partition("_")[0]
        if not list(BENCH.parent.parent.glob(f"lib/python3*/site-packages/{package}")):
            pytest.skip(f"needs {package} in an environment of its own: make .venv-bench/ready")
        result = subprocess.run([BENCH, "-W", "ignore", pathlib.Path(__file__).parent / script, *map(str, arguments)],
                                capture_output=True, text=True, timeout=600,
                                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
        assert result.returncode == 0, result.stderr[-2000:]
        return json.loads(result.stdout.splitlines()[-1])
    return run


@pytest.fixture(scope="session")
def cache():
    """The folder that keeps 06's built-in models, with the one of 2-digit additions in it: made once, on first use."""
    from under_the_hood.models import built_in_model

    built_in_model(2, ROOT / "cache")
    return ROOT / "cache"
