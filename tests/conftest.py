"""Options, profiles and fixtures of the whole suite."""

import signal

import numpy as np
import pytest
from hypothesis import settings

import fastnorm

# The same examples on every run: a failure on one machine is a failure on all.
settings.register_profile("fastnorm", deadline=None, max_examples=300, derandomize=True, database=None)
settings.load_profile("fastnorm")

# Threads from small sizes on, so that most tests that ask for them get them.
fastnorm._cpu.row_norm.constants(THREAD_MIN=1 << 14)

# Who runs the suite in the background has Ctrl-C ignored, and processes that the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes or gigabytes")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: needs --slow"))


@pytest.fixture
def rng():
    return np.random.default_rng(20240607)


@pytest.fixture
def threads(monkeypatch):
    """set_num_threads for one test: what it was before comes back."""
    monkeypatch.setattr(fastnorm._threads, "_process_wide", None)
    return fastnorm.set_num_threads
