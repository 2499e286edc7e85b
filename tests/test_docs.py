"""What the documentation shows works: the examples of docstrings, and the code of the README."""

import doctest
import re

import pytest
from helpers import ROOT, name_of

import fastnorm
from fastnorm import layers

PUBLIC = [getattr(fastnorm, n) for n in fastnorm.__all__ if callable(getattr(fastnorm, n))]
README = ROOT / "README.md"
REFERENCE = ROOT / "docs" / "reference.rst"


def parameters_of(function):
    return re.search(r"Parameters\n\s*-+\n(.*?)(?=\n\s*\w[\w ]*\n\s*-{3,}\n|\Z)", function.__doc__, re.S)


@pytest.mark.parametrize("function", PUBLIC, ids=name_of)
def test_examples_of_docstrings_run(function, threads):
    """On the object itself: doctest finds nothing in a compiled module."""
    threads(2)
    [test] = doctest.DocTestFinder(recurse=False).find(function, function.__name__, module=False, globs={})
    assert test.examples
    failures = []
    doctest.DocTestRunner().run(test, out=failures.append)
    assert not failures, "".join(failures)


@pytest.mark.parametrize("function", PUBLIC, ids=name_of)
def test_docstrings_have_their_sections(function):
    doc = function.__doc__
    arguments = (
        function.__wrapped__.__code__.co_varnames if hasattr(function, "__wrapped__") else function.__code__.co_varnames
    )
    sections = ["Examples"] + (["Parameters"] if function is not fastnorm.get_num_threads else [])
    if function is not fastnorm.num_threads:
        sections.append("Returns")
    for section in sections:
        assert re.search(rf"^\s*{section}\n\s*-{{{len(section)}}}$", doc, re.M), section
    if "Parameters" in sections:
        described = parameters_of(function)[1]
        code = (function.__wrapped__ if hasattr(function, "__wrapped__") else function).__code__
        for name in arguments[: code.co_argcount + code.co_kwonlyargcount]:
            assert re.search(rf"^\s*([\w, ]+, )?{name}(, [\w, ]+)?( :|$)", described, re.M), name


@pytest.mark.skipif(not README.exists(), reason="no README.md beside the package")
def test_the_code_of_the_readme_runs(threads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert blocks
    names = {}
    for block in blocks:
        exec(block, names)


@pytest.mark.skipif(not README.exists(), reason="no README.md beside the package")
def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text()):
        assert (ROOT / target).exists(), target


@pytest.mark.skipif(not REFERENCE.exists(), reason="no docs beside the package")
def test_the_reference_lists_every_public_name():
    listed = set(re.findall(r"^   (\w+)$", REFERENCE.read_text(), re.M))
    assert {*fastnorm.__all__, *layers.__all__} - {"__version__"} <= listed
