"""What the command line writes: a file all or not at all, and nothing else than what was named."""

import os
import resource
import signal
import stat
import subprocess
import sys
import threading

import pytest

import layoutmap as lm
from layoutmap.cli.main import main
from layoutmap.cli.output import write_text_file
from layoutmap.core.variables import VariableSpec
from layoutmap.scope.plan import make_plan

PLAN = make_plan(
    [VariableSpec(f"größe.{i}.kernel", (8, 8 + i), "float32") for i in range(4)],
    lm.LayoutMap(lm.Mesh(None, "model=4"), {".*": ("model", None)}),
)
TEXT = PLAN.to_json()
TABLE = f"{PLAN}\n\n{PLAN.memory}\n\nVerdict: {PLAN.verdict.headline}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "plan.json").write_text(TEXT)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments):
    code = main(["plan", "plan.json", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def listing(folder):
    return sorted(p.name for p in folder.iterdir())


def test_the_mode_of_a_file_is_kept(folder, capsys):
    """A file of mode 600 stays one, and a new one has what the umask leaves."""
    (folder / "old").touch(mode=0o600)
    before = os.umask(0o027)
    try:
        assert 0 == run(capsys, "--json", "old", "--html", "new")[0]
    finally:
        os.umask(before)

    assert (0o600, 0o640) == (mode_of(folder / "old"), mode_of(folder / "new"))
    assert TEXT == (folder / "old").read_text()


def test_a_file_beside_it_is_not_touched(folder, capsys):
    """Neither `PATH.part`, nor what it is a symlink to."""
    (folder / "mine").write_text("mine")
    (folder / "out.part").symlink_to("mine")

    assert 0 == run(capsys, "--json", "out")[0]
    assert ["mine", "out", "out.part", "plan.json", "sub"] == listing(folder)
    assert ("mine", TEXT) == ((folder / "out.part").read_text(), (folder / "out").read_text())


@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing yet"])
def test_a_symlink_stays_and_its_target_is_written(folder, capsys, there):
    """Also where it leads into another folder, and where its target does not exist yet."""
    if there:
        (folder / "sub" / "target").write_text("old")
    (folder / "link").symlink_to("sub/target")

    assert 0 == run(capsys, "--json", "link")[0]
    assert (True, TEXT) == ((folder / "link").is_symlink(), (folder / "sub" / "target").read_text())
    assert ["target"] == listing(folder / "sub")


def test_a_fifo_is_written_to(folder, capsys):
    """It is a FIFO afterwards, and who reads it has the plan."""
    os.mkfifo(folder / "fifo")
    read = []
    reader = threading.Thread(target=lambda: read.append((folder / "fifo").read_text()), daemon=True)
    reader.start()

    assert 0 == run(capsys, "--json", "fifo")[0]
    reader.join(240)
    assert ([TEXT], True) == (read, stat.S_ISFIFO((folder / "fifo").stat().st_mode))


def test_a_device_is_written_to(capsys):
    """A device node stays one; a full one is reported, and the plan is a failure."""
    assert 0 == run(capsys, "--json", "/dev/null")[0]
    code, _, err = run(capsys, "--json", "/dev/full")

    assert (True, True) == tuple(stat.S_ISCHR(os.stat(p).st_mode) for p in ("/dev/null", "/dev/full"))
    assert 2 == code
    assert "/dev/full cannot be written" in err
    assert "No space left on device" in err


def test_a_file_that_cannot_be_written_leaves_the_old_one(folder, capsys):
    """Where the system takes no more bytes, what was there stays, and nothing is left beside it."""
    (folder / "out").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        code = main(["plan", "plan.json", "--json", "out"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert 2 == code
    assert "layoutmap: out cannot be written\n" in capsys.readouterr().err
    assert ("old", ["out", "plan.json", "sub"]) == ((folder / "out").read_text(), listing(folder))


@pytest.mark.parametrize("old", ["", "old"], ids=["a new file", "an old file"])
def test_an_interrupt_leaves_all_or_nothing(folder, old):
    """At every line of what writes: the old file or the new one, and nothing beside it."""
    path = folder / "sub" / "out"
    line, done = 0, False
    while not done:
        path.unlink(missing_ok=True)
        if old:
            path.write_text(old)
        line += 1
        done = not _interrupted_at(line, lambda: write_text_file(str(path), TEXT))
        found = path.read_text() if path.exists() else ""
        assert (found in (old, TEXT), ["out"] if found else []) == (True, listing(folder / "sub"))
    assert line > 10
    assert TEXT == found


def _interrupted_at(line, run):
    """Whether Ctrl-C came at the n-th line that `cli.output` runs."""
    left = line

    def trace(frame, event, _):
        nonlocal left
        if not frame.f_code.co_filename.endswith("cli/output.py"):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


TARGETS = {
    ("--html", "."): "it is a folder",
    ("--json", "sub"): "it is a folder",
    ("--json", "sub/"): "it is a folder",
    ("--json", "new/"): "it is a folder",
    ("--json", ""): "it is a folder",
    ("--html", "no/plan.html"): "there is no folder ",
    ("--json", "plan.json/x"): "there is no folder ",
    ("--json", "out", "--html", "sub/../out"): "--json and --html are both 'out'",
}


@pytest.mark.parametrize("options", TARGETS, ids=" ".join)
def test_what_cannot_be_a_file_is_refused_before_any_work(options, folder, capsys):
    """Before the model is even imported."""
    (folder / "never_imported.py").write_text("raise SystemError('imported')")
    code = main(["plan", "never_imported:make", "--mesh", "x=2", *options])
    out, err = capsys.readouterr()

    assert (2, "") == (code, out)
    assert TARGETS[options] in err
    assert "SystemError" not in err
    assert ["never_imported.py", "plan.json", "sub"] == listing(folder)


def test_a_dash_is_stdout(folder, capsys):
    """It has the file and nothing else; the table goes to stderr."""
    assert (0, TEXT, TABLE) == run(capsys, "--json", "-")
    assert (0, PLAN.to_html(), TABLE) == run(capsys, "--html", "-")
    assert ["plan.json", "sub"] == listing(folder)


def command(line, **options):
    """A line for bash, in which `layoutmap` is `python -m layoutmap`; `pipefail`, so that its exit code is seen."""
    script = f'set -o pipefail; layoutmap() {{ "{sys.executable}" -m layoutmap "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, timeout=120, **{"env": {**os.environ}, **options}
    )


def test_a_reader_that_has_enough_ends_it_quietly(folder):
    """With the exit code that a shell gives to what SIGPIPE has ended."""
    read, write_end = os.pipe()
    os.close(read)
    for arguments in (["plan", "plan.json"], ["schema"], ["--help"]):
        ran = subprocess.run(
            [sys.executable, "-m", "layoutmap", *arguments],
            stdout=write_end,
            stderr=subprocess.PIPE,
            timeout=120,
        )
        assert (141, b"") == (ran.returncode, ran.stderr)
    os.close(write_end)


def test_an_output_that_takes_nothing_is_no_success(folder):
    """Nothing was printed, so the exit code is not 0; one line says why."""
    full, closed = command("layoutmap plan plan.json > /dev/full"), command("layoutmap plan plan.json >&-")

    assert (2, b"layoutmap: No space left on device\n") == (full.returncode, full.stderr)
    assert (2, b"layoutmap: the output is closed\n") == (closed.returncode, closed.stderr)


def test_a_terminal_of_ascii_has_escapes(folder):
    """A name that its encoding lacks does not end the command; a file is UTF-8 all the same."""
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    table = command("layoutmap plan plan.json", env=env)
    written = command("layoutmap plan plan.json --json - 2> table", env=env)

    assert (0, TABLE.encode("ascii", "backslashreplace")) == (table.returncode, table.stdout)
    assert (0, TEXT) == (written.returncode, written.stdout.decode("utf-8"))


def test_stdout_has_other_names(folder):
    """`/dev/stdout` in a file: the file has the plan's JSON, and not a table over it."""
    assert 0 == command("layoutmap plan plan.json --json /dev/stdout > out").returncode
    assert TEXT == (folder / "out").read_text()


def test_ctrl_c_is_one_line(folder):
    """In a long import or plan: exit code 130, and no traceback."""
    (folder / "slow.py").write_text("import sys, time\nprint('now', flush=True)\ntime.sleep(100)\n")
    # A shell's background jobs ignore Ctrl-C, and so would what they start.
    heeding = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    heeding += "from layoutmap.cli.command import run; sys.exit(run())"
    with subprocess.Popen(
        [sys.executable, "-c", heeding, "plan", "slow:make", "--mesh", "x=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert ["layoutmap: planning slow:make\n", "now\n"] == [process.stderr.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)

    assert (130, "", "layoutmap: interrupted\n") == (process.returncode, out, err)
