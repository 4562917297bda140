"""Builds lora_refit._C, portable C++17 that links neither torch nor CUDA, and the CUDA kernels.

LORA_REFIT_CUDA=1 requires the kernels, 0 leaves them out, auto (the default) builds them where nvcc
is found: in CUDA_HOME, in the nvidia-cuda-nvcc wheel, or on PATH.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
PTX_ARCHITECTURE = 80  # newer GPUs than those above compile it when they load it
NINJA_RULES = """\
nvcc = {nvcc}
fatbinary = {fatbinary}
flags = -std=c++17 -O3 -I{root}/csrc -Werror all-warnings

rule compile
  command = $nvcc $flags -arch=$arch $kind -MD -MF $out.d -o $out $in  # {version}
  depfile = $out.d
  deps = gcc
  description = nvcc $arch $kind

rule link
  command = $fatbinary --create=$out -64 $images
  description = fatbinary $out
"""

ParallelCompile("LORA_REFIT_BUILD_JOBS").install()


class Unusable(Exception):
    """Why the kernels cannot be compiled here."""


def find_nvcc() -> Path:
    """Raises Unusable if there is none, or one that does not know every architecture."""
    home = os.environ.get("CUDA_HOME")
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin/nvcc"
    if home:
        nvcc = Path(home) / "bin/nvcc"
        if not nvcc.is_file():
            raise Unusable(f"CUDA_HOME={home} holds no bin/nvcc; set it to a toolkit, or unset it")
    elif wheel.is_file():
        nvcc = wheel
    elif on_path := shutil.which("nvcc"):
        nvcc = Path(on_path)
    else:
        raise Unusable("no nvcc was found; set CUDA_HOME or pip install -r requirements/cuda.txt")
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True)
    lacking = {f"compute_{sm}" for sm in ARCHITECTURES} - set(listed.stdout.split())
    if lacking:
        raise Unusable(f"{nvcc} does not know {', '.join(sorted(lacking))}; use nvcc 13")
    return nvcc


def version_of(nvcc: Path) -> str:
    """Its last line, which names the build."""
    return subprocess.check_output([nvcc, "--version"], text=True).splitlines()[-1]


def toolkit_program(nvcc: Path, name: str) -> str:
    """A program of the toolkit that nvcc belongs to."""
    dry_run = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True)
    for line in dry_run.stderr.splitlines():
        if line.startswith("#$ _HERE_="):
            return str(Path(line.partition("=")[2]) / name)
    raise SystemExit(f"{nvcc} does not say where its toolkit lies:\n{dry_run.stderr}")


def write_ninja_file(folder: Path, nvcc: Path) -> None:
    source = ROOT / "csrc/cuda/kernels.cu"
    rules = NINJA_RULES.format(
        nvcc=nvcc,
        fatbinary=toolkit_program(nvcc, "fatbinary"),
        root=ROOT.resolve(),
        version=version_of(nvcc),  # another compiler is another command, which runs again
    )
    outputs = {f"sm_{sm}.cubin": (f"sm_{sm}", "-cubin") for sm in ARCHITECTURES}
    outputs["kernels.ptx"] = (f"compute_{PTX_ARCHITECTURE}", "-ptx")
    lines = [rules]
    for output, (arch, kind) in outputs.items():
        lines += [
            f"build {output}: compile {source.resolve()}",
            f"  arch = {arch}",
            f"  kind = {kind}",
        ]
    images = [f"--image3=kind=elf,sm={sm},file=sm_{sm}.cubin" for sm in ARCHITECTURES]
    images.append(f"--image3=kind=ptx,sm={PTX_ARCHITECTURE},file=kernels.ptx")
    lines += [f"build kernels.fatbin: link {' '.join(outputs)}", f"  images = {' '.join(images)}"]
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")


class BuildWithKernels(build_ext):
    """Builds kernels.fatbin beside the extension, in parallel over the architectures."""

    def run(self) -> None:
        wanted = os.environ.get("LORA_REFIT_CUDA", "auto")
        if wanted not in ("0", "1", "auto"):
            raise SystemExit(f"LORA_REFIT_CUDA={wanted} is not known; use 0, 1 or auto")
        super().run()
        self.fatbin().unlink(missing_ok=True)  # of an earlier build, of older sources
        try:
            if wanted == "0":
                raise Unusable("LORA_REFIT_CUDA=0")
            self.build_fatbin(find_nvcc())
        except Unusable as reason:
            if wanted == "1":
                raise SystemExit(f"LORA_REFIT_CUDA=1, but {reason}") from None
            print(f"lora_refit: built without CUDA kernels: {reason}", file=sys.stderr)

    def build_fatbin(self, nvcc: Path) -> None:
        folder = Path(self.build_temp).resolve() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        write_ninja_file(folder, nvcc)
        jobs = os.environ.get("LORA_REFIT_BUILD_JOBS", str(os.cpu_count()))
        subprocess.run([sys.executable, "-m", "ninja", "-C", folder, "-j", jobs], check=True)
        shutil.copyfile(folder / "kernels.fatbin", self.fatbin())

    def fatbin(self) -> Path:
        return Path(self.get_ext_fullpath("lora_refit._C")).with_name("kernels.fatbin")


setup(
    cmdclass={"build_ext": BuildWithKernels},
    ext_modules=[
        Pybind11Extension(
            "lora_refit._C",
            sources=sorted(glob("csrc/**/*.cpp", recursive=True)),
            depends=sorted(glob("csrc/**/*.h", recursive=True)),
            include_dirs=["csrc"],
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-Werror", "-pthread"],
            extra_link_args=["-pthread", "-ldl"],
        )
    ],
)
