"""Modules that must import without vLLM, Triton and the C++ extension, and modules that may import vLLM."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kvpop_vllm"

BLOCK = """
import sys
class Block:
    blocked = ("vllm", "triton", "kvpop_vllm._C")
    def find_spec(self, name, path=None, target=None):
        if any(name == b or name.startswith(b + ".") for b in self.blocked):
            raise ImportError(f"{name} is blocked in this test")
sys.meta_path.insert(0, Block())
"""


def run_python(code, *, cwd=ROOT):
    """Run `code` in a fresh interpreter whose path starts with the repository root."""
    prelude = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    return subprocess.run([sys.executable, "-c", prelude + code], cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("module", ["kvpop_vllm", "kvpop_vllm.cli", "kvpop_vllm.config", "kvpop_vllm.demo_model"])
def test_imports_cold(module):
    """These modules import without the optional packages and load none of the heavy ones."""
    check = "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    outcome = run_python(f"{BLOCK}\nimport {module}\n{check}")
    assert outcome.returncode == 0, outcome.stderr


PACKAGES = "attention cache calibrate calibration compaction distill evaluation hf".split()
PACKAGES += "kernels policies rules scorers testing".split()


def test_engine_neutral_packages_import_cold():
    """Every module outside the glue imports without vLLM, Triton and `_C`, each package by itself.

    The modules of the compiled kernels are left out, because they may need `_C`. Each package is imported in
    a process forked from one that has loaded torch and transformers, but nothing of this package.
    """
    walk = f"""
import importlib, os, pkgutil, sys, traceback
import torch, transformers.modeling_utils
assert not [name for name in sys.modules if name.startswith("kvpop_vllm")]
skipped, failed = ("kvpop_vllm.kernels.cpp", "kvpop_vllm.kernels.triton"), []
for name in {PACKAGES}:
    child = os.fork()
    if not child:
        try:
            package = importlib.import_module("kvpop_vllm." + name)
            for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                if not module.name.startswith(skipped):
                    importlib.import_module(module.name)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(f"imported cold: all but {{failed}}" if failed else 0)
"""
    outcome = run_python(BLOCK + walk)
    assert outcome.returncode == 0, outcome.stderr


def test_transformers_and_training_need_no_vllm(tmp_path):
    """A scorer is trained and used in a KVpopCache by a process that cannot import vLLM."""
    code = f"""
Block.blocked = ("vllm",)
sys.path.insert(0, {str(ROOT / "tests")!r})
import torch
from transformers import AutoModelForCausalLM
from distill.train_tiny import main
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.testing import random_prompt, write_tiny_model
model = write_tiny_model({str(tmp_path / "model")!r}, "qwen3")
main(str(model), {str(tmp_path / "scorer")!r}, "frozen")
model = AutoModelForCausalLM.from_pretrained(model).eval()
cache = KVpopCache(model, "kvpop", scorer={str(tmp_path / "scorer")!r})
model.generate(torch.tensor([random_prompt(70)]), cache=cache, max_new_tokens=8)
assert cache.lengths == [77] and cache.held().sum(-1).eq(cache.policy.retention.budget).all()
assert "vllm" not in sys.modules
"""
    outcome = run_python(BLOCK + code)
    assert outcome.returncode == 0, outcome.stderr


def test_triton_kernels_refuses_its_folder_name():
    outcome = run_python("import triton_kernels")
    assert outcome.returncode != 0
    assert "its name is `kvpop_vllm.kernels.triton`" in outcome.stderr.splitlines()[-1]


def imported_names(source):
    """Yield the absolute names of all imports in `source`, also inside functions and conditions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and is_import_call(node.func) and node.args:
            if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.args[0].value


def is_import_call(function):
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    return name in ("import_module", "__import__")


def vllm_importers(files):
    """Return the files that import vLLM."""
    return [f for f in files if any(n.split(".")[0] == "vllm" for n in imported_names(f.read_text(encoding="utf-8")))]


def test_only_the_glue_imports_vllm():
    outside = [f for f in PACKAGE.rglob("*.py") if PACKAGE / "vllm_glue" not in f.parents]
    outside += (ROOT / "triton_kernels").rglob("*.py")
    assert len(outside) > 10
    assert [str(f.relative_to(ROOT)) for f in vllm_importers(outside)] == []


BELOW_ALL = ("supported", "flags")
"""Tables that every room may read."""
ARROWS = {
    "supported": "",
    "flags": "",
    "roles": "",
    "hub": "config",
    "files": "config",
    "progress": "",
    "argument_types": "config",
    "config": "roles",
    "requests": "config",
    "kernels": "_C cache requests roles",
    "rules": "rope kernels cache requests roles",
    "schemas": "config",
    "tensor_files": "config files",
    "rope": "config",
    "model_shape": "rope config files",
    "scorers": "hub model_shape kernels schemas tensor_files config files",
    "local_attention": "kernels",
    "model_hook": "local_attention rope scorers model_shape config",
    "policies": "calibration rope scorers model_shape cache kernels config roles",
    "cache": "requests config roles",
    "attention": "rules kernels cache requests",
    "testing": "",
    "bench": "config files",
    "distill": "progress calibration hub policies model_hook scorers model_shape kernels config files roles argument_types",
    "calibration": "rope schemas tensor_files config files",
    "compaction": "local_attention calibration hub progress rope distill policies model_hook model_shape rules cache schemas tensor_files config files roles argument_types",
    "evaluation": "progress calibration hub hf compaction distill policies model_hook scorers model_shape rules cache kernels config files roles argument_types",
    "model_types": "",
    "hf": "attention local_attention hub compaction policies model_hook scorers model_shape rules cache kernels requests schemas tensor_files files config model_types",
    "calibrate": "local_attention progress calibration hub cache evaluation distill policies model_hook scorers rope model_shape config files roles argument_types",
    "plan": "calibration policies cache scorers model_shape config argument_types",
}
"""Each room and the rooms it may import from, as in DESIGN.md."""


@pytest.mark.parametrize("room", ARROWS)
def test_arrows_point_one_way(room):
    files = [*(PACKAGE / room).rglob("*.py"), *PACKAGE.glob(f"{room}.py")]
    names = {name for file in files for name in imported_names(file.read_text(encoding="utf-8")) if name}
    rooms = {name.split(".")[1] for name in names if name.startswith("kvpop_vllm.")} & {*ARROWS, "_C"}
    assert files and rooms - {room, *BELOW_ALL} == set(ARROWS[room].split())
