"""python -m fastnorm: its manners, what it prints and writes. No test asserts a time."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, run_python

import fastnorm
from fastnorm import __main__ as command_line
from fastnorm import _bench, _check, _peers

main = command_line.main
RUN = "import runpy; runpy.run_module('fastnorm', run_name='__main__')"
SMALL = ["bench", "--shape", "4x64", "--seconds", "0.01", "--threads", "1"]
HERE = [i for i, version in _peers.installed().items() if isinstance(version, str)]


@pytest.fixture(autouse=True)
def _threads_as_before(threads):
    """bench sets them for the process."""


def bench(capsys, *options, code=0):
    """Standard output of a small bench."""
    assert main([*SMALL, *options]) == code
    return capsys.readouterr().out


# ---- check and info --------------------------------------------------------------------------


def test_check_fails_with_exit_code_1(monkeypatch, capsys):
    right = fastnorm.rms_norm
    monkeypatch.setattr(_check, "OPS", ("rms_norm",))
    monkeypatch.setattr(_check, "CHECK_CASES", _check.CHECK_CASES[:2])
    monkeypatch.setattr(_check, "BIT_CHECKS", {})
    assert main(["check"]) == 0
    assert "FAILED" not in capsys.readouterr().out
    monkeypatch.setattr(fastnorm, "rms_norm", lambda *a, **k: right(*a, **k) * np.float32(1.00001))
    assert main(["check"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_check_notices_bits_that_differ(monkeypatch, capsys):
    monkeypatch.setitem(_check.BIT_CHECKS, "1 and 2 threads", lambda op, dtype: False)
    monkeypatch.setattr(_check, "CHECK_CASES", _check.CHECK_CASES[:1])
    assert main(["check"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_info_is_show_config(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    fastnorm.show_config()
    assert printed == capsys.readouterr().out


def test_without_a_command_all_three_run(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(_check, "check", lambda: bool(ran.append("check")))
    monkeypatch.setattr(_bench, "bench", lambda cases, peers, **_: ran.append((len(cases), peers)) or 0)
    assert main([]) == 1
    assert ran[0] == "check" and ran[1][0] > 10 and ran[1][1] == ["numpy"]
    assert fastnorm.__version__ in capsys.readouterr().out


# ---- errors, as argparse gives them ------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (["--op", "group_norm"], ["--op", "group_norm", "layer_norm"]),
        (["--shape", "12xx3"], ["--shape", "512x1024", "12xx3"]),
        (["--shape", "0x3"], ["--shape", "positive", "0x3"]),
        (["--shape", "ten"], ["--shape", "ten"]),
        (["--dtype", "int8"], ["--dtype", "int8", "bfloat16"]),
        (["--threads", "0"], ["--threads", "at least 1", "'0'"]),
        (["--threads", "two"], ["--threads", "two"]),
        (["--seconds", "-1"], ["--seconds", "positive"]),
        (["--seconds", "nan"], ["--seconds", "positive"]),
        (["--against", "mxnet"], ["--against", "mxnet", "torch"]),
        (["--json", "/no/such/folder/a.json"], ["--json", "No such file"]),
        (["--plot", "/no/such/folder/a.png"], ["--plot", "No such file"]),
        (["--plot", "a.txt"], ["--plot", ".png", "a.txt"]),
        (["--op", "batch_norm", "--shape", "64"], ["--shape", "batch_norm", "channels", "64"]),
        (["--op", "batch_norm", "--shape", "1x64"], ["--shape", "more than one value", "1x64"]),
        (["--bogus"], ["--bogus"]),
    ],
)
def test_errors_name_the_option_and_what_was_expected(options, words, capsys, monkeypatch):
    monkeypatch.setattr(_bench, "bench", lambda *_, **__: pytest.fail("measured before the options were checked"))
    monkeypatch.setattr(command_line._peers, "is_here", lambda module: True)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *options])
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and not printed.out
    error = printed.err.splitlines()[-1]
    assert "error" in error and all(word in error for word in words), error


@pytest.mark.parametrize(
    "options, words",
    [
        (["--plot", "a.png"], "pip install matplotlib"),
        (["--dtype", "bfloat16"], "pip install ml_dtypes"),
        (["--against", "torch"], "--against: torch is not installed"),
    ],
)
def test_errors_name_what_is_not_installed(options, words, capsys, monkeypatch):
    monkeypatch.setattr(_peers, "is_here", lambda module: False)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *options])
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_checking_a_file_name_leaves_nothing_and_loses_nothing(tmp_path):
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("kept")
    command_line._writable(str(new))
    command_line._writable(str(old))
    assert not new.exists() and old.read_text() == "kept"


def test_help_names_every_choice(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert all(word in text for word in (*_peers.OPS, *_peers.DTYPES, *_bench.PEERS))


# ---- what is measured --------------------------------------------------------------------------


def test_shapes_are_written_with_x_or_comma():
    assert command_line._shape("512x1024") == command_line._shape("512,1024") == (512, 1024)
    assert command_line._shape("7") == (7,)


def cases_of(monkeypatch, *options):
    """The cases that bench would measure."""
    found = []
    monkeypatch.setattr(_bench, "bench", lambda cases, *_, **__: found.extend(cases) or 0)
    assert main(["bench", *options]) == 0
    return found


def test_cases_of_options(monkeypatch):
    cases = cases_of(monkeypatch, "--op", "rms_norm", "layer_norm", "--shape", "2x3", "--dtype", "float16", "float64",
                     "--threads", "3", "1", "3")
    assert len(cases) == 8 and cases[0] == ("rms_norm", (2, 3), "float16", 1) and cases[-1].dtype == "float64"


def test_cases_without_options(monkeypatch):
    cases = cases_of(monkeypatch)
    assert {c.op for c in cases} == set(_bench.DEFAULT_OPS) and {c.shape for c in cases} == set(_bench.DEFAULT_SHAPES)
    assert {c.threads for c in cases} == {1, fastnorm.get_num_threads()} and {c.dtype for c in cases} == {"float32"}


def test_a_plot_without_shapes_sweeps_the_sizes(monkeypatch, tmp_path):
    monkeypatch.setattr(_peers, "is_here", lambda module: True)
    cases = cases_of(monkeypatch, "--plot", str(tmp_path / "a.png"), "--op", "layer_norm")
    sizes = {_peers.bytes_moved(c.op, c.shape) // 2 for c in cases}
    assert min(sizes) == 4 * 2**10 and max(sizes) == 128 * 2**20 and len(sizes) > 6


def test_ops_that_were_not_asked_for_may_be_left_out(monkeypatch):
    assert {c.op for c in cases_of(monkeypatch, "--shape", "64")} == set(_bench.DEFAULT_OPS) - {"batch_norm"}


def test_everyone_takes_a_turn_in_every_round():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in ("a", "b", "c")}
    timings = _bench._timings(calls, 1, 1e-3)
    rounds = [name for name, previous in zip(order, [None, *order], strict=False) if name != previous]
    assert len(rounds) >= 3 * _bench.ROUNDS_AT_LEAST and rounds == ["a", "b", "c"] * (len(rounds) // 3)
    assert all(t.samples >= _bench.ROUNDS_AT_LEAST and t.quartiles[0] <= t.median <= t.quartiles[1]
               for t in timings.values())


def test_threads_are_set_and_come_back():
    before = fastnorm.get_num_threads()
    seen = []
    case = _bench.Case("layer_norm", (4, 64), "float32", before + 3)
    results = _bench.measure([case], ["fastnorm", "copy"], 0.01, lambda _: seen.append(fastnorm.get_num_threads()))
    assert next(results).case == case and fastnorm.get_num_threads() == before + 3
    assert list(results) == [] and fastnorm.get_num_threads() == before == seen[0]


def test_figures():
    case = _bench.Case("add_rms_norm", (1000, 1000), "float32", 1)
    timings = {"fastnorm": _bench.Timing(2e-3, (1.9e-3, 2.1e-3), 9), "copy": _bench.Timing(1e-3, (1e-3, 1e-3), 9),
               "numpy": _bench.Timing(9e-3, (7e-3, 11e-3), 9)}
    result = _bench.Result(case, timings, {"numba": "is ill"})
    assert timings["fastnorm"].spread == pytest.approx(5)
    assert _bench.gb_per_s(case, "fastnorm", timings["fastnorm"]) == pytest.approx(8)
    assert _bench.gb_per_s(case, "copy", timings["copy"]) == pytest.approx(8)
    assert _bench.percent_of_copy(result, "fastnorm") == pytest.approx(100)
    # numpy's spread is 22%.
    assert _bench._ratio(result, "numpy") == "4.50~" and _bench._ratio(result, "copy") == "0.50 "
    assert _bench._ratio(result, "numba") == "- "


# ---- what is printed and written -----------------------------------------------------------------


@pytest.mark.parametrize("long", [[], ["--long"]])
def test_the_table_has_every_case_and_fits(long, capsys):
    text = bench(capsys, "--against", "numpy", "--op", *_peers.OPS, *long)
    lines = text.splitlines()
    assert all(any(line.startswith(op + " ") for line in lines) for op in _peers.OPS)
    assert max(map(len, lines)) <= 110 and "numpy*" in text and "*: whatever the number of threads" in text


def test_the_table_of_all_peers_fits():
    cases = [_bench.Case(op, (64, 64, 56, 56), "float32", 2) for op in _peers.OPS]
    table = _bench.Table(cases, [i for i in _peers.IMPLEMENTATIONS if "cupy" not in i])
    assert len(table.header("float32")) <= 115


@pytest.mark.parametrize("op", ["batch_norm", "layer_norm"])
def test_json_alone_on_stdout(op, capsys):
    data = json.loads(bench(capsys, "--op", op, "--against", "numpy", "--json", "-"))
    assert data["threads"] == [1] and data["versions"]["numpy"] == np.__version__ and data["unit"] == "seconds"
    assert data["machine"]["processor"] and data["date"][:2] == "20" and data["interrupted"] is False
    assert [row["implementation"] for row in data["rows"]] == ["fastnorm", "numpy", "copy"]
    for row in data["rows"]:
        assert row["op"] == op and row["shape"] == [4, 64] and row["dtype"] == "float32" and row["threads"] == 1
        assert 0 < row["quartiles"][0] <= row["median"] <= row["quartiles"][1] and row["samples"] >= 3
        assert row["gb_per_s"] == pytest.approx(2 * 4 * 64 * 4 / row["median"] / 1e9)
    assert data["rows"][-1]["percent_of_copy"] == pytest.approx(100) and data["skipped"] == []


def test_json_into_a_file_beside_the_table(capsys, tmp_path):
    path = tmp_path / "a.json"
    assert "layer_norm" in bench(capsys, "--op", "layer_norm", "--against", "numpy", "--json", str(path))
    assert json.loads(path.read_text())["rows"]


def test_what_is_skipped_says_why(capsys, monkeypatch):
    make_call = _peers.make_call

    def without_numpy(implementation, *arguments):
        if implementation == "numpy":
            raise _peers.Unavailable("out of order")
        return make_call(implementation, *arguments)

    monkeypatch.setattr(_peers, "make_call", without_numpy)
    text = bench(capsys, "--op", "layer_norm", "rms_norm", "--against", "numpy")
    assert "- numpy: out of order (layer_norm, rms_norm)" in text.splitlines()
    data = json.loads(bench(capsys, "--op", "layer_norm", "--against", "numpy", "--json", "-"))
    assert data["skipped"] == [{"op": "layer_norm", "shape": [4, 64], "dtype": "float32", "threads": 1,
                                "implementation": "numpy", "reason": "out of order"}]


def test_too_large_a_shape_is_skipped_with_its_reason(capsys):
    text = bench(capsys, "--op", "layer_norm", "--against", "numpy", "--shape", "999999999x9999999")
    assert "not enough memory" in text


@pytest.mark.parametrize("long", [[], ["--long"]])
def test_one_that_fails_leaves_the_others(long, capsys, monkeypatch):
    """A copy that does not fit into memory, as well."""
    make_call = _peers.make_call

    def without_copy(implementation, *arguments):
        if implementation == "copy":
            raise MemoryError
        return make_call(implementation, *arguments)

    monkeypatch.setattr(_peers, "make_call", without_copy)
    assert "not enough memory" in bench(capsys, "--op", "layer_norm", "--against", "numpy", *long)
    data = json.loads(bench(capsys, "--op", "layer_norm", "--against", "numpy", "--json", "-"))
    assert [row["percent_of_copy"] for row in data["rows"]] == [None, None]


def test_a_busy_machine_is_told():
    assert not list(_bench._busy_machine(0.1)) and not list(_bench._busy_machine(None))
    assert "7.0" in next(_bench._busy_machine(7.0))


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_plot(suffix, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    path = tmp_path / f"a.{suffix}"
    options = ["--op", "layer_norm", "batch_norm", "--shape", "2x64", "8x64", "--against", "numpy", "--plot", str(path)]
    bench(capsys, *options)
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(start) and path.stat().st_size > 5000
    if suffix == "svg":
        text = path.read_text()
        # The legend has everyone once.
        assert [text.count(f"<!-- {word} -->") for word in ("fastnorm", "numpy", "copy")] == [1, 1, 1]
        assert "<!-- GB/s -->" in text and "<!-- 512 B -->" in text


def test_every_implementation_has_a_marker_of_its_own():
    looks = [(s.get("marker"), str(s.get("linestyle"))) for s in _bench.STYLES.values()]
    assert set(_bench.STYLES) == set(_peers.IMPLEMENTATIONS)
    assert len(set(looks)) == len(looks) and len({marker for marker, _ in looks}) == len(looks)


def test_the_progress_bar_is_for_terminals_only(capsys, monkeypatch):
    bench(capsys, "--op", "layer_norm", "--against", "numpy")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main([*SMALL, "--op", "layer_norm", "rms_norm", "--against", "numpy"]) == 0
    printed = capsys.readouterr()
    assert "1/2  rms_norm 4x64 float32, 1 thread" in printed.err and "[####" in printed.err
    assert printed.err.endswith("\r\x1b[K") and "\r" not in printed.out


# ---- how it ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize("json_file", [[], ["--json", "-"]])
def test_ctrl_c_prints_what_was_measured(json_file, capsys, monkeypatch):
    timings = _bench._timings

    def interrupted(calls, *arguments):
        if not interrupted.left:
            raise KeyboardInterrupt
        interrupted.left -= 1
        return timings(calls, *arguments)

    interrupted.left = 1
    monkeypatch.setattr(_bench, "_timings", interrupted)
    text = bench(capsys, "--op", "layer_norm", "rms_norm", "--against", "numpy", *json_file, code=130)
    if json_file:
        data = json.loads(text)
        assert data["interrupted"] and {row["op"] for row in data["rows"]} == {"layer_norm"}
    else:
        assert "layer_norm" in text and "rms_norm" not in text


def test_ctrl_c_elsewhere(monkeypatch):
    monkeypatch.setattr(_check, "check", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["check"]) == 130


@pytest.mark.skipif(os.name != "posix", reason="signals and pipes of POSIX")
def test_a_signal_and_a_closed_pipe():
    command = [sys.executable, "-m", "fastnorm", "bench", "--op", "layer_norm", "--against", "numpy", "--threads", "1"]
    command += ["--seconds", "0.05", "--shape", *(f"{n}x64" for n in range(2, 400))]
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                   env=os.environ | {"PYTHONPATH": str(ROOT)})
    with subprocess.Popen(command, **options) as running:
        while "2x64" not in running.stdout.readline():
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
        assert running.returncode == 130 and "Traceback" not in err and "GB/s: x read" in out
    with subprocess.Popen(command, **options) as running:
        running.stdout.readline()
        running.stdout.close()
        assert running.wait(timeout=30) == 141 and running.stderr.read() == ""


def test_plain_output_needs_nothing_but_numpy():
    code = """
import sys
for name in ("torch", "numba", "jax", "onnxruntime", "onnx", "cupy", "ml_dtypes", "matplotlib"):
    sys.modules[name] = None
from fastnorm.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
    done = run_python(code, arguments=[*SMALL, "--op", "layer_norm"])
    assert "layer_norm" in done.stdout and not done.stderr
    for name in ("torch", "numba", "jax", "cupy"):
        assert f"{name} is not installed" in done.stdout
    assert "info" in run_python(code, arguments=["--help"]).stdout
