"""What `tulle` offers is what it says that it offers."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import tulle

PACKAGES = ["tulle", "tulle.comm", "tulle.engine", "tulle.plan", "tulle.sync"]


def test_named_dimensions_are_there_when_they_are_asked_for():
    assert tulle.named.Layout("batch:data")
    with pytest.raises(AttributeError, match="'tulle' has no attribute 'nmaed'"):
        tulle.nmaed  # noqa: B018


def test_the_top_level_is_small_and_known():
    assert tulle.__all__ == [
        "Memory",
        "Mesh",
        "Plan",
        "RowSparse",
        "SampledSoftmax",
        "ShardedSoftmax",
        "TulleError",
        "__version__",
        "clip_grad_norm_",
        "deferred_init",
        "distribute",
        "errors",
        "estimate",
        "full_state_dict",
        "init",
        "load",
        "log",
        "lookahead",
        "plan",
        "profile",
        "save",
        "save_safetensors",
        "stage",
        "step",
        "sync",
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_is_there_once(package):
    module = importlib.import_module(package)
    assert all(hasattr(module, name) for name in module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)


EXAMPLES_ELSEWHERE = {"Mesh", "TulleError"}  # nobody makes one by hand
SHOWN = [name for name in tulle.__all__ if callable(getattr(tulle, name)) and name not in EXAMPLES_ELSEWHERE]


@pytest.mark.parametrize("name", SHOWN)
def test_every_public_name_has_an_example_in_its_docstring(name):
    assert ">>> " in inspect.getdoc(getattr(tulle, name))


def test_the_public_names_are_what_a_user_expects():
    assert tulle.plan is not importlib.import_module("tulle.plan"), "the function, not the package"
    assert callable(tulle.plan)
    assert callable(tulle.sync.all_reduce)
    assert tulle.errors.TulleError is tulle.TulleError
    assert tulle.__version__.count(".") == 2


def test_every_error_is_of_one_tree_and_is_what_pythons_own_would_be():
    errors = [error for _, error in inspect.getmembers(tulle.errors, inspect.isclass)]
    assert all(issubclass(error, tulle.TulleError) for error in errors)
    of_users = {"MeshError", "PlanError", "ModelError", "GradientError", "DataError"}
    assert {error.__name__ for error in errors if issubclass(error, ValueError)} == of_users
    of_the_run = {"CheckpointError", "CommunicationError"}
    assert {error.__name__ for error in errors if issubclass(error, RuntimeError)} == of_the_run
    drawn = tulle.errors.__doc__ or ""
    assert all(error.__name__ in drawn for error in errors)


NEED_EXTRAS = ("tulle.cli", "tulle.report", "tulle.integrations.", "tulle.__main__")


def test_every_module_of_the_library_opens_with_a_sentence():
    for module in pkgutil.walk_packages(tulle.__path__, "tulle."):
        if not module.name.startswith(NEED_EXTRAS):
            documented = importlib.import_module(module.name).__doc__ or ""
            assert documented.strip(), module.name


@pytest.mark.parametrize(
    ("adapter", "framework", "extra"),
    [("huggingface", "accelerate", "huggingface"), ("lightning", "lightning.pytorch", "lightning")],
)
def test_an_adapter_whose_framework_is_missing_names_the_extra(adapter, framework, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.delitem(sys.modules, f"tulle.integrations.{adapter}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'tulle\[{extra}\]'"):
        importlib.import_module(f"tulle.integrations.{adapter}")


HEAVY = [
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers",
    "lightning",
]


def test_importing_it_does_not_import_what_few_use():
    code = f"import sys, tulle; print([name for name in {HEAVY!r} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
