"""The house's plan, proved from the syntax trees, and what importing it loads, costs and needs."""

from __future__ import annotations

import ast
import importlib
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import WITHOUT_PYSPARK

import gpuml

PACKAGE = Path(gpuml.__file__).parent
MODULES = sorted(
    ".".join(("gpuml", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)

#: Which rooms a room may import from at the top of a module, and which more inside its functions.
TOP = {
    "__main__": {"cli"},
    "cli": {"errors", "version"},
    "spark": {"spark", "spec", "errors", "version", "models.store"},
    "worker": {"worker", "models", "spec", "errors", "version"},
    "models": {"models", "spec", "errors", "version"},
    "spec": set(),
    "errors": set(),
    "version": set(),
}
INSIDE = {"cli": {"spark", "worker", "models"}, "spark": {"worker", "models"}}
#: What a room never imports at the top, and what nowhere.
NOT_AT_TOP = {"spark": {"torch", "torchvision"}, "cli": {"torch", "torchvision", "pyspark", "pandas", "numpy"}}
NOWHERE = {
    "worker": {"pyspark", "pandas"},
    "models": {"pyspark", "pandas"},
    "spec": {"pyspark", "pandas", "torch", "numpy"},
    "errors": {"pyspark", "pandas", "torch", "numpy"},
    "": {"pyspark", "pandas", "torch", "numpy"},
}


def source_of(name):
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def room(name):
    return name.split(".")[1] if name != "gpuml" else ""


def imports(name):
    """(imported module, whether inside a function) for every import that runs, TYPE_CHECKING blocks left out."""
    found = []

    def visit(node, inside):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node = ast.Module(node.orelse, [])
        if isinstance(node, ast.Import):
            found.extend((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append((whole if whole in MODULES else node.module, inside))
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source_of(name).read_text(encoding="utf-8")), False)
    return found


def within(imported, rooms):
    path = imported.removeprefix("gpuml.")
    return any(path == allowed or path.startswith(f"{allowed}.") for allowed in rooms)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
    if room(name) == "":
        return check_package_itself()
    for imported, inside in imports(name):
        if imported.split(".")[0] == "gpuml":
            allowed = TOP[room(name)] | (INSIDE.get(room(name), set()) if inside else set())
            assert within(imported, allowed), f"{name} imports {imported} {'inside a function' if inside else 'at top'}"
    return None


def check_package_itself():
    """At the top gpuml itself imports its version only; the rest waits until a name is used."""
    assert [imported for imported, inside in imports("gpuml") if imported.startswith("gpuml") and not inside] == [
        "gpuml.version"
    ]


@pytest.mark.parametrize("name", MODULES)
def test_what_a_room_must_not_import_it_does_not(name):
    for imported, inside in imports(name):
        package = imported.split(".")[0]
        assert package not in NOWHERE.get(room(name), set()), f"{name} imports {imported}"
        assert inside or package not in NOT_AT_TOP.get(room(name), set()), f"{name} imports {imported} at top"


def test_the_store_that_the_driver_imports_loads_no_torch():
    script = "import gpuml.models.store, gpuml.models.prune, gpuml.models.fetch\n"
    assert fresh(script + LOADED % ["torch", "torchvision", "numpy"]) == []


def test_the_walk_sees_imports_of_every_kind(tmp_path, monkeypatch):
    """The tests above would prove nothing if `imports` found nothing."""
    (tmp_path / "sample.py").write_text(
        "import a.b\nfrom c import d\nif TYPE_CHECKING:\n    import e\nelse:\n    import f\n"
        "def g():\n    from h import i\n    try:\n        import j\n    except ImportError:\n        pass\n"
        "class K:\n    import l\n    def m(self):\n        import n\n"
    )
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    assert imports("gpuml.sample") == [
        ("a.b", False),
        ("c", False),
        ("f", False),
        ("h", True),
        ("j", True),
        ("l", False),
        ("n", True),
    ]


def test_driver_and_worker_name_the_timed_stages_in_one_order():
    from gpuml.spark.columns import TIMING
    from gpuml.worker.timing import STAGES

    assert ("feed", *STAGES) == TIMING


# --- what is public -----------------------------------------------------------------------------------------------


def test_public_names_are_sorted_and_each_resolves():
    assert gpuml.__all__ == sorted(gpuml.__all__)
    assert len(set(gpuml.__all__)) == len(gpuml.__all__)
    assert dir(gpuml) == gpuml.__all__
    for name in gpuml.__all__:
        assert getattr(gpuml, name) is not None
    namespace = {}
    exec("from gpuml import *", namespace)
    assert set(gpuml.__all__) <= set(namespace)


def test_type_checkers_see_the_same_public_names():
    tree = ast.parse(source_of("gpuml").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == gpuml._HOMES
    assert {*seen, "__version__"} == set(gpuml.__all__)


def test_every_home_is_where_the_name_is_defined():
    for name, home in gpuml._HOMES.items():
        assert getattr(importlib.import_module(home), name) is getattr(gpuml, name)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'gpuml' has no attribute 'ImageClasifier'"):
        _ = gpuml.ImageClasifier


def test_the_path_that_saved_stages_name_is_the_package():
    assert gpuml.ImageClassifier.__module__ == "gpuml"


# --- what an import loads, in a fresh process ---------------------------------------------------------------------


def fresh(script):
    """Run a script in a process of its own; what it printed, as words."""
    child = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return child.stdout.split()


LOADED = "import sys; print(*sorted({name.split('.')[0] for name in sys.modules} & set(%r)))"


def test_importing_gpuml_loads_neither_torch_nor_pyspark_nor_pandas():
    heavy = ["torch", "torchvision", "pyspark", "pandas", "numpy", "PIL"]
    assert fresh("import gpuml; gpuml.Preprocess(); gpuml.ModelError\n" + LOADED % heavy) == []


def test_using_the_classifier_loads_no_torch():
    script = "import gpuml; c = gpuml.ImageClassifier(model='torchvision:resnet18'); c.explainParams(); c.copy()\n"
    assert fresh(script + LOADED % ["torch", "torchvision", "pyspark"]) == ["pyspark"]


def test_worker_and_models_import_where_there_is_no_pyspark():
    names = [name for name in MODULES if room(name) in ("worker", "models")]
    assert {"gpuml.worker.serve", "gpuml.models.sources"} <= set(names)
    script = f"\nfor name in {names!r}: __import__(name)\nprint('pyspark' in sys.modules)"
    assert fresh(WITHOUT_PYSPARK + script) == ["False"]


def test_pyspark_is_absent_where_it_was_made_so():
    """The tests around would prove nothing otherwise."""
    script = "\ntry: import pyspark.sql\nexcept ModuleNotFoundError as error: print(error.name)"
    assert fresh(WITHOUT_PYSPARK + script) == ["pyspark"]


def test_a_model_is_made_and_rows_are_served_where_there_is_no_pyspark(tmp_path):
    script = f"""
import io, pathlib, torch
from PIL import Image
import gpuml
from gpuml.models.store import hash_of
from gpuml.spec import Spec
from gpuml.worker.device import Task
from gpuml.worker.serve import serve

class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean((2, 3))

path = pathlib.Path({str(tmp_path / "net.pt2")!r})
plain = gpuml.Preprocess((8, 8), None, (0, 0, 0), (1, 1, 1))
gpuml.save_model(Mean(), path, preprocess=plain, labels=["red", "green", "blue"])
buffer = io.BytesIO()
Image.new("RGB", (4, 4), (0, 255, 0)).save(buffer, "PNG")
spec = Spec(hash_of(path), device="cpu", outputs=("predictedLabel",))
print(*serve([buffer.getvalue(), b""], spec, Task(), lambda: path)["predictedLabel"])
"""
    assert fresh(WITHOUT_PYSPARK + script) == ["green", "None"]


def test_no_cuda_call_is_made_by_importing_building_and_writing_a_model(tmp_path):
    script = f"""
import torch

def refuse(*args, **kwargs):
    raise AssertionError("a CUDA call on the driver")

asks = torch.cuda.is_available, torch.cuda.device_count
torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = refuse
for name in {MODULES!r}:
    __import__(name)
import gpuml

class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean((2, 3))

plain = gpuml.Preprocess((8, 8), None)
gpuml.ImageClassifier(model="torchvision:resnet18", device="cuda").copy().explainParams()
# torch.export asks is_available() itself; what makes a CUDA context stays refused.
torch.cuda.is_available, torch.cuda.device_count = asks
gpuml.save_model(Mean(), {str(tmp_path / "net.pt2")!r}, preprocess=plain)
stage = gpuml.ImageClassifier(model={str(tmp_path / "net.pt2")!r}, device="cuda")
held = stage.copy()._model_file()
other = gpuml.ImageClassifier.from_module(Mean(), preprocess=plain, device="cuda")
print(len(held), len(other._model_file()), torch.cuda.is_initialized())
"""
    assert fresh(script) == ["64", "64", "False"]


def test_importing_the_stages_costs_little_more_than_importing_pyspark_ml():
    script = "import time; before = time.process_time(); import {}; print(time.process_time() - before)"
    spark, stages = [], []
    for _ in range(3):  # interleaved: what else the machine does falls on both
        spark.append(float(fresh(script.format("pyspark.ml"))[0]))
        stages.append(float(fresh(script.format("pyspark.ml, gpuml, gpuml.spark.stages"))[0]))
    more = statistics.median(stages) - statistics.median(spark)
    assert more < 0.3, f"{more:.2f} s of processor time more than {statistics.median(spark):.2f} s"
