"""Where the tests of the CUDA wing run: on a GPU if there is one, else on the emulator. The tests do not differ.

Without CuPy each of the test modules skips itself and says so.
"""

import platform
import shutil

import pytest

try:
    import cupy  # noqa: F401
except ImportError:
    pass
else:
    import emulator
    from device import the_device

    from fastnorm._cuda import geometry, sources


def waits_for_the_compiler(item):
    return not {"reports", "compared"}.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_collection_modifyitems(items):
    """What waits for the compiler comes last."""
    items.sort(key=waits_for_the_compiler)


@pytest.fixture(scope="session", autouse=True)
def cubin_reports(request):
    """In the making while the other tests run, so that no processor is idle."""
    if not any(map(waits_for_the_compiler, request.session.items)):
        yield
        return
    import cubins

    reports = cubins.Reports(cubins.KERNELS if request.config.getoption("--slow") else cubins.SAMPLE)
    yield reports
    reports.close()


@pytest.fixture(scope="session", autouse=True)
def installed(request):
    device = the_device()
    if device.is_emulated:
        if platform.machine() not in ("x86_64", "AMD64") or shutil.which(emulator.COMPILER) is None:
            pytest.skip("no GPU, and the emulator needs an x86-64 processor and g++")
        if len(request.session.items) > 500:
            emulator.build_all((sources.joined(s), sources.options(**dict(m))) for s, m in geometry.variants())
    device.install()
    yield
    device.remove()


@pytest.fixture
def device(installed):
    return the_device()


@pytest.fixture
def emulated(device):
    """For what only an emulator can show."""
    if not device.is_emulated:
        pytest.skip("a GPU cannot be looked into as the emulator can")
    device.emulator.launches.clear()
    return device.emulator
