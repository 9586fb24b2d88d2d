"""Makes the peers' environments: `python benchmarks/sparse-sync/peers`. What is there already is left as it is."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Mapping
from pathlib import Path

from catalogue import DEFAULT_FOLDER, PEERS, Peer

HOROVOD = "0.28.1"
TAIL_LINES = 15


def main() -> int:
    """Make what is missing, a line a peer; the exit code is the number of peers that failed."""
    parser = argparse.ArgumentParser(prog="python benchmarks/sparse-sync/peers", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)} (default: all)")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where they go (default: .peers)")
    parser.add_argument(
        "--torch-index", metavar="URL", help="https://download.pytorch.org/whl/cpu has a torch of 0.2 GB"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(PEERS):
        parser.error(f"no peer is called {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    pip_environment = {"PIP_EXTRA_INDEX_URL": options.torch_index} if options.torch_index else {}
    failed = 0
    for name in options.names or PEERS:
        begin_s = time.monotonic()
        print(f"{name}: ", end="", flush=True)
        try:
            made = make(PEERS[name], options.folder, pip_environment)
        except (OSError, subprocess.CalledProcessError) as error:
            failed += 1
            print(f"failed after {time.monotonic() - begin_s:.0f} s: {reason(error)}", flush=True)
        else:
            print(f"made in {time.monotonic() - begin_s:.0f} s" if made else "is there", flush=True)
    return failed


def make(peer: Peer, folder: Path, environment: Mapping[str, str]) -> bool:
    """Make a peer's environment and prove that it works; False if it was there."""
    target = folder.resolve() / peer.name
    marker = target / "installed"
    recipe = "\n".join(" ".join(arguments) for arguments in peer.requirements) + "\n"
    if marker.exists() and marker.read_text() == recipe:
        return False
    shutil.rmtree(target, ignore_errors=True)
    venv.create(target, with_pip=True)
    for arguments in peer.requirements:
        pip(peer, folder, environment, "install", *arguments)
    if peer.name == "horovod":
        build_horovod(peer, folder, environment)
    run([str(peer.python(folder)), "-c", peer.proof], {})
    marker.write_text(recipe)
    return True


def build_horovod(peer: Peer, folder: Path, environment: Mapping[str, str]) -> None:
    """Build Horovod against today's torch: it asks for C++14 where torch's headers need C++20, and lacks an include."""
    with tempfile.TemporaryDirectory() as name:
        build = Path(name)
        release = f"horovod=={HOROVOD}"
        source_only = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", name]
        pip(peer, folder, environment, "download", *source_only, release)
        with tarfile.open(build / f"horovod-{HOROVOD}.tar.gz") as archive:
            archive.extractall(build, filter="data")
        source = build / f"horovod-{HOROVOD}"
        for path in (source / "CMakeLists.txt", source / "horovod" / "torch" / "CMakeLists.txt"):
            path.write_text(re.sub(r"CMAKE_CXX_STANDARD 1\d", "CMAKE_CXX_STANDARD 20", path.read_text()))
        how = {
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
            "CXXFLAGS": "-include cstdint",
            "MAKEFLAGS": f"-j{os.cpu_count()}",
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            # Its CMake asks the first python on the path which torch to build for.
            "PATH": f"{peer.python(folder).parent}:{os.environ['PATH']}",
        }
        pip(peer, folder, {**environment, **how}, "install", "--no-build-isolation", "--no-deps", str(source))


def pip(peer: Peer, folder: Path, environment: Mapping[str, str], *arguments: str) -> None:
    """Run pip of a peer's environment."""
    command = [str(peer.python(folder)), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    run(command, {"PIP_NO_INPUT": "1", **environment})


def run(command: list[str], environment: Mapping[str, str]) -> None:
    """Run a command in silence."""
    subprocess.run(
        command,
        check=True,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def reason(error: Exception) -> str:
    """What failed, and the last lines that it said."""
    if isinstance(error, subprocess.CalledProcessError):
        said = "\n".join((error.output or "").splitlines()[-TAIL_LINES:])
        return f"{' '.join(error.cmd[:6])} ... ended with {error.returncode}:\n{said}"
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
