"""What is released: the files of a wheel and of a source distribution, and an installation from the wheel."""

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser

import frameworks
import pytest

import layoutmap as lm


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel and a source distribution of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    build = "from hatchling.build import build_{0}; import sys; build_{0}(sys.argv[1])"
    for kind in ("wheel", "sdist"):
        command = [sys.executable, "-c", build.format(kind), str(folder)]
        subprocess.run(command, cwd=frameworks.ROOT, check=True, capture_output=True)
    return folder


def test_a_wheel_has_the_source_and_the_files_beside_it(built):
    """It has each file of the package that the repository has, and nothing else but its metadata."""
    (wheel,) = built.glob("*.whl")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/layoutmap"],
        cwd=frameworks.ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    expected = {path.removeprefix("src/") for path in listed.stdout.split()}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert expected == found


def test_a_source_distribution_can_be_tested(built):
    """It has the source, the tests, the README, the licence and the changelog."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "tests/test_distribution.py"} <= names


def test_the_metadata_say_what_was_tested(built):
    """Name, version, licence and README; and a range of versions that ends for each framework."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    needed = metadata.get_all("Requires-Dist") or []
    of_frameworks = [n for n in needed if n.startswith(("jax", "tensorflow", "torch", "keras", "flax"))]
    assert ("layoutmap", lm.__version__, "Apache-2.0") == tuple(
        metadata[key] for key in ("Name", "Version", "License-Expression")
    )
    assert str(metadata.get_payload()).startswith("# layoutmap")
    assert of_frameworks
    assert [] == [each for each in of_frameworks if not ("<" in each and ">=" in each)]


def test_what_is_installed_from_a_wheel_runs(built, tmp_path):
    """Without this checkout: the command line says its version, and a plan's rules are read."""
    (wheel,) = built.glob("*.whl")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(tmp_path),
    ]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    program = (
        "import layoutmap as lm; print(lm.__file__); "
        "print(lm.LayoutMap.preset('llama', lm.Mesh(None, 'model=8'))[r'token_embedding.embeddings'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for command in (["-c", program], ["-m", "layoutmap", "--version"]):
        said = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        first = said.stdout.splitlines()[0]
        assert first.startswith(str(tmp_path)) or first == f"layoutmap {lm.__version__}"
