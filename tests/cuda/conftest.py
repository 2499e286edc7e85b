"""Where the tests of the CUDA wing run: on a GPU if there is one, else on the emulator. The tests do not differ."""
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install -e '.[test-cuda]' brings it")

from device import the_device  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def installed():
    the_device().install()
    yield
    the_device().remove()


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
