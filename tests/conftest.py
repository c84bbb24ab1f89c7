"""Make the lessons importable: their names start with a digit, so tests call importlib.import_module("04_regularization")."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
