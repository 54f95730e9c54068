"""pip install . : builds the shared library with CMake (in build-shared, kept between runs) and puts it into the package.

DT_LIBRARY=FILE takes a library that is there already. What is not code lies in pyproject.toml.
"""
import os
import re
import shutil
import subprocess
import sys

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = os.path.dirname(os.path.abspath(__file__))
NAME = "libdeeptutor.dylib" if sys.platform == "darwin" else "libdeeptutor.so"


def build_library():
    given = os.environ.get("DT_LIBRARY")
    if given:
        return given
    folder = os.path.join(HERE, "build-shared")
    jobs = os.environ.get("DT_JOBS", str(os.cpu_count() or 2))
    subprocess.check_call(["cmake", "-S", HERE, "-B", folder, "-DDT_SHARED=ON", "-DDT_TESTS=OFF"])
    subprocess.check_call(["cmake", "--build", folder, "--target", "deeptutor_shared", "-j", jobs])
    return os.path.join(folder, NAME)


class BuildWithLibrary(build_py):
    def run(self):
        super().run()
        folder = os.path.join(self.build_lib, "deeptutor")
        os.makedirs(folder, exist_ok=True)
        shutil.copy(os.path.realpath(build_library()), os.path.join(folder, NAME))


class Binary(Distribution):
    """The wheel belongs to one kind of machine."""

    def has_ext_modules(self):
        return True


def version():
    with open(os.path.join(HERE, "include", "deeptutor.h")) as header:
        return re.search(r'#define DT_VERSION "(.*)"', header.read()).group(1)


# setuptools would use build/, which is CMake's
setup(version=version(), cmdclass={"build_py": BuildWithLibrary}, distclass=Binary, options={"build": {"build_base": "build-shared/python"}})
