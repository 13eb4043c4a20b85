"""What is released: the files of a wheel and of a source distribution, and installations from the wheel.

Those that need an index of packages are skipped where pip reaches none.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import distributions
from pathlib import Path

import frameworks
import pytest
from test_docs import not_printed, program_of

import layoutmap as lm
from layoutmap.adapters import ADAPTERS
from layoutmap.cost.jax.targets import TARGETS
from layoutmap.engines import ENGINES
from layoutmap.engines.tested import TESTED

README = frameworks.ROOT / "README.md"


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


def metadata_of(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_the_links_of_the_description_hold_on_a_package_index(built):
    """It is README with absolute links, each to a file of the repository, as of that release; pictures are files."""
    metadata = metadata_of(built)
    (url,) = (each.removeprefix("Repository, ") for each in metadata.get_all("Project-URL") or [])
    shown = str(metadata.get_payload())
    files = re.findall(rf"(!?)\[[^\]]*\]\({re.escape(url)}/(raw|blob)/v{lm.__version__}/([^)#\s]+)", shown)
    readme = README.read_text(encoding="utf-8")

    assert readme.rstrip() == re.sub(rf"{re.escape(url)}/(raw|blob)/v[^/]+/", "", shown).rstrip()
    assert [] == re.findall(r"\]\((?!https?://)[^)]*", shown)
    assert len(files) == len(re.findall(r"\]\((?!https?://)", readme)) > 20
    assert [] == [name for _, _, name in files if not (frameworks.ROOT / name).exists()]
    assert {("!", "raw"), ("", "blob")} == {(mark, kind) for mark, kind, _ in files}


def test_the_metadata_say_what_was_tested(built):
    """Name, version, licence and README; and for each framework the oldest release that was tested, and no end."""
    metadata = metadata_of(built)
    needed = metadata.get_all("Requires-Dist") or []
    extras = [re.fullmatch(r"(\w+)>=([\d.]+); extra == '(\w+)'", each) for each in needed]
    oldest = {found[1]: found[2] for found in extras if found and found[1] == found[3]}
    assert ("layoutmap", lm.__version__, "Apache-2.0") == tuple(
        metadata[key] for key in ("Name", "Version", "License-Expression")
    )
    assert str(metadata.get_payload()).startswith("# layoutmap")
    assert {package: first for package, (first, _) in TESTED.items()} == oldest


def test_the_page_of_versions_says_what_was_tested():
    """Its table has the oldest and the newest release of each framework, and the Pythons are those of the metadata."""
    page = (frameworks.ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \|", page, re.M)
    project = tomllib.loads((frameworks.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = [each.rpartition(" ")[2] for each in project["classifiers"] if ":: Python :: 3." in each]

    assert TESTED == {package: (oldest, newest) for package, oldest, newest in rows}
    assert [] == [each for each in pythons if not re.search(rf"^\| {re.escape(each)} \|", page, re.M)]


EXTRA = re.compile(r'(?:layoutmap|"\.)\[([\w,-]+|\{[^}\n]+\})\]')
COMPUTED = {
    "{name}": {*ENGINES, *ADAPTERS},
    "{engine}": set(ENGINES),
    "{backend}": set(ENGINES),
    "{error.name}": set(TESTED),
    "{target.extra}": {each.extra for each in TARGETS.values() if each.extra},
    '{target.extra or "jax"}': {"jax"},
}
"""The extras that a message computes, by the expression in its f-string."""


def named_extras():
    """Yield each extra that a message or a page names, with the file that names it."""
    shipped = [*(frameworks.ROOT / "src").rglob("*.py"), *(frameworks.ROOT / "docs").rglob("*.md")]
    for path in [*shipped, README, frameworks.ROOT / "SECURITY.md", frameworks.ROOT / "CONTRIBUTING.md"]:
        for written in EXTRA.findall(path.read_text(encoding="utf-8")):
            names = COMPUTED.get(written) or {each.strip() for each in written.split(",")}
            for name in names:
                yield name, str(path.relative_to(frameworks.ROOT))


def test_every_extra_that_a_text_names_exists():
    """Each `layoutmap[x]` of a message or a page is an extra of pyproject.toml."""
    project = tomllib.loads((frameworks.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    named = set(named_extras())

    assert set() == {(name, path) for name, path in named if name not in extras}
    assert {"selftest", "xla-gpu", "proto", "keras"} <= {name for name, _ in named}


def test_pages_install_from_a_checkout():
    """No release is on an index yet, so `pip install "layoutmap[x]"` of a page would fail: a page says `".[x]"`."""
    pages = [README, *sorted((frameworks.ROOT / "docs").rglob("*.md"))]
    wrong = [
        page.name
        for page in pages
        if re.search(r'pip install "?layoutmap\b', page.read_text(encoding="utf-8"))
    ]

    assert [] == wrong


SMALL = {
    "rules.yaml": "version: 1\nmesh:\n  dims: {model: 4}\nrules:\n  up: [null, model]\n",
    "try.py": """
import sys
from pathlib import Path

import layoutmap as lm
from layoutmap.core.variables import VariableSpec
from layoutmap.scope.plan import make_plan

layout_map = lm.LayoutMap.from_yaml(Path("rules.yaml").read_text())
plan = make_plan([VariableSpec("up", (8, 16), "float32")], layout_map)
Path("plan.json").write_text(plan.to_json())
print(lm.Plan.from_json(Path("plan.json").read_text())["up"].layout)
print(lm.LayoutMap.preset("llama", lm.Mesh(None, "model=8"))["token_embedding.embeddings"])
print(lm.__file__.startswith(sys.prefix), sorted({"jax", "keras", "tensorflow", "torch"} & set(sys.modules)))
""",
}


def interpreters():
    """Python 3.11 and the newest one of this machine: those on PATH, and those installed beside the one that runs."""
    beside = sorted(Path(sys.base_prefix).parent.glob("*/bin"))
    folders = [*os.environ.get("PATH", "").split(os.pathsep), *map(str, beside)]
    found = {}
    for folder in folders:
        for minor in range(11, 30):
            command = os.path.join(folder, f"python3.{minor}")
            if minor not in found and os.access(command, os.X_OK):
                ran = subprocess.run([command, "-c", "import ensurepip, venv"], capture_output=True)
                if ran.returncode == 0:  # also a name of a version manager that has none
                    found[minor] = command
    return {minor: found[minor] for minor in sorted({11, max(found)} & set(found))}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["3.11", "the newest"])
def test_a_clean_environment_needs_nothing_but_the_wheel(which, built, index, tmp_path):
    """Installed with what it requires and no more: rules, plans, presets and the command line work."""
    found = interpreters()
    minor = 11 if which == "3.11" else max(found)
    if minor not in found or (which != "3.11" and minor == 11):
        pytest.skip(f"this machine has no {'Python 3.11' if which == '3.11' else 'newer Python than 3.11'}")
    print(f"Python 3.{minor}")
    subprocess.run([found[minor], "-m", "venv", str(tmp_path / "venv")], check=True, capture_output=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    (wheel,) = built.glob("*.whl")
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", str(wheel)], capture_output=True, text=True
    )
    assert 0 == installed.returncode, installed.stderr
    for name, text in SMALL.items():
        (tmp_path / name).write_text(text)
    commands = ([python, "try.py"], [f"{tmp_path}/venv/bin/layoutmap", "--version"])
    commands += (
        [python, "-m", "layoutmap", "schema", "rules.yaml"],
        [python, "-m", "layoutmap", "diff", "plan.json", "plan.json"],
    )
    said = [
        subprocess.run(
            command,
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for command in commands
    ]

    assert [
        "(unsharded, model)\n(model, unsharded)\nTrue []\n",
        f"layoutmap {lm.__version__}\n",
        "rules.yaml: 1 rule\n",
        "no change\n",
    ] == said


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Skips what installs packages where there is nowhere to have them from."""
    folder = tmp_path_factory.mktemp("index")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--retries=1",
        "--dest",
        str(folder),
    ]
    tried = subprocess.run([*command, "xxhash"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"pip reaches no index of packages: {tried.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def installed(built, index, tmp_path_factory):
    """Makes environments with what a page says to install, of the releases of this one, and nothing else."""
    (wheel,) = built.glob("*.whl")
    root = tmp_path_factory.mktemp("environments")
    releases = root / "constraints.txt"
    names = {each.name: each.version for each in distributions() if each.name != "layoutmap"}
    releases.write_text("".join(f"{name}=={version}\n" for name, version in names.items()))

    @functools.cache
    def make(extras, others):
        folder = root / "-".join([*extras.split(","), *others.split()])
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
        pip = [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--constraint",
            str(releases),
        ]
        done = subprocess.run([*pip, f"{wheel}[{extras}]", *others.split()], capture_output=True, text=True)
        assert 0 == done.returncode, done.stderr
        return folder / "bin"

    def of_page(page):
        found = re.search(
            r'^pip install "(?:\.|layoutmap)\[([\w,]+)\]"([ \w]*)',
            page.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        return make(found[1], found[2].strip())

    yield of_page
    shutil.rmtree(root)  # gigabytes


def run_bare(command, folder):
    """Run a command with no variable set that a framework, Keras or this library reads, in an empty home."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page",
    [README, *sorted((frameworks.ROOT / "docs" / "get-started").glob("*.md"))],
    ids=lambda page: page.stem,
)
def test_a_page_runs_where_nothing_is_installed_but_what_it_says(page, installed, tmp_path):
    """The wheel with the page's extras; no variable is set, and it prints what it shows."""
    program = tmp_path / "page.py"
    program.write_text(program_of(page), encoding="utf-8")
    done = run_bare([installed(page) / "python", program], tmp_path)

    assert 0 == done.returncode, done.stderr
    assert [] == not_printed(page, done.stdout)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("has_optax", [True, False], ids=["as documented", "without optax"])
def test_the_self_test_holds_where_nothing_is_installed_but_what_its_page_says(
    has_optax, installed, tmp_path
):
    """With the page's packages every kind is tried and holds; without optax its kinds count as not tried."""
    page = frameworks.ROOT / "docs" / "how-to" / "selftest.md"
    folder = installed(page)
    if not has_optax:
        removed = [folder / "python", "-m", "pip", "uninstall", "--yes", "--quiet", "optax"]
        subprocess.run(removed, check=True, capture_output=True)
    kinds = ("arrays-jax", "pytree", "speeds-jax")
    only = [word for kind in kinds for word in ("--only", kind)]
    options = ["--engine", "jax", "--simulate", "8", "--count", "1", "--seed", "7", *only]
    done = run_bare([folder / "layoutmap", "selftest", *options], tmp_path)

    assert 0 == done.returncode, done.stdout + done.stderr
    assert done.stdout.startswith("well: ")
    assert has_optax == ("not tried without optax" not in done.stdout)


NET = """
import keras

def make():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, name="up")])
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_command_line_uses_the_backend_that_is_installed(installed, tmp_path):
    """Where Keras's own choice is not installed, the only one that is, with the option and without it."""
    (tmp_path / "net.py").write_text(NET)
    command = [installed(README) / "layoutmap", "plan", "net:make", "--mesh", "x=2"]
    chosen = run_bare(command, tmp_path)

    assert 0 == chosen.returncode, chosen.stderr
    assert 0 == run_bare([*command, "--backend", "jax"], tmp_path).returncode


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
