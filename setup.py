"""Builds lora_refit._C: portable C++17 that links neither torch nor CUDA."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile("LORA_REFIT_BUILD_JOBS").install()

setup(
    ext_modules=[
        Pybind11Extension(
            "lora_refit._C",
            sources=sorted(["csrc/bindings.cpp", *glob("csrc/plan/*.cpp"), *glob("csrc/cpu/*.cpp")]),
            depends=sorted(glob("csrc/**/*.h", recursive=True)),
            include_dirs=["csrc"],
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-Werror", "-pthread"],
            extra_link_args=["-pthread"],
        )
    ]
)
