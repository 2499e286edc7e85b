"""What pyproject.toml cannot say: the extension modules, their flags, and what the compiler can do.

FASTNORM_DEBUG=1      with debug information, hardly optimized
FASTNORM_SANITIZE=1   with AddressSanitizer and UBSan (CONTRIBUTING.md says how to run it)
FASTNORM_NO_OPENMP=1  without OpenMP, as a compiler that lacks it would build
"""
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("FASTNORM_DEBUG", "0") not in ("", "0")
SANITIZE = os.environ.get("FASTNORM_SANITIZE", "0") not in ("", "0")
NO_OPENMP = os.environ.get("FASTNORM_NO_OPENMP", "0") not in ("", "0")

CPU = Path("fastnorm/_cpu")
LEVEL_FLAGS = {
    "baseline": [],
    "v3": ["-march=x86-64-v3"],
    "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
}
REAL = {"float32": ("float", "4"), "float64": ("double", "8")}
# The same bits at every level: no contraction, no reordering. errno and traps are not used.
# No debug information, which Python's own flags ask for: a tenth of the compile time.
KERNEL_FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-g0"]
COMPILED = ["_layer_norm.py", "_rms_norm.py", "_batch_norm.py", "_row_norm.py", "_channel_norm.py", "_arrays.py",
            "_cpu/isa.pyx", "_cpu/results.pyx", "_cpu/row_norm.pyx", "_cpu/channel_norm.pyx", "_cpu/common_case.pyx"]
# An edited header or included file rebuilds everything.
DEPENDS = ["setup.py"] + sorted(str(p) for pattern in ("*.h", "*.pxi", "*.pxd") for p in CPU.glob(pattern))


OPENMP_PROBE = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }"
LEVELS_PROBE = 'int main(void) { return !__builtin_cpu_supports("x86-64-v3") && !__builtin_cpu_supports("x86-64-v4"); }'


def kernel_module(real, level):
    """One arithmetic type at one level."""
    name = f"_{real}_{level}"
    c_type, size = REAL[real]
    # The flags that are literals in the source become separate loops only if everything is inlined.
    return Extension(f"fastnorm._cpu.{name}", [str(CPU / f"{name}.pyx")], depends=DEPENDS, include_dirs=[str(CPU)],
                     define_macros=[("REAL", c_type), ("REAL_BYTES", size),
                                    ("CYTHON_INLINE", "inline __attribute__((always_inline))")],
                     extra_compile_args=KERNEL_FLAGS + LEVEL_FLAGS[level])


def module(path):
    """The wing's modules, and the doors and the halls that are compiled as they stand."""
    # Running statistics are updated in double: there real is double.
    real = [("REAL", "double"), ("REAL_BYTES", "8")] if path.endswith("channel_norm.pyx") else []
    return Extension("fastnorm." + path.rsplit(".", 1)[0].replace("/", "."), ["fastnorm/" + path], depends=DEPENDS,
                     include_dirs=[str(CPU), numpy.get_include()], extra_compile_args=["-O3", "-ffp-contract=off"],
                     define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION"),
                                    ("NPY_TARGET_VERSION", "NPY_2_0_API_VERSION"), *real])


class BuildExt(build_ext):
    """Asks the compiler before it builds: OpenMP and the x86-64 levels are both optional."""

    def finalize_options(self):
        super().finalize_options()
        # Not an option of setup(): an editable install forgets those.
        self.parallel = self.parallel or os.cpu_count()

    def build_extensions(self):
        openmp = [] if NO_OPENMP else next((f for f in self.openmp_flags() if self.compiles(f, OPENMP_PROBE)), [])
        levels = self.compiles(LEVEL_FLAGS["v4"], LEVELS_PROBE)
        if not openmp:
            print("fastnorm: building without OpenMP; calls will use one thread", file=sys.stderr)
        if not levels:
            self.extensions = [e for e in self.extensions if not e.name.endswith(("_v3", "_v4"))]
        for e in self.extensions:
            if e.name == "fastnorm._cpu.row_norm":
                e.extra_compile_args += openmp
                e.extra_link_args += openmp
            if levels:
                e.define_macros.append(("FASTNORM_LEVELS", "1"))
            if self.compiler.compiler_type == "msvc":
                e.define_macros = [m for m in e.define_macros if m[0] != "CYTHON_INLINE"]
                e.extra_compile_args = ["/O2", "/fp:precise"] + [f for f in openmp if f in e.extra_compile_args]
            if SANITIZE or DEBUG:
                # Forced inlining takes the sanitizer's compile time through the roof.
                e.define_macros = [m for m in e.define_macros if m[0] != "CYTHON_INLINE"]
            if SANITIZE:
                e.extra_compile_args += ["-fsanitize=address,undefined", "-fno-sanitize=alignment"]
                e.extra_link_args += ["-fsanitize=address,undefined"]
            if DEBUG or SANITIZE:
                e.extra_compile_args += ["-O1", "-g"]
        super().build_extensions()

    def openmp_flags(self):
        if self.compiler.compiler_type == "msvc":
            return [["/openmp"]]
        return [["-fopenmp"], ["-Xpreprocessor", "-fopenmp", "-lomp"]]

    def compiles(self, flags, source):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "probe.c")
            path.write_text(source)
            command = getattr(self.compiler, "compiler", None) or ["cl"]
            try:
                return subprocess.run([*command, str(path), "-o", str(Path(folder, "probe")), *flags],
                                      capture_output=True, cwd=folder, check=False).returncode == 0
            except OSError:
                return False


setup(
    ext_modules=cythonize(
        [kernel_module(real, level) for real in REAL for level in LEVEL_FLAGS] + [module(path) for path in COMPILED],
        compiler_directives={
            "language_level": 3,
            "cdivision": True,
            # Annotations are for readers and type checkers, not C types.
            "annotation_typing": False,
            "freethreading_compatible": True,
            "embedsignature": False,
            "binding": True,
        },
    ),
    cmdclass={"build_ext": BuildExt},
)
