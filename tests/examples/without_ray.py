"""Import what needs Ray, Hydra or vLLM on a machine without them: they become empty modules. Nothing runs on Ray."""

import importlib.machinery
import sys
from unittest.mock import MagicMock

ABSENT = ("ray", "hydra", "vllm")


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
